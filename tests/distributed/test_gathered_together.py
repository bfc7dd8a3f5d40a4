"""Weights that are gathered as codes together: of a group, uneven or empty, written to between gathers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import narrowgauge as ng
from forked import run_ranks
from narrowgauge.distributed import _gather_codes, _groups, gather_codes
from narrowgauge.linear import swap_linears

WORLD = 4
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYOUTS = ("rows", "replicated", "both")


class Block(nn.Module):
    """Of 4 ranks the last has no row of `narrow`, and fewer of `wide`; `frozen` is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.frozen, self.narrow = nn.Linear(16, 33), nn.Linear(33, 32), nn.Linear(32, 5)
        self.back = nn.Linear(5, 16)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.narrow(self.frozen(self.wide(x))))


def made(layout: str, codes: bool) -> nn.Sequential:
    """A group of four weights in two formats, a group of one, and another of four."""
    torch.manual_seed(0)
    net = nn.Sequential(Block(), nn.Linear(16, 16), Block())
    swap_linears(net, ng.linear.SWITCHBACK, min_features=1)
    net[0].frozen.set_plan(ng.linear.SWITCHBACK.with_format("e4m3"))
    if codes:
        assert len(gather_codes(net)) == 9
    rows, both = init_device_mesh("cpu", (WORLD,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    meshes: dict[str, list[DeviceMesh]] = {
        "rows": [rows] * 3, "replicated": [both] * 3, "both": [rows, both, both],
    }  # fmt: skip
    for layer, mesh in zip(net, meshes[layout], strict=True):
        fully_shard(layer, mesh=mesh, mp_policy=POLICY)
    return fully_shard(net, mesh=meshes[layout][-1], mp_policy=POLICY)


class Collectives(TorchDispatchMode):
    """How many all-reduces there are of integers, by which ranks agree, and of how many weights each."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allreduce_" in func.__name__ and args[0][0].dtype == torch.int32:
            self.sizes.append(len(args[0][0]))
        return func(*args, **(kwargs or {}))


def write(net: nn.Module, factor: float) -> None:
    """Without a sign for anybody: no version counts it."""
    for name, p in net.named_parameters():
        if name.endswith("weight"):
            p.data.to_local().data.mul_(factor)


def trained(net: nn.Module, rank: int, steps: int = 3) -> dict[str, Any]:
    """Three steps; weights are written to between two of them, and between a forward and a backward pass, and a
    plan gets another format.
    """
    losses, gradients, sizes = [], [], []
    for step in range(steps):
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        with Collectives() as seen:
            loss = net(x).float().square().mean()
            if step == 1:
                write(net, 0.25)
            loss.backward()
        sizes.append(seen.sizes)
        losses.append(loss.detach())
        gradients.append([p.grad.full_tensor() for p in net.parameters() if p.grad is not None])
        net.zero_grad()
        write(net, -1.5)
        net[2].wide.set_plan(ng.linear.SWITCHBACK.with_format("e5m2"))
    return {"losses": losses, "gradients": gradients, "sizes": sizes}


def on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        done: dict[Any, Any] = {
            (layout, codes): trained(made(layout, codes), rank) for layout in LAYOUTS for codes in (False, True)
        }
        done["one by one"] = alone(rank)
        done["changed"] = changed(rank)
        done["asked"] = asked()
        done["kept by some"] = kept_by_some()
        torch.save(done, f"{folder}/{rank}")
    finally:
        dist.destroy_process_group()


def alone(rank: int) -> dict[str, Any]:
    """Where torch's groups cannot be read."""
    net, read = made("rows", True), _groups._asked

    def unreadable(group: Any, kind: type) -> Any:
        raise AttributeError("fsdp_params")

    _groups._asked = unreadable
    try:
        return trained(net, rank)
    finally:
        _groups._asked = read


def changed(rank: int) -> tuple[str, list[int]]:
    """A plan without codes, set after the first step, for a weight that is not the first of its group."""
    net = made("rows", True)
    trained(net, rank, steps=1)
    net[0].narrow.set_plan(ng.linear.LLM_INT8)
    with Collectives() as seen:
        try:
            net(torch.ones(2, 16))
        except ValueError as error:
            return str(error), seen.sizes
    return "", seen.sizes


def kept_by_some() -> tuple[str, list[int]]:
    """Weights that two ranks each are to keep between the passes."""
    net = nn.Sequential(nn.Linear(16, 16))
    swap_linears(net, ng.linear.SWITCHBACK, min_features=1)
    gather_codes(net)
    fully_shard(net, mesh=init_device_mesh("cpu", (WORLD,)), reshard_after_forward=2)
    fully_shard(whole := nn.Sequential(net), mesh=init_device_mesh("cpu", (WORLD,)))
    with Collectives() as seen:
        try:
            whole(torch.ones(2, 16))
        except (ValueError, RuntimeError) as error:
            return str(error), seen.sizes
    return "", seen.sizes


def asked() -> dict[str, Any]:
    """Shards asked in another order than theirs, and a gather that ends early."""
    net = made("rows", True)
    mesh = init_device_mesh("cpu", (WORLD,))
    layers = [net[0].wide, net[0].frozen, net[0].narrow, net[0].back]

    def ask(which: int, of: nn.Module | None = None) -> Tensor:
        layer = of or layers[which]
        shard, size = layer.weight._local_tensor, layer.weight.shape
        (codes,), (scale, _) = shard.fsdp_pre_all_gather(mesh, size, (size[1], 1), layer, POLICY)
        return torch.cat([codes.flatten().float(), scale.flatten()])

    def asking(*which: int) -> tuple[list[Tensor], list[int]]:
        with Collectives() as seen:
            found = [ask(one) for one in which]
        return found, seen.sizes

    found: dict[str, Any] = {"in order": asking(0, 1, 2, 3), "in another": asking(0, 2, 1, 3)}
    found["twice"] = asking(0, 1, 1, 2)
    asking(0)
    write(net, 3.0)
    found["written"] = asking(0, 1, 2, 3)
    asking(0, 1)
    with Collectives() as seen:
        ask(0, of=net[1])
    found["another group"] = seen.sizes
    write(net, 1 / 3)
    found["after it"] = asking(2, 3)
    _gather_codes._waiting.shards.clear()
    return found


Runs = Callable[[Any], list[Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(on_a_rank, WORLD, str(folder))
    done = [torch.load(folder / str(rank), weights_only=False) for rank in range(WORLD)]
    return lambda key: [one[key] for one in done]


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert all(len(gradients) == 16 for gradients in one["gradients"])
    assert all(torch.equal(a, b) for a, b in zip(one["losses"], other["losses"], strict=True))
    steps = zip(one["gradients"], other["gradients"], strict=True)
    return all(torch.equal(a, b) for pair in steps for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_have_the_bits_of_gathered_weights(runs: Runs, layout: str) -> None:
    """Also of weights that were written to since the last gather, which no counter of writes tells."""
    for plain, coded in zip(runs((layout, False)), runs((layout, True)), strict=True):
        assert equal(plain, coded)
        assert len({float(loss) for loss in plain["losses"]}) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_agrees_once_a_gather(runs: Runs, layout: str) -> None:
    """Ranks that have no row of a weight do as well."""
    for plain, coded in zip(runs((layout, False)), runs((layout, True)), strict=True):
        assert plain["sizes"] == [[]] * 3
        assert coded["sizes"] == [[4, 1, 4, 4, 1, 4]] * 3


def test_without_groups_weights_are_gathered_one_by_one(runs: Runs) -> None:
    for plain, coded in zip(runs(("rows", False)), runs("one by one"), strict=True):
        assert equal(plain, coded)
        assert coded["sizes"] == [[1] * 18] * 3


def test_a_plan_that_was_changed_is_refused_before_ranks_meet(runs: Runs) -> None:
    for said, sizes in runs("changed"):
        assert said.startswith("plan: got LLM_INT8: int8, set after gather_codes; takes one that scales W by")
        assert sizes == []


def test_codes_that_some_ranks_are_to_keep_are_refused_before_ranks_meet(runs: Runs) -> None:
    for said, sizes in runs("kept by some"):
        assert said.startswith(
            "reshard_after_forward: got a number of ranks, takes True or False where gather_codes"
        )
        assert sizes == []


def test_what_is_asked_in_another_order_is_encoded_anew(runs: Runs) -> None:
    for found in runs("asked"):
        wanted, sizes = found["in order"]
        assert sizes == [4]
        other, sizes = found["in another"]
        assert sizes == [4, 1, 1, 1]
        assert all(torch.equal(wanted[at], one) for at, one in zip((0, 2, 1, 3), other, strict=True))
        twice, sizes = found["twice"]
        assert sizes == [4, 1, 1]
        assert all(torch.equal(wanted[at], one) for at, one in zip((0, 1, 1, 2), twice, strict=True))


def test_nothing_is_kept_for_another_gather(runs: Runs) -> None:
    for found in runs("asked"):
        before, (after, sizes) = found["in order"][0], found["written"]
        assert sizes == [4]
        for one, other in zip(before, after, strict=True):
            assert float(other[-1]) == pytest.approx(3 * float(one[-1]), rel=1e-2)
        assert found["another group"] == [1]
        again, sizes = found["after it"]
        assert sizes == [1, 1]
        for one, other in zip(before[2:], again, strict=True):
            assert float(other[-1]) == pytest.approx(float(one[-1]), rel=1e-2)
