"""Swapped layers on two processes: DDP and FSDP2 beside one process.

The batch is halved between the ranks, so what is scaled by row has the same codes as in one process, and gradients
differ by the order of float32 sums. What is scaled by the tensor has the absmax of a rank's own half; the one
process then takes one half after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import narrowgauge as ng
from forked import run_ranks
from narrowgauge.linear import LinearPlan, LowPrecisionLinear, hold_activations, linear, swap_linears
from narrowgauge.linear._plan import named_plan

pytestmark = pytest.mark.usefixtures("one_thread")  # as the ranks have: in bf16 the order of sums is seen
WORLD, BATCH, DIM, STEPS = 2, 12, 32, 3

PLANS = {
    "SWITCHBACK": ng.linear.SWITCHBACK,
    "SWITCHBACK_M": ng.linear.SWITCHBACK_M,
    "averaged": ng.linear.TENSORWISE_FP8.with_moving_average(decay=0.5),
}


class Block(nn.Module):
    """As a transformer's: a norm, two layers, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 64), nn.Linear(64, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model(plan: LinearPlan) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(Block(), Block(), nn.Linear(DIM, 16))
    assert len(swap_linears(made, plan).swapped) == 5
    return made


def halves(step: int) -> list[Tensor]:
    """What the ranks get at a step; rank 1 gets inputs that are larger in some elements."""
    x = torch.randn(BATCH, 5, DIM, generator=torch.Generator().manual_seed(step)) * (1 + step)
    first, second = x.chunk(WORLD)
    return [first, second * torch.where(torch.arange(DIM) % 7 == 0, 3.0, 1.0)]


def loss_of(made: nn.Module, x: Tensor) -> Tensor:
    return (made(x).float() - 1).square().mean()


def averages(made: nn.Module) -> list[Tensor]:
    return [b.detach().clone() for name, b in made.named_buffers() if name.endswith("absmax_averages")]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def train(made: nn.Module, rank: int) -> dict:
    """Some steps of SGD; the losses, the gradients of each step, the averages at the end."""
    losses, gradients = [], []
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(made, halves(step)[rank])
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append([whole(p.grad.detach()) for p in made.parameters()])
        optimizer.step()
    return {"losses": losses, "gradients": gradients, "averages": averages(made)}


def parallel(how: str, plan: LinearPlan) -> nn.Module:
    made = model(plan)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(made)
    policy = MixedPrecisionPolicy()
    if how == "fsdp2 bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (WORLD,))  # where there is a GPU too
    for block in made[:2]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(made, mesh=mesh, mp_policy=policy)
    assert isinstance(made[0].up, LowPrecisionLinear)
    assert isinstance(made[0].up.weight, DTensor)
    return made


def on_a_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        done = {(how, name): train(parallel(how, plan), rank) for how in HOW for name, plan in PLANS.items()}
        torch.save(done | in_parts(), f"{folder}/{rank}")
    finally:
        dist.destroy_process_group()


class Pair(nn.Module):
    """Two layers, as tensor parallelism cuts them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


def by_hand(pair: Pair, x: Tensor, plan: LinearPlan) -> Tensor:
    """What the ranks compute, in one process."""
    found, x = [], pair.norm(x)
    for rank in range(WORLD):
        averages = [torch.zeros(3) if plan.tensor_absmax == "average" else None for _ in range(2)]
        up, bias = (p.chunk(WORLD)[rank] for p in (pair.up.weight, pair.up.bias))
        inner = nn.functional.gelu(linear(x, up, bias, plan, averages[0]))
        down = pair.down.weight.chunk(WORLD, 1)[rank]
        found.append(linear(inner, down, pair.down.bias / WORLD, plan, averages[1]))
    return sum(found[1:], found[0])


PARTS = (
    "SWITCHBACK:e4m3", "SWITCHBACK_M", "SWITCHBACK_Q", "LLM_INT8", "TENSORWISE_FP8", "BLOCKWISE_FP8",
    "HIGH_PRECISION", "averaged",
)  # fmt: skip


def planned_in_parts(name: str, sequence: bool, compiled: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Output and gradients under tensor parallelism, beside those by hand."""
    pair, alone, plan = Pair(), Pair(), PLANS[name] if name in PLANS else named_plan(name)
    swap_linears(pair, plan)
    ways: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        ways |= {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1))}
    parallelize_module(pair, init_device_mesh("cpu", (WORLD,)), ways)
    x = torch.randn(BATCH, 6, DIM, generator=torch.Generator().manual_seed(1))
    ran = torch.compile(pair) if compiled else pair
    y = ran(x.chunk(WORLD, 1)[dist.get_rank()] if sequence else x)
    wanted = by_hand(alone, x, plan)
    y.square().mean().backward()
    wanted.square().mean().backward()
    pairs = zip(pair.parameters(), alone.parameters(), strict=True)
    return [(whole(y.detach()), wanted.detach()), *((whole(p.grad), q.grad) for p, q in pairs)]


def in_parts() -> dict[tuple[str, str], Any]:
    """Under tensor parallelism: gradients without and with held activations."""
    mesh, ways = init_device_mesh("cpu", (WORLD,)), {"up": ColwiseParallel(), "down": RowwiseParallel()}
    done: dict[tuple[str, str], Any] = {}
    for name in ("plain", "held"):
        torch.manual_seed(0)
        block = Block()
        if name == "held":
            hold_activations(block)
        parallelize_module(block, mesh, ways)
        loss_of(block, torch.cat(halves(0))).backward()
        done["tp", name] = {of: whole(p.grad) for of, p in block.named_parameters()}
    for number, name in enumerate(PARTS):
        done["tp", name] = planned_in_parts(name, sequence=number % 2 == 0)
    cut = distribute_tensor(torch.ones(8, 32), mesh, [Shard(1)])
    try:
        linear(distribute_tensor(torch.ones(2, 31), mesh, [Replicate()]), cut, None, PLANS["SWITCHBACK"])
    except ValueError as error:
        done["tp", "refused"] = str(error)
    done["tp", "compiled"] = planned_in_parts("SWITCHBACK", sequence=True, compiled=True)
    return done


