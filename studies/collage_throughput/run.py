"""Collage's Table 7 and Figure 4 on one GPU: how fast a step is, and what it takes at its worst moment.

    python -m studies.collage_throughput.run --device cuda --seconds 400 --resume --out NAME.json
    python -m studies.collage_throughput.run --check --out runs/check.json # seconds on a CPU

GPTs of 125 million to 6.7 billion parameters and OpenLLaMA-7B as the paper has them
(`memory_plans.collage_model`), one micro-batch of 2048 random tokens: forward, backward, optimizer step, under
options A, B, C, D and D-MW, under 8-bit states with a low word, and under torch's fused AdamW, on bf16 weights
alone and on fp32 weights with autocast, which is what most people train with. Times are medians of steps after
the first few. Forward and backward are timed apart from the optimizer's step: micro-batches that are
accumulated repeat the former alone, so the speed at any number of them follows.

The peak that `narrowgauge.recipes.plan_memory` predicts stands beside the measured one. What does not fit is
told, and is a result. `--seconds` and `--resume` divide the study over several calls; the largest models come
last.

Source: Collage (Yu et al. 2024), Section 5.3, Appendix F.1.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from narrowgauge import recipes
from narrowgauge.cli._environment import out_of_memory
from narrowgauge.recipes import Recipe
from narrowgauge.trainers import next_token_loss
from studies.memory_plans import run as memory_plans
from studies.shared import options
from studies.shared.resumable import Result, carry_out

WARM = 3  # steps that are not timed: states are made, kernels chosen
TOY = "a toy"
MODELS = tuple(memory_plans.SIZES)
LR = 1e-5


@dataclass(frozen=True)
class Row:
    """What trains a model."""

    name: str  # the paper's letter, or one of ours
    title: str  # what is kept, in a line
    recipe: Recipe | None = None  # of this library; None for torch's fused AdamW
    autocast: bool = False  # whether fp32 weights compute in bf16

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.float32 if self.autocast else torch.bfloat16

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Over all parameters."""
        if self.recipe is not None:
            return self.recipe.apply(model, LR, decay_all=True)
        return torch.optim.AdamW(model.parameters(), LR, fused=True)


def _ours(*names: str) -> list[Row]:
    return [Row(recipe.letters or recipe.name, recipe.title, recipe) for recipe in map(recipes.get, names)]


ROWS = (
    *_ours("D", "C", "B", "A", "D-MW", "adamw8bit-split8"),
    Row("torch fused, bf16", "torch's fused AdamW, bf16 weights and states"),
    Row("torch fused, fp32", "torch's fused AdamW, fp32 weights and states, bf16 by autocast", autocast=True),
)


@dataclass(frozen=True)
class Task:
    """A measurement: a row on a model."""

    kind: str
    row: str


def config_of(model: str) -> Any:
    """The paper's configuration, or a toy's."""
    if model != TOY:
        return memory_plans.collage_model(model)
    from transformers import GPTNeoXConfig

    return GPTNeoXConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=64, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip


def measure(task: Task, *, device: str, batch: int, sequence: int, steps: int) -> Result:
    """Make a model, take steps, and say what they took; `out_of_memory` where it does not fit."""
    begun = time.perf_counter()
    row = next(row for row in ROWS if row.name == task.row)
    config = config_of(task.kind)
    plan = None
    if row.recipe is not None:
        plan = recipes.plan_memory(config, row.recipe, batch=batch, sequence=sequence)
    found: Result = {
        "planned": None if plan is None else plan.peak,
        "planned_parts": None if plan is None else dict(plan.at_peak),
    }
    try:
        found |= _steps(row, config, torch.device(device), batch, sequence, steps)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        found |= {"out_of_memory": True}
    return found | {"seconds": time.perf_counter() - begun}


def _steps(row: Row, config: Any, device: torch.device, batch: int, sequence: int, steps: int) -> Result:
    from transformers import AutoModelForCausalLM

    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=row.dtype).train()
    optimizer = row.optimizer(model)
    windows = torch.randint(
        0, config.vocab_size, (batch, sequence + 1), generator=torch.Generator().manual_seed(0)
    ).to(device)
    forward, whole, peak = [], [], None
    for number in range(WARM + steps):
        if number == WARM and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        first, second = _step(row, model, optimizer, windows)
        if number >= WARM:
            forward.append(first)
            whole.append(second)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    return {
        "out_of_memory": False,
        "parameters": sum(p.numel() for p in model.parameters()),
        "forward_backward_ms": 1e3 * statistics.median(forward),
        "optimizer_ms": 1e3 * statistics.median(b - a for a, b in zip(forward, whole, strict=True)),
        "step_ms": 1e3 * statistics.median(whole),
        "peak_memory": peak,
    }


def _step(row: Row, model: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor) -> tuple[float, float]:
    """Seconds up to the end of the backward pass, and of all of it."""
    device = windows.device
    optimizer.zero_grad()
    computing: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    if row.autocast:
        computing = functools.partial(torch.autocast, device.type, torch.bfloat16)
    start = _now(device)
    with computing():
        loss = next_token_loss(model, windows)
    torch.autograd.backward(loss)
    middle = _now(device)
    optimizer.step()
    return middle - start, _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def about(device: str, batch: int, sequence: int, steps: int) -> dict[str, Any]:
    """What a results file says of the study before anything has run."""
    memory = torch.cuda.get_device_properties(device).total_memory if device != "cpu" else None
    return {
        **options.origin(device),
        "training": {
            "model": "GPTs and OpenLLaMA-7B", "seed": 0, "steps": steps, "batch": batch, "sequence": sequence,
            "device": device,
        },
        "data": {},
        "device_memory": memory,
        "rows": [{"name": row.name, "title": row.title, "bytes": bytes_of(row)} for row in ROWS],
    }  # fmt: skip


def bytes_of(row: Row) -> float:
    """Bytes a parameter: weight, gradient, states, low words."""
    return 4.0 * row.dtype.itemsize if row.recipe is None else row.recipe.bytes_per_parameter()


def main(
    out: options.Out,
    model: Annotated[list[str] | None, typer.Option(help="Of " + ", ".join(MODELS) + ". [all]")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of the micro-batch.")] = 1,
    sequence: Annotated[int, typer.Option(min=2, max=2048, help="Tokens of each.")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="That are timed.")] = 7,
    only: options.Only = None,
    device: options.Device = "cpu",
    seconds: options.Seconds = math.inf,
    resume: options.Resume = False,
    check: options.Check = False,
) -> None:
    """Measure steps and peaks of every option on models of all sizes."""
    end = time.monotonic() + seconds
    models = options.matching("--model", model, MODELS)
    if check:
        options.one_thread(check)
        models, sequence, steps = [TOY], 32, 2
    rows = options.matching("--only", only, [row.name for row in ROWS])
    tasks = [Task(model, row) for model in models for row in rows]  # small models first
    one = functools.partial(measure, device=device, batch=batch, sequence=sequence, steps=steps)
    carry_out(out, about(device, batch, sequence, steps), tasks, one, end, resume=resume)


if __name__ == "__main__":
    typer.run(main)
