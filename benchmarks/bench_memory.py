"""Planned memory beside measured: `plan_memory`'s peak and torch's own count of three training steps on a GPU.

Each row is a model, a recipe, and how it is trained. It is planned first, on the meta device; then the model is
made on the GPU and takes three steps, with gradients dropped before each, and `torch.cuda.max_memory_allocated`
over them is what was predicted. Rows that fail are kept with their error. `before` are bytes that were taken
before the row began: cuBLAS's workspaces, and nothing else if nothing leaks; `workspaces` at the top is what
one product, forward and backward, leaves behind.

    python benchmarks/bench_memory.py [--json FILE] [--only gpt2,bert-base] [--most 120] [--seconds 140] [--list]
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from _script import command, parser_for, save
from torch import Tensor

from narrowgauge import linear, recipes
from narrowgauge.distributed import CPUOffload
from narrowgauge.linear._swap import output_heads
from narrowgauge.nn import add_patch_dropout
from narrowgauge.recipes._losses import class_loss, contrast, pair_rows
from narrowgauge.recipes._trace import enable_checkpointing, from_config
from narrowgauge.trainers._image_models import (
    IMAGE_PRESETS,
    ClipSizes,
    VitSizes,
    clip_configuration,
    vit_configuration,
)
from narrowgauge.trainers._models import Preset, configuration, next_token_loss
from narrowgauge.trainers._tokens import END_OF_TEXT

STEPS = 3
LEFT = 16 << 20  # bytes beyond workspaces that a row may find: more is a leak, and would be counted as its own
PLANS = {
    "": None,
    "SWITCHBACK": linear.SWITCHBACK,
    "SWITCHBACK_M": linear.SWITCHBACK_M,
    "SWITCHBACK e4m3": linear.SWITCHBACK.with_format("e4m3"),
}


@dataclass(frozen=True)
class Row:
    """A configuration: model, recipe, sequences or images a step, tokens of each (0: images without captions),
    linear plan, checkpointing, share of patches dropped, what is on the host.
    """

    model: str
    recipe: str
    batch: int
    sequence: int = 1024
    linear: str = ""
    checkpointing: bool = False
    patch_dropout: float = 0.0
    offload: str = "none"


ROWS = (
    Row("gpt2", "D", 8),
    Row("gpt2", "D", 32),
    Row("gpt2", "A", 16, 512),
    Row("gpt2", "fp32", 8),
    Row("gpt2", "adamw8bit", 16),
    Row("gpt2", "C", 16, linear="SWITCHBACK"),
    Row("gpt2", "C", 16, linear="SWITCHBACK_M"),
    Row("gpt2", "D", 64, checkpointing=True),
    Row("gpt2-medium", "adamw8bit-split8", 8),
    Row("gpt2-medium", "kahan", 8, checkpointing=True),
    Row("gpt2-medium", "D", 1, 128),
    Row("gpt2-large", "D", 8),
    Row("gpt2-large", "adamw8bit-split8", 8, checkpointing=True),
    Row("gpt2-large", "adamw8bit", 4, 512),
    Row("gpt2-large", "C", 4, linear="SWITCHBACK e4m3", checkpointing=True),
    Row("llama-1b", "D", 4),
    Row("llama-1b", "adamw8bit-split8", 8, 2048, checkpointing=True),
    Row("llama-1b", "A", 4, 2048, linear="SWITCHBACK_M"),
    Row("llama-1b", "kahan", 1, 256),
    Row("bert-base", "A", 32, 512),
    Row("bert-base", "adamw8bit-split8", 64, 128),
    Row("bert-base", "master", 32, 512, checkpointing=True),
    Row("clip-b-16", "A", 256, 77),
    Row("clip-b-16", "adamw8bit-split8", 512, 77, patch_dropout=0.5),
    Row("clip-b-16", "D", 128, 32, offload="gradients"),
    Row("clip-l-14", "C", 64, 77, linear="SWITCHBACK"),
    Row("clip-l-14", "fp32", 64, 77, checkpointing=True),
    Row("clip-h-14", "adamw8bit-split8", 128, 77, checkpointing=True),
    Row("vit-b-16", "D", 256, 0),
    Row("vit-b-16", "fp32", 64, 0),
    Row("vit-l-16", "adamw8bit-split8", 128, 0, patch_dropout=0.5),
    Row("gpt2-large", "adamw8bit-split8", 4, offload="states"),
    Row("gpt2-large", "D", 1, 128, offload="gradients"),
)


def config_of(row: Row) -> Any:
    """The transformers configuration of a row's model."""
    if row.model == "bert-base":
        from transformers import BertConfig

        return BertConfig(architectures=["BertForMaskedLM"])
    sizes = IMAGE_PRESETS.get(row.model)
    if isinstance(sizes, ClipSizes):
        return clip_configuration(sizes, end=END_OF_TEXT)
    if isinstance(sizes, VitSizes):
        return vit_configuration(sizes, 1000)
    llama = Preset("llama", layers=22, width=2048, heads=32, hidden=5632, positions=2048)  # TinyLlama's, ungrouped
    model = llama if row.model == "llama-1b" else row.model
    return configuration(model, vocabulary=32000 if row.model == "llama-1b" else 50257, sequence=row.sequence)


