"""Hooks on finished gradients that do not keep their optimizer alive.

torch keeps what it calls for a parameter where Python's collector of cycles does not look. A method of an optimizer
there would keep the optimizer, the optimizer its parameters, and they the method: a model that nobody uses any more
would keep its weights, gradients and states until the process ends. So a hook holds its method by a weak reference.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle


class GradientHook:
    """Calls a method with the parameter, as long as the method's object is there.

    Args:
        method: of an object that somebody else keeps.
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
    trained = p.requires_grad
    # torch takes no hook for a frozen parameter, but keeps one, so that it may be thawed later.
    hooked: Any = p.requires_grad_(True)
    handle: RemovableHandle = hooked.register_post_accumulate_grad_hook(GradientHook(method))
    p.requires_grad_(trained)
    return handle
