"""The options that all optimizers share, their defaults, and what is refused.

Hyperparameters are refused in torch's words, so that code which reads them still works, the rest in ours.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, get_type_hints

import torch
from torch import Tensor

from narrowgauge._arguments import Count, Flag, Size, check, check_choice, is_number
from narrowgauge.optim._changes import KEPT, STORAGES
from narrowgauge.optim._plan import slot_storages
from narrowgauge.rules import Rule
from narrowgauge.storage import weight_storages


class Options(TypedDict, total=False):
    """Keyword options of every optimizer; parameter groups may override each.

    A group may also say how single parameters are kept, by their names, and why, for `describe()`:
    ``"kept": {"wte.weight": {"weights": "split", "v": "fp32", "reason": "few bits of v are noise"}}``. What it
    leaves out is as in the group. To change it, put another dictionary in its place.

    Attributes:
        weights: ``"auto"``, ``"plain"``, ``"kahan"``, ``"expansion"``, ``"split"``, ``"split8"``, ``"split4"``,
            ``"stochastic"`` or ``"master"``. ``"auto"`` chooses by the dtype of each parameter: ``"plain"`` for
            float32, ``"split8"`` for bfloat16 (``"expansion"`` with strict arithmetic), ``"kahan"`` for float16.
            float32 parameters take ``"plain"`` only, float16 parameters all except those whose names begin with
            ``"split"``.
        states: a state storage for all moments, or one for each slot, such as ``{"m": "8bit", "v": "fp32"}``.
        block_size: elements that share a scale in block-wise states.
        clip_updates: shorten a parameter's step where its second moment has fallen behind its gradient (Adafactor's
            update clipping, d = 1); for rules with a second moment.
        cautious: do not move an element whose momentum points against its gradient, and lengthen the steps of the
            others to make up for it (Liang et al. 2024); for rules with a momentum. Decoupled decay moves all.
        max_grad_norm: limit the Euclidean norm of all gradients of the optimizer together, as
            `torch.nn.utils.clip_grad_norm_` does, but inside the step and without writing to the gradients. None
            does not clip; inf only measures the norm (`grad_norm`). One number for all groups. Gradients with inf
            or NaN do not count in the norm.
        arithmetic: ``"fp32"`` computes in float32 and rounds each storage once, on write; ``"strict"`` rounds every
            operation to the storages' formats, as Collage's Algorithm 2 is written.
        nonfinite: what a gradient with inf or NaN does: ``"skip"`` leaves that parameter, its state, decay and step
            count untouched and counts it in `skipped`; ``"propagate"`` lets it through, as torch does; ``"raise"``
            raises FloatingPointError.
        min_quantized_size: parameters with fewer elements have fp32 states instead of quantized ones.
        seed: key of the random bits for stochastic rounding. They depend only on the seed, the parameter's place,
            the element and the step.
        maximize: go up the gradient instead of down.
        foreach, fused: accepted for compatibility: there is one implementation per device. Combinations that torch
            refuses are refused. With ``fused=True`` torch's GradScaler leaves unscaling to the step, as it does for
            torch's fused optimizers.
        capturable: accepted, and always in effect: on a GPU the step count is on the device, and so are `lr` and
            `betas` if they are tensors there. The step does not synchronize, except with ``arithmetic="strict"``
            and ``nonfinite="raise"``, which cannot be captured.
        differentiable: refused if True.
    """

    weights: str
    states: str | Mapping[str, str]
    block_size: int
    clip_updates: bool
    cautious: bool
    max_grad_norm: float | None
    arithmetic: Literal["fp32", "strict"]
    nonfinite: Literal["skip", "propagate", "raise"]
    min_quantized_size: int
    seed: int
    maximize: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"

# The states of the optimizers whose names end in 8bit. Where gradients of one block differ in scale, as an
# embedding's do, the paper's codes ("8bit", bitsandbytes') lose small second moments, and training is no longer
# that of 32-bit states (docs/studies/bytes_and_loss.md).
EIGHT_BIT = "log8"

_DEFAULTS: dict[str, Any] = {
    "weights": "auto",
    "states": "fp32",
    "block_size": 256,
    "clip_updates": False,
    "cautious": False,
    "max_grad_norm": None,
    "arithmetic": "fp32",
    "nonfinite": "skip",
    "min_quantized_size": 4096,
    "seed": 0,
    "maximize": False,
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
}

# What arguments of other libraries are called or done by here.
_NOT_RELATIVE = "lr is the learning rate, and a scheduler warms it up"
_INSTEAD = {
    # bitsandbytes
    "args": "give each option as a keyword",
    "block_wise": "quantized states are always block-wise, with block_size elements a block",
    "is_paged": "narrowgauge.distributed.CPUOffload keeps states on the host",
    "min_8bit_size": "min_quantized_size is its name here",
    "optim_bits": "states='8bit' or states='fp32' says how moments are kept",
    "percentile_clipping": "clip_updates=True limits steps by the second moment, max_grad_norm clips gradients",
    # other frameworks
    "epsilon": "eps is its name here",
    "learning_rate": "lr is its name here",
    "wd": "weight_decay is its name here",
    # torchao, optimi
    "bf16_stochastic_round": "weights='stochastic' rounds bf16 weights so",
    "gradient_release": "narrowgauge.optim.step_in_backward steps each parameter as soon as it has its gradient",
    "kahan_sum": "bf16 weights keep what rounding loses; weights='kahan' does so by Kahan summation",
    # transformers' Adafactor
    "clip_threshold": "d is its name here",
    "relative_step": _NOT_RELATIVE,
    "scale_parameter": "eps=(None, 1.0) is scale_parameter=False for weights of a root mean square up to 1",
    "warmup_init": _NOT_RELATIVE,
}

# The option that is one number for all groups.
LIMIT = "max_grad_norm"

_SWITCHES = (
    "clip_updates", "cautious", "maximize", "capturable", "differentiable", "amsgrad", "decoupled_weight_decay",
    "nesterov", "centered",
)  # fmt: skip

# What torch says when it refuses each hyperparameter.
_REFUSALS = {
    "lr": "Invalid learning rate",
    "eps": "Invalid epsilon value",
    "lr_decay": "Invalid lr_decay value",
    "momentum": "Invalid momentum value",
    "momentum_decay": "Invalid momentum_decay value",
    "alpha": "Invalid alpha value",
    "weight_decay": "Invalid weight_decay value",
    "initial_accumulator_value": "Invalid initial_accumulator_value value",
    "trust_coefficient": "Invalid trust_coefficient value",
}


def with_defaults(of: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of an optimizer, those not given at their defaults; a TypeError for an unknown one.

    Of an argument of another library it says what to use instead, else the nearest argument of the optimizer.
    """
    for option in options:
        if option not in _DEFAULTS:
            near = difflib.get_close_matches(option, inspect.signature(of).parameters, 1, 0.75)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            if option in _INSTEAD:
                hint = f": {_INSTEAD[option]}"
            raise TypeError(f"{of.__name__}() got an unexpected keyword argument {option!r}{hint}")
    given = dict(options)
    given.setdefault("states", of.default_states)  # type: ignore[attr-defined]
    if isinstance(given["states"], Mapping):
        given["states"] = dict(given["states"])
    return {**_DEFAULTS, **given}


