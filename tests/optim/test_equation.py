"""Recorded equations: evaluated again they are the rule, on every rule, and what has no kernel says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from narrowgauge import optim
from narrowgauge.kernels._graph import Node, evaluator, uniforms, walk
from narrowgauge.optim._eager import Fp32Arithmetic
from narrowgauge.optim._tracing import equation
from narrowgauge.rules import Rule, Slot

CASES: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"clip_updates": True}),
    ("AdamW", {"beta2_schedule": 0.8}),
    ("StableAdamW", {}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("LAMB", {}),
    ("LAMB", {"clip_updates": True}),
    ("LARS", {"momentum": 0.9, "weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1}),
    ("Adagrad", {"momentum": 0.9}),
    ("Lion", {"weight_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("AdEMAMix", {"t_alpha": 100, "t_beta3": 2000}),
    ("Adan", {"weight_decay": 0.1}),
    ("LAMB", {"cautious": True, "clip_updates": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "cautious": True}),
    ("Adafactor", {"states": "fp32", "weight_decay": 0.1}),
    ("ScheduleFreeAdamW", {"warmup_steps": 3, "weight_decay": 0.1}),
]
ELEMENT = {
    "mul": torch.mul, "add": torch.add, "sub": torch.sub, "div": torch.div, "neg": torch.neg, "sqrt": torch.sqrt,
    "abs": torch.abs, "sign": torch.sign, "max": torch.maximum, "min": torch.minimum, "lt": torch.lt,
    "gt": torch.gt, "le": torch.le, "ge": torch.ge, "and": torch.logical_and, "or": torch.logical_or,
    "where": torch.where,
    "pow": torch.pow, "wide": torch.Tensor.double, "narrow": torch.Tensor.float,
}  # fmt: skip


def given(name: str, options: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = getattr(optim, name)([p], **options)
    (group,) = optimizer.param_groups
    return optimizer.rule_for(group), group


def computed(nodes: list[Node], inputs: dict[str, torch.Tensor], numbers: dict[str, float]) -> list[torch.Tensor]:
    """An equation's nodes on tensors, in torch."""
    known: dict[Node, torch.Tensor] = {}
    met = uniforms(nodes)
    for node, value in zip(met, evaluator(tuple(met))(numbers), strict=True):
        known[node] = torch.tensor(value, dtype=torch.float64)
    for node in walk(nodes):
        if node in known or node.scalar:
            continue
        if node.op == "input":
            known[node] = inputs[node.args[0]]
        else:
            kind = torch.float64 if node.double else torch.float32
            known[node] = ELEMENT[node.op](
                *(
                    known[arg].to(kind) if arg.scalar and node.op not in ("and", "or") else known[arg]
                    for arg in node.args
                )
            )
    return [known[node].expand(inputs["weight"].shape) for node in nodes]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("step", [1.0, 1000.0])
def test_an_equation_computes_what_its_rule_does(name: str, options: dict[str, Any], step: float) -> None:
    rule, group = given(name, options)
    slots = [slot.name for slot in rule.slots(group)]
    generator = torch.Generator().manual_seed(0)
    shape = (64, 32)
    weight, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    grad[0, :4] = 0.0
    moments = {
        name: torch.randn(shape, generator=generator) if name != "v" else torch.rand(shape, generator=generator)
        for name in slots
    }
    s: dict[str, Any] = dict(rule.scalars({k: v for k, v in group.items() if k != "params"}, step))
    found = equation(rule, tuple(slots), tuple(s))
    inputs = {"weight": weight, "grad": grad, **moments}
    arithmetic = Fp32Arithmetic()
    terms = rule.terms(arithmetic, weight, grad, moments, s)
    for term, value in zip(terms, computed(list(found.terms.values()), inputs, s), strict=True):
        assert value.dtype == terms[term].dtype
        exact = terms[term]
        torch.testing.assert_close(value, exact, rtol=1e-6, atol=3e-7 * float(exact.max()))
    s |= {term: float(value.double().sum()) for term, value in terms.items()}
    if terms:
        s["elements"] = float(weight.numel())
    delta, new = rule.update(arithmetic, weight, grad, moments, s)
    reach = rule.remaining_effect(arithmetic, weight, new, s)
    assert (found.moments.keys(), found.effects.keys()) == (new.keys(), reach.keys())
    wanted = [delta, *new.values(), *(torch.as_tensor(value).float().expand(shape) for value in reach.values())]
    for value, exact in zip(computed(list(found.roots), inputs, s), wanted, strict=True):
        # Reciprocals in place of quotients: an ulp or two, of the largest part where parts cancel.
        torch.testing.assert_close(value.float(), exact, rtol=5e-7, atol=3e-7 * float(exact.abs().max()))


def test_a_square_is_not_made_before_its_share_is_taken() -> None:
    rule, group = given("AdamW", {})
    s = {name: float(value) for name, value in rule.scalars(group, 1.0).items()}
    found = equation(rule, ("m", "v"), tuple(s))
    inputs = {name: torch.zeros(3) for name in ("weight", "m", "v")} | {"grad": torch.tensor([1e20, -1e-20, 3e19])}
    (v,) = computed([found.moments["v"]], inputs, s)
    torch.testing.assert_close(v, torch.tensor([1e37, 1e-43, 9e35]), rtol=1e-2, atol=0)


