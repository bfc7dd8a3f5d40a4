"""Bytes against loss: one training, under any optimizer, and what its tensors weigh afterwards.

The loop is the ordinary one and knows nothing of whose optimizer it drives: one seed gives every row the same
initial weights and the same batches. The learning rate rises, then falls in a straight line to a tenth, or to
another share, so that the end of a run is quiet and differences of a thousandth can be seen.

With `trained` steps every row goes on from a model that AdamW in fp32 has trained on the same text: fine-tuning,
where learning rates are small. One seed has one such model.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import recipes
from narrowgauge.trainers import (
    Batches,
    evaluate,
    next_token_loss,
    validation_windows,
)
from studies.bytes_and_loss import rows as bytes_rows
from studies.shared.graphed import captured_step
from studies.shared.language import looks, measured_bytes, set_rate, start_of, tokens_of

WINDOWS = 256  # of the validation text
EAGER_STEPS = 3  # before a step is captured: states are made, kernels chosen
LOOK_EVERY = 25  # steps between looks at the losses, each of which waits for the device
LAST = 20  # steps whose training loss is averaged
_LATER = 1000  # added to the seed of the batches that a trained model goes on with


@dataclass(frozen=True)
class Setting:
    """What all rows share, and what a variation changes."""

    data: Path | None = None  # a text; None for the source of Python's standard library
    # model, vocabulary, sequence: what is trained
    model: str = "gpt2"
    vocabulary: int = 8192
    sequence: int = 256
    # steps, batch: optimizer steps, windows a step
    steps: int = 400
    batch: int = 8
    # lr, warmup, final: learning rate, steps of its rise, share of it that is left at the last step
    lr: float = 5e-4
    warmup: int = 40
    final: float = 0.1
    # beta1, beta2, eps, weight_decay: AdamW's
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0  # the gradients' norm is brought down to this at most; 0 leaves them alone
    # trained, trained_lr: steps of AdamW in fp32 before any row begins, and their learning rate
    trained: int = 0
    trained_lr: float = 1e-3
    device: str = "cpu"  # where to train
    # whether our own optimizers' steps are replayed from a CUDA graph. The eager step of a small model is bound
    # by the launching of its kernels; a graph computes the same numbers
    graph: bool = True

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 1."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        left = (self.steps - step) / max(1, self.steps - self.warmup)
        return self.lr * (self.final + (1 - self.final) * left)


def train(name: str, setting: Setting, seed: int) -> dict[str, Any]:
    """Train one row and say how it went.

    Returns:
        `validation_loss` in nats a token (None if diverged), `earlier_loss`: it after two thirds of the steps,
        `training_loss` over the last steps, `diverged`, `bytes` a parameter by what they hold, `step`: how the
        optimizer was driven, `seconds` of it all and of the steps; those of trainings side by side say little of
        each.
    """
    begun = time.perf_counter()
    row = bytes_rows.row(name)
    _, text = tokens_of(setting.data, setting.vocabulary)
    model = copy.deepcopy(_start(setting, seed)).to(setting.device)
    device = torch.device(setting.device)
    graph = setting.graph and device.type == "cuda" and row.family == "ours"
    options: dict[str, Any] = {
        # A captured step reads the rate from the device.
        "lr": torch.tensor(setting.lr, dtype=torch.float64, device=device) if graph else setting.lr,
        "betas": (setting.beta1, setting.beta2), "eps": setting.eps, "weight_decay": setting.weight_decay,
    }  # fmt: skip
    optimizer = row.optimizer(model, options | ({"capturable": True} if graph else {}), seed)
    batches = Batches(text.train.to(device), setting.batch, setting.sequence, seed + _LATER * bool(setting.trained))
    windows = validation_windows(text.validation, setting.sequence, WINDOWS).split(4 * setting.batch)
    parameters = [p for p in model.parameters() if p.requires_grad]
    drive: list[tuple[Callable[[], Any], str]] = [(optimizer.step, "eager")]

    def step(number: int) -> Tensor:
        set_rate(optimizer, setting.rate(number))
        # A graph reads gradients where they were when it was captured: they are zeroed in place.
        optimizer.zero_grad(set_to_none=not graph)
        loss = next_token_loss(model, next(batches))
        torch.autograd.backward(loss)
        if setting.clip:
            nn.utils.clip_grad_norm_(parameters, setting.clip)
        if graph and number == EAGER_STEPS + 1:
            drive.append(captured_step(optimizer))
        drive[-1][0]()
        return loss.detach()

    trained, losses, earlier = time.perf_counter(), [], math.nan
    for found, _ in looks(setting.steps, step, LOOK_EVERY):
        losses += found
        if len(losses) - len(found) < 2 * setting.steps / 3 <= len(losses):
            earlier = evaluate(model, next_token_loss, windows)
        if not all(map(math.isfinite, found)):
            break
    trained = time.perf_counter() - trained
    finite = all(map(math.isfinite, losses))
    weighed = measured_bytes(model, optimizer)
    loss = math.nan
    if finite:
        loss = evaluate(model, next_token_loss, windows)
    last = losses[-LAST:]
    return {
        "validation_loss": loss if math.isfinite(loss) else None,
        "earlier_loss": earlier if math.isfinite(earlier) else None,
        "training_loss": sum(last) / len(last) if finite else None,
        "diverged": not math.isfinite(loss),
        "bytes": weighed,
        "step": drive[-1][1],
        "seconds": round(time.perf_counter() - begun, 1),
        "training_seconds": round(trained, 1),
    }


def _start(setting: Setting, seed: int) -> nn.Module:
    """Initial weights on the CPU in fp32, numbers of bf16; trained ones if the setting says so.

    Those are trained once, by whoever comes first, and wait in a file for all others.
    """
    model = start_of(setting.model, setting.vocabulary, setting.sequence, seed)
    if not setting.trained:
        return model
    first = replace(setting, trained=0, steps=setting.trained, lr=setting.trained_lr, final=0.0)
    key = hashlib.sha256(repr((asdict(first), seed, torch.__version__)).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"narrowgauge-trained-{key}.pt"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            torch.save(_trained(first, copy.deepcopy(model), seed), path)
    model = copy.deepcopy(model)
    model.load_state_dict(torch.load(path))
    return model


def _trained(setting: Setting, model: nn.Module, seed: int) -> dict[str, Tensor]:
    """The weights after training in fp32, rounded to bf16."""
    device = torch.device(setting.device)
    _, text = tokens_of(setting.data, setting.vocabulary)
    model = model.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), setting.lr, (setting.beta1, setting.beta2), setting.eps, setting.weight_decay
    )
    batches = Batches(text.train.to(device), setting.batch, setting.sequence, seed)
    for number in range(1, setting.steps + 1):
        set_rate(optimizer, setting.rate(number))
        optimizer.zero_grad()
        torch.autograd.backward(next_token_loss(model, next(batches)))
        nn.utils.clip_grad_norm_(model.parameters(), setting.clip or math.inf)
        optimizer.step()
    recipes.cast(model, torch.bfloat16)
    return model.cpu().state_dict()
