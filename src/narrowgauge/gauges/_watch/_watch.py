"""The context manager around a training loop: hooks around a step, measurements on the device, records on the host.

    with ng.gauges.watch(model, optimizer, path="run/gauges.jsonl") as gauges:
        for batch in batches:
            ...                 # the loop stays as it is
    gauges.report("run.html")

Nothing is added to the graph and nothing that the loop computes is changed: losses and weights have the same bits
with and without. Of most steps only the loss is stored, as a number on the device. Every tenth step the update is
measured (by the step itself if the optimizer is one of narrowgauge, around it otherwise), gradients and features
are summed, ranks add their sums, and one vector goes to the host while the device computes.

Hooks of Python do not see features inside a compiled region, nor steps replayed from a CUDA graph.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from narrowgauge._arguments import Count, Size, check, check_choice
from narrowgauge._before_step import BeforeStep, capturing
from narrowgauge._module_names import unwrap_model, unwrap_optimizer
from narrowgauge.gauges._formats import Target, targets
from narrowgauge.gauges._history import storages_by_slot
from narrowgauge.gauges._magnitudes import FORMATS
from narrowgauge.gauges._records import Record, read_records
from narrowgauge.gauges._report import write_report
from narrowgauge.gauges._watch._alarms import Alarms
from narrowgauge.gauges._watch._features import Hook, loss_in
from narrowgauge.gauges._watch._measurements import Measurements
from narrowgauge.gauges._watch._ranks import Message, Part, Ranks
from narrowgauge.gauges._watch._sink import RecordSink
from narrowgauge.gauges._watch._sources import Sources, groups_of, header, parameters_of
from narrowgauge.gauges._watch._step_records import LossScaleHistory, StepRows
from narrowgauge.gauges._watch._update_stats import Updates

MANY_SKIPS = 20  # steps in a row that a scaler skips, before an alarm; one that begins high skips a few
_WATCHED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


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

    Steps are calls of the optimizer's `step()`, counted from 1. The loss is what the model returns while it trains,
    if that is a single number, a tuple that begins with one, or has a ``loss``; else give it to `Watch.loss` before
    `step()`. Several losses in one step are averaged.

    A watch does not end a training: if the disk is full, the log says so and the loop goes on without records. Only
    what `on_alarm` raises reaches the loop.

    Args:
        model: the module, also wrapped in DistributedDataParallel or `torch.compile`, or under FSDP2.
        optimizer: any optimizer over its parameters.
        every: updates, gradients and features are measured at multiples of this step, the due steps.
        path: where records are written as they come: a new file, or a folder for a ``gauges.jsonl``. A new path
            without suffix is a folder.
            None keeps them in memory.
        tensorboard: a folder for TensorBoard's events.
        updates: True measures all of every tensor; False no updates; ``"sampled"`` one sixteenth of each long
            tensor, except with an optimizer of narrowgauge: its steps measure everything or nothing.
        gradients: whether gradients are measured, as the optimizer sees them: without the loss scale.
        activations: True for the model's blocks and embeddings, False for none, or names of modules. Measures what
            they return while training, and its gradient (with the loss scale).
        formats: as for `feature_stats`.
        states_every: quantized moments of narrowgauge's optimizers are compared with exact ones at multiples of
            this step, one parameter at a time, in turn; by default 10 times `every`. 0 for never.
        rms_every: RMS_t of a few parameters is measured at multiples of this step, between due steps too: an RMS
            spike lasts only a few steps. 0 for never.
        rms_of: their names; by default embeddings and the first other layer, where such spikes show.
        scaler: the loss scaler, for its history; that of accelerate's optimizer by default. A step that it skips
            without calling the optimizer leaves nothing behind. Of a scaler that is not known, loss and features of
            such a step are averaged into the next one.
        on_alarm: called with the record of each alarm: a spike, a tensor's first inf or NaN, or the first time that
            three measurements in a row find every update of a tensor lost.
        warmup: steps that are not searched for spikes.
        ranks: ``"all"``: the processes of the default process group, if there is one, train one model together;
            their sums are added, and the first of them writes. ``"own"``: this process trains a model of its own.
        resume_from: the step after which a resumed run goes on. Records up to it stay in the file.

    Raises:
        TypeError, ValueError: naming the argument.
        FileExistsError: on entering, if `path` has records and `resume_from` is None.
        RuntimeError: on entering, if the optimizer is watched already.

    Source: the gauges are Collage's (Definitions 3.2 and 3.3), SwitchBack's (Section 3.4, Figures 2 and 5) and
        those of the 8-bit optimizers (Appendix D).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    scaler = scaler or getattr(optimizer, "scaler", None)
    optimizer = unwrap_optimizer(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    check("every", every, Size)
    states_every = 10 * every if states_every is None else states_every
    for name, steps in (("warmup", warmup), ("states_every", states_every), ("rms_every", rms_every)):
        check(name, steps, Count)
    check("resume_from", resume_from or 0, Count)
    check_choice("updates", updates, ("sampled", True, False))
    check_choice("ranks", ranks, ("all", "own"))
    if on_alarm is not None and not callable(on_alarm):
        raise TypeError(f"on_alarm must be a function of a record, got {type(on_alarm).__name__}")
    asked = targets(formats)
    if not asked:
        raise ValueError("formats must have at least one format, got none")
    sources = Sources(updates, gradients, activations, asked, every, states_every, rms_every, rms_of)
    scales = LossScaleHistory(scaler) if scaler is not None else None
    sink = RecordSink(path, tensorboard, resume_from, Alarms(on_alarm, warmup))
    return Watch(model, optimizer, sources, scales, sink, resume_from or 0, together=ranks == "all")


class Watch:
    """A watched training; made by `watch`, used as a context manager, once."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sources: Sources,
        scales: LossScaleHistory | None,
        sink: RecordSink,
        taken: int,
        together: bool,
    ) -> None:
        self._model, self._optimizer, self._sources = model, optimizer, sources
        inner = unwrap_model(model)
        names = parameters_of(inner, optimizer)
        self._measurements = Measurements(inner, optimizer, sources, names)
        self._steps = StepRows(taken, [names[p] for p in self._measurements.rms_of], scales, sources.every)
        self._sink, self._together, self._ranks = sink, together, Ranks()
        self._messages: list[Message] = []
        self._handles: list[Any] = []
        self._open = self._entered = False

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("a watch can be entered once; make another one with narrowgauge.gauges.watch")
        if self._optimizer in _WATCHED:
            raise RuntimeError("optimizer is watched already; one watch at a time")
        self._entered = True
        try:
            self._begin()
        except BaseException:  # `with` does not call __exit__ if __enter__ raises
            self._let_go()
            self._sink.close()
            raise
        return self

    def _begin(self) -> None:
        self._ranks = Ranks.all() if self._together else Ranks()
        inner, names = unwrap_model(self._model), self._measurements.names
        self._sink.open(header(inner, self._optimizer, self._sources, names), self._ranks.first)
        self._stored = self._storages()
        _WATCHED.add(self._optimizer)
        self._open = True
        self._handles = [
            self._model.register_forward_pre_hook(Hook(self._drop_skipped)),
            self._model.register_forward_hook(Hook(self._model_returned)),
            self._optimizer.register_step_pre_hook(BeforeStep(self._before_step)),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        self._measurements.features.attach()
        self._steps.start(time.perf_counter())
        self._measurements.expect(self._steps.taken + 1)

    def _let_go(self) -> None:
        """Leave model and optimizer as they were."""
        for handle in self._handles:
            handle.remove()
        self._measurements.detach()
        _WATCHED.discard(self._optimizer)
        self._open = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()
        try:
            # After an error other ranks may not take part in the collective.
            if self._steps.waiting and (kind is None or self._ranks.group is None):
                self._send([])
            self._read_all()
        finally:
            self._sink.close()

    def _must_have_begun(self) -> None:
        if not self._entered:
            raise RuntimeError("a watch must be entered before it sees anything: with gauges.watch(...) as watch")

    @property
    def running(self) -> bool:
        """Whether the training is being watched: between entering and leaving."""
        return self._open

    def loss(self, value: Tensor | float) -> None:
        """Give the loss of the next step, in place of what the model returned. Nothing is waited for.

        A loss given after the optimizer's `step()` is the next step's.

        Args:
            value: a real number, or a tensor of one element.

        Raises:
            TypeError, ValueError: for anything else.
            RuntimeError: if the watch was never entered.
        """
        self._must_have_begun()
        if not isinstance(value, Tensor):
            value = float(value)
        elif value.numel() != 1 or value.is_complex():
            raise ValueError(f"value must be one real number, got {value.dtype} of shape {tuple(value.shape)}")
        self._drop_skipped()
        self._steps.loss_given(value)

    def record(self, record: Record) -> None:
        """Add a record of something that was done to the training, with its ``kind`` and ``step``."""
        if self._ranks.first:
            self._submit([record])

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Context of a forward pass that is repeated later, as for gradient caching: its features are not measured.

        No steps may be taken in it.
        """
        return self._measurements.features.paused()

    def rows(self) -> list[Record]:
        """The records so far, in order; waits for what is on its way from the device.

        With a `path` only the first of several ranks has them.
        """
        self.settle()
        writer = self._sink.writer
        return list(read_records(writer.path) if writer is not None else self._sink.rows)

    def settle(self) -> None:
        """Wait until everything measured is recorded: before a checkpoint, so that no step is missing later."""
        if self._open and self._steps.waiting and self._ranks.group is None:
            self._send([])
        self._read_all()
        if self._open:
            self._sink.flush()

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the records as one self-contained page of HTML.

        Returns:
            The page's path.

        Raises:
            ModuleNotFoundError: if a package for pages is not installed, with the command that installs it. The
                records are then beside the path, as `narrowgauge report` takes them.
            RuntimeError: if the watch was never entered.
        """
        self._must_have_begun()
        page = Path(path)
        write_report(self.rows(), page)
        return page

    def _drop_skipped(self, *args: Any) -> None:
        """Forget what was seen for a step that a scaler has skipped: it is not the next one's."""
        if not torch.compiler.is_compiling() and self._steps.dropped(self._optimizer):
            self._measurements.expect(self._steps.taken + 1)
            if self._ranks.first and self._steps.dropped_in_a_row == MANY_SKIPS:
                self.settle()
                taken = self._steps.taken
                self.record({"kind": "skips", "step": max(1, taken), "taken": taken, "value": MANY_SKIPS})
                self._sink.flush()

    def _model_returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        loss = loss_in(output)
        if loss is not None:
            self._steps.loss_returned(loss)

    @torch.no_grad()
    def _before_step(self) -> None:
        """The gradients are there, and the step is about to be taken."""
        self._steps.begin(self._optimizer)
        self._measurements.begin(self._steps.taken + 1)
        if self._ranks.first:
            self._submit(self._measurements.preview_moments(self._steps.taken + 1))

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if capturing():
            return
        self._steps.end(time.perf_counter(), self._measurements.rms(self._ranks))
        step = self._steps.taken
        if self._ranks.first:
            self._submit(self._measurements.unseen_features(step))
        found, home = self._measurements.end(step, self._ranks), self._measurements.home
        if moments := self._measurements.moments():  # of this rank alone
            self._messages.append(Message(home, moments, Ranks()))
        if found or (home.type == "cpu" and self._ranks.group is None):
            self._send(found)
        self._measurements.expect(step + 1)
        if found:
            self._record_changes(step)
        while self._messages and self._messages[0].arrived:
            self._read_first()
        self._sink.notify()

    def _record_changes(self, step: int) -> None:
        """Record the parameters whose storages are others than at the last measurement."""
        now = self._storages()
        changed = {name: own for name, own in now.items() if self._stored.get(name) != own}
        if changed and self._ranks.first:
            self._submit([{"kind": "storages", "step": step, "parameters": changed}])
        self._stored = now

    def _storages(self) -> dict[str, dict[str, str]]:
        # A learning rate may be a tensor on a GPU, and reading it would wait.
        options = ("weights", "states", "kept", "storages")
        return storages_by_slot({"groups": groups_of(self._optimizer, self._measurements.names, options)})

    def _send(self, found: Sequence[Part]) -> None:
        """Send the waiting steps, and the tables of the present one."""
        home = self._measurements.home
        self._messages.append(Message(home, [self._steps.part(home), *found], self._ranks))

    def _read_all(self) -> None:
        while self._messages:
            self._read_first()

    def _read_first(self) -> None:
        for part, table in self._messages.pop(0).read():
            self._sink.submit(partial(part.records, table))

    def _submit(self, records: list[Record]) -> None:
        if records:
            self._sink.submit(lambda: records)
