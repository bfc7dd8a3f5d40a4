"""Optimizer states on the CPU: a GPU keeps weights and gradients, and the host steps them.

Moments and low words of a model are often what does not fit. Here they never come to the GPU. The host has a copy
of each weight beside its low word and its moments; a gradient comes over, the compiled CPU step takes it, and the
weight goes back:

    backward pass      |g9 g8 g7 … |                      the GPU computes
    gradients               |g9 |g8 |g7 | …               to the host, on a stream of their own
    step                             |9  |8  |7  | …      the CPU, each as soon as it is there
    weights                               |9 |8 |7 | …    to the GPU, on another stream

The arithmetic is that of the same optimizer on the CPU, bit for bit. It is an ordinary optimizer (`inner`), of
tensors on the CPU; what is here hands it options and gradients, and shows its state as that of the parameters.

Source: ZeRO-Offload (Ren et al. 2021), whose CPU step begins when all gradients have come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.utils.hooks import RemovableHandle

from narrowgauge.distributed._offload_pieces import Piece, Pieces, refuse_parameter
from narrowgauge.distributed._offload_views import ShowsInner
from narrowgauge.optim import NarrowOptimizer
from narrowgauge.optim._checkpoint import check_form
from narrowgauge.optim._engine import refuse_sparse
from narrowgauge.optim._gradient_hooks import on_gradient
from narrowgauge.optim._optimizer import uncompiled
from narrowgauge.optim._step_in_backward import refuse_other

_SCALED = ("grad_scale", "found_inf")  # what torch's GradScaler leaves for the time of a step


class CPUOffload(ShowsInner):
    """An optimizer of this library whose states are on the CPU, for parameters on a GPU.

        optimizer = ng.distributed.CPUOffload(ng.optim.AdamW, model.parameters(), lr=1e-3, weights="split8")

    Groups, schedulers, closures, hooks, loss scalers, `state_dict()`, `load_state_dict()` and checkpoints are those
    of any optimizer; a state loads into the same optimizer without this, and the other way round. Make it after
    the model is where it is to be trained. Parameters on the CPU are taken too, and copied.

    Gradients come over while the backward pass goes on. One that is written to afterwards, as by
    `clip_grad_norm_`, or that a walk over `param_groups` may have unscaled, comes over again in `step()`, as
    `late` counts; `max_grad_norm` and the loss scalers of narrowgauge write to none. What nobody can see is a write
    to ``p.grad.data``: use ``transfer="step"``. Likewise a write to ``p.data`` is overwritten by the next step;
    writes to ``p`` under `torch.no_grad` are taken over.

    Args:
        optimizer: an optimizer class of this library, or a function that makes one from parameter groups.
        params: parameters, named parameters or groups, on GPUs or on the CPU; whole ones, no DTensors.
        transfer: when gradients come over: ``"backward"``, from hooks, each as soon as autograd has it; or
            ``"step"``, all in `step()`, as where something writes to them unseen. None: ``"step"`` where
            `torch.distributed` runs with several ranks, whose gradients are averaged after autograd has them, else
            ``"backward"``.
        gradients: ``"kept"`` leaves them on the GPU, as everywhere; ``"freed"`` gives their memory back as soon as
            they are on their way, so that each parameter takes its weight's bytes there and no more. Then there is
            one backward pass a step, and nobody else finds gradients (`clip_grad_norm_`, `unscale_`).
        **options: for `optimizer`.

    Attributes:
        inner: the optimizer, of the copies on the CPU. Its groups get their options from `param_groups`.

    Raises:
        TypeError: if `optimizer` makes no optimizer of this library.
        ValueError: for an argument or a parameter that is not taken, by name.
    """

    def __init__(
        self,
        optimizer: Callable[..., NarrowOptimizer],
        params: ParamsT,
        *,
        transfer: Literal["backward", "step"] | None = None,
        gradients: Literal["kept", "freed"] = "kept",
        **options: Any,
    ) -> None:
        refuse_other(optimizer, "one of narrowgauge.optim")
        if transfer not in (None, "backward", "step"):
            raise ValueError(f"transfer: got {transfer!r}, takes 'backward', 'step' or None")
        if gradients not in ("kept", "freed"):
            raise ValueError(f"gradients: got {gradients!r}, takes 'kept' or 'freed'")
        if gradients == "freed" and transfer == "step":
            raise ValueError("gradients: got 'freed', takes 'kept' with transfer='step': they wait for the step")
        self._transfer, self._frees = transfer, gradients == "freed"
        self._groups: list[dict[str, Any]] = []
        self._pieces, self._handles = Pieces(), dict[Tensor, RemovableHandle]()
        self._walked = 0
        self._late = 0
        super().__init__(params, {})
        made = optimizer([self._copied(group) for group in self._groups], **options)
        if not isinstance(made, NarrowOptimizer):
            kind = type(made)  # type: ignore[unreachable]
            raise TypeError(f"optimizer: got {kind.__module__}.{kind.__qualname__}, takes one of narrowgauge.optim")
        self._inner = made
        self.defaults = made.defaults
        self._take_options()
        for group in self._groups:
            self._watch(group["params"])

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with the parameters as the model has them."""
        # torch's GradScaler writes to gradients in a way that autograd does not count; it finds them here.
        self._walked = self._pieces.next_number()
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    @property  # type: ignore[override]
    def state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        """The states by parameter: tensors on the CPU."""
        if self._inner is None:
            return {}
        states = self._inner.state
        return {p: states[piece.host] for p, piece in self._pieces.by_parameter.items() if states.get(piece.host)}

    @state.setter
    def state(self, state: object) -> None:
        """torch's constructor begins with an empty one; here it is `inner`'s."""

    def _copied(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group of copies on the host."""
        names = group.get("param_names")
        for number, p in enumerate(group["params"]):
            refuse_parameter(names[number] if names else f"parameter {number} of a group", p)
        hosts = self._pieces.add(group["params"])
        named = list(zip(names, hosts, strict=True)) if names else hosts
        return {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "params": named}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._inner is None:
            return
        try:
            self._inner.add_param_group(self._copied(self._groups[-1]))
        except Exception:
            self._pieces.drop(self._groups.pop()["params"])
            raise
        self._take_options(-1)  # options of the others may have changed since `inner` was told
        self._watch(self._groups[-1]["params"])

    def _watch(self, ps: list[Tensor]) -> None:
        if self._transfer == "step":
            return
        for p in ps:
            self._handles[p] = on_gradient(p, self._accumulated)

    def remove(self) -> None:
        """Take the hooks off the parameters, so that another optimizer may have them; this one is done then."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _accumulated(self, p: Tensor) -> None:
        """Autograd has finished a gradient."""
        if self._transfer is None and _several_ranks():
            if self._frees:
                raise RuntimeError(
                    "gradients: got 'freed' with several ranks, takes 'kept' there, or transfer='backward' where "
                    "nothing averages gradients after autograd has them"
                )
            return
        piece, grad = self._pieces.by_parameter[p], p.grad
        if grad is None or grad.layout is not torch.strided:
            return
        if piece.held:
            raise RuntimeError(_twice(self._name(piece)))
        piece.fetch(grad, self._pieces.next_number(), free=self._frees, late=False)

    def _name(self, piece: Piece) -> str:
        return self.inner.plan_of(piece.host).name

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step: returns when the host has taken it, with the last weights on their way back.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            FloatingPointError: if `nonfinite` is ``"raise"`` and a gradient is not finite.
            RuntimeError: for a sparse gradient, or a parameter that is not as it was when this was made. In both
                cases no parameter has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        for group in self._groups:
            for p in group["params"]:
                if p.grad is not None:
                    refuse_sparse(self._name(self._pieces.by_parameter[p]), p.grad)
        self._pieces.begin()
        try:
            self._bring()
            self._step_inner()
        finally:
            self._pieces.end()
        return loss

    def _prepare(self) -> None:
        """Let `inner` know what has changed since the last time: options, and weights written to from outside."""
        for piece in self._pieces.by_parameter.values():
            if (what := piece.changed()) is not None:
                raise RuntimeError(f"{self._name(piece)} {what}; make CPUOffload after the model is as it stays")
        for mine, group in zip(self._groups, self.inner.param_groups, strict=True):
            for key, value in mine.items():
                if key != "params" and group.get(key) is not value:
                    group[key] = value
        for piece in self._pieces.by_parameter.values():
            piece.follow()

    def _bring(self) -> None:
        """Start to bring the gradients that are not on their way."""
        trusted = self._within or getattr(self, "grad_scale", None) is not None
        self._late = 0
        for piece in self._pieces.by_parameter.values():
            grad = piece.p.grad
            if piece.held:
                if grad is not None:
                    raise RuntimeError(_twice(self._name(piece)))
            elif grad is not None and not (piece.has(grad) and (trusted or piece.number > self._walked)):
                piece.fetch(grad, self._pieces.next_number(), free=self._frees, late=True)
                self._late += 1
            piece.give(piece.held or grad is not None)

    def _step_inner(self) -> None:
        inner: Any = self.inner
        given = {name: getattr(self, name) for name in _SCALED if hasattr(self, name)}
        for name, value in given.items():
            setattr(inner, name, value)
        try:
            inner.take_step(self._pieces)
        finally:
            for name in given:
                delattr(inner, name)

    @property
    def late(self) -> int:
        """How many gradients of the last step were brought by `step()` itself; 0 if all came beside the backward
        pass.
        """
        return self._late

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for piece in self._pieces.by_parameter.values():
            piece.forget()

    def _take_options(self, first: int = 0) -> None:
        """Show the options as `inner` has them now, of groups from one on."""
        for mine, group in zip(self._groups[first:], self.inner.param_groups[first:], strict=True):
            mine.update({key: value for key, value in group.items() if key != "params"})

    def state_dict(self) -> dict[str, Any]:
        """The state as `inner` gives it, tensors on the CPU."""
        self._prepare()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        found = self.inner.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, as `NarrowOptimizer.load_state_dict` does; load the model first.

        Raises:
            ValueError: as there; nothing is changed then.
        """
        check_form(state_dict)
        self._prepare()
        given = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, given)
            given = given if changed is None else changed
        self.inner.load_state_dict(given)
        self._take_options()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> NoReturn:
        raise TypeError("CPUOffload: cannot be copied or pickled; make another one and load state_dict() into it")


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _twice(name: str) -> str:
    return (
        f"{name} has a second gradient before step(), and the first is on the CPU already; gradients='freed' takes "
        "one backward pass a step, zero_grad() of the optimizer begins anew"
    )
