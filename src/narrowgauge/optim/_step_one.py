"""One parameter's step, by the compiled function for a CPU or by the eager specification; written, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.optim._admission import admit, all_finite
from narrowgauge.optim._clip_gradients import HISTORY, clip_to_percentile
from narrowgauge.optim._gradient_factor import GradientFactor
from narrowgauge.optim._sampled_ratios import ratio_sums
from narrowgauge.optim._stats import UpdateStats
from narrowgauge.optim._update import Noise, squared_ratios, update

if TYPE_CHECKING:
    from narrowgauge.optim._optimizer import NarrowOptimizer


def step_parameter(
    optimizer: NarrowOptimizer,
    group: dict[str, Any],
    p: Tensor,
    grad: Tensor,
    factor: GradientFactor | None = None,
    place: int = 0,
) -> None:
    """Take one parameter's step.

    Args:
        optimizer: whose it is.
        group, p, grad: the parameter's; `grad` as it lies in memory.
        factor: what gradients are multiplied by in this step; it has been judged.
        place: of the parameter among all, under which the factor knows it.
    """
    plan, state = optimizer._plans[p], optimizer.state[p]
    if not state:
        state.update(plan.init(p, group))
    number = factor.number() if factor is not None and p.is_cpu else None
    kernel = optimizer._kernel(plan, p, grad, state, group, number)
    if factor is not None:
        keep = factor.admit(place, group["nonfinite"], state, p.device)
    else:
        keep = admit(group["nonfinite"], state, grad, kernel.finite if kernel is not None else all_finite)
    measures_ratio = bool(optimizer._ratios) and p in optimizer._ratios
    if keep is False:
        if optimizer.gauges:
            optimizer.last_stats.add(plan.name, UpdateStats.none(p.device))
        if measures_ratio:
            optimizer._ratios[p] = torch.zeros(2, dtype=torch.float64, device=p.device)
        return
    if kernel is not None and not optimizer.gauges and not measures_ratio:
        kernel.take()
        state["step"] += 1
        return
    # On a GPU the count stays there: reading it would make the host wait for the device at every parameter.
    on_device = p.device.type != "cpu" and not plan.strict
    step = state["step"].to(torch.float64) + 1 if on_device else int(state["step"].item()) + 1
    if factor is not None:
        grad = factor.times(grad)
    if group["maximize"]:
        grad = -grad
    norms = {}
    if HISTORY in state:
        grad, norms[HISTORY] = clip_to_percentile(grad, state[HISTORY], group["percentile_clipping"])
    before = plan.exact(p, state) if optimizer.gauges else None
    ratio = squared_ratios(plan, p, grad, state, group, step) if optimizer.gauges else None
    if measures_ratio:
        sums = ratio_sums(plan, p, grad, state, group, step, optimizer._turn)
        optimizer._ratios[p] = sums if keep is True or sums is None else torch.where(keep, sums, 0.0)
    if kernel is not None and not optimizer.gauges:
        kernel.take()
        state["step"] += 1 if keep is True else keep
        return
    new_p, new_state, delta = update(plan, p, grad, state, group, step, Noise(group["seed"], plan.index, step, p))
    new_state |= norms
    if kernel is not None:
        # What was intended is the specification's; the step is the one taken without gauges, to the bit.
        kernel.take()
        new_p, new_state = p, {}
    for target, value in [(p, new_p), *((state[key], value) for key, value in new_state.items())]:
        target.copy_(value if keep is True else torch.where(keep, value, target))
    state["step"] += 1 if keep is True else keep
    if before is not None:
        stats = UpdateStats.measure(delta, before, plan.exact(p, state), ratio)
        optimizer.last_stats.add(plan.name, stats.where(keep))