def misspelled(group: Mapping[str, Any], known: Iterable[str]) -> list[tuple[str, str]]:
    """Keys of a group that no option has and that are nearly one's name, each with that.

    Other keys are anybody's: schedulers and frameworks keep theirs in groups.
    """
    names = list(known)
    others = [key for key in group if isinstance(key, str) and key not in names]
    nearest = {key: difflib.get_close_matches(key, names, 1, 0.8) for key in others}
    return [(key, near[0]) for key, near in nearest.items() if near and near[0] not in key]


def option_values(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """The shared options of a group, to be compared with what they will be later."""
    states = group["states"]
    others = (group[option] for option in _DEFAULTS if option not in ("states", LIMIT))
    # Whether there is a limit; what it is may change at every step.
    limited = group[LIMIT] is not None
    shown = tuple(states.items()) if isinstance(states, Mapping) else states
    # Equal at once where they are the same dictionaries.
    return shown, *others, limited, group.get("amsgrad"), group.get(KEPT), group.get(STORAGES)


def what_plain_loses(dtype: torch.dtype, lr: float | Tensor) -> str:
    """A warning of what weights without a low word lose: updates below half a unit in the last place."""
    size = float(lr)
    lost = f"; at lr={size:g} an update of that size is lost in every weight above " if size > 0 else ""
    least = f"{2.0 ** math.ceil(math.log2(2 * size / torch.finfo(dtype).eps)):.2g}" if size > 0 else ""
    name = str(dtype).removeprefix("torch.")
    return (
        f"weights='plain' drops what a {name} parameter cannot hold of an update{lost}{least}. "
        "weights='auto', the default, keeps it"
    )


_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@functools.cache
def _hints() -> dict[str, Any]:
    """The types of the shared options; reading them takes a millisecond, and every optimizer asks."""
    return get_type_hints(Options)


def show_options(cls: Any) -> None:
    """Let `inspect.signature`, and so `help`, show what an optimizer's ``**options`` and ``*args`` stand for.

    They are the shared options, with its default of `states`, and the arguments of its base if it passes any on.
    """
    every, rest, keyword = _KINDS
    signature = inspect.signature(cls.__init__)
    parameters = list(signature.parameters.values())
    last = parameters[-1]
    if last.kind is rest and "__init__" in vars(cls):
        hints, takes_all = _hints(), any(one.kind is every for one in parameters)
        base = next((vars(one)["__signature__"] for one in cls.__mro__[1:] if "__signature__" in vars(one)), None)
        if base is not None and (takes_all or "Options" not in str(last.annotation)):  # not our own Unpack[Options]
            theirs = base.parameters.values()
            parameters += theirs if takes_all else [one.replace(kind=keyword) for one in theirs]
        parameters += (
            inspect.Parameter(name, keyword, default=default, annotation=hints[name])
            for name, default in _DEFAULTS.items()
        )
        found: dict[str, inspect.Parameter] = {}
        for one in parameters:
            if one.kind not in (every, rest):
                found.setdefault(one.name, one)
        parameters = sorted(found.values(), key=lambda one: one.kind)
        try:
            cls.__init__.__signature__ = signature.replace(parameters=parameters)
        except ValueError:  # an argument with a default before one of the base without
            return
    shown = [one.replace(default=cls.default_states) if one.name == "states" else one for one in parameters]
    cls.__signature__ = signature.replace(parameters=shown[1:])


def is_real(value: object) -> bool:
    """Whether a value is a real number, or a tensor of real numbers that can be read."""
    if isinstance(value, Tensor):
        return not (value.is_complex() or value.is_meta or value.layout is not torch.strided)
    return is_number(value)


def check_switches(group: Mapping[str, Any]) -> None:
    """Refuse switches that are neither on nor off, before anything reads them."""
    for option in _SWITCHES:
        check(option, group.get(option, False), Flag)
    for option in ("foreach", "fused"):
        if group[option] is not None:
            check(option, group[option], Flag)


def check_options(name: str, rule: Rule, group: Mapping[str, Any]) -> None:
    """Refuse options that no parameter could be served with.

    Raises:
        ValueError: naming the argument.
        RuntimeError: for `fused` with `foreach` or `differentiable`, as torch does.
    """
    if group["fused"] and group["differentiable"]:
        raise RuntimeError("`fused` does not support `differentiable`")
    if group["fused"] and group["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    check_choice("weights", group["weights"], ("auto", *weight_storages()))
    slot_storages(rule, group)
    check_choice("arithmetic", group["arithmetic"], ("fp32", "strict"))
    check_choice("nonfinite", group["nonfinite"], ("skip", "propagate", "raise"))
    check("block_size", group["block_size"], Size)
    check("min_quantized_size", group["min_quantized_size"], Count)
    if check("seed", group["seed"], Count) >= 2**32:
        raise ValueError(f"seed must be below 2^32, got {group['seed']}")
    check_limits([group])
    for option in ("amsgrad", "differentiable"):
        if group.get(option):
            raise ValueError(f"{option} must be False for {name}, got True")
    if group["capturable"] and (group["arithmetic"] == "strict" or group["nonfinite"] == "raise"):
        raise ValueError(
            "capturable must be False with arithmetic='strict' or nonfinite='raise', which wait for the device"
        )


def check_limits(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse an invalid `max_grad_norm`, any inside ZeroRedundancyOptimizer, and groups that disagree."""
    limits = [group[LIMIT] for group in groups]
    for limit in limits:
        if limit is not None and (not is_number(limit) or not limit > 0):
            raise ValueError(f"{LIMIT} must be a number above 0, inf, or None, got {limit!r}")
    if any(limit is not None for limit in limits) and _within(_ZERO):
        raise ValueError(
            f"{LIMIT} must be None inside ZeroRedundancyOptimizer, which gives each rank some of the parameters, "
            f"got {limits[0]!r}; use torch.nn.utils.clip_grad_norm_"
        )
    if any(limit != limits[0] for limit in limits):
        each = " and ".join(map(repr, dict.fromkeys(limits)))
        raise ValueError(f"{LIMIT} must be the same in all groups, got {each}")


def _within(module: str) -> bool:
    """Whether a function of a module waits for this one."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def check_hyperparameters(rule: Rule, group: Mapping[str, Any], refusals: Mapping[str, str | None]) -> None:
    """Refuse hyperparameters out of range, those that the group has.

    `refusals` replaces words of `_REFUSALS`; None for an option that is checked elsewhere.
    """
    for option, words in {**_REFUSALS, **refusals}.items():
        if option in group and words is not None:
            value = group[option]
            _check_one_element(option, value)
            if not is_real(value) or not 0.0 <= float(value) < math.inf:
                raise ValueError(f"{words}: {value!r}; {option} must be a finite number of at least 0")
    if group.get("clip_updates") and not float(group.get("eps", 0.0)) < 2.0**64:
        raise ValueError(f"eps must be below 2^64 with clip_updates=True, which squares it, got {group['eps']!r}")
    dampening = group.get("dampening", 0.0)
    if not is_number(dampening) or not math.isfinite(dampening):
        raise ValueError(f"dampening must be a finite number, got {dampening!r}")
    _check_betas(rule, group.get("betas", (0.0,) * rule.betas))
    schedule = group.get("beta2_schedule")
    if schedule is not None and not (is_number(schedule) and 0.0 < schedule <= 1.0):
        raise ValueError(f"beta2_schedule must be a number in (0, 1] or None, got {schedule!r}")
    if group.get("nesterov") and "dampening" in group and (group["momentum"] <= 0 or group["dampening"]):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")


def _check_betas(rule: Rule, betas: Any) -> None:
    if not isinstance(betas, tuple | list) or len(betas) != rule.betas:
        raise ValueError(f"Invalid betas: {betas!r}; betas must be {rule.betas} numbers in [0, 1)")
    for index, beta in enumerate(betas):
        _check_one_element(f"betas[{index}]", beta)
        if not is_real(beta) or not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}; it must be a number in [0, 1)")
    if len({isinstance(beta, Tensor) for beta in betas}) > 1:
        raise ValueError(f"betas must be either both floats or both Tensors, got {betas!r}")


def _check_one_element(name: str, value: Any) -> None:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"Tensor {name} must be 1-element, got {value.numel()} elements")
