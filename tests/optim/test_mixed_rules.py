"""A group that names its rule: one optimizer steps each group as an optimizer of that rule would."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowgauge import optim
from narrowgauge.optim import AdamW8bit, Muon, NarrowOptimizer, step_in_backward
from narrowgauge.rules import Rule

# Rules of the other group, and what it gives beside its name.
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {"lr": 3e-4, "betas": (0.8, 0.95)}),
    ("adam", {"weight_decay": 0.1}),
    ("sgd", {"lr": 0.1, "momentum": 0.9}),
    ("adagrad", {}),
    ("lamb", {}),
    ("lion", {"states": "8bit"}),
]
# No storage that rounds by chance: its random numbers are those of the parameter's place.
SHARED = {"weights": "split8", "states": "8bit", "min_quantized_size": 0}


def parameters() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)

    def some(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
        return [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]

    return some((16, 24), (33, 8)), some((24,), (300,), (40, 10))


def train(params: list[nn.Parameter], optimizers: list[NarrowOptimizer], steps: range) -> None:
    for step in steps:
        for number, p in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + number)
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        for optimizer in optimizers:
            optimizer.step()


def same(ps: list[nn.Parameter], one: list[Any], qs: list[nn.Parameter], other: list[Any]) -> None:
    for p, mine, q, theirs in zip(ps, one, qs, other, strict=True):
        assert torch.equal(p, q)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def made(rule: str, given: dict[str, Any], kind: type[NarrowOptimizer] = Muon) -> tuple[Any, list[nn.Parameter]]:
    matrices, others = parameters()
    return kind([{"params": matrices}, {"params": others, "rule": rule, **given}], **SHARED), [*matrices, *others]


@pytest.mark.parametrize(("rule", "given"), OTHERS, ids=str)
def test_each_group_goes_where_an_optimizer_of_its_rule_goes(rule: str, given: dict[str, Any]) -> None:
    """Bit for bit, with that optimizer's defaults for what the group does not give."""
    mixed, ps = made(rule, given)
    matrices, others = parameters()
    kind = NarrowOptimizer.by_rule[rule]
    apart = [Muon(matrices, **SHARED), kind(others, **{**SHARED, **given})]
    train(ps, [mixed], range(4))
    train([*matrices, *others], apart, range(4))
    states = [one.state[p] for one, some in zip(apart, (matrices, others), strict=True) for p in some]
    same(ps, [mixed.state[p] for p in ps], [*matrices, *others], states)
    rows = mixed.describe().rows
    assert [row.rule for row in rows] == ["muon"] * 2 + [rule] * 3
    assert {row.path for row in rows[2:]} == {"fused C, fp32"}


def test_any_optimizer_takes_such_groups_and_any_number_of_rules() -> None:
    ps = [nn.Parameter(torch.ones(8, 8)) for _ in range(3)]
    optimizer = AdamW8bit([{"params": ps[:1]}, {"params": ps[1:2], "rule": "muon"}])
    optimizer.add_param_group({"params": ps[2:], "rule": "lion"})
    assert [row.rule for row in optimizer.describe().rows] == ["adamw", "muon", "lion"]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3, 1e-4]
    assert "betas" not in optimizer.param_groups[1]  # of no use to Muon, and not there to mislead
    train(ps, [optimizer], range(2))


def test_a_saved_state_a_copy_and_a_pickle_go_on_bit_for_bit() -> None:
    whole, ps = made(*OTHERS[0])
    train(ps, [whole], range(3))
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    loaded, qs = made(*OTHERS[0])
    with torch.no_grad():
        for p, q in zip(ps, qs, strict=True):
            q.copy_(p)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    copies = [loaded, copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))]
    train(ps, [whole], range(3, 5))
    for one in copies:
        own = [p for group in one.param_groups for p in group["params"]]
        train(own, [one], range(3, 5))
        same(ps, [whole.state[p] for p in ps], own, [one.state[p] for p in own])


def test_options_of_a_group_and_schedules_hold() -> None:
    optimizer, ps = made(*OTHERS[0])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(ps, [optimizer], range(1))
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 1.5e-4]
    optimizer.param_groups[1]["states"] = {"m": "bf16", "v": "fp32"}
    train(ps, [optimizer], range(1, 2))
    assert optimizer.state[ps[-1]]["m"].dtype == torch.bfloat16
    assert "m.codes" in optimizer.state[ps[0]]