HOW = ("ddp", "fsdp2", "fsdp2 bf16")
Runs = Callable[[str, str], list[dict]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What two processes did, by how and by plan: a result for each rank. Starting them is what takes long."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(on_a_rank, WORLD, WORLD, str(folder))
    done = [torch.load(folder / str(rank)) for rank in range(WORLD)]
    return lambda how, name: [one[how, name] for one in done]


def alone(plan: LinearPlan, share_buffers: bool = False, narrow: bool = False) -> list[dict]:
    """The ranks' steps in one process: as many models as ranks, one set of weights.

    Args:
        plan: of the layers.
        share_buffers: those of rank 0 go to all before each step, as DDP does.
        narrow: compute in bf16, with float32 weights behind.
    """
    master = model(plan)
    ranks: list[nn.Module] = [copy.deepcopy(master) for _ in range(WORLD)]
    if narrow:
        for made in ranks:
            made.bfloat16()
    losses: list[list[float]] = [[] for _ in ranks]
    gradients = []
    optimizer = torch.optim.SGD(master.parameters(), lr=0.05)
    for step in range(STEPS):
        for made in ranks[1:] if share_buffers else ():
            for mine, its in zip(made.buffers(), ranks[0].buffers(), strict=True):
                mine.copy_(its)
        for made, x, own in zip(ranks, halves(step), losses, strict=True):
            made.zero_grad()
            with torch.no_grad():
                for p, q in zip(made.parameters(), master.parameters(), strict=True):
                    p.copy_(q)
            loss = loss_of(made, x.bfloat16() if narrow else x)
            loss.backward()
            own.append(float(loss.detach()))
        mean = [
            sum(p.grad.float() for p in ps) / WORLD for ps in zip(*(m.parameters() for m in ranks), strict=True)
        ]
        gradients.append(mean)
        for p, grad in zip(master.parameters(), mean, strict=True):
            p.grad = grad
        optimizer.step()
    return [
        {"losses": own, "gradients": gradients, "averages": averages(made)}
        for own, made in zip(losses, ranks, strict=True)
    ]


def check(got: list[dict], wanted: list[dict], rtol: float) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=rtol)
        for mine, its in zip(one["gradients"], other["gradients"], strict=True):
            for a, b in zip(mine, its, strict=True):
                assert float((a - b).norm()) <= rtol * float(b.norm())
        for a, b in zip(one["averages"], other["averages"], strict=True):
            assert torch.allclose(a, b, rtol=rtol)


names = pytest.mark.parametrize("name", PLANS)


@names
def test_ddp_is_one_process(runs: Runs, name: str) -> None:
    """Averages of rank 0 go to all at each forward pass, as DDP does with buffers; then each moves its own."""
    got = runs("ddp", name)
    check(got, alone(PLANS[name], share_buffers=True), rtol=1e-5)
    if name == "averaged":
        assert not torch.equal(got[0]["averages"][0], got[1]["averages"][0])


@names
def test_fsdp2_is_one_process(runs: Runs, name: str) -> None:
    got = runs("fsdp2", name)
    check(got, alone(PLANS[name]), rtol=1e-5)
    assert len(got[0]["averages"]) == (5 if name == "averaged" else 0)
    for one, other in zip(got[0]["averages"], got[1]["averages"], strict=True):
        # Of X and G each rank has its own; W was gathered, and its absmax is that of all of it on both.
        assert one[0] != other[0]
        assert one[1] == other[1]


@names
def test_fsdp2_in_mixed_precision_is_one_process_in_bf16(runs: Runs, name: str) -> None:
    check(runs("fsdp2 bf16", name), alone(PLANS[name], narrow=True), rtol=1e-5)


@pytest.mark.parametrize("name", ["SWITCHBACK", "SWITCHBACK_M"])
def test_scaled_by_row_two_processes_are_one_batch(runs: Runs, name: str) -> None:
    """The losses' mean and the gradients of the first step are those of the whole batch in one process."""
    made = model(PLANS[name])
    loss = loss_of(made, torch.cat(halves(0)))
    loss.backward()
    for how in ("ddp", "fsdp2"):
        got = runs(how, name)
        assert sum(one["losses"][0] for one in got) / WORLD == pytest.approx(float(loss.detach()), rel=1e-6)
        for mine, p in zip(got[0]["gradients"][0], made.parameters(), strict=True):
            assert float((mine - p.grad).norm()) <= 1e-5 * float(p.grad.norm())


def test_tensor_parallelism_holds_what_is_on_a_rank(runs: Runs) -> None:
    for plain, held in zip(runs("tp", "plain"), runs("tp", "held"), strict=True):
        for name in ("norm.weight", "up.weight", "down.weight"):
            noise = (held[name] - plain[name]).norm() / plain[name].norm()
            assert 1e-4 < noise < 2.0**-5, name  # rounded to codes of e4m3


@pytest.mark.parametrize("name", [*PARTS, "compiled"])
def test_tensor_parallelism_multiplies_the_parts_by_the_plan(runs: Runs, name: str) -> None:
    for rank in runs("tp", name):
        for got, wanted in rank:
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_shapes_of_dtensors_that_do_not_match_are_refused_on_all_ranks(runs: Runs) -> None:
    for said in runs("tp", "refused"):
        assert said == "input must have shape (..., 32), got shape (2, 31)"
