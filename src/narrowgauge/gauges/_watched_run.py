"""What of a run is watched: which measurements, which parameters by which names, and the header that says so."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from narrowgauge._version import __version__
from narrowgauge.gauges._alarms import Alarms
from narrowgauge.gauges._formats import Target
from narrowgauge.gauges._modules import depths, plain_name
from narrowgauge.gauges._outlet import Outlet
from narrowgauge.gauges._records import VERSION, Record, Writer, read_records
from narrowgauge.gauges._run_options import options_record
from narrowgauge.gauges._segments import flat
from narrowgauge.gauges._step_rms import embeddings
from narrowgauge.gauges._tensorboard import Board
from narrowgauge.gauges._update_records import Updates


@dataclass(frozen=True)
class Sources:
    """What is measured, and when; see `watch`."""

    updates: Updates
    gradients: bool
    activations: bool | Iterable[str]
    targets: tuple[Target, ...]
    every: int
    states_every: int
    rms_every: int = 1
    rms_of: Iterable[str] | None = None


@dataclass(frozen=True)
class Output:
    """Where records go, and after which step they go on; see `watch`."""

    path: str | os.PathLike[str] | None
    tensorboard: str | os.PathLike[str] | None
    together: bool
    resume_from: int | None

    def open(self, first: bool, taken: int, alarms: Alarms) -> Outlet:
        """The outlet of a rank, the first or another one, of a run that has taken some steps.

        Raises:
            OSError, ValueError: where the file or the folder cannot be written, or the file not be continued.
        """
        writer = Writer(self.path, self.resume_from) if first and self.path is not None else None
        if writer is not None and writer.continues:
            alarms.recall(read_records(writer.path))
        try:
            board = Board(self.tensorboard, taken) if first and self.tensorboard is not None else None
        except BaseException:
            if writer is not None:
                writer.close()
            raise
        return Outlet(writer, board, self.path is None, alarms if first else None)


def parameters_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[Tensor, str]:
    """Names of the parameters that can move, in the model's order, shared ones once, by their first name.

    What the optimizer has and the model has not comes last, by its place among the groups.

    Raises:
        ValueError: if there are none, none that the optimizer has, or one without a shape.
    """
    names: dict[Tensor, str] = {p: plain_name(name) for name, p in model.named_parameters()}
    if not names:
        raise ValueError("model: got one without parameters, takes one with some")
    for p, name in names.items():
        if isinstance(p, nn.UninitializedParameter):
            raise ValueError(
                f"model: got one whose {name} has no shape yet, takes one that has been called once (a lazy module)"
            )
    places = {
        p: f"{n}.{i}" for n, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])
    }
    if not any(p in names for p in places):
        raise ValueError("optimizer: got one that has no parameter of the model, takes the model's own")
    return names | {p: f"param_groups.{place}" for p, place in places.items() if p not in names}


def header(
    model: nn.Module, optimizer: torch.optim.Optimizer, sources: Sources, names: Mapping[Tensor, str]
) -> Record:
    """The first record of a run."""
    device = flat(next(iter(names))).device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "kind": "run", "version": VERSION, "every": sources.every, "rms_every": sources.rms_every,
        "optimizer": type(optimizer).__name__,
        "device": kind, "torch": torch.__version__, "narrowgauge": __version__,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "parameters": {name: list(p.shape) for p, name in names.items()}, "depth": depths(model),
        "embeddings": [names[p] for p in embeddings(model, names)],
        **options_record(model, optimizer, names),
    }  # fmt: skip
