# ruff: noqa: RUF009  # a field's default, its help and what it must be are one call
"""The options of `narrowgauge fit`: its own, and those of `train` that describe the planned training.

Options of `train` that affect neither the choice nor its check are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from narrowgauge.cli._files import UsageError
from narrowgauge.cli._train import read_config, train_hints
from narrowgauge.recipes._choices import TOLERANCE
from narrowgauge.trainers import SettingsError, TrainSettings
from narrowgauge.trainers._models import preset
from narrowgauge.trainers._settings import count, option

_LIMITS = ("memory", "bytes", "tolerance")
# The options, in the order of the help: first the command's own, then those of the planned training.
_OWN = (*_LIMITS, "linear", "seconds", "verify", "verify_steps", "verify_seeds", "out")
OF_TRAINING = (
    "data", "model", "steps", "batch", "accumulate", "sequence", "vocabulary", "validation_data", "columns", "seed",
    "lr", "schedule", "warmup", "final_lr", "beta1", "beta2", "beta2_schedule", "eps", "weight_decay", "decay_all",
    "clip", "stable_embedding", "layer_scale", "kq_norm", "patch_norm", "patch_dropout", "crop_scale", "flip",
    "workers", "attention", "device", "validation_windows",
)  # fmt: skip
# Of those, what compare takes with the same meaning.
OF_COMPARE = (
    "data", "model", "steps", "batch", "sequence", "vocabulary", "seed", "lr", "warmup", "beta1", "beta2", "eps",
    "weight_decay", "device",
)  # fmt: skip


def _above_zero(default: float | None, help: str) -> Any:
    return option(default, help, "a number above 0", lambda value: 0 < value < math.inf)


@dataclass(frozen=True)
class FitOptions(TrainSettings):
    """The planned training, whose fields are those of `TrainSettings`, and the options of `fit` itself."""

    out: Path = option(Path("runs/fit"), "Folder for recipe.toml and bill.html.")
    linear: str = option(
        "none", "Formats to try in linear layers: none, int8, e4m3, or auto (both, where faster than nn.Linear).",
        "one of none, auto, int8, e4m3", lambda value: value in ("none", "auto", "int8", "e4m3"),
    )  # fmt: skip
    memory: str | None = option(None, "Limit: memory of the GPU, such as 24GB.")
    bytes: float | None = _above_zero(None, "Limit: bytes a parameter for weight, gradient and states.")
    tolerance: float | None = _above_zero(
        None, f"Limit: how far rounding may move the loss at the end, in nats; {TOLERANCE:g} if no limit is given."
    )
    seconds: float = _above_zero(90.0, "About how long the measurement may take.")
    verify: bool = option(False, "Then train with the choice and with D, and compare their losses.")
    verify_steps: int = count(300, "Steps of each run of --verify.", 1)
    verify_seeds: int = count(3, "Seeds of --verify, each with one run of the choice and one of D.", 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [f"--{name}" for name in _LIMITS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"--memory, --bytes or --tolerance: takes one of them, got {' and '.join(given)}")
        if self.memory is not None:
            from narrowgauge.recipes._plan import parse_bytes  # planning takes a tenth of a second to import

            parse_bytes("--memory", self.memory)
        if self.accumulate > 1 and preset(self.model).objective == "contrastive":
            raise SettingsError(
                f"--accumulate must be 1 with --model {self.model}, got {self.accumulate}: its loss contrasts each "
                "image with all captions of a step, so fit cannot divide a step"
            )

    @property
    def plan(self) -> None:
        """None, because `fit` chooses the plans."""

    @property
    def limit(self) -> dict[str, Any]:
        """The limit, as an argument of `recipes.fit`; a tolerance of None means its default."""
        if self.memory is not None:
            return {"memory": self.memory}
        if self.bytes is not None:
            return {"bytes_per_parameter": self.bytes}
        return {"tolerance": self.tolerance}


def fit_hints() -> dict[str, Any]:
    """The options of the command."""
    hints = train_hints(FitOptions)
    return {name: hints[name] for name in (*_OWN, *OF_TRAINING)}


def read_run(context: typer.Context, path: Path | None) -> Path | None:
    """Read the values of a training's file, without the names that mean something else here."""
    read_config(context, path)
    for name in _OWN:
        (context.default_map or {}).pop(name, None)
    return path
