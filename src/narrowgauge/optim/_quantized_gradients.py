"""Gradients in a few bits, under any optimizer: x <- x - lr Q(g), with or without error compensation.

What quantizing a gradient does to convergence depends on one property of Q. If it is *unbiased*, E[Q(g)] = g, as
stochastic rounding is, its error is noise like that of the batch, and SGD converges at the rate
O((sigma + zeta) / sqrt(K)), sigma^2 and zeta^2 being the variances of the two. If it is biased, as rounding to
nearest is, nothing is promised: a coordinate whose gradient always rounds to zero never moves. *Error compensation*
makes any Q work: what rounding cut off is kept and added to the next gradient,

    g' = g + delta,   delta <- g' - Q(g'),   x <- x - lr Q(g')

so that nothing is lost, only late. It costs one more tensor a parameter.

Where ranks share parameters, each quantizes its box: blocks begin with it, as those of sharded states do, and what
it remembers is of its own elements. That a gradient is finite is a matter of the whole, so ranks agree on it before
anything is written, and the optimizer's step is told instead of asking again.

Source: Lecture 11, Mixed Precision Training, "SGD with mixed-precision" and "Error compensation"; Karimireddy et
al. 2019.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge._arguments import typed
from narrowgauge.formats import Coder, codebook, random_bits
from narrowgauge.formats._codebooks import known
from narrowgauge.formats._rounding import Rounding
from narrowgauge.optim._quantized_state import saved, taken_apart
from narrowgauge.optim._shards import (
    FLAGS,
    SQUARES,
    any_shared,
    as_shared,
    is_shared,
    local,
    local_gradient,
    origin_of,
    shard_of,
)
from narrowgauge.optim._shares import Shares
from narrowgauge.storage._blockwise import decode_blocks, encode_blocks

if TYPE_CHECKING:
    from narrowgauge.optim._shard_sums import Rows, ShardSums

# Of each parameter with a gradient, by its place: itself, what lies here of its gradient.
Turns = Mapping[int, tuple[Tensor, Tensor]]
_LARGEST = torch.finfo(torch.float32).max


class QuantizedGradients(torch.optim.Optimizer):
    """An optimizer that sees quantized gradients.

    It is used in place of the optimizer that it is given: `step`, `zero_grad`, learning rate schedules and
    parameter groups are the other's. A gradient that holds an inf or NaN is handed on as it is, so that the other
    can refuse it, and leaves nothing behind.

    Sharded parameters (DTensors) are taken where the optimizer takes them. Ranks agree in one collective on what
    is not finite; an optimizer of this library that has no norm or sum to make then needs none of its own.

    Args:
        optimizer: any `torch.optim.Optimizer`. Its `p.grad` are overwritten with Q(g) at each step.
        codebook: the values of Q: a name (see `narrowgauge.formats.codebook`; signed, 8 bits) or the values.
        rounding: ``"nearest"`` (biased) or ``"stochastic"`` (unbiased).
        error_feedback: keep what rounding cut off, a float32 tensor a parameter, and add it to the next gradient.
        block_size: elements that share a scale.
        seed: key of the random bits, which depend on it, the parameter's place, the element and the step alone. (A
            shard has those of the whole where optimizers' random bits are; see docs/distributed.md.)

    Raises:
        ValueError: for an argument that is not taken.

    Source: Lecture 11, Mixed Precision Training, "Error compensation".
    """

    # Where the optimizer keeps none of its own: of which parameters, and their sums.
    _known: tuple[tuple[int, ...] | None, ShardSums | None] = None, None

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
        with self._told():
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
        """The optimizer's state, with each parameter's residual in its entry and the count of steps in the groups.

        It has the form of torch's, so `narrowgauge.distributed.save_checkpoint` and torch's functions for
        distributed states take it. Residuals of sharded parameters are DTensors cut as these are.
        """
        return saved(self.optimizer, self._residuals, self._step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. Each rank takes its part of a whole residual.

        Raises:
            ValueError: for a state of something else; nothing is changed then.
        """
        inner, residuals, step = taken_apart(self.optimizer, state_dict)
        self.optimizer.load_state_dict(inner)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        if residuals and not self.error_feedback:
            warnings.warn("state_dict: dropped residuals, of no use with error_feedback=False", stacklevel=2)
            residuals = {}
        self._residuals, self._step = residuals, step

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _sums(self) -> ShardSums | None:
        """What ranks that share parameters agree by; None where none are shared."""
        if isinstance(self.optimizer, Shares):
            sums = self.optimizer.all_shard_sums()
        else:
            ps = self._parameters()
            places = tuple(map(id, ps))
            if self._known[0] != places:
                own = None
                if any_shared(ps):
                    from narrowgauge.optim._shard_sums import ShardSums

                    own = ShardSums(ps)
                self._known = places, own
            sums = self._known[1]
        return sums if sums is not None and sums.places else None

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Have the optimizer's step in this block go by what ranks have agreed on before it."""
        try:
            yield
        finally:
            sums = self._sums()
            if sums is not None:
                sums.agreed = None

    def _quantize(self) -> None:
        self._step += 1
        turns: dict[int, tuple[Tensor, Tensor]] = {}
        for place, p in enumerate(self._parameters()):
            if p.grad is not None:
                turns[place] = p, local_gradient(p, p.grad)
        finite = self._finite(turns)
        for place, (p, grad) in turns.items():
            grad.copy_(self._of(p, grad, finite[place], place))
            if is_shared(p) and grad is not local(p.grad):
                p.grad = as_shared(p, grad)  # what was still to be summed up has been

    def _finite(self, turns: Turns) -> dict[int, Tensor]:
        """Whether gradients are finite, by place: bools, 0-d. Ranks agree."""
        finite = {place: torch.isfinite(grad.to(torch.float32)).all() for place, (_, grad) in turns.items()}
        sums = self._sums()
        if sums is None:
            return finite
        # The largest element of a block comes back as it is: codes overflow where what they are of does.
        arriving = {
            place: torch.isfinite(self._wanted(p, grad).to(grad.dtype)).all() for place, (p, grad) in turns.items()
        }
        rows: list[Rows] = []
        for device in {grad.device for _, grad in turns.values()}:
            places = [place for place, (_, grad) in turns.items() if grad.device == device]
            flags = torch.stack([torch.stack([arriving[place], finite[place]]) for place in places])
            rows.append((places, SQUARES, (~flags).to(torch.float64)))
        sums.add_up(rows, False)
        sums.agreed = rows
        for some, _, table in rows:
            finite.update(zip(some, (table[:, FLAGS] == 0).unbind(), strict=True))
            # For the optimizer, which sees what arrives.
            table[:, FLAGS] += table[:, SQUARES]
        return finite

    def _wanted(self, p: Tensor, grad: Tensor) -> Tensor:
        """What is to be quantized, in float32, which a sum of two finite numbers does not leave."""
        wide, residual = grad.to(torch.float32), self._residuals.get(p)
        return wide if residual is None else (wide + residual).clamp(-_LARGEST, _LARGEST)

    def _of(self, p: Tensor, grad: Tensor, finite: Tensor, place: int) -> Tensor:
        """Q of what lies here of a gradient, or itself where the whole is not finite; its residual is kept."""
        wanted = self._wanted(p, grad)
        bits = None
        if self.rounding == "stochastic":
            words = random_bits(
                grad.numel(),
                seed=self._seed,
                stream=place,
                step=self._step,
                offset=origin_of(shard_of(p)),
                device=grad.device,
            )
            bits = words.view(grad.shape)
        coder = self._on(grad.device)
        codes, scales = encode_blocks(wanted, coder, self._block_size, bits)
        quantized = decode_blocks(codes, scales, coder.values, self._block_size)
        if self.error_feedback:
            before = self._residuals.get(p)
            before = torch.zeros_like(wanted) if before is None else before
            # What arrives is rounded to the gradient's format: that is cut off, too.
            arrives = quantized.to(grad.dtype).to(torch.float32)
            self._residuals[p] = torch.where(finite & torch.isfinite(arrives), wanted - arrives, before)
        return torch.where(finite, quantized, grad.to(torch.float32))

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
