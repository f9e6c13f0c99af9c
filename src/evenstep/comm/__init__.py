"""How ranks talk: the only place that touches torch.distributed."""

from evenstep.comm.plane import DataPlane

__all__ = ["DataPlane"]
