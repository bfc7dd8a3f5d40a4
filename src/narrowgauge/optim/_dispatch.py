"""What `step` does with its parameters: those on a GPU are stepped together by kernels, the rest one by one.

Where everything is as it was at the last step, which is nearly always, that is found out by a few loops over all
parameters. Otherwise each is asked: whether its gradient is refused, whether it has a kernel, whether it is new.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from narrowgauge.kernels import _triton
from narrowgauge.optim._admission import refuse_nonfinite
from narrowgauge.optim._fused_cpu import kernel_of
from narrowgauge.optim._fused_cpu_kernel import Kernel
from narrowgauge.optim._fused_entry import Entry, no_equation, no_kernel
from narrowgauge.optim._gradient_factor import GradientFactor
from narrowgauge.optim._judged import Judged
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.optim._shards import is_shared, local, local_gradient
from narrowgauge.optim._unchanged import identical

if TYPE_CHECKING:
    from narrowgauge.optim._fused_gpu import FusedSteps
    from narrowgauge.optim._optimizer import NarrowOptimizer

Group = dict[str, Any]
Turn = tuple[Group, Tensor, Tensor]  # a parameter's: its group, itself, its gradient
_Key = tuple[bool | str, str]  # of a step's kernels: how it is measured, and what its gradients are multiplied by

_GRAD = attrgetter("grad")
_PLAIN = (Tensor, torch.nn.Parameter)


def unavailable(device: torch.device) -> str | None:
    """Why Triton's kernels do not step what is on a device, or None if they do."""
    return _triton.unavailable(device)


