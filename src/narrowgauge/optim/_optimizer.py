"""The one optimizer: it walks the parameters, asks the rule for an update and the storages to keep it.

Everything that differs between optimizers is a value: the rule (a class attribute of the thin named classes) and
the storages (options of the parameter group). What is here is torch's convention: groups, state, closures,
hooks, `state_dict`. The step has two more duties that only it can do: a gradient that is not finite must not
reach weights or states, and whoever measures what narrow numbers lose is given the intended and the effective
update of every parameter (`gauges`, `last_stats`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from narrowgauge.optim._admission import refuse_gradient, skipped_steps
from narrowgauge.optim._checkpoint import load_checkpoint
from narrowgauge.optim._checkpoint_export import export_to_torch
from narrowgauge.optim._checkpoint_layouts import VERSION, VERSION_KEY
from narrowgauge.optim._describe import Description, describe
from narrowgauge.optim._dispatch import Dispatch
from narrowgauge.optim._follow import Request, follow, request
from narrowgauge.optim._fused_calls import Call, Calls
from narrowgauge.optim._gradient_factor import GradientFactor
from narrowgauge.optim._options import (
    LIMIT,
    check_hyperparameters,
    check_limits,
    check_options,
    check_switches,
    show_options,
    with_defaults,
)
from narrowgauge.optim._plan import ParameterPlan, kind_of, plan_parameter
from narrowgauge.optim._shares import Shares
from narrowgauge.optim._stats import Gauges, StepStats
from narrowgauge.optim._step_one import step_parameter
from narrowgauge.optim._takes_factor import TakesFactor
from narrowgauge.optim._unchanged import Settled
from narrowgauge.optim._watched import Watched
from narrowgauge.rules import Rule, clipped
from narrowgauge.storage import mark_states, marked_states

if TYPE_CHECKING:
    from narrowgauge.optim._step_in_backward import InBackward

_MARKS = "marks"


class NarrowOptimizer(TakesFactor, Watched, Shares):
    """Base of the named optimizers; not made by users.

    Attributes:
        rule: the update equation.
        gauges: while True, every step measures what it did; read `last_stats`. While "sampled", kernels on a GPU
            measure a sixteenth of each long tensor, in turns, and scale its sums up; all else is measured in full.
        last_stats: `UpdateStats` of the last step, or replay, by parameter name; empty if `gauges` was off.
        in_backward: the handle of `step_in_backward`, whose `remove()` ends it; None without.
    """

    gauges = Gauges()
    rule: ClassVar[Rule]
    refusals: ClassVar[Mapping[str, str]] = {}  # what torch says of a hyperparameter here and nowhere else
    _made = True  # so are copies, without __init__
    identity: ClassVar[tuple[str, ...]] = ()  # options without which the name would lie: no checkpoint changes them

    def __init__(self, params: ParamsT, hyperparameters: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._reset()
        defaults = {**hyperparameters, **with_defaults(type(self).__name__, options), VERSION_KEY: VERSION}
        self.check(defaults)
        defaults["rule"] = self.base_rule(defaults).name
        self._made = False
        super().__init__(params, defaults)
        self._made = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in cls.__dict__:
            show_options(cls.__init__)

    def _reset(self) -> None:
        self.gauges = False
        self.last_stats = StepStats()
        self._ratios, self._turn = {}, 0
        self._plans: dict[Tensor, ParameterPlan] = {}
        self._requests: list[Request] | None = []  # what each group asked for when it was planned
        self._settled: list[Settled] = []
        self._warned: set[str] = set()
        self.in_backward: InBackward | None = None
        self._dispatch = Dispatch()
        self._calls = Calls()

    def __getstate__(self) -> dict[str, Any]:
        self._follow()  # a copy has no plans: its words must be what its groups say
        marks = [[marked_states(p) for p in group["params"]] for group in self.param_groups]
        return {**super().__getstate__(), _MARKS: marks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch copies and pickles state and groups only; the rest is made anew. It comes here from
        # load_state_dict too, where there is something to keep, but groups may ask for another plan.
        if "_plans" not in self.__dict__:
            self._reset()
        self._plans, self._requests = {}, None
        super().__setstate__({key: value for key, value in state.items() if key != _MARKS})
        # A copied parameter comes without the mark that its state was made for.
        for group, marks in zip(self.param_groups, state.get(_MARKS, ()), strict=False):
            for p, mark in zip(group["params"], marks, strict=True):
                if mark is not None:
                    mark_states(p, mark)

    def check(self, group: Mapping[str, Any]) -> None:
        """Refuse options that no parameter could be served with.

        Raises:
            ValueError: naming the argument, what it got, what it takes.
            RuntimeError: where torch has that type for it.
        """
        check_switches(group)
        rule = self.rule_for(group)
        check_hyperparameters(rule, group, self.refusals)
        check_options(type(self).__name__, rule, group)
        if self.in_backward is not None:
            self.in_backward.check_options(group)

    def rule_for(self, group: Mapping[str, Any]) -> Rule:
        """The update rule under a group's options, always the same object for the same ones."""
        rule = self.base_rule(group)
        if not group.get("clip_updates"):
            return rule
        with_clipping = clipped(rule)  # type: ignore[arg-type]  # rules are values, and have hashes
        if with_clipping is None:
            raise ValueError(
                f"clip_updates: got True, {type(self).__name__} takes False only: its rule has no second moment"
            )
        return with_clipping

    def base_rule(self, group: Mapping[str, Any]) -> Rule:
        """The update rule without clipping."""
        return self.rule

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._requests is None:
            self._follow()
        # The number that the others have now, if there are any: some empty the list and begin anew.
        if self._made and isinstance(param_group, dict) and self.param_groups:
            param_group.setdefault(LIMIT, self.param_groups[0][LIMIT])
        super().add_param_group(param_group)
        try:
            self.check(self.param_groups[-1])
            check_limits(self.param_groups)
            self._plan_group(len(self.param_groups) - 1)
            if self.in_backward is not None:
                self.in_backward.check(self.param_groups[-1])
        except Exception:
            for p in self.param_groups.pop()["params"]:
                self._plans.pop(p, None)
            raise
        if self._requests is not None:
            self._requests.append(request(self, self.param_groups[-1]))
        if self.in_backward is not None:
            self.in_backward.watch(len(self.param_groups) - 1)

    def _plan_group(self, number: int) -> None:
        group = self.param_groups[number]
        names = group.get("param_names") or [f"{number}.{i}" for i in range(len(group["params"]))]
        taken = {plan.name for plan in self._plans.values()}
        for name, p in zip(names, group["params"], strict=True):
            # torch lets two groups use one name; reports by name must not mix them up.
            unique = name if name not in taken else f"{number}.{name}"
            self._plans[p] = plan_parameter(self.rule_for(group), group, p, unique, len(self._plans))

    def _plan(self, p: Tensor) -> ParameterPlan:
        plan = self._plans.get(p)
        if plan is None or plan.kind != kind_of(p):
            self._requests = None
            self._follow()
        return self._plans[p]

    def _follow(self) -> None:
        """Act on what has changed in the groups since they were planned."""
        settled = self._settled if self._requests is not None else []
        if len(settled) == len(self.param_groups) and all(map(Settled.holds, settled, self.param_groups)):
            return
        requests = [request(self, group) for group in self.param_groups]
        if requests != self._requests:
            follow(self, requests)
        self._settled = list(map(Settled, self.param_groups))

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
            return loss
        self._begin_step()
        self._dispatch.step(self)
        return loss

    def _begin_step(self) -> None:
        self.last_stats = StepStats()
        self._follow()

    def _refuse_gradient(self, group: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        refuse_gradient(type(self).__name__, self._plan(p).name, group, grad)

    def _step_parameter(
        self,
        group: dict[str, Any],
        p: Tensor,
        grad: Tensor,
        factor: GradientFactor | None = None,
        place: int = 0,
        summed: Mapping[str, Tensor] | None = None,
    ) -> None:
        step_parameter(self, group, p, grad, factor, place, summed)

    def _kernel(
        self,
        plan: ParameterPlan,
        p: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor],
        group: Mapping[str, Any],
        factor: float | None,
    ) -> Call | None:
        """What steps this parameter in one pass; None where the eager step has to."""
        return self._calls.of(plan, p, grad, state, group, factor)

    @property
    def skipped(self) -> dict[str, int]:
        """Steps refused because of a gradient that was not finite, by parameter; those with none left out."""
        return skipped_steps(self._all_plans(), self.state, self._warned)

    def _all_plans(self) -> list[tuple[Tensor, ParameterPlan]]:
        self._follow()
        return [(p, self._plan(p)) for group in self.param_groups for p in group["params"]]

    def state_bytes(self) -> int:
        """Bytes of all tensors that the optimizer keeps now; a state exists from a parameter's first step on."""
        return sum(value.nbytes for state in self.state.values() for value in state.values())

    def describe(self) -> Description:
        """A table: parameter, rule, storages, bytes added, path taken, skipped steps, and why.

        A gradient that is not contiguous, or on a CPU not of its parameter's dtype, takes the eager path whatever
        stands here; after a step on a GPU it stands here.
        """
        when = "" if self.in_backward is None else ", in backward"
        plans = self._all_plans()
        groups = {p: group for group in self.param_groups for p in group["params"]}
        paths = {p: self._dispatch.path(self, plan, p, groups[p]) for p, plan in plans}
        return describe(plans, self.skipped, paths, when)

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as torch's optimizer of the same name would save it: its `load_state_dict` goes on from there.

        Moments are float32; torch rounds them to the parameter's dtype when it loads them. It has neither low words
        nor update clipping: a UserWarning says what it cannot continue. Hooks are not called.

        Raises:
            ValueError: if torch has no optimizer of this name.
        """
        state_dict, notes = export_to_torch(self, self._all_plans())
        if notes:
            warnings.warn(f"torch_state_dict: {notes}", stacklevel=2)
        return state_dict

    def state_dict(self) -> dict[str, Any]:
        """The state, as torch's optimizers give it; steps that were skipped are warned of once, as by `skipped`.

        States of sharded parameters are DTensors, each rank's part in its place; see docs/distributed.md.
        """
        _ = self.skipped
        with self._shown_shared():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that `state_dict` gave, or that torch's or bitsandbytes' optimizer of this kind saved.

        Hyperparameters come from the checkpoint, storages stay as this optimizer was made: what was written in the
        same ones is taken bit for bit, everything else is converted, low words to what they mean beside the present
        parameter (load the model first). A UserWarning says what had no place. Tensors move to the parameters'
        devices.

        Raises:
            ValueError: for a state of another rule or other shapes, an unknown version, or no state at all; nothing
                is changed then.
        """
        names = iter([plan.name for _, plan in self._all_plans()])
        notes = load_checkpoint(self, names, super().load_state_dict, state_dict)
        if notes:
            warnings.warn(f"state_dict: {notes}", stacklevel=2)
