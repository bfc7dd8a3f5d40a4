"""timm's factory makes our optimizers: the same groups, hyperparameters and steps as made by hand."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import narrowgauge as ng
from libraries import library

timm = library("timm")
factory, schedules = library("timm.optim"), library("timm.scheduler")
create_optimizer_v2, get_optimizer_info = factory.create_optimizer_v2, factory.get_optimizer_info
register = library("narrowgauge.integrations.timm").register
register()

# timm's optimizer of the same rule.
NAMESAKES = {
    "ngadam": "adam", "ngadam8bit": "adam", "ngadamw": "adamw", "ngadamw8bit": "adamw", "ngstableadamw": "adamw",
    "ngcollage": "adamw", "nglamb": "lamb", "nglamb8bit": "lamb", "nglars": "lars", "nglars8bit": "lars",
    "ngsgd": "sgd", "ngsgd8bit": "sgd", "nglion": "lion", "nglion8bit": "lion", "ngadagrad": "adagrad",
    "ngadagrad8bit": "adagrad",
}  # fmt: skip


def vit() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 20}
    return timm.models.VisionTransformer(**sizes)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        model(images.to(model.head.weight.dtype)).square().mean().backward()
        optimizer.step()


def test_every_optimizer_is_registered_and_once_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        register()
    assert caplog.messages == []
    classes = [vars(ng.optim)[name] for name in ng.optim.__all__]
    named = [c for c in classes if isinstance(c, type) and issubclass(c, ng.optim.NarrowOptimizer)]
    found = factory.list_optimizers("ng*")
    assert len(found) == len(named) - 1  # all but their base, NarrowOptimizer
    assert set(found) >= {*NAMESAKES, "ngmuon"}
    assert not any("_" in name for name in found)


@pytest.mark.parametrize(("name", "namesake"), NAMESAKES.items())
def test_timm_knows_of_each_what_it_knows_of_its_own(name: str, namesake: str) -> None:
    ours, theirs = get_optimizer_info(name), get_optimizer_info(namesake)
    for fact in ("has_eps", "has_betas", "has_momentum", "num_betas", "second_order", "defaults"):
        assert getattr(ours, fact) == getattr(theirs, fact), fact


@pytest.mark.parametrize("name", NAMESAKES)
def test_the_arguments_of_timms_train_script_arrive(name: str) -> None:
    """As its parser gives them, with values that are the default of no optimizer."""
    parser = argparse.ArgumentParser()
    for option, kind in {
        "opt": str,
        "lr": float,
        "weight-decay": float,
        "momentum": float,
        "opt-eps": float,
    }.items():
        parser.add_argument(f"--{option}", type=kind)
    parser.add_argument("--opt-betas", type=float, nargs="+")
    parser.add_argument("--opt-kwargs", nargs="*", default={}, action=library("timm.utils").ParseKwargs)
    line = f"--opt {name} --lr 0.003 --weight-decay 0.07 --momentum 0.8 --opt-eps 1e-5 --opt-betas 0.7 0.95"
    script = parser.parse_args([*line.split(), "--opt-kwargs", "seed=3", "nonfinite=propagate"])
    model = vit().to(torch.bfloat16 if name == "ngcollage" else torch.float32)
    optimizer = create_optimizer_v2(model, **factory.optimizer_kwargs(cfg=script), **script.opt_kwargs)
    info = get_optimizer_info(name)
    assert isinstance(optimizer, ng.optim.NarrowOptimizer)
    for group, decay in zip(optimizer.param_groups, (0.0, 0.07), strict=True):
        expected = {"lr": 0.003, "weight_decay": decay, "seed": 3, "nonfinite": "propagate"}
        expected |= {"eps": 1e-5} if info.has_eps else {}
        expected |= {"betas": [0.7, 0.95]} if info.has_betas else {}
        expected |= {"momentum": 0.8} if info.has_momentum else {}
        assert {key: group[key] for key in expected} == expected


def test_layers_decay_and_train_as_groups_made_by_hand() -> None:
    model, twin = vit(), vit()
    options = {"lr": 1e-2, "min_quantized_size": 0}
    made = create_optimizer_v2(model, "ngadamw8bit", weight_decay=0.1, layer_decay=0.5, foreach=False, **options)
    groups = factory.param_groups_layer_decay(
        twin, weight_decay=0.1, layer_decay=0.5, no_weight_decay_list=twin.no_weight_decay()
    )
    by_hand = ng.optim.AdamW8bit(groups, **options)
    assert type(made) is ng.optim.AdamW8bit
    assert [group["lr_scale"] for group in made.param_groups] == [group["lr_scale"] for group in groups]
    assert {group["lr_scale"] for group in groups} == {0.125, 0.25, 0.5, 1.0}
    for optimizer, trained in ((made, model), (by_hand, twin)):
        schedule = library("timm.scheduler").CosineLRScheduler(
            optimizer, t_initial=10, warmup_t=2, warmup_lr_init=1e-3
        )
        schedule.step(1)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.125 * optimizer.param_groups[-1]["lr"])
        train(trained, optimizer)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))
    decayed = {id(p) for group in made.param_groups if group["weight_decay"] for p in group["params"]}
    assert id(model.pos_embed) not in decayed  # in the model's no_weight_decay()
    assert id(model.blocks[0].mlp.fc1.weight) in decayed


def test_an_argument_that_is_none_is_the_optimizers_own() -> None:
    optimizer = create_optimizer_v2(vit(), "ngstableadamw", eps=None)
    assert optimizer.param_groups[0]["eps"] == ng.optim.StableAdamW([torch.zeros(1)]).defaults["eps"]


@pytest.mark.parametrize("rate", [{"lr": 1e-3}, {}], ids=["a rate", "none"])
def test_adafactor_goes_as_far_as_timms(rate: dict[str, float]) -> None:
    moved = []
    for name in ("adafactor", "ngadafactor"):
        model, start = vit(), vit()
        train(model, create_optimizer_v2(model, name, **rate))
        pairs = zip(model.parameters(), start.parameters(), strict=True)
        moved.append(torch.cat([(p - q).detach().flatten() for p, q in pairs]).norm().item())
    assert moved[1] == pytest.approx(moved[0], rel=0.05)


@pytest.mark.parametrize("named", [False, True], ids=["parameters", "named"])
def test_muon_gets_matrices_and_adamw_the_rest(monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    given: dict[str, Any] = {}

    def muon(groups: list[dict[str, Any]], **arguments: Any) -> None:
        given.update(arguments, groups=groups)

    monkeypatch.setattr(ng.optim, "Muon", muon)
    model = vit()
    make: Callable[..., Any] = create_optimizer_v2
    if named:
        make(list(model.named_parameters()), "ngmuon", lr=0.02, weight_decay=0.1, betas=(0.8, 0.9))
    else:
        make(model, "ngmuon", lr=0.02, weight_decay=0.1, betas=(0.8, 0.9), fallback_list=["head.*"])
    assert given["adjust_lr_fn"] == "match_rms_adamw"
    assert given["momentum"] == 0.9  # timm's own default
    assert "betas" not in given
    seen: dict[int, dict[str, Any]] = {}
    for group in given["groups"]:
        assert "use_fallback" not in group
        seen |= {id(p[1] if named else p): group for p in group["params"]}
    for name, p in model.named_parameters():
        group = seen[id(p)]
        if p.dim() == 2 and (named or not name.startswith("head.")):
            assert "rule" not in group
            assert "betas" not in group
        else:
            assert (group["rule"], group["lr"], group["betas"]) == ("adamw", 0.02, (0.8, 0.9))
            undecayed = p.dim() == 1 or name in model.no_weight_decay()
            assert group["weight_decay"] == (0.1 if named or not undecayed else 0.0)


def test_muon_differs_from_timms_where_the_guide_says_so() -> None:
    layers = (
        torch.nn.Conv2d(8, 8, 3, bias=False),
        torch.nn.Linear(8, 8, bias=False),
        torch.nn.Linear(2, 8, bias=False),
    )
    ours, theirs = (create_optimizer_v2(torch.nn.Sequential(*layers), name, lr=0.01) for name in ("ngmuon", "muon"))
    for layer in layers:
        layer.weight.grad = torch.ones_like(layer.weight)
    theirs.step()
    assert [ours.plan_of(layer.weight).rule.name for layer in layers] == ["adamw", "muon", "muon"]
    assert [theirs.state[layer.weight]["use_muon"] for layer in layers] == [True, True, False]
    (adamw,) = (group for group in ours.param_groups if group["rule"] == "adamw")
    assert (adamw["betas"], adamw["eps"], ours.defaults["nesterov"]) == ((0.9, 0.999), 1e-8, True)
    assert [theirs.defaults[key] for key in ("betas", "eps", "nesterov")] == [(0.9, 0.95), 1e-7, False]


def test_muon_trains_a_vit() -> None:
    model, before = vit(), vit()
    optimizer = create_optimizer_v2(model, "ngmuon", lr=0.01, weight_decay=0.1, layer_decay=0.75)
    assert isinstance(optimizer, ng.optim.Muon)
    train(model, optimizer)
    moved = {name: not torch.equal(p, before.get_parameter(name)) for name, p in model.named_parameters()}
    assert moved["blocks.0.mlp.fc1.weight"]
    assert moved["norm.weight"]
    assert moved["pos_embed"]
