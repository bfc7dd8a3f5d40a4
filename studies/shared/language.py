"""One training of a language model under any optimizer, for the studies that compare many of them.

What is trained on and how its loss is taken comes from `narrowgauge.trainers`, as in `narrowgauge train`:
windows of a text for causal models, covered tokens for masked ones, a warm-up and a cosine. The loop differs
from that command's in what it leaves out (checkpoints, the exported model) and in what it takes: an optimizer
of anybody's. One seed gives every optimizer the same initial weights, rounded to bf16 so that none starts by
losing something, and the same batches.

Bytes are counted in the tensors that exist after the last step. Peers keep moments in tensor subclasses and
tables shared between parameters, so the count takes each piece of memory once, wherever in the state it hangs.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge._schedule import schedule
from narrowgauge.cli._bench._optimizers import tensors_in
from narrowgauge.optim import NarrowOptimizer, UpdateStats
from narrowgauge.trainers import (
    Corpus,
    LanguageTask,
    TokenizedCorpus,
    build_model,
    load_corpus,
    parameter_count,
    tokenize,
)
from narrowgauge.trainers._compare_run import mean_loss
from narrowgauge.trainers._extras import add_stable_embedding
from narrowgauge.trainers._models import preset
from narrowgauge.trainers._task import to_device
from studies.shared import installed, options
from studies.shared.graphed import Gradients

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
    """What all runs of a study share; `beta2` is a run's own."""

    data: Path | None = None  # a text; None for the Python sources installed on this machine
    megabytes: int = 48  # of these, at most
    model: str = "gpt2"
    vocabulary: int = 50257
    sequence: int = 1024
    batch: int = 8  # windows a step
    steps: int = 300
    lr: float = 6e-4
    warmup: int = 60  # steps of the learning rate's rise
    final: float = 0.1  # share of it that is left at the end of the cosine
    beta1: float = 0.9
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0  # norm of all gradients at most, by the optimizer within its step; 0 for no clipping
    gauge_every: int = 10  # steps between measurements of the update; 0 for none
    windows: int = 128  # to validate on
    stable_embedding: bool = False  # the token embedding is the 8-bit paper's, with a layer norm behind it
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


@functools.lru_cache(maxsize=1)
def tokens_of(data: Path | None, vocabulary: int) -> tuple[str, TokenizedCorpus]:
    """A text's name, and its tokens; None for the source of Python's standard library."""
    corpus = load_corpus(data)
    return corpus.source, tokenize(corpus, vocabulary)


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


