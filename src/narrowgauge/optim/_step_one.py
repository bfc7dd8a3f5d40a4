"""One parameter's step, by the compiled function for a CPU or by the eager specification; written, or refused.

Of a parameter that ranks share, what lies here is stepped; sums over all of it are made before, by `own_sums`, and
come back with what the other ranks have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.optim._admission import admit, all_finite
from narrowgauge.optim._clip_gradients import HISTORY, clip_to_percentile
from narrowgauge.optim._gradient_factor import GradientFactor
from narrowgauge.optim._pieces import Piece, pieces_of
from narrowgauge.optim._plan import ParameterPlan
from narrowgauge.optim._sampled_ratios import ratio_sums
from narrowgauge.optim._shards import local, origin_of
from narrowgauge.optim._stats import UpdateStats
from narrowgauge.optim._update import Noise, squared_ratios, term_sums, update

if TYPE_CHECKING:
    from narrowgauge.optim._optimizer import NarrowOptimizer


def step_parameter(
    optimizer: NarrowOptimizer,
    group: dict[str, Any],
    p: Tensor,
    grad: Tensor,
    factor: GradientFactor | None = None,
    place: int = 0,
    summed: Mapping[str, Tensor] | None = None,
) -> None:
    """Take one parameter's step.

    Args:
        optimizer: whose it is.
        group, p, grad: the parameter's; `grad` as it lies in memory, of a shared one what lies here.
        factor: what gradients are multiplied by in this step; it has been judged.
        place: of the parameter among all, under which the factor knows it.
        summed: the sums of the rule's terms (see `own_sums`) over all ranks; None where this one has all.
    """
    owner, plan, state = p, optimizer._plans[p], optimizer.state[p]
    p = local(p)
    if not state:
        state.update(plan.init(p, group))
    number = factor.number() if factor is not None and p.is_cpu else None
    kernel = optimizer._kernel(plan, p, grad, state, group, number)
    if factor is not None:
        keep = factor.admit(place, group["nonfinite"], state, p.device)
    else:
        keep = admit(group["nonfinite"], state, grad, kernel.finite if kernel is not None else all_finite)
    measures_ratio = bool(optimizer._ratios) and owner in optimizer._ratios
    if keep is False:
        if optimizer.gauges:
            optimizer.last_stats.add(plan.name, UpdateStats.none(p.device))
        if measures_ratio:
            optimizer._ratios[owner] = torch.zeros(2, dtype=torch.float64, device=p.device)
        return
    whole = {name: float(value) for name, value in summed.items()} if kernel is not None and summed else None
    if kernel is not None and not optimizer.gauges and not measures_ratio:
        kernel.take(whole)
        state["step"] += 1
        return
    step = _next(plan, p, state)
    grad, norms = _taken(group, grad, state, factor, place)
    before = plan.exact(p, state) if optimizer.gauges else None
    ratio = squared_ratios(plan, p, grad, state, group, step) if optimizer.gauges else None
    if measures_ratio:
        sums = ratio_sums(plan, p, grad, state, group, step, optimizer._turn)
        optimizer._ratios[owner] = sums if keep is True or sums is None else torch.where(keep, sums, 0.0)
    if kernel is not None and not optimizer.gauges:
        kernel.take(whole)
        state["step"] += 1 if keep is True else keep
        return
    # What gauges ask of a step, they ask of a whole one.
    whole_one = optimizer.gauges or kernel is not None or summed is not None or keep is not True
    pieces = [Piece(p, grad, state, 0)] if whole_one else pieces_of(plan, p, grad, state, group)
    for piece in pieces:
        noise = Noise(group["seed"], plan.index, step, piece.p, origin_of(plan.shard) + piece.first)
        new_p, new_state, delta = update(plan, piece.p, piece.grad, piece.state, group, step, noise, summed)
        if kernel is not None:
            # What was intended is the specification's; the step is the one taken without gauges, to the bit.
            kernel.take(whole)
            break
        written = [(piece.p, new_p), *((piece.state[key], value) for key, value in new_state.items())]
        for target, value in written:
            target.copy_(value if keep is True else torch.where(keep, value, target))
    for key, value in norms.items() if kernel is None else ():
        state[key].copy_(value if keep is True else torch.where(keep, value, state[key]))
    state["step"] += 1 if keep is True else keep
    if before is not None:
        stats = UpdateStats.measure(delta, before, plan.exact(p, state), ratio)
        optimizer.last_stats.add(plan.name, stats.where(keep))


def own_sums(
    optimizer: NarrowOptimizer,
    group: dict[str, Any],
    p: Tensor,
    grad: Tensor,
    factor: GradientFactor,
    place: int,
) -> dict[str, Tensor]:
    """The sums that a parameter's rule asks for, by name: 0-d, float64; of what lies here.

    Args: as of `step_parameter`, before it; the factor has been judged, or is the one that it begins with.
    """
    plan, state = optimizer._plans[p], optimizer.state[p]
    p = local(p)
    if not state:
        state.update(plan.init(p, group))
    kernel = optimizer._kernel(plan, p, grad, state, group, factor.number() if p.is_cpu else None)
    if kernel is not None:
        return {name: torch.tensor(one, dtype=torch.float64) for name, one in kernel.sums().items()}
    taken, _ = _taken(group, grad, state, factor, place)
    return term_sums(plan, p, taken, state, group, _next(plan, p, state))


def _next(plan: ParameterPlan, p: Tensor, state: Mapping[str, Tensor]) -> int | Tensor:
    """The number of the step that comes."""
    # On a GPU the count stays there: reading it would make the host wait for the device at every parameter.
    on_device = p.device.type != "cpu" and not plan.strict
    return state["step"].to(torch.float64) + 1 if on_device else int(state["step"].item()) + 1


def _taken(
    group: Mapping[str, Any],
    grad: Tensor,
    state: Mapping[str, Tensor],
    factor: GradientFactor | None,
    place: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradient as the rule is given it, and new norms to remember."""
    if factor is not None:
        grad = factor.times(grad)
    if group["maximize"]:
        grad = -grad
    if HISTORY not in state:
        return grad, {}
    norm = factor.norm_of(place) if factor is not None else None
    grad, history = clip_to_percentile(grad, state[HISTORY], group["percentile_clipping"], norm)
    return grad, {HISTORY: history}
