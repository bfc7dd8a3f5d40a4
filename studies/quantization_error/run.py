"""What the maps of 8-bit states cost Adam: Table 6, Figures 4 and 5 of the 8-bit optimizers' paper, measured anew.

    python -m studies.quantization_error.run [--device cuda --model gpt2 ...] --out NAME.json

Moments are copied from a real run at three steps. Each map quantizes them, over whole tensors and in blocks, and
the update that the quantized moments give is compared with the exact one: m alone quantized, both quantized, and
both quantized with gradients so small that epsilon counts as much as it did for the paper (`matched_epsilon`).

Besides the results file, NAME_maps.npz has the maps of Figure 4 at half their resolution. `studies/render.py` draws
tables and pictures from the two.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import typer
from torch import Tensor

from narrowgauge.formats import codebook
from narrowgauge.gauges import AdamErrorMap, QuantizationError, adam_error_map, quantization_error
from narrowgauge.gauges._quantization import adam_update
from narrowgauge.storage import Quantized, quantize
from studies.shared import gather, options
from studies.shared.gather import Moments, Trained, Training

SNAPSHOTS = (0.05, 0.25, 1.0)
EPS = 1e-8
# Table 6: mean absolute error of the first state under tensor-wise dynamic quantization; the page cites it.
PAPER_ABSOLUTE_ERROR = 3.5e-10
BLOCKS = {"tensor": None, "2048": 2048, "256": 256}
MAPS = ("linear", "quantile", "quantile_normal", "inverse_dynamic", "dynamic", "dynamic_tree", "fp8_e4m3")
# Which maps Figure 4 shows.
SHOWN = (("linear", "tensor"), ("dynamic", "tensor"), ("dynamic", "2048"))
LARGE = (0.1, 1.0)  # errors that count as large: Adam's updates are of size 1 and below
SMALL = 0.01  # updates that count as small
_SAMPLE = 1 << 24  # elements, at most, for what needs single errors: every n-th


def quantized(x: Tensor, name: str, signed: bool, block: int | None) -> Quantized:
    """A tensor under one of `MAPS`; "quantile" is made from the tensor itself, scaled as it will be quantized."""
    if name != "quantile":
        values = codebook(name.removesuffix("_normal"), signed)
    else:
        scales = quantize(x, codebook("linear", signed), block).scales
        flat = x.reshape(-1)
        each = scales.repeat_interleave(block or flat.numel())[: flat.numel()]
        values = codebook(name, signed, data=torch.where(each == 0, 0.0, flat / each))
    return quantize(x, values.to(x.device), block)


@dataclasses.dataclass
class Tally:
    """One condition of one map, gathered over tensors: sums by step, means a tensor, errors of a sample."""

    eps: float
    stride: int
    maps: dict[int, AdamErrorMap] = dataclasses.field(default_factory=dict)
    relative: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    sample: list[Tensor] = dataclasses.field(default_factory=list)

    def add(self, t: Moments, m8: Quantized, v8: Quantized | None) -> None:
        """Count one tensor's errors in."""
        found = adam_error_map(t.m, t.v, m8, v8, self.eps)
        self.maps[t.step] = AdamErrorMap.total([self.maps[t.step], found]) if t.step in self.maps else found
        self.relative.setdefault(t.parameter, []).append(found.mean_relative)
        exact = adam_update(t.m, t.v, self.eps)[:: self.stride]
        v = t.v if v8 is None else v8.dequantize()
        delta = (exact - adam_update(m8.dequantize(), v, self.eps)[:: self.stride]).abs()
        self.sample.append(torch.stack([exact.abs(), delta]))

    @property
    def pooled(self) -> AdamErrorMap:
        """The sums over all tensors and steps."""
        return AdamErrorMap.total(list(self.maps.values()))

    def results(self) -> dict[str, Any]:
        """What a results file says of it."""
        pooled = self.pooled
        used = pooled.cells[3] > 0
        kept = pooled.cells[:2, :, 1:].sum(dim=(1, 2))  # without the column of the updates whose v became zero
        two = pooled.usage.shape[1] > 1
        exact, delta = torch.cat(self.sample, dim=1)
        relative = (delta / exact)[exact != 0]
        small = exact[exact != 0] < SMALL
        return {
            "relative": gather.mean_and_error([statistics.fmean(values) for values in self.relative.values()]),
            "relative_over_cells": float(pooled.relative[used].mean()),
            "relative_median": float(relative.median()),
            "relative_norm": pooled.relative_norm,
            "small": [float(small.double().mean()), float(relative[small].sum() / relative.sum())],
            "absolute": pooled.mean_absolute,
            "absolute_by_snapshot": [self.maps[step].mean_absolute for step in sorted(self.maps)],
            "absolute_without_zero_v": float(kept[1] / kept[0]) if two else pooled.mean_absolute,
            "large": [float((delta > size).double().mean()) for size in LARGE],
            "overlap": pooled.overlap(),
            "rank_correlation": rank_correlation(pooled),
        }


