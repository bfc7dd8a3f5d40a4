"""Two processes that train one model: their sums are added, once for every element, and one of them writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from watched import batch, model, of_kind

from forked import run_ranks
from narrowgauge import gauges, optim

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

MAKERS: dict[str, Any] = {
    "torch": lambda net: torch.optim.AdamW(net.parameters(), 1e-3),
    "ours": lambda net: optim.AdamW(net.named_parameters(), 1e-3, states="8bit", min_quantized_size=1000),
    "ours, fp32": lambda net: optim.AdamW(net.named_parameters(), 1e-3),
}


def halves(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, targets = batch(step, rows=8)
    return ids.chunk(world)[rank], targets.chunk(world)[rank]


def untied(dtype: torch.dtype) -> nn.Module:
    """Without dropout, so that halves of a batch are those of the whole."""
    net = model(dtype).eval()
    net.train = lambda mode=True: net  # type: ignore[method-assign]
    for module in net.modules():
        if not isinstance(module, nn.Dropout):
            module.training = True
    return net


def steps(net: nn.Module, optimizer: Any, watch: Any, rank: int, world: int) -> None:
    for step in range(4):
        ids, targets = halves(step, rank, world)
        loss = nn.functional.cross_entropy(net(ids).float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        watch.loss(loss)
        optimizer.step()


class Parts(nn.Module):
    """What tensor parallelism cuts: vocabulary, sequence, columns and rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(40, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(self.embed(ids)))))


def in_parts(world: int) -> nn.Module:
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    return parallelize_module(Parts(), init_device_mesh("cpu", (world,)), plan)


WAYS = [
    ("ddp", "ours"), ("fsdp", "torch"), ("fsdp", "ours, fp32"), ("own", "torch"), ("tp", "torch"),
    ("tp", "ours, fp32"),
]  # fmt: skip


def work(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        for how, make in WAYS:
            Path(f"{folder}/{how} {make}").mkdir(exist_ok=True)
            one_way(rank, world, f"{folder}/{how} {make}", how, make)
    finally:
        dist.destroy_process_group()


def one_way(rank: int, world: int, folder: str, how: str, make: str) -> None:
    net = untied(torch.float32) if how != "tp" else in_parts(world)
    run: nn.Module = net
    if how == "tp":
        rank, world = 0, 1  # each has the whole batch
    if how == "ddp":
        run = nn.parallel.DistributedDataParallel(net)
    elif how == "fsdp":
        untie(net)
        for part in (*net.blocks, net):
            fully_shard(part, mesh=init_device_mesh("cpu", (world,)))
    optimizer = MAKERS[make](net)
    calls = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    plain = getattr(dist, name)
    setattr(dist, name, lambda *args, **kwargs: (calls.append(1), plain(*args, **kwargs))[1])
    own = how == "own"
    path = f"{folder}/{rank if own else 'all'}.jsonl"
    with gauges.watch(run, optimizer, 2, path=path, updates=True, ranks="own" if own else "all") as watch:
        steps(run, optimizer, watch, rank, world)
    setattr(dist, name, plain)
    Path(f"{folder}/{rank}.json").write_text(json.dumps({"calls": len(calls), "rows": len(watch.rows())}))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all ways, each in a folder of its own: one start of processes for all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(work, 2, 2, str(folder))
    return folder


def said(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def untie(net: nn.Module) -> None:
    net.head = nn.Linear(48, 40, bias=False)
    with torch.no_grad():
        net.head.weight.copy_(net.embed.weight)


def alone(make: str, tied: bool = True, parts: bool = False) -> list[dict[str, Any]]:
    """The same training in one process, whole batches."""
    net = Parts() if parts else untied(torch.float32)
    if not tied:
        untie(net)
    optimizer = MAKERS[make](net)
    with gauges.watch(net, optimizer, 2, updates=True) as watch:
        steps(net, optimizer, watch, 0, 1)
    return watch.rows()


def agree(rows: list[dict[str, Any]], wanted: list[dict[str, Any]], kinds: tuple[str, ...]) -> None:
    for kind in kinds:
        some, others = of_kind(rows, kind), of_kind(wanted, kind)
        assert [(row.get("name"), row["step"]) for row in some] == [
            (row.get("name"), row["step"]) for row in others
        ]
        assert some
        for one, other in zip(some, others, strict=True):
            for key in ("loss", "norm", "descent_quality", "absmax", "mean", "rms"):
                if key in other:
                    assert one[key] == pytest.approx(other[key], rel=2e-3), (
                        kind,
                        one["step"],
                        one.get("name"),
                        key,
                    )
            for key in ("elements", "nonzero", "nonfinite", "measured"):
                assert one.get(key) == other.get(key), (kind, one["name"], key)


@pytest.mark.parametrize("make", ["ours"])
def test_ddp(ran: Path, make: str) -> None:
    """What ranks have in common is counted once; features are of all their batches."""
    rows = gauges.read_records(ran / f"ddp {make}" / "all.jsonl")
    assert rows.damage is None
    # One collective a measured step; the second has nothing to write.
    assert said(ran / f"ddp {make}") == [{"calls": 2, "rows": len(rows)}, {"calls": 2, "rows": 0}]
    agree(rows, alone(make), ("step", "update", "gradient", "activation"))


@pytest.mark.parametrize("make", ["torch", "ours, fp32"])
def test_fsdp2(ran: Path, make: str) -> None:
    """Shards add up to the tensor."""
    rows = gauges.read_records(ran / f"fsdp {make}" / "all.jsonl")
    assert rows.damage is None
    agree(rows, alone(make, tied=False), ("step", "update", "gradient", "activation"))


@pytest.mark.parametrize("make", ["torch", "ours, fp32"])
def test_tensor_parallelism(ran: Path, make: str) -> None:
    """Gradients that are cut or summed otherwise than their parameters are measured as the step takes them."""
    rows = gauges.read_records(ran / f"tp {make}" / "all.jsonl")
    assert rows.damage is None
    agree(rows, alone(make, parts=True), ("step", "update", "gradient"))


def test_processes_that_train_models_of_their_own(ran: Path) -> None:
    assert [one["calls"] for one in said(ran / "own torch")] == [0, 0]
    one, other = (gauges.read_records(ran / "own torch" / f"{rank}.jsonl") for rank in range(2))
    assert of_kind(one, "step")[0]["loss"] != of_kind(other, "step")[0]["loss"]
