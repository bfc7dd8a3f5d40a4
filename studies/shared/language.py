"""One training of a language model under any optimizer, for the studies that compare many of them.

What is trained on and how its loss is taken comes from `narrowgauge.trainers`, as in `narrowgauge train`:
windows of a text for causal models, covered tokens for masked ones, a warm-up and a cosine. The loop differs
from that command's in what it leaves out (checkpoints, the exported model) and in what it takes: an optimizer
of anybody's. One seed gives every optimizer the same initial weights, rounded to bf16 so that none starts by
losing something, and the same batches.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.optim import NarrowOptimizer, UpdateStats
from narrowgauge.trainers import Corpus, LanguageTask, TokenizedCorpus, load_corpus, tokenize
from narrowgauge.trainers._compare import mean_loss
from narrowgauge.trainers._extras import add_stable_embedding
from narrowgauge.trainers._loop import schedule
from narrowgauge.trainers._models import preset
from narrowgauge.trainers._task import Examples
from studies.shared import installed
from studies.shared.graphed import Gradients
from studies.shared.models import measured_bytes, set_rate, start_of

LOOK_EVERY = 20  # steps between looks at the losses, each of which waits for the device
LAST = 50  # steps whose mean is the training loss
MEGABYTE = 1 << 20

# What a masked model differs in: BERT's own sequence, and a setting in which it learns more than the frequencies of
# tokens in some hundred steps. At the papers' learning rates, for batches 256 times as large, it does not.
MASKED: dict[str, Any] = {
    "vocabulary": 1022, "sequence": 128, "batch": 64, "steps": 600, "lr": 2e-4, "warmup": 150, "windows": 1024,
}  # fmt: skip

Result = dict[str, Any]
Maker = Callable[[nn.Module, dict[str, Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Setting:
    """What all runs of a study share.

    Attributes:
        data: a text; None for the Python sources installed on this machine, `megabytes` of them at most.
        model, vocabulary, sequence, batch, steps: what is trained, on windows a step.
        lr, warmup, final: learning rate, steps of its rise, share of it that is left at the end of the cosine.
        beta1, eps, weight_decay: AdamW's; `beta2` is a run's own.
        clip: norm of all gradients together, at most; 0 for no clipping. The optimizer does it, within its step.
        gauge_every: steps between measurements of the update; 0 for none.
        windows: to validate on.
        stable_embedding: whether the token embedding is the 8-bit paper's, with a layer norm behind it.
        device: where to train.
    """

    data: Path | None = None
    megabytes: int = 48
    model: str = "gpt2"
    vocabulary: int = 50257
    sequence: int = 1024
    batch: int = 8
    steps: int = 300
    lr: float = 6e-4
    warmup: int = 60
    final: float = 0.1
    beta1: float = 0.9
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    gauge_every: int = 10
    windows: int = 128
    stable_embedding: bool = False
    device: str = "cpu"

    def rate(self, number: int) -> float:
        """The learning rate of a step, from 1."""
        return self.lr * schedule("cosine", number, steps=self.steps, warmup=self.warmup, final=self.final)

    def plain(self) -> dict[str, Any]:
        """For a results file, which names nobody's folders."""
        return asdict(self) | {"data": self.data.name if self.data else None}


@functools.lru_cache(maxsize=1)
def text_of(data: Path | None, megabytes: int, vocabulary: int) -> tuple[Corpus, TokenizedCorpus]:
    """The text, and its tokens: made once, and in the cache afterwards."""
    corpus = installed.installed_sources(megabytes * MEGABYTE) if data is None else load_corpus(data)
    return corpus, tokenize(corpus, vocabulary)


def about_text(setting: Setting) -> dict[str, Any]:
    """What a results file says of the text."""
    corpus, tokens = text_of(setting.data, setting.megabytes, setting.vocabulary)
    return {
        "source": corpus.source if setting.data is None else setting.data.name,
        "bytes": corpus.total_bytes,
        "train_tokens": len(tokens.train),
        "validation_tokens": len(tokens.validation),
        "bytes_per_token": tokens.bytes_per_token,
        "skipped": dict(corpus.skipped),
        "shared_lines": installed.shared_lines(corpus),
    }


def start(setting: Setting, seed: int) -> nn.Module:
    """Initial weights on the device."""
    model = copy.deepcopy(start_of(setting.model, setting.vocabulary, setting.sequence, seed))
    if setting.stable_embedding:
        add_stable_embedding(model, seed)
    return model.to(setting.device)


