"""One run of the optimizer study: a language model, a masked one, characters in pictures, or an ablated 8-bit
Adam.

The first three train a row of `rows.py` at a learning rate; the last one is the 8-bit study's own run
(`eight_bit_adam`), at a learning rate above the one that was chosen, where parts that only seemed to be needed
show whether they are.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional as F

from narrowgauge.trainers import validation_windows
from narrowgauge.trainers._loop import schedule
from studies.adam_variants import glyphs
from studies.adam_variants import rows as variants_rows
from studies.eight_bit_adam import plan as planned
from studies.eight_bit_adam import training as eight_bit_adam
from studies.shared import language as language_run
from studies.shared.gather import Training
from studies.shared.language import Result, Setting, set_rate
from studies.shared.models import measured_bytes

BETA2 = planned.BASELINE.beta2
WARMUP = 0.1  # of the steps


@dataclass(frozen=True)
class Plan:
    """What all runs share.

    Attributes:
        language: setting of the two language tasks, but for model and learning rate.
        models: of the causal and the masked task.
        image_steps, image_batch, image_width: of the image task, and the network's first width.
        validated: batches of held-out images.
        ablation_steps: of a run of the ablation, on the causal model.
    """

    language: Setting = field(
        default_factory=lambda: Setting(
            megabytes=24, model="mini", vocabulary=4096, sequence=128, batch=32, steps=500, warmup=50, clip=0.0,
            eps=planned.BASELINE.eps, weight_decay=0.0, gauge_every=0, windows=256, stable_embedding=True,
        )
    )  # fmt: skip
    models: tuple[str, str] = ("mini", "roberta-micro")
    image_steps: int = 600
    image_batch: int = 256
    image_width: int = 32
    validated: int = 16
    ablation_steps: int = 400

    @property
    def device(self) -> str:
        return self.language.device

    def plain(self) -> dict[str, Any]:
        """For a results file."""
        own = {name: value for name, value in vars(self).items() if name not in ("language", "models")}
        return self.language.plain() | own | {"model": " and ".join(self.models), "warmup": WARMUP}


@dataclass(frozen=True)
class Task:
    """A run: its kind (language, masked, images or ablation), a row, a learning rate, a seed."""

    kind: str
    row: str
    lr: float
    seed: int


def run(task: Task, plan: Plan) -> Result:
    """Make a run.

    Raises:
        RuntimeError: if the row's optimizer cannot be used here.
    """
    if task.kind == "ablation":
        return _ablation(task, plan)
    chosen = variants_rows.variant(task.row)
    reason = chosen.refusal(plan.device)
    if reason is not None:
        raise RuntimeError(reason)
    if task.kind == "images":
        return _images(task, plan, chosen)
    model = plan.models[task.kind == "masked"]
    steps = plan.language.steps
    setting = replace(plan.language, model=model, lr=task.lr, warmup=max(1, round(WARMUP * steps)))

    def make(model: torch.nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
        return chosen.make(model, options | {"lr": _rate_for(chosen, task.lr, plan.device)})

    return language_run.train(make, setting, BETA2, task.seed)


def _rate_for(chosen: variants_rows.Variant, lr: float, device: str) -> Any:
    # torchao compiles its step, once for each learning rate that is a number.
    return torch.tensor(lr, device=device) if chosen.package == "torchao" else lr


def _images(task: Task, plan: Plan, chosen: variants_rows.Variant) -> Result:
    """Characters in pictures."""
    begun = time.perf_counter()
    model = glyphs.network(task.seed, plan.image_width).to(plan.device)
    options = {"lr": task.lr, "betas": (0.9, BETA2), "eps": 1e-8, "seed": task.seed}
    optimizer = chosen.make(model, options)
    batches = glyphs.Glyphs(glyphs.TRAINED, plan.image_batch, task.seed)
    losses, trained = [], time.perf_counter()
    for number in range(1, plan.image_steps + 1):
        warmup = round(WARMUP * plan.image_steps)
        set_rate(optimizer, task.lr * schedule("cosine", number, steps=plan.image_steps, warmup=warmup, final=0.0))
        images, labels = (t.to(plan.device) for t in next(batches))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    found = torch.stack(losses).tolist()
    trained = time.perf_counter() - trained
    validation, accuracy = glyphs.validate(model, plan.validated, plan.image_batch, plan.device)
    good = math.isfinite(validation)
    return {
        "validation_loss": validation if good else None,
        "training_loss": statistics.fmean(found[-language_run.LAST :]) if good else None,
        "accuracy": accuracy if good else None,
        "diverged": not good,
        "bytes": measured_bytes(model, optimizer),
        "step_ms": 1e3 * trained / plan.image_steps,
        "seconds": time.perf_counter() - begun,
    }


def ablated(name: str) -> planned.Arm:
    """A row of Table 3 by its name."""
    return next(arm for arm in planned.ARMS if name_of(arm) == name)


def name_of(arm: planned.Arm) -> str:
    """`dynamic, blocks, stable embedding`."""
    if arm.codebook is None:
        states = "32-bit"
    else:
        states = f"{arm.codebook}, {'blocks' if arm.blocks else 'tensor'}"
    return f"{states}, {'stable' if arm.stable else 'usual'} embedding"


def _ablation(task: Task, plan: Plan) -> Result:
    """The 8-bit study's run; its CUDA graph makes a step of a small model several times as fast."""
    setting = plan.language
    training = Training(
        setting.data, plan.models[0], setting.vocabulary, plan.ablation_steps, setting.batch, setting.sequence,
        task.lr, max(1, round(WARMUP * plan.ablation_steps)), BETA2, task.seed, plan.device,
    )  # fmt: skip
    trial = replace(ablated(task.row).base, lr=task.lr, seed=task.seed)
    tokens, windows = _on_device(setting.data, setting.megabytes, setting.vocabulary, setting.sequence, plan.device)
    found = eight_bit_adam.train(trial, training, tokens, windows, graph=plan.device != "cpu")
    # Of a run that was ended early there is no mean.
    return found | {"diverged": found["unstable"] is not None}


@functools.lru_cache(maxsize=1)
def _on_device(
    data: Any, megabytes: int, vocabulary: int, sequence: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    _, tokens = language_run.text_of(data, megabytes, vocabulary)
    windows = validation_windows(tokens.validation, sequence, 128)
    return tokens.train.to(device), windows.to(device)
