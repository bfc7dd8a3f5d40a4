"""What of a run is watched: which measurements, which parameters by which names, and the header that says so."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from narrowgauge._version import __version__
from narrowgauge.gauges._formats import Target
from narrowgauge.gauges._modules import depths, plain_name
from narrowgauge.gauges._records import VERSION, Record
from narrowgauge.gauges._run_options import options_record
from narrowgauge.gauges._segments import flat
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
        **options_record(model, optimizer, names),
    }  # fmt: skip
