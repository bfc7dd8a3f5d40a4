"""Inside Lightning's Trainer: from `configure_optimizers`, in true bf16, checkpointed and resumed by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge import optim

lightning = pytest.importorskip("lightning", reason="needs the package lightning")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),  # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, in_backward: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.in_backward = in_backward

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (x,) = batch
        assert x.dtype == self.layers[0].weight.dtype == torch.bfloat16
        return (self.layers(x).float() - x.float().sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> dict[str, Any]:
        options: dict[str, Any] = {"lr": 0.01, "weights": "split8", "min_quantized_size": 0}
        if self.in_backward:
            optimizer = optim.step_in_backward(self, optim.AdamW8bit, **options)
        else:
            optimizer = optim.AdamW8bit(self.named_parameters(), **options)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(epochs: int, in_backward: bool, resume: Path | None = None, **arguments: Any) -> tuple[Module, Any]:
    module = Module(in_backward)
    trainer = lightning.Trainer(
        accelerator="cpu", precision="bf16-true", max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **arguments,
    )  # fmt: skip
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=4)
    trainer.fit(module, loader, ckpt_path=resume)
    return module, trainer


def weights(module: Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize(
    ("in_backward", "arguments"),
    [(False, {"gradient_clip_val": 0.5}), (False, {"accumulate_grad_batches": 2}), (True, {})],
    ids=["clipped", "accumulated", "in backward"],
)
def test_a_resumed_fit_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, in_backward: bool, arguments: dict[str, Any]
) -> None:
    whole, _ = fit(2, in_backward, **arguments)
    half, trainer = fit(1, in_backward, **arguments)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, trainer = fit(2, in_backward, tmp_path / "half.ckpt", **arguments)
    assert torch.equal(weights(resumed), weights(whole))
    assert not torch.equal(weights(half), weights(whole))
    state = trainer.optimizers[0].state[resumed.layers[0].weight]
    assert state["step"] == 8 // arguments.get("accumulate_grad_batches", 1)
    assert state["m.codes"].dtype == torch.uint8
    assert state["weight.lo"].dtype == torch.int8


def test_steps_in_backward_are_those_of_the_usual_fit() -> None:
    assert torch.equal(weights(fit(1, True)[0]), weights(fit(1, False)[0]))
