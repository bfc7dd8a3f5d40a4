"""A rule of one's own that does not keep to what it declares is refused when its optimizer is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from narrowgauge import optim
from narrowgauge.rules import ADAMW, Rule, Slot

Step = Callable[..., Any]


def optimizer_of(name: str = "own", **members: Any) -> type[optim.NarrowOptimizer]:
    """An optimizer of a momentum and a second moment, with members of its rule replaced."""

    class Own(Rule):
        moments = (Slot("m", signed=True, normalizer="v"), Slot("v", signed=False))
        averaging = ("decay", "share")

        def scalars(self, group: Any, step: Any) -> Any:
            return {"lr": group["lr"], "decay": 0.9, "share": 0.1}

        def direction(self, arithmetic: Any, weight: Any, grad: Any, moments: Any, s: Any) -> Any:
            m = arithmetic.accumulate(moments["m"], grad, s["decay"], s["share"])
            v = arithmetic.accumulate_square(moments["v"], grad, s["decay"], s["share"])
            return arithmetic.value(m) / (arithmetic.value(v).sqrt() + 1e-8), {"m": m, "v": v}

    Own.name = name
    for member, value in members.items():
        setattr(Own, member, value)

    class OwnOptimizer(optim.NarrowOptimizer):
        rule = Own()

        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, {"lr": 1e-3}, options)

    return OwnOptimizer


@pytest.fixture(autouse=True)
def by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers made here leave no names behind."""
    monkeypatch.setattr(optim.NarrowOptimizer, "by_rule", dict(optim.NarrowOptimizer.by_rule))


def refused(**members: Any) -> str:
    with pytest.raises(ValueError, match="of rule 'own'") as caught:
        optimizer_of(**members)([torch.nn.Parameter(torch.ones(4))])
    return str(caught.value)


@pytest.mark.parametrize("name", ["weight", "grad", "step", "skipped", "m.x", ""])
def test_names_that_a_step_has_already_are_refused(name: str) -> None:
    assert refused(moments=(Slot(name, signed=True), Slot("v", signed=False))).endswith(f"got {name!r}")


def test_terms_have_names_of_their_own() -> None:
    for name in ("lr", "elements"):
        words = refused(terms=lambda self, arithmetic, w, g, moments, s, name=name: {name: g * g})
        assert words == f"terms of rule 'own' must have names that no scalar has, got {name!r}"

    def reads(self: Any, arithmetic: Any, weight: Any, grad: Any, moments: Any, s: Any) -> Any:
        return grad / s["squares"] ** 0.5, dict(moments)

    def squares(self: Any, arithmetic: Any, weight: Any, grad: Any, moments: Any, s: Any) -> Any:
        return {"squares": arithmetic.square(grad)}

    made = optimizer_of(direction=reads, terms=squares)
    p = torch.nn.Parameter(torch.ones(4))
    made([p])
    with pytest.raises(ValueError, match=r"'own, cautious' must read names of its slots and .* got 'squares'"):
        made([p], cautious=True)


@pytest.mark.parametrize("reads", ["moment", "scalar"])
def test_names_that_nothing_has_are_refused(reads: str) -> None:
    def direction(self: Any, arithmetic: Any, weight: Any, grad: Any, moments: Any, s: Any) -> Any:
        x = moments["gamma"] if reads == "moment" else s["gamma" if reads == "scalar" else "lr"]
        return grad * x, dict(moments)

    assert refused(direction=direction) == (
        "the equation of rule 'own' must read names of its slots and scalars, 'm', 'v', 'lr', 'decay', 'share', "
        "got 'gamma'"
    )


def test_an_option_of_every_optimizer_is_no_hyperparameter() -> None:
    class Wrong(optimizer_of()):  # type: ignore[misc]
        def __init__(self, params: Any) -> None:
            optim.NarrowOptimizer.__init__(self, params, {"lr": 1.0, "block_size": 2.0}, {})

    with pytest.raises(ValueError, match="'block_size' must not be a hyperparameter"):
        Wrong([torch.nn.Parameter(torch.ones(4))])


