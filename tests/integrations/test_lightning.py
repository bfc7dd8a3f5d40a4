"""Inside Lightning's Trainer: from `configure_optimizers`, in true bf16, checkpointed and resumed by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge import gauges, optim

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


@pytest.mark.parametrize(("in_backward", "batches"), [(False, 1), (False, 2), (True, 1)])
def test_the_gauges_callback_changes_nothing_and_sees_every_step(
    tmp_path: Path, in_backward: bool, batches: int
) -> None:
    plain, _ = fit(2, in_backward, accumulate_grad_batches=batches)
    callback = gauges.LightningCallback(every=2)
    arguments = {"accumulate_grad_batches": batches, "default_root_dir": tmp_path}
    module, trainer = fit(2, in_backward, callbacks=[callback], **arguments)
    assert torch.equal(weights(module), weights(plain))
    rows = gauges.read_records(tmp_path)
    assert rows.damage is None
    assert callback.rows() == list(rows)
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, 8 // batches + 1))
    losses = [row["loss"] for row in steps]
    assert all(0 < loss < 100 for loss in losses)
    names = {row["name"] for row in rows if row["kind"] == "update"}
    assert names == {"", *(name for name, _ in module.named_parameters())}
    gradient = {row["name"] for row in rows if row["kind"] == "gradient"}
    assert gradient == names - {""}
    assert {row["name"] for row in rows if row["kind"] == "activation"} == {"layers.0", "layers.2"}
    assert not module.layers[0]._forward_hooks
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks


def test_the_gauges_callback_ends_with_an_exception(tmp_path: Path) -> None:
    class Stops(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                raise KeyError("stop")

    callback = gauges.LightningCallback(every=2, path=tmp_path / "gauges.jsonl")
    with pytest.raises(KeyError):
        fit(2, False, callbacks=[callback, Stops()])
    assert callback.gauges is not None
    assert not callback.gauges.running
    assert [row["step"] for row in gauges.read_records(tmp_path) if row["kind"] == "step"] == [1, 2, 3]
