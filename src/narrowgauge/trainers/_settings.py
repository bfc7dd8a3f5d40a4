# ruff: noqa: RUF009  # a field's default, its help and what it must be are one call
"""The options of a training: their names, defaults, meaning and bounds, in one place for flags, file and code.

A field is a flag of the same name (``weight_decay`` is ``--weight-decay``) and a key of the configuration file,
which is TOML, as in the `config.toml` of a run's folder::

    model = "gpt2"
    weight-decay = 0.1
    stable-embedding = true
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from narrowgauge import recipes
from narrowgauge._schedule import SCHEDULES
from narrowgauge.linear import LinearPlan, named_plan
from narrowgauge.linear._quantize import FORMATS as HELD_IN
from narrowgauge.recipes import FittedRecipe, Recipe
from narrowgauge.trainers._export import ADDITIONS, NEEDS_LOADER
from narrowgauge.trainers._images import COLUMNS
from narrowgauge.trainers._models import preset

_ALL = ("causal", "masked", "contrastive", "classes")
# Options that only some kinds of models take; with the others they must be at their defaults.
_TAKEN_BY = {
    "validation_data": _ALL[2:], "columns": _ALL[2:3], "patch_norm": _ALL[2:], "patch_dropout": _ALL[2:],
    "max_logit_scale": _ALL[2:3], "crop_scale": _ALL[2:], "flip": _ALL[2:], "workers": _ALL[2:],
    "sequence": _ALL[:3], "vocabulary": _ALL[:3], "stable_embedding": _ALL[:3],
}  # fmt: skip
# Keys of configuration files that earlier releases wrote, without an effect on results.
_REMOVED = {"gather-codes"}


class SettingsError(ValueError):
    """An option has a value that it cannot have; the message is one line that names it."""


def option(default: Any, help: str, must_be: str = "", good: Callable[[Any], bool] = lambda value: True) -> Any:
    return field(default=default, metadata={"help": help, "must be": must_be, "good": good})


def count(default: int, help: str, least: int) -> Any:
    return option(default, help, f"an integer from {least} to 2^31 - 1", lambda value: least <= value < 2**31)


def _choice(default: str, help: str, *choices: str) -> Any:
    return option(default, help, f"one of {', '.join(choices)}", lambda value: value in choices)


def _share(default: float | None, help: str) -> Any:
    return option(default, help, "a number from 0 to below 1", lambda value: 0 <= value < 1)


def _from_zero(default: float | None, help: str, must_be: str = "a number from 0") -> Any:
    return option(default, help, must_be, lambda value: 0 <= value < math.inf)


@dataclass(frozen=True)
class TrainSettings:
    """Everything that a run depends on; each field's ``help`` says what it is."""

    data: Path | None = option(None, "Text: a file, a folder, prepared tokens. Images: a CSV, tar files, classes.")
    out: Path = option(Path("runs/train"), "The run's folder, and at the end the model's.")
    model: str = option("mini", "Model preset.")
    recipe: str = option("adamw8bit-split8", "Recipe: a name, or A, B, C, D, D-MW, or the file of a fitted one.")
    steps: int = count(1000, "Optimizer steps.", 1)
    batch: int = count(16, "Windows, or images, a step.", 1)
    accumulate: int = count(1, "Parts that a step's windows, or images, are divided into, one after the other.", 1)
    sequence: int = count(128, "Tokens a window, or at most of a caption.", 3)
    vocabulary: int | None = option(
        None, "Tokens of the byte-level BPE; of prepared ones theirs, else 4096.",
        "an integer from 256 to 2^20", lambda value: 256 <= value <= 2**20,
    )  # fmt: skip
    validation_data: Path | None = option(None, "Images to validate on; none: a part of --data.")
    columns: str = option(
        COLUMNS, "Columns of a CSV: paths of images and captions.",
        "two names with a comma between them", lambda value: len([*filter(str.strip, value.split(","))]) == 2,
    )  # fmt: skip
    seed: int = count(0, "Of weights, batches and stochastic rounding.", 0)
    lr: float = option(
        3e-4, "Learning rate, at its highest.", "a number above 0", lambda value: 0 < value < math.inf
    )
    schedule: str = _choice("cosine", "After the warm-up: constant, linear or cosine.", *SCHEDULES)
    warmup: int = count(100, "Steps over which the learning rate rises.", 0)
    final_lr: float = option(
        0.1, "Where linear and cosine end, as a share of --lr.",
        "a number from 0 to 1", lambda value: 0 <= value <= 1,
    )  # fmt: skip
    beta1: float = _share(0.9, "Decay rate of the first moment.")
    beta2: float = _share(0.95, "Decay rate of the second moment.")
    beta2_schedule: float | None = option(
        None, "lambda of beta2 = 1 - step^-lambda, in place of --beta2.",
        "a number above 0, at most 1", lambda value: 0 < value <= 1,
    )  # fmt: skip
    eps: float | None = _from_zero(None, "Added to the root of the second moment.")
    weight_decay: float = _from_zero(0.1, "Decoupled weight decay.")
    decay_all: bool = option(False, "Decay norms and biases too.")
    clip: float = _from_zero(
        1.0, "Norm of all gradients together at most; 0 for no clipping.", "a number above 0, or 0 for none"
    )
    linear: str = option("none", "Plan of the linear layers, such as SWITCHBACK:e4m3.")
    hold_activations: str = _choice(
        "none", "What blocks save for the backward pass, in: none, e4m3, e5m2 or int8.", "none", *HELD_IN
    )
    autocast: str = _choice(
        "none", "Format that fp32 models compute in: none, bf16 or fp16.", "none", "bf16", "fp16"
    )
    scaler: str = _choice(
        "none", "Loss scaler: none, dynamic, static or tensor.", "none", "dynamic", "static", "tensor"
    )
    stable_embedding: bool = option(False, "A layer norm after the token embedding, Xavier's initialization.")
    layer_scale: float | None = option(
        None, "Learned scales after each branch of a block, from this value.", "a number", math.isfinite
    )
    kq_norm: bool = option(False, "Layer norms on queries and keys, head by head.")
    patch_norm: str = _choice(
        "none", "Layer norm on patches: none, before their embedding, or after.", "none", "before", "after"
    )
    patch_dropout: float = _share(0.0, "Share of the patches of an image that training drops.")
    max_logit_scale: float = option(
        100.0, "What CLIP's scale of cosines is at most; 0 for no bound.",
        "a number from 1, or 0 for no bound", lambda value: 1 <= value < math.inf or value == 0,
    )  # fmt: skip
    crop_scale: float = option(
        0.9, "Least share of an image's area in a random crop; 1 for its middle.",
        "a number above 0, at most 1", lambda value: 0 < value <= 1,
    )  # fmt: skip
    flip: bool = option(False, "Mirror one image in two.")
    workers: int | None = option(
        None, "Threads that decode images; none: one a core, at most 16.",
        "an integer from 1 to 1024", lambda value: 1 <= value <= 1024,
    )  # fmt: skip
    attention: str = _choice("sdpa", "sdpa (flash attention where there is one) or eager.", "sdpa", "eager")
    gradient_checkpointing: bool = option(False, "Keep only the inputs of blocks, and compute the rest again.")
    deterministic: bool = option(False, "Kernels that give the same bits each time, on a GPU too; slower.")
    compile: bool = option(False, "torch.compile the model.")
    device: str = option("auto", "cpu, cuda, cuda:1, or auto: a GPU if there is one.")
    parallel: str = _choice(
        "ddp", "How processes of torchrun train together: ddp, or fsdp (sharded).", "ddp", "fsdp"
    )
    offload: str = _choice(
        "none", "On the CPU, with the step: none, states (low words too), or gradients as well.",
        "none", "states", "gradients",
    )  # fmt: skip
    validate_every: int = count(100, "Steps between validations; 0 for one at the end.", 0)
    validation_windows: int = count(64, "Windows of held-out text, or images, to validate on.", 1)
    log_every: int = count(10, "Steps between logs of the loss, which wait for the device.", 1)
    gauges_every: int = count(10, "Steps between measurements of the gauges; 0 for none.", 0)
    adapt: bool = option(False, "Widen storages that lose too much, by the gauges, while training.")
    adapt_tolerance: float = option(
        0.1, "How much of an update or a product rounding may change before --adapt acts.",
        "a number above 0", lambda value: 0 < value < math.inf,
    )  # fmt: skip
    save_every: int = count(500, "Steps between checkpoints; 0 for one at the end.", 0)
    keep: int = count(2, "Checkpoints that are kept.", 1)
    resume: str = option("auto", "auto: where the folder's newest checkpoint ends; no; or a checkpoint.")

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            unset = value is None and f.default is None
            if not (unset or f.metadata["good"](value)):
                raise SettingsError(f"{flag(f.name)} must be {f.metadata['must be']}, got {value!r}")
        if self.batch % self.accumulate:
            raise SettingsError(f"--accumulate must be a divisor of --batch {self.batch}, got {self.accumulate}")
        recipe = self.chosen
        for name in recipe.settings.keys() & {"lr", "decay_all", *self.hyperparameters}:
            raise SettingsError(f"--recipe must not set {name}, which has a flag, got {self.recipe!r}, which does")
        if recipe.layer_plans and self.linear != "none":
            raise SettingsError(
                f"--linear must be none with --recipe {self.recipe}, which has plans of layers, got {self.linear!r}"
            )
        taken = recipe.known({"beta2_schedule": 0, "eps": 0})
        for name in ("beta2_schedule", "eps"):
            if getattr(self, name) is not None and name not in taken:
                raise SettingsError(
                    f"{flag(name)} must be left out with --recipe {recipe.name}, whose "
                    f"{recipe.optimizer.__name__} has none, got {getattr(self, name)!r}"
                )
        if self.offload != "none" and self.parallel == "fsdp":
            raise SettingsError(
                f"--offload must be none with --parallel fsdp, got {self.offload!r}: FSDP divides states among "
                "GPUs, CPUOffload moves whole parameters"
            )
        if self.hold_activations != "none" and self.gradient_checkpointing:
            raise SettingsError(
                "--hold-activations must be none with --gradient-checkpointing, whose blocks save their inputs "
                f"only, got {self.hold_activations!r}"
            )
        if self.offload == "gradients" and self.accumulate > 1:
            raise SettingsError(
                f"--offload must be none or states with --accumulate {self.accumulate}, got 'gradients': nothing "
                "can be added to a gradient that has left the GPU"
            )
        if self.adapt:
            self._check_adapt()
        self._check_model_options(preset(self.model).objective)
        _ = self.plan

    def _check_adapt(self) -> None:
        if not self.gauges_every:
            raise SettingsError(
                "--gauges-every must be at least 1 with --adapt, which acts on what they measure, got 0"
            )
        if self.offload != "none":
            raise SettingsError(
                f"--offload must be none with --adapt, got {self.offload!r}: states on the CPU are not converted"
            )
        hidden = "--compile" if self.compile else "--parallel fsdp" if self.parallel == "fsdp" else None
        if self.linear != "none" and hidden:
            raise SettingsError(
                f"--linear must be none with --adapt and {hidden}, which hides layers from measurements, got "
                f"{self.linear!r}"
            )

    def _check_model_options(self, objective: str) -> None:
        for f in fields(self):
            got = getattr(self, f.name)
            if objective not in _TAKEN_BY.get(f.name, _ALL) and got != f.default:
                got = str(got) if isinstance(got, Path) else got
                raise SettingsError(f"{flag(f.name)} must be left out with --model {self.model}, got {got!r}")
        if objective == "contrastive" and self.batch < 2:
            raise SettingsError(f"--batch must be at least 2 with --model {self.model}, got {self.batch}")

    @functools.cached_property
    def chosen(self) -> Recipe:
        """The recipe. That of a file is read once: the file may change while a run goes on."""
        return recipes.get(self.recipe)

    @property
    def plan(self) -> LinearPlan | None:
        """The plan of the linear layers, or None.

        Raises:
            SettingsError: for an unknown one.
        """
        if self.linear == "none":
            return None
        try:
            return named_plan(self.linear)
        except ValueError as error:
            raise SettingsError(f"--linear {str(error).removeprefix('plan ')} (or none)") from None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The arguments of the recipe's optimizer, of those that it has."""
        given = {
            "betas": (self.beta1, self.beta2), "beta2_schedule": self.beta2_schedule, "eps": self.eps,
            "weight_decay": self.weight_decay, "max_grad_norm": self.clip or None, "seed": self.seed,
        }  # fmt: skip
        return self.chosen.known({name: v for name, v in given.items() if v is not None})

    @property
    def content(self) -> str:
        """What a fitted recipe says, as a digest; empty for a recipe by name."""
        return content_of(self.chosen)

    def plain(self) -> dict[str, Any]:
        """The fields that are not None, as strings, numbers and booleans."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: str(v) if isinstance(v, Path) else v for name, v in values.items() if v is not None}


def content_of(recipe: Recipe) -> str:
    """A digest of what a fitted recipe says, by which runs know it; empty for another recipe."""
    return hashlib.sha256(recipe.text().encode()).hexdigest() if isinstance(recipe, FittedRecipe) else ""


def flag(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


# --- settings that must agree

# A checkpoint cannot be resumed with other values of these: they decide what the weights, states and batches mean.
# The others (how long, how fast, on what, how often) may change from one part of a run to the next.
_IDENTITY = (
    "model", "recipe", "batch", "sequence", "seed", "beta1", "beta2", "beta2_schedule", "eps", "weight_decay",
    "decay_all", "clip", "linear", "hold_activations", "autocast", "scaler", "stable_embedding", "layer_scale",
    "kq_norm", "patch_norm", "patch_dropout", "max_logit_scale", "crop_scale", "flip",
)  # fmt: skip
# Of the others, those that decide how the weights move.
_COURSE = ("lr", "schedule", "warmup", "final_lr", "adapt", "adapt_tolerance", "steps")
# The values of options in checkpoints that are older than the option, where that is not the default.
_BEFORE = {"decay_all": True}
# These may differ between the processes of a training: they depend on the machine.
_OWN = ("data", "validation_data", "workers", "device")


def refuse_others(settings: TrainSettings, saved: Mapping[str, Any], where: Path, content: str = "") -> None:
    """Refuse settings that a checkpoint cannot be resumed with; a SettingsError names the first such flag.

    Args:
        settings, saved: those of now, and of the checkpoint.
        where: the checkpoint.
        content: of its recipe, as `TrainSettings.content`. The file may be another one now.
    """
    now = settings.plain()
    defaults = {f.name: f.default for f in fields(settings)}
    if content and content != settings.content:
        changed = settings.recipe if saved["recipe"] != settings.recipe else f"another content in {settings.recipe}"
        raise SettingsError(
            f"--recipe must be {saved['recipe']}, unchanged, to go on from {where} (another --out begins anew), "
            f"got {changed}"
        )
    for name in _IDENTITY:
        if name == "recipe" and content:
            continue
        # An option that is missing in a checkpoint was added later.
        was = saved.get(name, _BEFORE.get(name, defaults[name]))
        if now.get(name) != was:
            raise SettingsError(
                f"{flag(name)} must be {was!r} to go on from {where} (another --out begins anew), got "
                f"{now.get(name)!r}"
            )


def other_course(settings: TrainSettings, saved: Mapping[str, Any]) -> dict[str, str]:
    """By name, options with which weights move otherwise than in a checkpoint: "--lr 0.001, before 0.0003"."""
    now = settings.plain()
    idle = {"adapt_tolerance"} if not settings.adapt else set()
    if settings.schedule == "constant":
        idle |= {"steps", "final_lr"}  # no rate falls towards the last step
    return {
        name: f"{flag(name)} {now[name]}, before {saved[name]}"
        for name in _COURSE
        if name not in idle and name in saved and saved[name] != now[name]
    }


def refuse_unlike(given: Sequence[Mapping[str, Any]]) -> None:
    """Refuse processes of one training that were started with different settings (`TrainSettings.plain` of each).

    Raises:
        SettingsError: naming the first flag that differs, and the process.
    """
    for rank, theirs in enumerate(given):
        for f in fields(TrainSettings):
            first, other = (values.get(f.name, f.default) for values in (given[0], theirs))
            if f.name not in _OWN and other != first:
                raise SettingsError(
                    f"{flag(f.name)} must be one value in all processes of a training, got {first!r} in process 0 "
                    f"and {other!r} in process {rank}"
                )


# --- the configuration file


def config_text(settings: TrainSettings, changes: Sequence[str] = ()) -> str:
    """Settings as TOML, unset ones without a line; a SettingsError for a path that is not UTF-8.

    `changes` are lines on a run that went on with other options.
    """
    lines = ["# narrowgauge train --config THIS repeats the run; flags beside it win."]
    if changes:
        lines = ["# narrowgauge train --config THIS does not repeat the run, which went on with other options:"]
        lines += [f"# {change}" for change in changes]
    if settings.kq_norm or settings.patch_norm != "none":
        lines.append(f"# The model has norms that its class has no place for, in {ADDITIONS}:")
        lines.append(f"# {NEEDS_LOADER}.")
    for name, value in settings.plain().items():
        try:
            f"{value}".encode()
        except UnicodeEncodeError:
            raise SettingsError(f"{flag(name)} must be text in UTF-8, got {value!r}") from None
        # A string of JSON is one of TOML, except for the character 127 and surrogates.
        shown = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{flag(name)[2:]} = {shown}")
    return "\n".join(lines) + "\n"


def config_values(path: Path) -> dict[str, Any]:
    """The values of a configuration file, by field.

    Raises:
        SettingsError: for invalid TOML, an unknown key, or a value of another type than the flag's.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"--config: {path}: {getattr(error, 'strerror', None) or error}") from None
    known = {flag(f.name)[2:]: f for f in fields(TrainSettings)}
    found: dict[str, Any] = {}
    for typed, value in values.items():
        key = typed.replace("_", "-")
        if key in _REMOVED:
            continue
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise SettingsError(f"--config: {path}: a key must be one of {', '.join(known)}, got {typed!r}{hint}")
        if known[key].name in found:
            raise SettingsError(f"--config: {path}: {key} must be given once, got it as {typed!r} too")
        kind = str(known[key].type).split(" | ")[0]
        good = {"int": int, "float": int | float, "bool": bool}.get(kind, str)
        if not isinstance(value, good) or (isinstance(value, bool) and kind != "bool"):
            must_be = {"int": "an integer", "float": "a number", "bool": "true or false"}.get(kind, "a string")
            raise SettingsError(f"--config: {path}: {key} must be {must_be}, got {value!r}")
        try:
            found[known[key].name] = float(value) if kind == "float" else value
        except OverflowError:
            raise SettingsError(f"--config: {path}: {key} must be a number, got an integer beyond 1e308") from None
    return found
