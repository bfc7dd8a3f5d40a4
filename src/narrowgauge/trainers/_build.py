"""From settings to a model, its optimizer and its loss scaler."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn

from narrowgauge.distributed import CPUOffload
from narrowgauge.linear import hold_activations, swap_linears
from narrowgauge.linear._swap import output_heads
from narrowgauge.optim import NarrowOptimizer
from narrowgauge.recipes import cast
from narrowgauge.recipes._trace import enable_checkpointing
from narrowgauge.scaling import DynamicLossScaler, LossScaler, StaticLossScaler, TensorLossScaler
from narrowgauge.trainers._extras import Extras
from narrowgauge.trainers._image_models import build_image_model
from narrowgauge.trainers._models import Preset, build_model, parameter_count, preset
from narrowgauge.trainers._parallel import ALONE, ProcessGroup
from narrowgauge.trainers._settings import SettingsError, TrainSettings
from narrowgauge.trainers._tokens import END_OF_TEXT

_SCALERS = {"dynamic": DynamicLossScaler, "static": StaticLossScaler, "tensor": TensorLossScaler}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class Parts:
    """Model, optimizer and loss scaler of a training.

    Attributes:
        model: of transformers, with its extras; on its device, cast by the recipe.
        runs: the module to call: the model, wrapped for DDP and compiled if asked for.
        optimizer: the recipe's, or a CPUOffload around it.
        scaler: the loss scaler, or None.
        autocast: the format to compute in, or None for that of the weights.
        notes: lines about model, plan and processes.
    """

    model: Any
    runs: nn.Module
    optimizer: NarrowOptimizer | CPUOffload
    scaler: LossScaler | None
    autocast: torch.dtype | None
    notes: tuple[str, ...]

    def computing(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(next(self.model.parameters()).device.type, self.autocast)


def plain_model(settings: TrainSettings, outputs: int, end: int) -> Any:
    """A model with its extras, in fp32 on the CPU; arguments as in `build_parts`."""
    sizes, sequence, attention = preset(settings.model), settings.sequence, settings.attention
    model: Any
    if isinstance(sizes, Preset):
        model = build_model(sizes, vocabulary=outputs, sequence=sequence, seed=settings.seed, attention=attention)
    else:
        model = build_image_model(
            sizes, outputs, context=sequence, seed=settings.seed, attention=attention, end=end
        )
    names = (f.name for f in fields(Extras))
    Extras(**{name: getattr(settings, name) for name in names}).add(model, settings.seed)
    return model


def build_parts(
    settings: TrainSettings,
    outputs: int,
    device: torch.device,
    group: ProcessGroup = ALONE,
    *,
    end: int = END_OF_TEXT,
) -> Parts:
    """Make model, optimizer and scaler.

    Args:
        settings, device, group: of the run.
        outputs: number of tokens of the text, or of classes.
        end: the token that ends a caption.

    Raises:
        SettingsError, ValueError: for options that do not go together, by name.
    """
    recipe = settings.chosen
    if settings.autocast != "none" and recipe.dtype != torch.float32:
        raise SettingsError(
            f"--autocast must be none with --recipe {recipe.name}, whose weights are {recipe.dtype} already, got "
            f"{settings.autocast!r}"
        )
    model = plain_model(settings, outputs, end)
    if settings.gradient_checkpointing:
        enable_checkpointing(model, settings.compile)
    model.to(device)
    count = parameter_count(model)
    cast(model, recipe.dtype)
    notes = [
        f"{settings.model}: {count:,} parameters, {recipe.bytes_per_parameter():.2f} bytes each by {recipe.name}: "
        f"{recipe.title}"
    ]
    recipe.swap_layers(model)  # before sharding, which changes their class
    if settings.plan is not None:
        report = swap_linears(model, settings.plan, keep=output_heads(model))
        if not report.swapped:
            raise SettingsError(f"--linear must be a plan for layers of {settings.model}, got {settings.linear!r}")
        notes.append(f"{report.plan.title}: {len(report.swapped)} layers, {len(report.kept)} kept")
    if settings.hold_activations != "none":
        held: Any = settings.hold_activations
        count = len(hold_activations(model, held, keep=output_heads(model)).held)
        notes.append(f"activations held in {held}: those that {count} modules save")
    runs: Any = group.wrap(model)
    # After sharding, which makes other parameters.
    optimizer: NarrowOptimizer | CPUOffload
    given: dict[str, Any] = {"lr": settings.lr, "decay_all": settings.decay_all, **settings.hyperparameters}
    if settings.offload == "none":
        optimizer = recipe.apply(model, **given)
    else:
        kept: Any = "freed" if settings.offload == "gradients" else "kept"
        # DDP averages gradients until the end of the backward pass.
        when: Any = "step" if group.joined else "backward"
        optimizer = recipe.apply(model, around=partial(CPUOffload, gradients=kept, transfer=when), **given)
        what = "states, low words and gradients" if kept == "freed" else "states and low words"
        notes.append(f"the step is the CPU's: {what} are there, beside copies of {optimizer.host_bytes():,} bytes")
    if group.joined:
        notes.append(f"{group.world} processes, {group.parallel}")
    scaler = None if settings.scaler == "none" else _SCALERS[settings.scaler](device.type)
    runs = torch.compile(runs) if settings.compile else runs
    return Parts(model, runs, optimizer, scaler, _AUTOCAST.get(settings.autocast), tuple(notes))
