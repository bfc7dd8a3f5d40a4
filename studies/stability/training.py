"""One CLIP under one optimizer, with RMS_t of its first layers at every step: a run of `stability`.

AdamW and its gradient clipping are torch's, StableAdamW and the schedule of beta2 this library's. As in the
paper, gains and biases have no decay, half of the patches are dropped, the logit scale is bounded, a norm stands
between the patch embedding and the blocks, and nothing is clipped where clipping is not what is tried.

RMS_t is taken of what the optimizer saw: of clipped gradients where they are clipped.

**A change of the learning signal** can be provoked: until a step the patch embedding gets a share of its gradient,
from then on all of it. AdamW divides by the root of the second moment and does not care for the share; only the
change is felt, and no loss is touched by it. (Pictures with little contrast do not make such a change: the norm
behind the patch embedding makes up for them, and its gradient too.)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.gauges import find_rms_spikes, find_spikes, rms_ratio
from narrowgauge.optim import AdamW, StableAdamW, split_decay
from narrowgauge.trainers import TrainSettings
from studies.clip_precision import training as clip_run
from studies.clip_precision.training import BLOCKS, PATCHES, Trained

EPS = 1e-6  # the paper's, in StableAdamW and in RMS_t
TOKENS = "text_model.embeddings.token_embedding.weight"
NEAR, AROUND = 20, 50  # steps after the switch that are looked at, and before it
LAST = 50  # steps whose mean is the training loss

Result = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """How spikes are met."""

    name: str  # in results, tables and pictures
    clip: float = 0.0  # norm of all gradients together at most; 0 for no clipping
    stable: bool = False  # whether updates are clipped
    schedule: float | None = None  # lambda of beta2 = 1 - t^-lambda; None for a fixed one


PLAIN, STABLE, CLIPPED = Way("AdamW"), Way("StableAdamW", stable=True), Way("AdamW, clipped to 1", clip=1.0)
LAMBDAS = (0.45, 0.5, 0.65)  # of Figure 14
SCHEDULED = tuple(Way(f"AdamW, β2 = 1 − t^−{x:g}", schedule=x) for x in LAMBDAS)
WAYS = (PLAIN, STABLE, CLIPPED, *SCHEDULED)


@dataclass(frozen=True)
class Task:
    """A run."""

    row: str  # a way, by its name
    # model, lr, batch, beta2: of this run; under a schedule `beta2` is that of the last step
    model: str
    lr: float
    batch: int
    beta2: float
    signal: float  # share of the patch embedding's gradient before the switch; 1 for no switch
    seed: int  # of weights, pictures and dropped patches


@dataclass(frozen=True)
class Plan:
    """What all runs share."""

    # of a training; model, learning rate and batch are those that are not varied
    settings: TrainSettings = field(
        default_factory=lambda: TrainSettings(
            model="clip-small", recipe="fp32", batch=512, steps=600, warmup=150, lr=2e-3, beta1=0.9, eps=EPS,
            weight_decay=0.2, clip=0.0, patch_dropout=0.5, final_lr=0.0, autocast="bf16", validate_every=0,
            validation_windows=1024, sequence=16, device="cpu",
        )
    )  # fmt: skip
    sizes: tuple[str, ...] = ("clip-deep", "clip-mini")  # models beside that of the settings
    judged_from: int = 101  # the first step at which a spike could be found: the heuristics leave out a warm-up
    switch: float = 0.5  # share of the steps after which the patch embedding gets its whole gradient

    @property
    def switched(self) -> int:
        """The first step with the whole gradient, where it was less."""
        return round(self.switch * self.settings.steps) + 1

    def plain(self) -> dict[str, Any]:
        """For a results file."""
        return clip_run.plain(self.settings) | {"judged_from": self.judged_from, "switched": self.switched}


def way(name: str) -> Way:
    """A way by its name."""
    return next(found for found in WAYS if found.name == name)


def run(task: Task, plan: Plan) -> Result:
    """Train, and say how it went.

    Returns:
        `validation_loss` (None if diverged), `accuracy` (zero-shot, top 1), `training_loss`; `loss_spikes` and, by
        tensor, `rms_spikes`, by step; `rms`, by tensor the mean and the largest of the judged steps; with seed 0
        the `losses` and `rms_t` of all steps, too.
    """
    how = way(task.row)
    settings = replace(
        plan.settings, model=task.model, lr=task.lr, batch=task.batch, beta2=task.beta2, seed=task.seed,
        clip=how.clip, beta2_schedule=how.schedule,
    )  # fmt: skip
    watched = Watched(how, task.beta2)

    def make(model: nn.Module, options: Mapping[str, Any]) -> torch.optim.Optimizer:
        if task.signal != 1.0:
            watched.dim(model, task.signal, plan.switched)
        return optimizer_of(how, model, options)

    trained = clip_run.train(settings, make=make, scalars=watched, magnitudes=False)
    found = found_in(trained, plan, keep=task.seed == 0)
    return found | ({"after": after(trained, plan.switched)} if task.signal != 1.0 else {})


def optimizer_of(how: Way, model: nn.Module, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimizer of a way."""
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"]}
        for group in split_decay(model, options["weight_decay"], embeddings="fp32")
    ]
    shared: dict[str, Any] = {"lr": options["lr"], "betas": options["betas"], "eps": options["eps"]}
    if how.stable:
        return StableAdamW(groups, **shared)
    if how.schedule is not None:
        return AdamW(groups, **shared, beta2_schedule=how.schedule)
    return torch.optim.AdamW(groups, **shared)


