"""Document lengths to measure on: two real data sets as quantiles, so that no file is needed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["LONG_CONTEXT", "PROLONG", "QUANTILES", "draw_from"]

# Every 50th of the first 98 %, then the tail, which is where the work is.
QUANTILES = np.concatenate((np.arange(0, 0.98, 0.02), np.arange(0.98, 0.999, 0.002), [0.999, 0.9995, 1.0]))

# A long-context pre-training mix: 99,519 documents, digitised from the figure of the WLB-LLM paper (OSDI 2025) by the
# DistCA repository (Apache-2.0).
LONG_CONTEXT = (
    1, 129, 256, 386, 518, 646, 772, 897, 1027, 1154, 1283, 1414, 1542, 1674, 1802, 1932, 2065, 2195, 2322,
    2454, 2582, 2711, 2840, 2975, 3104, 3227, 3353, 3480, 3605, 3731, 3861, 3990, 4116, 4248, 4382, 4514,
    4644, 4767, 4897, 5025, 5156, 5281, 5407, 5536, 5657, 5784, 5917, 6045, 6173, 10078, 11181, 12213,
    15114, 18561, 26058, 38054, 56080, 78661, 99303, 119794, 122617, 124913,
)  # fmt: skip

# A sample of the ProLong long-context mix: 77,932 documents.
PROLONG = (
    575, 715, 776, 826, 872, 919, 962, 1004, 1046, 1089, 1130, 1173, 1215, 1259, 1303, 1347, 1392, 1440,
    1488, 1540, 1594, 1651, 1711, 1775, 1839, 1914, 1993, 2074, 2162, 2259, 2362, 2472, 2591, 2725, 2861,
    3018, 3185, 3374, 3569, 3788, 4050, 4336, 4662, 5037, 5472, 6051, 6754, 7745, 9208, 12309, 12818, 13470,
    14161, 14996, 16270, 17670, 19753, 24170, 32976, 47398, 74672, 340149,
)  # fmt: skip


def draw_from(
    quantiles: tuple[int, ...], generator: np.random.Generator, size: int, most: int
) -> npt.NDArray[np.int64]:
    """``size`` lengths of the distribution with ``quantiles`` at `QUANTILES`, cut at ``most``; int64 ``[size]``."""
    lengths = np.interp(generator.random(size), QUANTILES, quantiles)
    return np.clip(np.rint(lengths), 1, most).astype(np.int64)
