"""The random generators that a training loop draws from without naming one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def read_random_states() -> dict[str, Any]:
    """The states of torch's, Python's and NumPy's generators; of a CUDA device the current one's."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  # what people still use
    states = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.array(keys, dtype=np.int64)), *(float(x) for x in rest)),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put back what `read_random_states` gave."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    kind, keys, at, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), int(at), int(has_gauss), gauss))  # noqa: NPY002
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
