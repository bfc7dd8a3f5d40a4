"""torch's own list of what its optimizers take and refuse, held by their namesakes here with nothing narrow."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from twins import NAMESAKES, distance, ours, parameters, torchs, train

pytest.importorskip("expecttest", reason="torch's list of optimizer inputs needs the package expecttest")

from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInput,
    optim_db,
)

INFOS = {info.name: info for info in optim_db if info.name in NAMESAKES}
# Asked for a GPU, the list has the capturable inputs too; those need one for torch's optimizers only.
INPUTS = [(name, given) for name in NAMESAKES for given in INFOS[name].optim_inputs_func(device="cuda")]
ERRORS = [
    (name, given)
    for name in NAMESAKES
    for given in INFOS[name].optim_error_inputs_func("cpu", torch.float32)
    if "complex" not in given.optimizer_error_input.desc  # refused earlier, with all other dtypes
]
# Share of the way. torch rounds an AdamW weight twice a step, the first time with a constant that is off itself;
# Muon's directions are found in bf16, whose roundings tip over with the last bit of what they are given.
NEAR = {
    "Adam": 2e-6, "AdamW": 1e-4, "SGD": 2e-6, "Adafactor": 2e-5, "Adagrad": 2e-6, "Muon": 2e-3,
    "RMSprop": 2e-6, "NAdam": 5e-5,
}  # fmt: skip


def label(value: Any) -> str:
    if isinstance(value, ErrorOptimizerInput):
        value = value.optimizer_error_input
    return value.desc if isinstance(value, OptimizerInput) else str(value)


def build_and_step(cls: type, params: Any, kwargs: dict[str, Any], refused_at: OptimizerErrorEnum) -> None:
    """What torch finds out at the first step may be refused at construction, but not the other way round."""
    optimizer = cls(params, **kwargs)
    if refused_at is OptimizerErrorEnum.STEP_ERROR:
        optimizer.step()


@pytest.mark.parametrize(("name", "given"), INPUTS, ids=label)
def test_what_torch_takes_gives_what_torch_gives(name: str, given: OptimizerInput) -> None:
    if given.kwargs.get("amsgrad"):
        with pytest.raises(ValueError, match=f"amsgrad must be False for {name}, got True"):
            ours(name)(parameters(), **given.kwargs)
        return
    end, _ = train(ours(name), given.kwargs)
    on_the_cpu = {key: value for key, value in given.kwargs.items() if key != "capturable"}
    wanted, _ = train(torchs(name), on_the_cpu)
    assert distance(end, wanted) < NEAR[name]


@pytest.mark.parametrize(("name", "given"), ERRORS, ids=label)
def test_what_torch_refuses_is_refused_with_its_type_and_words(name: str, given: ErrorOptimizerInput) -> None:
    bad = given.optimizer_error_input
    params = bad.params if bad.params is not None else parameters()
    if issubclass(given.error_type, Warning):
        with pytest.warns(given.error_type, match=given.error_regex):
            ours(name)(params, **bad.kwargs)
        return
    with pytest.raises(given.error_type, match=given.error_regex):
        build_and_step(ours(name), params, bad.kwargs, given.error_on)


@pytest.mark.parametrize("name", NAMESAKES)
def test_arguments_keep_name_position_default_and_kind(name: str) -> None:
    theirs = inspect.signature(torchs(name).__init__).parameters
    own = inspect.signature(ours(name).__init__).parameters
    positional = [key for key, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(own)[: len(positional)] == positional
    for key, parameter in theirs.items():
        assert own[key].default == parameter.default, key
        assert own[key].kind == parameter.kind, key
    assert all(own[key].kind is inspect.Parameter.KEYWORD_ONLY for key in list(own)[len(positional) :])


@pytest.mark.parametrize("name", NAMESAKES)
def test_foreach_and_fused_change_nothing_and_differentiable_is_refused(name: str) -> None:
    plain, _ = train(ours(name), {"maximize": True})
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False, "fused": False}, {"capturable": True}):
        assert torch.equal(train(ours(name), {"maximize": True, **options})[0], plain), options
    with pytest.raises(ValueError, match=f"differentiable must be False for {name}, got True"):
        ours(name)(parameters(), differentiable=True)


@pytest.mark.parametrize("name", NAMESAKES)
def test_tensors_are_numbers(name: str) -> None:
    """On the host a tensor of one element, of any shape, gives the bits that its number gives."""
    rate = torch.tensor([[0.01]])
    options: dict[str, Any] = {"lr": rate}
    if name.startswith("Adam"):
        options["betas"] = (torch.tensor([0.75]), torch.tensor([[0.875]]))
    numbers = {"lr": rate.item()} | ({"betas": (0.75, 0.875)} if "betas" in options else {})
    assert torch.equal(train(ours(name), options)[0], train(ours(name), numbers)[0])


def test_adams_decay_may_be_decoupled_by_group() -> None:
    options = {"weight_decay": 0.3, "lr": 0.01}
    decoupled = train(ours("Adam"), options | {"decoupled_weight_decay": True})[0]
    assert torch.equal(decoupled, train(ours("AdamW"), options)[0])
    wanted = train(torch.optim.Adam, options | {"decoupled_weight_decay": True})[0]
    assert distance(decoupled, wanted) < NEAR["AdamW"]
    p, q = parameters()
    groups = [{"params": [p]}, {"params": [q], "decoupled_weight_decay": True}]
    rules = [row.rule for row in ours("Adam")(groups).describe().rows]
    assert rules == ["adam", "adamw"]
    clipped = ours("Adam")([p], decoupled_weight_decay=True, clip_updates=True)
    assert clipped.describe().rows[0].rule == "adamw, clipped"
    with pytest.raises(TypeError, match="decoupled_weight_decay"):
        torch.optim.AdamW([p], decoupled_weight_decay=True)
    with pytest.raises(TypeError, match="decoupled_weight_decay"):
        ours("AdamW")([p], decoupled_weight_decay=True)
