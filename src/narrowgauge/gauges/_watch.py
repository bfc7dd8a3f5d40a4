"""A training loop that can be looked into: hooks around a step, measurements on the device, records on the host.

    with ng.gauges.watch(model, optimizer, path="run/gauges.jsonl") as gauges:
        for batch in batches:
            ...                 # the loop stays as it is
    gauges.report("run.html")

Nothing is put into the graph and nothing that the loop computes is changed: losses and weights are the same
bits with and without. Of most steps only the loss is kept, as a number on the device. On every tenth step the
update is measured (by the step itself if the optimizer is one of narrowgauge, around it otherwise), gradients
and features are summed, ranks put their sums together, and one vector goes to the host while the device works
on.

What a hook of Python cannot see is not seen: features inside a compiled region, and steps replayed from a CUDA
graph.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from narrowgauge.gauges._alarms import Alarms
from narrowgauge.gauges._features import FORMATS
from narrowgauge.gauges._formats import Target, targets
from narrowgauge.gauges._loss_scale import LossScaleHistory
from narrowgauge.gauges._modules import unwrapped
from narrowgauge.gauges._records import Record
from narrowgauge.gauges._update_records import Updates
from narrowgauge.gauges._watched_run import Output, Sources, parameters_of
from narrowgauge.gauges._watcher import Watch


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    every: int = 10,
    *,
    path: str | os.PathLike[str] | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    updates: Updates = "sampled",
    gradients: bool = True,
    activations: bool | Iterable[str] = True,
    formats: Sequence[str | Target] = FORMATS,
    states_every: int | None = None,
    rms_every: int = 1,
    rms_of: Iterable[str] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    on_alarm: Callable[[Record], None] | None = None,
    warmup: int = 1000,
    ranks: Literal["all", "own"] = "all",
    resume_from: int | None = None,
) -> Watch:
    """Watch a training: a context manager around its loop.

    The step that counts is the optimizer's `step()`, from 1. The loss is what the model returns while it
    trains, where that is a single number, a tuple that begins with one, or has a ``loss``; else give it to
    `Watch.loss` before the optimizer's `step()`. Several in one step are averaged.

    Nothing that befalls a watch ends the training: where the disk takes no more records, the log says so and the
    loop goes on without. What `on_alarm` raises is its own.

    Args:
        model: the module, wrapped in DistributedDataParallel or `torch.compile` or not; FSDP2 too.
        optimizer: any optimizer over its parameters.
        every: updates, gradients and features are measured at every so manieth step.
        path: where records are written to, as they come: a new file, or an existing folder for a ``gauges.jsonl``.
            Without one they are kept in memory.
        tensorboard: a folder for TensorBoard's events.
        updates: True measures all of every tensor; False no updates; ``"sampled"`` one sixteenth of each long
            tensor, except where the optimizer is one of narrowgauge: its steps measure all or nothing.
        gradients: whether gradients are measured, as the optimizer sees them: without the loss scale.
        activations: True for the blocks and embeddings of the model, False for none, or names of modules. Sums
            of what they return while training, and of its gradient (with the loss scale).
        formats: what `feature_stats` asks about.
        states_every: quantized moments of narrowgauge's optimizers are compared with exact ones at every so manieth
            step, those of one parameter at a time, in turn; by default 10 times `every`. 0 for never.
        rms_every: RMS_t of a few parameters is measured at every so manieth step, also between those of `every`:
            a spike that foretells one of the loss is over in a few. 0 for never.
        rms_of: their names; by default embeddings and the first layer behind them, where such a spike shows.
        scaler: the loss scaler, for its history.
        on_alarm: called with the record of each alarm: a spike, or a tensor with inf or NaN for the first time.
        warmup: steps in which no spike is looked for.
        ranks: ``"all"``: the processes of the default process group, if there is one, train one model together;
            their sums are added, and the first of them writes. ``"own"``: this process is on its own.
        resume_from: the step after which a resumed run goes on. Records up to it stay in the file.

    Raises:
        TypeError, ValueError: naming the argument, what it got, what it takes.
        FileExistsError: if `path` has records and `resume_from` is not given, when the loop is entered.
        RuntimeError: if the optimizer is watched already, when the loop is entered.

    Source: the gauges are Collage's (Definitions 3.2 and 3.3), SwitchBack's (Section 3.4, Figures 2 and 5) and
        those of the 8-bit optimizers (Appendix D).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, takes a torch.nn.Module")
    optimizer = plain_optimizer(optimizer)
    _whole("every", every, 1)
    _whole("warmup", warmup, 0)
    states_every = 10 * every if states_every is None else states_every
    _whole("states_every", states_every, 0)
    _whole("rms_every", rms_every, 0)
    if resume_from is not None:
        _whole("resume_from", resume_from, 0)
    for name, given in (("path", path), ("tensorboard", tensorboard)):
        if given is not None and not isinstance(given, str | os.PathLike):
            raise TypeError(f"{name}: got {type(given).__name__}, takes a path")
        if given is not None and "\0" in os.fspath(given):
            raise ValueError(f"{name}: got {given!r}, takes a path")
    if not isinstance(updates, bool) and updates != "sampled":
        raise ValueError(f"updates: got {updates!r}, takes 'sampled', True or False")
    if not isinstance(gradients, bool):
        raise ValueError(f"gradients: got {gradients!r}, takes True or False")
    if ranks not in ("all", "own"):
        raise ValueError(f"ranks: got {ranks!r}, takes 'all' or 'own'")
    if on_alarm is not None and not callable(on_alarm):
        raise TypeError(f"on_alarm: got {type(on_alarm).__name__}, takes a function of a record")
    if not targets(formats):
        raise ValueError("formats: got none, takes at least one format")
    sources = Sources(updates, gradients, activations, targets(formats), every, states_every, rms_every, rms_of)
    return Watch(
        model,
        optimizer,
        sources,
        Output(path, tensorboard, ranks == "all", resume_from),
        parameters_of(unwrapped(model), optimizer),
        LossScaleHistory(scaler) if scaler is not None else None,
        Alarms(on_alarm, warmup),
    )


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of wrappers (accelerate's, Lightning's), whose hooks are those that run.

    Raises:
        TypeError: for what is no optimizer.
    """
    for attribute in ("optimizer", "_optimizer"):
        inner = getattr(optimizer, attribute, None)
        if isinstance(inner, torch.optim.Optimizer):
            return plain_optimizer(inner)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: got {type(optimizer).__name__}, takes a torch.optim.Optimizer")
    return optimizer


def _whole(name: str, got: object, least: int) -> None:
    if not isinstance(got, int) or isinstance(got, bool) or got < least:
        raise ValueError(f"{name}: got {got!r}, takes a whole number from {least} on")
