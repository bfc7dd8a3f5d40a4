"""Inside Lightning's Trainer: from `configure_optimizers`, in true bf16, checkpointed and resumed by it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from forked import run_ranks
from narrowgauge import gauges, linear, optim, recipes

lightning = pytest.importorskip("lightning", reason="needs the package lightning")

from lightning.pytorch.callbacks import EMAWeightAveraging  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

from narrowgauge.integrations.lightning import NarrowgaugePrecision  # noqa: E402

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


def test_the_recorded_loss_has_no_loss_scale_and_the_scaler_is_watched(tmp_path: Path) -> None:
    class Seen(Module):
        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = self.layers(batch[0]).float().square().mean()
            seen.append(loss.item())
            return loss * (torch.inf if len(seen) == 3 else 1.0)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    seen: list[float] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer = lightning.Trainer(
        accelerator="cpu", plugins=MixedPrecision("16-mixed", "cpu", scaler), max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, callbacks=[gauges.LightningCallback()],
    )  # fmt: skip
    inputs = torch.utils.data.TensorDataset(torch.randn(16, 8))
    trainer.fit(Seen(False), torch.utils.data.DataLoader(inputs, batch_size=4))
    steps = [row for row in gauges.read_records(tmp_path) if row["kind"] == "step"]
    assert [row["loss"] for row in steps] == pytest.approx([seen[0], seen[1], seen[3]], rel=1e-6)
    assert [(row["loss_scale"], row["skipped"]) for row in steps] == [(1024, 0), (1024, 0), (512, 1)]
    with pytest.raises(FileExistsError, match=r"has records; give LightningCallback\(path=...\) another"):
        fit(1, False, default_root_dir=tmp_path, callbacks=[gauges.LightningCallback()])


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


# The precision plugin


class Wide(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Two linear layers to swap, one too small, and a table that is not saved."""

    def __init__(self, shards: str = "") -> None:
        super().__init__()
        self.shards = shards
        if shards != "made in configure_model":
            self.make()

    def make(self) -> None:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh())
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1))
        with torch.no_grad():
            for p in self.layers.parameters():  # numbers drawn in bf16 are others than those drawn in fp32
                p.copy_(torch.randn(p.shape, dtype=torch.float32) / 4)
        self.register_buffer("table", torch.full((1,), 1 / 3), persistent=False)
        self.register_buffer("saved", torch.full((1,), 1 / 3))

    def configure_model(self) -> None:
        if self.shards == "made in configure_model":
            self.make()
        if self.shards:
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (x,) = batch
        assert x.dtype == torch.bfloat16
        return (self.layers(x).float() - x.float().sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"weights": "split8", "min_quantized_size": 0, "block_size": 16}
        return optim.AdamW8bit(self.layers.named_parameters(), lr=0.01, **options)


def trainer(epochs: int, **arguments: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **arguments,
    )  # fmt: skip


def rows(rank: int | None = None) -> Any:
    """Four batches of four rows, or every second one for a rank."""
    inputs = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(0))
    given = inputs if rank is None else inputs[rank::2]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(given.reshape(-1, 16)), batch_size=4)


def fit_wide(epochs: int, resume: Path | None = None) -> tuple[Wide, Any]:
    run = trainer(epochs, plugins=NarrowgaugePrecision("SWITCHBACK:e4m3"), accumulate_grad_batches=2)
    module = Wide()
    run.fit(module, rows(), ckpt_path=resume)
    return module, run


def test_the_plugin_trains_as_a_module_cast_and_swapped_by_hand_and_resumes(tmp_path: Path) -> None:
    by_hand = Wide()
    by_hand.layers.bfloat16()
    linear.swap_linears(by_hand, linear.SWITCHBACK.with_format("e4m3"))
    trainer(2, precision="bf16-true", accumulate_grad_batches=2).fit(by_hand, rows())
    whole, run = fit_wide(2)
    half, halfway = fit_wide(1)
    halfway.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fit_wide(2, tmp_path / "half.ckpt")
    assert torch.equal(weights(whole), weights(by_hand))
    assert torch.equal(weights(resumed), weights(whole))
    assert not torch.equal(weights(half), weights(whole))
    assert (whole.table.dtype, whole.saved.dtype) == (torch.float32, torch.float32)
    report = run.precision_plugin.report
    assert report.plan == linear.SWITCHBACK.with_format("e4m3")
    assert (report.swapped, list(report.kept)) == (["layers.0", "layers.2"], ["layers.4"])
    run.precision_plugin.convert_module(whole)  # as Lightning does before it validates
    assert isinstance(whole.layers[0], linear.LowPrecisionLinear)


