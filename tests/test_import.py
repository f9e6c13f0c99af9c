"""Names of the package are imported when they are asked for, by whichever thread asks."""

from __future__ import annotations

import importlib
import threading
import time
from types import ModuleType

import pytest

import evenstep


def test_threads_that_ask_for_names_import_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, most, found = 0, 0, []

    def watched(name: str) -> ModuleType:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.002)
        at_once -= 1
        return importlib.import_module(name)

    monkeypatch.setattr(evenstep, "import_module", watched)
    names = ["nodes", "packing", "Cursor", "Plan", "comm", "Infeasible"]
    threads = [
        threading.Thread(target=lambda name=name: found.append(evenstep.__getattr__(name))) for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == 1
    assert {value.__name__.rpartition(".")[2] for value in found} == set(names)
