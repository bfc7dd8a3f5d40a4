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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.scaling import LossScaler
from studies.loss_scaling import look as looking
from studies.loss_scaling import rows
from studies.shared import language as language_run
from studies.shared.graphed import Gradients
from studies.shared.language import LAST, LOOK_EVERY, Result, Setting, moved

BEFORE, AFTER = 20, 80  # steps around the spike of which every loss and scale is kept


@dataclass(frozen=True)
class Task:
    """A run."""

    kind: str  # ``"formats"``, or the name of what is injected
    row: str  # format and scaler
    seed: int  # of weights and batches


@dataclass(frozen=True)
class Plan:
    """What all runs share."""

    language: Setting = field(default_factory=Setting)  # the model, the text and the steps
    beta2: float = 0.999  # AdamW's
    interval: int = 2000  # good steps in a row that double a dynamic scale; torch's
    # shares of the fp32 run after which its gradients are looked at
    moments: tuple[float, ...] = (0.01, 0.1, 0.5, 1.0)
    spike: float = 0.4  # share of a run after which something is injected

    @property
    def spiked(self) -> int:
        """The first step of what is injected."""
        return round(self.spike * self.language.steps) + 1

    @property
    def looks(self) -> set[int]:
        """The steps at which gradients are looked at."""
        return {max(2, round(share * self.language.steps)) for share in self.moments}

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
        `validation_loss` and `training_loss` in nats a token (None if diverged); `curve` of training losses;
        `scales`, steps with the scale from there on; `skipped_steps`, whole ones; `missed`, updates that were
        not made, in steps of the whole model; `skipped`, the tensors that had inf or NaN most often;
        `around`, losses of the steps about the spike or where it would be; `gradients` of the looks.
    """
    begun, setting = time.perf_counter(), plan.language
    model = language_run.start(setting, seed)
    optimizer = row.recipe.apply(
        model, lr=setting.lr, decay_all=True, betas=(setting.beta1, plan.beta2), eps=setting.eps,
        weight_decay=setting.weight_decay, max_grad_norm=setting.clip or None, seed=seed,
    )  # fmt: skip
    device = torch.device(setting.device).type
    scaler = row.scaler(device, plan.interval) if row.scaler else None
    loop = _Loop(model, optimizer, scaler, plan, seed, injection)
    with warnings.catch_warnings():
        # That steps are skipped is what is measured.
        warnings.filterwarnings("ignore", "(?s).*(skipped|the loss scale falls)")
        loop.steps(plan.looks if look else set())
        scaled = loop.scaled()
    finite = all(map(math.isfinite, loop.losses[-LAST:]))
    validation = language_run.evaluate(model, loop.task, setting) if finite else math.nan
    good = math.isfinite(validation)
    return {
        "validation_loss": validation if good else None,
        "training_loss": statistics.fmean(loop.losses[-LAST:]) if good else None,
        "diverged": not good,
        "curve": language_run._curve(loop.losses),
        **scaled,
        **loop.around(),
        **({"gradients": loop.looks} if look else {}),
        "passes": loop.gradients.how,
        "step_ms": 1e3 * statistics.median(loop.seconds),
        "seconds": time.perf_counter() - begun,
    }


class _Loop:
    """The loop, and what it notes down on the way."""

    def __init__(
        self, model: nn.Module, optimizer: Any, scaler: LossScaler | None, plan: Plan, seed: int,
        injection: rows.Injection | None,
    ) -> None:  # fmt: skip
        self._model, self._optimizer, self._scaler, self._plan = model, optimizer, scaler, plan
        self._injection, self._embedding = injection, rows.embedding_of(model)
        self.task = language_run.task_of(plan.language, seed)
        self.gradients = Gradients(model, functools.partial(self.task.loss, model), plan.language.device)
        self._one = torch.ones((), device=plan.language.device)
        self.losses: list[float] = []
        self._scales: list[float] = []
        self.looks: list[dict[str, Any]] = []
        self.seconds: list[float] = []

    def steps(self, looks: set[int]) -> None:
        """All steps, or until no loss between two looks at them is finite."""
        waiting: list[Tensor] = []
        since, steps = time.perf_counter(), self._plan.language.steps
        for number in range(1, steps + 1):
            waiting.append(self._step(number, number in looks))
            if number % LOOK_EVERY and number != steps:
                continue
            found = torch.stack(waiting).tolist()
            now = time.perf_counter()
            self.seconds.append((now - since) / len(found))
            since = now
            waiting.clear()
            self.losses += [loss for loss, _ in found]
            self._scales += [scale for _, scale in found]
            if not any(math.isfinite(loss) for loss, _ in found):
                break

    def _step(self, number: int, looked_at: bool) -> Tensor:
        """A step: its loss and its scale, on the device."""
        setting, task, injection = self._plan.language, self.task, self._injection
        language_run.set_rate(self._optimizer, setting.rate(number))
        examples = moved(task.draw(), setting.device)
        if looked_at:
            self._look(number, examples)
        hit = injection is not None and injection.on(number, self._plan.spiked)
        scale = self._one if self._scaler is None else self._scaler.scale(self._one).clone()
        loss = self.gradients(examples, scale * injection.factor if injection is not None and hit else scale)
        if injection is not None and hit:
            injection.break_gradient(self._embedding)
        updates = looking.Updates(self._model) if looked_at else None
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        if updates is not None:
            self.looks[-1]["updates"] = updates.found()
        return torch.stack([loss.float(), scale])

    def _look(self, number: int, examples: Mapping[str, Tensor]) -> None:
        def loss(model: nn.Module) -> Tensor:
            return self.task.loss(model, examples)

        self.looks.append({"step": number} | looking.gradients(self._model, loss))
        self.looks[-1]["fp16"] = looking.in_fp16(self._model, loss)

    def scaled(self) -> dict[str, Any]:
        """What the scaler did."""
        if self._scaler is None:
            return {"scales": [], "skipped_steps": 0, "missed": 0.0, "skipped": {}}
        sizes = {name: p.numel() for name, p in self._model.named_parameters()}
        skipped, whole = self._scaler.skipped, self._scaler.skipped_steps
        missed = sum(sizes[name] * count for name, count in skipped.items()) / sum(sizes.values())
        often = sorted(skipped.items(), key=lambda item: -item[1])
        return {
            "scales": changes(self._scales),
            "skipped_steps": whole,
            "missed": float(whole) if whole else missed,
            "skipped": dict(often[:3]) | ({"others": len(often) - 3} if len(often) > 3 else {}),
        }

    def around(self) -> dict[str, Any]:
        """Losses about the spike, or where it would be; nothing of the formats."""
        if self._injection is None:
            return {}
        first = max(1, self._plan.spiked - BEFORE)
        return {"around": {"first": first, "losses": self.losses[first - 1 : self._plan.spiked + AFTER]}}


def changes(scales: Sequence[float]) -> list[list[float]]:
    """The steps, from 1, at which the scale is another than before, with the scale."""
    return [[i + 1, scale] for i, scale in enumerate(scales) if i == 0 or scale != scales[i - 1]]
