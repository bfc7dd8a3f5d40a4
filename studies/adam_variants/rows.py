"""Optimizers of the 8-bit paper in 32 and in 8 bits, and other libraries': what `adam_variants` compares.

A family is an equation; its first row keeps 32 bits, and the learning rate that is best for that one is
everybody's, as in the paper, which changes nothing but the states. Weights and gradients are fp32, so that what
two rows of a family differ in is what they keep. 8-bit rows of this library have `log8` states, its default, or
the paper's codes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from narrowgauge.optim import SGD, Adagrad, Adam
from studies.bytes_and_loss import rows as bytes_rows

Options = dict[str, Any]
Make = Callable[[nn.Module, Options], torch.optim.Optimizer]
MOMENTUM = 0.9


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
    def make(model: nn.Module, o: Options) -> torch.optim.Optimizer:
        return Adam(list(model.named_parameters()), o["lr"], o["betas"], o["eps"], states=states)

    return make


def _adagrad(states: str) -> Make:
    def make(model: nn.Module, o: Options) -> torch.optim.Optimizer:
        return Adagrad(list(model.named_parameters()), o["lr"], states=states)

    return make


def _sgd(states: str) -> Make:
    def make(model: nn.Module, o: Options) -> torch.optim.Optimizer:
        return SGD(list(model.named_parameters()), o["lr"], MOMENTUM, states=states)

    return make


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
VARIANTS = (
    Variant("32-bit Adam", "fp32 states", "adam", _adam("fp32")),
    Variant("8-bit Adam", _LOG8, "adam", _adam("log8")),
    Variant("8-bit Adam, dynamic", _PAPERS, "adam", _adam("8bit")),
    Variant(
        "bitsandbytes Adam8bit", "its 8-bit states", "adam", _peer(bytes_rows._bitsandbytes), "bitsandbytes", True
    ),
    Variant("torchao Adam8bit", "its 8-bit states", "adam", _peer(bytes_rows._torchao("AdamW8bit")), "torchao"),
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
