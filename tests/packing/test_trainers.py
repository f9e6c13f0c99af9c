"""With trainers where they are installed: their loops train with the loader as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from evenstep import LoaderConfig, build_loader
from evenstep.packing import collate_varlen
from evenstep.samples import BatchInfo
from evenstep.sampling import StepSampler

STEPS = 8
CONFIG = LoaderConfig(seq_len=32, micro_batch_size=2, accumulation_steps=2)
SAMPLES = [{"input_ids": torch.arange(1, n % 7 + 3)} for n in range(4 * STEPS)]


def make_loader() -> Any:
    sampler = StepSampler(len(SAMPLES), global_batch_size=4)
    return build_loader(SAMPLES, None, CONFIG, sampler=sampler, collate=collate_varlen)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    logits = model(batch["input_ids"])[0, :-1]
    total: int = batch["info"].step_loss_tokens
    return cross_entropy(logits, batch["labels"][0, 1:], reduction="sum") / total


def plain_loop(epochs: int) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    with make_loader() as loader:
        for _ in range(epochs):
            for batch in loader:
                seen.append((batch["info"].step, batch["info"].micro_batch))
                loss_of(model, batch).backward()
                if batch["info"].is_last_micro_batch:
                    optimizer.step()
                    optimizer.zero_grad()
    return seen, [parameter.detach() for parameter in model.parameters()]


def assert_trained_alike(seen: list[tuple[int, int]], model: Any, epochs: int) -> None:
    expected, parameters = plain_loop(epochs)
    assert len(expected) == epochs * STEPS * 2
    assert seen == expected
    for mine, plain in zip(model.parameters(), parameters, strict=True):
        torch.testing.assert_close(mine.detach(), plain)


def test_a_batchs_record_stays_whole_on_its_way_to_a_device() -> None:
    info = BatchInfo(0, 0, 1, True, 1, 1, 0, None, None)
    assert info.to("cpu", non_blocking=True) is info


def test_an_accelerate_loop_trains() -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    plain = make_model()
    # The loader is not prepared: it hands out each rank's own share already.
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), 0.1))
    seen = []
    with make_loader() as loader:
        for _ in range(2):
            for batch in loader:
                seen.append((batch["info"].step, batch["info"].micro_batch))
                accelerator.backward(loss_of(model, batch))
                if batch["info"].is_last_micro_batch:
                    optimizer.step()
                    optimizer.zero_grad()
    assert_trained_alike(seen, plain, 2)


@pytest.mark.filterwarnings("ignore")  # Lightning warns of its own dependencies.
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_lightning_loop_trains(epochs: int) -> None:
    lightning: Any = pytest.importorskip("lightning")
    seen: list[tuple[int, int]] = []

    class Trained(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = make_model()

        def training_step(self, batch: dict[str, Any], _: int) -> None:
            seen.append((batch["info"].step, batch["info"].micro_batch))
            self.manual_backward(loss_of(self.model, batch))
            if batch["info"].is_last_micro_batch:
                optimizer = self.optimizers()
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trained = Trained()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with make_loader() as loader:
        trainer.fit(trained, train_dataloaders=loader)
    assert_trained_alike(seen, trained, epochs)