def test_one_norm_limits_all_groups() -> None:
    matrices, others = parameters()
    groups = [{"params": matrices}, {"params": others, "rule": "adamw"}]
    optimizer = Muon(groups, weights="split8", max_grad_norm=1.0)
    train([*matrices, *others], [optimizer], range(1))
    squares = [p.grad.double().square().sum() for p in (*matrices, *others)]
    assert float(optimizer.grad_norm) == pytest.approx(float(sum(squares)) ** 0.5, rel=1e-6)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rule": "adamv"}, r"^rule must be one of .*adagrad, adam, adamw, .*, got 'adamv'$"),
    ({"rule": "adamw", "momentum": 0.9}, r"^momentum must not be in a group with rule='adamw'$"),
    ({"rule": "adamw", "betas": (0.9,)}, r"^Invalid betas: \(0\.9,\)"),
    ({"rule": "adamw", "states": {"m": "log8"}}, r"^states must name a storage for each of \['m', 'v'\] \(adamw\)"),
    ({"rule": "lion", "clip_updates": True}, r"^clip_updates must be False for Lion, whose rule has no second"),
    ({"rule": "muon"}, r"^Muon only supports 2D parameters"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=str)
def test_a_wrong_group_is_refused_and_not_added(given: dict[str, Any], words: str) -> None:
    optimizer = Muon([nn.Parameter(torch.ones(4, 4))])
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4))], **given})
    assert len(optimizer.param_groups) == 1
    train([*optimizer.param_groups[0]["params"]], [optimizer], range(1))


def test_a_state_of_another_rule_is_said_and_torch_has_none_of_two() -> None:
    muon, ps = made("adamw", {})
    train(ps, [muon], range(1))
    swapped, _ = made("lion", {})
    with pytest.warns(UserWarning, match=r"took moments of 'adamw' for those of 'lion', .* \(group 1\)"):
        swapped.load_state_dict(muon.state_dict())
    with pytest.raises(ValueError, match=r"^torch has no optimizer of several rules, got .* adamw and muon$"):
        muon.torch_state_dict()


def test_stepped_in_backward() -> None:
    ends = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

        def make(named: Any, **options: Any) -> NarrowOptimizer:
            named = list(named)
            matrices = [(name, p) for name, p in named if p.dim() == 2]
            others = [(name, p) for name, p in named if p.dim() != 2]
            return Muon([{"params": matrices}, {"params": others, "rule": "adamw"}], **options)

        optimizer = step_in_backward(model, make) if in_backward else make(model.named_parameters())
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*ends)


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(20, 8), nn.Parameter(torch.zeros(1, 4, 8))
        self.gains = nn.Parameter(torch.ones(8, 1))  # as of a weight norm: no matrix
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(8), nn.Linear(8, 20, bias=False)
        self.scorer = nn.Linear(8, 2, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.scorer


@pytest.mark.parametrize("tied", [False, True])
def test_groups_of_a_model(tied: bool) -> None:
    model = Model(tied)
    model.layers[1].bias.requires_grad_(False)
    optimizer = Muon.for_model(model, 0.02, 0.05, others={"lr": 3e-4}, weights="plain")
    rules = {row.parameter: row.rule for row in optimizer.describe().rows}
    assert {name for name, rule in rules.items() if rule == "muon"} == {"layers.0.weight", "layers.1.weight"}
    apart = {"embed.weight", "positions", "gains", "scorer.weight", "layers.0.bias", "norm.weight", "norm.bias"}
    assert rules.keys() - {"layers.0.weight", "layers.1.weight"} == apart | (set() if tied else {"lm_head.weight"})
    decays = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]}
    assert {name for name, decay in decays.items() if decay == 0} == {"layers.0.bias", "norm.weight", "norm.bias"}
    assert set(decays.values()) == {0.05, 0.0}
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4, 3e-4]


class Half(Rule):
    """Moves a weight half of its way to zero."""

    name = "half"

    def scalars(self, group: Any, step: Any) -> dict[str, Any]:
        return {"lr": group["lr"]}

    def update(self, arithmetic: Any, weight: Tensor, grad: Tensor, moments: Any, s: Any) -> Any:
        return -s["lr"] * weight, {}


def test_a_rule_of_ones_own_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NarrowOptimizer, "by_rule", dict(NarrowOptimizer.by_rule))

    class Halves(NarrowOptimizer):
        rule = Half()

        def __init__(self, params: Any, lr: float = 0.5, **options: Any) -> None:
            super().__init__(params, {"lr": lr}, options)

    p = nn.Parameter(torch.ones(4))
    train([p], [optim.SGD([{"params": [p], "rule": "half"}])], range(2))
    assert p.tolist() == [0.25] * 4
