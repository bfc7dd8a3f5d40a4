"""Work on a stream beside the current one.

Kernels that touch different places may run at once, and those few that have to wait for each other take no time
where they wait beside something longer.
"""

from __future__ import annotations

import torch


class Beside:
    """Within, work goes to a stream of its own, after what was launched before; what comes after `join` waits for
    it.

    Torch's own `wait_stream` makes an event each time, which costs the host more than using one again.

    Args:
        device: a CUDA device, the current one within.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._before, self._after = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        self._main: torch.cuda.Stream | None = None

    def __enter__(self) -> None:
        self._main = torch.cuda.current_stream()
        self._before.record(self._main)
        self._before.wait(self._stream)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        assert self._main is not None
        torch.cuda.set_stream(self._main)
        self._after.record(self._stream)

    def join(self) -> None:
        """Let the stream that was current wait for what was done beside it."""
        self._after.wait(self._main)
