"""State storages: how an optimizer keeps a moment between steps.

A moment is a running average. In a narrow format it meets two enemies: its values span many orders of magnitude
(block-wise dynamic codes are made for that), and its steps are small. With beta2 = 0.999 a second moment moves
by a thousandth a step, below half a unit in the last place of bf16: kept as one bf16 word it cannot shrink.
Kept as an expansion of two, it follows.

A storage keeps one or two tensors, its *words*. Like a weight storage it knows two arithmetics: `decode` and
`encode` move a moment to float32 registers and back, rounded once; `accumulate` averages in the words' own format,
every operation rounded, for storages whose words are floats.

Sources: 8-bit Optimizers via Block-wise Quantization, Section 2; Collage, Algorithm 2, line 9.
"""

from __future__ import annotations

import torch

from narrowgauge.storage._states._blocks import BlockwiseState, Float8State, FourBitState
from narrowgauge.storage._states._floats import ExpansionState, StateContext, StateStorage
from narrowgauge.storage._states._logarithms import LogState

__all__ = ["BlockwiseState", "StateContext", "StateStorage", "state_storage", "state_storages"]

_STORAGES: dict[str, StateStorage] = {
    storage.name: storage
    for storage in (
        StateStorage("fp32", torch.float32),
        StateStorage("bf16", torch.bfloat16),
        ExpansionState("expansion", torch.bfloat16),
        BlockwiseState("8bit"),
        Float8State("fp8"),
        FourBitState("4bit"),
        LogState("log8"),
        LogState("log4", bits=4),
    )
}


def state_storages() -> tuple[str, ...]:
    """The names of all state storages."""
    return tuple(_STORAGES)


def state_storage(name: str) -> StateStorage:
    """A state storage by name.

    Raises:
        ValueError: for an unknown name; the message lists those that exist.
    """
    if not isinstance(name, str) or name not in _STORAGES:
        raise ValueError(f"states: got {name!r}, takes one of {', '.join(map(repr, _STORAGES))}")
    return _STORAGES[name]