def rank_correlation(found: AdamErrorMap) -> float:
    """Spearman's, between the use of a cell and its mean absolute error, over the cells that are used."""
    used = found.usage > 0
    ranks = [_ranks(found.usage[used]), _ranks(found.absolute[used])]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if len(ranks[0]) > 2 else math.nan


def _ranks(x: Tensor) -> np.ndarray:
    """Ranks from 0, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(x.cpu().numpy(), return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return (ends - (counts + 1) / 2)[inverse]


def measure(
    moments: Sequence[Moments], name: str, blocks: str, matched: float
) -> tuple[dict[str, Any], dict[str, Tally]]:
    """One map at one block size, over all tensors: the results, and the tallies they were made of."""
    block = BLOCKS[blocks]
    stride = math.ceil(sum(t.m.numel() for t in moments) / _SAMPLE)
    tallies = {"m": Tally(EPS, stride), "both": Tally(EPS, stride), "matched": Tally(matched, stride)}
    errors: dict[str, list[QuantizationError]] = {"m": [], "v": []}
    absolute: dict[str, list[float]] = {}
    exploded = 0
    for t in moments:
        m8, v8 = quantized(t.m, name, True, block), quantized(t.v, name, False, block)
        errors["m"].append(quantization_error(t.m, m8))
        errors["v"].append(quantization_error(t.v, v8))
        absolute.setdefault(t.parameter, []).append(errors["m"][-1].mean_absolute)
        exploded += int(((t.v > 0) & (v8.dequantize() == 0) & (m8.dequantize() != 0)).sum())
        for condition, tally in tallies.items():
            tally.add(t, m8, None if condition == "m" else v8)
    pooled = {slot: QuantizationError.total(found) for slot, found in errors.items()}
    results: dict[str, Any] = {
        "absolute_error_of_m": gather.mean_and_error([statistics.fmean(values) for values in absolute.values()]),
        "entropy": {slot: error.entropy for slot, error in pooled.items()},
        "became_zero": {slot: error.flushed for slot, error in pooled.items()},
        "divided_by_eps_alone": exploded / float(pooled["m"].usage.sum()),
    }
    return results | {condition: tally.results() for condition, tally in tallies.items()}, tallies


def matched_epsilon(moments: Sequence[Moments]) -> float:
    """The epsilon that is to these gradients what 1e-8 was to the paper's.

    The paper's absolute error of m tells how large its gradients were, since that error is a share of them. Scaling
    gradients by c is the same as dividing epsilon by c.
    """
    errors = [quantization_error(t.m, quantized(t.m, "dynamic", True, None)).mean_absolute for t in moments]
    return EPS * statistics.fmean(errors) / PAPER_ABSOLUTE_ERROR


def by_code(tally: Tally) -> dict[str, list[float | None]]:
    """Figure 5: for every code of m, its share of the use and its mean absolute Adam error, None if not used."""
    column = tally.pooled.by_first_code
    usage, error = column.usage[:, 0], column.absolute[:, 0]
    return {
        "usage": [options.rounded(value) for value in (usage / usage.sum()).tolist()],
        "absolute": [None if math.isnan(value) else options.rounded(value) for value in error.tolist()],
    }


def picture_map(found: AdamErrorMap) -> dict[str, np.ndarray]:
    """Figure 4 at half the resolution: log10 of use, absolute and relative error in 128 x 128 cells."""
    cells = found.cells.view(4, 128, 2, 128, 2).sum(dim=(2, 4))
    quantities = {"usage": cells[0], "absolute": cells[1] / cells[0], "relative": cells[2] / cells[3]}
    return {key: value.log10().cpu().numpy().astype(np.float16) for key, value in quantities.items()}


def spread(moments: Sequence[Moments]) -> dict[str, dict[str, Any]]:
    """For each tensor at the last step: how unequal its moments are, and the absolute error of m by map."""
    last = max(t.step for t in moments)
    found = {}
    for t in (t for t in moments if t.step == last):
        m, v = t.m.abs().to(torch.float64), t.v.to(torch.float64)
        errors = {name: quantization_error(t.m, quantized(t.m, name, True, None)).mean_absolute for name in MAPS}
        found[t.parameter] = {
            "mean_m": float(m.mean()),
            "largest_over_mean_m": float(m.max() / m.mean()),
            "largest_over_mean_v": float(v.max() / v.mean()),
            "absolute_error_of_m": errors,
        }
    return found


def two_runs(moments: Sequence[Moments], other: Sequence[Moments]) -> dict[int, dict[str, float]]:
    """By step, how far the updates of a run with 8-bit states are from those of the run with fp32 states.

    Both have seen the same batches, so the difference is what quantization made of the whole way, not of one step.
    """
    found: dict[int, dict[str, float]] = {}
    exact = {(t.parameter, t.step): t for t in moments}
    for step in sorted({t.step for t in other}):
        pairs = [(exact[t.parameter, step], t) for t in other if t.step == step]
        u = torch.cat([adam_update(a.m, a.v, EPS) for a, _ in pairs])
        delta = (u - torch.cat([adam_update(b.m, b.v, EPS) for _, b in pairs])).abs()
        relative = (delta / u.abs())[u != 0]
        found[step] = {
            "relative": float(relative.mean()),
            "relative_median": float(relative.median()),
            "absolute": float(delta.mean()),
        }
    return found


def study(trained: Trained) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every map at every block size: the results, and the arrays of the pictures."""
    matched = matched_epsilon(trained.moments)
    results: dict[str, Any] = trained.about | {
        "eps": EPS,
        "matched_eps": matched,
        "snapshots": sorted({t.step for t in trained.moments}),
        "tensors": len({t.parameter for t in trained.moments}),
        "elements": sum(t.m.numel() for t in trained.moments),
        "tensor_by_tensor": spread(trained.moments),
        "limits": {"large": LARGE, "small": SMALL},
        "maps": {name: {} for name in MAPS},
        "codes": {},
    }
    arrays: dict[str, Any] = {}
    for name in MAPS:
        for size in BLOCKS:
            results["maps"][name][size], tallies = measure(trained.moments, name, size, matched)
            shown = (name, size) in SHOWN
            if size == "tensor" or shown:
                results["codes"][f"{name} {size}"] = {key: by_code(tally) for key, tally in tallies.items()}
            for condition in ("both", "matched") if shown else ():
                drawn = picture_map(tallies[condition].pooled)
                arrays |= {f"{name} {size} {condition} {key}": array for key, array in drawn.items()}
            print(f"{name} {size}", flush=True)
    return options.rounded(results), arrays


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
    check: options.Check = False,
) -> None:
    """Train, quantize the moments under every map, and write what that costs."""
    options.one_thread(check)
    if check:
        vocabulary, steps, batch, sequence = 256, 8, 4, 32
    training = Training(data, model, vocabulary, steps, batch, sequence, lr, seed=seed, device=device)
    snapshots = (0.5, 1.0) if check else SNAPSHOTS
    trained = gather.run(training, snapshots)
    print(f"trained: loss {trained.about['loss']['last']:.3f}", flush=True)
    other = gather.run(training, snapshots[:-1], recipe="adamw8bit-dynamic")
    with torch.no_grad():
        results, arrays = study(trained)
        results["two_runs"] = options.rounded(two_runs(trained.moments, other.moments))
    options.write(out, results)
    np.savez_compressed(out.with_name(f"{out.stem}_maps.npz"), **arrays)


if __name__ == "__main__":
    typer.run(main)
