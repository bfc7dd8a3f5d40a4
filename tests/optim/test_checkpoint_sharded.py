"""States of sharded parameters, seen by one rank of several whose collectives do nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextlib import nullcontext as does_not_warn
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from narrowgauge.optim import AdamW, NarrowOptimizer, SGD8bit
from narrowgauge.optim._sharded_state import Chunks, without_padding
from narrowgauge.optim._sharding import Shard as Box

OPTIONS: dict[str, Any] = {"block_size": 64, "min_quantized_size": 0, "nonfinite": "propagate"}


@contextmanager
def rank_of(world: int, rank: int = 0) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def rows(mesh: DeviceMesh, x: Tensor, length: int) -> DTensor:
    """A DTensor of `length` rows, x here."""
    shape = torch.Size((length, *x.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def stepped(mesh: DeviceMesh, here: tuple[int, ...], length: int, **options: Any) -> tuple[Any, NarrowOptimizer]:
    """A sharded parameter and its optimizer after a step."""
    torch.manual_seed(0)
    p = nn.Parameter(rows(mesh, torch.randn(here), length))
    optimizer = AdamW([("w", p)], **{**OPTIONS, **options})
    p.grad = rows(mesh, torch.randn(here), length)
    optimizer.step()
    return p, optimizer


def twin(p: Any, **options: Any) -> tuple[Any, NarrowOptimizer]:
    q = nn.Parameter(p.detach().clone())
    return q, AdamW([("w", q)], **{**OPTIONS, **options})


def decoded(p: Any, optimizer: NarrowOptimizer) -> dict[str, Tensor]:
    here = p.to_local() if isinstance(p, DTensor) else p
    plan = optimizer.plan_of(p)
    return {slot.slot.name: slot.decode(optimizer.state[p], here.shape) for slot in plan.slots}


def test_a_momentum_that_is_off_does_not_stop_saving() -> None:
    with rank_of(2) as mesh:
        p = nn.Parameter(rows(mesh, torch.randn(8, 64), 16))
        optimizer = SGD8bit([p], min_quantized_size=0, nonfinite="propagate")
        p.grad = rows(mesh, torch.randn(8, 64), 16)
        optimizer.step()
        assert list(optimizer.state_dict()["state"]) == [0]


def test_codes_of_two_a_byte_may_have_the_shape_of_the_shard() -> None:
    """Of 10 elements three ranks have 4, 4 and 2: two bytes of codes, of which the last rank needs one."""
    with rank_of(3, rank=2) as mesh:
        p, saved = stepped(mesh, (2,), 10, states="4bit", block_size=4)
        q, loaded = twin(p, states="4bit", block_size=4)
        loaded.load_state_dict(saved.state_dict())
        for key, value in saved.state[p].items():
            assert torch.equal(value, loaded.state[q][key]), key


@pytest.mark.parametrize("here", [(8, 64), (5, 10)], ids=["aligned", "own blocks"])
@pytest.mark.parametrize("options", [{"block_size": 128}, {"block_size": 1024}, {"states": "fp32"}], ids=str)
def test_sharded_states_convert_on_the_same_ranks(here: tuple[int, int], options: dict[str, Any]) -> None:
    with rank_of(2) as mesh:
        p, saved = stepped(mesh, here, 2 * here[0], states="8bit")
        shown = saved.state_dict()["state"][0]["m.scales"]
        assert shown.shape == ((16, 1) if here == (8, 64) else (10, 10, 1))
        q, loaded = twin(p, **{"states": "8bit", **options})
        loaded.load_state_dict(saved.state_dict())
        for name, wanted in decoded(p, saved).items():
            exact = options == {"states": "fp32"}
            assert (decoded(q, loaded)[name] - wanted).abs().max() <= (0 if exact else 0.01 * wanted.abs().max())


@pytest.mark.parametrize("states", [{"m": "log8", "v": "factored"}, "factored"], ids=str)
def test_factors_of_the_whole_become_moments_of_a_shard(states: Any) -> None:
    torch.manual_seed(0)
    q = nn.Parameter(torch.randn(16, 64))
    saved = AdamW([("w", q)], states=states, **OPTIONS)
    q.grad = torch.randn(16, 64)
    saved.step()
    with rank_of(2) as mesh:
        p = nn.Parameter(rows(mesh, q.detach()[:8].clone(), 16))
        given = saved.state_dict()
        box, entry = Box.whole(q.shape), given["state"][0]
        words = {key: value for key, value in entry.items() if value.dim()}
        words = without_padding(box, words, set(), 64)
        chunks = Chunks([(box, words)], {key: value for key, value in entry.items() if not value.dim()})
        for one in (entry, chunks):
            loaded = AdamW([("w", p)], **OPTIONS)
            with pytest.warns(UserWarning, match="encoded moments anew"):
                loaded.load_state_dict({**given, "state": {0: one}})
            for name, whole in decoded(q, saved).items():
                assert torch.equal(decoded(p, loaded)[name], whole[:8]), name


def test_blocks_of_one_rank_are_those_of_the_whole() -> None:
    with rank_of(1) as mesh:
        p, optimizer = stepped(mesh, (3, 10), 3, states="8bit")
        state_dict = optimizer.state_dict()
        q, again = twin(p, states="8bit")
        entry = state_dict["state"][0]
        again.load_state_dict(state_dict)
        assert torch.equal(again.state[q]["m.codes"], optimizer.state[p]["m.codes"])
        full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in entry.items()}
        wanted = decoded(p, optimizer)
    groups = state_dict["param_groups"]
    alone = AdamW([("w", nn.Parameter(torch.ones(3, 10)))], states="8bit", **OPTIONS)
    alone.load_state_dict({"state": {0: full}, "param_groups": groups})
    (r,) = alone.param_groups[0]["params"]
    assert torch.equal(decoded(r, alone)["m"], wanted["m"])
    plain = alone.state_dict()["state"][0]
    # 30 elements are one block of one rank, and two of two: cut as shown, and as one process has them.
    for entry, words in ((full, does_not_warn()), (plain, pytest.warns(UserWarning, match="encoded moments anew"))):
        with rank_of(2) as mesh:
            r = nn.Parameter(rows(mesh, torch.ones(2, 10), 3))
            shared = AdamW([("w", r)], states="8bit", **OPTIONS)
            with words:
                shared.load_state_dict({"state": {0: entry}, "param_groups": groups})
            miss = (decoded(r, shared)["m"] - wanted["m"][:2]).abs().max()
            assert miss <= (0 if entry is full else 0.01) * wanted["m"].abs().max()


@pytest.mark.parametrize("states", ["8bit", "fp8", "4bit", "log8", "log4"])
@pytest.mark.parametrize(
    ("shape", "block"), [((6, 8), 8), ((6, 8), 4), ((6, 4, 2), 4), ((3, 5), 2), ((12,), 4), ((5, 2), 2)], ids=str
)
def test_shapes_in_a_state_dict_do_not_depend_on_the_number_of_ranks(
    shape: tuple[int, ...], block: int, states: str
) -> None:
    """And whole tensors in these shapes, or in those of one process, are read in one process and by any rank."""
    torch.manual_seed(0)
    options = {**OPTIONS, "states": states, "block_size": block}
    whole = nn.Parameter(torch.randn(shape))
    alone = AdamW([("w", whole)], **options)
    whole.grad = torch.randn(shape)
    alone.step()
    with rank_of(1) as mesh:
        p = nn.Parameter(rows(mesh, whole.detach().clone(), shape[0]))
        one = AdamW([("w", p)], **options)
        one.load_state_dict(alone.state_dict())
        shown = one.state_dict()["state"][0]
        full = {key: x.to_local() if isinstance(x, DTensor) else x for key, x in shown.items()}
    again = AdamW([("w", nn.Parameter(whole.detach().clone()))], **options)
    groups = alone.state_dict()["param_groups"]
    again.load_state_dict({"state": {0: full}, "param_groups": groups})
    for key, value in alone.state[whole].items():
        assert torch.equal(value, again.state[again.param_groups[0]["params"][0]][key]), key
    here = whole.detach().chunk(2)[0]
    wanted = {name: moment.chunk(2)[0] for name, moment in decoded(whole, alone).items()}
    with rank_of(2) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = nn.Parameter(rows(mesh, here.clone(), shape[0]))
        two = AdamW([("w", p)], **options)
        for state in (full, alone.state_dict()["state"][0]):
            two.load_state_dict({"state": {0: state}, "param_groups": groups})
            for name, moment in decoded(p, two).items():
                bound = 0 if here.numel() % block == 0 else 0.3 * float(wanted[name].abs().max())
                assert float((moment - wanted[name]).abs().max()) <= bound
        seen = two.state_dict()["state"][0]
    assert {key: x.shape for key, x in seen.items()} == {key: x.shape for key, x in shown.items()}


def halves(states: Any) -> tuple[list[NarrowOptimizer], list[dict[str, Tensor]]]:
    """The states of two boxes of three rows, whose blocks are not the whole's, by an optimizer of each."""
    torch.manual_seed(0)
    optimizers = [
        AdamW([nn.Parameter(torch.randn(3, 16))], states=states, block_size=32, min_quantized_size=0)
        for _ in range(2)
    ]
    for optimizer in optimizers:
        (p,) = optimizer.param_groups[0]["params"]
        p.grad = torch.randn(3, 16)
        optimizer.step()
    return optimizers, [dict(optimizer.state[optimizer.param_groups[0]["params"][0]]) for optimizer in optimizers]


