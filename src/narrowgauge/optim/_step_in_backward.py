"""Stepping inside the backward pass: a parameter is updated, and its gradient freed, as soon as that is ready.

An ordinary loop keeps all gradients until `step()` has seen them: as many bytes as the weights. An optimizer that
treats each parameter by itself need not wait. torch calls a hook when a parameter's gradient is complete, its last
use in the graph accounted for; the parameter is stepped there and the gradient given back before the next one
comes. With one-byte states and remainders that takes a parameter from 7 bytes to 5.

The loop keeps its shape: `backward()`, then `step()`, which has nothing left to move and marks the end of one step.
The arithmetic is that of the ordinary loop, bit for bit. What needs all gradients at once, or more than one
backward pass, cannot be had (see `step_in_backward`). A second gradient before `step()` raises an error:
gradient accumulation, two losses, a parameter shared by two reentrant checkpoints.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from narrowgauge._module_names import in_ddp
from narrowgauge._text import listed
from narrowgauge._torch_private import accumulate_hooks
from narrowgauge.optim._optimizer import NarrowOptimizer
from narrowgauge.optim._options import LIMIT
from narrowgauge.optim._plan import never_trains
from narrowgauge.optim._sharding import local_gradient, shard_of
from narrowgauge.rules import Rule, has_terms

Stepper = TypeVar("Stepper", bound=NarrowOptimizer)


def step_in_backward(model: torch.nn.Module, optimizer: Callable[..., Stepper], **options: Any) -> Stepper:
    """An optimizer that steps each parameter of a model, and frees its gradient, during `backward()`.

    What comes back is an ordinary optimizer: `describe()`, `skipped`, groups, schedulers, `state_dict()` and
    `load_state_dict()` work, and its state is that of one made the usual way. The loop still calls `step()` after
    each `backward()`: it runs step hooks and a closure, once, and ends the step. A copy, by pickle or deepcopy,
    steps the usual way, and so does the optimizer itself after ``optimizer.in_backward.remove()``.

    Not to be had this way, since no two gradients exist at one time:

    - gradient accumulation, and more than one `backward()` before a `step()`: raises RuntimeError in the second;
    - clipping by the norm of all gradients: `max_grad_norm` raises ValueError; torch's functions find no gradient
      and do nothing. `clip_updates=True` limits each parameter's own step;
    - loss scalers: the weights have moved before a scaler could unscale; `torch.amp.GradScaler.step` then raises
      AssertionError, having found no gradients, and those of `narrowgauge.scaling` RuntimeError;
    - `nonfinite="raise"`: parameters before the bad one would have moved; raises ValueError;
    - data-parallel averaging after `backward()` (DistributedDataParallel): raises TypeError, in the first backward
      pass if the model is wrapped later.

    A sparse gradient is refused when its turn comes, with what came before it already stepped. A model compiled as
    one graph yields all gradients together: right, but nothing saved; compile it block by block.

    Args:
        model: the module.
        optimizer: an optimizer class, or a function that makes one; called with the model's named parameters.
        **options: for it.

    Returns:
        What `optimizer` gave.

    Raises:
        TypeError: if DistributedDataParallel has taken in the model, or the optimizer is not one of these.
        ValueError: for ``nonfinite="raise"`` or a `max_grad_norm`, or a parameter that another optimizer steps in
            backward already (take that one off first: ``other.in_backward.remove()``).
    """
    if in_ddp(model.parameters()):
        raise TypeError(_AVERAGED)
    refuse_other(optimizer)
    made = optimizer(model.named_parameters(), **options)
    refuse_other(type(made))
    made.in_backward = InBackward(made)
    return made


def refuse_other(given: object) -> None:
    """Refuse an argument `optimizer` that is a class, and none of this library's optimizers."""
    if isinstance(given, type) and not issubclass(given, NarrowOptimizer):
        name = f"{given.__module__}.{given.__qualname__}"
        raise TypeError(f"optimizer must be an optimizer of narrowgauge, got {name}")


_AVERAGED = "model must not be in DistributedDataParallel, whose averaging comes after each step"


class GradientHook:
    """Calls a method with the parameter as long as the method's object is there, by a weak reference.

    torch keeps hooks where Python's collector of cycles does not look. A method of an optimizer there would keep
    the optimizer, its parameters and the method: an unused model would stay until the process ends.
    """

    def __init__(self, method: Callable[[Tensor], None]) -> None:
        self._method = weakref.WeakMethod(method)

    @property
    def owner(self) -> object | None:
        """The object, or None if it is gone."""
        return getattr(self._method(), "__self__", None)

    def __call__(self, p: Tensor) -> None:
        method = self._method()
        if method is not None:
            method(p)


