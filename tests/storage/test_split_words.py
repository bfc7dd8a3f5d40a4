"""Split words: with 16 bits the fp32 pattern comes back bit for bit, with 8 its 24-bit rounding."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from narrowgauge.storage._weights import cut, join


def patterns(stride: int = 16_411) -> torch.Tensor:
    """Float32 patterns over the whole range, infinities, NaN and the edges of rounding among them."""
    strided = torch.arange(-(2**31), 2**31, stride, dtype=torch.int64)
    edges = [0, 1, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0x7FC00000, 0x3F808000, 0x3F807FFF, 0x00008000]
    bits = torch.cat([strided, torch.tensor(edges), torch.tensor(edges) - 2**31]).to(torch.int32)
    return bits.view(torch.float32)


def test_sixteen_bits_restore_every_finite_float32_exactly() -> None:
    x = patterns()
    hi, lo = cut(x, torch.int16)
    finite = torch.isfinite(x)
    assert torch.equal(join(hi, lo).view(torch.int32)[finite], x.view(torch.int32)[finite])
    assert torch.equal(join(hi, lo)[~finite].nan_to_num(1.5), x[~finite].nan_to_num(1.5))


def test_the_high_word_is_the_nearest_bf16_halves_away_from_zero() -> None:
    x = patterns()
    x = x[torch.isfinite(x)]
    hi, _ = cut(x, torch.int16)
    nearest = x.to(torch.bfloat16)
    wide = x.to(torch.float64)
    error, least = (wide - hi.to(torch.float64)).abs(), (wide - nearest.to(torch.float64)).abs()
    inside = torch.isfinite(hi)
    assert (hi == nearest)[~inside].all()
    assert (error == least)[inside].all()
    tie = inside & (hi != nearest)
    assert (hi.to(torch.float64).abs() > nearest.to(torch.float64).abs())[tie].all()
    assert float(cut(torch.tensor([1.00390625]), torch.int16)[0]) == 1.0078125


def test_eight_bits_keep_sixteen_significant_bits() -> None:
    x = patterns()
    x = x[torch.isfinite(x) & (x.abs() < 3.3e38) & (x.abs() > 2.0**-126)]
    again = join(*cut(x, torch.int8))
    assert ((again.double() - x.double()).abs() <= x.double().abs() * 2.0**-16).all()
    # Numbers of 16 significant bits are kept as they are.
    kept = (x.view(torch.int32) & ~0xFF).view(torch.float32)
    assert torch.equal(join(*cut(kept, torch.int8)), kept)


def test_stale_low_words_move_a_weight_by_half_a_unit_at_most() -> None:
    """Every bf16 pattern with the extreme low words: what a clamp or a loaded checkpoint leaves behind."""
    hi = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    inside = torch.isfinite(hi) & (hi.abs() < 3.3e38)
    half = 2.0 ** (torch.frexp(hi.float()[inside]).exponent.clamp_min(-125) - 9).double()
    for lo, dtype in ((-(2**15), torch.int16), (2**15 - 1, torch.int16), (-128, torch.int8), (127, torch.int8)):
        joined = join(hi, torch.tensor(lo, dtype=dtype).expand(hi.shape))
        assert torch.isfinite(joined[inside]).all()
        assert ((joined.double() - hi.double())[inside].abs() <= half).all()
        assert torch.isnan(joined[torch.isnan(hi)]).all()
        assert not torch.isnan(joined[torch.isinf(hi)]).any()


def test_of_sharded_tensors_they_are_the_same(tmp_path: Path) -> None:
    """On a DTensor some of torch's operators do nothing, and say nothing."""
    weight = patterns()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for low_dtype in (torch.int16, torch.int8):
            words = cut(weight, low_dtype)
            sharded = cut(DTensor.from_local(weight, mesh, [Shard(0)]), low_dtype)
            for word, other in zip(words, sharded, strict=True):
                assert torch.equal(word.view(torch.uint8), other.to_local().view(torch.uint8))
            joined = join(*sharded).to_local()
            assert torch.equal(joined.view(torch.int32), join(*words).view(torch.int32))
    finally:
        dist.destroy_process_group()
