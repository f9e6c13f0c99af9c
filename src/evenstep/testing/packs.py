"""Shows that a user's pack and collate poison no model, or the smallest samples with which they do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from evenstep.packing import padding_row
from evenstep.testing.batch_properties import check_batch
from evenstep.testing.pack_properties import Broken, Conventions, Expected, check_row, expected_row
from evenstep.testing.strategies import DEFAULT_SEQ_LEN, sample_lists
from evenstep.testing.values import overwrite, show, show_samples

__all__ = ["PackCheckFailed", "check_pack"]

Sample = Mapping[str, Any]
Pack = Callable[[list[Any], int], Any]
Collate = Callable[[list[Any]], Any]


class PackCheckFailed(AssertionError):  # noqa: N818 - reads as what it is in a test report
    """A pack or collate breaks a property; the message shows the smallest samples found.

    Attributes:
        property: The property, for example ``"label leak"``.
        samples: The samples of each row.
    """

    def __init__(self, message: str, name: str, samples: list[list[Sample]]) -> None:
        super().__init__(message)
        self.property = name
        self.samples = samples


def check_pack(
    pack: Pack,
    collate: Collate | None = None,
    *,
    samples: st.SearchStrategy[Sample] | Sequence[Sample] | None = None,
    seq_len: int = DEFAULT_SEQ_LEN,
    ignore_index: int = -100,
    shifted: bool = False,
    max_examples: int = 200,
) -> None:
    """Runs ``pack(samples, seq_len)`` and ``collate(rows)`` on random samples and checks what must be true.

    Of a row: it has the tokens of its samples, all and in order; labels stay inside their document and padding has
    none; positions start again in every document; ``cu_seqlens``, ``max_seqlen`` and ``num_tokens``, and where there are
    such ``document_ids``, ``seq_idx``, ``attention_mask``, ``cu_seq_lens_q`` and ``max_length_q``, say where the
    documents are; every field of the samples is there and as long as the tokens; it shares no storage with the samples,
    nor with the row packed before it. Of a batch, padded or flat: the same for all its rows, one without samples among them.

    Args:
        pack: Function under test; never called without samples, as in evenstep.
        collate: Function under test; None checks rows only. With it, rows may be of any type.
        samples: A Hypothesis strategy of one sample, or samples of your data set; None: ``strategies.samples``,
            mappings of tensors ``input_ids``, now and then ``labels``, and ``loss_weights``.
        seq_len: Tokens of a row; short rows find bugs sooner.
        ignore_index: Label without a loss.
        shifted: The label convention of ``pack``, as in ``pack_text``.
        max_examples: Rows of samples to try.

    Raises:
        PackCheckFailed: A property does not hold, or ``pack`` or ``collate`` raises.
    """
    conventions = Conventions(ignore_index, shifted)
    rows = st.lists(
        sample_lists(_strategy(samples, seq_len), seq_len=seq_len),
        min_size=1,
        max_size=1 if collate is None else 3,
    )
    last: list[list[Sample]] = []
    seen: list[tuple[Broken, list[list[Sample]]]] = []

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        print_blob=False,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(rows)
    def battery(drawn: list[list[Sample]]) -> None:
        drawn = [row for row in drawn if row]
        last[:] = drawn
        if drawn:
            try:
                _check(pack, collate, drawn, seq_len, conventions)
            except Broken as broken:
                seen[:] = [(broken, drawn)]
                raise

    try:
        battery()
    except Broken as broken:
        raise PackCheckFailed(_tell(broken, last, seq_len), broken.property, list(last)) from broken.__cause__
    except Flaky:
        if not seen:
            raise
        first, failing = seen[0]
        told = Broken(
            first.property,
            f"{first.detail} (once, and not again with the same samples: they are not packed the same way each time, so "
            "fix what is drawn at random, for example a seed, and check again)",
        )
        raise PackCheckFailed(_tell(told, failing, seq_len), told.property, failing) from first.__cause__


def _strategy(
    samples: st.SearchStrategy[Sample] | Sequence[Sample] | None, seq_len: int
) -> st.SearchStrategy[Sample] | None:
    if samples is None or isinstance(samples, st.SearchStrategy):
        return samples
    fitting = [sample for sample in samples if 0 < len(sample["input_ids"]) <= seq_len]
    if not fitting:
        raise ValueError(
            f"none of the {len(samples)} samples has between 1 and seq_len={seq_len} tokens, so there is nothing to pack; "
            "give shorter samples or a greater seq_len"
        )
    return st.sampled_from(fitting)


def _check(
    pack: Pack, collate: Collate | None, drawn: list[list[Sample]], seq_len: int, conventions: Conventions
) -> None:
    packed: list[Any] = []
    expected: list[Expected] = []
    for samples in drawn:
        before = copy.deepcopy(samples)
        expected.append(expected_row(before, conventions))
        row = _call("pack", pack, samples, seq_len)
        if show(samples) != show(before):
            raise Broken(
                "changed samples",
                f"pack changed its samples, which the dataset may hand out again: {show(samples)}",
            )
        if collate is None or isinstance(row, Mapping):
            check_row(row, expected[-1], seq_len, conventions)
        packed.append(row)
    if collate is None or isinstance(packed[0], Mapping):
        # Rows that only their collate understands may be the samples themselves.
        _check_storage(pack, drawn, seq_len)
    if collate is None:
        return
    _check_collate(collate, packed, expected, seq_len, conventions)


def _check_storage(pack: Pack, drawn: list[list[Sample]], seq_len: int) -> None:
    samples = copy.deepcopy(drawn[0])
    row = _call("pack", pack, samples, seq_len)
    held = show(row)
    # A buffer that pack uses again shows with other values of the same shape.
    _call("pack", pack, [_other(sample) for sample in samples], seq_len)
    if show(row) != held:
        raise Broken("shared storage", "packing the next row changed the row packed before it")
    before = show(samples)
    overwrite(row)
    if show(samples) != before:
        raise Broken("shared storage", "writing into the row changes the samples: they share storage with it")


def _other(sample: Sample) -> Sample:
    """A sample of the same shape with other tokens."""
    other = dict(copy.deepcopy(sample))
    ids = other["input_ids"]
    other["input_ids"] = [int(t) + 1 for t in ids] if isinstance(ids, list | tuple) else ids + 1
    return other


def _check_collate(
    collate: Collate, packed: list[Any], expected: list[Expected], seq_len: int, conventions: Conventions
) -> None:
    like = packed[0] if isinstance(packed[0], Mapping) else None
    empty = padding_row(like, seq_len=seq_len, ignore_index=conventions.ignore_index)
    nothing = expected_row([], conventions)
    for rows, right in ((packed, expected), ([*packed, empty], [*expected, nothing])):
        held = copy.deepcopy(rows)
        try:
            batch = _call("collate", collate, held)
            check_batch(batch, rows, right, conventions)
        except Broken as broken:
            if len(rows) == len(packed):
                raise
            raise Broken(
                broken.property, f"with a row without samples in the batch, {broken.detail}"
            ) from broken.__cause__
        before = show(batch)
        overwrite(held)
        if show(batch) != before:
            raise Broken(
                "shared storage", "writing into the rows changes the batch: they share storage with it"
            )


def _call(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise Broken(f"{name} raises", f"{name} raised {type(error).__name__}: {error}") from error


def _tell(broken: Broken, drawn: list[list[Sample]], seq_len: int) -> str:
    rows = "\n".join(f"  row {k}:\n{show_samples(samples)}" for k, samples in enumerate(drawn))
    return f"{broken.property}: {broken.detail}\nThe smallest samples found, for seq_len={seq_len}:\n{rows}"
