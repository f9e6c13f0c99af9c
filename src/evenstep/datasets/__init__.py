"""Corpora as they lie on disks, as map-style datasets that know their lengths: the METADATA graph for free.

Each has ``lengths`` (int64 ``[n]``), to pass as ``metadata=`` and to a `TokenBudgetSampler`.
"""

from evenstep.datasets.hugging_face import HuggingFaceDataset
from evenstep.datasets.indexed import IndexedDataset
from evenstep.datasets.token_array import TokenArray

__all__ = ["HuggingFaceDataset", "IndexedDataset", "TokenArray"]