def chunks(found: list[dict[str, Tensor]]) -> Chunks:
    boxes = [Box((6, 16), (at, 0), (3, 16)) for at in (0, 3)]
    words = [{k: v for k, v in one.items() if f"{k.partition('.')[0]}.codes" in one} for one in found]
    common = {
        key: torch.cat([one[key] for one in found]) if value.dim() else value
        for key, value in found[0].items()
        if key not in words[0]
    }
    return Chunks(list(zip(boxes, words, strict=True)), common)


@pytest.mark.parametrize("second", ["fp32", "bf16", "expansion", "8bit"])
def test_a_moment_in_units_of_another_is_put_together(second: str) -> None:
    """That other may have an item for each element, which no box holds."""
    states = {"m": "log8", "v": second}
    optimizers, found = halves(states)
    whole = AdamW(
        [("w", nn.Parameter(torch.randn(6, 16)))], states={"m": "fp32", "v": "fp32"}, min_quantized_size=0
    )
    groups = [{**optimizers[0].state_dict()["param_groups"][0], "params": [0]}]
    with pytest.warns(UserWarning, match="encoded moments anew"):
        whole.load_state_dict({"state": {0: chunks(found)}, "param_groups": groups})
    for name in ("m", "v"):
        parts = []
        for optimizer in optimizers:
            ((p, plan),) = optimizer.plans()
            slot = next(slot for slot in plan.slots if slot.slot.name == name)
            parts.append(slot.decode(optimizer.state[p], p.shape))
        assert torch.equal(whole.state[whole.param_groups[0]["params"][0]][name], torch.cat(parts))


def test_damaged_boxes_are_refused() -> None:
    optimizers, found = halves("8bit")
    found[0]["m.scales"][0] = float("nan")
    whole = AdamW([("w", nn.Parameter(torch.randn(6, 16)))], states="8bit", block_size=32, min_quantized_size=0)
    groups = [{**optimizers[0].state_dict()["param_groups"][0], "params": [0]}]
    with pytest.raises(ValueError, match="'m' of w has a scale that is not finite: it was damaged"):
        whole.load_state_dict({"state": {0: chunks(found)}, "param_groups": groups})
    assert not whole.state


@pytest.mark.parametrize(("key", "value"), [("m.codes", 5), ("m.scales", torch.tensor(1.0))])
def test_damaged_entries_beside_sharded_ones_are_named(key: str, value: Any) -> None:
    with rank_of(2) as mesh:
        p, saved = stepped(mesh, (5, 10), 10, states="8bit")
        _, loaded = twin(p, states="8bit")
        state_dict = saved.state_dict()
        state_dict["state"][0][key] = value
        with pytest.raises(ValueError, match=rf"state_dict: '{key.partition('.')[0]}.* of w"):
            loaded.load_state_dict(state_dict)
