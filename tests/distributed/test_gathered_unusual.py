"""Weights that are gathered as codes, where parameters are made, loaded and tied in other ways than at first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_gathered_together import Collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import narrowgauge as ng
from forked import run_ranks
from narrowgauge.distributed import gather_codes
from narrowgauge.linear import swap_linears

WORLD = 2
PLACE = torch.device("cpu")


def made(codes: bool, where: str = "cpu", shard: bool = True) -> nn.Sequential:
    """Of rows that two ranks cannot share evenly."""
    torch.manual_seed(0)
    with torch.device(where):
        net = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 7))
    swap_linears(net, ng.linear.SWITCHBACK, min_features=1)
    if codes:
        gather_codes(net)
    return sharded(net) if shard else net


def sharded(net: nn.Sequential) -> nn.Sequential:
    return fully_shard(net, mesh=init_device_mesh("cpu", (WORLD,)))


def saved() -> dict[str, Tensor]:
    return {name: t + 0.125 for name, t in made(False, shard=False).state_dict().items()}


def pieces(net: nn.Module) -> dict[str, Tensor]:
    """What is saved, as the model is sharded; of another model, as far as anybody can see."""
    now: dict[str, Any] = net.state_dict()
    return {name: distribute_tensor(t, now[name].device_mesh, now[name].placements) for name, t in saved().items()}


def on_meta(codes: bool) -> nn.Module:
    """As torch's documents make large models."""
    net = made(codes, "meta")
    net.to_empty(device=PLACE)
    net.load_state_dict(pieces(net))
    return net


def assigned_on_meta(codes: bool) -> nn.Module:
    net = made(codes, "meta")
    net.load_state_dict(pieces(net), assign=True)
    return net


def assigned_before(codes: bool) -> nn.Module:
    net = made(codes, "meta", shard=False)
    net.load_state_dict(saved(), assign=True)
    return sharded(net)


def assigned_later(codes: bool) -> nn.Module:
    net = made(codes)
    net(torch.ones(2, 16)).sum().backward()
    net.zero_grad()
    net.load_state_dict(pieces(net), assign=True)
    return net


WAYS: dict[str, Callable[[bool], nn.Module]] = {
    "on meta": on_meta, "assigned on meta": assigned_on_meta, "assigned before": assigned_before,
    "assigned later": assigned_later,
}  # fmt: skip


def trained(net: nn.Module, rank: int) -> tuple[list[Tensor], list[int]]:
    optimizer, found, seen = torch.optim.SGD(net.parameters(), lr=0.1), [], Collectives()
    for step in range(2):
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        with seen:
            loss = net(x).square().mean()
            loss.backward()
        found += [loss.detach(), *(p.grad.full_tensor() for p in net.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.full_tensor().detach() for p in net.parameters())], seen.sizes


def tied(first: bool) -> tuple[str, list[int]]:
    """A table that gets a layer's weight after `gather_codes`, before or behind the layer."""
    layer, table = nn.Sequential(nn.Linear(16, 40, bias=False)), nn.Embedding(40, 16)
    swap_linears(layer, ng.linear.SWITCHBACK, min_features=1)
    gather_codes(layer)
    table.weight = layer[0].weight
    net = sharded(nn.Sequential(table, layer) if first else nn.Sequential(layer, table))
    with Collectives() as seen:
        try:
            net(torch.arange(3))
        except (ValueError, RuntimeError, AttributeError) as error:
            return str(error), seen.sizes
    return "", seen.sizes


def on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        done: dict[Any, Any] = {"tied": [tied(True), tied(False)]}
        for name, way in WAYS.items():
            for codes in (False, True):
                done[name, codes] = ([], [])
                with contextlib.suppress(RuntimeError):  # one way's fault is not all ways'
                    done[name, codes] = trained(way(codes), rank)
        torch.save(done, f"{folder}/{rank}")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], list[Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(on_a_rank, WORLD, str(folder))
    done = [torch.load(folder / str(rank), weights_only=False) for rank in range(WORLD)]
    return lambda key: [one[key] for one in done]


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_were_put_in_place_later_are_gathered_as_codes(
    runs: Callable[[Any], list[Any]], way: str
) -> None:
    for (plain, none), (coded, sizes) in zip(runs((way, False)), runs((way, True)), strict=True):
        assert none == []
        assert set(sizes) == {2}
        assert len(plain) == 14
        assert all(torch.equal(a, b) for a, b in zip(plain, coded, strict=True))


def test_a_weight_that_something_else_got_meanwhile_is_refused(runs: Callable[[Any], list[Any]]) -> None:
    for both in runs("tied"):
        for said, sizes in both:
            assert said.startswith("weight: got one that Embedding has too, tied after gather_codes; takes it tied")
            assert sizes == []