def about(setting: Setting, training: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a results file says of a study before anything has run."""
    return {
        **options.origin(setting.device),
        "training": setting.plain() | {"seed": 0} | training,
        "data": about_text(setting),
        "parameters": parameters_of(setting, setting.model),
        "rows": list(rows),
    }


def parameters_of(setting: Setting, model: str) -> int:
    """Of a model on the setting's text."""
    return parameter_count(start_of(model, setting.vocabulary, setting.sequence, 0))


@functools.lru_cache(maxsize=3)
def start_of(model: str, vocabulary: int, sequence: int, seed: int) -> nn.Module:
    """Initial weights, in fp32 on the CPU: copied, never trained.

    Rounded to bf16, so that no row starts by losing something.
    """
    built = build_model(model, vocabulary=vocabulary, sequence=sequence, seed=seed)
    with torch.no_grad():
        for p in built.parameters():
            p.copy_(p.to(torch.bfloat16))
    return built


def start(setting: Setting, seed: int) -> nn.Module:
    """Initial weights on the device."""
    model = copy.deepcopy(start_of(setting.model, setting.vocabulary, setting.sequence, seed))
    if setting.stable_embedding:
        add_stable_embedding(model, seed)
    return model.to(setting.device)


def task_of(setting: Setting, seed: int) -> LanguageTask:
    """Windows of the text, drawn from a seed."""
    _, tokens = text_of(setting.data, setting.megabytes, setting.vocabulary)
    return LanguageTask(
        tokens, preset(setting.model).objective, batch=setting.batch, sequence=setting.sequence,
        windows=setting.windows, seed=seed,
    )  # type: ignore[arg-type]  # fmt: skip


def train(make: Maker, setting: Setting, beta2: float, seed: int) -> Result:
    """Train, and say how it went.

    Args:
        make: makes the optimizer of a model in fp32 on its device, which it may cast, from `lr`, `betas`, `eps`,
            `weight_decay`, `max_grad_norm` and `seed`.
        setting: what all runs share.
        beta2: of this run.
        seed: of weights, batches and stochastic rounding.

    Returns:
        What `ended` says; `gauges` by step, `bytes` a parameter, `peak_memory` in bytes (None on a CPU), `passes`
        (eager or from a graph), `step_ms`, `seconds`.
    """
    begun = time.perf_counter()
    device = torch.device(setting.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model = start(setting, seed)
    options = {
        "lr": setting.lr, "betas": (setting.beta1, beta2), "eps": setting.eps, "weight_decay": setting.weight_decay,
        "max_grad_norm": setting.clip or None, "seed": seed,
    }  # fmt: skip
    optimizer = make(model, options)
    task = task_of(setting, seed)
    gradients = Gradients(model, functools.partial(task.loss, model), setting.device)
    stats: dict[int, UpdateStats] = {}

    def step(number: int) -> Tensor:
        set_rate(optimizer, setting.rate(number))
        # The second step is the first whose moments are averages.
        due = setting.gauge_every > 0 and (number % setting.gauge_every == 0 or number == 2)
        if isinstance(optimizer, NarrowOptimizer):
            optimizer.gauges = due
        loss = gradients(to_device(task.draw(), device))
        optimizer.step()
        if due and isinstance(optimizer, NarrowOptimizer):
            stats[number] = UpdateStats.total(list(optimizer.last_stats.values()))
        return loss

    losses: list[float] = []
    times: list[float] = []  # of a step, between looks; the first look has compiled kernels in it
    for found, seconds in looks(setting.steps, step):
        times.append(seconds)
        bad = next((place for place, loss in enumerate(found, 1) if not math.isfinite(loss)), len(found))
        losses += found[:bad]
        if not math.isfinite(losses[-1]):
            break
    return {
        **ended(model, task, setting, losses),
        "gauges": gauges_of(stats),
        "bytes": measured_bytes(model, optimizer),
        "peak_memory": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "passes": gradients.how,
        "step_ms": 1e3 * statistics.median(times[1:] or times),
        "seconds": time.perf_counter() - begun,
    }


def looks(steps: int, step: Callable[[int], Tensor], every: int = LOOK_EVERY) -> Iterator[tuple[Any, float]]:
    """Take steps from 1 on; after every few, what they gave, read from the device at once, and seconds of one."""
    waiting: list[Tensor] = []
    since = time.perf_counter()
    for number in range(1, steps + 1):
        waiting.append(step(number))
        if number % every == 0 or number == steps:
            found = torch.stack(waiting).tolist()
            now = time.perf_counter()
            yield found, (now - since) / len(found)
            since = now
            waiting.clear()


def ended(model: nn.Module, task: LanguageTask, setting: Setting, losses: list[float]) -> Result:
    """How a run ended, in nats a token; None if it diverged, for which one of the last losses is not finite."""
    validation = evaluate(model, task, setting) if all(map(math.isfinite, losses[-LAST:])) else math.nan
    good = math.isfinite(validation)
    return {
        "validation_loss": validation if good else None,
        "training_loss": statistics.fmean(losses[-LAST:]) if good else None,
        "diverged": not good,
        "curve": curve(losses),
    }


def gauges_of(stats: dict[int, UpdateStats]) -> dict[str, list[float]]:
    """Of the measured steps their numbers, what the updates' quality was and how many were lost.

    Stored: of all that is kept, low words too. Visible: of the weight that the next forward pass sees.
    """
    return {
        "step": list(stats),
        "edq": [s.effective_descent_quality for s in stats.values()],
        "visible_edq": [s.visible_descent_quality for s in stats.values()],
        "lost": [s.lost_updates for s in stats.values()],
        "visible_lost": [s.lost_visible_updates for s in stats.values()],
    }


@torch.no_grad()
def evaluate(model: nn.Module, task: LanguageTask, setting: Setting) -> float:
    """Mean validation loss, a step's windows at a time."""
    device = torch.device(setting.device)

    def parts() -> Iterator[tuple[Tensor, int]]:
        held_out = task.validation()
        count = len(next(iter(held_out.values())))
        for first in range(0, count, setting.batch):
            examples = {name: tensor[first : first + setting.batch] for name, tensor in held_out.items()}
            yield task.loss(model, to_device(examples, device)), len(next(iter(examples.values())))

    return mean_loss(parts())


def curve(losses: Sequence[float], points: int = 100) -> list[list[float]]:
    """Steps and mean losses up to them, at most so many."""
    width = max(1, math.ceil(len(losses) / points))
    return [
        [min(first + width, len(losses)), statistics.fmean(losses[first : first + width])]
        for first in range(0, len(losses), width)
    ]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """A learning rate for all groups, in place where an optimizer wants a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao refuses a number, and a captured step would not see it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def measured_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Bytes a trained parameter: weights, gradients, and whatever hangs in the optimizer's state."""
    trained = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(dict(optimizer.state))}
    parts = {
        "weights": sum(p.nbytes for p in trained),
        "gradients": sum(p.grad.nbytes for p in trained if p.grad is not None),
        "states": sum(kept.values()),
    }
    weighed = {name: size / count for name, size in parts.items()}
    return weighed | {"total": sum(weighed.values())}
