"""Records as TensorBoard's scalars and histograms.

Names are ``kind/number/tensor``: a group of charts has one number of all tensors. How often a moment's codes are
used is a histogram over the codes.
"""

from __future__ import annotations

import math
import os
from typing import Any

from narrowgauge.gauges._records import Record

_NUMBERS = {
    "step": ("loss", "loss_scale", "skipped", "seconds"),
    "update": ("norm", "descent_quality", "visible_descent_quality", "lost", "lost_visible", "rms"),
    "gradient": ("absmax", "mean", "nonfinite"),
    "activation": ("absmax", "mean", "nonfinite"),
    "activation_gradient": ("absmax", "mean", "nonfinite"),
    "state": ("mean_absolute", "relative_norm", "flushed"),
    "adam_error": ("mean_relative", "mean_absolute"),
    "spike": ("value",),
    "nonfinite": ("value",),
    "lost": ("value",),
}


class TensorBoardWriter:
    """Writes records to a folder of events.

    Args:
        folder: the folder.
        after: the step after which this run goes on; events of later steps in the folder are hidden.

    Raises:
        ModuleNotFoundError: without the package tensorboard.
    """

    def __init__(self, folder: str | os.PathLike[str], after: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "tensorboard needs the package tensorboard: pip install tensorboard, or leave the argument out"
            ) from error
        purge = after + 1 if after else None
        self._writer: Any = SummaryWriter(os.fspath(folder), purge_step=purge)

    def add(self, record: Record) -> None:
        """Write the numbers of a record."""
        kind, step = record["kind"], record.get("step")
        if kind == "state":
            self._histogram(f"state/usage/{_name(record)}", record["usage"], step)
        for number in _NUMBERS.get(kind, ()):
            value = record.get(number)
            if value is not None:
                self._writer.add_scalar("/".join(filter(None, (kind, number, _name(record)))), value, step)
        for name, value in record["rms"].items() if kind == "step" and "rms" in record else ():
            self._writer.add_scalar(f"update/rms/{name}", value, step)
        for fmt, shares in record.get("formats", {}).items():
            for number, value in shares.items():
                if not math.isnan(value):
                    self._writer.add_scalar(f"{kind}/{fmt} {number}/{_name(record)}", value, step)

    def _histogram(self, tag: str, usage: list[int], step: int | None) -> None:
        used = [code for code, count in enumerate(usage) if count]
        self._writer.add_histogram_raw(
            tag, min=used[0] if used else 0, max=used[-1] if used else 0, num=sum(usage),
            sum=sum(code * count for code, count in enumerate(usage)),
            sum_squares=sum(code * code * count for code, count in enumerate(usage)),
            bucket_limits=[code + 0.5 for code in range(len(usage))], bucket_counts=usage, global_step=step,
        )  # fmt: skip

    def close(self) -> None:
        self._writer.close()


def _name(record: Record) -> str:
    """The tensor of a record, with its slot; "model" for the whole model."""
    if record["kind"] == "step":
        return ""
    name = record.get("name") or (record.get("of") if record["kind"] == "spike" else None) or "model"
    return f"{name} [{record['slot']}]" if "slot" in record else str(name)
