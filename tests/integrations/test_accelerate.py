"""Under accelerate: prepared, accumulated, clipped, sharded, saved and loaded by it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forked import run_ranks
from narrowgauge import gauges, linear, optim, to_torch

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


def test_a_watch_finds_the_scaler_of_accelerates_optimizer() -> None:
    accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    inner = torch.optim.AdamW(model.parameters(), 0.0)
    optimizer = accelerate.optimizer.AcceleratedOptimizer(inner, scaler=scaler)
    with gauges.watch(model, optimizer, every=1) as watch:
        for factor in (1.0, torch.inf, 3.0):
            loss = model(torch.ones(1, 4)).sum() * factor
            watch.loss(loss)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            optimizer.step()
    steps = [row for row in watch.rows() if row["kind"] == "step"]
    assert [(row["loss"], row["loss_scale"], row["skipped"]) for row in steps] == [(4, 4, 0), (12, 2, 1)]


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
    assert run.optimizer.optimizer is run.inner
    wide, theirs = to_torch(run.model, run.optimizer)
    assert type(theirs) is torch.optim.AdamW
    assert all(torch.equal(p, q) for p, q in zip(wide.parameters(), run.inner.full_weights().values(), strict=True))


def test_accumulation_with_steps_in_backward_is_found_out() -> None:
    with pytest.raises(RuntimeError, match=r"was stepped in backward already since the last step\(\)"):
        Run(accumulate=2, in_backward=True).train(slice(2))


# FSDP2, as accelerate does it: the optimizer is made first, and prepared together with the model.


WORLD, STEPS = 2, 2
HALVES = [slice(2), slice(2, 4)]


def gpt2(tied: bool) -> Any:
    """A GPT-2 in bf16 whose linear layers are swapped, and its optimizer; shards begin where blocks begin."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
    others = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "bos_token_id", "eos_token_id"), 0)
    config = GPT2Config(**shape, **others, tie_word_embeddings=tied, loss_type="ForCausalLM")
    model = GPT2LMHeadModel(config).bfloat16()
    assert len(linear.swap_linears(model, linear.SWITCHBACK).swapped) == 4
    options: dict[str, Any] = {"min_quantized_size": 0, "block_size": 16, "max_grad_norm": 0.5}
    return model, optim.AdamW8bit(model.named_parameters(), lr=0.01, weights="split8", **options)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step))


@contextmanager
def accelerator(rank: int, folder: Path, mixed_precision: str) -> Iterator[Any]:
    """One that shards on a CPU: accelerate turns FSDP on for GPUs alone, and from there on asks for no device."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "OMP_NUM_THREADS": "1"}
    os.environ["LOCAL_WORLD_SIZE"] = str(WORLD)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=rank, world_size=WORLD)
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    made = accelerate.Accelerator(cpu=True, mixed_precision=mixed_precision, fsdp_plugin=plugin)
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    made.state.fsdp_plugin = plugin
    made.state.distributed_type = accelerate.PartialState._shared_state["distributed_type"] = (
        accelerate.DistributedType.FSDP
    )
    assert made.is_fsdp2
    yield made
    dist.destroy_process_group()


def train(run: Any, model: Any, optimizer: Any, steps: range, parts: list[slice]) -> None:
    for step in steps:
        for part in parts:
            batch = tokens(step)[part]
            run.backward(model(input_ids=batch, labels=batch).loss / len(parts))
        assert 0.5 < float(run.clip_grad_norm_(model.parameters(), 1e9)) < 100  # the optimizer clips
        optimizer.step()
        optimizer.zero_grad()


class Plain:
    """A loop of one's own, with accelerate's names."""

    backward = staticmethod(torch.Tensor.backward)
    clip_grad_norm_ = staticmethod(torch.nn.utils.clip_grad_norm_)


def full(model: Any) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().float() for name, p in named.items()
    }


def sharded(rank: int, folder: Path) -> None:
    with accelerator(rank, folder, "no") as run:
        for tied in (False, True):
            part, half, place = HALVES[rank : rank + 1], STEPS // 2, folder / f"tied {tied}"
            plugin = run.state.fsdp_plugin
            plugin.state_dict_config = plugin.optim_state_dict_config = None
            plugin.set_state_dict_type("FULL_STATE_DICT" if tied else "SHARDED_STATE_DICT")
            whole = run.prepare(*gpt2(tied))
            assert {type(p).__name__ for group in whole[1].param_groups for p in group["params"]} == {"DTensor"}
            assert {p.dtype for p in whole[0].parameters()} == {torch.bfloat16}
            train(run, *whole, range(half), part)
            run.save_state(str(place))
            train(run, *whole, range(half, STEPS), part)
            run.free_memory()
            resumed = run.prepare(*gpt2(tied))
            run.load_state(str(place))
            train(run, *resumed, range(half, STEPS), part)
            ends = full(whole[0]), full(resumed[0])
            assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
            assert {int(state["step"]) for state in resumed[1].state.values()} == {STEPS}
            run.free_memory()
            if rank == 0:
                torch.save(ends[0], place / "end.pt")


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks see none: accelerate's FSDP2 takes GPUs where there are any, on a CPU's process group too."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("no_gpus")
def test_fsdp2_trains_as_one_process_does_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    run_ranks(sharded, WORLD, tmp_path)
    for tied in (False, True):
        model, optimizer = gpt2(tied)
        begun = full(model)
        train(Plain, model, optimizer, range(STEPS), HALVES)
        ended = torch.load(tmp_path / f"tied {tied}" / "end.pt")
        assert ended.keys() == begun.keys()
        for name, value in full(model).items():
            assert not torch.equal(value, begun[name])
            if not tied:
                assert torch.equal(value, ended[name])
            elif "c_attn.bias" not in name:  # the gradients of keys' biases are rounding alone
                # The gradient of a tied weight has four addends, which are rounded in another order.
                assert (ended[name] - value).norm() < 0.2 * (value - begun[name]).norm(), name


def mixed(rank: int, folder: Path) -> None:
    with accelerator(rank, folder, "bf16") as run:
        model, optimizer = run.prepare(*gpt2(True))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        before = full(model)
        with pytest.raises(
            ValueError, match=r"for weights='split8'.*wte.weight\); under accelerate mixed_precision must be 'no'"
        ):
            train(run, model, optimizer, range(1), HALVES)
        assert all(torch.equal(value, before[name]) for name, value in full(model).items())


@pytest.mark.usefixtures("no_gpus")
def test_where_accelerate_makes_weights_float32_the_error_says_what_to_set(tmp_path: Path) -> None:
    run_ranks(mixed, WORLD, tmp_path)