def train(make: Maker, setting: Setting, beta2: float, seed: int) -> Result:
    """Train, and say how it went.

    Args:
        make: makes the optimizer of a model in fp32 on its device, which it may cast, from `lr`, `betas`, `eps`,
            `weight_decay`, `max_grad_norm` and `seed`.
        setting: what all runs share.
        beta2: of this run.
        seed: of weights, batches and stochastic rounding.

    Returns:
        `validation_loss` and `training_loss` in nats a token (None if diverged), `curve` of training losses,
        `gauges` by step, `bytes` a parameter, `peak_memory` in bytes (None on a CPU), `passes` (eager or from a
        graph), `step_ms`, `seconds`.
    """
    begun = time.perf_counter()
    device = torch.device(setting.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = start(setting, seed)
    options = {
        "lr": setting.lr,
        "betas": (setting.beta1, beta2),
        "eps": setting.eps,
        "weight_decay": setting.weight_decay,
        "max_grad_norm": setting.clip or None,
        "seed": seed,
    }
    optimizer = make(model, options)
    task = task_of(setting, seed)
    run = _Run(model, optimizer, task, setting)
    losses = run.steps()
    finite = math.isfinite(losses[-1])
    validation = evaluate(model, task, setting) if finite else math.nan
    good = math.isfinite(validation)
    return {
        "validation_loss": validation if good else None,
        "training_loss": statistics.fmean(losses[-LAST:]) if good else None,
        "diverged": not good,
        "curve": _curve(losses),
        "gauges": run.gauges(),
        "bytes": measured_bytes(model, optimizer),
        "peak_memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "passes": run.gradients.how,
        "step_ms": 1e3 * statistics.median(run.seconds),
        "seconds": time.perf_counter() - begun,
    }


def task_of(setting: Setting, seed: int) -> LanguageTask:
    """Windows of the text, drawn from a seed."""
    _, tokens = text_of(setting.data, setting.megabytes, setting.vocabulary)
    return LanguageTask(
        tokens, preset(setting.model).objective, batch=setting.batch, sequence=setting.sequence,
        windows=setting.windows, seed=seed,
    )  # type: ignore[arg-type]  # fmt: skip


class _Run:
    """The loop, and what it notes down on the way."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, task: LanguageTask, setting: Setting
    ) -> None:
        self._optimizer, self._task, self._setting = optimizer, task, setting
        self.gradients = Gradients(model, functools.partial(task.loss, model), setting.device)
        self._stats: dict[int, UpdateStats] = {}
        self.seconds: list[float] = []  # of a step, between looks; the first look has compiled kernels in it

    def steps(self) -> list[float]:
        """All steps; the losses up to and with the first that is not finite."""
        losses: list[float] = []
        waiting: list[Tensor] = []
        begun = since = time.perf_counter()
        for number in range(1, self._setting.steps + 1):
            waiting.append(self._step(number))
            if number % LOOK_EVERY and number != self._setting.steps:
                continue
            found = torch.stack(waiting).tolist()
            now = time.perf_counter()
            if losses:
                self.seconds.append((now - since) / len(found))
            since = now
            waiting.clear()
            for loss in found:
                losses.append(loss)
                if not math.isfinite(loss):
                    break
            if not math.isfinite(losses[-1]):
                break
        self.seconds = self.seconds or [(since - begun) / len(losses)]
        return losses

    def _step(self, number: int) -> Tensor:
        setting, optimizer = self._setting, self._optimizer
        set_rate(optimizer, setting.rate(number))
        measured = isinstance(optimizer, NarrowOptimizer) and _due(number, setting.gauge_every)
        if isinstance(optimizer, NarrowOptimizer):
            optimizer.gauges = measured
        loss = self.gradients(moved(self._task.draw(), setting.device))
        optimizer.step()
        if measured:
            self._stats[number] = UpdateStats.total(list(optimizer.last_stats.values()))
        return loss

    def gauges(self) -> dict[str, list[float]]:
        """Of the measured steps their numbers, what the updates' quality was and how many were lost.

        Stored: of all that is kept, low words too. Visible: of the weight that the next forward pass sees.
        """
        stats = list(self._stats.values())
        return {
            "step": list(self._stats),
            "edq": [s.effective_descent_quality for s in stats],
            "visible_edq": [s.visible_descent_quality for s in stats],
            "lost": [s.lost_updates for s in stats],
            "visible_lost": [s.lost_visible_updates for s in stats],
        }


@torch.no_grad()
def evaluate(model: nn.Module, task: LanguageTask, setting: Setting) -> float:
    """Mean validation loss, a step's windows at a time."""

    def parts() -> Iterator[tuple[Tensor, int]]:
        held_out = task.validation()
        count = len(next(iter(held_out.values())))
        for first in range(0, count, setting.batch):
            examples = {name: tensor[first : first + setting.batch] for name, tensor in held_out.items()}
            yield task.loss(model, moved(examples, setting.device)), len(next(iter(examples.values())))

    return mean_loss(parts())


def moved(examples: Examples, device: str) -> Examples:
    """Examples on the device."""
    if device == "cpu":
        return examples
    return {name: t.pin_memory().to(device, non_blocking=True) for name, t in examples.items()}


def _due(number: int, every: int) -> bool:
    # The second step is the first whose moments are averages.
    return every > 0 and (number % every == 0 or number == 2)


def _curve(losses: list[float], points: int = 100) -> list[list[float]]:
    """Steps and mean losses up to them, at most so many."""
    width = max(1, math.ceil(len(losses) / points))
    return [
        [min(first + width, len(losses)), statistics.fmean(losses[first : first + width])]
        for first in range(0, len(losses), width)
    ]
