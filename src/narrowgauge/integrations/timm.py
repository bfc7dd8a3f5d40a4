"""The optimizers under timm's names: after `register()`, ``timm.optim.create_optimizer_v2(model, "ngadamw8bit")``.

timm makes optimizers from a registry of names. `register` adds every optimizer of `narrowgauge.optim` as ``ng`` and
its name in small letters: ``ngadamw``, ``ngadamw8bit``, ``nglion8bit``; `CollageAdamW` is ``ngcollage``.

An entry of the registry says whether an optimizer takes `eps` and `betas`: that is read from its constructor. It
also says whether timm sets a momentum, and which defaults: these are those of timm's optimizer of the same rule,
such as Nesterov momentum for ``ngsgd`` and eps 1e-8 for ``ngadagrad``. So a script that changes ``sgd`` to
``ngsgd`` keeps its hyperparameters. timm's ``adafactor`` does not multiply a given learning rate by a weight's root
mean square; ``ngadafactor`` has eps (None, 1.0), and so multiplies only where that is above 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from timm.optim import OptimInfo, get_optimizer_info, list_optimizers
from timm.optim._optim_factory import default_registry

from narrowgauge import optim

_NAMES = {"CollageAdamW": "ngcollage"}
# What timm gives Muon for its AdamW too.
_OF_BOTH = ("lr", "eps", "weight_decay")


def register() -> None:
    """Add the optimizers to timm's registry. A second call changes nothing."""
    known = set(list_optimizers())
    for name in optim.__all__:
        optimizer = getattr(optim, name)
        named = isinstance(optimizer, type) and issubclass(optimizer, optim.NarrowOptimizer)
        if not named or optimizer is optim.NarrowOptimizer:
            continue
        info = _muon_info() if optimizer is optim.Muon else _info(optimizer)
        if info.name not in known:
            default_registry.register(info)


def _info(optimizer: type[optim.NarrowOptimizer]) -> OptimInfo:
    """What timm has to know about an optimizer."""
    arguments = {one.name: one.default for one in inspect.signature(optimizer).parameters.values()}
    known = set(list_optimizers())
    # AdamW8bit and StableAdamW are AdamW to timm: the first class among the bases whose name timm has.
    names = [cls.__name__.lower() for cls in optimizer.__mro__ if cls.__name__.lower() in known]
    namesake = get_optimizer_info(names[0]) if names else None
    defaults = namesake.defaults or {} if namesake is not None else {}
    return OptimInfo(
        name=_NAMES.get(optimizer.__name__, f"ng{optimizer.__name__.lower()}"),
        opt_class=_without_nones(_adafactor if optimizer is optim.Adafactor else optimizer),
        description=f"narrowgauge: {(optimizer.__doc__ or '').partition('.')[0]}",
        has_eps="eps" in arguments,
        # With True timm sets a momentum of 0.9, which would switch that of AdaGrad on.
        has_momentum=bool(arguments.get("momentum")) if namesake is None else namesake.has_momentum,
        has_betas="betas" in arguments,
        num_betas=len(arguments.get("betas", (0, 0))),
        defaults={name: value for name, value in defaults.items() if name in arguments} or None,
    )


def _without_nones(make: Callable[..., optim.NarrowOptimizer]) -> Callable[..., optim.NarrowOptimizer]:
    """Leave out arguments that are None: open_clip passes `eps=None` where the command line has none."""

    def made(params: Any, **arguments: Any) -> optim.NarrowOptimizer:
        return make(params, **{name: value for name, value in arguments.items() if value is not None})

    return made


def _adafactor(params: Any, **arguments: Any) -> optim.NarrowOptimizer:
    """A given learning rate is not relative to the weight, as in timm's Adafactor; the default one is in both."""
    if "lr" in arguments:
        arguments.setdefault("eps", (None, 1.0))
    return optim.Adafactor(params, **arguments)


# Muon takes matrices. timm gives an optimizer all parameters of a model; its own Muon updates the others by AdamW.


def _muon_info() -> OptimInfo:
    # One learning rate serves both rules only if Muon's steps are as large as AdamW's, as in timm's own Muon.
    defaults = {"adjust_lr_fn": "match_rms_adamw"}
    return replace(_info(optim.Muon), opt_class=_without_nones(_muon), has_betas=True, defaults=defaults)


def _muon(params: Iterable[Any], **arguments: Any) -> optim.NarrowOptimizer:
    """Muon for matrices, AdamW for all other parameters and for timm's `fallback_list`."""
    given = list(params)
    groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    shared: dict[str, Any] = {name: arguments[name] for name in arguments if name in _OF_BOTH}
    betas = arguments.pop("betas", None)
    adamw = {**shared, "rule": "adamw"} if betas is None else {**shared, "rule": "adamw", "betas": betas}
    split = []
    for group in groups:
        rest = {name: value for name, value in group.items() if name not in ("params", "use_fallback")}
        matrices: list[Any] = []
        others: list[Any] = []
        for p in group["params"]:
            shape = (p[1] if isinstance(p, tuple) else p).shape  # parameters may be named
            (matrices if len(shape) == 2 and not group.get("use_fallback") else others).append(p)
        split += [{**rest, "params": matrices}] if matrices else []
        split += [{**adamw, **rest, "params": others}] if others else []
    return optim.Muon(split, **arguments)
