"""All-gathers of codes: the training of gathered weights to the bit, in half the bytes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import narrowgauge as ng
from forked import run_ranks
from narrowgauge.distributed import gather_codes, latest_checkpoint, load_checkpoint, save_checkpoint
from narrowgauge.linear import LinearPlan, swap_linears

WORLD, STEPS = 2, 3
PLANS = {
    "SWITCHBACK": ng.linear.SWITCHBACK,
    "SWITCHBACK e5m2": ng.linear.SWITCHBACK.with_format("e4m3", "e5m2"),
    "SWITCHBACK_M": ng.linear.SWITCHBACK_M,
    "TENSORWISE_FP8": ng.linear.TENSORWISE_FP8,
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# How they are trained: a policy, whether blocks are run again, whether weights stay gathered.
HOW: dict[str, tuple[MixedPrecisionPolicy, bool, bool]] = {
    "fp32": (MixedPrecisionPolicy(), False, False),
    "bf16": (BF16, False, False),
    "checkpointed": (BF16, True, False),
    "kept": (BF16, False, True),
}


class Block(nn.Module):
    """Rows that two ranks cannot share evenly, and a transposed layer."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 49), Conv1D(32, 49)
        self.again = again

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)


def device() -> torch.device:
    """A rank's own."""
    return torch.device("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")


def model(plan: LinearPlan, again: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(Block(again), Block(again), nn.Linear(32, 16))
    assert len(swap_linears(made, plan).swapped) == 5
    return made.to(device())


def sharded(plan: LinearPlan, how: str, codes: bool) -> nn.Module:
    policy, again, kept = HOW[how]
    made = model(plan, again)
    before = list(made.parameters())
    if codes:
        assert gather_codes(made) == ["0.up", "0.down", "1.up", "1.down", "2"]
        assert all(one is other for one, other in zip(made.parameters(), before, strict=True))
    mesh = init_device_mesh(device().type, (WORLD,))
    for block in made[:2]:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not kept)
    return fully_shard(made, mesh=mesh, mp_policy=policy, reshard_after_forward=not kept)


