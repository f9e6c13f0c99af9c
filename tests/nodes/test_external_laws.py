"""The laws of the loader for streams that make their own steps, in any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep import DataPlane, LoaderConfig, build_loader
from evenstep.nodes import StepBuilder
from evenstep.testing import SimulatedWorld

SEQ_LEN = 16


class Stream:
    """Samples that say which they are; all ranks have as many steps."""

    def __init__(self, lengths: list[int], rank: int) -> None:
        self.lengths, self.rank = lengths, rank

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for k, n in enumerate(self.lengths):
            yield {"who": (self.rank, k), "tokens": n}


def pack(samples: list[Any], seq_len: int) -> dict[str, Any]:
    assert sum(sample["tokens"] for sample in samples) <= seq_len
    return {"who": [tuple(sample["who"]) for sample in samples]}


def collate(rows: list[Any]) -> dict[str, Any]:
    return {"rows": [row.get("who", []) for row in rows]}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_laws_hold_for_any_stream_in_any_layout(data: st.DataObject) -> None:
    dp_size = data.draw(st.sampled_from([1, 2, 3]), "dp_size")
    size, steps = data.draw(st.sampled_from([1, 2]), "size"), data.draw(st.integers(1, 3), "steps")
    lengths = data.draw(st.lists(st.integers(0, SEQ_LEN), min_size=2, max_size=40), "lengths")
    lengths[0] = max(1, lengths[0])
    look_ahead = data.draw(st.integers(1, 8), "look_ahead")
    config = LoaderConfig(
        seq_len=SEQ_LEN,
        micro_batch_size=size,
        balance_window=data.draw(st.sampled_from([None, 1, 2]), "window"),
        exchange=data.draw(st.sampled_from(["micro_batch", "window"]), "exchange"),
        host_prefetch=data.draw(st.sampled_from([0, 2, None]), "host_prefetch"),
        collectives=data.draw(st.sampled_from(["auto", "caller"]), "collectives"),
        resume=data.draw(st.sampled_from(["step", "micro_batch"]), "resume"),
    )
    cut_at = data.draw(st.floats(0, 1), "cut")

    def loader_of(plane: DataPlane) -> Any:
        stream = Stream(lengths, plane.topology.dp_rank)
        source = StepBuilder(
            stream, SEQ_LEN, size * steps, look_ahead=look_ahead, metadata_fn=lambda sample: sample["tokens"]
        )
        return build_loader(
            source, plane, config, metadata_fn=lambda sample: sample["tokens"], pack=pack, collate=collate
        )

    def whole(plane: DataPlane) -> tuple[list[Any], list[Any]]:
        batches, states = [], []
        with loader_of(plane) as loader:
            states.append(loader.state_dict())
            for batch in loader:
                assert loader.state_dict() == loader.state_dict()
                batches.append((batch["info"].step, batch["info"].micro_batch, batch["rows"]))
                states.append(loader.state_dict())
        return batches, states

    world = SimulatedWorld(dp_size)
    runs = world.run(whole)
    # Every rank takes as many micro-batches, and every sample with tokens is in one row of one rank.
    assert len({tuple(batch[:2] for batch in batches) for batches, _ in runs}) == 1
    found = Counter(who for batches, _ in runs for *_, rows in batches for row in rows for who in row)
    assert found == Counter({(r, k): 1 for r in range(dp_size) for k, n in enumerate(lengths) if n})
    for _, states in runs:
        bare = [{key: value for key, value in state.items() if key != "source"} for state in states]
        assert bare == [{key: value for key, value in s.items() if key != "source"} for s in runs[0][1]]
    cut = int(cut_at * (len(runs[0][1]) - 1))

    def rest(plane: DataPlane) -> list[Any]:
        with loader_of(plane) as loader:
            loader.load_state_dict(runs[plane.topology.rank][1][cut])
            return [(batch["info"].step, batch["info"].micro_batch, batch["rows"]) for batch in loader]

    begin = cut if config.resume == "micro_batch" else cut - cut % steps
    for (batches, _), again in zip(runs, world.run(rest), strict=True):
        assert again == batches[begin:]
