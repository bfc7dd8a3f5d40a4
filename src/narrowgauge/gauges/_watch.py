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
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from narrowgauge.gauges._alarms import LOG, Alarms
from narrowgauge.gauges._features import FORMATS
from narrowgauge.gauges._formats import Target, targets
from narrowgauge.gauges._loss_scale import LossScaleHistory
from narrowgauge.gauges._modules import loss_in, unwrapped
from narrowgauge.gauges._rank_sums import Arriving, Message, Ranks
from narrowgauge.gauges._records import Record, Writer, read_records, rounded
from narrowgauge.gauges._step_rows import StepRows
from narrowgauge.gauges._tensorboard import Board
from narrowgauge.gauges._update_records import Updates
from narrowgauge.gauges._watched_tensors import Sources, WatchedTensors, header, parameters_of

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
    scaler: torch.amp.GradScaler | None = None,
    on_alarm: Callable[[Record], None] | None = None,
    warmup: int = 1000,
    ranks: Literal["all", "own"] = "all",
    resume_from: int | None = None,
) -> Watch:
    """Watch a training: a context manager around its loop.

    The step that counts is the optimizer's `step()`, from 1. The loss is what the model returns while it
    trains, where that is a single number or has a ``loss``; else give it to `Watch.loss`. Several in one step
    are averaged.

    Args:
        model: the module, wrapped in DistributedDataParallel or `torch.compile` or not; FSDP2 too.
        optimizer: any optimizer over its parameters.
        every: updates, gradients and features are measured at every so manieth step.
        path: where records are written to, as they come: a new file, or an existing folder for a ``gauges.jsonl``.
            Without one they are kept in memory.
        tensorboard: a folder for TensorBoard's events.
        updates: ``"sampled"`` measures one sixteenth of each long tensor; True all of it; False no updates.
        gradients: whether gradients are measured, as the optimizer sees them: without the loss scale.
        activations: True for the blocks and embeddings of the model, False for none, or names of modules. Sums
            of what they return while training, and of its gradient (with the loss scale).
        formats: what `feature_stats` asks about.
        states_every: quantized moments of narrowgauge's optimizers are compared with exact ones at every so manieth
            step; by default 50 times `every`. 0 for never.
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
        those
    of the 8-bit optimizers (Appendix D).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, takes a torch.nn.Module")
    optimizer = plain_optimizer(optimizer)
    _whole("every", every, 1)
    _whole("warmup", warmup, 0)
    states_every = 50 * every if states_every is None else states_every
    _whole("states_every", states_every, 0)
    if resume_from is not None:
        _whole("resume_from", resume_from, 0)
    if updates not in (True, False, "sampled"):
        raise ValueError(f"updates: got {updates!r}, takes 'sampled', True or False")
    if not isinstance(gradients, bool):
        raise ValueError(f"gradients: got {gradients!r}, takes True or False")
    if ranks not in ("all", "own"):
        raise ValueError(f"ranks: got {ranks!r}, takes 'all' or 'own'")
    if on_alarm is not None and not callable(on_alarm):
        raise TypeError(f"on_alarm: got {type(on_alarm).__name__}, takes a function of a record")
    history = LossScaleHistory(scaler) if scaler is not None else None
    sources = Sources(updates, gradients, activations, targets(formats), every, states_every)
    parameters = parameters_of(unwrapped(model), optimizer)
    made = Watch(model, optimizer, sources, parameters)
    made._history, made._alarms = history, Alarms(on_alarm, warmup)
    made._path, made._tensorboard = path, tensorboard
    made._together, made._steps.taken, made._resumes = ranks == "all", resume_from or 0, resume_from
    return made


class Watch:
    """A training that is watched; made by `watch`, used as a context manager, once."""

    _history: LossScaleHistory | None
    _alarms: Alarms
    _path: str | os.PathLike[str] | None
    _tensorboard: str | os.PathLike[str] | None
    _together: bool
    _resumes: int | None

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, sources: Sources, parameters: dict[Tensor, str]
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._tensors = WatchedTensors(unwrapped(model), optimizer, sources, parameters)
        self._sources = sources
        self._steps = StepRows()
        self._rows: list[Record] = []
        self._arriving: list[Arriving] = []
        self._ranks = Ranks()
        self._writer: Writer | None = None
        self._board: Board | None = None
        self._handles: list[Any] = []
        self._open = self._entered = False

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("watch: entered a second time; make another one with narrowgauge.gauges.watch")
        if self._optimizer in _WATCHED:
            raise RuntimeError("optimizer: is being watched already; takes one watch at a time")
        self._ranks = Ranks.all() if self._together else Ranks()
        if self._ranks.first and self._path is not None:
            self._writer = Writer(self._path, self._resumes)
        if self._ranks.first and self._tensorboard is not None:
            self._board = Board(self._tensorboard, self._steps.taken)
        self._entered = self._open = True
        _WATCHED.add(self._optimizer)
        self._emit(header(unwrapped(self._model), self._optimizer, self._sources, self._tensors.names))
        self._handles = [
            self._model.register_forward_hook(self._returned),
            self._optimizer.register_step_pre_hook(_Before(self)),
            self._optimizer.register_step_post_hook(self._after),
        ]
        self._tensors.attach()
        self._steps.start(time.perf_counter())
        self._tensors.expect(self._steps.taken + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._tensors.detach()
        _WATCHED.discard(self._optimizer)
        self._open = False
        try:
            # After an error other ranks may not be here to add their part.
            if self._steps.waiting and (kind is None or self._ranks.group is None):
                self._send([])
            self._take_all()
        finally:
            if self._writer is not None:
                self._writer.close()
            if self._board is not None:
                self._board.close()

    @property
    def running(self) -> bool:
        """Whether the training is being watched: between entering and leaving."""
        return self._open

    def loss(self, value: Tensor | float) -> None:
        """Tell the loss of this step, in place of what the model returned. Nothing is waited for.

        Args:
            value: a number, or a tensor of one element.

        Raises:
            ValueError: for a tensor of more elements.
        """
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"value: got a tensor of {value.numel()} elements, takes one, or a number")
        self._steps.told(value)

    def rows(self) -> list[Record]:
        """The records until now, in order; waits for what is on its way from the device.

        Of several ranks the first has them; the others have them only where no `path` was given.
        """
        if self._open and self._steps.waiting and self._ranks.group is None:
            self._send([])
        self._take_all()
        if self._writer is not None:
            return list(read_records(self._writer.path))
        return list(self._rows)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the records as one self-contained page of HTML.

        Returns:
            The page's path.
        """
        page = Path(path)
        import_module("narrowgauge.gauges._report").write_report(self.rows(), page)
        return page

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        loss = loss_in(output)
        if loss is not None:
            self._steps.returned(loss)

    @torch.no_grad()
    def _before(self) -> None:
        """The gradients are there, and the step is about to be taken."""
        if self._history is not None:
            self._steps.scale = self._history.look()
        self._tensors.begin(self._steps.taken + 1)
        for record in self._tensors.moments(self._steps.taken + 1) if self._ranks.first else ():
            self._emit(record)

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _capturing():
            return
        self._steps.end(time.perf_counter())
        step = self._steps.taken
        found = self._tensors.end(step, self._ranks)
        home = self._tensors.home
        if found or (home.type == "cpu" and self._ranks.group is None):
            self._send(found)
        self._tensors.expect(step + 1)
        while self._arriving and self._arriving[0].here:
            self._take()

    def _send(self, found: Sequence[tuple[Tensor, tuple[int, ...], Callable[[Tensor], list[Record]]]]) -> None:
        """Send what is known of the last steps, and tables of the present one."""
        message = Message(self._tensors.home)
        table, steps = self._steps.table(self._tensors.home)

        def take_steps(rows: Tensor) -> None:
            for record in steps(rows, self._history):
                self._emit(record)

        message.add(table, take_steps, largest=StepRows.LARGEST)
        for part, largest, records in found:
            message.add(part, self._taker(records), largest)
        self._arriving.append(message.send(self._ranks))

    def _taker(self, records: Callable[[Tensor], list[Record]]) -> Callable[[Tensor], None]:
        def take(table: Tensor) -> None:
            for record in records(table):
                self._emit(record)

        return take

    def _take_all(self) -> None:
        while self._arriving:
            self._take()

    def _take(self) -> None:
        self._arriving.pop(0).take()

    def _emit(self, record: Record) -> None:
        record = rounded(record)
        alarms = self._alarms.of(record) if self._ranks.first and "step" in record else []
        for each in (record, *alarms):
            if self._writer is not None:
                continues = each["kind"] == "run" and self._writer.continues
                self._writer.write([] if continues else [each])
            elif self._path is None:
                self._rows.append(each)
            if self._board is not None:
                self._board.add(each)


class _Before:
    """The hook before a step.

    A closure makes the gradients inside of the step: then it is looked at them when the closure first returns.
    """

    unscales = True  # for loss scalers: it knows of the scale (see `narrowgauge.scaling`)

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if _capturing():
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._watch._before()
            return None
        seen = False

        def looked_at() -> Any:
            nonlocal seen
            loss = closure()
            if not seen:
                seen = True
                self._watch._before()
            return loss

        if len(args) > 1:
            return (args[0], looked_at, *args[2:]), kwargs
        return args, {**kwargs, "closure": looked_at}


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


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _whole(name: str, got: object, least: int) -> None:
    if not isinstance(got, int) or isinstance(got, bool) or got < least:
        raise ValueError(f"{name}: got {got!r}, takes a whole number from {least} on")


__all__ = ["LOG", "Watch", "plain_optimizer", "watch"]
