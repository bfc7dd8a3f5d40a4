"""Bytes against loss: one training, under any optimizer, and what its tensors weigh afterwards.

The loop is the ordinary one and knows nothing of whose optimizer it drives: one seed gives every row the same
initial weights and the same batches. The learning rate rises, then falls in a straight line to a tenth, so that
the end of a run is quiet and differences of a thousandth can be seen.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.trainers import (
    Batches,
    TokenizedCorpus,
    evaluate,
    load_corpus,
    next_token_loss,
    tokenize,
    validation_windows,
)
from studies.bytes_and_loss import rows as bytes_rows
from studies.shared.graphed import reason
from studies.shared.language import looks, measured_bytes, set_rate, start_of

WINDOWS = 256  # of the validation text
EAGER_STEPS = 3  # before a step is captured: states are made, kernels chosen
LOOK_EVERY = 25  # steps between looks at the losses, each of which waits for the device
LAST = 20  # steps whose training loss is averaged


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


@functools.lru_cache(maxsize=1)
def text_of(data: Path | None, vocabulary: int) -> tuple[str, TokenizedCorpus]:
    """The text's name, and its tokens."""
    corpus = load_corpus(data)
    return corpus.source, tokenize(corpus, vocabulary)


def train(name: str, setting: Setting, seed: int) -> dict[str, Any]:
    """Train one row and say how it went.

    Returns:
        `validation_loss` in nats a token (None if diverged), `training_loss` over the last steps, `diverged`,
        `bytes` a parameter by what they hold, `step`: how the optimizer was driven, `seconds` of it all and of
        the steps; those of trainings side by side say little of each.
    """
    begun = time.perf_counter()
    row = bytes_rows.row(name)
    _, text = text_of(setting.data, setting.vocabulary)
    model = copy.deepcopy(start_of(setting.model, setting.vocabulary, setting.sequence, seed)).to(setting.device)
    device = torch.device(setting.device)
    graph = setting.graph and device.type == "cuda" and row.family == "ours"
    options: dict[str, Any] = {
        # A captured step reads the rate from the device.
        "lr": torch.tensor(setting.lr, dtype=torch.float64, device=device) if graph else setting.lr,
        "betas": (setting.beta1, setting.beta2), "eps": setting.eps, "weight_decay": setting.weight_decay,
    }  # fmt: skip
    optimizer = row.optimizer(model, options | ({"capturable": True} if graph else {}), seed)
    batches = Batches(text.train.to(device), setting.batch, setting.sequence, seed)
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
            drive.append(_captured(optimizer))
        drive[-1][0]()
        return loss.detach()

    trained, losses = time.perf_counter(), []
    for found, _ in looks(setting.steps, step, LOOK_EVERY):
        losses += found
        if not all(map(math.isfinite, found)):
            break
    trained = time.perf_counter() - trained
    finite = all(map(math.isfinite, losses))
    weighed = measured_bytes(model, optimizer)
    loss = math.nan
    if finite:
        windows = validation_windows(text.validation, setting.sequence, WINDOWS)
        loss = evaluate(model, next_token_loss, windows.split(4 * setting.batch))
    last = losses[-LAST:]
    return {
        "validation_loss": loss if math.isfinite(loss) else None,
        "training_loss": sum(last) / len(last) if finite else None,
        "diverged": not math.isfinite(loss),
        "bytes": weighed,
        "step": drive[-1][1],
        "seconds": round(time.perf_counter() - begun, 1),
        "training_seconds": round(trained, 1),
    }


def _captured(optimizer: torch.optim.Optimizer) -> tuple[Callable[[], Any], str]:
    """The step as a replay; the step itself, and why, if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        # Nothing is computed while it is captured.
        with torch.cuda.graph(graph):
            optimizer.step()
    except Exception as error:
        torch.cuda.synchronize()
        return optimizer.step, f"eager, not captured: {reason(error)}"
    return graph.replay, "graph"
