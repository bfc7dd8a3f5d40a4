"""Tensors kept in narrow formats: expansions, split words, codes with scales; weight and state storages."""

from narrowgauge.kernels._codec import Codec, Word
from narrowgauge.storage import _factored, _log_states  # noqa: F401  # register theirs
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
from narrowgauge.storage._float8_weight import Float8Weight
from narrowgauge.storage._quantiles import estimate_quantiles
from narrowgauge.storage._register import register_state
from narrowgauge.storage._states import (
    StateContext,
    StateStorage,
    mark_states,
    marked_states,
    state_storage,
    state_storages,
)
from narrowgauge.storage._weights import WeightStorage, automatic_weights, weight_storage, weight_storages

__all__ = [
    "Codec",
    "Float8Weight",
    "Quantized",
    "StateContext",
    "StateStorage",
    "WeightStorage",
    "Word",
    "automatic_weights",
    "estimate_quantiles",
    "fast_two_sum",
    "grow",
    "mark_states",
    "marked_states",
    "mul",
    "quantize",
    "register_state",
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
