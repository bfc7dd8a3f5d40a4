"""Weight storages: nothing is lost that the words can hold, and the parameter always wins."""

import pytest
import torch

from narrowgauge.formats import FloatFormat, random_bits
from narrowgauge.storage import WeightStorage, weight_storage, weight_storages

NAMES = tuple(name for name in weight_storages() if not weight_storage(name).float8)
WITH_LOW = [name for name in NAMES if weight_storage(name).key is not None]
PAIRS = [(name, dtype) for name in NAMES for dtype in weight_storage(name).dtypes]

# How much of the weight one write may lose, as a share of it: half a unit in the last bit that is kept.
KEPT = {"plain": 2.0**-8, "kahan": 2.0**-16, "expansion": 2.0**-16, "split8": 2.0**-16}
KEPT |= {"stochastic": 2.0**-7, "split4": 2.0**-11}  # a whole unit, either way


def noise(p: torch.Tensor, storage: WeightStorage):
    words = random_bits(p.numel(), seed=0, stream=0, step=1).view(p.shape)
    return lambda: words >> (32 - storage.random_bits)


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_an_update_arrives_up_to_the_precision_of_the_words(name: str, dtype: torch.dtype) -> None:
    storage = weight_storage(name)
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(50, 80, generator=generator).to(dtype)
    low = storage.init(p)
    assert torch.equal(storage.exact(p, low), p.double())
    for scale in (1e-1, 1e-3, 1e-5):
        before, weight = storage.exact(p, low), storage.read(p, low)
        delta = scale * torch.randn(p.shape, generator=generator)
        p, low = storage.add(p, low, weight, delta, noise(p, storage))
        share = KEPT.get(name, 2.0**-24) if dtype != torch.float32 else 2.0**-24
        wanted = before + delta.double()
        allowed = share * wanted.abs() + 2.0**-24 * (before.abs() + delta.abs().double()) + 2.0**-24
        assert ((storage.exact(p, low) - wanted).abs() <= allowed).all()
        assert p.dtype == dtype
        assert (low is None and storage.low_dtype(dtype) is None) or low.dtype == storage.low_dtype(dtype)


@pytest.mark.parametrize(("name", "dtype"), [pair for pair in PAIRS if pair[0] in WITH_LOW])
def test_a_parameter_changed_from_outside_wins(name: str, dtype: torch.dtype) -> None:
    storage = weight_storage(name)
    generator = torch.Generator().manual_seed(1)
    p = torch.randn(4000, generator=generator).to(dtype)
    low = storage.init(p)
    for _ in range(5):
        p, low = storage.add(
            p, low, storage.read(p, low), 1e-3 * torch.randn(4000, generator=generator), noise(p, storage)
        )
    changed = (torch.randn(4000, generator=generator) * 1e-3).to(dtype)
    changed[:100] = 0
    half = FloatFormat.of(dtype).ulp(changed.double()) / 2
    assert ((storage.exact(changed, low) - changed.double()).abs() <= half).all()
    assert ((storage.read(changed, low).double() - changed.double()).abs() <= half).all()
    if name == "master":
        assert torch.equal(storage.read(changed, low), changed.float())


@pytest.mark.parametrize("name", ["split", "master"])
def test_split_and_master_are_the_fp32_weight(name: str) -> None:
    storage = weight_storage(name)
    generator = torch.Generator().manual_seed(2)
    p = torch.randn(1000, generator=generator).to(torch.bfloat16)
    low, plain = storage.init(p), p.float()
    for _ in range(200):
        delta = 1e-4 * torch.randn(1000, generator=generator)
        p, low = storage.add(p, low, storage.read(p, low), delta, noise(p, storage))
        plain = plain + delta
    assert torch.equal(storage.read(p, low), plain)


@pytest.mark.parametrize(("name", "dtype"), [pair for pair in PAIRS if pair[0] in ("kahan", "expansion")])
def test_strict_words_never_overlap_and_hold_what_one_word_loses(name: str, dtype: torch.dtype) -> None:
    storage = weight_storage(name)
    p = torch.ones(1000, dtype=dtype)
    low = storage.init(p)
    step = torch.full((1000,), 2.0**-14, dtype=dtype)
    for count in range(1, 500):
        p, low = storage.add_rounded(p, low, step, noise(p, storage))
        assert low is not None
        assert (low.double().abs() <= FloatFormat.of(dtype).ulp(p.double()) / 2).all()
        assert torch.equal(storage.exact(p, low), torch.full((1000,), 1 + count * 2.0**-14, dtype=torch.float64))


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_infinite_and_nan_weights_stay_what_they_are(name: str, dtype: torch.dtype) -> None:
    storage = weight_storage(name)
    p = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0], dtype=dtype)
    low = storage.init(p)
    for _ in range(2):
        p, low = storage.add(p, low, storage.read(p, low), torch.full((4,), 0.25), noise(p, storage))
    assert p[:2].tolist() == [torch.inf, -torch.inf]
    assert torch.isnan(p[2])
    assert float(p[3]) == 1.5


def test_unknown_names_are_refused_with_a_list() -> None:
    with pytest.raises(ValueError, match=r"weights must be 'plain', 'kahan', .*got 'kahn'"):
        weight_storage("kahn")


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_has_the_low_word(name: str) -> None:
    storage = weight_storage(name)
    for dtype in storage.dtypes:
        codec, low = storage.codec(dtype), storage.low_dtype(dtype)
        assert codec is not None
        assert codec.name == name
        assert [word.bits for word in codec.words] == ([8 * storage.bytes_added(dtype)] if low is not None else [])
