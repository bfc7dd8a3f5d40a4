"""DeepSpeed's ZeRO on a CPU: which stages take which storages."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import narrowgauge as ng

with warnings.catch_warnings(), mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"):
    warnings.simplefilter("ignore")
    deepspeed = pytest.importorskip("deepspeed")

pytestmark = pytest.mark.filterwarnings("ignore")  # DeepSpeed's own, of torch's newer names

MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
# By what DeepSpeed's partitions are made of: fp32 master weights, or bf16 alone.
SETTINGS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16, fp32 masters": {"enabled": True}, "bf16": MASTERS}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    # It would compile its own all-reduce through shared memory.
    monkeypatch.setattr(sys.modules["deepspeed.comm.torch"], "build_shm_op", lambda: None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'alone'}", rank=0, world_size=1)
    yield
    deepspeed.comm.destroy_process_group()


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(dtype)


def grouped(net: nn.Module) -> list[dict[str, Any]]:
    """Biases keep states in fp32."""
    ps = list(net.parameters())
    return [
        {"params": [p for p in ps if p.dim() > 1]},
        {"params": [p for p in ps if p.dim() == 1], "states": "fp32", "weight_decay": 0.0},
    ]


def engine(stage: int, partitions: str, **options: Any) -> Any:
    setting = SETTINGS[partitions]
    net = model(torch.bfloat16 if setting else torch.float32)
    optimizer = ng.optim.AdamW(grouped(net), lr=1e-2, min_quantized_size=100, **options)
    config = {
        "train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True, "bf16": setting or {"enabled": False},
    }  # fmt: skip
    return deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]


def batch(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(trained: Any, steps: range, dtype: torch.dtype) -> list[float]:
    losses = []
    for step in steps:
        x = batch(step, dtype)
        loss = (trained(x).float() - x.float()).square().mean()
        trained.backward(loss)
        trained.step()
        losses.append(float(loss.detach()))
    return losses


def weights(trained: Any) -> list[Tensor]:
    ps = list(trained.module.parameters())
    with deepspeed.zero.GatheredParameters(ps):
        return [p.detach().clone() for p in ps]


# Partitions, weights, states: some in every stage, others in one.
EVERYWHERE = [("fp32", "plain", "fp32"), ("bf16, fp32 masters", "plain", "8bit"), ("bf16", "split8", "fp32")]
ONCE = [
    ("fp32", "plain", "log8"), ("bf16", "split8", "8bit"), ("bf16", "kahan", "4bit"), ("bf16", "split", "fp32"),
    ("bf16", "expansion", "expansion"), ("bf16", "master", "bf16"), ("bf16", "stochastic", "fp8"),
]  # fmt: skip
CASES = [(stage, *case) for case in EVERYWHERE for stage in (1, 2, 3)]
CASES += [(1 + number % 3, *case) for number, case in enumerate(ONCE)]


@pytest.mark.parametrize(("stage", "partitions", "storage", "states"), CASES)
def test_zero_takes_the_storages_of_its_partitions(stage: int, partitions: str, storage: str, states: str) -> None:
    dtype = torch.float32 if partitions == "fp32" else torch.bfloat16
    trained = engine(stage, partitions, weights=storage, states=states)
    losses = train(trained, range(4), dtype)
    net = model(dtype)
    optimizer = ng.optim.AdamW(grouped(net), lr=1e-2, min_quantized_size=100, weights=storage, states=states)
    wanted = []
    for step in range(4):
        x = batch(step, dtype)
        loss = (net(x).float() - x.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss.detach()))
    assert losses == pytest.approx(wanted, rel=1e-2)
    kept = [
        {key.partition(".")[0] for key in state if "codes" in key} for state in trained.optimizer.state.values()
    ]
    assert sorted(map(len, kept)) == [0, 2 if states in ("8bit", "log8", "4bit", "fp8") else 0]
    if states == "fp32":  # elementwise: parts of a flat tensor are the whole
        assert all(map(torch.equal, weights(trained), net.parameters()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_low_words_need_partitions_of_bf16(stage: int) -> None:
    trained = engine(stage, "bf16, fp32 masters", weights="split8")
    with pytest.raises(ValueError, match=r"params must be bfloat16 for weights='split8', got torch\.float32"):
        train(trained, range(1), torch.bfloat16)


@pytest.mark.parametrize(
    ("stage", "partitions", "storage"), [(2, "bf16", "split8"), (3, "bf16, fp32 masters", "plain")]
)
def test_a_checkpoint_of_deepspeed_goes_on(tmp_path: Path, stage: int, partitions: str, storage: str) -> None:
    options = {"weights": storage, "states": "8bit"}
    trained = engine(stage, partitions, **options)
    train(trained, range(2), torch.bfloat16)
    trained.save_checkpoint(str(tmp_path), tag="two")
    train(trained, range(2, 4), torch.bfloat16)
    resumed = engine(stage, partitions, **options)
    resumed.load_checkpoint(str(tmp_path), tag="two")
    train(resumed, range(2, 4), torch.bfloat16)
    assert all(map(torch.equal, weights(trained), weights(resumed)))
