"""What `clip_precision` trains: linear layers by their plan, and what is added to the model or the step.

The rows are the paper's, each with a plan of `docs/linear.md`, around bf16 by autocast and StableAdamW in fp32, as
the paper has it. What is added are the four ways of its Figure 2: nothing, layer scale from zero, layer norms on
keys and queries, gradients clipped at norm 1. Every row is trained with each of them.

Not all of it tells as much. The paper shows all rows with nothing added (Figure 1, Section 2.2.1), and bf16 and
tensor-wise float8 with everything (Figure 2). At the paper's learning rate attention of models this small grows
until any rounding sends a run elsewhere; with norms on keys and queries it cannot, so all rows are compared there
too. The rest has one seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from narrowgauge.linear import named_plan
from narrowgauge.trainers import TrainSettings

REFERENCE, TENSORWISE = "bf16", "tensor-wise float8"
NOTHING, STEADY = "nothing", "KQ norm"


@dataclass(frozen=True)
class Row:
    """Linear layers."""

    name: str  # in results, tables and pictures
    linear: str  # their plan, as `--linear` takes it
    # its zero-shot accuracy minus that of bf16 at ViT-Huge, in points, or what the paper says of it
    paper: str = ""

    @property
    def title(self) -> str:
        """The plan, in a line."""
        return "16 bits in all three multiplies" if self.linear == "none" else named_plan(self.linear).title


@dataclass(frozen=True)
class Added:
    """What is added."""

    name: str  # in results, tables and pictures
    changes: dict[str, Any] = field(default_factory=dict, hash=False)  # of the settings
    paper: str = ""  # what becomes of tensor-wise float8 with it, ViT-Large


@dataclass(frozen=True)
class Task:
    """A run: a model, a row, what is added, a learning rate, a seed."""

    model: str
    row: str
    added: str
    lr: float
    seed: int


ROWS = (
    Row(REFERENCE, "none"),
    Row("SwitchBack int8", "SWITCHBACK", "−0.1"),
    Row("LLM.int8()", "LLM_INT8", "−5.9"),
    Row("SwitchBack float8", "SWITCHBACK:e4m3", "−0.1"),
    Row(TENSORWISE, "TENSORWISE_FP8", "diverges"),
    Row("SwitchBackM int8", "SWITCHBACK_M", "negligible"),
    Row("SwitchBackQ int8", "SWITCHBACK_Q", "no gain"),
)
ADDED = (
    Added(NOTHING, {}, "diverges"),
    Added("layer scale", {"layer_scale": 0.0}, "trains"),
    Added(STEADY, {"kq_norm": True}, "diverges"),
    Added("clipping", {"clip": 1.0}, "diverges"),
)


def settings_of(task: Task, settings: TrainSettings) -> TrainSettings:
    """The settings of a run, from those that all share."""
    row = next(row for row in ROWS if row.name == task.row)
    added = next(added for added in ADDED if added.name == task.added)
    return replace(
        settings, model=task.model, linear=row.linear, lr=task.lr, seed=task.seed, **added.changes
    )  # fmt: skip


def telling(row: str, added: str) -> bool:
    """Whether the paper shows it, or runs are steady enough to be told apart."""
    return added in (NOTHING, STEADY) or row in (REFERENCE, TENSORWISE)