def planned(row: Row) -> recipes.MemoryPlan:
    """The plan of a row."""
    model: Any = config_of(row)
    if row.patch_dropout:
        model = from_config(model)
        add_patch_dropout(model, row.patch_dropout)
    offload: Any = row.offload
    return recipes.plan_memory(
        model, row.recipe, batch=row.batch, sequence=row.sequence or None, linear=PLANS[row.linear],
        checkpointing=row.checkpointing, offload=offload,
    )  # fmt: skip


def made(row: Row, device: torch.device) -> Any:
    """The row's model, with fresh weights, made on the device."""
    import transformers

    config = config_of(row)
    named = {"bert": "BertForMaskedLM", "clip": "CLIPModel", "vit": "ViTForImageClassification"}
    kind = named.get(config.model_type)
    make = getattr(transformers, kind)._from_config if kind else transformers.AutoModelForCausalLM.from_config
    with device:
        model = make(config, attn_implementation="sdpa", dtype=torch.float32)
    model.config.use_cache = False
    if row.patch_dropout:
        add_patch_dropout(model, row.patch_dropout)
    return model.train()


def measured(row: Row, device: torch.device) -> list[int]:
    """`max_memory_allocated` of each of three steps."""
    model = made(row, device)
    if row.checkpointing:
        enable_checkpointing(model)
    freed = functools.partial(CPUOffload, gradients="freed")
    around: Any = {"none": None, "states": CPUOffload, "gradients": freed}[row.offload]
    optimizer: Any = recipes.get(row.recipe).apply(model, lr=1e-5, around=around)
    plan = PLANS[row.linear]
    if plan is not None:
        linear.swap_linears(model, plan, keep=output_heads(model))
    generator = torch.Generator(device).manual_seed(0)
    peaks = []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats(device)
        optimizer.zero_grad()  # gradients are dropped before each step
        torch.autograd.backward(loss_of(row, model, generator))
        optimizer.step()
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device))
    return peaks


def loss_of(row: Row, model: Any, generator: torch.Generator) -> Tensor:
    """The loss of a batch, which goes as soon as it is not needed."""
    config, options = model.config, {"device": generator.device, "generator": generator}

    def integers(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, **options)

    def images(edge: int) -> Tensor:
        return torch.randint(0, 256, (row.batch, 3, edge, edge), dtype=torch.uint8, **options)

    if config.model_type == "clip":
        words = config.text_config.vocab_size
        captions = integers(words, row.batch, row.sequence)
        rows = pair_rows(model, images(config.vision_config.image_size), captions)
        return contrast(rows, slice(None), model.get_parameter("logit_scale"))
    if config.model_type == "vit":
        return class_loss(model, images(config.image_size), integers(config.num_labels, row.batch))
    return next_token_loss(model, integers(config.vocab_size, row.batch, row.sequence + 1))


