"""Low words that save: every weight storage becomes every other, and means the same weight beside the parameter."""

import itertools
import warnings

import pytest
import torch
from checkpoint_runs import drive, model

from float8_parameters import PLAIN_STORAGES
from narrowgauge.formats import BF16, FP16, FloatFormat
from narrowgauge.optim import AdamW, NarrowOptimizer
from narrowgauge.optim._checkpoint_convert import low_word
from narrowgauge.storage import weight_storage

pytestmark = pytest.mark.usefixtures("eager")


def weights(optimizer: NarrowOptimizer) -> dict[str, torch.Tensor]:
    return {plan.name: plan.exact(p.detach(), optimizer.state[p])[0] for p, plan in optimizer.plans()}


WEIGHTS = [
    (old, new, dtype)
    for old, new in itertools.product(PLAIN_STORAGES, repeat=2)
    for dtype in (torch.bfloat16, torch.float16)
    if dtype in weight_storage(old).dtypes and dtype in weight_storage(new).dtypes
]


def error(storage: str, value: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """How far from a weight the nearest may be that a storage keeps beside the same parameter."""
    ulp = fmt.ulp(value)
    if storage in ("kahan", "expansion"):
        return ulp * 2.0 ** -(fmt.mantissa_bits + 3) + fmt.min_subnormal / 2
    digits = {"split4": 4, "split8": 8, "split": 16, "master": 23 - fmt.mantissa_bits}
    return ulp * 2.0 ** -digits.get(storage, 1)


@pytest.mark.parametrize(("old", "new", "dtype"), WEIGHTS, ids=str)
def test_every_weight_storage_becomes_every_other(old: str, new: str, dtype: torch.dtype) -> None:
    saved = AdamW(model(dtype), weights=old)
    drive(saved, range(3))
    loaded = AdamW(model(dtype), weights=new)
    with torch.no_grad():
        for p, q in zip(loaded.param_groups[0]["params"], saved.param_groups[0]["params"], strict=True):
            p.copy_(q)
    before = [p.detach().clone() for p in loaded.param_groups[0]["params"]]
    drops = weight_storage(old).key is not None and weight_storage(new).key is None
    rounds = weight_storage(old).key is not None and new == "split4" != old
    loses = drops or rounds
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded.load_state_dict(saved.state_dict())
    assert [w.category for w in caught] == [UserWarning] * loses
    if loses:
        words = rf"dropped 'weight\.\w+' of '{old}', which '{new}' has no place for \(weight, odd, bias\)"
        if rounds:
            words = rf"rounded 'weight\.\w+' of '{old}' to the 4 bits of 'split4' \(weight, odd, bias\)"
        with pytest.warns(UserWarning, match=words):
            loaded.load_state_dict(saved.state_dict())
    assert all(torch.equal(p, q) for p, q in zip(before, loaded.param_groups[0]["params"], strict=True))
    for (name, a), b in zip(weights(saved).items(), weights(loaded).values(), strict=True):
        assert ((a - b).abs() <= (0 if old == new else error(new, a, FloatFormat.of(dtype)))).all(), name


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
def test_a_low_word_is_found_for_every_parameter_and_offset(fmt: FloatFormat) -> None:
    """All finite numbers, and weights at, beside and between the halfway points to both neighbors."""
    dtype = torch.bfloat16 if fmt is BF16 else torch.float16
    p = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    p = p[torch.isfinite(p)]
    for storage in (weight_storage(name) for name in PLAIN_STORAGES):
        if storage.key is None or dtype not in storage.dtypes:
            continue
        for share in (-0.5, -0.3, -(2.0**-12), 0.0, 0.1, 0.499, 0.5):
            # Towards zero a power of two is at half the distance from its neighbor.
            below = torch.nextafter(p.abs(), torch.zeros_like(p)).double()
            gap = p.double().abs() - below if share < 0 else fmt.ulp(p.double())
            value = (p.double() + share * gap * p.double().sign()).float()
            found = storage.exact(p, low_word(storage, p, value))
            wrong = (found - value.double()).abs() > error(storage.name, p.double(), fmt)
            assert not wrong[torch.isfinite(value)].any(), (storage.name, share)


def test_a_low_word_left_over_from_another_weight_does_no_harm() -> None:
    saved = AdamW(model(), weights="split")
    drive(saved, range(2))
    for p in saved.param_groups[0]["params"]:
        p.data.mul_(-4)
    for new in ("kahan", "master", "split8"):
        names = [name for name, _ in model()]
        ps = [p.detach().clone().requires_grad_() for p in saved.state]
        loaded = AdamW(zip(names, ps, strict=True), weights=new)
        loaded.load_state_dict(saved.state_dict())
        for (p, _), value in zip(loaded.plans(), weights(loaded).values(), strict=True):
            assert ((value - p.double()).abs() <= BF16.ulp(p.double()) / 2).all()


def test_low_words_mean_nothing_beside_another_dtype() -> None:
    saved = AdamW(model(), weights="expansion")
    drive(saved, range(2))
    for dtype, options in ((torch.float32, {}), (torch.float16, {"weights": "kahan"})):
        loaded = AdamW(model(dtype), **options)
        words = rf"'weight\.lo' in bfloat16, which means nothing beside {str(dtype).removeprefix('torch.')}"
        with pytest.warns(UserWarning, match=words):
            loaded.load_state_dict(saved.state_dict())
        for p, q in zip(loaded.state.values(), saved.state.values(), strict=True):
            assert torch.equal(p["m"], q["m"])
