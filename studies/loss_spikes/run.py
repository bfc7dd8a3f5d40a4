"""A loss spike, the RMS spike before it, and the optimizer that bears it: half a minute on a CPU.

A small network reads words and images, each through an embedding of its own, and names their class. Every sample
comes with a weight, as curated data do. For 300 steps the images' weight is 1/30; then another part of the data
begins, where it is 1. From one step to the next the gradient of the image embedding is 30 times larger, while the
loss of a sample stays what it was: the switch itself costs nothing. What follows is the optimizer's doing.

AdamW divides by the root of a second moment that looks back 1000 steps (β2 = 0.999) and hardly sees the switch:
RMS_t of the embedding says so at once. The updates are many times too long, and the loss follows a few steps
later. A second moment that looks back 20 steps, gradient clipping and StableAdamW's update clipping are put
beside it, and the latter by the first moment instead of the gradient. Whoever wants to see their own loop like
this finds all that it takes in `train`.

    python -m studies.loss_spikes.run --out runs/spikes.json

With `--records FOLDER` the first run of AdamW is watched as well: `narrowgauge report FOLDER` is its page.

Source: Wortsman et al. 2023, Section 3.4 and 3.5, Figures 4, 5 and 20, Appendix E.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgauge as ng
from studies.shared import options

WORDS, PIXELS, WIDTH, CLASSES = 32, 64, 64, 16
SHARPNESS = 4.0  # of the classes: how far their scores are apart, against the noise in the labels
EMBEDDING, MIDDLE = "embed_pixels.weight", "blocks.1.up.weight"


@dataclass(frozen=True)
class Plan:
    """What all runs share."""

    steps: int = 400
    switch: int = 300  # the last step of the first part of the data
    quiet: float = 1 / 30  # weight of an image there
    batch: int = 128  # of words, and as many images
    brightness: float = 2.0  # the mean of every pixel; their standard deviation is 1
    lr: float = 4e-3
    warmup: int = 50
    judged_from: int = 101  # the heuristics' warm-up
    eps: float = 1e-6
    weight_decay: float = 0.01


@dataclass(frozen=True)
class Way:
    """How a run is optimized."""

    optimizer: str
    beta2: float
    clip: float | None = None


BY_FIRST_MOMENT = "StableAdamW, m² for g²"
WAYS = (
    Way("AdamW", 0.999), Way("AdamW", 0.95), Way("AdamW", 0.999, 1.0), Way("StableAdamW", 0.999),
    Way(BY_FIRST_MOMENT, 0.999),
)  # fmt: skip


class Block(nn.Module):
    """A residual block: x + down(gelu(up(norm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TwoEmbeddings(nn.Module):
    """Words (batch, WORDS) and images (batch, PIXELS) to scores (2 batch, CLASSES), words first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_words = nn.Linear(WORDS, WIDTH)
        self.embed_pixels = nn.Linear(PIXELS, WIDTH, bias=False)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor, images: Tensor) -> Tensor:
        x = torch.cat([self.embed_words(words), self.embed_pixels(images)])
        return self.head(self.norm(self.blocks(x)))


class Data:
    """Batches without an end: words and images whose classes a fixed linear map says, with noise."""

    def __init__(self, batch: int, brightness: float, seed: int) -> None:
        self.batch, self.brightness = batch, brightness
        self.generator = torch.Generator().manual_seed(seed)
        self.of_words = self._normal(WORDS, CLASSES) * SHARPNESS / WORDS**0.5
        self.of_images = self._normal(PIXELS, CLASSES) * SHARPNESS / PIXELS**0.5

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        """Words, images, and the classes of both."""
        words, images = self._normal(self.batch, WORDS), self._normal(self.batch, PIXELS)
        scores = torch.cat([words @ self.of_words, images @ self.of_images])
        classes = scores.softmax(-1).multinomial(1, generator=self.generator)[:, 0]
        return words, images + self.brightness, classes


class ByFirstMoment(torch.optim.Optimizer):
    """StableAdamW with the first moment in the ratio that clips: its authors tried it and found it worse (F.1).

    Step by step in fp32, in their Algorithm 2's words: with debiased moments m and u, the learning rate is divided
    by max(1, sqrt(mean of m² / max(u, ε²))).
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._step = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self._step += 1
        for group in self.param_groups:
            (beta1, beta2), eps = group["betas"], group["eps"]
            for p in group["params"]:
                state = self.state[p] or {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                self.state[p] = state
                state["m"].lerp_(p.grad, 1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m, u = (state[k] / (1 - beta**self._step) for k, beta in (("m", beta1), ("v", beta2)))
                lr = group["lr"] / (m.square() / u.clamp_min(eps**2)).mean().sqrt().clamp_min(1.0)
                p.sub_(lr * (m / (u.sqrt() + eps) + group["weight_decay"] * p))


MAKERS = {"AdamW": torch.optim.AdamW, "StableAdamW": ng.optim.StableAdamW, BY_FIRST_MOMENT: ByFirstMoment}


def make(way: Way, model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """torch's AdamW, our StableAdamW, or the one that its authors left."""
    return MAKERS[way.optimizer](model.parameters(), plan.lr, (0.9, way.beta2), plan.eps, plan.weight_decay)


def rms(optimizer: torch.optim.Optimizer, p: Tensor, beta2: float, eps: float, step: int) -> float:
    """RMS_t of a parameter, from the state of torch's optimizers or of ours."""
    state = optimizer.state[p]
    second = state["exp_avg_sq"] if "exp_avg_sq" in state else state["v"]
    return float(ng.gauges.rms_ratio(p.grad, second / (1 - beta2**step), eps))


def train(way: Way, plan: Plan, seed: int, records: Path | None = None) -> dict[str, Any]:
    """One run, with the alarms that a loop of your own would have.

    With a folder for records it is watched from outside, too: all gauges at every fifth step, RMS_t of two
    tensors at every one.
    """
    torch.manual_seed(seed)
    model, data = TwoEmbeddings(), Data(plan.batch, plan.brightness, seed)
    optimizer = make(way, model, plan)
    watched: Any = contextlib.nullcontext()
    if records is not None:
        records.mkdir(parents=True, exist_ok=True)
        watched = ng.gauges.watch(
            model, optimizer, 5, path=records, rms_of=[EMBEDDING, MIDDLE], warmup=plan.judged_from - 1
        )
    looked_at = {"embedding": model.get_parameter(EMBEDDING), "middle": model.get_parameter(MIDDLE)}
    loss_alarm = ng.gauges.LossSpikes(warmup=plan.judged_from - 1)
    rms_alarms = {name: ng.gauges.RmsSpikes(warmup=plan.judged_from - 1) for name in looked_at}
    found: dict[str, Any] = {"loss": [], "loss_spikes": []}
    for name in looked_at:
        found |= {f"{name}_rms": [], f"{name}_spikes": []}
    with watched as watch:
        for step in range(1, plan.steps + 1):
            words, images, classes = data.next()
            each = F.cross_entropy(model(words, images), classes, reduction="none")
            weight = torch.ones_like(each)
            weight[plan.batch :] = 1.0 if step > plan.switch else plan.quiet
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * min(1.0, step / plan.warmup)
            optimizer.zero_grad()
            torch.autograd.backward((weight * each).sum() / plan.batch)
            if watch is not None:
                watch.loss(each.detach().mean())
            if way.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), way.clip)
            optimizer.step()

            # The loss without weights, which the switch does not touch.
            found["loss"].append(float(each.detach().mean()))
            spike = loss_alarm.add(found["loss"][-1])
            if spike is not None:
                found["loss_spikes"].append([spike.step, spike.seen])
            for name, p in looked_at.items():
                found[f"{name}_rms"].append(rms(optimizer, p, way.beta2, plan.eps, step))
                spike = rms_alarms[name].add(found[f"{name}_rms"][-1])
                if spike is not None:
                    found[f"{name}_spikes"].append(spike.step)
    return {"way": asdict(way), "seed": seed} | found


def main(
    out: options.Out,
    seeds: Annotated[int, typer.Option(min=1, help="How many: 0, 1, 2, ...")] = 6,
    lr: options.Rate = Plan.lr,
    brightness: Annotated[
        float, typer.Option(help="Mean of every pixel, in standard deviations.")
    ] = Plan.brightness,
    records: Annotated[Path | None, typer.Option(help="A folder for the gauges' records of the first run.")] = None,
    steps: Annotated[int, typer.Option(min=360, help="Steps, 300 of them before the switch.")] = Plan.steps,
    check: options.Check = False,
) -> None:
    """Make the gradient of an embedding 30 times larger, and see what optimizers do."""
    plan, begun = Plan(steps=steps, brightness=brightness, lr=lr), time.perf_counter()
    if check:
        plan, seeds = replace(plan, steps=130, switch=90, judged_from=31), 1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small products are faster so
    try:
        # Those of one seed share their first weights and their data; the very first may leave records.
        pairs = [(seed, way) for seed in range(seeds) for way in WAYS]
        runs = [train(way, plan, seed, None if i else records) for i, (seed, way) in enumerate(pairs)]
    finally:
        torch.set_num_threads(threads)
    results = {
        **options.origin("cpu"),
        "training": asdict(plan) | {"model": "two embeddings, two blocks", "seed": list(range(seeds))},
        "parameters": sum(p.numel() for p in TwoEmbeddings().parameters()),
        "seconds": time.perf_counter() - begun,
        "runs": runs,
    }
    options.write(out, results)


if __name__ == "__main__":
    typer.run(main)
