"""What `loss_scaling` compares: formats with their loss scalers, and what is done to gradients on purpose.

All fp16 rows but one are the lecture's mixed precision: weights, activations and gradients in fp16, and an fp32
master copy of the weights that the optimizer moves. `bf16` is the same in the other 16-bit format, so that what
fp16 loses is told from what 16 bits lose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from narrowgauge import recipes, scaling
from narrowgauge.recipes import Recipe

FULL = 2.0**16  # where torch's scaler begins, and the paper's fixed one stays
LECTURE = 8.0
MIDDLE = 1024.0
FALLEN = 2.0**-4  # what twenty halvings leave of `FULL`
TINY = 2.0**-8
Maker = Callable[[str, int], scaling.LossScaler]  # of a device type, and good steps until a dynamic scale doubles


@dataclass(frozen=True)
class Row:
    """A format and a loss scaler."""

    name: str  # in results, tables and pictures
    title: str  # what it is, in a line
    recipe: Recipe  # format of weights and gradients, and whether there is a master copy
    scaler: Maker | None = None  # makes the loss scaler; None for none


def _dynamic(device: str, interval: int) -> scaling.LossScaler:
    return scaling.DynamicLossScaler(device, FULL, growth_interval=interval)


def _fixed(scale: float) -> Maker:
    return lambda device, interval: scaling.StaticLossScaler(device, scale)


def _by_tensor(device: str, interval: int) -> scaling.LossScaler:
    return scaling.TensorLossScaler(device, FULL)


MASTER = Recipe("fp16-master", "fp16, fp32 master weights", torch.float16, "master")
ALONE = Recipe("fp16-plain", "fp16 weights alone", torch.float16)

ROWS = (
    Row("fp32", "fp32", recipes.get("fp32")),
    Row("fp16", "fp16 with master weights, loss not scaled", MASTER),
    Row("fp16, dynamic", "scale from 2¹⁶ on, halved at inf", MASTER, _dynamic),
    Row("fp16, c = 8", "the lecture's fixed scale", MASTER, _fixed(LECTURE)),
    Row("bf16", "bf16 with master weights", recipes.get("D")),
    Row("fp16, c = 1024", "a fixed scale", MASTER, _fixed(MIDDLE)),
    Row("fp16, c = 1/16", "what twenty halvings leave of 2¹⁶", MASTER, _fixed(FALLEN)),
    Row("fp16, c = 1/256", "gradients of a mean over 256 times as many tokens", MASTER, _fixed(TINY)),
    Row("fp16, by tensor", "scale 2¹⁶, a tensor with inf skipped", MASTER, _by_tensor),
    Row("fp16 alone, dynamic", "no master weights", ALONE, _dynamic),
)

# After a spike: the paper's two, and a global skip at a scale that stays, which tells skipping from halving.
SPIKED = (
    Row("dynamic", "torch's: the step skipped whole, the scale halved", MASTER, _dynamic),
    Row("by tensor", "the paper's: fixed scale, bad tensors skipped", MASTER, _by_tensor),
    Row("whole step", "fixed scale, the step skipped whole", MASTER, _fixed(FULL)),
)


@dataclass(frozen=True)
class Injection:
    """What is done to a training from one step on."""

    name: str  # in results and tables
    title: str  # in a line
    steps: int = 0  # for how many steps
    factor: float = 1.0  # of the loss, and so of every gradient
    breaks: bool = False  # whether the gradient of the token embedding is made infinite

    def on(self, number: int, first: int) -> bool:
        """Whether a step is one of those."""
        return first <= number < first + self.steps

    def break_gradient(self, embedding: Tensor) -> None:
        """Put an infinity into the embedding's gradient."""
        if self.breaks and embedding.grad is not None:
            embedding.grad.view(-1)[0] = torch.inf


INJECTIONS = (
    Injection("none", "nothing"),
    Injection("inf × 20", "the embedding's gradient infinite for 20 steps", 20, breaks=True),
    Injection("large × 20", "all gradients 2¹⁵ times as large for 20 steps", 20, factor=2.0**15),
    Injection("inf × 1", "the embedding's gradient infinite for 1 step", 1, breaks=True),
)


def row(name: str) -> Row:
    """A row by its name, of either list."""
    return next(found for found in (*ROWS, *SPIKED) if found.name == name)


def injection(name: str) -> Injection:
    """An injection by its name."""
    return next(found for found in INJECTIONS if found.name == name)


def embedding_of(model: nn.Module) -> Tensor:
    """The first layer's weight, the token embedding: the patch embedding's counterpart."""
    return model.get_input_embeddings().weight  # type: ignore[operator,no-any-return]