def on_gradient(p: Tensor, method: Callable[[Tensor], None]) -> RemovableHandle:
    """Have a method called whenever autograd has finished a parameter's gradient, a frozen one's too."""
    if never_trains(p):
        return RemovableHandle(OrderedDict())
    trained = p.requires_grad
    # torch takes no hook for a frozen parameter, but keeps one, so that it may be thawed later.
    hooked: Any = p.requires_grad_(True)
    handle: RemovableHandle = hooked.register_post_accumulate_grad_hook(GradientHook(method))
    p.requires_grad_(trained)
    return handle


def _is_stepped(p: Tensor) -> bool:
    """Whether an optimizer steps a parameter in backward already."""
    return any(
        isinstance(hook, GradientHook) and isinstance(hook.owner, InBackward) for hook in accumulate_hooks(p)
    )


class InBackward:
    """The handle of `step_in_backward`, at the optimizer's `in_backward`: hooks, and what they have stepped."""

    def __init__(self, optimizer: NarrowOptimizer) -> None:
        self._optimizer = optimizer
        self._numbers: dict[Tensor, int] = {}
        self._stepped: set[Tensor] = set()
        self._is_new = True
        self._handles: list[RemovableHandle] = []
        for group in optimizer.param_groups:
            self.check(group)
        for number in range(len(optimizer.param_groups)):
            self.watch(number)

    @staticmethod
    def check_options(group: Mapping[str, Any], rule: Rule) -> None:
        """Refuse options that cannot be had this way, at any time."""
        if group["nonfinite"] == "raise":
            raise ValueError("nonfinite must be 'skip' or 'propagate' with step_in_backward, got 'raise'")
        if group[LIMIT] is not None:
            raise ValueError(f"{LIMIT} must be None with step_in_backward, got {group[LIMIT]!r}")
        if group["nonfinite"] == "propagate" and not has_terms(rule):
            return
        for name, p in zip(group.get("param_names") or range(len(group["params"])), group["params"], strict=True):
            if shard_of(p) is not None:
                raise ValueError(
                    f"nonfinite must be 'propagate' with step_in_backward for the sharded {name}, and its rule "
                    "without sums (no LAMB, LARS, clip_updates, cautious): ranks cannot agree on each parameter by "
                    "itself"
                )

    def check(self, group: dict[str, Any]) -> None:
        """Refuse a group that cannot be stepped this way."""
        self.check_options(group, self._optimizer.rule_for(group))
        for p in group["params"]:
            if _is_stepped(p):
                gc.collect()  # an optimizer that is no longer used may still be there
            if _is_stepped(p):
                name = self._optimizer.plan_of(p).name
                raise ValueError(
                    f"model must not be stepped in backward already, as {name} is; call the other optimizer's "
                    "in_backward.remove() first"
                )

    def watch(self, number: int) -> None:
        """Step the parameters of a group from now on."""
        for p in self._optimizer.param_groups[number]["params"]:
            self._numbers[p] = number
            self._handles.append(on_gradient(p, self._step))

    def remove(self) -> None:
        """Take the hooks off the model: from now on gradients stay, and `step()` moves the weights.

        Between two steps, best: what `backward()` has moved since the last `step()` stays moved. The model then
        takes another optimizer. Calling it again does nothing.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stepped.clear()
        if self._optimizer.in_backward is self:
            self._optimizer.in_backward = None

    @torch.no_grad()
    def _step(self, p: Tensor) -> None:
        optimizer = self._optimizer
        if self._is_new:
            if in_ddp(self._numbers):
                raise TypeError(_AVERAGED)
            self._is_new = False
        if not self._stepped:
            optimizer.begin_step()
        name = optimizer.plan_of(p).name
        if p in self._stepped:
            raise RuntimeError(
                f"{name} was stepped in backward already since the last step(); each backward pass is a step: call "
                "step() after it, accumulate nothing, and share no weights between reentrant checkpoints"
            )
        if p.grad is None:
            raise RuntimeError(f"{name} has no gradient when its turn comes: another hook has taken it")
        group = optimizer.param_groups[self._numbers[p]]
        grad = local_gradient(p, p.grad)
        optimizer.step_one(group, p, grad)
        p.grad = None
        self._stepped.add(p)

    def end(self) -> None:
        """End a step, all of whose parameters have moved already; refuse a gradient that no hook was called for.

        The exception is a first step with a learning rate of 0. It moves nothing, and is how torch's and
        torchtitan's distributed checkpoints have an optimizer make its states.
        """
        optimizer = self._optimizer
        if not (self._stepped or optimizer.state or any(group["lr"] for group in optimizer.param_groups)):
            optimizer.take_step()
            return
        self._stepped.clear()
        left = [self._optimizer.plan_of(p).name for p in self._numbers if p.grad is not None]
        if left:
            raise RuntimeError(
                f"gradients must come from backward(), got others of {listed(left)}; call zero_grad()"
            )
