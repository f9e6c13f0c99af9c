"""The windows that planners are compared on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evenstep.bench.lengths import LONG_CONTEXT, PROLONG, draw_from

__all__ = ["CASES", "COST_MODEL", "Case", "Window"]

Int = npt.NDArray[np.int64]
COST_MODEL = "24576 L + L^2 (a dense 4096-wide transformer, in units of its attention FLOPs)"


@dataclass(frozen=True, slots=True)
class Window:
    """One window to plan: tokens and costs int64 ``[n]``, and a feasible reference layout or None."""

    tokens: Int
    costs: Int
    reference: Int | None


@dataclass(frozen=True, slots=True)
class Case:
    """A distribution of lengths and a layout of ranks and micro-batches, one row each.

    Attributes:
        name: Short name.
        lengths: ``(generator, count) -> int64 [count]``.
        dp_size: Data-parallel ranks.
        micro_batches: Micro-batches of the window.
        seq_len: Tokens of a row.
        fill: Share of all places that tokens take; 0 draws ``samples`` instead and sets no limit.
        samples: Samples of a window without limit.
        planted: Documents of a row. Rows are then cut at random into so many, so that a packing exists.
    """

    name: str
    lengths: Callable[[np.random.Generator, int], Int]
    dp_size: int
    micro_batches: int
    seq_len: int
    fill: float
    samples: int = 0
    planted: int = 0

    @property
    def rows(self) -> int:
        """Rows of the window."""
        return self.dp_size * self.micro_batches

    def draw(self, seed: int) -> Window:
        """The window of ``seed``: lengths until the fill is reached, packed first-fit decreasing, rows shuffled."""
        generator = np.random.default_rng((seed, self.rows, self.seq_len))
        if not self.fill:
            tokens = self.lengths(generator, self.samples)
            return Window(tokens, linear_quadratic(tokens), None)
        if self.planted:
            return self._plant(generator)
        places = int(self.fill * self.rows * self.seq_len)
        tokens = self.lengths(generator, 4 * self.rows)
        while tokens.sum() <= places:
            tokens = np.concatenate((tokens, self.lengths(generator, len(tokens))))
        tokens = tokens[: max(int(np.searchsorted(np.cumsum(tokens), places, side="right")), 1)]
        row = _pack(tokens, self.seq_len)
        if int(row.max()) >= self.rows:
            return Window(tokens, linear_quadratic(tokens), None)
        return Window(tokens, linear_quadratic(tokens), generator.permutation(self.rows)[row])

    def _plant(self, generator: np.random.Generator) -> Window:
        used = int(self.fill * self.seq_len)
        cuts = [np.sort(generator.permutation(used - 1)[: self.planted - 1] + 1) for _ in range(self.rows)]
        parts = [np.diff(cut, prepend=0, append=used) for cut in cuts]
        order = generator.permutation(self.rows * self.planted)
        tokens = np.concatenate(parts)[order]
        return Window(tokens, linear_quadratic(tokens), order // self.planted)


def linear_quadratic(tokens: Int) -> Int:
    """`COST_MODEL` in exact integers."""
    return 24576 * tokens + tokens * tokens


def _pack(tokens: Int, seq_len: int) -> Int:
    free = np.full(len(tokens), seq_len, dtype=np.int64)
    row = np.zeros(len(tokens), dtype=np.int64)
    for sample in np.argsort(-tokens, kind="stable").tolist():
        row[sample] = int((free >= tokens[sample]).argmax())
        free[row[sample]] -= tokens[sample]
    return row


def _real(quantiles: tuple[int, ...], most: int) -> Callable[[np.random.Generator, int], Int]:
    return lambda generator, size: draw_from(quantiles, generator, size, most)


def _lognormal(generator: np.random.Generator, size: int) -> Int:
    return np.clip(generator.lognormal(7, 1.2, size), 1, 8192).astype(np.int64)


def _gamma(generator: np.random.Generator, size: int) -> Int:
    return np.clip(generator.gamma(5, 20, size), 1, 8192).astype(np.int64)


def _one_giant(generator: np.random.Generator, size: int) -> Int:
    tokens = generator.integers(200, 1200, size)
    tokens[:1] = 8192
    return tokens


def _equal(generator: np.random.Generator, size: int) -> Int:  # noqa: ARG001 - nothing to draw
    return np.full(size, 1000, dtype=np.int64)


def _bimodal(generator: np.random.Generator, size: int) -> Int:
    images = generator.random(size) < 0.3
    return np.where(images, generator.integers(2000, 4000, size), generator.integers(20, 600, size))


_CAPPED = _real(LONG_CONTEXT, 32_768)
_NO_LIMIT = 1 << 40

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("named", _CAPPED, 64, 8, 32_768, 0.92),
        Case("named-98", _CAPPED, 64, 8, 32_768, 0.98),
        Case("dp8", _CAPPED, 8, 8, 32_768, 0.92),
        Case("prolong", _real(PROLONG, 65_536), 16, 8, 65_536, 0.92),
        *(
            Case(f"wlb-{window}", _real(LONG_CONTEXT, 131_072), 4, window, 131_072, 0.92)
            for window in (1, 2, 4, 8)
        ),
        Case("lognormal", _lognormal, 32, 4, 8192, 0.92),
        Case("lognormal-98", _lognormal, 32, 4, 8192, 0.98),
        Case("lognormal-98-dp8", _lognormal, 8, 1, 8192, 0.98),
        *(Case(f"planted-{k}", _equal, 8, 1, 8192, 0.98, planted=k) for k in (2, 3, 4)),
        *(Case(f"planted-{k}-dp32", _equal, 32, 1, 8192, 0.98, planted=k) for k in (2, 3, 4)),
        Case("gamma", _gamma, 32, 4, 8192, 0.92),
        Case("one-giant", _one_giant, 16, 4, 8192, 0.92),
        Case("equal", _equal, 16, 4, 8192, 0.92),
        Case("image-text", _bimodal, 32, 4, 8192, 0.92),
        Case("256-to-8", _CAPPED, 8, 1, _NO_LIMIT, 0, 256),
        Case("1024-to-32", _CAPPED, 32, 1, _NO_LIMIT, 0, 1024),
        Case("8192-to-256", _CAPPED, 256, 1, _NO_LIMIT, 0, 8192),
        Case("8572-to-1024", _CAPPED, 1024, 1, _NO_LIMIT, 0, 8572),
    )
}
