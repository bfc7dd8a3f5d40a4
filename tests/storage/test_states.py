"""State storages: decode(encode(x)) within the storage's precision, and averages in the words' own format."""

import pytest
import torch

from narrowgauge.storage import (
    StateContext,
    StateStorage,
    _states,
    register_state,
    state_storage,
    state_storages,
)
from narrowgauge.storage._log_states import LogUnsignedState

NAMES = state_storages()
# Relative to the element, and to the block's largest element: half the widest gap of 8bit, near 1, and of the 4-bit
# dynamic map, whose second moment has 1/16 for zero; half the spacing of e4m3's smallest numbers, over 448.
ERROR = {"fp32": 0.0, "bf16": 2.0**-8, "expansion": 2.0**-16, "factored": 0.0}
WORST = {"8bit": 0.008, "4bit": 0.1126, "fp8": 2.0**-10 / 448}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(3, 500), (7,), (), (0, 4)])
def test_decoding_what_was_encoded(name: str, signed: bool, shape: tuple[int, ...]) -> None:
    storage = state_storage(name).for_slot(signed, False)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-4
    x = x if signed else x.square()
    context = StateContext(x.shape, signed, 64)
    words = storage.encode(x, context)
    again = storage.decode(words, context)
    assert again.shape == x.shape
    assert again.dtype == torch.float32
    assert sum(word.nbytes for word in words.values()) == storage.nbytes(x.shape, 64)
    # A second moment in 4 bits has no zero: what is zero beside others reads as a sixteenth, and never divides.
    assert name not in ("4bit", "log8", "log4") or signed or (again > 0).all()
    if name.startswith("log"):
        # See test_log_signed for bounds: here, that an error is no larger than its element.
        assert ((again - x).abs() <= x.abs() * (1 if signed else 3)).all()
    elif name in WORST:
        blocks = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % 64)).view(-1, 64)
        scale = blocks.abs().amax(dim=1, keepdim=True).expand_as(blocks).reshape(-1)[: x.numel()].view(x.shape)
        relative = 2.0**-4 * x.abs() if name == "fp8" else 0.0
        assert ((again - x).abs() <= torch.maximum(WORST[name] * scale, torch.as_tensor(relative)) * 1.000001).all()
    elif storage.whole:
        # A vector is one row, and comes back; test_factored has the rest.
        assert x.dim() > 1 or ((again - x).abs() <= 2.0**-22 * x).all()
    else:
        assert ((again.double() - x.double()).abs() <= ERROR[name] * x.double().abs()).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("signed", [True, False])
def test_a_new_moment_is_zero_and_matches_the_words_of_later_ones(name: str, signed: bool) -> None:
    storage = state_storage(name).for_slot(signed, False)
    p = torch.randn(30, 40).to(torch.bfloat16)
    context = StateContext(p.shape, signed, 64)
    words = storage.init(p, signed, 64)
    assert torch.equal(storage.decode(words, context), torch.zeros(30, 40))
    later = storage.encode(torch.rand(30, 40), context)
    assert {k: (v.shape, v.dtype) for k, v in words.items()} == {k: (v.shape, v.dtype) for k, v in later.items()}


def test_an_average_in_one_bf16_word_cannot_shrink_where_an_expansion_does() -> None:
    """beta2 = 0.999: the paper's reason for the second word (Collage, Section 4.2)."""
    one, two = state_storage("bf16"), state_storage("expansion")
    start, zero = torch.full((10,), 0.01), torch.zeros(10, dtype=torch.bfloat16)
    context = StateContext(start.shape, False, 1)
    stuck, moving = one.encode(start, context), two.encode(start, context)
    for _ in range(1000):
        stuck, moving = one.accumulate(stuck, zero, 0.999, 0.001), two.accumulate(moving, zero, 0.999, 0.001)
    assert torch.equal(one.decode(stuck, context), start.bfloat16().float())
    wanted = 0.01 * 0.999**1000
    assert ((two.decode(moving, context) / wanted - 1).abs() < 0.02).all()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"states must be 'fp32', .* or 'log4', got '8bits'"):
        state_storage("8bits")


def test_a_storage_is_registered_under_its_name_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_states, "_STORAGES", dict(_states._STORAGES))
    half = StateStorage("fp16", torch.float16)
    register_state("fp16", half)
    register_state("fp16", half)  # as where a module is loaded again
    assert state_storages()[-1] == "fp16"
    assert state_storage("fp16") is half
    assert half.codec(signed=True) is None, "kernels keep float32 and bfloat16"
    with pytest.raises(ValueError, match="name must be new, got 'fp16', which another state storage has"):
        register_state("fp16", StateStorage("fp16", torch.bfloat16))
    with pytest.raises(ValueError, match="name must be a word, and the storage's, 'fp16', got 'half'"):
        register_state("half", half)


def test_a_storage_that_says_something_else_than_its_codec_is_refused() -> None:
    """Eager torch would hand the weight what the moment loses, and kernels would not."""
    with pytest.raises(ValueError, match="error_feedback of the storage 'half' must be error_feedback"):
        register_state("half", StateStorage("half", torch.bfloat16, error_feedback=True))
    with pytest.raises(ValueError, match="stochastic of the storage 'near' must be needs_random of its codec"):
        register_state("near", LogUnsignedState("near", stochastic=False))
    assert not {"half", "near"} & set(state_storages())


def test_a_storage_of_several_tensors_may_leave_validate_out() -> None:
    tensors = {"codes": torch.zeros(3), "scales": torch.zeros(1)}
    assert StateStorage("several", torch.uint8).validate(tensors, signed=False) is None
    assert state_storage("fp32").validate({"": -torch.ones(3)}, signed=False) == "negative numbers"
    words = {"hi": -torch.ones(3), "lo": torch.zeros(3)}
    assert state_storage("expansion").validate(words, signed=False) == "negative numbers"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("has_normalizer", [True, False])
def test_a_codec_has_the_tensors_of_its_storage(name: str, signed: bool, has_normalizer: bool) -> None:
    storage = state_storage(name).for_slot(signed, has_normalizer)
    codec = storage.codec(signed)
    if name == "factored" and not signed:
        assert codec is None, "eager torch takes every step"
        return
    assert codec is not None
    assert codec == storage.codec(signed), "kernels are found by it"
    flags = codec.normalized, codec.error_feedback, codec.needs_random
    assert flags == (storage.normalized, storage.error_feedback, storage.stochastic)
    tensors = storage.init(torch.zeros(3, 128), signed, 64)
    assert [word.name for word in codec.words] == list(tensors)
    for word in codec.words:
        wanted = word.nbytes(64) * 6 if word.per_block else word.nbytes(3 * 128)
        assert tensors[word.name].nbytes == wanted


def test_what_replaces_a_function_has_no_codec() -> None:
    class Doubled(StateStorage):
        def decode(self, tensors: dict[str, torch.Tensor], context: StateContext) -> torch.Tensor:
            return super().decode(tensors, context) * 2

    assert Doubled("fp32", torch.float32).codec(signed=True) is None
    assert state_storage("fp32").codec(signed=True) is not None
