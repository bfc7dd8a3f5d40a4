"""Figures for the page of evidence that no study's page has in a sentence: ratios, ranges and counts of results.

`NUMBERS` has a function for each kind of results file, found by the beginning of its name; it maps results to
figures as they are printed, by the name that `studies/evidence/*.toml` calls them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable

from studies.eight_bit_adam import page as adam
from studies.eight_bit_adam import plan as adam_plan
from studies.loss_spikes import page as spikes
from studies.memory_plans import run as memory_plans
from studies.shared.tables import Results, significant


def linear(results: Results) -> dict[str, str]:
    """Speed-ups of layers over nn.Linear over all shapes: as called from Python, and of the device's work alone."""
    found = {}
    for layer in results["layers"]:
        for what, key in (("called", "speedup"), ("device", "graph_speedup")):
            if ratios := [rows[layer][key] for rows in results["shapes"].values() if key in rows[layer]]:
                found[f"{what} {layer}"] = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return found | _products(results)


def _products(results: Results) -> dict[str, str]:
    """By dim: times of int8 products over 16-bit ones, and of the input's quantization over such a product."""
    found = {}
    for size, rows in results.get("operations", {}).items():
        dim = size.split("x")[-1]
        wide, narrow = (rows[layer]["operations"] for layer in ("nn.Linear", "SWITCHBACK int8"))
        both = [sum(of[name] for name in ("output", "grad_input")) for of in (narrow, wide)]
        found[f"int8 product {dim}"] = f"{both[0] / both[1]:.2f}"
        found[f"quantize over product {dim}"] = f"{narrow['quantize X'] / narrow['output']:.2f}"
    return found


def clip_steps(results: Results) -> dict[str, str]:
    """Speed-ups of a step of CLIP over nn.Linear, by model: from a CUDA graph in per cent, and launched."""
    rows = [
        (f"{model} {layer}", row) for model, of in results["models"].items() for layer, row in of["rows"].items()
    ]
    replayed = {name: f"{100 * (row['graph_speedup'] - 1):.0f}" for name, row in rows}
    return replayed | {f"launched {name}": f"{row['speedup']:.2f}" for name, row in rows}


def optimizers(results: Results) -> dict[str, str]:
    """Times of a step over that of 8-bit AdamW, for large tensors."""
    rows = results["lists"]["big"]["rows"]
    ours = rows["AdamW 8bit"]["ms"]
    return {f"{name} over 8bit": f"{row['ms'] / ours:.1f}" for name, row in rows.items() if "ms" in row}


def quantiles(results: Results) -> dict[str, str]:
    """torch.sort's time over that of the estimate."""
    times = results["nanoseconds an element, median"]
    return {"sort": f"{times['torch.sort, 2^28 float32'] / times['estimate_quantiles, 2^28 float32']:.1f}"}


def compressed(results: Results) -> dict[str, str]:
    """Bytes of 8-bit gradients with error feedback as a share of bf16's, and below which bandwidth they pay."""
    buckets = results["runs"][0]["buckets"]
    row = buckets[max(buckets, key=int)]["8 bits, feedback"]
    return {"share": f"{row['share of bf16']:.2f}", "pays": f"{row['codec']['2 ranks pay below GB/s']:.2f}"}


def loss_spikes(results: Results) -> dict[str, str]:
    """RMS_t at the switch by optimizer, and whether loss spikes follow RMS spikes."""
    ways, switch = spikes.by_way(results), results["training"]["switch"]
    found = {}
    for name, runs in ways.items():
        found[f"RMS {name}"] = f"{statistics.fmean(run['embedding_rms'][switch] for run in runs):.1f}"
    for tensor in ("embedding", "middle"):
        match = spikes.match(ways["AdamW, β2 0.999"], results, tensor)
        found[f"followed {tensor}"] = f"{match.followed} of {match.loss_spikes}"
        found[f"chance {tensor}"] = significant(match.probability, 1)
    return found


def collage_float8(results: Results) -> dict[str, str]:
    """Validation losses minus that of D."""
    losses = {row["name"]: row["validation_loss"] for row in results["recipes"]}
    return {f"{name} - D": f"{loss - losses['D']:+.4f}" for name, loss in losses.items()}


def eight_bit_adam(results: Results) -> dict[str, str]:
    """Table 3: unstable runs of each combination, and losses minus those of 32-bit Adam with the same embedding."""
    runs, found = adam.Runs(results), {}
    for arm in adam_plan.ARMS:
        name = f"{arm.codebook or 'fp32'} {'blocks' if arm.blocks else 'tensor'}{' stable' * arm.stable}"
        trials = adam_plan.ablation(arm, runs.lr)
        found[f"unstable {name}"] = adam.unstable_of(runs, trials)
        found[f"apart {name}"] = adam.mean(
            runs.differences(trials, adam_plan.ablation(adam.reference(arm), runs.lr))
        )
    linear = [arm for arm in adam_plan.ARMS if arm.codebook == "linear"]
    trials = [trial for arm in linear for trial in adam_plan.ablation(arm, runs.lr)]
    return found | {"unstable linear": adam.unstable_of(runs, trials)}