def workspaces(device: torch.device) -> int:
    """Bytes that one product, forward and backward, leaves behind."""
    before = torch.cuda.memory_allocated(device)
    a = torch.randn(512, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    torch.autograd.backward((a @ a).sum())
    del a
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before


def freed(device: torch.device) -> int:
    """Give back what can be given back; what is still allocated."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def results_of(rows: list[Row], device: torch.device, most: float, seconds: float = 140.0) -> dict[str, Any]:
    """Every row planned and measured; those planned above `most` GB, or late by so many seconds, are not run."""
    begun = time.perf_counter()
    name = torch.cuda.get_device_name(device)
    results: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "command": command(),
        "workspaces": workspaces(device),
        "rows": [],
    }
    for row in rows:
        started = time.perf_counter()
        found: dict[str, Any] = {**asdict(row), "before": freed(device)}
        try:
            if started - begun > seconds:
                raise TimeoutError(f"not begun within {seconds:g} s")
            if found["before"] > results["workspaces"] + LEFT:
                raise RuntimeError(f"not begun: {found['before'] / 1e6:.0f} MB of the row before are still there")
            plan = planned(row)
            found |= {"planned": plan.peak, "at_peak": dict(plan.at_peak), "where": plan.where}
            found["planning_s"] = round(time.perf_counter() - started, 2)
            if plan.peak > most * 1e9:
                raise ValueError(f"planned {plan.peak / 1e9:.1f} GB, of {most} at most")
            found["steps"] = measured(row, device)
            found["measured"] = max(found["steps"])
            found["ratio"] = found["planned"] / found["measured"]
        except Exception as error:  # one row must not end the others
            found["error"] = f"{type(error).__name__}: {error}"[:500]
        found["s"] = round(time.perf_counter() - started, 1)
        results["rows"].append(found)
        print(line(found), flush=True)
    return results


def line(found: dict[str, Any]) -> str:
    """A row as text."""
    name = f"{found['model']} {found['recipe']} {found['batch']}x{found['sequence']}"
    name += f" {found['linear']}" * bool(found["linear"]) + " checkpointing" * found["checkpointing"]
    name += " patches dropped" * bool(found["patch_dropout"])
    name += f" {found['offload']} on the host" * (found["offload"] != "none")
    if "error" in found:
        return f"{name:58} {found['error']}"
    steps = ", ".join(f"{peak / 1e9:.3f}" for peak in found["steps"])
    figures = f"planned {found['planned'] / 1e9:8.3f} GB, measured {found['measured'] / 1e9:8.3f}"
    return f"{name:58} {figures}, ratio {found['ratio']:.3f} (steps {steps}; {found['s']} s)"


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--only", default="", help="comma-separated: models, recipes, what is on the host")
    parser.add_argument("--most", type=float, default=120.0, help="GB that a row may be planned to take")
    parser.add_argument("--seconds", type=float, default=140.0, help="after which no row is begun")
    parser.add_argument("--list", action="store_true", help="plan only, without a GPU")
    given = parser.parse_args()
    parts = [part for part in given.only.split(",") if part]
    rows = [row for row in ROWS if not parts or any(part in (row.model, row.recipe, row.offload) for part in parts)]
    if given.list:
        for row in rows:
            started = time.perf_counter()
            plan = planned(row)
            parts_of = {name: round(size / 1e9, 2) for name, size in plan.at_peak.items() if size}
            print(f"{asdict(row)} {plan.peak / 1e9:.3f} GB {parts_of} {time.perf_counter() - started:.1f} s")
        return 0
    if not torch.cuda.is_available():
        print("bench_memory: takes a CUDA device, torch sees none (--list plans without one)", file=sys.stderr)
        return 2
    results = results_of(rows, torch.device("cuda", torch.cuda.current_device()), given.most, given.seconds)
    ratios = [row["ratio"] for row in results["rows"] if "ratio" in row]
    within = sum(abs(ratio - 1) <= 0.05 for ratio in ratios)
    print(f"{within} of {len(results['rows'])} rows within 5%; workspaces {results['workspaces'] / 2**20:.1f} MiB")
    save(given.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
