"""Small training jobs drawn at random, in any layout: what the laws of the loader are stated about."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from evenstep.build import build_loader
from evenstep.comm.plane import DataPlane
from evenstep.config import LoaderConfig
from evenstep.cursor import Cursor
from evenstep.loader import Loader
from evenstep.plan import Objective
from evenstep.samples import BatchInfo
from evenstep.sampling import MixtureSampler, Sampler, StepSampler, TokenBudgetSampler
from evenstep.testing.world import SimulatedWorld

__all__ = ["DP_SIZES", "Layout", "Seen", "Stream", "jobs", "layouts", "members_by_step", "streams"]

DP_SIZES = (1, 2, 3, 4, 6, 8)
_SEQ_LEN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What is trained on: a dataset of known lengths and the sampler that makes steps of it.

    Attributes:
        kind: ``"step"``, ``"auto"``, ``"tokens"`` or ``"mixture"``.
        lengths: Tokens of each sample; 0 is an empty one.
        rows: Rows of a step; samples for ``"auto"``.
        seq_len: Capacity of a row.
        order, seed, remainder: As the samplers take them.
    """

    kind: str
    lengths: tuple[int, ...]
    rows: int
    seq_len: int = _SEQ_LEN
    order: str = "shuffled"
    seed: int = 0
    remainder: Any = "drop"

    def sampler(self) -> Sampler:
        """A new sampler of this stream."""
        n, rows, seed, rest = len(self.lengths), self.rows, self.seed, self.remainder
        if self.kind == "tokens":
            return TokenBudgetSampler(
                self.lengths,
                rows_per_step=rows,
                seq_len=self.seq_len,
                order=self.order,
                seed=seed,
                remainder="pad" if rest == "pad" else "drop",
            )
        if self.kind == "mixture":
            sizes = [n // 3, n - n // 3]
            return MixtureSampler(
                sizes, [0.4, 0.6], global_batch_size=rows, order=self.order, seed=seed, remainder=rest
            )
        return StepSampler(n, global_batch_size=rows, order=self.order, seed=seed, remainder=rest)

    def steps(self, start: Cursor | None = None) -> Iterator[tuple[Cursor, list[int]]]:
        """The model of every law: each step of an epoch as its beginning and its members, straight from the sampler."""
        sampler = self.sampler()
        cursor = sampler.start() if start is None else start
        while (step := sampler.step_at(cursor)) is not None:
            real = step.indices[step.indices >= 0].tolist()
            yield cursor, sorted(i for i in real if self.lengths[i])
            cursor = step.next_cursor

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index, "length": self.lengths[index]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a stream is trained on.

    Attributes:
        dp, tp: Size of the mesh.
        known: Whether lengths are known ahead (the METADATA graph).
        options: Fields of `LoaderConfig` besides ``seq_len``.
        everybody_reads: Whether tensor-parallel peers help to read.
    """

    dp: int = 1
    tp: int = 1
    known: bool = False
    everybody_reads: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def world(self) -> SimulatedWorld:
        """Ranks for this layout."""
        mesh = {"dp": self.dp, "tp": self.tp} if self.tp > 1 else {"dp": self.dp}
        return SimulatedWorld(
            mesh,
            reader_ranks="all" if self.everybody_reads else None,
            shared_memory=self.options.get("shared_memory", False),
        )

    def config(self, stream: Stream) -> LoaderConfig:
        """The configuration of ``stream`` in this layout."""
        return LoaderConfig(
            seq_len=stream.seq_len,
            accumulation_steps="auto" if stream.kind == "auto" else None,
            reader_ranks="all" if self.everybody_reads else None,
            **self.options,
        )

    def loader(self, stream: Stream, plane: DataPlane, **arguments: Any) -> Loader[Any]:
        """This rank's loader; its batches are ``{"rows": [[index, ...], ...], "info": ...}``.

        Args:
            stream: What is trained on.
            plane: This rank's.
            arguments: Of `build_loader`; ``dataset``, ``config`` and ``sampler`` replace those of the stream.
        """
        return build_loader(
            arguments.pop("dataset", stream),
            plane,
            arguments.pop("config", None) or self.config(stream),
            sampler=arguments.pop("sampler", None) or stream.sampler(),
            metadata=np.array(stream.lengths) if self.known else None,
            metadata_fn=_length,
            pack=_pack,
            collate=_collate,
            **arguments,
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What a training loop saw of one batch, and the state after it."""

    rows: list[list[int]]
    info: BatchInfo
    state: dict[str, Any]

    @classmethod
    def of(cls, batch: Mapping[str, Any], loader: Loader[Any]) -> Seen:
        """Note ``batch``, the last one that ``loader`` gave."""
        return cls(batch["rows"], batch["info"], loader.state_dict())


def members_by_step(ranks: Sequence[Sequence[Seen]]) -> dict[int, list[int]]:
    """Members of each step, sorted, over the micro-batches of all data-parallel ranks."""
    steps: dict[int, Counter[int]] = defaultdict(Counter)
    for seen in ranks:
        for batch in seen:
            steps[batch.info.step].update(index for row in batch.rows for index in row)
    return {step: sorted(found.elements()) for step, found in steps.items()}


def _length(sample: Mapping[str, int]) -> int:
    return sample["length"]


def _pack(samples: list[Any], seq_len: int) -> dict[str, Any]:  # noqa: ARG001 - what a pack is given
    return {"members": [sample["index"] for sample in samples]}


def _collate(rows: list[Any]) -> dict[str, Any]:
    return {"rows": [row.get("members", []) for row in rows]}


@st.composite
def streams(
    draw: st.DrawFn,
    /,
    *,
    kinds: Sequence[str] = ("step", "auto", "tokens", "mixture"),
    rows: Sequence[int] = (24,),
) -> Stream:
    """A stream of two or three steps an epoch.

    Args:
        draw: Given by hypothesis.
        kinds: Samplers to choose from.
        rows: Rows per step to choose from; 24 divides over all of `DP_SIZES`.
    """
    kind, per_step = draw(st.sampled_from(kinds)), draw(st.sampled_from(rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(2 * per_step, 3 * per_step)) * (3 if kind == "tokens" else 1)
    spread = [0.1] if kind == "tokens" else [0.1, 0.3]
    lengths = np.minimum(rng.geometric(draw(st.sampled_from(spread)), n), _SEQ_LEN)
    lengths[rng.random(n) < draw(st.sampled_from([0.0, 0.05]))] = 0
    lengths[: per_step + 1] = np.maximum(lengths[: per_step + 1], 1)
    return Stream(
        kind=kind,
        lengths=tuple(lengths.tolist()),
        rows=per_step,
        order=draw(st.sampled_from(["shuffled", "sequential"])),
        seed=draw(st.integers(0, 2**64 - 1)),
        remainder=draw(st.sampled_from(["drop", "wrap", "pad"])),
    )


@st.composite
def layouts(
    draw: st.DrawFn,
    /,
    stream: Stream,
    *,
    dp_sizes: Sequence[int] = DP_SIZES,
    tp_sizes: Sequence[int] = (1,),
    host_prefetch: Sequence[int | None] = (0, 0, None, 2),
    **fixed: Any,
) -> Layout:
    """A layout that ``stream`` divides over.

    Args:
        draw: Given by hypothesis.
        stream: What is trained on.
        dp_sizes: Data-parallel sizes to choose from.
        tp_sizes: Tensor-parallel sizes to choose from.
        host_prefetch: Values to choose from.
        fixed: Further fields of `LoaderConfig`, as they are.
    """
    dp, tp = draw(st.sampled_from(dp_sizes)), draw(st.sampled_from(tp_sizes))
    per_rank = stream.rows // dp
    micro_batch_size = draw(st.sampled_from([s for s in (1, 2, 3) if per_rank % s == 0]))
    options: dict[str, Any] = {
        "micro_batch_size": micro_batch_size,
        "algorithm": draw(st.sampled_from(["auto", "lpt", "levels", "refine", "reference"])),
        "min_balance_gain": draw(st.sampled_from([0.0, 0.05, 0.9])),
        "objective": Objective(sync=draw(st.sampled_from(["micro_batch", "step"]))),
        "broadcast_plan": draw(st.booleans()),
        "exchange": draw(st.sampled_from(["micro_batch", "window"])),
        "host_prefetch": draw(st.sampled_from(host_prefetch)),
        "collectives": draw(st.sampled_from(["auto", "auto", "caller"])),
        "shared_memory": draw(st.booleans()),
    }
    options.update(fixed)
    if stream.kind != "auto":
        options["balance_window"] = draw(st.sampled_from([None, 1, 2, 3]))
    known = draw(st.booleans())
    return Layout(
        dp=dp,
        tp=tp,
        known=known,
        everybody_reads=tp > 1 and not known and draw(st.booleans()),
        options=options,
    )


@st.composite
def jobs(draw: st.DrawFn, /, **choices: Any) -> tuple[Stream, Layout]:
    """A stream and a layout for it; ``choices`` go to `layouts`."""
    stream = draw(streams())
    return stream, draw(layouts(stream, **choices))
