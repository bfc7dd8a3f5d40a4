"""Optimizer states on the CPU: a GPU keeps weights and gradients, and the host steps them.

Moments and low words of a model are often what does not fit. Here they never come to the GPU. The host has a copy
of each weight beside its low word and its moments; a gradient is copied to the host, the compiled CPU step uses it,
and the weight is copied back:

    backward pass      |g9 g8 g7 … |                      the GPU computes
    gradients               |g9 |g8 |g7 | …               to the host, on a stream of their own
    step                             |9  |8  |7  | …      the CPU, each as soon as it is there
    weights                               |9 |8 |7 | …    to the GPU, on another stream

The arithmetic is that of the same optimizer on the CPU, bit for bit. It is an ordinary optimizer (`inner`) of
tensors on the CPU; `CPUOffload` passes it options and gradients, and shows its state as that of the parameters.

Source: ZeRO-Offload (Ren et al. 2021), whose CPU step begins when all gradients have arrived.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.utils.hooks import RemovableHandle

from narrowgauge._arguments import check_choice
from narrowgauge._torch_private import optimizer_hooks, uncompiled
from narrowgauge.distributed._offload_buffers import HostBuffers, HostParameter
from narrowgauge.optim import Description, NarrowOptimizer
from narrowgauge.optim._checkpoint import check_form
from narrowgauge.optim._engine import refuse_sparse
from narrowgauge.optim._step_in_backward import on_gradient, refuse_other
from narrowgauge.storage import Float8Weight

_SCALED = ("grad_scale", "found_inf")  # set by torch's GradScaler for the time of a step


def _of_inner(name: str) -> Any:
    """An attribute of the inner optimizer that may be set here too."""
    return property(lambda self: getattr(self.inner, name), lambda self, value: setattr(self.inner, name, value))


class CPUOffload(torch.optim.Optimizer):
    """An optimizer of this library whose states are on the CPU, for parameters on a GPU.

        optimizer = ng.distributed.CPUOffload(ng.optim.AdamW, model.parameters(), lr=1e-3, weights="split8")

    Groups, schedulers, closures, hooks, loss scalers, `state_dict()`, `load_state_dict()` and checkpoints are those
    of any optimizer; a state loads into the same optimizer without this, and the other way round. Make it after
    the model is where it is to be trained. Parameters on the CPU are taken too, and copied.

    Gradients are copied while the backward pass goes on. A gradient that is written to afterwards, as by
    `clip_grad_norm_`, or that a walk over `param_groups` may have unscaled, is copied again in `step()`, as
    `late` counts; `max_grad_norm` and the loss scalers of narrowgauge write to none. A write to ``p.grad.data``
    cannot be seen: use ``transfer="step"``. Likewise a write to ``p.data`` is overwritten by the next step;
    writes to ``p`` under `torch.no_grad` are seen.

    Everything else that optimizers of this library offer (`skipped`, `grad_norm`, `state_bytes()`, …) is `inner`'s.

    Args:
        optimizer: an optimizer class of this library, or a function that makes one from parameter groups.
        params: parameters, named parameters or groups, on GPUs or on the CPU; no DTensors.
        transfer: when gradients are copied: ``"backward"``, by hooks, each as soon as autograd has it; or
            ``"step"``, all in `step()`, for gradients that are written to unseen. None: ``"step"`` if
            `torch.distributed` runs with several ranks, which average gradients after autograd has them, else
            ``"backward"``.
        gradients: ``"kept"`` leaves them on the GPU; ``"freed"`` frees their memory as soon as they are on their
            way, so that each parameter takes only its weight's bytes there. Then there is one backward pass a step,
            and nothing else finds gradients (`clip_grad_norm_`, `unscale_`).
        **options: for `optimizer`.

    Attributes:
        inner: the optimizer, of the copies on the CPU. Its groups get their options from `param_groups`.

    Raises:
        TypeError: if `optimizer` makes no optimizer of this library.
        ValueError: for an argument or a parameter that is not allowed, by name.
    """

    _inner: NarrowOptimizer | None = None  # while torch's constructor runs
    _within = False  # in a loss scaler's step

    gauges = _of_inner("gauges")
    last_stats = _of_inner("last_stats")

    def __init__(
        self,
        optimizer: Callable[..., NarrowOptimizer],
        params: ParamsT,
        *,
        transfer: Literal["backward", "step"] | None = None,
        gradients: Literal["kept", "freed"] = "kept",
        **options: Any,
    ) -> None:
        refuse_other(optimizer)
        check_choice("transfer", transfer, ("backward", "step", None))
        check_choice("gradients", gradients, ("kept", "freed"))
        if gradients == "freed" and transfer == "step":
            raise ValueError("gradients must be 'kept' with transfer='step', got 'freed'")
        self._transfer, self._frees = transfer, gradients == "freed"
        self._groups: list[dict[str, Any]] = []
        self._buffers, self._handles = HostBuffers(), dict[Tensor, RemovableHandle]()
        self._walked = self._late = 0
        super().__init__(params, {})
        made = optimizer([self._copied(group) for group in self._groups], **options)
        if not isinstance(made, NarrowOptimizer):
            kind = type(made)  # type: ignore[unreachable]
            raise TypeError(
                f"optimizer must make one of narrowgauge.optim, got a {kind.__module__}.{kind.__qualname__}"
            )
        if made.writes_weights:
            raise ValueError(
                f"optimizer must write to parameters in step() alone, got {type(made).__name__}, whose eval() and "
                "train() do"
            )
        self._inner = made
        self.defaults = made.defaults
        self._take_options()
        for group in self._groups:
            self._watch(group["params"])

    @property
    def inner(self) -> NarrowOptimizer:
        """The optimizer of the copies on the CPU."""
        assert self._inner is not None
        return self._inner

    def __getattr__(self, name: str) -> Any:
        """Everything else is the inner optimizer's; its methods get the copies of parameters."""
        if self._inner is None or (name.startswith("_") and name != "_step_supports_amp_scaling"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self._inner, name)
        if not callable(found) or isinstance(found, Tensor):
            return found

        @functools.wraps(found)
        def call(*args: Any, **options: Any) -> Any:
            return found(*map(self._host_of, args), **options)

        return call

    def _host_of(self, argument: Any) -> Any:
        entry = self._buffers.by_parameter.get(argument) if isinstance(argument, Tensor) else None
        return argument if entry is None else entry.host

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with the parameters as the model has them."""
        # torch's GradScaler reads this, and writes to gradients in a way that autograd does not count.
        self._walked = self._buffers.next_number()
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
        return {p: states[entry.host] for p, entry in self._buffers.by_parameter.items() if states.get(entry.host)}

    @state.setter
    def state(self, state: object) -> None:
        """Ignored: torch's constructor sets an empty one, and the state is `inner`'s."""

    def _copied(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group of copies on the host."""
        names = group.get("param_names")
        for number, p in enumerate(group["params"]):
            _refuse_parameter(names[number] if names else f"parameter {number} of a group", p)
        hosts = self._buffers.add(group["params"])
        named = list(zip(names, hosts, strict=True)) if names else hosts
        return {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "params": named}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._inner is None:
            return
        try:
            self._inner.add_param_group(self._copied(self._groups[-1]))
        except Exception:
            self._buffers.drop(self._groups.pop()["params"])
            raise
        self._take_options(-1)  # options of other groups may have changed since the last step
        self._watch(self._groups[-1]["params"])

    def _watch(self, ps: list[Tensor]) -> None:
        if self._transfer == "step":
            return
        for p in ps:
            self._handles[p] = on_gradient(p, self._accumulated)

    def remove(self) -> None:
        """Remove the hooks from the parameters, so that another optimizer may step them."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _accumulated(self, p: Tensor) -> None:
        """Autograd has finished a gradient."""
        if self._transfer is None and _several_ranks():
            if self._frees:
                raise RuntimeError(
                    "gradients must be 'kept' with several ranks, got 'freed'; or pass transfer='backward' if "
                    "nothing averages gradients after autograd has them"
                )
            return
        entry, grad = self._buffers.by_parameter[p], p.grad
        if grad is None or grad.layout is not torch.strided:
            return
        if entry.held:
            raise RuntimeError(_second_gradient(self._name(entry)))
        entry.fetch(grad, self._buffers.next_number(), free=self._frees)

    def _name(self, entry: HostParameter) -> str:
        return self.inner.plan_of(entry.host).name

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step: returns when the host has taken it, with the last weights on their way back.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            FloatingPointError: if `nonfinite` is ``"raise"`` and a gradient is not finite.
            RuntimeError: for a sparse gradient, or a parameter whose device, dtype or shape has changed. In both
                cases no parameter is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()
        for group in self._groups:
            for p in group["params"]:
                if p.grad is not None:
                    refuse_sparse(self._name(self._buffers.by_parameter[p]), p.grad)
        self._buffers.begin()
        try:
            self._bring()
            self._step_inner()
        finally:
            self._buffers.end()
        return loss

    def _prepare(self) -> None:
        """Pass to `inner` what has changed since the last time: options, and weights written to from outside."""
        for entry in self._buffers.by_parameter.values():
            if (what := entry.changed()) is not None:
                raise RuntimeError(f"{self._name(entry)} {what}; make CPUOffload after the model is moved and cast")
        for mine, group in zip(self._groups, self.inner.param_groups, strict=True):
            for key, value in mine.items():
                if key != "params" and group.get(key) is not value:
                    group[key] = value
        for entry in self._buffers.by_parameter.values():
            entry.update_host()

    def _bring(self) -> None:
        """Start to copy the gradients that are not on their way."""
        trusted = self._within or getattr(self, "grad_scale", None) is not None
        self._late = 0
        for entry in self._buffers.by_parameter.values():
            grad = entry.p.grad
            if entry.held:
                if grad is not None:
                    raise RuntimeError(_second_gradient(self._name(entry)))
            elif grad is not None and not (entry.has(grad) and (trusted or entry.number > self._walked)):
                entry.fetch(grad, self._buffers.next_number(), free=self._frees)
                self._late += 1
            entry.set_gradient(entry.held or grad is not None)

    def _step_inner(self) -> None:
        inner: Any = self.inner
        given = {name: getattr(self, name) for name in _SCALED if hasattr(self, name)}
        for name, value in given.items():
            setattr(inner, name, value)
        try:
            inner.take_step(self._buffers)
        finally:
            for name in given:
                delattr(inner, name)

    @property
    def late(self) -> int:
        """How many gradients of the last step were copied in `step()`; 0 if all came beside the backward pass."""
        return self._late

    def host_bytes(self) -> int:
        """Bytes on the CPU beside the states: a copy of each weight, and room for each gradient."""
        return self._buffers.nbytes()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for entry in self._buffers.by_parameter.values():
            entry.forget()

    @contextmanager
    def unscaling(self, inverse: Tensor, whole: bool) -> Iterator[Any]:
        """As `NarrowOptimizer.unscaling`: for loss scalers."""
        self._within = True
        try:
            with self.inner.unscaling(inverse, whole) as asked:
                yield asked
        finally:
            self._within = False

    def inverse_scale(self) -> Tensor | None:
        """As `NarrowOptimizer.inverse_scale`; on the scaler's device."""
        scale = getattr(self, "grad_scale", None)
        return self.inner.inverse_scale() if scale is None else scale.double().reciprocal().float()

    def describe(self) -> Description:
        """As `NarrowOptimizer.describe`, of the copies on the CPU."""
        self._prepare()
        return self.inner.describe()

    def measured(self) -> list[tuple[list[Tensor], Tensor]]:
        """The sums in `last_stats`, with the parameters as the model has them; tables on the CPU."""
        by_host = self._buffers.by_host
        return [([by_host[p].p for p in ps], rows) for ps, rows in self.inner.measured()]

    def full_weights(self) -> dict[Tensor, Tensor]:
        """As `NarrowOptimizer.full_weights`, on the CPU."""
        self._prepare()
        by_host = self._buffers.by_host
        return {by_host[host].p: wide for host, wide in self.inner.full_weights().items()}

    @torch.no_grad()
    def set_full_weights(self, weights: Mapping[Tensor, Tensor] | Mapping[str, Tensor]) -> None:
        """As `NarrowOptimizer.set_full_weights`; the model has the new weights at once."""
        self._prepare()
        named = {plan.name: host for host, plan in self.inner.plans()}
        found: dict[Any, Tensor] = {
            named.get(key, key) if isinstance(key, str) else self._host_of(key): wide
            for key, wide in weights.items()
        }
        self.inner.set_full_weights(found)
        self._buffers.send_back(found)

    def preview_unavailable(self, p: Tensor) -> str:
        """Why no moments are previewed: a step begins before its gradients are there."""
        return "gradients are on their way to the CPU until they are stepped"

    def _take_options(self, first: int = 0) -> None:
        """Show the options as `inner` has them now, of groups from one on."""
        for mine, group in zip(self._groups[first:], self.inner.param_groups[first:], strict=True):
            mine.update({key: value for key, value in group.items() if key != "params"})

    def torch_state_dict(self) -> dict[str, Any]:
        """As `NarrowOptimizer.torch_state_dict`."""
        self._prepare()
        return self.inner.torch_state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The state of `inner`, tensors on the CPU."""
        self._prepare()
        for before in optimizer_hooks(self, "state_dict_pre"):
            before(self)
        return self._through("state_dict_post", self.inner.state_dict())

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, as `NarrowOptimizer.load_state_dict` does; load the model first.

        Raises:
            ValueError: as there; nothing is changed then.
        """
        check_form(state_dict)
        self._prepare()
        self.inner.load_state_dict(self._through("load_state_dict_pre", dict(state_dict)))
        self._take_options()
        for after in optimizer_hooks(self, "load_state_dict_post"):
            after(self)

    def _through(self, hooks: Any, state: dict[str, Any]) -> dict[str, Any]:
        """A state as hooks that may replace it leave it."""
        for hook in optimizer_hooks(self, hooks):
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    def __getstate__(self) -> NoReturn:
        raise TypeError("CPUOffload: cannot be copied or pickled; make another one and load state_dict() into it")


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _second_gradient(name: str) -> str:
    return (
        f"{name} has a second gradient before step(), and the first is on the CPU already; gradients='freed' "
        "allows one backward pass a step, and the optimizer's zero_grad() begins anew"
    )


def _refuse_parameter(name: str, p: Tensor) -> None:
    if hasattr(p, "to_local"):
        raise ValueError(
            f"params: {name} must be a whole tensor, got a DTensor; with fully_shard(…, offload_policy="
            "CPUOffloadPolicy()) shards are on the CPU, and every optimizer steps them there"
        )
    if isinstance(p, Float8Weight):
        raise ValueError(
            f"params: {name} must be a plain tensor, got a Float8Weight: weights='fp8split8' have no copy on the "
            "host"
        )
    if p.device.type not in ("cpu", "cuda"):
        raise ValueError(f"params: {name} must be on a CUDA device or the CPU, got {p.device}")
