# ruff: noqa: RUF009  # a field's default and its help are one call
"""The options of a training: their names, defaults and meaning, in one place for flags, file and code.

A field is a flag of the same name (``weight_decay`` is ``--weight-decay``) and a key of the configuration file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from narrowgauge import recipes
from narrowgauge.linear import LinearPlan, named_plan

from ._images import COLUMNS
from ._models import preset
from ._schedule import SCHEDULES

SCALERS = ("none", "dynamic", "static", "tensor")
AUTOCAST = ("none", "bf16", "fp16")
ATTENTION = ("sdpa", "eager")
PATCH_NORMS = ("none", "before", "after")
PARALLEL = ("ddp", "fsdp")
OFFLOADS = ("none", "states", "gradients")

_ALL = ("causal", "masked", "contrastive", "classes")
# Options that only some kinds of models take; with the others they must be at their defaults.
_TAKEN_BY = {
    "validation_data": _ALL[2:], "columns": _ALL[2:3], "patch_norm": _ALL[2:], "patch_dropout": _ALL[2:],
    "max_logit_scale": _ALL[2:3], "crop_scale": _ALL[2:], "flip": _ALL[2:], "workers": _ALL[2:],
    "sequence": _ALL[:3], "vocabulary": _ALL[:3], "stable_embedding": _ALL[:3],
}  # fmt: skip


class SettingsError(ValueError):
    """An option has a value that it cannot have; the message is one line that names it."""


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class TrainSettings:
    """Everything that a run depends on; each field's ``help`` says what it is."""

    data: Path | None = _option(None, "Text: a file, a folder, prepared tokens. Images: a CSV, tar files, classes.")
    out: Path = _option(Path("runs/train"), "The run's folder, and at the end the model's.")
    model: str = _option("mini", "Model preset.")
    recipe: str = _option("adamw8bit-split8", "Recipe of the optimizer, or A, B, C, D, D-MW.")
    steps: int = _option(1000, "Optimizer steps.")
    batch: int = _option(16, "Windows, or images, a step.")
    accumulate: int = _option(1, "Parts that a step's windows, or images, are divided into, one after the other.")
    sequence: int = _option(128, "Tokens a window, or at most of a caption.")
    vocabulary: int | None = _option(None, "Tokens of the byte-level BPE; of prepared ones theirs, else 4096.")
    validation_data: Path | None = _option(None, "Images to validate on; none: a part of --data.")
    columns: str = _option(COLUMNS, "Columns of a CSV: paths of images and captions.")
    seed: int = _option(0, "Of weights, batches and stochastic rounding.")
    lr: float = _option(3e-4, "Learning rate, at its highest.")
    schedule: str = _option("cosine", "After the warm-up: constant, linear or cosine.")
    warmup: int = _option(100, "Steps over which the learning rate rises.")
    final_lr: float = _option(0.1, "Where linear and cosine end, as a share of --lr.")
    beta1: float = _option(0.9, "Decay rate of the first moment.")
    beta2: float = _option(0.95, "Decay rate of the second moment.")
    beta2_schedule: float | None = _option(None, "lambda of beta2 = 1 - step^-lambda, in place of --beta2.")
    eps: float | None = _option(None, "Added to the root of the second moment.")
    weight_decay: float = _option(0.1, "Decoupled weight decay.")
    decay_all: bool = _option(False, "Decay norms and biases too.")
    clip: float = _option(1.0, "Norm of all gradients together at most; 0 for no clipping.")
    linear: str = _option("none", "Plan of the linear layers, such as SWITCHBACK:e4m3.")
    autocast: str = _option("none", "Format that fp32 models compute in: none, bf16 or fp16.")
    scaler: str = _option("none", "Loss scaler: none, dynamic, static or tensor.")
    stable_embedding: bool = _option(False, "A layer norm after the token embedding, Xavier's initialization.")
    layer_scale: float | None = _option(None, "Learned scales after each branch of a block, from this value.")
    kq_norm: bool = _option(False, "Layer norms on queries and keys, head by head.")
    patch_norm: str = _option("none", "Layer norm on patches: none, before their embedding, or after.")
    patch_dropout: float = _option(0.0, "Share of the patches of an image that training drops.")
    max_logit_scale: float = _option(100.0, "What CLIP's scale of cosines is at most; 0 for no bound.")
    crop_scale: float = _option(0.9, "Least share of an image's area in a random crop; 1 for its middle.")
    flip: bool = _option(False, "Mirror one image in two.")
    workers: int | None = _option(None, "Threads that decode images; none: one a core, at most 16.")
    attention: str = _option("sdpa", "sdpa (flash attention where there is one) or eager.")
    gradient_checkpointing: bool = _option(False, "Keep only the inputs of blocks, and compute the rest again.")
    deterministic: bool = _option(False, "Kernels that give the same bits each time, on a GPU too; slower.")
    compile: bool = _option(False, "torch.compile the model.")
    device: str = _option("auto", "cpu, cuda, cuda:1, or auto: a GPU if there is one.")
    parallel: str = _option("ddp", "How processes of torchrun train together: ddp, or fsdp (sharded).")
    offload: str = _option("none", "On the CPU, with the step: none, states (low words too), or gradients as well.")
    validate_every: int = _option(100, "Steps between validations; 0 for one at the end.")
    validation_windows: int = _option(64, "Windows of held-out text, or images, to validate on.")
    log_every: int = _option(10, "Steps between logs of the loss, which wait for the device.")
    gauges_every: int = _option(10, "Steps between measurements of the gauges; 0 for none.")
    save_every: int = _option(500, "Steps between checkpoints; 0 for one at the end.")
    keep: int = _option(2, "Checkpoints that are kept.")
    resume: str = _option("auto", "auto: where the folder's newest checkpoint ends; no; or a checkpoint.")

    def __post_init__(self) -> None:
        for name, takes, good in _checks(self):
            if not good:
                raise SettingsError(f"{flag(name)}: got {getattr(self, name)!r}, takes {takes}")
        recipe = recipes.get(self.recipe)
        taken = recipe.known({"beta2_schedule": 0, "eps": 0})
        for name in ("beta2_schedule", "eps"):
            if getattr(self, name) is not None and name not in taken:
                raise SettingsError(
                    f"{flag(name)}: got {getattr(self, name)!r}, takes nothing with --recipe {recipe.name}, whose "
                    f"{recipe.optimizer.__name__} has none"
                )
        if self.offload != "none" and self.parallel == "fsdp":
            raise SettingsError(
                f"--offload must be none with --parallel fsdp, got {self.offload!r}: FSDP divides states among "
                "GPUs, CPUOffload moves whole parameters"
            )
        if self.offload == "gradients" and self.accumulate > 1:
            raise SettingsError(
                f"--offload must be none or states with --accumulate {self.accumulate}, got 'gradients': nothing "
                "can be added to a gradient that has left the GPU"
            )
        self._check_model_options(preset(self.model).objective)
        _ = self.plan

    def _check_model_options(self, objective: str) -> None:
        for f in fields(self):
            got = getattr(self, f.name)
            if objective not in _TAKEN_BY.get(f.name, _ALL) and got != f.default:
                got = str(got) if isinstance(got, Path) else got
                raise SettingsError(f"{flag(f.name)}: got {got!r}, takes nothing with --model {self.model}")
        if objective == "contrastive" and self.batch < 2:
            raise SettingsError(f"--batch: got {self.batch}, takes at least 2 with --model {self.model}")

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
        return recipes.get(self.recipe).known({name: v for name, v in given.items() if v is not None})

    def plain(self) -> dict[str, Any]:
        """The fields that are not None, as strings, numbers and booleans."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: str(v) if isinstance(v, Path) else v for name, v in values.items() if v is not None}


def flag(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


# A checkpoint cannot be resumed with other values of these: they decide what the weights, states and batches mean.
# The others (how long, how fast, on what, how often) may change from one part of a run to the next.
IDENTITY = (
    "model", "recipe", "batch", "sequence", "seed", "beta1", "beta2", "beta2_schedule", "eps", "weight_decay",
    "decay_all", "clip", "linear", "autocast", "scaler", "stable_embedding", "layer_scale",
    "kq_norm", "patch_norm", "patch_dropout", "max_logit_scale", "crop_scale", "flip",
)  # fmt: skip

# The values of options in checkpoints that are older than the option, where that is not the default.
_BEFORE = {"decay_all": True}


def refuse_others(settings: TrainSettings, saved: Mapping[str, Any], where: Path) -> None:
    """Refuse settings that a checkpoint cannot be resumed with.

    Raises:
        SettingsError: naming the first flag that differs.
    """
    now = settings.plain()
    defaults = {f.name: f.default for f in fields(settings)}
    for name in IDENTITY:
        # An option that is missing in a checkpoint was added later.
        was = saved.get(name, _BEFORE.get(name, defaults[name]))
        if now.get(name) != was:
            raise SettingsError(
                f"{flag(name)}: got {now.get(name)!r}, takes {was!r} to go on from {where}; "
                "another --out begins anew"
            )


# These may differ between the processes of a training: they depend on the machine.
_OWN = ("data", "validation_data", "workers", "device")


def refuse_unlike(given: Sequence[Mapping[str, Any]]) -> None:
    """Refuse processes of one training that were started with different settings.

    Args:
        given: `TrainSettings.plain` of each process.

    Raises:
        SettingsError: naming the first flag that differs, and the process.
    """
    for rank, theirs in enumerate(given):
        for f in fields(TrainSettings):
            first, other = (values.get(f.name, f.default) for values in (given[0], theirs))
            if f.name not in _OWN and other != first:
                raise SettingsError(
                    f"{flag(f.name)}: got {first!r} in process 0 and {other!r} in process {rank}; takes one value "
                    "in all processes of a training"
                )


def _checks(s: TrainSettings) -> list[tuple[str, str, bool]]:
    """Fields, the values that they take, and whether theirs is one."""
    counts = {
        "steps": 1, "batch": 1, "accumulate": 1, "sequence": 3, "seed": 0, "warmup": 0, "validate_every": 0,
        "validation_windows": 1, "log_every": 1, "gauges_every": 0, "save_every": 0, "keep": 1,
    }  # fmt: skip
    found = [
        (name, f"an integer from {least} to 2^31 - 1", least <= getattr(s, name) < 2**31)
        for name, least in counts.items()
    ]
    choices = {
        "schedule": SCHEDULES,
        "scaler": SCALERS,
        "autocast": AUTOCAST,
        "attention": ATTENTION,
        "patch_norm": PATCH_NORMS,
        "parallel": PARALLEL,
        "offload": OFFLOADS,
    }
    found += [(name, f"one of {', '.join(of)}", getattr(s, name) in of) for name, of in choices.items()]
    finite = float("inf")
    return [
        *found,
        ("vocabulary", "an integer from 256 to 2^20", s.vocabulary is None or 256 <= s.vocabulary <= 2**20),
        ("accumulate", f"a divisor of --batch {s.batch}", s.accumulate > 0 and s.batch % s.accumulate == 0),
        ("lr", "a number above 0", 0 < s.lr < finite),
        ("final_lr", "a number from 0 to 1", 0 <= s.final_lr <= 1),
        ("beta1", "a number from 0 to below 1", 0 <= s.beta1 < 1),
        ("beta2", "a number from 0 to below 1", 0 <= s.beta2 < 1),
        ("beta2_schedule", "a number above 0, at most 1", s.beta2_schedule is None or 0 < s.beta2_schedule <= 1),
        ("eps", "a number from 0", s.eps is None or 0 <= s.eps < finite),
        ("weight_decay", "a number from 0", 0 <= s.weight_decay < finite),
        ("clip", "a number above 0, or 0 for none", 0 <= s.clip < finite),
        ("columns", "two names with a comma between them", len([*filter(str.strip, s.columns.split(","))]) == 2),
        ("patch_dropout", "a number from 0 to below 1", 0 <= s.patch_dropout < 1),
        (
            "max_logit_scale",
            "a number from 1, or 0 for no bound",
            1 <= s.max_logit_scale < finite or s.max_logit_scale == 0,
        ),
        ("crop_scale", "a number above 0, at most 1", 0 < s.crop_scale <= 1),
        ("workers", "an integer from 1 to 1024", s.workers is None or 1 <= s.workers <= 1024),
        ("layer_scale", "a number", s.layer_scale is None or abs(s.layer_scale) < finite),
    ]
