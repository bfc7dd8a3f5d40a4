"""Fit a recipe to a model: measure what narrow numbers cost, and choose.

1. `_probe` trains a copy of the model for some steps, and records gradients and the operands of linear layers. 2.
`_layers` measures the multiplies of linear layers in eight bits, and chooses their plans. 3. `_replay` steps
optimizers with every storage on the recorded gradients, at the learning rates of the planned run. 4. `_choose`
chooses, for every group of like parameters, storages whose bytes are worth the loss that they save. 5. The chosen
storages of all parameters are replayed once more, together, and their steps are timed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge._arguments import Count, Size, check, check_choice, shown
from narrowgauge._schedule import SCHEDULES
from narrowgauge._schedule import schedule as rate_factor
from narrowgauge._text import listed, warn
from narrowgauge.optim import AdamW, NarrowOptimizer
from narrowgauge.recipes._choices import TOLERANCE, LayerChoice
from narrowgauge.recipes._fit._choose import Chosen, TooFewBytesError, for_bytes, free_of
from narrowgauge.recipes._fit._layers import fit_layers
from narrowgauge.recipes._fit._multiplies import LayerRecords
from narrowgauge.recipes._fit._probe import Progress, probe
from narrowgauge.recipes._fit._replay import FEWEST_STEPS, Replay
from narrowgauge.recipes._fit._storages import WEIGHTS, Measured
from narrowgauge.recipes._fitted import FittedRecipe
from narrowgauge.recipes._recipe import Recipe

_FORMATS = {"none": (), "int8": ("int8",), "e4m3": ("e4m3",), "auto": ("int8", "e4m3")}
# What rounding in a multiply may add to the gradient of its layer, as a share of the noise of that gradient.
_OF_LAYERS = 0.2
# Options that replays do not take: each sample has its own decay, and its gradients are clipped already.
_OF_THE_MODEL = ("decay_all", "no_decay", "weight_decay", "max_grad_norm", "min_quantized_size")


def fit(
    model: nn.Module,
    batches: Callable[[], Iterable[Any]],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    lr: float,
    steps: int,
    memory: int | str | None = None,
    bytes_per_parameter: float | None = None,
    tolerance: float | None = None,
    schedule: str = "cosine",
    warmup: int = 100,
    final_lr: float = 0.1,
    optimizer: type[NarrowOptimizer] = AdamW,
    dtype: torch.dtype = torch.bfloat16,
    linear: str = "none",
    accumulate: int = 1,
    batch: int | None = None,
    sequence: int | None = None,
    plan: Mapping[str, Any] | None = None,
    seconds: float = 90,
    seed: int = 0,
    progress: Progress = lambda text, share: None,
    **options: Any,
) -> FittedRecipe:
    """Choose how each parameter's weight and moments are kept, and the plan of each linear layer.

    A copy of the model is trained for some steps. With the gradients of these steps optimizers with every storage
    are stepped over the planned run, which gives an estimate of how far rounding moves the loss. See
    docs/guides/fit.md.

    Args:
        model: on the device of its training; it is not changed.
        batches: ``batches()`` gives the batches of an epoch, as `narrowgauge.compare` takes them.
        loss: ``loss(model, batch)`` gives a tensor of one element. The model is in `dtype`.
        lr: the learning rate of the planned run, at its highest.
        steps: of the planned run; 4 at least, because it is measured by its quarters.
        memory: of the GPU that will train, such as ``"24GB"``: the peak that `plan_memory` gives must fit.
        bytes_per_parameter: how many bytes weight, gradient and states may take together.
        tolerance: how far rounding may move the loss at the end of the run, in nats. 0.002 if none of `memory`,
            `bytes_per_parameter` and `tolerance` is given. If no choice keeps within it, the one that is estimated
            to move the loss least is taken.
        schedule, warmup, final_lr: of the planned run: ``"constant"``, ``"linear"`` or ``"cosine"``, the steps of
            the rise, and the last rate as a share of `lr`.
        optimizer: a class of `narrowgauge.optim` whose rule is elementwise.
        dtype: of weights and gradients.
        linear: formats that linear layers may multiply in: ``"none"``, ``"int8"``, ``"e4m3"``, or ``"auto"``: both,
            where a layer is measured to be faster than `nn.Linear` on the model's device.
        accumulate: batches a step; above 1 a batch is a micro-batch.
        batch, sequence: of the planned run, for `memory`. If None, the number of examples in the first batch, and
            as many tokens as the model has positions for.
        plan: other arguments of `plan_memory`, for `memory`: ``loss`` (of model, batch and sequence, which a model
            of your own needs), ``checkpointing``, ``gpus``, ...
        seconds: about how long probe and replays may take.
        seed: of the replays, and of the optimizer.
        progress: called with the name of the current stage, and the share of that stage that is done.
        **options: for the optimizer (``betas``, ``weight_decay``, ``max_grad_norm``, ...), and ``decay_all`` and
            ``no_decay`` as `Recipe.apply` takes them.

    Returns:
        A recipe: ``.apply(model)``, ``.bill()``, ``.save("recipe.toml")``.

    Raises:
        ValueError: for bytes or memory that nothing fits, with the least that would do; for a loss that is not
            finite; for batches that are all the same; for an optimizer whose rule is not elementwise.
        TypeError: for `batches` that cannot be called, for an optimizer that is no class of `narrowgauge.optim`,
            and for arguments that it does not have.
    """
    limits = {"memory": memory, "bytes_per_parameter": bytes_per_parameter, "tolerance": tolerance}
    given = [name for name, value in limits.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{given[0]} must be given alone, got {' and '.join(given)}")
    for name, value in {"lr": lr, "tolerance": tolerance, "bytes_per_parameter": bytes_per_parameter}.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a number above 0, got {value!r}")
    if not callable(batches):
        raise TypeError(
            "batches must be a function that returns an iterator over batches, such as lambda: iter(loader), got "
            f"{shown(batches)}"
        )
    if "keep_fp32" in options:
        raise ValueError(f"keep_fp32 must be left out: fit measures weights in dtype, got {options['keep_fp32']!r}")
    if not (isinstance(optimizer, type) and issubclass(optimizer, NarrowOptimizer)):
        raise TypeError(f"optimizer must be a class of narrowgauge.optim, got {_named(optimizer)}")
    check("steps", steps, Size)
    if steps < FEWEST_STEPS:
        raise ValueError(f"steps must be at least {FEWEST_STEPS}: a run is measured by its quarters, got {steps}")
    check("accumulate", accumulate, Size)
    check("warmup", warmup, Count)
    check_choice("schedule", schedule, SCHEDULES)
    check_choice("linear", linear, tuple(_FORMATS))
    check_choice("dtype", dtype, tuple(WEIGHTS))
    bare = Recipe("fitted", "", dtype, optimizer=optimizer)
    for name in options:
        if name not in ("decay_all", "no_decay") and not bare.takes(name):
            raise TypeError(f"fit() must get arguments of its own or of {optimizer.__name__}, got {name!r}")
    if memory is not None:
        _check_plan(model, bare, {"batch": batch or 1, "sequence": sequence, **(plan or {})})
    begun = time.perf_counter()
    records: list[LayerRecords] = []

    def watching(trained: nn.Module) -> contextlib.AbstractContextManager[object]:
        records.append(LayerRecords(trained))
        return records[0]

    found = probe(
        model, batches, loss, optimizer=optimizer, dtype=dtype, lr=lr, steps=steps, accumulate=accumulate,
        seconds=seconds, options={**options, "seed": seed},
        watching=watching if _FORMATS[linear] else contextlib.nullcontext, progress=progress,
    )  # fmt: skip
    replay = Replay(
        found.samples, optimizer, {"seed": seed, **{k: v for k, v in options.items() if k not in _OF_THE_MODEL}},
        int(options.get("min_quantized_size", 4096)), steps,
        lambda number: lr * rate_factor(schedule, number, steps=steps, warmup=warmup, final=final_lr), seed,
        found.terms * accumulate,
    )  # fmt: skip
    layers: tuple[LayerChoice, ...] = ()
    if records:
        progress("measuring linear layers", 0.0)
        layers = fit_layers(
            records[0], {sample.name: sample.noise_to_signal for sample in found.samples},
            formats=_FORMATS[linear], tolerance=_OF_LAYERS, timed=linear == "auto",
        )  # fmt: skip
    most, has_room = tolerance or TOLERANCE, bytes_per_parameter is not None or memory is not None
    free = 0.0 if has_room else free_of(most)
    measured = Measured(replay, found.samples, dtype, int(options.get("block_size", 256)), free)
    measured.play(seconds - (time.perf_counter() - begun), progress)
    facts = {
        "model": type(model).__name__, "parameters": sum(sample.elements for sample in found.samples), "lr": lr,
        "steps": steps, "schedule": schedule, "warmup": warmup, "final_lr": final_lr, "accumulate": accumulate,
        "probe_steps": len(found.losses), "replay_steps": replay.steps,
    }  # fmt: skip
    if bytes_per_parameter is not None:
        chosen = _for_bytes(measured, bytes_per_parameter)
        limit = f"at most {bytes_per_parameter:g} bytes a parameter"
    elif memory is not None:
        asked = {
            "batch": batch or found.examples,
            "sequence": sequence,
            "accumulate": accumulate > 1,
            **(plan or {}),
        }
        chosen, limit = _for_memory(measured, model, memory, asked, facts), f"{memory} of memory"
    else:
        facts["tolerance"] = most
        chosen, limit = measured.within(most), f"a tolerance of {most:g} nats"
    if idle := [sample.name for sample in found.samples if sample.is_idle]:
        warn(
            f"fit: the probe's samples of {listed(idle)} had no gradient, so they are not measured, and kept as by "
            "adamw8bit-split8 unless a limit asks for less or has room for more; give batches that reach them"
        )
    made = measured.recipe(chosen, {**facts, "limit": limit}, next(model.parameters()).device, progress)
    return replace(made, layers=layers)


def _named(value: object) -> str:
    """A wrong optimizer in an error: a class by its name."""
    return value.__qualname__ if isinstance(value, type) else shown(value)


def _check_plan(model: nn.Module, recipe: Recipe, plan: Mapping[str, Any]) -> None:
    """Plan once before the measurement, so that what no plan can be made of is refused at once."""
    from narrowgauge.recipes._plan import plan_memory

    try:
        plan_memory(model, recipe, **plan)
    except ValueError as error:
        if "loss" in plan or not str(error).startswith("loss must"):
            raise
        raise ValueError(
            f"memory needs plan={{'loss': ...}} for a {type(model).__name__}: a function of model, batch and "
            "sequence that makes its own inputs on the meta device, as plan_memory takes it"
        ) from None


def _for_bytes(measured: Measured, each: float) -> Chosen:
    try:
        return for_bytes(measured.groups, each)
    except TooFewBytesError as error:
        least = math.ceil(100 * error.least) / 100
        raise ValueError(f"bytes_per_parameter must be at least {least:.2f} for this model, got {each:g}") from None


def _for_memory(
    measured: Measured, model: nn.Module, memory: int | str, plan: Mapping[str, Any], facts: Mapping[str, Any]
) -> Chosen:
    """Of the choices whose training fits into the memory by `plan_memory`, the one that costs the least loss.

    The peak of a choice shows how many more or fewer bytes a parameter the next try may take.
    """
    from narrowgauge.recipes._plan import parse_bytes, plan_memory

    room, elements = parse_bytes("memory", memory), sum(one.elements for one in measured.groups)

    def peak(chosen: Chosen) -> int:
        return plan_memory(model, measured.untimed(chosen, {**facts, "limit": str(memory)}), **plan).peak

    best = {one.name: 0 for one in measured.groups}
    least, narrowest = peak(best), measured.bytes_of(best)
    if least > room:
        raise ValueError(f"memory must be at least {least / 1e9:.3g}GB for this model and batch, got {memory}")
    each = narrowest + (room - least) / elements
    for _ in range(4):
        chosen = for_bytes(measured.groups, max(each, narrowest))
        if (taken := peak(chosen)) <= room:
            return chosen
        each = min(each, measured.bytes_of(chosen)) - (taken - room) / elements
    return best