def adam_variants(results: Results) -> dict[str, str]:
    """Table 3: losses of an arm minus another's, same seed and rate, and how many linear codes made diverge."""
    runs = [run for run in results["runs"] if run["kind"] == "ablation"]
    by = {(run["row"], run["lr"], run["seed"]): run["validation_loss"] for run in runs}

    def apart(arm: str, other: str) -> list[float]:
        pairs = [(loss, by[other, *rest]) for (row, *rest), loss in by.items() if row == arm]
        return [loss - beside for loss, beside in pairs if None not in (loss, beside)]

    wide, blocks, tensor = "32-bit, {} embedding", "dynamic, blocks, {} embedding", "dynamic, tensor, {} embedding"
    stable, usual = "stable", "usual"
    found = {
        "stable wide": apart(wide.format(stable), wide.format(usual)),
        "stable narrow": apart(blocks.format(stable), blocks.format(usual)),
        "level stable": apart(blocks.format(stable), wide.format(stable)),
        "tensor stable": apart(tensor.format(stable), blocks.format(stable)),
        "tensor usual": apart(tensor.format(usual), blocks.format(usual)),
    }
    linear = [run["diverged"] for run in runs if run["row"].startswith("linear")]
    return {name: adam.mean(losses) for name, losses in found.items()} | {
        "stable pairs": f"{len(found['stable narrow'])}",
        "unstable linear": f"{sum(linear)} of {len(linear)}",
    }


def loss_scaling(results: Results) -> dict[str, str]:
    """Of runs that overflowed of themselves: how many, and the blocks of the tensors named; three a run are."""
    skipped = [run["skipped"] for run in results["runs"] if run["kind"] in ("formats", "none") and run["skipped"]]
    names = {name for of in skipped for name in of if name != "others"}
    blocks = {match[1] for name in names if (match := re.search(r"\.h\.(\d+)\.", name))}
    return {
        "overflowed": f"{len(skipped)}",
        "overflowed blocks": ", ".join(sorted(blocks, key=int)),
        "overflowed unnamed": f"{max((of.get('others', 0) for of in skipped), default=0)}",
    }


def collage_throughput(results: Results) -> dict[str, str]:
    """Option D's states as a share of its measured peak, over the models."""
    runs = [run for run in results["runs"] if run["row"] == "D" and run.get("peak_memory")]
    shares = [run["planned_parts"]["states"] / run["peak_memory"] for run in runs]
    return {"states": f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"}


def quantization_error(results: Results) -> dict[str, str]:
    """Errors of maps over those of the dynamic one, and of outermost codes over that of the map's median one."""
    maps = results["maps"]
    error = {name: found["tensor"]["absolute_error_of_m"][0] for name, found in maps.items()}
    found = {f"{name} over dynamic": f"{error[name] / error['dynamic']:.1f}" for name in error}
    found["linear over dynamic_tree"] = f"{error['linear'] / error['dynamic_tree']:.1f}"
    for name in ("linear", "dynamic", "dynamic_tree"):
        found[f"relative {name}"] = f"{100 * maps[name]['tensor']['m']['relative'][0]:.1f} %"
    for name in ("quantile", "dynamic"):
        codes = [error for error in results["codes"][f"{name} tensor"]["m"]["absolute"] if error is not None]
        found[f"outermost {name}"] = f"{max(codes[0], codes[-1]) / statistics.median(codes):.1f}"
    return found


def plans(results: Results) -> dict[str, str]:
    """Cells of the papers' tables that come out."""
    (finetuning,) = [t for t in results["table_2"] if t["sequence"] == 512]
    cells = [
        found[kind] == name
        for (_, _, *paper), found in zip(memory_plans.TABLE_2, finetuning["largest"], strict=True)
        for kind, name in zip(memory_plans.ADAMS, paper, strict=True)
    ]
    states = 8 * finetuning["parameters"]["GPT-2-large"] / memory_plans.GIB
    found = {"table 2": f"{sum(cells)} of {len(cells)}", "states of GPT-2": f"{states:.1f}"}
    for flight, table in enumerate(results["table_8"], 1):
        paper = memory_plans.TABLE_8
        same = [a == b for letter in paper for a, b in zip(table["fits"][letter], paper[letter], strict=True)]
        found[f"table 8, {flight}"] = f"{sum(same)} of {len(same)}"
    return found


NUMBERS: dict[str, Callable[[Results], dict[str, str]]] = {
    "linear_": linear,
    "clip_h200": clip_steps,
    "optimizers_": optimizers,
    "quantiles_": quantiles,
    "compressed_cpu": compressed,
    "compressed_h200": compressed,
    "loss_spikes": loss_spikes,
    "collage_float8": collage_float8,
    "eight_bit_adam": eight_bit_adam,
    "adam_variants": adam_variants,
    "loss_scaling": loss_scaling,
    "collage_throughput": collage_throughput,
    "quantization_error": quantization_error,
    "memory_plans": plans,
}


def numbers(name: str, results: Results) -> dict[str, str]:
    """Those of a results file, none if it has none."""
    return next((function(results) for start, function in NUMBERS.items() if name.startswith(start)), {})
