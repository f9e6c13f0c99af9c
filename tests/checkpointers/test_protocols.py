"""The protocols by which frameworks save a loader, as their sources state them; none of them is needed to test.

Lightning: ``fit_loop.state_dict()`` holds ``combined_loader: [loader.state_dict(), ...]`` of every loader that has
``state_dict`` and ``load_state_dict``; after a restart the states are loaded before ``iter(loader)``, and the loop
goes on with ``next``. Accelerate: ``register_for_checkpointing(obj)`` takes what has both methods; ``save_state``
writes ``obj.state_dict()`` with ``torch.save``, ``load_state`` passes the file's content to ``load_state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from torch.distributed.checkpoint.stateful import Stateful

from evenstep import DataPlane, Loader
from evenstep.testing.jobs import Layout, Stream

STREAM = Stream(kind="step", lengths=(3, 5, 2, 7, 1, 4, 6, 2, 9, 1, 8, 3), rows=4, seed=3)


def new_loader() -> Loader[Any]:
    return Layout(options={"micro_batch_size": 2}).loader(STREAM, DataPlane.single())


@runtime_checkable
class HasState(Protocol):
    """What Lightning and Accelerate ask of an object."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class FitLoop:
    """Epochs over one loader, with the order of calls of Lightning's fit loop.

    An epoch whose last batch was trained on is counted as done when it is restored.
    """

    def __init__(self, loader: Loader[Any]) -> None:
        self.loader = loader
        self.restored: dict[str, Any] | None = None
        self.epoch = 0
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        done = self.batches == len(self.loader)
        return {"epoch": self.epoch + done, "combined_loader": [self.loader.state_dict()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored, self.epoch = state["combined_loader"][0], state["epoch"]

    def run(self, epochs: int, stop_after: int | None = None) -> Iterator[tuple[int, Any]]:
        trained = 0
        while self.epoch < epochs:
            if self.restored is not None:
                self.loader.load_state_dict(self.restored)
                self.restored = None
            iterator = iter(self.loader)
            self.batches = 0
            while True:
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                self.batches += 1
                trained += 1
                yield self.epoch, batch["rows"]
                if trained == stop_after:
                    return
            self.epoch += 1


def test_it_has_what_they_ask_for() -> None:
    assert isinstance(new_loader(), HasState)
    assert isinstance(new_loader(), Stateful)


@pytest.mark.parametrize("stop_after", [2, 4, 6, 8, 12])
def test_a_lightning_like_fit_loop_goes_on_where_it_was(tmp_path: Path, stop_after: int) -> None:
    whole = list(FitLoop(new_loader()).run(3))
    assert len(whole) == 18
    first = FitLoop(new_loader())
    before = list(first.run(3, stop_after))
    torch.save(first.state_dict(), tmp_path / "last.ckpt")
    loader = new_loader()
    loader.restart_on_stop_iteration = True  # as docs/resume.md says
    second = FitLoop(loader)
    second.load_state_dict(torch.load(tmp_path / "last.ckpt", weights_only=True))
    assert before + list(second.run(3)) == whole


class Accelerator:
    """What Accelerate does with registered objects."""

    def __init__(self) -> None:
        self.objects: list[HasState] = []

    def register_for_checkpointing(self, *objects: Any) -> None:
        for o in objects:
            if not isinstance(o, HasState):
                raise ValueError(f"{o!r} must have state_dict and load_state_dict")
            self.objects.append(o)

    def save_state(self, folder: Path) -> None:
        for number, o in enumerate(self.objects):
            torch.save(o.state_dict(), folder / f"custom_checkpoint_{number}.pkl")

    def load_state(self, folder: Path) -> None:
        for number, o in enumerate(self.objects):
            o.load_state_dict(torch.load(folder / f"custom_checkpoint_{number}.pkl", weights_only=True))


def test_a_loader_registered_for_checkpointing_goes_on_where_it_was(tmp_path: Path) -> None:
    loader, accelerator = new_loader(), Accelerator()
    accelerator.register_for_checkpointing(loader)
    for _ in range(2):
        next(loader)
    accelerator.save_state(tmp_path)
    rest = [batch["rows"] for batch in loader]
    again, accelerator = new_loader(), Accelerator()
    accelerator.register_for_checkpointing(again)
    accelerator.load_state(tmp_path)
    assert [batch["rows"] for batch in again] == rest
    # The same object, in use, is brought back as well.
    accelerator.load_state(tmp_path)
    assert [batch["rows"] for batch in again] == rest
    assert len(rest) == 4


class Megatron:
    """An external loader as Megatron-style trainers drive it: one endless iterator, `save_state` at a checkpoint."""

    def __init__(self, loader: Loader[Any]) -> None:
        self.loader = loader

    def __next__(self) -> Any:
        try:
            return next(self.loader)
        except StopIteration:
            return next(iter(self.loader))

    def save_state(self) -> dict[str, Any]:
        return self.loader.save_state()


def test_an_endless_iterator_with_save_state() -> None:
    trainer = Megatron(new_loader())
    for _ in range(8):
        next(trainer)
    state = trainer.save_state()
    rest = [next(trainer)["rows"] for _ in range(10)]
    loader = new_loader()
    loader.load_state_dict(state)
    again = Megatron(loader)
    assert [next(again)["rows"] for _ in range(10)] == rest
