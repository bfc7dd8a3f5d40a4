"""What an optimizer offers to those who scale losses, and to those who watch the norm that it clips by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from narrowgauge.optim._unscaling import Unscaling


class TakesFactor(torch.optim.Optimizer):
    """An optimizer whose step multiplies gradients by a number; see `_gradient_factor`."""

    _grad_norm: Tensor | None = None
    _unscaling: Unscaling | None = None

    def _keep_norm(self, norm: Tensor) -> None:
        # In one place, which a graph's replay writes to as well.
        if self._grad_norm is None or self._grad_norm.device != norm.device:
            self._grad_norm = torch.empty_like(norm)
        self._grad_norm.copy_(norm)

    @property
    def grad_norm(self) -> Tensor:
        """The norm of all gradients, unscaled, that the last step clipped by: 0-d, float32, on the device.

        Gradients with inf or NaN are left out. Reading it waits for nothing; a graph's replay changes it too.

        Raises:
            RuntimeError: if no step has measured it.
        """
        if self._grad_norm is None:
            raise RuntimeError("grad_norm: no step has measured one; step with max_grad_norm, which may be inf")
        return self._grad_norm.clone()

    @contextmanager
    def unscaling(self, inverse: Tensor, whole: bool) -> Iterator[Unscaling]:
        """Have a step in this block multiply gradients by the inverse of a loss scale: for loss scalers.

        Args:
            inverse: float32, 0-d, on any device.
            whole: whether no parameter moves, nor counts a skip, if any gradient is not finite then.

        Yields:
            What the step will say of the gradients.
        """
        self._unscaling = Unscaling(inverse, whole)
        try:
            yield self._unscaling
        finally:
            self._unscaling = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # As torch's own: with fused=True torch's GradScaler leaves unscaling and skipping to the step. Not without:
        # frameworks that clip between the two refuse optimizers of which this is true.
        return bool(self.defaults["fused"]) and getattr(self, "in_backward", None) is None
