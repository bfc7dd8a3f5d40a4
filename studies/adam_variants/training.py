"""What `adam_variants` compares, and one run of it: optimizers of the 8-bit paper in 32 and in 8 bits, and others'.

A family is an equation; its first row keeps 32 bits, and the learning rate that is best for that one is
everybody's, as in the paper, which changes nothing but the states. Weights and gradients are fp32, so that what
two rows of a family differ in is what they keep. 8-bit rows of this library have `log8` states, its default, or
the paper's codes.

A run is a language model, a masked one, characters in pictures, or an ablated 8-bit Adam: the 8-bit study's own run
(`eight_bit_adam`), at a learning rate above the one that was chosen, where parts that only seemed to be needed
show whether they are.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge._schedule import schedule
from narrowgauge.optim import SGD, Adagrad, Adam
from narrowgauge.trainers import validation_windows
from studies.adam_variants import glyphs
from studies.bytes_and_loss import rows as bytes_rows
from studies.eight_bit_adam import plan as planned
from studies.eight_bit_adam import training as eight_bit_adam
from studies.shared import language
from studies.shared.gather import Training
from studies.shared.language import Result, Setting

BETA2 = planned.BASELINE.beta2
WARMUP = 0.1  # of the steps
MOMENTUM = 0.9
Options = dict[str, Any]
Make = Callable[[nn.Module, Options], torch.optim.Optimizer]


@dataclass(frozen=True)
class Variant:
    """An optimizer."""

    name: str  # in results and tables
    title: str  # what is kept, in a line
    family: str  # whose learning rate it has: adam, adafactor, adagrad or momentum
    make: Make = field(repr=False)  # makes it of a model, from `lr`, `betas`, `eps` and `seed`
    package: str | None = None  # that must be installed; None for this library and torch
    gpu: bool = False  # whether it runs on a GPU alone

    def refusal(self, device: str) -> str | None:
        """Why it cannot be run here; None if it can."""
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return f"it takes a GPU, this is {device}" if self.gpu and device == "cpu" else None


def _adam(states: str) -> Make:
    return lambda model, o: Adam(list(model.named_parameters()), o["lr"], o["betas"], o["eps"], states=states)


def _adagrad(states: str) -> Make:
    return lambda model, o: Adagrad(list(model.named_parameters()), o["lr"], states=states)


def _sgd(states: str) -> Make:
    return lambda model, o: SGD(list(model.named_parameters()), o["lr"], MOMENTUM, states=states)


def _adafactor(model: nn.Module, o: Options) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), o["lr"], weight_decay=0.0)


def _peer(make: Callable[[list[nn.Parameter], Options], torch.optim.Optimizer]) -> Make:
    """An AdamW of another library, without decay: an Adam."""

    def made(model: nn.Module, o: Options) -> torch.optim.Optimizer:
        torch.manual_seed(o["seed"])  # torchao draws from torch's own generator
        return make(list(model.parameters()), {"weight_decay": 0.0} | {k: o[k] for k in ("lr", "betas", "eps")})

    return made


def _bitsandbytes_sgd(model: nn.Module, o: Options) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.SGD8bit(model.parameters(), o["lr"], momentum=MOMENTUM)


def _flashoptim(params: list[nn.Parameter], options: Options) -> torch.optim.Optimizer:
    import flashoptim

    # Weights are fp32 here: low words beside them would be empty, and are refused.
    return flashoptim.FlashAdamW(params, **options, master_weight_bits=None)


def _flashoptim_sgd(model: nn.Module, o: Options) -> torch.optim.Optimizer:
    import flashoptim

    return flashoptim.FlashSGD(list(model.parameters()), lr=o["lr"], momentum=MOMENTUM, master_weight_bits=None)


_LOG8 = "logarithmic 8-bit states, this library's default"
_PAPERS = "the paper's 8-bit states"
_BITSANDBYTES, _TORCHAO = _peer(bytes_rows._bitsandbytes), _peer(bytes_rows._torchao("AdamW8bit"))
VARIANTS = (
    Variant("32-bit Adam", "fp32 states", "adam", _adam("fp32")),
    Variant("8-bit Adam", _LOG8, "adam", _adam("log8")),
    Variant("8-bit Adam, dynamic", _PAPERS, "adam", _adam("8bit")),
    Variant("bitsandbytes Adam8bit", "its 8-bit states", "adam", _BITSANDBYTES, "bitsandbytes", True),
    Variant("torchao Adam8bit", "its 8-bit states", "adam", _TORCHAO, "torchao"),
    Variant("FlashAdam", "companded 8-bit states", "adam", _peer(_flashoptim), "flashoptim", True),
    Variant("32-bit Adafactor", "torch's: v as an outer product, no m", "adafactor", _adafactor),
    Variant("32-bit AdaGrad", "an fp32 sum of squares", "adagrad", _adagrad("fp32")),
    Variant("8-bit AdaGrad", _LOG8, "adagrad", _adagrad("log8")),
    Variant("8-bit AdaGrad, dynamic", _PAPERS, "adagrad", _adagrad("8bit")),
    Variant("32-bit Momentum", "an fp32 momentum", "momentum", _sgd("fp32")),
    Variant("8-bit Momentum", _LOG8, "momentum", _sgd("log8")),
    Variant("8-bit Momentum, dynamic", _PAPERS, "momentum", _sgd("8bit")),
    Variant("bitsandbytes SGD8bit", "its 8-bit state", "momentum", _bitsandbytes_sgd, "bitsandbytes", True),
    Variant("FlashSGD", "a companded 8-bit state", "momentum", _flashoptim_sgd, "flashoptim", True),
)
# What each task is trained with, and the learning rates of which a family's 32-bit row takes the best.
FAMILIES = {"language": ("adam", "adafactor", "adagrad"), "masked": ("adam", "adafactor"), "images": ("momentum",)}
RATES = {
    "adam": (1e-3, 2e-3, 4e-3, 8e-3),
    "adafactor": (0.03, 0.1, 0.3, 1.0),
    "adagrad": (0.01, 0.02, 0.05, 0.1),
    "momentum": (0.03, 0.1, 0.3, 1.0),
}


def variant(name: str) -> Variant:
    """A row by its name."""
    return next(found for found in VARIANTS if found.name == name)


def family(name: str) -> list[Variant]:
    """The rows of a family, 32 bits first."""
    return [found for found in VARIANTS if found.family == name]


@dataclass(frozen=True)
class Plan:
    """What all runs share."""

    # Of the two language tasks, but for model and learning rate.
    language: Setting = field(
        default_factory=lambda: Setting(
            megabytes=24, model="mini", vocabulary=4096, sequence=128, batch=32, steps=500, warmup=50, clip=0.0,
            eps=planned.BASELINE.eps, weight_decay=0.0, gauge_every=0, windows=256, stable_embedding=True,
        )
    )  # fmt: skip
    models: tuple[str, str] = ("mini", "roberta-micro")  # of the causal and the masked task
    image_steps: int = 600
    image_batch: int = 256
    image_width: int = 32  # the network's first
    validated: int = 16  # batches of held-out images
    ablation_steps: int = 400  # of a run of the ablation, on the causal model

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
    """Make a run; a RuntimeError says that the row's optimizer cannot be used here."""
    if task.kind == "ablation":
        return _ablation(task, plan)
    chosen = variant(task.row)
    reason = chosen.refusal(plan.device)
    if reason is not None:
        raise RuntimeError(reason)
    if task.kind == "images":
        return _images(task, plan, chosen)
    warmup = max(1, round(WARMUP * plan.language.steps))
    setting = replace(plan.language, model=plan.models[task.kind == "masked"], lr=task.lr, warmup=warmup)
    # torchao compiles its step, once for each learning rate that is a number.
    rate = torch.tensor(task.lr, device=plan.device) if chosen.package == "torchao" else task.lr

    def make(model: nn.Module, options: Options) -> torch.optim.Optimizer:
        return chosen.make(model, options | {"lr": rate})

    return language.train(make, setting, BETA2, task.seed)


