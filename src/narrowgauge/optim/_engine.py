"""The engine: it plans parameters, gives lists of them to backends, and takes steps.

A step goes through four stages:

1. **Collect.** The parameters with a gradient, as `ParamStep`s. If nothing has changed since the last step,
   which is the usual case, a few loops find that out and the last step's lists are used again.
2. **Assign.** Otherwise each parameter is given to the first backend that supports it: Triton's kernels on a GPU, a
   compiled C function on a CPU, eager torch for all else.
3. **Inspect and agree.** Where the step depends on all gradients (a norm, a loss scaler, ranks that share
   parameters) every list is inspected, and the verdict is decided before anything moves.
4. **Run.** Every list takes its steps.

The engine knows groups, states and plans, and no optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from narrowgauge._text import warn
from narrowgauge._torch_private import local
from narrowgauge.kernels._triton import begin, name, unavailable
from narrowgauge.optim import _c_backend
from narrowgauge.optim._c_backend import CSteps
from narrowgauge.optim._changes import identical
from narrowgauge.optim._copied import CopiedSteps, is_scattered
from narrowgauge.optim._eager import EagerSteps, next_number, noise_of, update
from narrowgauge.optim._factored_steps import FactoredSteps, written_out
from narrowgauge.optim._plan import PLAIN, ParamPlan, ParamStep, State, fits, kind_of
from narrowgauge.optim._sharding import Collective, Rows, is_shared, local_gradient
from narrowgauge.optim._tracing import elementwise, untraceable
from narrowgauge.optim._verdict import (
    GradientReport,
    Measured,
    StepList,
    StepRequest,
    Verdict,
    agree,
    flag_vectors,
    refuse_flagged,
    refuse_nonfinite,
)
from narrowgauge.storage import Float8Weight, marked_states
from narrowgauge.storage._states import times_marked

Group = dict[str, Any]

_GRAD = attrgetter("grad")
_RELEASED = torch.empty(0)
_IN_VAIN = 10  # steps in a row without any gradient, before a warning


class StalePlanError(Exception):
    """A parameter is no longer what it was planned as: of another dtype, marked otherwise, or new."""


class Engine:
    """The steps of one optimizer.

    Attributes:
        plans: by parameter.
        backends: those to try, in this order; eager torch steps what none of them supports.
    """

    backends: tuple[str, ...] = ("triton", "c")

    def __init__(self) -> None:
        self.plans: dict[Tensor, ParamPlan] = {}
        # Measuring takes other kernels, and so does a factor: each combination has its own lists.
        self._rosters: dict[tuple[bool, str], _Roster] = {}
        self._single: dict[tuple[bool, Tensor], _Roster] = {}
        self._left: dict[Tensor, tuple[ParamPlan, str]] = {}
        self._shared: tuple[Any, int, Collective | None] = (None, 0, None)
        self._in_vain = 0  # steps in a row without any gradient

    def take_plans(self, plans: dict[Tensor, ParamPlan]) -> None:
        """Step by other plans. Lists that were made by the old ones, and keep old states alive, go."""
        self.plans, self._left = plans, {}
        self._rosters.clear()
        self._single.clear()

    def step(
        self, groups: Sequence[Group], state: Mapping[Tensor, State], request: StepRequest
    ) -> tuple[Tensor | None, dict[torch.device, Tensor], Measured]:
        """Step every parameter that has a gradient, each exactly once.

        Returns:
            (norm, flags, measured): the norm of all gradients, unscaled, 0-d, float32, if a limit was asked for; by
            device, which gradients are not finite, if `all_or_nothing` was; what was measured, if that was.

        Raises:
            FloatingPointError: if `nonfinite` is ``"raise"`` and a gradient is not finite.
            RuntimeError: for a sparse gradient.
            TypeError: for a parameter whose class does not know all operations of a step.
            StalePlanError: for a parameter that must be planned again.
            ValueError: for a parameter of another shape than its state's. In all cases no parameter has moved.
        """
        params = list(chain.from_iterable([group["params"] for group in groups]))
        grads = list(map(_GRAD, params))
        shared = self._collective(params)
        collective = shared if shared is not None and self._must_agree(shared, groups, request) else None
        if shared is not None:
            grads = list(map(local_gradient, params, grads))
        if request.arrival is not None and (_scales(request) or any(g["nonfinite"] == "raise" for g in groups)):
            for p in params:
                request.arrival.wait(p)
        decides = _scales(request) or collective is not None
        mode = request.measured, "" if not decides else "given" if request.max_norm is None else "norm"
        roster = self._rosters.get(mode)
        if roster is None or not roster.refresh(self.plans, groups, params, grads, state):
            self._rosters.pop(mode, None)
            roster = self._rosters[mode] = self._assign(groups, params, grads, state, mode)
        if self._in_vain < _IN_VAIN:
            waits = any(state.values()) or any(p.requires_grad for p in params)
            self._in_vain = self._in_vain + 1 if waits and not roster.steps else 0
            if self._in_vain == _IN_VAIN:
                warn(
                    f"step: in {_IN_VAIN} steps none of {len(params)} parameters had a gradient: nothing was "
                    "updated. If fully_shard or peft's load_adapter has given the model other parameters, make the "
                    "optimizer after that; otherwise leave out steps without gradients"
                )
        verdict, summed, flags = None, False, dict[torch.device, Tensor]()
        measured: Measured = []
        try:
            refuse_waiting(roster.waiting)
            if decides:
                verdict = Verdict(request)
                reports, summed = self._decide(verdict, roster, collective)
                if request.all_or_nothing:  # before the kernels clear the flags
                    flags = flag_vectors(reports, len(params))
            elif roster.raising:
                refuse_nonfinite(roster.raising)
            if request.arrival is not None:
                measured = roster.run_as_they_arrive(request.arrival, verdict, summed)
            else:
                for some in roster.lists:
                    measured += some.run(verdict, summed)
        finally:
            roster.release()
        if shared is not None:
            # The parts on this rank have moved; autograd looks at the DTensors, too.
            moved = [p for p, grad in zip(params, grads, strict=True) if is_shared(p) and grad is not None]
            increment_version(moved)
        return verdict.norm if verdict is not None else None, flags, measured

    def step_one(
        self, group: Group, p: Tensor, grad: Tensor, state: Mapping[Tensor, State], measured: bool
    ) -> Measured:
        """Step one parameter, whose gradient is the part on this rank."""
        roster = self._single.get((measured, p))
        if roster is None or not roster.refresh(self.plans, [group], [p], [grad], state):
            self._single.pop((measured, p), None)
            roster = self._single[measured, p] = self._assign([group], [p], [grad], state, (measured, ""))
        try:
            refuse_waiting(roster.waiting)
            return [found for some in roster.lists for found in some.run(None)]
        finally:
            roster.release()

    def path(self, p: Tensor, group: Mapping[str, Any]) -> tuple[str, str]:
        """What steps a parameter, and why nothing faster does; "" if nothing is faster."""
        plan = self.plans[p]
        if plan.strict:
            return "eager torch", ""
        plan = written_out(plan, group) or plan  # made anew: `_left` may have an equal one
        param, (seen, left) = local(p), self._left.get(p, (None, ""))
        none = unavailable(param.device) if "triton" in self.backends else "not asked for"
        if none is None:
            from narrowgauge.optim._triton_backend import unsupported

            reason = left if seen == plan else unsupported(plan, param) or untraceable(plan, group)
            return (f"fused {name()}", "") if reason is None else ("eager torch", f"not fused: {reason}")
        if param.device.type != "cpu":
            return "eager torch", f"not fused: {none}"
        if "c" not in self.backends:
            return "eager torch", "not fused: not asked for"
        reason = left if seen == plan else _c_backend.unsupported(plan, param, group)
        return ("fused C", "") if reason is None else ("eager torch", f"not fused: {reason}")

    def sums_over_parameters(self) -> bool:
        """Whether a rule asks for sums over parameters."""
        return any(plan.has_terms for plan in self.plans.values())

    def _assign(
        self,
        groups: Sequence[Group],
        params: list[Tensor],
        grads: list[Tensor | None],
        state: Mapping[Tensor, State],
        mode: tuple[bool, str],
    ) -> _Roster:
        """Give every parameter that has a gradient to a backend."""
        owners = list(chain.from_iterable([[group] * len(group["params"]) for group in groups]))
        there = [index for index, grad in enumerate(grads) if grad is not None]
        if "triton" in self.backends and any(params[index].is_cuda for index in there):
            begin()
        for index in there:
            plan = self.plans.get(params[index])
            p = params[index]
            if plan is None or plan.kind != kind_of(p) or (plan.shape != p.shape and not state.get(p)):
                raise StalePlanError
            if plan.shape != p.shape:
                raise ValueError(
                    f"params: {plan.name} must keep the shape of its state, {tuple(plan.shape)}, got "
                    f"{tuple(p.shape)}; delete optimizer.state[parameter] to start anew"
                )
            refuse_sparse(plan.name, grads[index])
        steps = []
        for index in there:
            p, group = params[index], owners[index]
            plan, own, param = self.plans[p], state[p], local(p)
            step = ParamStep(index, plan, group, param, grads[index], own)  # type: ignore[arg-type]
            foreign = type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__
            if foreign and not isinstance(param, Float8Weight):
                _try_on_copy(step)
            if not own:
                own.update(plan.init(param, group))
            elif not fits(step):
                raise ValueError(
                    f"params: {plan.name} must have a state for its shape, {tuple(p.shape)}, got another; "
                    "delete optimizer.state[parameter] to start anew"
                )
            steps.append(step)
        return _Roster(self.plans, groups, params, grads, state, steps, self._lists(params, steps, mode))

    def _lists(self, params: list[Tensor], steps: list[ParamStep], mode: tuple[bool, str]) -> list[StepList]:
        """The lists of all backends."""
        (measured, factor), lists = mode, list[StepList]()

        def eager(some: list[ParamStep]) -> StepList:
            return EagerSteps(some, measured, elementwise)

        for some in _by_device([step for step in steps if self._writes_out(step)]):
            lists.append(FactoredSteps(some, lambda wide: self._lists(params, wide, mode), eager))
        apart = {id(step) for some in lists for step in some.steps}
        steps = [step for step in steps if id(step) not in apart]
        copied = [step for step in steps if self._copies(step)]
        for some in _by_device(copied):
            lists.append(CopiedSteps(some, lambda copies: self._lists(params, copies, mode), eager))
        for step in copied:
            self._left.pop(params[step.index], None)
        taken = set(map(id, copied))
        steps = [step for step in steps if id(step) not in taken]
        if "triton" in self.backends and (mine := [step for step in steps if _for_triton(step)]):
            from narrowgauge.optim._triton_backend import TritonSteps

            triton = TritonSteps(mine, factor, measured)  # type: ignore[arg-type]
            triton.upload()
            lists.append(triton)
            steps = self._rest(params, steps, mine, triton.left)
        if "c" in self.backends and (mine := [s for s in steps if s.param.is_cpu and not s.plan.strict]):
            compiled = CSteps(mine, factor != "", measured)
            if compiled.steps:
                lists.append(compiled)
            steps = self._rest(params, steps, mine, compiled.left)
        return [*lists, *map(eager, _by_device(steps))]

    def _rest(
        self, params: list[Tensor], steps: list[ParamStep], mine: list[ParamStep], left: Mapping[int, str]
    ) -> list[ParamStep]:
        """The steps without those that a list has taken of its own; `left` says why it left others, by position."""
        taken = set()
        for position, step in enumerate(mine):
            self._left.pop(params[step.index], None)
            if position in left:
                self._left[params[step.index]] = step.plan, left[position]
            else:
                taken.add(id(step))
        return [step for step in steps if id(step) not in taken]

    def _copies(self, step: ParamStep) -> bool:
        """Whether a kernel steps contiguous copies of a parameter's tensors."""
        return not step.plan.strict and is_scattered(step) and self._has_kernel(step.plan, step)

    def _writes_out(self, step: ParamStep) -> bool:
        """Whether a kernel steps a parameter whose factored moments are written out."""
        plan = written_out(step.plan, step.group)
        return plan is not None and self._has_kernel(plan, step)

    def _has_kernel(self, plan: ParamPlan, step: ParamStep) -> bool:
        if step.param.is_cpu:
            return "c" in self.backends and _c_backend.unsupported(plan, step.param, step.group) is None
        if "triton" not in self.backends or unavailable(step.param.device) is not None:
            return False
        from narrowgauge.optim._triton_backend import unsupported

        return (unsupported(plan, step.param) or untraceable(plan, step.group)) is None

    def _decide(
        self, verdict: Verdict, roster: _Roster, collective: Collective | None
    ) -> tuple[list[GradientReport], bool]:
        """Inspect all gradients and decide: (the reports, whether ranks have added up the rules' sums)."""
        request = verdict.request
        reports = [found for some in roster.lists for found in some.inspect(verdict)]
        with_terms = collective is not None and self.sums_over_parameters()
        early = with_terms and request.max_norm is None  # with no norm to wait for, one collective sends all

        def terms() -> list[Rows]:
            return [rows for some in roster.lists for rows in some.terms(verdict)]

        if collective is not None:
            agree(collective, reports, terms() if early else [], early)
        verdict.decide(reports)
        scaler_skips = request.all_or_nothing or request.found_inf is not None
        if roster.raising and not scaler_skips:
            refuse_flagged(reports, {step.index: step.plan.name for step in roster.raising})
        if collective is not None and with_terms and not early:
            collective.all_reduce(terms(), True)
        return reports, with_terms

    def _collective(self, params: Sequence[Tensor]) -> Collective | None:
        """What adds up over the ranks that share parameters; None if no parameter is a DTensor."""
        plans, count, collective = self._shared
        # A changed plan comes in another dict; a new parameter makes the dict longer.
        if plans is not self.plans or count != len(self.plans):
            collective = Collective(params) if any(map(is_shared, params)) else None
            self._shared = self.plans, len(self.plans), collective
        return collective

    def _must_agree(self, collective: Collective, groups: Sequence[Group], request: StepRequest) -> bool:
        """Whether ranks must agree before this step: decided by options, which all ranks know, not by gradients."""
        asked = _scales(request) or any(group["nonfinite"] != "propagate" for group in groups)
        return bool(collective.indices) and (asked or self.sums_over_parameters())