class Dispatch:
    """One optimizer's steps.

    Attributes:
        eager: why no kernel on a GPU is used; empty for where there are some.
    """

    def __init__(self) -> None:
        self.eager = ""
        # With gauges and without, with a factor and without there are different kernels, and tables for them. What
        # is known of a list goes with them: which parameters they left.
        self._known: dict[_Key, _Known] = {}
        self._together: dict[_Key, FusedSteps] = {}
        self._alone: dict[bool | str, dict[Tensor, FusedSteps]] = defaultdict(dict)
        self._left: dict[Tensor, tuple[ParameterPlan, str]] = {}

    def step(self, optimizer: NarrowOptimizer) -> None:
        """Step every parameter that has a gradient, each exactly once.

        Raises:
            FloatingPointError, RuntimeError: as `NarrowOptimizer.step` says; nothing has moved then.
        """
        groups = optimizer.param_groups
        ps = list(chain.from_iterable([group["params"] for group in groups]))
        grads = list(map(_GRAD, ps))
        if optimizer._shares:
            grads = list(map(local_gradient, ps, grads))
        factor = GradientFactor.of(optimizer)
        if not self._step_again(optimizer, ps, grads, factor):
            owners = chain.from_iterable([[group] * len(group["params"]) for group in groups])
            triples = enumerate(zip(owners, ps, grads, strict=True))
            self._look(optimizer, ps, {place: turn for place, turn in triples if turn[2] is not None}, factor)
        if factor is not None and factor.norm is not None:
            optimizer._keep_norm(factor.norm)
        if optimizer._shares:
            # What lies here has moved; autograd looks at the DTensor, too.
            increment_version([p for p, grad in zip(ps, grads, strict=True) if is_shared(p) and grad is not None])

    def _step_again(
        self, optimizer: NarrowOptimizer, ps: list[Tensor], grads: list[Tensor], factor: GradientFactor | None
    ) -> bool:
        """Take a step if it is like the last one; False, with nothing done, if not."""
        key = optimizer.gauges, _kind(factor)
        known, run = self._known.get(key), self._together.get(key)
        if known is None or run is None or not self._by_kernels() or not known.holds(optimizer, ps, grads):
            return False
        alone = [(group, ps[place], grads[place]) for place, group in known.alone]
        _refuse(optimizer, alone, factor)
        mine, given = known.mine, known.pick(grads)
        if known.raising and not (factor is not None and (factor.held_by_others or factor.shards is not None)):
            if _captured(given) or any(grad.layout is not torch.strided for grad in given):
                return False  # refused in words of its own
            checked = [given[number] for number in known.raising]
            refuse_nonfinite(
                checked,
                lambda number: optimizer._plan(mine[known.raising[number]]).name,
                factor.inverse_on if factor is not None else None,
            )
        judge = None
        if factor is not None:
            apart = {place: turn for (place, _), turn in zip(known.alone, alone, strict=True)}
            judge = Judged(optimizer, factor, lambda: apart, known.together, ps)
        here = list(map(local, mine)) if optimizer._shares else mine
        if not run.again(here, given, known.states(optimizer), judge):
            return False
        _report(optimizer, run)
        for (place, _), turn in zip(known.alone, alone, strict=True):
            optimizer._step_parameter(*turn, factor, place, judge.summed.get(place) if judge is not None else None)
        return True

    def _look(
        self,
        optimizer: NarrowOptimizer,
        ps: list[Tensor],
        turns: Mapping[int, Turn],
        factor: GradientFactor | None,
    ) -> None:
        """Take a step of which nothing is known; `turns` by place."""
        _refuse(optimizer, turns.values(), factor)
        together = [place for place, (_, p, grad) in turns.items() if self._takes(p, grad)]
        alone = set(turns) - set(together)
        run: FusedSteps | None = None

        def apart() -> dict[int, Turn]:
            # What kernels leave is known only once they have been asked.
            left = {together[number] for number in run.left} if run is not None else set()
            return {place: turns[place] for place in sorted(alone | left)}

        judge = Judged(optimizer, factor, apart, together, ps) if factor is not None else None
        if together:
            from narrowgauge.optim._fused_gpu import FusedSteps

            key = optimizer.gauges, _kind(factor)
            self._known.pop(key, None)
            run = self._together.setdefault(key, FusedSteps(*key))
            run([_entry(optimizer, turns[place]) for place in together], judge)
            _report(optimizer, run)
            left = {together[number]: why for number, why in run.left.items()}
            self._left = {turns[place][1]: (optimizer._plans[turns[place][1]], why) for place, why in left.items()}
            alone |= set(left)
            grads = [turns[at][2] if at in turns else None for at in range(len(ps))]
            self._known[key] = _Known(optimizer, ps, grads, [(at, turns[at][0]) for at in sorted(alone)], together)
        elif judge is not None:
            judge([], lambda _: [])
        self._step_alone(optimizer, {place: turns[place] for place in sorted(alone)}, factor, judge)

    def _step_alone(
        self,
        optimizer: NarrowOptimizer,
        turns: Mapping[int, Turn],
        factor: GradientFactor | None,
        judge: Judged | None,
    ) -> None:
        """Step parameters one by one; `turns` by place."""
        for place, turn in turns.items():
            summed = judge.summed.get(place) if judge is not None else None
            optimizer._step_parameter(*turn, factor, place, summed)

    def step_one(self, optimizer: NarrowOptimizer, turn: Turn) -> None:
        """Step one parameter."""
        _, p, grad = turn
        if self._takes(p, grad):
            from narrowgauge.optim._fused_gpu import FusedSteps

            run = self._alone[optimizer.gauges].setdefault(p, FusedSteps(optimizer.gauges))
            if not run([_entry(optimizer, turn)]):
                _report(optimizer, run)
                self._left.pop(p, None)
                return
            self._left[p] = optimizer._plans[p], run.left[0]
        optimizer._step_parameter(*turn)

    def path(self, optimizer: NarrowOptimizer, plan: ParameterPlan, p: Tensor, group: Group) -> tuple[str, str]:
        """What steps a parameter, and why nothing faster does; empty where nobody would ask."""
        if plan.strict:
            return "eager torch", ""
        why = self.eager or unavailable(p.device)
        if why is None:
            seen, why = self._left.get(p, (None, None))
            why = why if seen is plan else no_kernel(plan, local(p), group) or no_equation(plan, group)
            return ("fused Triton", "") if why is None else ("eager torch", f"not fused: {why}")
        if p.device.type != "cpu":
            return "eager torch", f"not fused: {why}"
        kernel = kernel_of(plan, local(p), group)
        return ("fused C", "") if isinstance(kernel, Kernel) else ("eager torch", kernel)

    def _by_kernels(self) -> bool:
        """Whether kernels on a GPU may be used now."""
        return not (self.eager or torch.compiler.is_compiling())

    def _takes(self, p: Tensor, grad: Tensor) -> bool:
        """Whether a parameter is given to kernels on a GPU, which may leave it still."""
        plain = type(local(p)) in _PLAIN and type(grad) in _PLAIN
        return plain and unavailable(p.device) is None and self._by_kernels()