def _images(task: Task, plan: Plan, chosen: Variant) -> Result:
    """Characters in pictures."""
    begun, steps = time.perf_counter(), plan.image_steps
    model = glyphs.network(task.seed, plan.image_width).to(plan.device)
    optimizer = chosen.make(model, {"lr": task.lr, "betas": (0.9, BETA2), "eps": 1e-8, "seed": task.seed})
    batches = glyphs.Glyphs(glyphs.TRAINED, plan.image_batch, task.seed)

    def step(number: int) -> Tensor:
        warmup = round(WARMUP * steps)
        rate = task.lr * schedule("cosine", number, steps=steps, warmup=warmup, final=0.0)
        language.set_rate(optimizer, rate)
        images, labels = (t.to(plan.device) for t in next(batches))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    ((losses, seconds),) = language.looks(steps, step, every=steps)
    validation, accuracy = glyphs.validate(model, plan.validated, plan.image_batch, plan.device)
    good = math.isfinite(validation)
    return {
        "validation_loss": validation if good else None,
        "training_loss": statistics.fmean(losses[-language.LAST :]) if good else None,
        "accuracy": accuracy if good else None,
        "diverged": not good,
        "bytes": language.measured_bytes(model, optimizer),
        "step_ms": 1e3 * seconds,
        "seconds": time.perf_counter() - begun,
    }


def name_of(arm: planned.Arm) -> str:
    """`dynamic, blocks, stable embedding`."""
    states = "32-bit" if arm.codebook is None else f"{arm.codebook}, {'blocks' if arm.blocks else 'tensor'}"
    return f"{states}, {'stable' if arm.stable else 'usual'} embedding"


def _ablation(task: Task, plan: Plan) -> Result:
    """The 8-bit study's run; its CUDA graph makes a step of a small model several times as fast."""
    setting, steps = plan.language, plan.ablation_steps
    training = Training(
        setting.data, plan.models[0], setting.vocabulary, steps, setting.batch, setting.sequence, task.lr,
        max(1, round(WARMUP * steps)), BETA2, task.seed, plan.device,
    )  # fmt: skip
    arm = next(arm for arm in planned.ARMS if name_of(arm) == task.row)
    trial = replace(arm.base, lr=task.lr, seed=task.seed)
    found = eight_bit_adam.train(trial, training, *_on_device(setting), graph=plan.device != "cpu")
    # Of a run that was ended early there is no mean.
    return found | {"diverged": found["unstable"] is not None}


@functools.lru_cache(maxsize=1)
def _on_device(setting: Setting) -> tuple[Tensor, Tensor]:
    """Tokens to train on, windows to validate on."""
    _, tokens = language.text_of(setting.data, setting.megabytes, setting.vocabulary)
    windows = validation_windows(tokens.validation, setting.sequence, 128)
    return tokens.train.to(setting.device), windows.to(setting.device)