class _Roster:
    """The parameters with gradients of one step, in `steps`, and the lists of backends that step them."""

    def __init__(
        self,
        plans: Mapping[Tensor, ParamPlan],
        groups: Sequence[Group],
        params: list[Tensor],
        grads: Sequence[Tensor | None],
        state: Mapping[Tensor, State],
        steps: list[ParamStep],
        lists: list[StepList],
    ) -> None:
        self.steps, self.lists = steps, lists
        self._plans, self._params, self._groups = plans, params, list(groups)
        self._sizes = [len(group["params"]) for group in groups]
        self._types = list(map(type, grads))
        self._pick = _picker([step.index for step in steps], len(params))
        self._marked = times_marked()
        sharded = any(is_shared(params[step.index]) for step in steps)
        self._locals = [step.param for step in steps] if sharded else None
        self.raising = [step for step in steps if step.group["nonfinite"] == "raise"]
        waits = [step for step in steps if step.group["nonfinite"] == "raise" or step.plan.strict]
        self.waiting = [step for step in waits if step.param.is_cuda]
        # Tensors have slow hashes: their states are found by position.
        self._keys = list(state) if len(steps) > 1 else []
        positions = {id(key): position for position, key in enumerate(self._keys)}
        found = [positions[id(params[step.index])] for step in steps] if positions else []
        self._pick_states = _picker(found, len(positions))
        self._states, self._kept = tuple(step.state for step in steps), list(state.values())
        numbers = {id(step): number for number, step in enumerate(steps)}
        self._watches = [_picker([numbers[id(step)] for step in some.watched], len(steps)) for some in lists]
        read = {id(step) for some in lists if some.reads_steps for step in some.steps} | set(map(id, self.raising))
        self._read = [(step, number) for number, step in enumerate(steps) if id(step) in read]
        self._holding = steps  # gradients

    def refresh(
        self,
        plans: Mapping[Tensor, ParamPlan],
        groups: Sequence[Group],
        params: list[Tensor],
        grads: list[Any],
        state: Mapping[Tensor, State],
    ) -> bool:
        """Whether the lists still hold. Puts this step's gradients and states into the steps."""
        same = (
            plans is self._plans
            and identical(params, self._params)
            and list(map(type, grads)) == self._types
            and identical(groups, self._groups)
            and [len(group["params"]) for group in groups] == self._sizes
            and self._marks_hold()
        )
        if not same:
            return False
        if self._locals is not None and not identical([local(params[s.index]) for s in self.steps], self._locals):
            return False
        kept = list(state.values())
        if not identical(kept, self._kept):
            if len(self.steps) > 1 and identical(list(state), self._keys):
                self._states = self._pick_states(kept)
            else:
                self._states = tuple(state[params[step.index]] for step in self.steps)
            for step, own in zip(self.steps, self._states, strict=True):
                step.state = own
            self._kept = kept
        states = self._states
        if not all(states):
            return False  # a state that was taken away is made again
        found = self._pick(grads)
        for step, number in self._read:
            step.grad = found[number]
        fresh = True
        for some, of in zip(self.lists, self._watches, strict=True):
            fresh = fresh and some.refresh(of(found), of(states))
        return fresh

    def _marks_hold(self) -> bool:
        """Whether the parameters are marked with the storages that they were planned with."""
        if times_marked() != self._marked:
            if any(marked_states(self._params[step.index]) != step.plan.kind[1] for step in self.steps):
                return False
            self._marked = times_marked()
        return True

    def release(self) -> None:
        """Keep no gradient alive until the next step."""
        for step in self._holding:
            step.grad = _RELEASED
        self._holding = [step for step, _ in self._read]

    def run_as_they_arrive(self, arrival: Any, verdict: Verdict | None, summed: bool) -> Measured:
        """Step parameters one by one, in the order in which their gradients arrive."""
        owners = {step.index: some for some in self.lists for step in some.steps}
        measured: Measured = []
        for number in arrival.order([self._params[step.index] for step in self.steps]):
            index = self.steps[number].index
            arrival.wait(self._params[index])
            measured += owners[index].run(verdict, summed, [index])
            arrival.done(self._params[index])
        return measured