def test_what_an_equation_returns_is_compared_with_its_slots_and_shape() -> None:
    def returns(make: Step) -> Step:
        return lambda self, arithmetic, weight, grad, moments, s: make(grad, moments)

    for make, said in (
        (lambda g, mo: (g, {"m": mo["m"]}), "direction of rule 'own' must return the moments m, v, got m"),
        (lambda g, mo: (g, {**mo, "vv": g}), "direction of rule 'own' must return the moments m, v, got m, v, vv"),
        (lambda g, mo: g, "direction of rule 'own' must return a tensor and a dict of moments, got Tensor"),
        (lambda g, mo: None, "direction of rule 'own' must return a tensor and a dict of moments, got NoneType"),
        (
            lambda g, mo: (g.sum(), mo),
            "direction of rule 'own' must return the update in the parameter's shape (2, 3), got ()",
        ),
        (
            lambda g, mo: (g, {**mo, "v": g.t()}),
            "direction of rule 'own' must return v in the parameter's shape (2, 3), got (3, 2)",
        ),
        (
            lambda g, mo: (g.mul_(2), mo),
            "the equation of rule 'own' must not change 'grad' in place: write x * 2, not x.mul_(2)",
        ),
    ):
        assert refused(direction=returns(make)) == said
    no_delta = refused(delta=lambda self, u, weight, s: None)
    assert no_delta == "update of rule 'own' must return the update in the parameter's shape (2, 3), got NoneType"


def test_names_of_a_rule_are_those_it_has() -> None:
    assert refused(averaging=("decay", "nope")).startswith(
        "averaging of rule 'own' must be 'lr', 'decay' or 'share'"
    )
    twice = (Slot("m", signed=True), Slot("m", signed=False))
    assert refused(moments=twice) == "moments of rule 'own' must have different names, got 'm' twice"
    stray = (Slot("m", signed=True, normalizer="w"), Slot("v", signed=False))
    assert refused(moments=stray) == "normalizer of slot 'm' of rule 'own' must be 'm' or 'v', got 'w'"
    effect = {"remaining_effect": lambda self, arithmetic, weight, moments, s: {"M": -s["lr"]}}
    assert refused(**effect) == "remaining_effect of rule 'own' must be 'm' or 'v', got 'M'"


def test_a_library_rules_name_and_a_class_for_a_rule_are_refused() -> None:
    with pytest.raises(ValueError, match="name of the rule must be new, got 'adamw', which AdamW has"):
        optimizer_of("adamw")
    with pytest.raises(TypeError, match=r"rule must be a rule, got the class: write rule = Rule\(\)"):
        type("Own", (optim.NarrowOptimizer,), {"rule": Rule})

    class Mine(optim.AdamW):
        rule = ADAMW

    assert optim.NarrowOptimizer.by_rule["adamw"] is optim.AdamW


def test_an_equation_for_one_shape_alone_is_left_to_its_step() -> None:
    """The tiny tensors of the check are no reason to refuse it."""

    def direction(self: Any, arithmetic: Any, weight: Any, grad: Any, moments: Any, s: Any) -> Any:
        return grad * torch.arange(7.0), dict(moments)

    p = torch.nn.Parameter(torch.ones(4, 7))
    optimizer = optimizer_of(direction=direction)([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p.detach(), 1 - 1e-3 * torch.arange(7.0).expand(4, 7))


def test_a_rule_that_decides_by_the_number_of_dimensions_is_stepped_so() -> None:
    """A kernel recorded from matrices would step vectors as matrices."""

    def direction(self: Any, arithmetic: Any, weight: Any, grad: Any, moments: Any, s: Any) -> Any:
        return (0 * grad if weight.dim() == 1 else grad), dict(moments)

    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 7), (4,)))
    optimizer = optimizer_of(direction=direction)([matrix, vector])
    for p in (matrix, vector):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert vector.detach().eq(1).all()
    assert matrix.detach().lt(1).all()
    assert "what it does depends on the shape" in str(optimizer.describe())


@pytest.mark.parametrize("says", [lambda x, s: torch.maximum(x, s["share"]), lambda x, s: s["share"].sign() * x])
def test_a_scalar_that_is_taken_for_a_tensor_is_refused(says: Callable[..., Any]) -> None:
    """Recorded for a kernel it is one; in eager torch, and with gauges, it is a Python float."""

    def direction(self: Any, arithmetic: Any, weight: Any, grad: Any, moments: Any, s: Any) -> Any:
        return says(grad, s), dict(moments)

    with pytest.raises(TypeError, match="the equation of rule 'own', whose scalars are Python floats"):
        optimizer_of(direction=direction)([torch.nn.Parameter(torch.ones(4))])


def test_a_moment_that_is_left_out_has_no_kernel() -> None:
    """Where tiny tensors of the check are not what the equation is made for, eager torch finds it."""

    def direction(self: Any, arithmetic: Any, weight: Any, grad: Any, moments: Any, s: Any) -> Any:
        if isinstance(s["share"], float):
            raise ValueError("not made for that")
        return grad, {"m": moments["m"]}

    p = torch.nn.Parameter(torch.ones(4, 7))
    optimizer = optimizer_of(direction=direction)([p])
    assert "it returns the moments m: it has no kernel" in str(optimizer.describe())
