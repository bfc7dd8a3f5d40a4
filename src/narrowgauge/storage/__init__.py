"""Tensors kept in narrow formats: expansions, split words, codes with scales; weight and state storages."""

from narrowgauge.storage._blockwise import Quantized, quantize
from narrowgauge.storage._expansion import (
    fast_two_sum,
    grow,
    mul,
    scaling,
    split,
    two_prod,
    two_prod_fma,
    two_sum,
)
from narrowgauge.storage._marks import mark_states, marked_states
from narrowgauge.storage._quantiles import estimate_quantiles
from narrowgauge.storage._states import StateContext, StateStorage, state_storage, state_storages
from narrowgauge.storage._weights import WeightStorage, weight_storage, weight_storages

__all__ = [
    "Quantized",
    "StateContext",
    "StateStorage",
    "WeightStorage",
    "estimate_quantiles",
    "fast_two_sum",
    "grow",
    "mark_states",
    "marked_states",
    "mul",
    "quantize",
    "scaling",
    "split",
    "state_storage",
    "state_storages",
    "two_prod",
    "two_prod_fma",
    "two_sum",
    "weight_storage",
    "weight_storages",
]
