"""The one optimizer: torch's conventions around the engine.

Everything that differs between optimizers is a value: the rule (a class attribute of the thin named classes) and
the storages (options of the parameter group). This file has torch's side: groups, state, closures, hooks,
`state_dict`, pickling, and what loss scalers and gauges read. The engine plans parameters and takes the steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from narrowgauge._arguments import Flag, check, check_instance
from narrowgauge._text import warn
from narrowgauge._torch_private import local, uncompiled
from narrowgauge.optim._changes import STORAGES, GroupSnapshot
from narrowgauge.optim._checkpoint import Checkpoint, read_checkpoint
from narrowgauge.optim._checkpoint_convert import replan
from narrowgauge.optim._checkpoint_foreign import VERSION, VERSION_KEY, export_to_torch
from narrowgauge.optim._describe import Description, describe
from narrowgauge.optim._eager import check_terms
from narrowgauge.optim._engine import Engine, StalePlanError
from narrowgauge.optim._float8_convert import change_class, words_of
from narrowgauge.optim._options import (
    LIMIT,
    Options,
    check_hyperparameters,
    check_limits,
    check_options,
    check_switches,
    misspelled,
    option_values,
    show_options,
    what_plain_loses,
    with_defaults,
)
from narrowgauge.optim._plan import (
    ParamPlan,
    check_own_storages,
    each_once,
    kind_of,
    never_trains,
    plan_param,
    unique_names,
)
from narrowgauge.optim._preview import ParameterView, QuantizedMoment, moment_quality, preview
from narrowgauge.optim._rule_check import check_rule
from narrowgauge.optim._sharded_state import to_pieces
from narrowgauge.optim._sharding import as_shared, is_shared
from narrowgauge.optim._state_shapes import to_shapes
from narrowgauge.optim._stats import StepStats
from narrowgauge.optim._tracing import elementwise
from narrowgauge.optim._verdict import Arrival, Measured, StepRequest, Unscaling, clipping
from narrowgauge.rules import WEIGHT, Rule, cautious, clipped
from narrowgauge.storage import WeightStorage, mark_states, marked_states, weight_storage

_MARKS = "marks"
_MANY_SKIPS = 100  # loss scalers begin with a few
_LIVE: WeakSet[NarrowOptimizer] = WeakSet()  # all optimizers


class BackwardSteps(Protocol):
    """The hooks of `step_in_backward`, which step parameters while gradients are made."""

    def check_options(self, group: Mapping[str, Any], rule: Rule) -> None: ...
    def check(self, group: dict[str, Any]) -> None: ...
    def watch(self, number: int) -> None: ...
    def end(self) -> None: ...
    def remove(self) -> None: ...


class NarrowOptimizer(torch.optim.Optimizer):
    """Base of the named optimizers; not made by users.

    Attributes:
        rule: the update equation.
        last_stats: `UpdateStats` of the last step, or replay, by parameter name; empty if `gauges` was off.
        in_backward: the handle of `step_in_backward`, whose `remove()` ends it; None without.
    """

    rule: ClassVar[Rule]
    # torch's words for a hyperparameter of this optimizer alone; None for one that the class checks itself.
    refusals: ClassVar[Mapping[str, str | None]] = {}
    writes_weights: ClassVar[bool] = False  # whether more than a step writes to parameters
    _made = True  # so are copies, without __init__
    default_states: ClassVar[str | Mapping[str, str]] = "fp32"
    identity: ClassVar[tuple[str, ...]] = ()  # options without which the name would lie: no checkpoint changes them
    by_rule: ClassVar[dict[str, type[NarrowOptimizer]]] = {}  # the optimizers whose rules a group may name

    def __init__(self, params: ParamsT, hyperparameters: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        if isinstance(params, torch.nn.Module):
            name = type(self).__name__
            raise TypeError(f"params must be parameters, got a model: pass {name}(model.named_parameters())")
        self._reset()
        shared = with_defaults(type(self), options)
        if taken := [option for option in hyperparameters if option in shared]:
            raise ValueError(f"{taken[0]!r} must not be a hyperparameter: it is an option of every optimizer")
        defaults = {**hyperparameters, **shared, VERSION_KEY: VERSION}
        defaults["rule"] = self.base_rule(defaults).name
        self.defaults = defaults
        self.check(defaults)
        for rule in dict.fromkeys((self.base_rule(defaults), self.rule_for(defaults))):
            check_rule(rule, defaults)
        self._made = False
        super().__init__(params, defaults)
        self._made = True
        self._drops_of = sum(map(_has_low_words, chain.from_iterable(g["params"] for g in self.param_groups)))
        _LIVE.add(self)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        show_options(cls)
        if "rule" in cls.__dict__:
            if isinstance(cls.rule, type):
                raise TypeError(f"rule must be a rule, got the class: write rule = {cls.rule.__name__}()")
            known = cls.by_rule.setdefault(cls.rule.name, cls)
            if known.__module__.startswith("narrowgauge.") and type(known.rule) is not type(cls.rule):
                raise ValueError(f"name of the rule must be new, got {cls.rule.name!r}, which {known.__name__} has")
            if (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__):
                cls.by_rule[cls.rule.name] = cls  # defined anew, in a notebook
                _example.cache_clear()

    def _reset(self) -> None:
        self._gauges = False
        self.last_stats, self._has_stats = StepStats(), False
        self._engine = Engine()
        self._snapshots: list[GroupSnapshot] = []
        self._planned_for: list[Any] | None = []  # what each group asked for when it was planned
        self._grad_norm: Tensor | None = None
        self._unscaling: Unscaling | None = None
        self.in_backward: BackwardSteps | None = None
        self._has_warned = self._has_warned_of_skips = False
        self._drops_of = 0  # parameters of which another optimizer has low words
        self._converted: dict[Tensor, int] = {}  # by `load_state_dict`, until the next step: sums of their bits

    # Groups and plans.

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse options of a group of this rule that no parameter could be stepped with.

        Raises:
            ValueError, RuntimeError: as torch does.
        """
        check_switches(group)
        rule = self.rule_for(group)
        check_hyperparameters(rule, group, self.refusals)
        check_options(type(self).__name__, rule, group)

    def owner(self, group: Mapping[str, Any]) -> NarrowOptimizer:
        """Whose rule a group takes: this optimizer's, or that of an example of the class whose rule it names.

        Raises:
            ValueError: for an unknown rule.
        """
        own = self.defaults["rule"]
        return self if group.get("rule", own) == own else _example(group["rule"])

    def rule_for(self, group: Mapping[str, Any]) -> Rule:
        """The update rule under a group's options, always the same object for the same ones."""
        owner = self.owner(group)
        rule = owner.base_rule(group)
        if group.get("clip_updates"):
            with_clipping = clipped(rule)
            if with_clipping is None:
                raise ValueError(
                    f"clip_updates must be False for {type(owner).__name__}, whose rule has no second moment, got "
                    "True"
                )
            rule = with_clipping
        if not group.get("cautious"):
            return rule
        name, made = type(owner).__name__, cautious(rule)
        if not any(slot.name == "m" for slot in rule.slots(group)):
            raise ValueError(f"cautious must be False for {name} without a momentum, got True")
        if made is None:
            raise ValueError(f"cautious must be False for {name}, whose momentum is made with sums, got True")
        return made

    def _checked_rule(self, group: Mapping[str, Any]) -> Rule:
        self.owner(group).check(group)
        rule = self.rule_for(group)
        if self.in_backward is not None:
            self.in_backward.check_options(group, rule)
        return rule

    def base_rule(self, group: Mapping[str, Any]) -> Rule:
        """The update rule without clipping, and not cautious."""
        return self.rule

    def _fixed(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Options of a group that no checkpoint changes."""
        return self.owner(group).identity

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch does.

        A group may name its rule: ``{"params": others, "rule": "adamw", "lr": 3e-4}``. If such a group leaves out a
        hyperparameter, it gets the default of that rule's optimizer. If it leaves out a shared option (see
        `Options`), it gets this optimizer's.

        Raises:
            ValueError: for an unknown rule, for a hyperparameter that the named rule does not have, and for wrong
                values; the optimizer does not change then.
        """
        if self._planned_for is None:
            self._replan()
        strays: set[str] = set()
        if isinstance(param_group, dict):  # torch refuses others
            owner = self.owner(param_group)
            for key, name in misspelled(param_group, owner.defaults):
                warn(f"param_groups: {key!r} does nothing; is {name!r} meant?")
            if owner is not self:
                strays = self.defaults.keys() - owner.defaults.keys()
                if given := strays & param_group.keys():
                    raise ValueError(f"{min(given)} must not be in a group with rule={param_group['rule']!r}")
                shared = {name: self.defaults[name] for name in Options.__optional_keys__}
                for name, value in {**owner.defaults, **shared}.items():
                    param_group.setdefault(name, value)
        # A new group takes the limit of the others, if there are any: some users empty the list first.
        if self._made and isinstance(param_group, dict) and self.param_groups:
            param_group.setdefault(LIMIT, self.param_groups[0][LIMIT])
        super().add_param_group(param_group)
        for name in strays:  # torch has filled in this optimizer's own hyperparameters
            del param_group[name]
        self.param_groups[-1].update(each_once(self.param_groups[-1]))
        try:
            self._checked_rule(self.param_groups[-1])
            check_limits(self.param_groups)
            self._plan_group(self._engine.plans, len(self.param_groups) - 1)
            if self.in_backward is not None:
                self.in_backward.check(self.param_groups[-1])
        except Exception:
            for p in self.param_groups.pop()["params"]:
                self._engine.plans.pop(p, None)
            raise
        if self._planned_for is not None:
            self._planned_for.append(self._asked(self.param_groups[-1]))
        if self.in_backward is not None:
            self.in_backward.watch(len(self.param_groups) - 1)

    def _plan_group(self, plans: dict[Tensor, ParamPlan], number: int) -> None:
        group = self.param_groups[number]
        *before, names = unique_names(self.param_groups[: number + 1])
        check_own_storages(group, number, names)
        for index, (name, p) in enumerate(zip(names, group["params"], strict=True), start=sum(map(len, before))):
            if is_lazy(p) or never_trains(p):
                continue  # a lazy one is planned once a first pass has given it a shape
            plan = plans[p] = plan_param(self.rule_for(group), group, p, name, index)
            if plan.shard is not None:
                check_terms(plan.rule, group, p.dim())
            if plan.weight.float8 and self.writes_weights:
                raise ValueError(
                    f"weights must not be {plan.weight.name!r} for {type(self).__name__}, which writes to "
                    f"parameters between steps ({name})"
                )
            if plan.weight.name == "plain" and p.dtype != torch.float32 and not self._has_warned:
                self._has_warned = True
                warn(what_plain_loses(p.dtype, group["lr"]))

    def _asked(self, group: Mapping[str, Any]) -> Any:
        """What a group asks for, cheap to compare, and unchanged by later changes of the group."""
        rule = self.rule_for(group)
        return rule, rule.slots(group), *option_values(group)

    def plan_of(self, p: Tensor) -> ParamPlan:
        """What is done with a parameter."""
        if never_trains(p):
            raise ValueError(f"p must be a parameter that can train, got a frozen one of {p.dtype}")
        plan = self._engine.plans.get(p)
        if plan is None or plan.kind != kind_of(p):
            self._planned_for = None
            self._replan()
        return self._engine.plans[p]

    def convert(self, p: Tensor, **storages: str) -> None:
        """Keep one parameter otherwise than its group from now on; its state is converted in place.

        The group has it under ``"storages"``, by the parameter's name, and so does a checkpoint, which brings it
        back.

        Args:
            p: the parameter.
            **storages: ``weights``, and moments by slot: ``convert(p, weights="split8", m="log8")``.

        To ``weights="fp8split8"`` and from it the parameter itself changes: it becomes a `Float8Weight`, or a plain
        tensor again, and stays the same object.

        Raises:
            ValueError: for a parameter of no group, and a storage that it cannot have; nothing is changed then.
        """
        group = self._group_of(p)
        if group is None:
            raise ValueError(f"p must be a parameter of the optimizer, got one of shape {tuple(p.shape)}")
        name, before = self.plan_of(p).name, dict(group)
        if "weights" in storages and p.dtype not in weight_storage(storages["weights"]).dtypes:
            raise ValueError(f"weights must be a storage for {p.dtype} ({name}), got {storages['weights']!r}")
        undo = self._change_class(p, weight_storage(storages["weights"]), group) if "weights" in storages else None
        own = group.get(STORAGES, {})
        group[STORAGES] = {**own, name: {**own.get(name, {}), **storages}}
        try:
            self._replan()
        except ValueError:
            group.clear()
            group.update(before)
            if undo is not None:
                undo()
            raise

    def _change_class(self, p: Tensor, target: WeightStorage, group: dict[str, Any]) -> Callable[[], None] | None:
        """Make p a `Float8Weight`, or a plain tensor, if its new storage asks for that. Returns what undoes it."""
        plan = self.plan_of(p)
        if target.float8 == plan.weight.float8:
            return None
        if self.in_backward is not None:
            raise ValueError(f"weights must not become {target.name!r} while parameters are stepped in backward")
        if not self.state.get(p):
            self.state[p] = plan.init(p, group)
        self._converted.pop(p, None)
        return change_class(p, plan, self.state[p], target)

    def plans(self, lazy: bool = False) -> list[tuple[Tensor, ParamPlan]]:
        """All parameters and their plans, in the order of the groups.

        Parameters that have no shape yet, of lazy modules before their first pass, are left out if `lazy`; else
        they raise RuntimeError.
        """
        self._replan()
        ps = [p for group in self.param_groups for p in group["params"] if not never_trains(p)]
        known = [p for p in ps if not is_lazy(p)]
        if len(known) < len(ps) and not lazy:
            raise RuntimeError(
                f"params: {len(ps) - len(known)} of {len(ps)} must be initialized first, by one run of the model"
            )
        return [(p, self.plan_of(p)) for p in known]

    def _replan(self) -> None:
        """Act on options that have changed in `param_groups`, which torch reads at every step.

        What only the rule reads takes effect at once. An option that says how numbers are stored needs other
        tensors: the plans are made again and the states converted, as those of a checkpoint are. An impossible
        option raises ValueError before anything is updated, at every step until it is fixed.
        """
        known = self._snapshots if self._planned_for is not None else []
        if len(known) == len(self.param_groups) and all(map(GroupSnapshot.unchanged, known, self.param_groups)):
            return
        asked = [self._asked(group) for group in self.param_groups]
        if asked != self._planned_for:
            plans: dict[Tensor, ParamPlan] = {}
            for number, group in enumerate(self.param_groups):
                self._checked_rule(group)
                self._plan_group(plans, number)
            check_limits(self.param_groups)
            notes = replan(type(self).__name__, self._engine.plans, plans, self.param_groups, self.state)
            self._engine.take_plans(plans)
            self._planned_for = asked
            if notes:
                warn(f"param_groups: {notes}")
        self._snapshots = list(map(GroupSnapshot, self.param_groups))

    # Steps.

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            FloatingPointError: if `nonfinite` is ``"raise"`` and a gradient is not finite.
            RuntimeError: for a sparse gradient. In both cases no parameter has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.in_backward is not None:
            self.in_backward.end()
        else:
            self.take_step()
        return loss

    def take_step(self, arrival: Arrival | None = None) -> None:
        """Step every parameter that has a gradient; `arrival` brings gradients that are on their way."""
        self.begin_step()
        request = self._request(arrival)
        try:
            norm, flags, measured = self._engine.step(self.param_groups, self.state, request)
        except StalePlanError:
            self._planned_for = None
            self._replan()
            norm, flags, measured = self._engine.step(self.param_groups, self.state, request)
        if norm is not None:
            self._keep_norm(norm)
        if self._unscaling is not None:
            self._unscaling.flags = flags
        self._remember(measured)

    def begin_step(self) -> None:
        """Forget what the last step measured, and act on changed options."""
        if self._has_stats:
            self.last_stats, self._has_stats = StepStats(), False
        if self._drops_of:
            count, self._drops_of = self._drops_of, 0
            warn(
                f"step: {count} parameters lose the low words that another optimizer keeps of them. Before the "
                "first step load_state_dict(other.state_dict()) takes over its state, and "
                "set_full_weights(other.full_weights()) the weights alone. If you set the weights anew, all is well"
            )
        if self._converted:
            self._warn_of_conversions()
        self._replan()

    def _warn_of_conversions(self) -> None:
        """Low words were computed from weights; say so if other weights were loaded since."""
        if next(iter(self._converted)).is_cuda and torch.cuda.is_current_stream_capturing():
            return  # the sums are waited for
        given, self._converted = self._converted, {}
        if late := [p for p, was in given.items() if _sum_of_bits(p) != was]:
            warn(
                f"step: {len(late)} parameters were set after load_state_dict had converted their low words, which "
                "belong to the weights of before. Load the model first; torch's set_state_dict loads it last, so "
                "call set_model_state_dict, then set_optimizer_state_dict. If you set the weights anew, all is well"
            )

    def _remember(self, measured: Measured) -> None:
        for names, rows in measured:
            self.last_stats.add_table(names, rows)
            self._has_stats = True

    def _request(self, arrival: Arrival | None) -> StepRequest:
        """What the step that begins is asked for."""
        limit = self.param_groups[0][LIMIT] if self.param_groups else None
        if limit is not None:
            check_limits(self.param_groups)
        asked = self._unscaling
        # torch's GradScaler leaves it for the time of a step: a number if there are no gradients.
        found = getattr(self, "found_inf", None) if asked is None else None
        found = torch.as_tensor(found) if found is not None else None
        whole = asked is not None and asked.whole
        return StepRequest(self.inverse_scale(), found, whole, limit, self._gauges, arrival)

    def step_one(self, group: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        """Step one parameter whose gradient is ready; `grad` is the part on this rank."""
        self._remember(self._engine.step_one(group, p, grad, self.state, self._gauges))

    # What loss scalers use.

    @contextmanager
    def unscaling(self, inverse: Tensor, whole: bool) -> Iterator[Unscaling]:
        """Have a step in this block multiply gradients by the inverse of a loss scale.

        Args:
            inverse: float32, 0-d, on any device.
            whole: whether a gradient that is not finite then holds all parameters; no skip is counted.

        Yields:
            What the step will report of the gradients.
        """
        self._unscaling = Unscaling(inverse, whole)
        try:
            yield self._unscaling
        finally:
            self._unscaling = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # As torch's own: with fused=True torch's GradScaler leaves unscaling and skipping to the step. Not without:
        # frameworks that clip between the two refuse optimizers of which this is true.
        return bool(self.defaults["fused"]) and self.in_backward is None

    def inverse_scale(self) -> Tensor | None:
        """What a loss scaler has asked the present step to multiply gradients by: float32, 0-d; or None."""
        if self._unscaling is not None:
            return self._unscaling.inverse
        scale = getattr(self, "grad_scale", None)  # torch's GradScaler leaves it for the time of a step
        return scale.double().reciprocal().float().reshape(()) if scale is not None else None

    def _keep_norm(self, norm: Tensor) -> None:
        # At one address, which a graph's replay writes to as well.
        if self._grad_norm is None or self._grad_norm.device != norm.device:
            self._grad_norm = torch.empty_like(norm)
        self._grad_norm.copy_(norm)

    @property
    def grad_norm(self) -> Tensor:
        """The norm of all gradients, unscaled, that the last step clipped by: 0-d, float32, on the device.

        Gradients with inf or NaN are left out. Reading it does not wait; a graph's replay changes it too.

        Raises:
            RuntimeError: if no step has measured it.
        """
        if self._grad_norm is None:
            raise RuntimeError("grad_norm: no step has measured one; step with max_grad_norm, which may be inf")
        return self._grad_norm.clone()

    # What gauges and people read.

    @property
    def gauges(self) -> bool:
        """Whether every step measures what it does; see `last_stats`."""
        return self._gauges

    @gauges.setter
    def gauges(self, value: bool) -> None:
        self._gauges = check("gauges", value, Flag)

    def measured(self) -> list[tuple[list[Tensor], Tensor]]:
        """The sums in `last_stats`, in pairs: some parameters, and their float64 table (parameters, 8)."""
        owners = {plan.name: p for p, plan in self.plans()}
        return [([owners[name] for name in names], rows) for names, rows in self.last_stats.tables()]

    def _group_of(self, p: Tensor) -> dict[str, Any] | None:
        return next((group for group in self.param_groups if any(p is one for one in group["params"])), None)

    def parameter_view(self, p: Tensor) -> ParameterView | None:
        """What gauges may read of one parameter, before a step and after it; None for a parameter of no group."""
        self._replan()
        group = self._group_of(p)
        if group is None or never_trains(p):
            return None
        limit, norm = group[LIMIT], self._grad_norm
        factor = clipping(limit, norm) if limit is not None and norm is not None else None
        return ParameterView(self.plan_of(p), p, self.state.get(p, {}), group, factor)

    def preview_unavailable(self, p: Tensor) -> str | None:
        """Why `preview` cannot say what the next step makes of a parameter's moments, or None."""
        if is_shared(p):
            return "it is sharded"
        if self.in_backward is not None:
            return "parameters are stepped in backward"
        if any(group[LIMIT] is not None for group in self.param_groups):
            return f"{LIMIT} makes each step depend on all gradients"
        return None

    def keeps_codes(self, p: Tensor) -> bool:
        """Whether a moment of a parameter is quantized."""
        return any(slot.storage.quantized for slot in self.plan_of(p).slots)

    @torch.no_grad()
    def preview(self, p: Tensor, sample: Callable[[Tensor], Tensor]) -> list[QuantizedMoment]:
        """What the next step will write to a parameter's quantized moments; nothing is changed.

        The step count is the step's own, and so are the random numbers of a whole parameter; a sample has others.
        A gradient that is not finite is taken as it is.

        Args:
            p: the parameter.
            sample: gives, of a tensor of the parameter or its state, the items of a sample; see
                `preview_unavailable`.

        Returns:
            One an entry; none if no moment is quantized, or the parameter has no gradient.
        """
        view = self.parameter_view(p)
        if view is None or p.grad is None or not self.keeps_codes(p) or not view.p.numel():
            return []
        return preview(view, self.inverse_scale(), sample)

    def moment_quality(self, p: Tensor) -> dict[str, Tensor]:
        """What storing each quantized moment changes in a step with the present gradient.

        Returns:
            By slot, float64 (2,): sums whose ratio is 1 if nothing is lost in the mean, of the part on this rank.
            Empty without a gradient or a quantized moment, and for a sharded parameter whose rule has sums over it.
        """
        view = self.parameter_view(p)
        if view is None or view.grad is None or not self.keeps_codes(p) or not view.p.numel():
            return {}
        if is_shared(p) and not elementwise(view.plan, view.group):
            return {}
        return moment_quality(view, self.inverse_scale())

    @property
    def skipped(self) -> dict[str, int]:
        """Steps skipped because of a gradient that was not finite, by parameter; parameters with none left out.

        Reading it waits for the device, and changes nothing.
        """
        counts = {
            plan.name: int(self.state[p]["skipped"]) for p, plan in self.plans(lazy=True) if self.state.get(p)
        }
        return {name: count for name, count in counts.items() if count}

    def _warn_of_skips(self, plans: list[tuple[Tensor, ParamPlan]]) -> None:
        """Say, once, that a parameter skips most of its steps. Reading it waits for the device, as saving does."""
        if self._has_warned_of_skips:
            return
        stuck = []
        for p, plan in plans:
            state = self.state.get(p)
            if state and (count := int(state["skipped"])) >= _MANY_SKIPS and count > (steps := int(state["step"])):
                stuck.append(f"{plan.name} skipped {count} of {count + steps} steps")
        if stuck:
            self._has_warned_of_skips = True
            others = f", and {len(stuck) - 1} more parameters most of theirs" if stuck[1:] else ""
            words = f"{stuck[0]}{others}: their gradients have inf or NaN; see `skipped`"
            warn(words)

    def state_bytes(self) -> int:
        """Bytes of all tensors that the optimizer keeps now; a state exists from a parameter's first step on."""
        return sum(value.nbytes for state in self.state.values() for value in state.values())

    def describe(self) -> Description:
        """Bytes kept, rule, storages, path, skipped steps, and why: in all, and in `rows` for each parameter."""
        when = "" if self.in_backward is None else ", in backward"
        plans = self.plans()
        groups = {p: group for group in self.param_groups for p in group["params"]}
        paths = {p: self._engine.path(p, groups[p]) for p, _ in plans}
        # The plain tensors of `CPUOffload` require no gradient and are stepped.
        still = (p for p, _ in plans if isinstance(p, torch.nn.Parameter) and not p.requires_grad)
        return describe(plans, self.skipped, paths, when, {p for p in still if not self.state.get(p)})

    # Copies and checkpoints.

    def __getstate__(self) -> dict[str, Any]:
        self._replan()  # a copy has no plans: its tensors must be what its groups say
        marks = [[marked_states(p) for p in group["params"]] for group in self.param_groups]
        return {**super().__getstate__(), _MARKS: marks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch copies and pickles state and groups only; the rest is made anew. load_state_dict calls this
        # too: an engine is there already, but the groups may ask for other plans.
        if "_engine" not in self.__dict__:
            self._reset()
            _LIVE.add(self)
        self._drops_of, self._converted = 0, {}
        self._engine.take_plans({})
        self._planned_for = None
        super().__setstate__({key: value for key, value in state.items() if key != _MARKS})
        # A copied parameter comes without the mark that its state was made for.
        for group, marks in zip(self.param_groups, state.get(_MARKS, ()), strict=False):
            for p, mark in zip(group["params"], marks, strict=True):
                if mark is not None:
                    mark_states(p, mark)
        self._replan()  # at once: a storage that is asked for later must find what these states are in

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as torch's optimizer of the same name would save it: its `load_state_dict` goes on from there.

        Moments are float32; torch rounds them to the parameter's dtype when it loads them. It has neither low words
        nor update clipping nor cautious updates: a UserWarning says what it cannot continue. Hooks are not called.

        Raises:
            ValueError: if torch has no optimizer of this name, or groups have several rules.
        """
        state_dict, notes = export_to_torch(type(self), self.defaults, self.plans(), self.param_groups, self.state)
        if notes:
            warn(f"torch_state_dict: {notes}")
        return state_dict

    def state_dict(self) -> dict[str, Any]:
        """The state, as torch's optimizers give it.

        States of sharded parameters are DTensors, in shapes that are the same on any number of ranks; see
        docs/distributed.md.
        """
        return self._state_dict(to_shapes)

    def state_in_pieces(self) -> dict[str, Any]:
        """The same, with each rank's tensors as they are, for the checkpoints of `narrowgauge.distributed`."""
        return self._state_dict(to_pieces)

    def _state_dict(self, shown: Callable[[Any, ParamPlan, dict[str, Tensor]], dict[str, Any]]) -> dict[str, Any]:
        plans = self.plans(lazy=True)
        self._warn_of_skips(plans)
        if not any(is_shared(p) for p, _ in plans):
            return super().state_dict()

        def show(_: torch.optim.Optimizer, found: dict[str, Any]) -> None:
            states = found["state"]
            for group, packed in zip(self.param_groups, found["param_groups"], strict=True):
                for p, identity in zip(group["params"], packed["params"], strict=True):
                    if identity in states and is_shared(p):
                        states[identity] = shown(p, self._engine.plans[p], states[identity])

        # Shown as DTensors before other hooks see it.
        handle = self.register_state_dict_post_hook(show, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    @torch.no_grad()
    def _take(self, checkpoint: Checkpoint) -> None:
        self.state.update(checkpoint.states)
        for p, weight in checkpoint.weights.items():
            local(p).copy_(weight)
        self._converted = {p: _sum_of_bits(p) for p in checkpoint.converted}

    @torch.no_grad()
    def full_weights(self) -> dict[Tensor, Tensor]:
        """Every parameter's weight in float32, with its low word or master copy added.

        The weight of a sharded parameter is a DTensor with the same placements. `expansion` and `kahan` weights may
        have more digits than float32; they are rounded to it.

        Returns:
            {parameter: float32 tensor of its shape}.
        """
        found: dict[Tensor, Tensor] = {}
        for p, plan in self.plans():
            part, state = local(p.detach()), self.state.get(p)
            low = plan.weight.init(part) if not state else state.get(plan.weight_key or "")
            wide = plan.weight.exact(part, low).to(torch.float32)
            found[p] = as_shared(p, wide) if is_shared(p) else wide
        return found

    @torch.no_grad()
    def set_full_weights(self, weights: Mapping[Tensor, Tensor] | Mapping[str, Tensor]) -> None:
        """Set weights with their low words or master copies, from float32: the way back of `full_weights`.

        Moments stay as they are, but for one that is a weight, z of `ScheduleFreeAdamW`: before the first step, and
        where the parameter changes, it becomes the new weight. What a storage has no room for is rounded.

        Args:
            weights: {parameter, or the name that the optimizer has for it: its weight, of its shape}; for a sharded
                parameter a DTensor with its placements. Other parameters are left alone.

        Raises:
            ValueError: for a parameter of no group, and a weight of another shape; nothing is changed then.
        """
        plans = dict(self.plans())
        named = {plan.name: p for p, plan in plans.items()}
        found: dict[Tensor, Tensor] = {}
        for key, wide in weights.items():
            p = named.get(key) if isinstance(key, str) else key
            if p is None or p not in plans:
                got = repr(key) if isinstance(key, str) else f"one of shape {tuple(key.shape)}"
                raise ValueError(f"weights must be of parameters of the optimizer, got {got}")
            if wide.shape != p.shape or is_shared(wide) != is_shared(p):
                raise ValueError(
                    f"weights of {plans[p].name} must be {'a DTensor' if is_shared(p) else 'a tensor'} of shape "
                    f"{tuple(p.shape)}, got a {type(wide).__name__} of shape {tuple(wide.shape)}"
                )
            found[p] = wide
        self._drops_of = 0
        self._converted = {p: was for p, was in self._converted.items() if p not in found}
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for p, wide in found.items():
            plan, part, exact = plans[p], local(p.detach()), local(wide.detach()).to(p.device, torch.float32)
            is_new = not self.state.get(p)
            if is_new and plan.weight_key is not None:
                self.state[p] = plan.init(part, groups[p])
            state: dict[str, Tensor] = self.state.get(p) or {}
            has_low = plan.weight_key is not None
            hi, low = words_of(exact, plan.weight, p.dtype) if has_low else (exact.to(p.dtype), None)
            for slot in (slot for slot in plan.slots if state and slot.slot.start == WEIGHT):
                kept = (hi == part) & (not is_new)  # more digits of the same weight are not another one
                state.update(slot.encode(torch.where(kept, slot.decode(state, part.shape), exact), state=state))
            part.copy_(hi if has_low else exact)
            if plan.weight_key is not None and low is not None:
                state[plan.weight_key] = low

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that `state_dict` gave, or that torch's or bitsandbytes' optimizer of this kind saved.

        Hyperparameters come from the checkpoint, storages stay as this optimizer was made: what was written in the
        same ones is taken bit for bit, everything else is converted, low words to what they mean beside the present
        parameter (load the model first). A float32 parameter that still has the numbers of the narrow one it comes
        from takes the low word in. A UserWarning says what was dropped. Tensors move to the parameters' devices.

        Raises:
            ValueError: for a state of another rule or other shapes, an unknown version, or no state at all; nothing
                is changed then.
        """
        check_instance("state_dict", state_dict, Mapping)
        self.plans()  # refuses lazy parameters that have no shape yet
        # torch casts every float state to the parameter's dtype, which would round fp32 moments to bf16. Two hooks
        # avoid that: the last pre-hook takes the states out, and the first post-hook puts them back.
        read: list[Checkpoint] = []

        def before(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            checkpoint = read_checkpoint(
                type(self).__name__, self.param_groups, self._fixed, self._checked_rule, given
            )
            read.append(checkpoint)
            return {**given, "state": checkpoint.others, "param_groups": checkpoint.groups}

        handles = (
            self.register_load_state_dict_pre_hook(before),
            self.register_load_state_dict_post_hook(lambda _: self._take(read[0]), prepend=True),
        )
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            for handle in handles:
                handle.remove()
        if read[0].notes:
            warn(f"state_dict: {read[0].notes}")


def _sum_of_bits(p: Tensor) -> int:
    return int(local(p.detach()).to(torch.float32).view(torch.int32).sum())


def _has_low_words(p: Tensor) -> bool:
    """Whether some optimizer has a low word of a parameter."""
    return any(key.startswith("weight.") for other in _LIVE for key in other.state.get(p, ()))


@functools.cache
def _example(rule: str) -> NarrowOptimizer:
    """An optimizer of the class whose rule has this name: its defaults, its rule, its checks."""
    if rule not in NarrowOptimizer.by_rule:
        raise ValueError(f"rule must be one of {', '.join(sorted(NarrowOptimizer.by_rule))}, got {rule!r}")
    kind: Callable[..., NarrowOptimizer] = NarrowOptimizer.by_rule[rule]
    return kind([torch.nn.Parameter(torch.zeros(1, 1))])
