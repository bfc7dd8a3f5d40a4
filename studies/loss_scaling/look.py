"""How large gradients are, by powers of two, and what fp16 makes of them under several loss scales.

**Histograms** are of a step in fp32. A bin holds the magnitudes of [2^k, 2^(k+1)), so a loss scale of 2^s shifts
a histogram by s bins and one histogram answers for all scales: in fp16 what lies below 2^-14 / c is subnormal
and loses bits, what lies below 2^-24 / c is under the smallest number, and half of the way down, below 2^-25 / c,
it becomes 0. Zeros are counted apart, and no share includes them. Three kinds of values are looked at: gradients
of weights, gradients of what layers give out (which is where a backward pass underflows first), and what the
optimizer adds to the weights.

**In fp16** the same step is made again: weights rounded to fp16, once in fp32 arithmetic and once in fp16 under
each scale. How far the unscaled gradients are apart is what a scale costs or saves; underflow on the way through
the layers is in it, which no histogram of the outcome shows.

Source: Micikevicius et al. 2017, Sections 3.1 and 3.2, Figures 2 and 3, which the lecture shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LOW, HIGH = -60, 17  # powers of two; what lies outside is counted in the outermost bins
SCALES = (1.0, 8.0, 2.0**10, 2.0**16)
NORMAL, SMALLEST = -14, -24  # fp16's powers: the smallest normal number and the smallest of all

Loss = Callable[[nn.Module], Tensor]
Found = dict[str, Any]


class Histogram:
    """Counts of magnitudes by power of two, of several tensors together."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Count a tensor; its zeros come first in the counts."""
        x = x.detach().float().flatten()
        # A mantissa is in [0.5, 1): the power of x is one less than frexp's.
        power = torch.frexp(x.abs()).exponent.sub_(1).clamp_(LOW, HIGH).sub_(LOW - 1)
        counts = torch.bincount(torch.where(x == 0, 0, power), minlength=HIGH - LOW + 2)
        self._counts = counts if self._counts is None else self._counts + counts

    def found(self) -> Found:
        """Counts from 2^LOW on, and how many zeros."""
        counts = [0] * (HIGH - LOW + 2) if self._counts is None else self._counts.tolist()
        return {"zeros": counts[0], "counts": counts[1:]}


def below(found: Mapping[str, Any], power: float) -> float:
    """Share of the values other than zero that lie below a power of two: of a bin that is cut, none of it."""
    total = sum(found["counts"])
    return sum(count for k, count in enumerate(found["counts"], LOW) if k < power) / total if total else 0.0


def kind_of(name: str, p: Tensor | None = None) -> str:
    """Which kind of tensor a parameter or a module of a language model is, by its name."""
    if p is not None and p.dim() < 2:
        return "norms and biases"
    kinds = {"wpe": "positions", "position": "positions", "wte": "embedding", "embed": "embedding"}
    kinds |= {"lm_head": "logits", "attn": "attention", "attention": "attention", "mlp": "feed-forward"}
    kinds |= {"ln_": "norms", "norm": "norms"}
    return next((kind for part, kind in kinds.items() if part in name), "other")


def gradients(model: nn.Module, loss: Loss) -> Found:
    """Histograms of a backward pass: of weights' gradients and of layers' outputs', by kind. Gradients are left."""
    outputs: dict[str, Histogram] = {}
    with _counted(model, outputs):
        model.zero_grad()
        torch.autograd.backward(loss(model))
    weights: dict[str, Histogram] = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            weights.setdefault(kind_of(name, p), Histogram()).add(p.grad)
    return {
        "weights": {kind: histogram.found() for kind, histogram in weights.items()},
        "outputs": {kind: histogram.found() for kind, histogram in outputs.items()},
    }


@contextmanager
def _counted(model: nn.Module, histograms: dict[str, Histogram]) -> Iterator[None]:
    """Count the gradient of what every layer without children gives out."""

    def keep(histogram: Histogram) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(histogram.add)

        return hook

    hooks = []
    for name, module in model.named_modules():
        kind = kind_of(name)
        if kind != "other" and not [*module.children()] and [*module.parameters()]:
            hooks.append(module.register_forward_hook(keep(histograms.setdefault(kind, Histogram()))))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def in_fp16(model: nn.Module, loss: Loss) -> list[Found]:
    """The same backward pass in fp16 under each scale, against fp32 arithmetic on the same rounded weights.

    Returns:
        For each scale: ``vanished``, the share of elements that are 0 in fp16 and not in fp32; ``subnormal``, the
        share of those not 0 that are; ``infinite``, the share that is not finite; ``error``, the length of the
        difference over that of the fp32 gradient; ``errors``, the same by kind. Of elements that are not finite
        there is no difference.
    """
    wide = copy.deepcopy(model)
    with torch.no_grad():
        for p in wide.parameters():
            p.copy_(p.half())
    narrow = copy.deepcopy(wide).half()
    wide.zero_grad()
    torch.autograd.backward(loss(wide))
    found = []
    for scale in SCALES:
        narrow.zero_grad()
        torch.autograd.backward(loss(narrow) * scale)
        found.append({"scale": scale} | _compared(narrow, wide, scale))
    return found


def _compared(narrow: nn.Module, wide: nn.Module, scale: float) -> Found:
    sums: dict[str, Tensor] = {}
    counts = torch.zeros(5, dtype=torch.int64, device=next(wide.parameters()).device)
    for (name, p), q in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        exact, got = p.grad.double(), q.grad.double()
        good = got.isfinite()
        apart = torch.where(good, got / scale - exact, 0.0)
        kind = kind_of(name, p)
        sums[kind] = sums.get(kind, 0) + torch.stack([apart.square().sum(), exact.square().sum()])
        small = (got != 0) & (got.abs() < 2.0**NORMAL)
        counts += torch.stack([m.sum() for m in (exact != 0, (exact != 0) & (got == 0), got != 0, small, ~good)])
    there, vanished, kept, subnormal, bad = counts.tolist()
    total = torch.stack([*sums.values()]).sum(0)
    return {
        "vanished": vanished / max(1, there),
        "subnormal": subnormal / max(1, kept),
        "infinite": bad / max(1, there),
        "error": _ratio(total),
        "errors": {kind: _ratio(pair) for kind, pair in sums.items()},
    }


def _ratio(pair: Tensor) -> float:
    apart, length = pair.tolist()
    return float((apart / length) ** 0.5) if length else 0.0


class Updates:
    """What a step adds to the weights: begun before the step, asked after it."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [(p, p.detach().clone()) for p in model.parameters()]

    def found(self) -> Found:
        """The histogram of the differences."""
        histogram = Histogram()
        for p, before in self._before:
            histogram.add(p.detach() - before)
        return histogram.found()
