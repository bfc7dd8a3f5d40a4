"""Small trainings, for tests of training."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from narrowgauge.trainers import TrainSettings, fit
from narrowgauge.trainers._run_folder import HISTORY, read_history

CPU = torch.device("cpu")


def small_settings(path: Path) -> TrainSettings:
    """Six steps of a model of two layers on a text that is written to a path."""
    path.write_text("".join(f"{n} bottles of beer on the wall, {n} bottles of beer.\n" for n in range(400)))
    return TrainSettings(
        data=path, model="micro", recipe="fp32", steps=6, batch=4, sequence=16, vocabulary=256, lr=0.01, warmup=2,
        validation_windows=6, validate_every=3, gauges_every=0, save_every=0, log_every=1, device="cpu",
    )  # fmt: skip


@contextlib.contextmanager
def gradients_kept() -> Iterator[list[list[torch.Tensor]]]:
    """All gradients that optimizers in this context step with, whole, step by step."""
    kept: list[list[torch.Tensor]] = []

    def keep(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        kept.append([(g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for g in grads])

    handle = register_optimizer_step_pre_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()


class Silent:
    """An observer that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def stage(self, stage: str, fraction: float) -> None:
        pass

    def say(self, text: str) -> None:
        self.told.append(text)

    def begin(self, step: int, steps: int) -> None:
        pass

    def progress(self, step: int, loss: float, units: float, unit: str, mfu: float | None) -> None:
        self.told.append(f"{step}: {unit} {mfu}")

    def validated(self, step: int, loss: float) -> None:
        pass


def run(settings: TrainSettings, out: Path, **changes: Any) -> list[float]:
    """The losses of a run."""
    fit(replace(settings, out=out, **changes), CPU, Silent())
    return [record["loss"] for record in read_history(out / HISTORY) if "loss" in record]


def weights(out: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(out / "model.safetensors")


def records(out: Path) -> list[dict[str, Any]]:
    """The history of a run, without its speed."""
    return [r for r in read_history(out / HISTORY) if not any(name.endswith("_per_second") for name in r)]


def assert_it_goes_on(settings: TrainSettings, folder: Path, again: dict[str, Any], **changes: Any) -> None:
    """A run of six steps that stops after three ends as the one that did not stop, bit for bit.

    Args:
        settings: of the run, with these changes.
        folder: where `whole` and `halves` are made.
        again: what may be another way when it goes on.
    """
    losses = run(settings, folder / "whole", **changes)
    asked = iter([False, False, True, False, False, False])
    halves = replace(settings, out=folder / "halves", **changes)
    outcome = fit(halves, CPU, Silent(), lambda: next(asked))
    assert (outcome.step, outcome.stopped, outcome.validation_loss) == (3, True, None)
    assert not (folder / "halves" / "model.safetensors").exists()
    torch.manual_seed(999)  # whatever happens in between
    assert fit(replace(halves, **again), CPU, Silent()).step == 6
    assert records(folder / "whole") == records(folder / "halves")
    assert len(losses) == 6
    a, b = weights(folder / "whole"), weights(folder / "halves")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@contextlib.contextmanager
def captured() -> Iterator[list[Any]]:
    """`torch.compile` with a compiler that makes no code; gives the graphs that it captures."""
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep))
        yield graphs
    torch._dynamo.reset()
