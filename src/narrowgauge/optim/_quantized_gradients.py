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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge._arguments import typed
from narrowgauge.formats import Coder, codebook, random_bits
from narrowgauge.formats._codebooks import known
from narrowgauge.formats._rounding import Rounding
from narrowgauge.optim._checkpoint import check_form, check_members
from narrowgauge.optim._optimizer import uncompiled
from narrowgauge.optim._options import is_whole
from narrowgauge.optim._sharding import is_shared
from narrowgauge.storage._blockwise import decode_blocks, encode_blocks

# Keys of a state_dict: the residual, in a parameter's state, and the count of steps, in each group.
_RESIDUAL, _STEPS = "gradient_residual", "gradients_quantized"
_LARGEST = torch.finfo(torch.float32).max


class QuantizedGradients(torch.optim.Optimizer):
    """An optimizer that sees quantized gradients.

    Use it in place of the optimizer that it is given: `step`, `zero_grad`, learning rate schedules and parameter
    groups are those of that optimizer. A gradient with inf or NaN is passed on unchanged, so that the optimizer
    can refuse it; the residual stays as it is. DTensors are refused.

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
        if getattr(optimizer, "in_backward", None) is not None:
            raise ValueError("optimizer: got one by step_in_backward, takes one that moves weights in step()")
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding: got {rounding!r}, takes 'nearest' or 'stochastic'")
        if not isinstance(block_size, int) or block_size < 1:
            raise ValueError(f"block_size: got {block_size!r}, takes an integer of at least 1")
        _refuse_dtensors(optimizer.param_groups)
        self.optimizer = optimizer
        self.rounding: Rounding = rounding
        self.error_feedback = error_feedback
        self._coder = Coder.of(_values(codebook))
        self._block_size, self._seed, self._step = block_size, seed, 0
        self._residuals: dict[Tensor, Tensor] = {}
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        # Groups and state are the optimizer's own objects: a schedule that writes to one reaches the other.
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.defaults = optimizer.defaults

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
        own = ("optimizer", "rounding", "error_feedback", "_coder", "_block_size", "_seed", "_step")
        residuals = [self._residuals.get(p) for p in self._parameters()]
        return {name: self.__dict__[name] for name in own} | {"_residuals": residuals}

    def __setstate__(self, state: dict[str, Any]) -> None:
        optimizer = state["optimizer"]
        shared = {name: getattr(optimizer, name) for name in ("param_groups", "state", "defaults")}
        super().__setstate__({**state, **shared})
        pairs = zip(self._parameters(), state["_residuals"], strict=True)
        self._residuals = {p: residual for p, residual in pairs if residual is not None}

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, with each parameter's residual in its entry and the count of steps in the groups.

        It has the form of torch's, so `narrowgauge.distributed.save_checkpoint` takes it.
        """
        given = self.optimizer.state_dict()
        state = dict(given["state"])
        for p, identity in self._identities(given["param_groups"]):
            if p in self._residuals:
                state[identity] = {**state.get(identity, {}), _RESIDUAL: self._residuals[p]}
        return {**given, "state": state, "param_groups": [{**g, _STEPS: self._step} for g in given["param_groups"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the result of `state_dict`.

        Raises:
            ValueError: for the state of another optimizer, or a damaged one; nothing is changed then.
        """
        check_form(state_dict)
        groups, state, residuals = state_dict["param_groups"], dict(state_dict["state"]), {}
        sizes, wanted = ([len(group["params"]) for group in some] for some in (groups, self.param_groups))
        if sizes != wanted:
            raise ValueError(f"state_dict: got groups of {sizes} parameters, takes {wanted}")
        check_members(groups)
        if any(_STEPS not in group for group in groups):
            raise ValueError(f"state_dict: got groups without {_STEPS!r}, takes one of QuantizedGradients")
        counts = [group[_STEPS] for group in groups]
        if any(not is_whole(count) or not 0 <= count < 2**63 or count != counts[0] for count in counts):
            raise ValueError(f"state_dict: {_STEPS!r} is {', '.join(map(repr, counts))}, takes one count of steps")
        for number, (p, identity) in enumerate(self._identities(groups)):
            if _RESIDUAL in state.get(identity, ()):
                state[identity] = entry = copy.copy(state[identity])  # not dict(): it may be a subclass
                residuals[p] = _checked(p, entry.pop(_RESIDUAL), number)
                if not entry:
                    del state[identity]
        inner = [{key: value for key, value in group.items() if key != _STEPS} for group in groups]
        self.optimizer.load_state_dict({**state_dict, "state": state, "param_groups": inner})
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        if residuals and not self.error_feedback:
            warnings.warn("state_dict: dropped residuals, of no use with error_feedback=False", stacklevel=2)
            residuals = {}
        self._residuals, self._step = residuals, counts[0] if counts else 0

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _identities(self, groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Tensor, Any]]:
        """Each parameter, and its identity in the groups of a state_dict."""
        return zip(self._parameters(), (one for group in groups for one in group["params"]), strict=True)

    def _quantize(self) -> None:
        _refuse_dtensors(self.param_groups)  # of a group that was added
        self._step += 1
        for index, p in enumerate(self._parameters()):
            if p.grad is not None:
                self._quantize_gradient(index, p, p.grad)

    def _quantize_gradient(self, index: int, p: Tensor, grad: Tensor) -> None:
        wide, residual = grad.to(torch.float32), self._residuals.get(p)
        finite = torch.isfinite(wide).all()
        # The sum of two finite numbers may overflow.
        wanted = wide if residual is None else (wide + residual).clamp(-_LARGEST, _LARGEST)
        bits = None
        if self.rounding == "stochastic":
            bits = random_bits(grad.numel(), seed=self._seed, stream=index, step=self._step, device=grad.device)
            bits = bits.view(grad.shape)
        if self._coder.values.device != grad.device:
            coder = self._coder
            self._coder = Coder(coder.values.to(grad.device), coder.boundaries.to(grad.device), coder.lowest)
        codes, scales = encode_blocks(wanted, self._coder, self._block_size, bits)
        quantized = decode_blocks(codes, scales, self._coder.values, self._block_size)
        if self.error_feedback:
            # The optimizer sees Q(g) rounded to the gradient's format: that error counts, too.
            seen = quantized.to(grad.dtype).to(torch.float32)
            before = torch.zeros_like(wanted) if residual is None else residual
            # One that overflows there is refused as a whole, so the residual must still have all of it.
            self._residuals[p] = torch.where(finite & torch.isfinite(seen).all(), wanted - seen, before)
        grad.copy_(torch.where(finite, quantized, wide))


def _refuse_dtensors(groups: Sequence[Mapping[str, Any]]) -> None:
    for number, group in enumerate(groups):
        for i, p in enumerate(group["params"]):
            if is_shared(p):
                name = group["param_names"][i] if "param_names" in group else f"{number}.{i}"
                raise ValueError(f"params: {name} is a DTensor, QuantizedGradients takes unsharded parameters")


def _checked(p: Tensor, residual: Any, number: int) -> Tensor:
    """A copy of a saved residual beside its parameter."""
    which = f"state_dict: the residual of parameter {number}"
    if not isinstance(residual, Tensor):
        raise ValueError(f"{which} is a {type(residual).__name__}, takes a tensor")
    if is_shared(residual) or residual.shape != p.shape or not residual.is_floating_point():
        kind = "a DTensor" if is_shared(residual) else f"{residual.dtype} of shape {tuple(residual.shape)}"
        raise ValueError(f"{which} is {kind}, takes floats of shape {tuple(p.shape)}")
    if not torch.isfinite(residual).all():
        raise ValueError(f"{which} is not finite: it was damaged")
    return residual.detach().to(device=p.device, dtype=torch.float32, copy=True).contiguous()


def _values(named: str | Tensor) -> Tensor:
    if not isinstance(named, str | Tensor):
        raise ValueError(f"codebook: got {named!r}, takes a name or a tensor of values")
    values = codebook(known(named)) if isinstance(named, str) else named
    if values.is_complex() or values.is_meta:
        raise ValueError(f"codebook: got {values.dtype} on {values.device}, takes float32 values")
    if values.dim() == 1 and len(values) and values[0] >= 0:
        raise ValueError("codebook: got one without negative values, takes one for gradients of both signs")
    return values