def test_the_plugin_keeps_what_it_is_told_to_and_refuses_a_module_with_nothing_to_swap() -> None:
    plugin = NarrowgaugePrecision(linear.LLM_INT8, keep=["layers.0"])
    plugin.convert_module(Wide())
    assert plugin.report is not None
    assert plugin.report.swapped == ["layers.2"]
    with pytest.raises(ValueError, match=r"^plan: no layer of Wide could be swapped\n(.*\n)*.*named in keep"):
        NarrowgaugePrecision("SWITCHBACK", keep=["layers"]).convert_module(Wide())
    with pytest.raises(ValueError, match=r"^keep must be a list of names such as .*, got 'layers'"):
        NarrowgaugePrecision("SWITCHBACK", keep="layers").convert_module(Wide())
    with pytest.raises(ValueError, match=r"^plan must be a name such as SWITCHBACK"):
        NarrowgaugePrecision("SWITCHBAK")


def shard(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    # As torchrun sets them.
    os.environ |= {"TORCHELASTIC_RUN_ID": "0", "GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=rank, world_size=2)

    def fit(epochs: int, made: str, resume: Path | None = None) -> tuple[dict[str, torch.Tensor], Any]:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        plugin, module = NarrowgaugePrecision("SWITCHBACK:e4m3"), Wide(made)
        run = trainer(epochs, devices=2, strategy=strategy, plugins=plugin, use_distributed_sampler=False)
        run.fit(module, rows(rank), ckpt_path=resume)
        assert plugin.report is not None
        assert plugin.report.swapped == ["layers.0", "layers.2"]
        assert all(type(p).__name__ == "DTensor" for p in module.layers.parameters())
        return {name: p.full_tensor().detach() for name, p in module.layers.named_parameters()}, run

    _, half = fit(1, "made in configure_model")
    half.save_checkpoint(folder / "half.ckpt")
    whole, _ = fit(2, "made in configure_model")
    resumed, _ = fit(2, "made in configure_model", folder / "half.ckpt")
    earlier, _ = fit(2, "made before")
    for name, value in whole.items():
        assert torch.equal(value, resumed[name])
        assert torch.equal(value, earlier[name])
    if rank == 0:
        torch.save(whole, folder / "end.pt")
    dist.destroy_process_group()


def test_fsdp2_by_lightning_trains_as_one_process_does_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    run_ranks(shard, 2, tmp_path)
    ended, (alone, _) = torch.load(tmp_path / "end.pt"), fit_wide(2)
    assert all(torch.equal(ended[name], p) for name, p in alone.layers.named_parameters())


# Averages of the weights


PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "lightning.md"
DECAY = 1 - 2**-7  # torch multiplies bf16 weights by 1 - decay: a power of two rounds nothing


def guides_average() -> Any:
    """The subclass on the page."""
    (block,) = re.findall(r"^```py\n([^`]*class Average\b.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    space: dict[str, Any] = {}
    exec(block, space)
    return space["Average"]


class Averaged(Module):
    def setup(self, stage: str) -> None:
        recipes.cast(self, torch.bfloat16)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return super().training_step([batch[0].bfloat16()], index)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        pass


class Reference(lightning.Callback):  # type: ignore[misc, name-defined]
    """The average in float64, and where it began."""

    average: torch.Tensor | None = None

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        now = weights(module).double()
        if self.average is None:
            self.start = self.average = now
        self.average = self.average.lerp(now, 1 - DECAY)


def averaged(callback: Any, folder: Path, rank: int | None = None, **arguments: Any) -> tuple[torch.Tensor, float]:
    """The weights at the end, and how far the checkpoint's average is from one in float64, of the way it went."""
    exact, module = Reference(), Averaged(False)
    run = trainer(2, val_check_interval=2, callbacks=[callback(decay=DECAY), exact], **arguments)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows(rank).dataset.tensors[0][:, :8]), 2)
    run.fit(module, loader, loader)
    run.save_checkpoint(folder / "end.ckpt")
    saved = torch.load(folder / "end.ckpt")["state_dict"]
    average = torch.cat([saved[name].reshape(-1) for name, _ in module.named_parameters()])
    assert average.dtype == torch.float32
    assert torch.equal(weights(module), average.bfloat16())
    assert exact.average is not None
    return weights(module), ((average - exact.average).norm() / (exact.average - exact.start).norm()).item()


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_the_guides_average_is_that_of_float64_and_lightnings_is_not(tmp_path: Path, precision: str) -> None:
    """In "32-true" `setup` casts: after the callback's copy, and before the optimizer is made."""
    assert averaged(guides_average(), tmp_path, precision=precision)[1] < 1e-4
    assert averaged(EMAWeightAveraging, tmp_path, precision=precision)[1] > 0.05


def average_on_ranks(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "0", "GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=rank, world_size=2)
    arguments = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    ended, error = averaged(guides_average(), folder, rank, **arguments)
    assert error < 1e-4
    everywhere = [torch.empty_like(ended) for _ in range(2)]
    dist.all_gather(everywhere, ended)
    assert torch.equal(*everywhere)
    dist.destroy_process_group()


def test_a_cast_in_setup_comes_before_ddp_wraps_the_module(tmp_path: Path) -> None:
    run_ranks(average_on_ranks, 2, tmp_path)