class Watched:
    """Counts steps, and says RMS_t of patch embedding, a layer in the middle and token embedding after each."""

    def __init__(self, how: Way, beta2: float) -> None:
        self._how, self._beta2, self._step = how, beta2, 0
        self._share: Tensor | None = None

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        self._step += 1
        if self._share is not None and self._step + 1 == self._switched:
            self._share.fill_(1.0)
        # A scheduled beta2 begins at 0 and needs no correction.
        correction = 1.0 if self._how.schedule is not None else 1 - self._beta2**self._step
        looked_at = {name: model.get_parameter(p) for name, p in tensors(model).items()}
        return {name: self._rms(p, optimizer, correction) for name, p in looked_at.items()}

    def dim(self, model: nn.Module, signal: float, switched: int) -> None:
        """Leave a share of the patch embedding's gradient in the steps before one."""
        p = model.get_parameter(PATCHES)
        # On the device, where a graph of the passes finds what it is now.
        self._share, self._switched = torch.full((), signal, device=p.device), switched
        p.register_hook(lambda gradient: gradient * self._share)

    def _rms(self, p: Tensor, optimizer: torch.optim.Optimizer, correction: float) -> Tensor:
        state = optimizer.state[p]
        second = state["exp_avg_sq"] if "exp_avg_sq" in state else state["v"]
        return torch.as_tensor(rms_ratio(p.grad, second / correction, EPS), device=p.device)


def tensors(model: nn.Module) -> dict[str, str]:
    """The parameters that are looked at."""
    blocks = len([*model.get_submodule(BLOCKS).children()])
    return {"patches": PATCHES, "middle": f"{BLOCKS}.{blocks // 2}.self_attn.q_proj.weight", "tokens": TOKENS}


def found_in(trained: Trained, plan: Plan, keep: bool) -> Result:
    """What a results file has of a run."""
    warmup = plan.judged_from - 1
    last = trained.validations[-1] if trained.finite else {}
    good = trained.finite and math.isfinite(last["loss"])
    rms = {name: values[warmup:] for name, values in trained.scalars.items()}
    found: Result = {
        "validation_loss": last["loss"] if good else None,
        "accuracy": last["zero_shot_top1"] if good else None,
        "training_loss": statistics.fmean(trained.losses[-LAST:]) if good else None,
        "diverged": not good,
        "steps_made": len(trained.losses),
        "loss_spikes": find_spikes(trained.losses, warmup=warmup),
        "rms_spikes": {name: find_rms_spikes(v, warmup=warmup) for name, v in trained.scalars.items()},
        "rms": {
            name: {"mean": statistics.fmean(values), "max": max(values)} if values else None
            for name, values in rms.items()
        },
        "passes": trained.passes,
        "step_ms": trained.step_ms,
        "seconds": trained.seconds,
    }
    if keep:
        found |= {"losses": brief(trained.losses), "rms_t": {n: brief(v) for n, v in trained.scalars.items()}}
    return found


def after(trained: Trained, switched: int) -> Result | None:
    """What the switch does: RMS_t at its first step, by how much the loss rises, and by how much without it.

    Rises are of the largest loss of `NEAR` steps over the mean of the `AROUND` before; `quiet` is that of the
    `NEAR` steps before the switch. None for a run that ended before.
    """
    first = switched - 1
    if len(trained.losses) < first + NEAR or first < NEAR + AROUND:
        return None

    def rise(begin: int) -> float:
        losses = trained.losses
        return max(losses[begin : begin + NEAR]) - statistics.fmean(losses[begin - AROUND : begin])

    rms = {name: values[first] for name, values in trained.scalars.items()}
    return {"rms": rms, "rise": rise(first), "quiet": rise(first - NEAR)}


def brief(values: list[float]) -> list[float]:
    """Four digits, which a picture has no more of; what is not finite stays so, and is no number in a file."""
    return [float(f"{value:.4g}") for value in values]