def _scales(request: StepRequest) -> bool:
    """Whether gradients are multiplied, or parameters may be held."""
    numbers = request.inverse_scale, request.found_inf, request.max_norm
    return request.all_or_nothing or any(number is not None for number in numbers)


def _by_device(steps: Sequence[ParamStep]) -> list[list[ParamStep]]:
    """The steps of each device."""
    devices: dict[torch.device, list[ParamStep]] = {}
    for step in steps:
        devices.setdefault(step.param.device, []).append(step)
    return list(devices.values())


def _for_triton(step: ParamStep) -> bool:
    known = type(step.param) in PLAIN or step.plan.weight.float8
    return known and type(step.grad) in PLAIN and not step.plan.strict and unavailable(step.param.device) is None


def refuse_sparse(name: str, grad: Any) -> None:
    """Raise for a sparse gradient."""
    if grad.layout is not torch.strided:
        raise RuntimeError(f"a step does not support sparse gradients; the gradient of {name} must be dense")


def _try_on_copy(step: ParamStep) -> None:
    """Step a copy of a parameter of a tensor subclass. TypeError if its class lacks an operation."""
    plan = step.plan
    try:
        copy = step.param.detach().clone()
        trial = replace(step, param=copy, state=dict(step.state) or plan.init(copy, step.group))
        number = next_number(trial)
        new, _, _ = update(trial, number, noise_of(trial, number))
        copy.copy_(new)
    except Exception as error:  # whatever a class raises that does not know an operation
        raise TypeError(
            f"step: the class of {plan.name}, {type(step.param).__name__}, must know all operations of a step or "
            f"leave them to torch, got an error ({error}); no parameter was changed"
        ) from error


def refuse_waiting(steps: Sequence[ParamStep]) -> None:
    """Refuse to capture steps that wait for the device."""
    if steps and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "step: nonfinite must be 'skip' or 'propagate' and arithmetic 'fp32' in a captured graph, which cannot "
            f"wait for the device, got {steps[0].group['nonfinite']!r} and {steps[0].group['arithmetic']!r}"
        )


def _picker(positions: list[int], of: int) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What gives some items of a sequence of so many, by a loop that runs in C."""
    if positions == list(range(of)):
        return tuple
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda items: tuple(items[position] for position in positions)
