from __future__ import annotations

from collections.abc import Callable

import pytest

from evenstep.demo.checks import (
    SpeedUp,
    check_ledger,
    check_losses,
    check_promise,
    check_speed,
    core_share,
)
from evenstep.demo.records import StepRecord
from evenstep.demo.resume import Ledger

Make = Callable[..., StepRecord]


def test_speed_up_of_the_steps_that_both_have(make_record: Make) -> None:
    reference = [make_record([[6, 1]], predicted=[[3, 1]], seconds=s) for s in (4.0, 3.0, 9.0)]
    balanced = [make_record([[3, 3]], predicted=[[2, 2]], seconds=s) for s in (2.0, 2.0)]
    speed_up = SpeedUp.of(reference, balanced)
    assert speed_up.predicted == 6 / 4
    assert speed_up.measured == 7 / 4
    assert speed_up.computed == 12 / 6
    assert speed_up.kept == pytest.approx((2 / 1.5 + 1.5 / 1.5) / 2)
    assert speed_up.kept_computed == pytest.approx(2 / 1.5)


def test_one_disturbed_step_does_not_move_what_was_kept(make_record: Make) -> None:
    reference = [make_record([[3, 1]], seconds=3.0) for _ in range(5)]
    balanced = [make_record([[2, 2]], seconds=s) for s in (2.0, 2.0, 20.0, 2.0, 2.0)]
    assert SpeedUp.of(reference, balanced).kept == pytest.approx(1.0)


def speed_up(*, predicted: float = 1.3, kept: float = 1.0, kept_computed: float = 1.0) -> SpeedUp:
    return SpeedUp(predicted, 1.25, 1.28, kept, kept_computed)


@pytest.mark.parametrize(("predicted", "passed"), [(1.2, True), (1.199, False)])
def test_the_promise_must_be_worth_measuring(predicted: float, passed: bool) -> None:
    assert check_promise(speed_up(predicted=predicted)).passed is passed


@pytest.mark.parametrize(("kept", "passed"), [(0.85, True), (0.849, False)])
def test_the_clock_must_confirm_it(kept: float, passed: bool) -> None:
    check = check_speed(speed_up(kept=kept), share=0.9)
    assert check.passed is passed
    assert check.text == f"measured 1.25x; the median step keeps {kept:.0%} of its promise (at least 85%)"


@pytest.mark.parametrize(("kept", "passed"), [(0.85, True), (0.849, False)])
def test_on_a_busy_machine_the_processor_must(kept: float, passed: bool) -> None:
    check = check_speed(speed_up(kept=0.5, kept_computed=kept), share=0.89)
    assert check.passed is passed
    assert check.text == (
        "measured 1.28x by processor time (1.25x by the wall clock, but each rank had only 89% of a core); "
        f"the median step keeps {kept:.0%} of its promise (at least 85%)"
    )


def test_what_is_not_checked_says_why() -> None:
    check = check_promise(speed_up(predicted=1.0), skip="one rank waits for nobody")
    assert check.passed is None
    assert check.text == (
        "predicted makespans promise 1.00x (at least 1.2x); not checked: one rank waits for nobody"
    )
    assert check_speed(speed_up(kept=0), share=1.0, skip="one rank waits for nobody").passed is None


def test_equal_losses_pass(make_record: Make) -> None:
    first = [make_record([[1]], step=step, loss=2.0) for step in range(3)]
    second = [make_record([[1]], step=step, loss=2.0 + (1e-4 if step == 1 else 0)) for step in range(3)]
    check = check_losses("same_loss", first, second, "a and b")
    assert check.passed is True
    assert check.text == (
        "a and b: the losses of 3 steps differ by at most 5.0e-05 (at step 1; tolerance 1e-04)"
    )


@pytest.mark.parametrize("loss", [2.001, float("nan"), float("inf")])
def test_another_loss_fails(make_record: Make, loss: float) -> None:
    first, second = [make_record([[1]], loss=2.0)], [make_record([[1]], loss=loss)]
    assert check_losses("same_loss", first, second, "a and b").passed is False


def test_other_steps_fail(make_record: Make) -> None:
    first, second = [make_record([[1]], step=0)], [make_record([[1]], step=1)]
    check = check_losses("same_loss", first, second, "a and b")
    assert (check.passed, check.text) == (False, "a and b: the runs trained the steps [0] and [1]")
    assert check_losses("same_loss", [], [], "a and b").passed is False


@pytest.mark.parametrize(
    ("fault", "passed"),
    [({}, True), ({"skipped": [1]}, False), ({"repeated": [1]}, False), ({"foreign": [1]}, False)],
)
def test_ledger(fault: dict[str, list[int]], passed: bool) -> None:
    ledger = Ledger(expected=9, trained=9, **{"skipped": [], "repeated": [], "foreign": [], **fault})
    check = check_ledger(ledger, ranks=(2, 4), stopped_after="5 steps and 2 micro-batches")
    assert check.passed is passed
    assert check.text == (
        "stopped after 5 steps and 2 micro-batches, went on with 4 ranks instead of 2: of 9 samples "
        f"{len(ledger.skipped)} were skipped, {len(ledger.repeated)} repeated, {len(ledger.foreign)} "
        "came from elsewhere"
    )


def test_an_empty_ledger_proves_nothing() -> None:
    assert not Ledger(expected=0, trained=0, skipped=[], repeated=[], foreign=[]).exact


def test_core_share(make_record: Make) -> None:
    assert core_share([make_record([[1, 1]], share=1.0), make_record([[1, 1]], share=0.5)]) == 4 / 6
