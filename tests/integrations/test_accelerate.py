"""Under accelerate: prepared, accumulated, clipped, saved and loaded by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge import optim

accelerate = pytest.importorskip("accelerate", reason="needs the package accelerate")


def loader() -> torch.utils.data.DataLoader[Any]:
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=4)


class Run:
    """A training under accelerate; `resume` is a folder that an earlier one saved to."""

    def __init__(self, accumulate: int = 1, in_backward: bool = False, resume: Path | None = None) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).bfloat16()
        options: dict[str, Any] = {"lr": 0.01, "weights": "split8", "min_quantized_size": 0}
        if in_backward:
            optimizer = optim.step_in_backward(model, optim.AdamW8bit, **options)
        else:
            optimizer = optim.AdamW8bit(model.named_parameters(), **options)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
        self.inner = optimizer
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader()
        )
        self.in_backward = in_backward
        if resume is not None:
            self.accelerator.load_state(str(resume))

    def train(self, batches: slice) -> None:
        for (x,) in list(self.loader)[batches]:
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x.bfloat16()).float() - x.sum(1, keepdim=True)).square().mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and not self.in_backward:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


@pytest.mark.parametrize(("accumulate", "in_backward"), [(1, False), (2, False), (1, True)])
def test_a_run_loaded_from_its_state_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, accumulate: int, in_backward: bool
) -> None:
    whole = Run(accumulate, in_backward)
    whole.train(slice(4))
    half = whole.weights()
    whole.accelerator.save_state(str(tmp_path))
    whole.train(slice(4, 8))
    resumed = Run(accumulate, in_backward, resume=tmp_path)
    assert torch.equal(resumed.weights(), half)
    resumed.train(slice(4, 8))
    assert torch.equal(resumed.weights(), whole.weights())
    assert not torch.equal(half, whole.weights())
    steps = {int(state["step"]) for state in resumed.inner.state.values()}
    assert steps == {8 // accumulate}


def test_it_is_the_training_that_a_plain_loop_makes() -> None:
    run = Run()
    run.train(slice(8))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).bfloat16()
    optimizer = optim.AdamW8bit(model.named_parameters(), lr=0.01, weights="split8", min_quantized_size=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
    for (x,) in loader():
        loss = (model(x.bfloat16()).float() - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert torch.equal(run.weights(), torch.cat([p.detach().reshape(-1) for p in model.parameters()]))


def test_accumulation_with_steps_in_backward_is_found_out() -> None:
    with pytest.raises(RuntimeError, match=r"was stepped in backward already since the last step\(\)"):
        Run(accumulate=2, in_backward=True).train(slice(2))
