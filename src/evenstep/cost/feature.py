"""Costs of what is no token: patches of an image, seconds of audio."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenstep.cost.model import CostModel, LinearQuadraticCost, check_model
from evenstep.cost.terms import checked_count
from evenstep.samples import MetadataTable

__all__ = ["FeatureCost"]

_IDENTITY = LinearQuadraticCost(1.0, 0.0)


@dataclass(frozen=True, slots=True)
class FeatureCost:
    """A cost model of a feature instead of the tokens: patches of a vision encoder, seconds of audio.

    Attributes:
        feature: Name of the column. A sample without it costs nothing, as does a table without the column
            (a window of text only).
        model: Applied to the feature as if it were tokens (rounded to whole ones); by default the cost is
            the feature itself.
        group: Size of the documents that the feature falls into, such as patches per image or per attention
            window; None means one document a sample.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: ``feature`` is empty or ``group`` is not positive.
    """

    feature: str
    model: CostModel = _IDENTITY
    group: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.feature, str):
            raise TypeError(f"feature is {self.feature!r}, expected the name of a feature column")
        if not self.feature:
            raise ValueError("feature is '': no column has that name; give the name that metadata_fn uses")
        check_model("model", self.model)
        if self.group is not None:
            object.__setattr__(self, "group", checked_count("group", self.group, least=1))

    @property
    def stages(self) -> tuple[str, ...]:
        """One stage, named like the feature."""
        return (self.feature,)

    @property
    def padding(self) -> float:
        """Rows are padded with text tokens, which have no feature."""
        return 0.0

    def cost(self, table: MetadataTable) -> npt.NDArray[np.float64]:
        """float64 ``[n]``, in the unit of ``model``.

        Raises:
            ValueError: A value of the feature is negative, infinite or NaN.
        """
        column = table.features.get(self.feature)
        if column is None:
            return np.zeros(len(table))
        bad = ~(np.isfinite(column) & (column >= 0))
        if bad.any():
            first = int(np.argmax(bad))
            raise ValueError(
                f"feature {self.feature!r} of sample {first} of the table is {float(column[first])!r}: it has no "
                "cost; metadata_fn must return finite numbers that are not negative"
            )
        amounts = np.rint(column).astype(np.int64)
        return self.model.cost(_as_tokens(amounts, self.group))


def _as_tokens(amounts: npt.NDArray[np.int64], group: int | None) -> MetadataTable:
    table = MetadataTable.from_tokens(amounts)
    if group is None:
        return table
    counts = -(-amounts // group)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    documents = np.full(offsets[-1], group, dtype=np.int64)
    some = counts > 0
    documents[offsets[1:][some] - 1] = (amounts - (counts - 1) * group)[some]
    return MetadataTable(table.tokens, {}, table.loss_tokens, documents, offsets)
