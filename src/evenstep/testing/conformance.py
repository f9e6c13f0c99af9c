"""What every node of a graph owes its neighbours, checked on any node: ours, yours, the stock ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torchdata.nodes import BaseNode

from evenstep.nodes.stage import upstream
from evenstep.nodes.stock import reads_ahead
from evenstep.testing.equality import assert_same
from evenstep.testing.gaps import info_of, left_out

__all__ = ["assert_node_conforms"]

Build = Callable[[], "BaseNode[Any]"]


def assert_node_conforms(
    build: Build, *, build_failing: Build | None = None, max_items: int = 1000, items: int | None = None
) -> None:
    """Check the contract of a node.

    - Its state, taken at every cut (also before the first item and after the end), survives JSON, and restored in
      a fresh node gives the rest identically, bit for bit, and the same states.
    - Taking the state changes nothing and is repeatable; the state keeps its shape.
    - The end is sticky, and after it comes another epoch, which can be restored too; so it can from the middle. The
      stock nodes that read ahead in threads do not leave an epoch in its middle as they should: see `HostPrefetch`.
    - An error is sticky, and the same object.
    - No batch is left out, where that can be known: their ``info`` counts on from one to the next, and an epoch ends
      with a step. Of items that say nothing, a node may be a filter; give their number as ``items``.

    On several ranks call it on all of them at once, for example in `SimulatedWorld.run`. A node behind the planner
    resumes inside a step only with ``resume="micro_batch"``.

    Args:
        build: Makes a fresh node; called many times; a node's ``close()`` is called where it has one.
        build_failing: Makes one that raises some `Exception` instead of an item.
        max_items: More items in an epoch than this are taken for an endless stream.
        items: How many items an epoch has, for example as many as the source of a node that gives one for each; None:
            any number.

    Raises:
        AssertionError: The node breaks the contract; the message says how.
    """
    nodes: list[BaseNode[Any]] = []

    def fresh() -> BaseNode[Any]:
        nodes.append(build())
        return nodes[-1]

    try:
        _check(fresh, max_items, items)
        if build_failing is not None:
            nodes.append(build_failing())
            _check_failure(nodes[-1], max_items)
    finally:
        for node in nodes:
            if hasattr(node, "close"):
                node.close()


def _check(fresh: Build, max_items: int, wanted: int | None) -> None:
    node = fresh()
    node.reset(None)
    items, states = _run(node, max_items)
    _check_whole(items, wanted, "the epoch")
    _check_states(states)
    _check_taking_state(fresh(), items)
    for cut, state in enumerate(states):
        other = fresh()
        other.reset(json.loads(json.dumps(state)))
        _check_rest(other, items, states, cut, max_items)
    _check_next_epoch(node, fresh, items, states, max_items, wanted)
    _check_epoch_from_the_middle(fresh, states, max_items)


def _run(node: BaseNode[Any], max_items: int) -> tuple[list[Any], list[dict[str, Any]]]:
    """The items of the epoch, and the state at every cut."""
    items, states = [], [node.state_dict()]
    while True:
        try:
            items.append(next(node))
        except StopIteration:
            break
        states.append(node.state_dict())
        assert len(items) <= max_items, f"the epoch has more than {max_items} items; is it endless?"
    for _ in range(2):
        try:
            item = next(node)
        except StopIteration:
            continue
        raise AssertionError(f"the end is not sticky: after StopIteration came {item!r}")
    return items, states


def _check_whole(items: list[Any], wanted: int | None, epoch: str, before: list[Any] | None = None) -> None:
    """Nothing is left out of ``items``, which follow those ``before``."""
    if wanted is not None and len(items) != wanted:
        raise AssertionError(
            f"{epoch} has {len(items)} items, expected {wanted}: the node loses or adds some"
        )
    gap = left_out([*(before or [])[-1:], *items])
    if gap is not None:
        raise AssertionError(
            f"{gap}: the node leaves batches out, and other ranks wait for them in the training step. Leave out samples "
            "instead, in the dataset or the sampler"
        )


def _check_states(states: list[dict[str, Any]]) -> None:
    for cut, state in enumerate(states):
        try:
            restored = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise AssertionError(f"the state after item {cut} is no JSON: {error}: {state!r}") from error
        assert restored == state, (
            f"the state after item {cut} does not survive JSON: {state!r} became {restored!r}"
        )
        assert _shape(state) == _shape(states[0]), (
            f"the state after item {cut} has another shape than at the beginning: {state!r}, {states[0]!r}"
        )


def _shape(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _shape(value) for key, value in state.items()}
    return [_shape(value) for value in state] if isinstance(state, list) else None


def _check_taking_state(node: BaseNode[Any], items: list[Any]) -> None:
    """The same items come whether the state is taken never, once or twice."""
    node.reset(None)
    for k, expected in enumerate(items):
        assert_same(
            next(node), expected, f"item {k} of a second node, whose state was not taken before each item"
        )
        if k % 2:
            first, second = node.state_dict(), node.state_dict()
            assert first == second, f"taken twice after item {k}, the state differs: {first!r}, {second!r}"
    try:
        item = next(node)
    except StopIteration:
        return
    raise AssertionError(
        f"a second node, whose state was not taken before each item, goes on after the {len(items)} items of the first: "
        f"{item!r}"
    )


def _check_rest(
    node: BaseNode[Any],
    items: list[Any],
    states: list[dict[str, Any]],
    cut: int,
    max_items: int,
    *,
    then: str = "",
) -> None:
    """``node``, restored after item ``cut`` or where ``then`` says, goes on as ``items`` and ``states`` do."""
    rest, after = _run(node, max_items)
    restored = then or f"restored after item {cut}"
    if len(rest) != len(items) - cut:
        raise AssertionError(
            f"{restored}{'' if then else f' of {len(items)}'}, {len(rest)} items came, expected {len(items) - cut}"
            + _begun_again(rest, items, cut)
        )
    for k, (item, expected) in enumerate(zip(rest, items[cut:], strict=True)):
        assert_same(item, expected, f"item {cut + k} of a node {restored}")
    for k, (state, wanted) in enumerate(zip(after, states[cut:], strict=True)):
        assert state == wanted, f"the state after item {cut + k} of a node {restored}: {state}, {wanted}"


def _begun_again(rest: list[Any], items: list[Any], cut: int) -> str:
    """A hint where ``rest`` are the items from the beginning of the step that was cut, as ``resume="step"`` has it."""
    first = len(items) - len(rest)
    if not 0 <= first < cut:
        return ""
    step = _step_of(items[first])
    if step is None or any(_step_of(item) != step for item in items[first:cut]):
        return ""
    try:
        for item, expected in zip(rest, items[first:], strict=True):
            assert_same(item, expected, "item")
    except AssertionError:
        return ""
    return (
        f": step {step} began again at its first micro-batch, as resume='step' says; the node may be right. Use "
        "LoaderConfig(resume='micro_batch') for this test"
    )


def _step_of(item: Any) -> Any:
    """The step of a batch or of an item before the packer, if it says."""
    return getattr(info_of(item), "step", None)


def _check_next_epoch(
    node: BaseNode[Any],
    fresh: Build,
    first: list[Any],
    states: list[dict[str, Any]],
    max_items: int,
    wanted: int | None,
) -> None:
    node.reset(None)
    items, second = _run(node, max_items)
    assert items, "the epoch after the first one is empty"
    _check_whole(items, wanted, "the epoch after the first one", first)
    other = fresh()
    other.reset(states[-1])
    other.reset(None)
    _check_rest(other, items, second, 0, max_items, then="restored at the end of its epoch and reset")
    middle = len(items) // 2
    other = fresh()
    other.reset(second[middle])
    _check_rest(other, items, second, middle, max_items)


def _check_epoch_from_the_middle(fresh: Build, states: list[dict[str, Any]], max_items: int) -> None:
    """Leaving an epoch half-way leads to the epoch after it, wherever a stage that runs ahead has got to."""
    node = fresh()
    node.reset(None)
    half = min(len(states) // 2 + 1, len(states) - 1)  # not the middle itself, where most windows end
    for _ in range(half):
        next(node)
    node.reset(None)
    items, second = _run(node, max_items)
    other = fresh()
    other.reset(states[half])
    other.reset(None)
    try:
        _check_rest(other, items, second, 0, max_items, then=f"restored after item {half} and reset")
    except AssertionError as error:
        stock = next((type(n).__name__ for n in upstream(node) if reads_ahead(n)), None)
        raise AssertionError(
            f"{error}, as of one that was reset after it had handed out item {half}: reset() without a state begins the "
            "epoch after the last item handed out, whatever has been read ahead. "
            + (
                "Make it the same in both, as HostPrefetch does."
                if stock is None
                else f"torchdata's {stock} cannot: it counts what its thread has read. Use HostPrefetch in its place."
            )
        ) from error


def _check_failure(node: BaseNode[Any], max_items: int) -> None:
    node.reset(None)
    for _ in range(max_items):
        try:
            next(node)
        except StopIteration:
            raise AssertionError("the failing node ended without an error") from None
        except Exception as error:
            first = error
            break
    else:
        raise AssertionError(f"the failing node gave {max_items} items without an error")
    for _ in range(2):
        try:
            item = next(node)
        except Exception as again:
            if again is not first:
                raise AssertionError(
                    f"after {first!r} the node raised {again!r}: an error stays the same object"
                ) from again
            continue
        raise AssertionError(f"the error {first!r} is not sticky: after it came {item!r}")
