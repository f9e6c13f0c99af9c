"""Corpora as they lie on disks, as map-style datasets that know their lengths: the METADATA graph for free.

Each has ``lengths`` (int64 ``[n]``), to pass as ``metadata=`` and to a `TokenBudgetSampler`; `TextFolder` only where bytes
are its tokens. `SplitDocuments` makes pieces of documents that are longer than a row, of these and any other dataset.
Indices are 0 to ``len - 1``. A negative one raises IndexError instead of counting from the end: it comes from a sampler with a
bug, or from a -1 that stands for nothing. (`HuggingFaceDataset` takes what its library takes.)
"""

from evenstep.datasets.hugging_face import HuggingFaceDataset
from evenstep.datasets.indexed import IndexedDataset
from evenstep.datasets.split import SplitDocuments
from evenstep.datasets.text_folder import TextFolder
from evenstep.datasets.token_array import TokenArray

__all__ = ["HuggingFaceDataset", "IndexedDataset", "SplitDocuments", "TextFolder", "TokenArray"]
