"""Gradients in a few bits, under any optimizer: x <- x - lr Q(g), with or without error compensation.

What quantizing a gradient does to convergence depends on one property of Q. If it is *unbiased*, E[Q(g)] = g, as
stochastic rounding is, its error is noise like that of the batch, and SGD converges at the rate
O((sigma + zeta) / sqrt(K)), sigma^2 and zeta^2 being the variances of the two. If it is biased, as rounding to
nearest is, nothing is promised: a coordinate whose gradient always rounds to zero never moves. *Error compensation*
makes any Q work: what rounding cut off is kept and added to the next gradient,

    g' = g + delta,   delta <- g' - Q(g'),   x <- x - lr Q(g')

so that nothing is lost, only late. It costs one more tensor a parameter.

Source: Lecture 11, Mixed Precision Training, "SGD with mixed-precision" and "Error compensation"; Karimireddy et
al. 2019.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge._arguments import typed
from narrowgauge.formats import Coder, codebook, random_bits
from narrowgauge.formats._codebooks import known
from narrowgauge.formats._rounding import Rounding
from narrowgauge.optim._options import is_whole
from narrowgauge.optim._shards import any_shared
from narrowgauge.storage._blockwise import decode_blocks, encode_blocks


class QuantizedGradients(torch.optim.Optimizer):
    """An optimizer that sees quantized gradients.

    It is used in place of the optimizer that it is given: `step`, `zero_grad`, learning rate schedules and
    parameter groups are the other's. A gradient that holds an inf or NaN is handed on as it is, so that the other
    can refuse it, and leaves nothing behind.

    Args:
        optimizer: any `torch.optim.Optimizer`. Its `p.grad` are overwritten with Q(g) at each step.
        codebook: the values of Q: a name (see `narrowgauge.formats.codebook`; signed, 8 bits) or the values.
        rounding: ``"nearest"`` (biased) or ``"stochastic"`` (unbiased).
        error_feedback: keep what rounding cut off, a float32 tensor a parameter, and add it to the next gradient.
        block_size: elements that share a scale.
        seed: key of the random bits, which depend on it, the parameter's place, the element and the step alone.

    Raises:
        ValueError: for an argument that is not taken.

    Source: Lecture 11, Mixed Precision Training, "Error compensation".
    """

    @typed
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        codebook: str | Tensor = "dynamic",
        rounding: Rounding = "nearest",
        error_feedback: bool = False,
        *,
        block_size: int = 256,
        seed: int = 0,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"optimizer: got {type(optimizer).__name__}, takes a torch.optim.Optimizer")
        if any_shared(p for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "optimizer: got one of DTensors, takes plain parameters: each rank would judge gradients, and "
                "remember errors, by itself"
            )
        if getattr(optimizer, "in_backward", None) is not None:
            raise ValueError("optimizer: got one by step_in_backward, takes one that moves weights in step()")
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding: got {rounding!r}, takes 'nearest' or 'stochastic'")
        if not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size: got {block_size!r}, takes an integer of at least 1")
        self.optimizer = optimizer
        self.rounding: Rounding = rounding
        self.error_feedback = error_feedback
        self._coder = Coder.of(_values(codebook))
        self._block_size, self._seed, self._step = block_size, seed, 0
        self._residuals: dict[Tensor, Tensor] = {}
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        # Groups and state are the other's own: schedules that write to one reach the other.
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.defaults = optimizer.defaults

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Quantize the gradients and let the optimizer step.

        Args:
            closure: reevaluates the model and returns the loss; each gradient that it makes is quantized.
        """
        if closure is None:
            self._quantize()
            return self.optimizer.step()

        def quantized() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._quantize()
            return loss

        return self.optimizer.step(quantized)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer."""
        if hasattr(self, "_residuals") and self.param_groups is self.optimizer.param_groups:
            self.optimizer.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    @property
    def skipped(self) -> dict[str, int]:
        """Steps that the optimizer refused, by parameter, if it is one of this library."""
        return getattr(self.optimizer, "skipped", {})

    def __getstate__(self) -> dict[str, Any]:
        # torch copies and pickles groups and state only, and those are the other's.
        own = ("optimizer", "rounding", "error_feedback", "_coder", "_block_size", "_seed", "_step")
        places = {p: place for place, p in enumerate(self._parameters())}
        residuals = {places[p]: residual for p, residual in self._residuals.items()}
        return {name: self.__dict__[name] for name in own} | {"_residuals": residuals}

    def __setstate__(self, state: dict[str, Any]) -> None:
        optimizer = state["optimizer"]
        shared = {name: getattr(optimizer, name) for name in ("param_groups", "state", "defaults")}
        super().__setstate__({**state, **shared})
        parameters = self._parameters()
        self._residuals = {parameters[place]: residual for place, residual in state["_residuals"].items()}

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, the residuals by the parameters' places, and the step."""
        places = {p: place for place, p in enumerate(self._parameters())}
        residuals = {places[p]: residual for p, residual in self._residuals.items()}
        return {"optimizer": self.optimizer.state_dict(), "residuals": residuals, "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: for a state of something else.
        """
        if not isinstance(state_dict, Mapping) or not {"optimizer", "residuals", "step"} <= state_dict.keys():
            got = f"keys {sorted(map(str, state_dict))}" if isinstance(state_dict, Mapping) else type(state_dict)
            raise ValueError(f"state_dict: got {got}, takes one of QuantizedGradients")
        parameters, saved, step = self._parameters(), state_dict["residuals"], state_dict["step"]
        if not is_whole(step) or step < 0:
            raise ValueError(f"state_dict: 'step' is {step!r}, takes a count of steps")
        if not isinstance(saved, Mapping):
            raise ValueError(f"state_dict: 'residuals' is a {type(saved).__name__}, takes a dict")
        for place, residual in saved.items():
            if not is_whole(place) or not 0 <= place < len(parameters):
                raise ValueError(f"state_dict: a residual is at {place!r}, takes 0 to {len(parameters) - 1}")
            shape, wanted = getattr(residual, "shape", type(residual).__name__), parameters[place].shape
            if shape != wanted:
                raise ValueError(f"state_dict: the residual at {place} is {shape}, takes {wanted}")
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        if saved and not self.error_feedback:
            warnings.warn("state_dict: dropped residuals, of no use with error_feedback=False", stacklevel=2)
            saved = {}
        self._residuals = {
            parameters[place]: residual.to(parameters[place].device, copy=True) for place, residual in saved.items()
        }
        self._step = step

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _quantize(self) -> None:
        self._step += 1
        for place, p in enumerate(self._parameters()):
            if p.grad is not None:
                p.grad.copy_(self._of(p, p.grad.to(torch.float32), p.grad.dtype, place))

    def _of(self, p: Tensor, grad: Tensor, dtype: torch.dtype, place: int) -> Tensor:
        """Q of a gradient, to be kept in a dtype, and its residual kept."""
        finite = torch.isfinite(grad).all()
        residual = self._residuals.get(p)
        wanted = grad if residual is None else grad + residual
        bits = None
        if self.rounding == "stochastic":
            words = random_bits(p.numel(), seed=self._seed, stream=place, step=self._step, device=p.device)
            bits = words.view(p.shape)
        coder = self._on(p.device)
        codes, scales = encode_blocks(wanted, coder, self._block_size, bits)
        quantized = decode_blocks(codes, scales, coder.values, self._block_size)
        if self.error_feedback:
            before = torch.zeros_like(wanted) if residual is None else residual
            # What arrives is rounded to the gradient's format: that is cut off, too.
            arrives = quantized.to(dtype).to(torch.float32)
            self._residuals[p] = torch.where(finite & torch.isfinite(arrives), wanted - arrives, before)
        return torch.where(finite, quantized, grad)

    def _on(self, device: torch.device) -> Coder:
        if self._coder.values.device != device:
            self._coder = Coder(
                self._coder.values.to(device), self._coder.boundaries.to(device), self._coder.lowest
            )
        return self._coder


def _values(named: str | Tensor) -> Tensor:
    if not isinstance(named, str | Tensor):
        raise ValueError(f"codebook: got {named!r}, takes a name or a tensor of values")
    values = codebook(known(named)) if isinstance(named, str) else named
    if values.is_complex() or values.is_meta:
        raise ValueError(f"codebook: got {values.dtype} on {values.device}, takes float32 values")
    if values.dim() == 1 and len(values) and values[0] >= 0:
        raise ValueError("codebook: got one without negative values, takes one for gradients of both signs")
    return values