class Gathered(TorchDispatchMode):
    """Bytes that all-gathers bring, and how many all-reduces there are."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.agreed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_allgather_base" in func.__name__:
            self.bytes += args[0].nbytes
        self.agreed += "allreduce_" in func.__name__
        return func(*args, **(kwargs or {}))


def trained(made: nn.Module, rank: int, poison: bool = False) -> dict[str, Any]:
    optimizer = ng.optim.AdamW(made.parameters(), lr=0.01, states="log8")
    losses, gradients, gathered = [], [], Gathered()
    for step in range(STEPS):
        x = torch.randn(6, 32, generator=torch.Generator().manual_seed(10 * step + rank)).to(device())
        if poison and step == 1 and rank == 1:
            with torch.no_grad():
                made[0].up.weight.to_local()[0, 0] = torch.nan
        optimizer.zero_grad()
        with gathered if step else contextlib.nullcontext():  # which takes layers the way past their kernels
            loss = (made(x).float() - 1).square().mean()
            loss.backward()
        losses.append(loss.detach().clone())
        gradients.append([p.grad.full_tensor() for p in made.parameters()])
        optimizer.step()
    return {
        "losses": losses, "gradients": gradients, "bytes": gathered.bytes, "agreed": gathered.agreed,
        "weights": [p.full_tensor().detach() for p in made.parameters()],
        "paths": {row.path for row in optimizer.describe().rows},
    }  # fmt: skip


def on_a_rank(rank: int, folder: str, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        done: dict[Any, Any] = {
            (name, how, codes): trained(sharded(plan, how, codes), rank)
            for name, plan in PLANS.items()
            for how in (HOW if name == "SWITCHBACK" else ["bf16"])
            for codes in (False, True)
        }
        for name in ("SWITCHBACK", "TENSORWISE_FP8"):
            for codes in (False, True):
                done[name, "poisoned", codes] = trained(sharded(PLANS[name], "fp32", codes), rank, poison=True)
        done["saved"] = saved_and_loaded(Path(folder))
        done["refused"] = refused()
        torch.save(done, f"{folder}/{rank}")
    finally:
        dist.destroy_process_group()


def saved_and_loaded(folder: Path) -> bool:
    """A checkpoint of such shards goes into a model whose are gathered as they are, and a file of torch."""
    made = sharded(PLANS["SWITCHBACK"], "bf16", True)
    optimizer = ng.optim.AdamW(made.parameters(), lr=0.01)
    made(torch.ones(2, 32, device=device())).sum().backward()
    optimizer.step()
    save_checkpoint(folder / "run", model=made, optimizer=optimizer, step=1)
    other = sharded(PLANS["SWITCHBACK"], "bf16", False)
    load_checkpoint(
        latest_checkpoint(folder / "run"), model=other, optimizer=ng.optim.AdamW(other.parameters(), lr=0.01)
    )
    file = io.BytesIO()
    torch.save({name: p.full_tensor() for name, p in made.state_dict().items()}, file)
    file.seek(0)
    whole = torch.load(file, weights_only=True)
    wanted = {name: p.full_tensor() for name, p in other.state_dict().items()}
    return all(type(t) is Tensor and torch.equal(t, wanted[name]) for name, t in whole.items())


def refused() -> dict[str, str]:
    found = {}
    made = sharded(PLANS["SWITCHBACK"], "fp32", False)
    for name, bad in {"sharded": made, "none": nn.Linear(3, 3)}.items():
        try:
            gather_codes(bad)
        except ValueError as error:
            found[name] = str(error)
    changed = sharded(PLANS["SWITCHBACK"], "fp32", True)
    changed[2].set_plan(ng.linear.LLM_INT8)
    try:
        changed(torch.ones(2, 32, device=device()))
    except ValueError as error:
        found["changed"] = str(error)
    return found


Runs = Callable[[Any], list[Any]]


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    if request.param == "nccl" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"gpu: needs {WORLD} of them, torch sees {torch.cuda.device_count()}")
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(on_a_rank, WORLD, str(folder), request.param)
    done = [torch.load(folder / str(rank), weights_only=False, map_location="cpu") for rank in range(WORLD)]
    return lambda key: [one[key] for one in done]


CASES = [("SWITCHBACK", how) for how in HOW] + [(name, "bf16") for name in PLANS if name != "SWITCHBACK"]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_the_training_is_that_of_gathered_weights_to_the_bit(runs: Runs, name: str, how: str) -> None:
    for plain, coded in zip(runs((name, how, False)), runs((name, how, True)), strict=True):
        assert torch.equal(torch.stack(plain["losses"]), torch.stack(coded["losses"]))
        for wanted, found in zip(plain["gradients"], coded["gradients"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(plain["weights"], coded["weights"], strict=True))
        assert plain["paths"] == coded["paths"]
        assert all(path.startswith("fused") for path in coded["paths"])


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_byte_an_element_is_gathered(runs: Runs, name: str, how: str) -> None:
    plain, coded = (runs((name, how, codes))[0]["bytes"] for codes in (False, True))
    width = 4 if how == "fp32" else 2
    # Matrices with padding, norms and biases: of two blocks and of the head.
    matrices, vectors = 2 * (50 * 32 + 50 * 32) + 16 * 32, 2 * (2 * 32 + 50 + 32) + 16
    assert plain % (width * (matrices + vectors)) == 0
    times = plain // (width * (matrices + vectors))
    assert times == (1 if how == "kept" else 2) * (STEPS - 1)
    assert coded == times * (matrices + width * vectors)


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_group_agrees_in_one_collective(runs: Runs, name: str, how: str) -> None:
    plain, coded = (runs((name, how, codes))[0]["agreed"] for codes in (False, True))
    times = (1 if how == "kept" else 2) * (STEPS - 1)
    assert (plain, coded) == (0, 3 * times)  # two blocks and the head


@pytest.mark.parametrize("name", ["SWITCHBACK", "TENSORWISE_FP8"])
def test_what_is_not_finite_on_one_rank_is_seen_by_all(runs: Runs, name: str) -> None:
    for plain, coded in zip(runs((name, "poisoned", False)), runs((name, "poisoned", True)), strict=True):
        assert coded["losses"][1].isnan()
        assert torch.equal(torch.stack(plain["losses"]).isnan(), torch.stack(coded["losses"]).isnan())
        for wanted, found in zip(plain["gradients"][1], coded["gradients"][1], strict=True):
            torch.testing.assert_close(wanted, found, rtol=0, atol=0, equal_nan=True)


def test_files_know_nothing_of_it(runs: Runs) -> None:
    assert runs("saved") == [True, True]


def test_what_cannot_be_gathered_as_codes_is_refused(runs: Runs) -> None:
    for said in runs("refused"):
        assert said["sharded"] == "model: got 0.up sharded already, takes one that fully_shard has not seen"
        assert said["none"].startswith("model: got no layer whose plan scales W by the tensor alone")
        assert said["changed"].startswith("plan: got LLM_INT8: int8, set after gather_codes")
    with pytest.raises(TypeError, match="model: got int, takes a torch"):
        gather_codes(3)  # type: ignore[arg-type]


def test_tied_weights_and_other_plans_are_left() -> None:
    made = model(ng.linear.SWITCHBACK)
    made[1].up.weight = made[0].up.weight
    made[1].down.set_plan(ng.linear.LLM_INT8)
    made[2].set_plan(ng.linear.TENSORWISE_FP8.with_moving_average())
    assert gather_codes(made) == ["0.down"]
