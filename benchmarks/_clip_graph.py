"""A training step as a CUDA graph: captured once, replayed without Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def as_if_capturing() -> Iterator[None]:
    """Within, torch says that a stream is capturing.

    transformers makes other masks then, and blocks are compiled for these before the capture, in which nothing can
    be compiled.
    """
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        yield


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The replay of a step that is captured on the current stream, on which it was warmed up."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    replay: Callable[[], None] = graph.replay
    return replay
