"""How ranks talk: the only place that touches torch.distributed."""

from evenstep.comm.batch_spec import BatchSpec, TensorSpec
from evenstep.comm.plane import DataPlane

__all__ = ["BatchSpec", "DataPlane", "TensorSpec"]
