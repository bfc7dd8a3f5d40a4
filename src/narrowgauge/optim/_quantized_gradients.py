"""Gradients in a few bits, under any optimizer: x <- x - lr Q(g), with or without error feedback.

The effect of a quantizer Q on convergence depends on one property. If it is *unbiased*, E[Q(g)] = g, as stochastic
rounding is, its error is noise like that of the batch, and SGD converges at the rate O((sigma + zeta) / sqrt(K)),
where sigma^2 and zeta^2 are the two variances. If it is biased, as rounding to nearest is, there is no
guarantee: a coordinate whose gradient always rounds to zero never moves. *Error feedback* makes any Q work: the
rounding error is stored and added to the next gradient,

    g' = g + delta,   delta <- g' - Q(g'),   x <- x - lr Q(g')

so an error is delayed, not lost. It costs one float32 tensor a parameter.

Source: Lecture 11, Mixed Precision Training, "SGD with mixed-precision" and "Error compensation"; Karimireddy et
al. 2019.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge._arguments import Size, check, check_choice, check_instance, is_integer, shown
from narrowgauge._text import warn
from narrowgauge._torch_private import uncompiled
from narrowgauge.formats import Coder, codebook, random_bits
from narrowgauge.formats._codebooks import known
from narrowgauge.formats._rounding import Rounding
from narrowgauge.optim._checkpoint import check_form, check_members
from narrowgauge.optim._sharding import is_shared
from narrowgauge.storage._blockwise import decode_blocks, encode_blocks

# Keys of a state_dict: the residual, in a parameter's state, and the count of steps, in each group.
_RESIDUAL, _STEPS = "gradient_residual", "gradients_quantized"
_LARGEST = torch.finfo(torch.float32).max


class QuantizedGradients(torch.optim.Optimizer):
    """An optimizer that sees quantized gradients.

    Use it in place of the optimizer that it wraps: `step`, `zero_grad`, learning rate schedules and parameter
    groups are those of that optimizer. A gradient with inf or NaN is passed on unchanged, so that the optimizer
    can refuse it; its residual does not change. Parameters must not be DTensors.

    Args:
        optimizer: any `torch.optim.Optimizer`. Its `p.grad` are overwritten with Q(g) at each step.
        codebook: the values of Q: a name (see `narrowgauge.formats.codebook`; signed, 8 bits) or the values.
        rounding: ``"nearest"`` (biased) or ``"stochastic"`` (unbiased).
        error_feedback: store the rounding error, a float32 tensor a parameter, and add it to the next gradient.
        block_size: elements that share a scale.
        seed: key of the random bits, which depend only on it, the parameter's index, the element and the step.

    Raises:
        ValueError: for a wrong argument or a DTensor, by name.

    Source: Lecture 11, Mixed Precision Training, "Error compensation".
    """

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
        check_instance("optimizer", optimizer, torch.optim.Optimizer)
        if getattr(optimizer, "in_backward", None) is not None:
            raise ValueError("optimizer must move weights in step(), got one with step_in_backward")
        check_choice("rounding", rounding, ("nearest", "stochastic"))
        self.optimizer = optimizer
        self.rounding: Rounding = rounding
        self.error_feedback = error_feedback
        self._coder = Coder.of(_values(codebook))
        self._block_size, self._seed, self._step = check("block_size", block_size, Size), seed, 0
        self._residuals: dict[int, Tensor] = {}  # by the parameter's index
        super().__init__(list(self._parameters()), {})
        # Groups and state are the optimizer's own objects: a schedule that writes to one reaches the other.
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Quantize the gradients and let the optimizer step.

        Args:
            closure: reevaluates the model and returns the loss; its gradients are quantized each time.
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
        if self.param_groups is self.optimizer.param_groups:
            self.optimizer.add_param_group(param_group)
        else:  # during construction
            super().add_param_group(param_group)

    @property
    def skipped(self) -> dict[str, int]:
        """Steps that the optimizer refused, by parameter, if it is one of this library."""
        return getattr(self.optimizer, "skipped", {})

    def __getstate__(self) -> dict[str, Any]:
        # torch copies and pickles groups and state only, and those are the optimizer's.
        own = ("optimizer", "rounding", "error_feedback", "_coder", "_block_size", "_seed", "_step", "_residuals")
        return {name: self.__dict__[name] for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        shared = {name: getattr(state["optimizer"], name) for name in ("param_groups", "state", "defaults")}
        super().__setstate__({**state, **shared})

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with each parameter's residual in its entry and the count of steps in the groups.

        It has the form of torch's, so `narrowgauge.distributed.save_checkpoint` takes it.
        """
        given = self.optimizer.state_dict()
        groups, state = given["param_groups"], dict(given["state"])
        for index, identity in enumerate(_identities(groups)):
            if index in self._residuals:
                state[identity] = {**state.get(identity, {}), _RESIDUAL: self._residuals[index]}
        return {**given, "state": state, "param_groups": [{**group, _STEPS: self._step} for group in groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`.

        Raises:
            ValueError: for the state of another optimizer, or a damaged one; nothing is changed then.
        """
        check_form(state_dict)
        groups, state = state_dict["param_groups"], dict(state_dict["state"])
        residuals: dict[int, Tensor] = {}
        sizes, wanted = ([len(group["params"]) for group in some] for some in (groups, self.param_groups))
        if sizes != wanted:
            raise ValueError(f"state_dict must have groups of {wanted} parameters, got {sizes}")
        check_members(groups)
        counts = [group.get(_STEPS) for group in groups]
        if any(not is_integer(count) or count < 0 or count != counts[0] for count in counts):
            raise ValueError(
                f"state_dict must be of QuantizedGradients, with one count {_STEPS!r} in all groups, got {counts!r}"
            )
        for index, (p, identity) in enumerate(zip(self._parameters(), _identities(groups), strict=True)):
            if _RESIDUAL in state.get(identity, ()):
                state[identity] = entry = copy.copy(state[identity])  # not dict(): it may be a subclass
                residuals[index] = _residual_of(p, entry.pop(_RESIDUAL), identity)
                if not entry:
                    del state[identity]
        inner = [{key: value for key, value in group.items() if key != _STEPS} for group in groups]
        self.optimizer.load_state_dict({**state_dict, "state": state, "param_groups": inner})
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        if residuals and not self.error_feedback:
            warn("state_dict: dropped residuals, which error_feedback=False does not use")
            residuals = {}
        self._residuals, self._step = residuals, int(counts[0]) if counts else 0

    def _parameters(self) -> Iterator[Tensor]:
        """The optimizer's parameters in order; a ValueError for a DTensor."""
        for number, group in enumerate(self.optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if is_shared(p):
                    name = group["param_names"][i] if "param_names" in group else f"{number}.{i}"
                    raise ValueError(f"params must not be sharded for QuantizedGradients, got the DTensor {name}")
                yield p

    def _quantize(self) -> None:
        parameters = list(self._parameters())
        self._step += 1
        for index, p in enumerate(parameters):
            if p.grad is not None:
                self._quantize_gradient(index, p.grad)

    def _quantize_gradient(self, index: int, grad: Tensor) -> None:
        wide, residual = grad.to(torch.float32), self._residuals.get(index)
        finite = torch.isfinite(wide).all()
        # The sum of two finite numbers may overflow.
        wanted = wide if residual is None else (wide + residual).clamp(-_LARGEST, _LARGEST)
        bits = None
        if self.rounding == "stochastic":
            bits = random_bits(grad.numel(), seed=self._seed, stream=index, step=self._step, device=grad.device)
            bits = bits.view(grad.shape)
        if self._coder.values.device != grad.device:
            self._coder = Coder.of(self._coder.values.to(grad.device))
        codes, scales = encode_blocks(wanted, self._coder, self._block_size, bits)
        quantized = decode_blocks(codes, scales, self._coder.values, self._block_size)
        if self.error_feedback:
            # The optimizer sees Q(g) rounded to the gradient's format: that error counts, too.
            seen = quantized.to(grad.dtype).to(torch.float32)
            before = torch.zeros_like(wanted) if residual is None else residual
            # If rounding overflows, the optimizer refuses the whole gradient: the residual must not change.
            self._residuals[index] = torch.where(finite & torch.isfinite(seen).all(), wanted - seen, before)
        grad.copy_(torch.where(finite, quantized, wide))


def _identities(groups: list[Mapping[str, Any]]) -> Iterator[Any]:
    """The parameters' keys in a state_dict, in order."""
    return (identity for group in groups for identity in group["params"])


def _residual_of(p: Tensor, residual: Any, identity: Any) -> Tensor:
    """A copy of a saved residual, on its parameter's device."""
    floats = isinstance(residual, Tensor) and not is_shared(residual) and residual.is_floating_point()
    if not floats or residual.shape != p.shape or not torch.isfinite(residual).all():
        words = f"must be finite floats of shape {tuple(p.shape)}, got {shown(residual)}"
        raise ValueError(f"state_dict: the residual of parameter {identity!r} {words}")
    copied: Tensor = residual.detach().to(device=p.device, dtype=torch.float32, copy=True).contiguous()
    return copied


def _values(codes: str | Tensor) -> Tensor:
    values = codebook(known(codes)) if isinstance(codes, str) else codes
    if isinstance(values, Tensor) and values.dim() == 1 and len(values) and not values[0] < 0:
        raise ValueError("codebook must have negative values for gradients of both signs")
    return values
