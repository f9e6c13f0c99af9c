"""The laws of planning, on random windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenstep.plan import Objective, Plan, lower_bound, plan_window

ALGORITHMS = ("auto", "lpt", "levels", "refine")
OBJECTIVES = [Objective(sync=s, kind=k) for s in ("micro_batch", "step") for k in ("makespan", "balance")]
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _score(plan: Plan, objective: Objective) -> float:
    """Of what counts: a cost that is nothing beside the largest is 0 to the planner, which counts in integers."""
    loads = plan.loads
    return objective.score(np.where(loads < loads.max(initial=0.0) * 2.0**-40, 0.0, loads))


def _leaves_rows_empty(case: Any) -> bool:
    """Whether the reference breaks a law of plans itself, so that keeping it means to fill its rows."""
    return bool(len(case.tokens) >= case.num_rows > len(np.unique(case.reference)))


def _bound(case: Any, objective: Objective) -> float:
    return lower_bound(
        case.tokens,
        case.costs,
        dp_size=case.dp_size,
        micro_batches=case.micro_batches,
        rows=case.rows,
        constraints=case.constraints,
        objective=objective,
        features=case.features,
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_plan_conserves_samples_and_obeys_the_limits(cases: Callable[..., Any], algorithm: str) -> None:
    @quick
    @given(case=cases(), objective=st.sampled_from(OBJECTIVES))
    def law(case: Any, objective: Objective) -> None:
        plan = plan_window(**case.arguments(algorithm=algorithm, objective=objective))
        case.check(plan.assignment)
        assert plan.loads.shape[:2] == (case.micro_batches, case.dp_size)
        loads = np.zeros_like(plan.loads)
        np.add.at(loads, (plan.micro_batch_of, plan.rank_of), case.costs)
        np.testing.assert_allclose(plan.loads, loads, rtol=1e-12)
        assert 0 < plan.digest < 2**64
        assert plan.decision.explain()

    law()


def test_bound_is_below_the_plan_and_the_plan_below_the_reference(cases: Callable[..., Any]) -> None:
    @quick
    @given(case=cases(), objective=st.sampled_from(OBJECTIVES))
    def law(case: Any, objective: Objective) -> None:
        plan = plan_window(**case.arguments(objective=objective))
        kept = plan_window(**case.arguments(objective=objective, min_gain=1e9))
        if not _leaves_rows_empty(case):
            np.testing.assert_array_equal(kept.assignment, case.reference)
        bound, score, original = _bound(case, objective), _score(plan, objective), _score(kept, objective)
        assert bound <= score * (1 + 1e-9)
        assert score <= original * (1 + 1e-9)
        assert plan.decision.lower_bound == bound

    law()


def test_auto_is_as_good_as_every_algorithm(cases: Callable[..., Any]) -> None:
    @quick
    @given(case=cases(), objective=st.sampled_from(OBJECTIVES))
    def law(case: Any, objective: Objective) -> None:
        auto = plan_window(**case.arguments(objective=objective))
        for algorithm in ALGORITHMS[1:]:
            other = plan_window(**case.arguments(objective=objective, algorithm=algorithm))
            assert _score(auto, objective) <= _score(other, objective) * (1 + 1e-9)

    law()


def test_rows_are_filled_while_there_are_samples(cases: Callable[..., Any]) -> None:
    @quick
    @given(case=cases(), algorithm=st.sampled_from(ALGORITHMS[:3]), objective=st.sampled_from(OBJECTIVES))
    def law(case: Any, algorithm: str, objective: Objective) -> None:
        arguments = case.arguments(algorithm=algorithm, objective=objective)
        plan = plan_window(**arguments)
        if len(case.tokens) >= case.num_rows:
            assert len(np.unique(plan.assignment)) == case.num_rows

    law()


def test_the_gate_is_monotone(cases: Callable[..., Any]) -> None:
    @quick
    @given(case=cases(), gains=st.lists(st.floats(0, 1), min_size=2, max_size=4).map(sorted))
    def law(case: Any, gains: list[float]) -> None:
        plans = [plan_window(**case.arguments(min_gain=gain)) for gain in gains]
        kept = [plan.decision.algorithm == "reference" for plan in plans]
        assert kept == sorted(kept)
        for gain, plan in zip(gains, plans, strict=True):
            assert plan.decision.gain == plans[0].decision.gain
            assert (plan.decision.algorithm != "reference") == (plan.decision.gain > gain)
            if plan.decision.algorithm == "reference" and not _leaves_rows_empty(case):
                np.testing.assert_array_equal(plan.assignment, case.reference)
                assert plan.decision.moved_samples == 0

    law()


def test_equal_inputs_give_equal_plans(cases: Callable[..., Any]) -> None:
    @quick
    @given(case=cases(), objective=st.sampled_from(OBJECTIVES))
    def law(case: Any, objective: Objective) -> None:
        one = plan_window(**case.arguments(objective=objective))
        two = plan_window(
            **case.arguments(
                objective=objective,
                tokens=case.tokens.tolist(),
                costs=np.asfortranarray(case.costs),
                reference=case.reference.astype(np.int64),
            )
        )
        np.testing.assert_array_equal(one.assignment, two.assignment)
        assert one.digest == two.digest
        assert one.decision == two.decision

    law()


def test_the_optimum_of_a_few_samples_is_found(cases: Callable[..., Any]) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(case=cases(most_samples=8, stages=1), sync=st.sampled_from(["micro_batch", "step"]))
    def law(case: Any, sync: Any) -> None:
        objective = Objective(sync=sync)
        if case.num_rows ** len(case.tokens) > 50_000:
            return
        best = min(
            (objective.score(loads) for loads in _feasible_loads(case)),
            default=math.inf,
        )
        plan = plan_window(**case.arguments(objective=objective, reference=None))
        assert _bound(case, objective) <= best * (1 + 1e-9)
        filled = len(case.tokens) >= case.num_rows
        # A row must not stay empty while there are samples, so only then may the optimum be out of reach.
        if filled:
            assert _score(plan, objective) >= best * (1 - 1e-9)
        else:
            assert _score(plan, objective) == pytest.approx(best, rel=1e-9)

    law()


def _feasible_loads(case: Any) -> list[npt.NDArray[np.float64]]:
    found = []
    for rows in itertools.product(range(case.num_rows), repeat=len(case.tokens)):
        flat = np.array(rows, dtype=np.int64)
        weights = [(case.tokens, case.constraints.seq_len)]
        weights += [(case.features[name], limit) for name, limit in case.constraints.budgets.items()]
        if case.constraints.max_segments is not None:
            weights.append((np.ones(len(flat)), case.constraints.max_segments))
        if all((np.bincount(flat, w, minlength=1) <= limit).all() for w, limit in weights):
            slots = case.micro_batches * case.dp_size
            loads = np.bincount(flat // case.rows, case.costs, minlength=slots).astype(np.float64)
            found.append(loads.reshape(case.micro_batches, case.dp_size))
    return found


def test_fewest_micro_batches_are_never_more_than_the_reference_has(cases: Callable[..., Any]) -> None:
    @quick
    @given(case=cases())
    def law(case: Any) -> None:
        plan = plan_window(**case.arguments(micro_batches=None))
        case.check(plan.assignment)
        used = int(case.reference.max(initial=0)) // (case.dp_size * case.rows) + 1
        assert 1 <= plan.micro_batches <= used
        assert plan.loads.shape[0] == plan.micro_batches

    law()
