"""State storages: decode(encode(x)) within the storage's precision, and averages in the words' own format."""

import pytest
import torch

from narrowgauge.storage import state_storage, state_storages

NAMES = state_storages()
# Relative to the block's largest element for 8bit (its widest gap is between 0.93 and 1), to the element otherwise.
ERROR = {"fp32": 0.0, "bf16": 2.0**-8, "expansion": 2.0**-16}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(3, 500), (7,), (), (0, 4)])
def test_decoding_what_was_encoded(name: str, signed: bool, shape: tuple[int, ...]) -> None:
    storage = state_storage(name)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-4
    x = x if signed else x.square()
    words = storage.encode(x, signed, 64)
    again = storage.decode(words, signed, 64)
    assert again.shape == x.shape
    assert again.dtype == torch.float32
    assert sum(word.nbytes for word in words.values()) == storage.nbytes(x.numel(), 64)
    if name == "8bit":
        blocks = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % 64)).view(-1, 64)
        scale = blocks.abs().amax(dim=1, keepdim=True).expand_as(blocks).reshape(-1)[: x.numel()].view(x.shape)
        assert ((again - x).abs() <= 0.008 * scale).all()
    else:
        assert ((again.double() - x.double()).abs() <= ERROR[name] * x.double().abs()).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("signed", [True, False])
def test_a_new_moment_is_zero_and_matches_the_words_of_later_ones(name: str, signed: bool) -> None:
    storage = state_storage(name)
    p = torch.randn(30, 40).to(torch.bfloat16)
    words = storage.init(p, signed, 64)
    assert torch.equal(storage.decode(words, signed, 64), torch.zeros(30, 40))
    later = storage.encode(torch.rand(30, 40), signed, 64)
    assert {k: (v.shape, v.dtype) for k, v in words.items()} == {k: (v.shape, v.dtype) for k, v in later.items()}


def test_an_average_in_one_bf16_word_cannot_shrink_where_an_expansion_does() -> None:
    """beta2 = 0.999: the paper's reason for the second word (Collage, Section 4.2)."""
    one, two = state_storage("bf16"), state_storage("expansion")
    start, zero = torch.full((10,), 0.01), torch.zeros(10, dtype=torch.bfloat16)
    stuck, moving = one.encode(start, False, 1), two.encode(start, False, 1)
    for _ in range(1000):
        stuck, moving = one.ema(stuck, zero, 0.999), two.ema(moving, zero, 0.999)
    assert torch.equal(one.decode(stuck, False, 1), start.bfloat16().float())
    wanted = 0.01 * 0.999**1000
    assert ((two.decode(moving, False, 1) / wanted - 1).abs() < 0.02).all()


def test_codes_have_no_arithmetic_of_their_own_and_unknown_names_are_refused() -> None:
    storage = state_storage("8bit")
    with pytest.raises(NotImplementedError, match="8bit states have no arithmetic"):
        storage.ema({}, torch.zeros(1), 0.9)
    with pytest.raises(ValueError, match="states: got '8bits', takes one of 'fp32'"):
        state_storage("8bits")
