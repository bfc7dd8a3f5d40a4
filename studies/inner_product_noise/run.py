"""How noisy 8-bit inner products are, and how that grows with their length: the SwitchBack paper's Appendix D.

    python -m studies.inner_product_noise.run [--device cuda --model gpt2 ...] --out NAME.json

A linear layer's three matrix products are inner products of vectors of length k: of the input's features for the
output, of the output's for the gradient of the input, of all tokens for the gradient of the weight. From a real run
come X, W and G (the gradient of the output). Vectors of k numbers are made of real ones by keeping k of their
elements, the same for all; both are quantized; the variance of what that changes in their inner product is measured
against k, and against what Equation 12 predicts from the measured errors:

    noise(k) = k (σ_ε² σ_v² + σ_ξ² σ_u² + σ_ε² σ_ξ²)

`row` gives each vector a scale, its largest magnitude, which grows with k; `tensor` keeps that of the whole matrix
for every k, so that σ_ε does not depend on k, as the appendix assumes. Normal numbers are the control.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import typer
from torch import Tensor

from narrowgauge.formats import Coder, coder
from studies.shared import gather, options
from studies.shared.gather import LinearTensors, Trained, Training

SMALLEST_K = 64
VECTORS = 128  # of each kind: their products make 128² samples
DRAWS = 4  # of vectors and of the elements that are kept
MAPS = {"int8": "linear", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
# Format of the first and the second operand; gradients come first, and e5m2 is for them.
FORMATS = {"int8": ("int8", "int8"), "e4m3": ("e4m3", "e4m3"), "e5m2 × e4m3": ("e5m2", "e4m3")}
SCALES = ("row", "tensor")
# Curves whose slope is fitted; what a summary has of the largest k.
SLOPES = ("noise", "signal", "relative", "predicted")
ENDS = ("relative", "normalised", "error_a", "error_b", "crest_a", "crest_b")
SHARES = ("along_signal", "zero_a", "zero_b")


@dataclass(frozen=True, eq=False)
class Operands:
    """One of the three products of a layer, or the control: rows of `a` times rows of `b`."""

    layer: str  # whose
    product: str  # ``"output"``, ``"grad_input"``, ``"grad_weight"`` or ``"normal"``
    # a, b: (vectors, length), (vectors, length): the whole matrices, of which vectors are drawn
    a: Tensor
    b: Tensor

    @property
    def schemes(self) -> dict[str, tuple[tuple[str, str], str]]:
        """Formats of both operands and what a scale serves, by name; e5m2 where the first is a gradient."""
        gradient = self.product.startswith("grad")
        names = [name for name in FORMATS if gradient or name != "e5m2 × e4m3"]
        return {f"{name} {scale}": (FORMATS[name], scale) for name in names for scale in SCALES}

    @property
    def lengths(self) -> list[int]:
        """Powers of two up to the length of the vectors, and that length."""
        longest = self.a.shape[1]
        powers = range(int(math.log2(SMALLEST_K)), math.ceil(math.log2(longest)))
        return [2**power for power in powers] + [longest]


def products(layer: LinearTensors) -> Iterator[Operands]:
    """The three products of a linear layer: Y = X Wᵀ, the input's gradient G W, the weight's Gᵀ X."""
    yield Operands(layer.name, "output", layer.x, layer.w)
    yield Operands(layer.name, "grad_input", layer.g, layer.w.T)
    yield Operands(layer.name, "grad_weight", layer.g.T, layer.x.T)


def control(length: int, seed: int, device: str) -> Operands:
    """Independent standard normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(VECTORS, length, generator=generator).to(device) for _ in range(2))
    return Operands("normal", "normal", a, b)


def quantized(x: Tensor, code: Coder, largest: Tensor) -> Tensor:
    """x rounded to the nearest code times its scale, in float64."""
    scaled = torch.where(largest > 0, x / largest, 0.0)
    return code.decode(code.encode(scaled)).to(torch.float64) * largest.to(torch.float64)


# What is kept of each product at each k, in the order of `_one`.
QUANTITIES = (
    "noise", "signal", "along_signal", "predicted", "a", "b", "error_a", "error_b", "crest_a", "crest_b",
    "zero_a", "zero_b",
)  # fmt: skip