class _Known:
    """A list of parameters that has been stepped.

    Args:
        optimizer: whose they are.
        ps: all of them, those without a gradient too.
        grads: theirs, of shared ones what lies here.
        alone: places and groups of those that no kernel on a GPU steps.
        together: places of those that were given to kernels, what these left among them.
    """

    def __init__(
        self,
        optimizer: NarrowOptimizer,
        ps: list[Tensor],
        grads: Sequence[Tensor | None],
        alone: list[tuple[int, Group]],
        together: list[int],
    ) -> None:
        self.alone, self.together = alone, together
        self.pick = _picker(together)
        self.mine = self.pick(ps)
        self._ps, self._kinds = ps, list(map(type, grads))
        self._groups = list(optimizer.param_groups)
        self._sizes = [len(group["params"]) for group in self._groups]
        # Another dict where one parameter is planned otherwise.
        self._plans = optimizer._plans
        # Those of `mine` whose bad gradients raise. An option: where it changes, plans do.
        raises = [group["nonfinite"] == "raise" for group in self._groups for _ in group["params"]]
        self.raising = [number for number, place in enumerate(together) if raises[place]]
        # Tensors have slow hashes: their states are found by their places.
        self._keys = list(optimizer.state)
        places = {id(key): place for place, key in enumerate(self._keys)}
        self._pick_states = _picker([places[id(p)] for p in self.mine])

    def states(self, optimizer: NarrowOptimizer) -> Sequence[dict[str, Tensor]]:
        """The states of the parameters that are stepped together."""
        state = optimizer.state
        if identical(list(state), self._keys):
            return self._pick_states(list(state.values()))
        return [state[p] for p in self.mine]

    def holds(self, optimizer: NarrowOptimizer, ps: list[Tensor], grads: list[Tensor]) -> bool:
        """Whether parameters, groups and plans are the same, and the same ones have gradients."""
        groups = optimizer.param_groups
        return (
            optimizer._plans is self._plans
            and identical(ps, self._ps)
            and list(map(type, grads)) == self._kinds
            and identical(groups, self._groups)
            and [len(group["params"]) for group in groups] == self._sizes
        )


def _report(optimizer: NarrowOptimizer, run: FusedSteps) -> None:
    for names, rows in run.stats:
        optimizer.last_stats.add_table(names, rows)


def _captured(grads: Sequence[Tensor]) -> bool:
    return any(grad.is_cuda for grad in grads) and torch.cuda.is_current_stream_capturing()


def _picker(places: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What gives some items of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple(items[place] for place in places)


def _kind(factor: GradientFactor | None) -> Literal["", "given", "norm"]:
    return "" if factor is None else "norm" if factor.squares else "given"


def _refuse(optimizer: NarrowOptimizer, turns: Collection[Turn], factor: GradientFactor | None) -> None:
    for turn in turns:
        optimizer._refuse_gradient(*turn)
    if factor is not None and (factor.held_by_others or factor.shards is not None):
        return  # what ranks share is refused once they have agreed
    raising = [(p, grad) for group, p, grad in turns if group["nonfinite"] == "raise"]
    refuse_nonfinite(
        [grad for _, grad in raising],
        lambda place: optimizer._plan(raising[place][0]).name,
        factor.inverse_on if factor is not None else None,
    )


def _entry(optimizer: NarrowOptimizer, turn: Turn) -> Entry:
    group, p, grad = turn
    plan, state = optimizer._plans[p], optimizer.state[p]
    here = local(p)
    if not state:
        state.update(plan.init(here, group))
    return Entry(plan, here, grad, state, group)
