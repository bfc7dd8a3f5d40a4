"""A mark on a parameter: the states it wants, whatever the optimizer's default is.

An embedding knows that its gradients are sparse and uneven; the optimizer, which sees a tensor like any other, does
not. The mark travels with the parameter, so that no registry has to be kept and no group has to be made.
"""

from __future__ import annotations

from torch import Tensor

from narrowgauge.storage._states import state_storage

# The attribute of a parameter that holds it.
MARK = "narrowgauge_states"


def mark_states(p: Tensor, states: str) -> None:
    """Have every optimizer of this library keep a parameter's moments in a state storage, over its own option.

    Args:
        p: a parameter. A copy of it (`copy.deepcopy`) has no mark; modules that set one set it again.
        states: the name of a state storage, for all moments.

    Raises:
        ValueError: for an unknown storage.
    """
    if not isinstance(p, Tensor):
        raise TypeError(f"p: got {type(p).__name__}, takes a parameter")
    setattr(p, MARK, state_storage(states).name)


def marked_states(p: Tensor) -> str | None:
    """The state storage that a parameter is marked with, or None."""
    return getattr(p, MARK, None)