def noise(operands: Operands, k: int, seed: int) -> dict[str, dict[str, float]]:
    """What quantization does to inner products of length k: means over the draws, by format and scale.

    Returns:
        For each scheme: noise, the variance of <û, v̂> - <u, v>; signal, that of <u, v>; along_signal, the squared
        correlation of the two; predicted, Equation 12 with the measured variances; a and b, σ_u² and σ_v²; error_a
        and error_b, σ_ε² and σ_ξ²; crest_a and crest_b, what a scale stands for over the root mean square of what
        it scales; zero_a and zero_b, which share of the numbers other than zero became zero.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = [x.abs().max().to(torch.float32) for x in (operands.a, operands.b)]
    found: dict[str, list[Tensor]] = {scheme: [] for scheme in operands.schemes}
    for _ in range(DRAWS):
        kept = torch.randperm(operands.a.shape[1], generator=generator)[:k].to(operands.a.device)
        drawn = []
        for x in (operands.a, operands.b):
            rows = torch.randperm(len(x), generator=generator)[:VECTORS].to(x.device)
            drawn.append(x[rows][:, kept].to(torch.float32))
        for scheme, (formats, scale) in operands.schemes.items():
            scales = [x.abs().amax(dim=1, keepdim=True) for x in drawn] if scale == "row" else whole
            codes = [coder(MAPS[name], True, x.device) for name, x in zip(formats, drawn, strict=True)]
            found[scheme].append(_one(drawn, scales, codes))
    means = {scheme: torch.stack(draws).mean(dim=0).tolist() for scheme, draws in found.items()}
    return {scheme: dict(zip(QUANTITIES, mean, strict=True)) for scheme, mean in means.items()}


def _one(drawn: Sequence[Tensor], scales: Sequence[Tensor], codes: Sequence[Coder]) -> Tensor:
    """All quantities of one draw under one scheme."""
    u, v = exact = [x.to(torch.float64) for x in drawn]
    u8, v8 = kept = [quantized(*each) for each in zip(drawn, codes, scales, strict=True)]
    signal = u @ v.T
    change = u8 @ v8.T - signal
    both = torch.stack([change.flatten(), signal.flatten()])
    variances = [x.square().mean() for x in exact]
    errors = [(x8 - x).square().mean() for x8, x in zip(kept, exact, strict=True)]
    predicted = u.shape[1] * (errors[0] * variances[1] + errors[1] * variances[0] + errors[0] * errors[1])
    crests = [(s.to(torch.float64).square().mean() / var).sqrt() for s, var in zip(scales, variances, strict=True)]
    zeros = [((x8 == 0) & (x != 0)).sum() / (x != 0).sum() for x8, x in zip(kept, exact, strict=True)]
    along = torch.corrcoef(both)[0, 1].square()
    found = (change.var(), signal.var(), along, predicted, *variances, *errors, *crests, *zeros)
    return torch.stack([value.to(torch.float64) for value in found])


def slope(lengths: Sequence[int], values: Sequence[float]) -> float:
    """Of the straight line through log(values) against log(lengths)."""
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def measure(operands: Operands, seed: int) -> dict[str, Any]:
    """All formats and scales of one product of one layer: curves over k, and their slopes."""
    found: dict[str, Any] = {"layer": operands.layer, "product": operands.product, "k": operands.lengths}
    rows = [noise(operands, k, seed) for k in operands.lengths]
    for scheme in operands.schemes:
        row = {key: np.array([row[scheme][key] for row in rows]) for key in QUANTITIES}
        curves = {key: row[key] for key in ("noise", "signal", "predicted", "along_signal")} | {
            "relative": row["noise"] / row["signal"],
            "normalised": row["noise"] / (row["a"] * row["b"]),
            "error_a": np.sqrt(row["error_a"] / row["a"]),
            "error_b": np.sqrt(row["error_b"] / row["b"]),
            **{key: row[key] for key in ("crest_a", "crest_b", "zero_a", "zero_b")},
        }
        slopes = {f"{key}_slope": slope(operands.lengths, curves[key]) for key in SLOPES}
        found[scheme] = {key: curve.tolist() for key, curve in curves.items()} | slopes
    return found


def summary(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per product and scheme: slopes as mean and standard error over the layers; ends, at the largest k.

    The ends are geometric means over the layers, but for the shares, which may be zero.
    """
    found: dict[str, Any] = {}
    for product in dict.fromkeys(row["product"] for row in measured):
        rows = [row for row in measured if row["product"] == product]
        found[product] = {"k": [row["k"][-1] for row in rows]}
        for scheme in (key for key, value in rows[0].items() if isinstance(value, dict)):
            curves = [row[scheme] for row in rows]
            found[product][scheme] = {
                **{f"{key}_slope": gather.mean_and_error([c[f"{key}_slope"] for c in curves]) for key in SLOPES},
                "over_predicted": geometric_mean([c["noise"][-1] / c["predicted"][-1] for c in curves]),
                **{key: geometric_mean([c[key][-1] for c in curves]) for key in ENDS},
                **{key: statistics.fmean(c[key][-1] for c in curves) for key in SHARES},
            }
    return found


def geometric_mean(values: Sequence[float]) -> float:
    """Of numbers above zero."""
    return math.exp(statistics.fmean(map(math.log, values)))


def study(trained: Trained, layers: Iterable[LinearTensors]) -> dict[str, Any]:
    """All products of all layers, and the control: the results."""
    measured, tokens = [], 0
    seed, device = trained.training.seed, trained.training.device
    for layer in layers:
        tokens = len(layer.x)
        for operands in products(layer):
            measured.append(measure(operands, seed))
            print(f"{operands.layer} {operands.product}", flush=True)
    measured.append(measure(control(tokens, seed, device), seed))
    about = {"tokens": tokens, "vectors": VECTORS, "draws": DRAWS}
    return options.rounded(trained.about | about | {"summary": summary(measured), "layers": measured})


def main(
    out: options.Out,
    data: options.Data = Training.data,
    model: options.Model = Training.model,
    vocabulary: options.Vocabulary = Training.vocabulary,
    steps: options.Steps = Training.steps,
    batch: options.Batch = Training.batch,
    sequence: options.Sequence_ = Training.sequence,
    lr: options.Rate = Training.lr,
    seed: options.Seed = Training.seed,
    device: options.Device = Training.device,
    tokens: options.Tokens = 32768,
    check: options.Check = False,
) -> None:
    """Train, quantize the operands of real inner products, and write how noisy they become."""
    options.one_thread(check)
    if check:
        vocabulary, steps, batch, sequence, tokens = 256, 2, 2, 32, 128
    training = Training(data, model, vocabulary, steps, batch, sequence, lr, seed=seed, device=device)
    trained = gather.run(training)
    print(f"trained: loss {trained.about['loss']['last']:.3f}", flush=True)
    layers = gather.gather_linears(trained, tokens)
    with torch.no_grad():
        results = study(trained, layers)
    options.write(out, results)


if __name__ == "__main__":
    typer.run(main)
