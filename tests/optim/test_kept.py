"""Parameters of a group that are made to be kept otherwise: as in groups of their own, in steps and checkpoints."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from narrowgauge import recipes
from narrowgauge.optim import AdamW
from narrowgauge.optim._tracing import Hyperparameters

# The codes of 8bit and of log8 have the same dtype and size: a checkpoint must say which they are.
OWN: list[dict[str, str]] = [
    {"weights": "split8", "m": "log8", "v": "8bit", "reason": "both moments"},
    {"weights": "stochastic", "reason": "the weights"},
    {"m": "8bit"},
    {"reason": "as the group"},
    {},
]
KEPT = {f"p{i}": own for i, own in enumerate(OWN) if own}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for i in range(len(OWN)):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.randn(64, 64).bfloat16()))


def made(net: Net, kept: Any = KEPT, **options: Any) -> AdamW:
    group = {"params": list(net.named_parameters()), **({} if kept is None else {"kept": kept})}
    return AdamW([group], **{"weights": "split", "states": "log8", "lr": 1e-2, **options})


def step(net: Net, *optimizers: Any, n: int = 2) -> None:
    for i in range(n):
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).bfloat16()
        for optimizer in optimizers:
            optimizer.step()


def storages(optimizer: AdamW) -> list[list[str]]:
    return [[plan.weight.name, *(slot.storage.name for slot in plan.slots)] for _, plan in optimizer.plans()]


def assert_same(nets: tuple[Net, Net], optimizers: tuple[AdamW, AdamW]) -> None:
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(p, q)
        some, others = optimizers[0].state[p], optimizers[1].state[q]
        assert some.keys() == others.keys()
        assert all(torch.equal(x, others[key]) for key, x in some.items())


def test_its_steps_are_those_of_groups_of_their_own_in_as_few_calls() -> None:
    nets = Net(), Net()
    groups = []
    for named, own in zip(nets[1].named_parameters(), OWN, strict=True):
        states = {"m": "log8", "v": "log8"} | {slot: own[slot] for slot in "mv" if slot in own}
        groups.append({"params": [named], "weights": own.get("weights", "split"), "states": states})
    optimizers = made(nets[0]), AdamW(groups, lr=1e-2)
    for net, optimizer in zip(nets, optimizers, strict=True):
        step(net, optimizer)
    assert_same(nets, optimizers)
    assert [row.why for row in optimizers[0].describe().rows] == [own.get("reason", "") for own in OWN]
    assert storages(optimizers[0])[:3] == [
        ["split8", "log8", "8bit"], ["stochastic", "log8", "log8"], ["split", "8bit", "log8"],
    ]  # fmt: skip
    (roster,) = optimizers[0]._engine._rosters.values()
    if (calls := getattr(roster.lists[0], "_tables", None)) is not None:  # with a compiler
        assert [len(table.steps) for table in calls] == [1, 1, 1, 2]


def test_copies_and_checkpoints_have_it() -> None:
    nets = Net(), Net()
    optimizers = made(nets[0]), made(nets[1])
    step(nets[0], optimizers[0])
    saved = copy.deepcopy(optimizers[0].state_dict())
    optimizers[1].load_state_dict(saved)
    nets[1].load_state_dict(nets[0].state_dict())
    for net, optimizer in zip(nets, optimizers, strict=True):
        step(net, optimizer)
    assert_same(nets, optimizers)
    for copied in (copy.deepcopy(optimizers[0]), pickle.loads(pickle.dumps(optimizers[0]))):
        assert copied.param_groups[0]["kept"] == KEPT
        assert storages(copied) == storages(optimizers[0])


def decoded(optimizer: AdamW) -> list[torch.Tensor]:
    return [slot.decode(optimizer.state[p], p.shape) for p, plan in optimizer.plans() for slot in plan.slots]


@pytest.mark.filterwarnings(
    "ignore:state_dict. dropped 'weight.lo' of 'split', which 'stochastic' has no place for"
)
@pytest.mark.parametrize("way", ["into a group without", "out of a group without", "into another"])
def test_the_reading_optimizer_keeps_what_it_was_made_with(way: str) -> None:
    others: Mapping[str, Mapping[str, str]] = {"p0": {"m": "fp32"}, "p4": {"v": "fp32", "reason": "another"}}
    pairs: dict[str, tuple[Any, Any]] = {
        "into a group without": (KEPT, None),
        "out of a group without": (None, KEPT),
        "into another": (KEPT, others),
    }
    nets = Net(), Net()
    optimizers = tuple(made(net, kept) for net, kept in zip(nets, pairs[way], strict=True))
    step(nets[0], optimizers[0])
    nets[1].load_state_dict(nets[0].state_dict())
    wanted = storages(optimizers[1])
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert optimizers[1].param_groups[0].get("kept") == pairs[way][1]
    assert storages(optimizers[1]) == wanted
    for before, after in zip(*map(decoded, optimizers), strict=True):
        torch.testing.assert_close(after, before, rtol=0.1, atol=0.1 * float(before.abs().max()))
    step(nets[1], optimizers[1])


def test_names_may_differ_between_the_two() -> None:
    """Those of a compiled model have a word more; an optimizer may know no names."""
    nets = Net(), Net()
    first = made(nets[0])
    step(nets[0], first)
    saved = first.state_dict()
    longer = {f"_orig_mod.{name}": p for name, p in nets[1].named_parameters()}
    kept = {f"_orig_mod.{name}": own for name, own in KEPT.items()}
    unnamed = {f"0.{name[1:]}": own for name, own in KEPT.items()}
    for params, own in ((list(longer.items()), kept), (list(longer.values()), unnamed)):
        optimizer = AdamW([{"params": params, "kept": own}], weights="split", states="log8")
        wanted = storages(optimizer)
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert storages(optimizer) == wanted == storages(first)
        assert all(torch.equal(a, b) for a, b in zip(decoded(optimizer), decoded(first), strict=True))


def test_what_changes_later_is_seen_and_goes_along() -> None:
    net = Net()
    optimizer = made(net)
    step(net, optimizer)
    group = optimizer.param_groups[0]
    group["kept"] = {**KEPT, "p3": {"v": "fp32"}}
    step(net, optimizer)
    assert storages(optimizer)[3] == ["split", "log8", "fp32"]
    assert optimizer.state[net.p3]["v"].dtype == torch.float32
    optimizer.convert(net.p0, v="fp32")
    assert storages(optimizer)[0] == ["split8", "log8", "fp32"]
    assert optimizer.describe().rows[0].why == "both moments"
    other = Net()
    other.load_state_dict(net.state_dict())
    second = made(other, group["kept"])
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert storages(second) == storages(optimizer)
    for each, its in ((net, optimizer), (other, second)):
        step(each, its)
    assert_same((net, other), (optimizer, second))
    # The conversion of a parameter that was made otherwise is left out; those of others come.
    optimizer.convert(net.p1, v="fp32")
    third = made(copy.deepcopy(other), {**KEPT, "p0": {"m": "fp32"}})
    with pytest.warns(UserWarning, match="left out 'storages' of single parameters"):
        third.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert storages(third)[:2] == [["split", "fp32", "log8"], ["stochastic", "log8", "fp32"]]


def test_torchs_optimizer_has_none_of_it() -> None:
    net = Net()
    optimizer = made(net, {"p0": {"weights": "plain"}}, weights="plain")
    optimizer.convert(net.p1, v="fp32")
    step(net, optimizer)
    assert not {"kept", "storages"} & optimizer.torch_state_dict()["param_groups"][0].keys()
    _, torchs = recipes.to_torch(net, optimizer)
    assert not {"kept", "storages"} & torchs.param_groups[0].keys()


@pytest.mark.filterwarnings("ignore:weights='plain'")
def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    refused: list[tuple[Any, str]] = [
        ({"p9": {"m": "fp32"}}, "'kept' of group 0 must name its parameters, got 'p9'"),
        ({"p0": "log8"}, "'kept' of group 0 must be a dict of dicts, by parameter, got dict"),
        ([], "'kept' of group 0 must be a dict of dicts"),
        ({"p0": {"w": "log8"}}, r"states must name a storage for each of \['m', 'v'\] .* \(p0\)"),
        ({"p0": {"v": "log9"}}, r"states must be .*, got 'log9' \(p0\)"),
        ({"p0": {"weights": "split7"}}, r"weights must be .*, got 'split7' \(p0\)"),
    ]
    net = Net()
    optimizer = made(net)
    step(net, optimizer)
    before, saved = dict(optimizer.param_groups[0]), copy.deepcopy(optimizer.state_dict())
    for kept, words in refused:
        with pytest.raises(ValueError, match=words):
            made(Net(), kept)
        optimizer.param_groups[0]["kept"] = kept
        with pytest.raises(ValueError, match=words):
            optimizer.step()
        optimizer.param_groups[0]["kept"] = before["kept"]
        if kept != {"p0": {"weights": "split7"}}:  # tensors say of themselves which low words they are
            damaged = copy.deepcopy(saved)
            damaged["param_groups"][0]["kept"] = kept
            with pytest.raises(ValueError, match=r"state_dict: .* must (name its parameters|be|name a storage)"):
                optimizer.load_state_dict(damaged)
    wide = torch.nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(ValueError, match=r"params must be bfloat16 .* \(w\)"):
        AdamW([{"params": [("w", wide)], "kept": {"w": {"weights": "split8"}}}])
    assert optimizer.param_groups[0] == before
    step(net, optimizer)


def test_groups_alike_in_another_order_share_a_launch() -> None:
    net = Net()
    some, others = [{"params": [net.p0], "weight_decay": 0.1, "betas": (0.8, 0.9)}, {"params": [net.p1], "lr": 0.1}]
    found = [Hyperparameters.of(group) for group in AdamW([some, others]).param_groups]
    assert found[0].traced == found[1].traced
    assert found[0].static == found[1].static
    assert dict(zip(found[0].traced, found[0].values, strict=True))["betas.1"] == 0.9
