"""Forward and backward passes of a training, replayed from a CUDA graph where there is a GPU.

Some thousand kernels of a few microseconds are launched in a step of the models that studies train, and the host
takes longer to launch them than the GPU to run them. From the fourth step on they are launched together, as the
graph that was captured then: the same kernels on the same tensors, without Python. What comes after, the
optimizer's step and whatever looks at gradients, may be anybody's and is not in it.

    gradients = Gradients(model, lambda examples: loss_of(model, examples), device)
    loss = gradients(examples)              # and every parameter's .grad; those of the step before are gone
    optimizer.step()
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Examples = Mapping[str, Tensor]
EAGER = 3  # steps before a graph is captured: kernels are chosen and compiled in them


class Gradients:
    """Computes the loss of a step and the gradients of a model's parameters.

    What depends on the step has to come in by `examples` or `factor`: a graph knows no Python. Shapes stay as
    they are.

    Attributes:
        how: `eager`, `graph`, or why no graph could be captured.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Examples], Tensor], device: torch.device | str) -> None:
        """Nothing is computed yet; on a CPU every step will be eager."""
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._loss, self._calls = loss, 0
        self._replay: Callable[[], None] | None = None
        # All passes on one stream: what autograd has seen on one cannot be captured on another.
        self._stream = torch.cuda.Stream(device) if torch.device(device).type == "cuda" else None
        self.how = "eager"

    def __call__(self, examples: Examples, factor: Tensor | None = None) -> Tensor:
        """The loss of a step, detached; gradients are of `factor` times it, a loss scale on the device."""
        given = dict(examples) | ({} if factor is None else {"factor": factor})
        if self._stream is None:
            return self._passes(given)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._calls += 1
            if self._calls == EAGER + 1:
                self._capture(given)
            loss = self._passes(given) if self._replay is None else self._replayed(given)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _passes(self, given: Examples) -> Tensor:
        for p in self._parameters:
            p.grad = None
        loss = self._loss({name: tensor for name, tensor in given.items() if name != "factor"})
        torch.autograd.backward(loss * given["factor"] if "factor" in given else loss)
        return loss.detach()

    def _capture(self, given: Examples) -> None:
        self._given = {name: tensor.clone() for name, tensor in given.items()}
        try:
            self._replay, self._found = captured(lambda: self._passes(self._given))
        except Exception as error:  # whatever a model does that a graph cannot
            _recover()
            self.how = f"eager, not captured: {reason(error)}"
            return
        self.how = "graph"
        # Where every replay writes them, whatever became of `.grad` since.
        self._gradients = [p.grad for p in self._parameters]

    def _replayed(self, given: Examples) -> Tensor:
        assert self._replay is not None
        for name, tensor in self._given.items():
            tensor.copy_(given[name])
        self._replay()
        for p, gradient in zip(self._parameters, self._gradients, strict=True):
            p.grad = gradient
        return self._found.clone()


def captured(passes: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """What replays some passes, and where their result will be; nothing is computed yet."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        found = passes()
    return graph.replay, found


def captured_step(optimizer: torch.optim.Optimizer) -> tuple[Callable[[], Any], str]:
    """An optimizer's step as a replay; the step itself, and why, if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):  # nothing is computed while it is captured
            optimizer.step()
    except Exception as error:
        _recover()
        return optimizer.step, f"eager, not captured: {reason(error)}"
    return graph.replay, "graph"


def _recover() -> None:
    """After a capture that failed torch draws no random numbers on the GPU until one succeeds: so one does."""
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


def reason(error: BaseException) -> str:
    """An exception in a line, files without their folders."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {re.sub(r'/[^ ]*/', '', first)[:200]}"