def test_arithmetic_on_the_host_is_torchs() -> None:
    ends = [0.0, -0.0, 1.0, -2.0, 0.5, 401.0, -400.0, float("inf"), float("-inf"), float("nan")]
    for op in ("div", "max", "min", "pow"):
        for a in ends:
            for b in ends:
                node = Node(op, (Node("number", ("a",), True), Node("number", ("b",), True)), True)
                wanted = ELEMENT[op](torch.tensor(a).double(), torch.tensor(b).double())
                found = torch.tensor(evaluator((node,))({"a": a, "b": b})[0], dtype=torch.float64)
                # Libraries of C and torch's own powers may differ by an ulp; nothing else does.
                torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-15 if op == "pow" else 0, atol=0)


class Moving(Rule):
    """The weight moves by any function of itself, the gradient and the numbers."""

    name = "moving"
    moments = (Slot("m", signed=True),)

    def __init__(self, by: Callable[..., Any]) -> None:
        self._by = by

    def update(self, arithmetic: Any, weight: Any, grad: Any, moments: Any, s: Any) -> Any:
        return self._by(weight, grad, s), moments


def dims_or_two(x: Any) -> int:
    try:
        return int(x.dim())
    except NotImplementedError:
        return 2


WITHOUT: list[tuple[Callable[..., Any], str]] = [
    (lambda w, g, s: g.cumsum(0), "cumsum has no kernel"),
    (lambda w, g, s: g - g.mean(dim=0, keepdim=True), "mean is not elementwise"),
    (lambda w, g, s: g / g.numel(), "depends on the shape"),
    (lambda w, g, s: g if s["lr"] > 1 else -g, "decides in Python by a number"),
    (lambda w, g, s: w * (g.dim() == 3), "depends on the shape"),
    (lambda w, g, s: w if g.shape[0] > 10000 else g, "depends on the shape"),
    (lambda w, g, s: w if w.ndim == 5 else g, "depends on the shape"),
    (lambda w, g, s: w * len(g), "depends on the shape"),
    (lambda w, g, s: w * dims_or_two(g), "depends on the shape"),
    (lambda w, g, s: w * len(repr(g)), "depends on the shape|recording it failed"),
    (lambda w, g, s: w * g.untyped_storage().nbytes(), "depends on the shape"),
    (lambda w, g, s: ~torch.where(g > 0, 1, 2) * g, "bitwise_not of integers has no kernel"),
    (lambda w, g, s: w * g.size(0), "depends on the shape"),
    (lambda w, g, s: w + torch.zeros_like(g), "zeros_like has no kernel: write a number"),
    (lambda w, g, s: g**3, "pow has no kernel"),
    (lambda w, g, s: torch.div(w, g, rounding_mode="floor"), "div with rounding_mode has no kernel"),
    (lambda w, g, s: g.to(torch.bfloat16).to(torch.float32), "a conversion to torch.bfloat16 has no kernel"),
    (lambda w, g, s: w * g.to(torch.int32), "a conversion to torch.int32 has no kernel"),
    (lambda w, g, s: torch.rsub(w, g, alpha=3), "rsub with alpha has no kernel"),
    (lambda w, g, s: torch.rsub(w, 2.0, alpha=3), "rsub with alpha has no kernel"),
    (lambda w, g, s: g.view(1000), "recording it failed"),
]


@pytest.mark.parametrize(("by", "message"), WITHOUT, ids=lambda case: case if isinstance(case, str) else "")
def test_what_is_not_elementwise_has_no_kernel(by: Callable[..., Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        equation(Moving(by), ("m",), ("lr",))


def test_a_sum_of_two_tests_is_a_test_as_in_torch() -> None:
    found = equation(Moving(lambda w, g, s: g * ((g > 0) + (w > 0)) * ((g < 3) * (w < 3))), ("m",), ("lr",))
    ends = torch.tensor([-1.0, 0.0, 1.0, 2.0, 4.0])
    w, g = (x.flatten() for x in torch.meshgrid(ends, ends, indexing="ij"))
    (delta,) = computed([found.delta], {"weight": w, "grad": g, "m": g}, {"lr": 1.0})
    assert torch.equal(delta, g * ((g > 0) + (w > 0)) * ((g < 3) * (w < 3)))


class Worded(Rule):
    """With hyperparameters that are no numbers: texts in a tuple, and a mapping."""

    name = "worded"
    moments = (Slot("m", signed=True),)

    def scalars(self, group: Any, step: Any) -> Any:
        assert group["modes"] == ("one", "two")
        return {"lr": group["lr"] * group["table"]["half"], "flag": float("two" in group["modes"])}

    def update(self, arithmetic: Any, weight: Any, grad: Any, moments: Any, s: Any) -> Any:
        return -s["lr"] * s["flag"] * grad, moments


class WordedOptimizer(optim.NarrowOptimizer):
    rule = Worded()


@pytest.mark.parametrize("backends", [(), ("c",)], ids=["eager", "compiled"])
def test_hyperparameters_may_be_texts_and_mappings(backends: tuple[str, ...]) -> None:
    p = torch.nn.Parameter(torch.ones(1000))
    given = {"lr": 0.25, "weight_decay": 0.0, "modes": ("one", "two"), "table": {"half": 0.5}}
    optimizer = WordedOptimizer([p], given, {})
    optimizer._engine.backends = backends
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p, torch.full_like(p, 0.875))
    assert ("fused C" if backends else "eager torch") in str(optimizer.describe())
