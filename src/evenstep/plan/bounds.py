"""What no plan of a window can beat."""

from __future__ import annotations


from evenstep.plan.problem import Int, Problem

__all__ = ["makespan_bound"]


def makespan_bound(problem: Problem) -> float:
    """A lower bound of the sum of makespans over groups and stages, in integer cost units."""
    return float(sum(_stage_bound(problem, cost) for cost in problem.costs))


def _stage_bound(problem: Problem, cost: Int) -> float:
    total = int(cost.sum())
    return max(total / problem.ranks, int(cost.max(initial=0)))
