"""One training with a loss scaler, gradients broken on purpose, and looks at gradients on the way.

The loop is that of `shared/language.py` with a scaler in it, and notes down the scale of every step. Unscaling,
clipping and skipping are left to the optimizer's step, so nothing waits for a device between looks.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.trainers._task import to_device
from studies.loss_scaling import look as looking
from studies.loss_scaling import rows
from studies.shared import language
from studies.shared.graphed import Gradients
from studies.shared.language import Result, Setting

BEFORE, AFTER = 20, 80  # steps around the spike of which every loss and scale is kept


@dataclass(frozen=True)
class Task:
    """A run."""

    kind: str  # "formats", or the name of what is injected
    row: str  # format and scaler
    seed: int  # of weights and batches


@dataclass(frozen=True)
class Plan:
    """What all runs share."""

    language: Setting = field(default_factory=Setting)
    beta2: float = 0.999
    interval: int = 2000  # good steps in a row that double a dynamic scale; torch's
    moments: tuple[float, ...] = (0.01, 0.1, 0.5, 1.0)  # shares of the fp32 run after which gradients are looked at
    spike: float = 0.4  # share of a run after which something is injected

    @property
    def spiked(self) -> int:
        """The first step of what is injected."""
        return round(self.spike * self.language.steps) + 1

    def plain(self) -> dict[str, Any]:
        """For a results file."""
        own = {name: value for name, value in asdict(self).items() if name != "language"}
        return self.language.plain() | own | {"moments": list(self.moments), "spiked": self.spiked}


def run(task: Task, plan: Plan) -> Result:
    """A run of any kind."""
    row = rows.row(task.row)
    if task.kind == "formats":
        return train(row, plan, task.seed, look=row.name == "fp32" and task.seed == 0)
    # As in the paper, where gradients that a spike makes large are not clipped.
    unclipped = replace(plan, language=replace(plan.language, clip=0.0))
    return train(row, unclipped, task.seed, rows.injection(task.kind))


def train(
    row: rows.Row, plan: Plan, seed: int, injection: rows.Injection | None = None, look: bool = False
) -> Result:
    """Train, and say how it went.

    Returns:
        What `language.ended` says; `scales`, steps with the scale from there on; `skipped_steps`, whole ones;
        `missed`, updates that were not made, in steps of the whole model; `skipped`, the tensors that had inf or
        NaN most often; `around`, losses of the steps about the spike or where it would be; `gradients` of the
        looks.
    """
    begun, setting = time.perf_counter(), plan.language
    model = language.start(setting, seed)
    optimizer = row.recipe.apply(
        model, lr=setting.lr, decay_all=True, betas=(setting.beta1, plan.beta2), eps=setting.eps,
        weight_decay=setting.weight_decay, max_grad_norm=setting.clip or None, seed=seed,
    )  # fmt: skip
    scaler = row.scaler(torch.device(setting.device).type, plan.interval) if row.scaler else None
    task = language.task_of(setting, seed)
    gradients = Gradients(model, functools.partial(task.loss, model), setting.device)
    one = torch.ones((), device=setting.device)
    looked_at = {max(2, round(share * setting.steps)) for share in plan.moments} if look else set()
    seen: list[dict[str, Any]] = []

    def step(number: int) -> Tensor:
        """A step: its loss and its scale, on the device."""
        language.set_rate(optimizer, setting.rate(number))
        examples = to_device(task.draw(), torch.device(setting.device))
        if number in looked_at:

            def loss_of(model: nn.Module) -> Tensor:
                return task.loss(model, examples)

            seen.append({"step": number} | looking.gradients(model, loss_of))
            seen[-1]["fp16"] = looking.in_fp16(model, loss_of)
        scale = one if scaler is None else scaler.scale(one).clone()
        hit = injection if injection is not None and injection.on(number, plan.spiked) else None
        loss = gradients(examples, scale if hit is None else scale * hit.factor)
        if hit is not None:
            hit.break_gradient(rows.embedding_of(model))
        updates = looking.Updates(model) if number in looked_at else None
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if updates is not None:
            seen[-1]["updates"] = updates.found()
        return torch.stack([loss.float(), scale])

    losses: list[float] = []
    scales: list[float] = []
    times: list[float] = []
    with warnings.catch_warnings():
        # That steps are skipped is what is measured.
        warnings.filterwarnings("ignore", "(?s).*(skipped|the loss scale falls)")
        for found, seconds in language.looks(setting.steps, step):
            losses += [loss for loss, _ in found]
            scales += [scale for _, scale in found]
            times.append(seconds)
            if not any(math.isfinite(loss) for loss, _ in found):
                break
        scaled = _scaled(model, scaler, scales)
    first = max(1, plan.spiked - BEFORE)
    around = {"first": first, "losses": losses[first - 1 : plan.spiked + AFTER]}
    return {
        **language.ended(model, task, setting, losses),
        **scaled,
        **({"around": around} if injection is not None else {}),
        **({"gradients": seen} if look else {}),
        "passes": gradients.how,
        "step_ms": 1e3 * statistics.median(times),
        "seconds": time.perf_counter() - begun,
    }


def _scaled(model: nn.Module, scaler: Any, scales: Sequence[float]) -> dict[str, Any]:
    """What the scaler did."""
    if scaler is None:
        return {"scales": [], "skipped_steps": 0, "missed": 0.0, "skipped": {}}
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    skipped, whole = scaler.skipped, scaler.skipped_steps
    missed = sum(sizes[name] * count for name, count in skipped.items()) / sum(sizes.values())
    often = sorted(skipped.items(), key=lambda item: -item[1])
    return {
        # The steps, from 1, at which the scale is another than before.
        "scales": [[i + 1, scale] for i, scale in enumerate(scales) if i == 0 or scale != scales[i - 1]],
        "skipped_steps": whole,
        "missed": float(whole) if whole else missed,
        "skipped": dict(often[:3]) | ({"others": len(often) - 3} if len(often) > 3 else {}),
    }
