"""The hooks around a step, and what becomes of what they find: the context manager that `watch` makes."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from narrowgauge.gauges._alarms import Alarms
from narrowgauge.gauges._loss_scale import LossScaleHistory
from narrowgauge.gauges._modules import Hook, loss_in, unwrapped
from narrowgauge.gauges._outlet import Outlet
from narrowgauge.gauges._rank_sums import Arriving, Message, Part, Ranks
from narrowgauge.gauges._records import Record, read_records
from narrowgauge.gauges._step_rows import StepRows
from narrowgauge.gauges._watched_run import Output, Sources, header
from narrowgauge.gauges._watched_tensors import WatchedTensors

_WATCHED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class Watch:
    """A training that is watched; made by `watch`, used as a context manager, once."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sources: Sources,
        output: Output,
        parameters: dict[Tensor, str],
        history: LossScaleHistory | None,
        alarms: Alarms,
    ) -> None:
        self._model, self._optimizer, self._sources, self._output = model, optimizer, sources, output
        self._history, self._alarms = history, alarms
        self._tensors = WatchedTensors(unwrapped(model), optimizer, sources, parameters)
        self._steps = StepRows(output.resume_from or 0, rms_of=[parameters[p] for p in self._tensors.rms_of])
        self._arriving: list[Arriving] = []
        self._ranks = Ranks()
        self._outlet: Outlet | None = None
        self._handles: list[Any] = []
        self._open = self._entered = False

    def __enter__(self) -> Self:
        if self._entered:
            raise RuntimeError("watch: entered a second time; make another one with narrowgauge.gauges.watch")
        if self._optimizer in _WATCHED:
            raise RuntimeError("optimizer: is being watched already; takes one watch at a time")
        try:
            self._begin()
        except BaseException:  # of which the loop's `with` does not tell
            self._let_go()
            self._close()
            raise
        return self

    def _begin(self) -> None:
        self._ranks = Ranks.all() if self._output.together else Ranks()
        self._outlet = self._output.open(self._ranks.first, self._steps.taken, self._alarms)
        _WATCHED.add(self._optimizer)
        first = header(unwrapped(self._model), self._optimizer, self._sources, self._tensors.names)
        self._outlet.begin(first)
        self._entered = self._open = True
        self._handles = [
            self._model.register_forward_hook(Hook(self._returned)),
            self._optimizer.register_step_pre_hook(_Before(self)),
            self._optimizer.register_step_post_hook(self._after),
        ]
        self._tensors.attach()
        self._steps.start(time.perf_counter())
        self._tensors.expect(self._steps.taken + 1)

    def _let_go(self) -> None:
        """Leave model and optimizer as they were."""
        for handle in self._handles:
            handle.remove()
        self._tensors.detach()
        _WATCHED.discard(self._optimizer)
        self._open = False

    def _close(self) -> None:
        if self._outlet is not None:
            self._outlet.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()
        try:
            # After an error other ranks may not be here to add their part.
            if self._steps.waiting and (kind is None or self._ranks.group is None):
                self._send([])
            self._take_all()
        finally:
            self._close()

    @property
    def running(self) -> bool:
        """Whether the training is being watched: between entering and leaving."""
        return self._open

    def loss(self, value: Tensor | float) -> None:
        """Tell the loss of the step that comes, in place of what the model returned. Nothing is waited for.

        What is told after the optimizer's `step()` is the next step's.

        Args:
            value: a real number, or a tensor of one element.

        Raises:
            TypeError: for what is none.
            ValueError: for a tensor of more elements.
        """
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"value: got a tensor of {value.numel()} elements, takes one, or a number")
            if value.is_complex():
                raise TypeError(f"value: got a tensor of {value.dtype}, takes one of real numbers")
        else:
            try:
                value = float(value)
            except (TypeError, ValueError):
                raise TypeError(f"value: got {value!r}, takes a number, or a tensor of one element") from None
        self._steps.told(value)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """The context of a forward pass that is not measured: one that will be made again, as for gradient caching.

        Of what modules return in it there is no record. Steps are not to be taken in it.
        """
        return self._tensors.paused()

    def rows(self) -> list[Record]:
        """The records until now, in order; waits for what is on its way from the device.

        Of several ranks the first has them; the others have them only where no `path` was given.
        """
        self.settle()
        if self._outlet is None:
            return []
        if self._outlet.writer is not None:
            return list(read_records(self._outlet.writer.path))
        return list(self._outlet.rows)

    def settle(self) -> None:
        """Wait until all that was measured is recorded: before a checkpoint, so that no step is missing later."""
        if self._open and self._steps.waiting and self._ranks.group is None:
            self._send([])
        self._take_all()
        if self._outlet is not None and self._open:  # else it has settled
            self._outlet.settle()

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
            self._steps.scale = self._history.look(self._optimizer)
        self._tensors.begin(self._steps.taken + 1)
        if self._ranks.first:
            self._put(self._tensors.look_at_moments(self._steps.taken + 1))

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if _capturing():
            return
        rms = self._tensors.rms(self._ranks)
        self._steps.end(time.perf_counter(), rms)
        step = self._steps.taken
        if self._ranks.first:
            self._put(list(self._tensors.unseen(step)))
        found = self._tensors.end(step, self._ranks)
        if moments := self._tensors.moments():  # of this rank alone
            self._arriving.append(self._message(moments).send(Ranks()))
        home = self._tensors.home
        if found or (home.type == "cpu" and self._ranks.group is None):
            self._send(found)
        self._tensors.expect(step + 1)
        while self._arriving and self._arriving[0].here:
            self._take()
        if self._outlet is not None:
            self._outlet.call_out()

    def _send(self, found: Sequence[Part]) -> None:
        """Send what is known of the last steps, and tables of the present one."""
        table, steps = self._steps.table(self._tensors.home)

        def take_steps(rows: Tensor) -> None:
            self._put(steps(rows, self._history))

        message = Message(self._tensors.home)
        message.add(table, take_steps, largest=StepRows.LARGEST)
        self._arriving.append(self._message(found, message).send(self._ranks))

    def _message(self, found: Sequence[Part], message: Message | None = None) -> Message:
        message = message or Message(self._tensors.home)
        for part, largest, records in found:
            message.add(part, self._taker(records), largest)
        return message

    def _taker(self, records: Callable[[Tensor], list[Record]]) -> Callable[[Tensor], None]:
        def take(table: Tensor) -> None:
            if self._outlet is not None:
                self._outlet.put(lambda: records(table))

        return take

    def _take_all(self) -> None:
        while self._arriving:
            self._take()

    def _take(self) -> None:
        self._arriving.pop(0).take()

    def _put(self, records: list[Record]) -> None:
        if records and self._outlet is not None:
            self._outlet.put(lambda: records)


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


def _capturing() -> bool:
    ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return ready and torch.cuda.is_current_stream_capturing()
