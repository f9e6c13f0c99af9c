"""Tells of each window's balance: once, when its first batch is handed out, also if it was planned long before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torchdata.nodes as tn

from evenstep.cursor import find_cursor
from evenstep.nodes.balance import Balance
from evenstep.nodes.planner import Planner
from evenstep.nodes.stage import upstream

__all__ = ["BalanceTeller"]

log: logging.Logger = logging.getLogger("evenstep")


class BalanceTeller:
    """What a loader says of its planner's windows, on the planner rank.

    Args:
        root: The last node of the graph; without a `Planner` in it there is nothing to tell.
        on_balance: Called with each window's `Balance`.
        log_balance: Log it to the ``"evenstep"`` logger.
    """

    def __init__(
        self, root: tn.BaseNode[Any], on_balance: Callable[[Balance], object] | None, log_balance: bool
    ) -> None:
        self._root = root
        self._on_balance = on_balance
        self._log_balance = log_balance
        self._told: Balance | None = None
        self._planner = next((node for node in upstream(root) if isinstance(node, Planner)), None)
        if self._planner is not None:
            self._planner.followed = self.is_asked

    @property
    def is_asked(self) -> bool:
        """Whether anybody wants to be told."""
        return self._log_balance or self._on_balance is not None

    def last(self) -> Balance | None:
        """Balance of the window that the last item belongs to; None where it was not planned."""
        if self._planner is None:
            return None
        return self._planner.balance_before(find_cursor(self._root.state_dict()))

    def tell(self) -> None:
        """Tell of the window of the last item, unless that has been done."""
        if self._planner is None or not self._planner.plane.is_planner:
            return
        balance = self.last()
        if balance is None or balance is self._told:
            return
        self._told = balance
        if self._log_balance:
            told = balance.to_dict()
            log.info(
                "balance: %s", " ".join(f"{k}={_short(v)}" for k, v in told.items()), extra={"balance": told}
            )
        if self._on_balance is not None:
            self._on_balance(balance)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
