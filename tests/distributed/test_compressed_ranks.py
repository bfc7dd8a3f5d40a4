"""Compressed gradients on two and four processes, beside float64 and beside `storage.quantize` in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compressed_ranks import COMPRESSED, SHAPES, STEPS, VARIANTS, gradients, on_a_rank, on_gpus
from torch import Tensor

from forked import run_ranks
from narrowgauge import formats, storage

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")

Runs = Callable[[int], list[dict[str, Any]]]
worlds = pytest.mark.parametrize("world", [2, 4])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What each rank did, by scenario, for a number of ranks."""
    done: dict[int, list[dict[str, Any]]] = {}

    def of(world: int) -> list[dict[str, Any]]:
        if world not in done:
            folder = tmp_path_factory.mktemp(f"ranks{world}")
            run_ranks(on_a_rank, world, world, str(folder))
            done[world] = [torch.load(folder / str(rank), map_location="cpu") for rank in range(world)]
        return done[world]

    return of


def values_of(options: dict[str, Any]) -> Tensor:
    codebook = options.get("codebook", "dynamic")
    return codebook if isinstance(codebook, Tensor) else formats.codebook(codebook, bits=options.get("bits", 8))


def quantized(x: Tensor, options: dict[str, Any]) -> Tensor:
    return storage.quantize(x, values_of(options), options.get("block_size", 256)).dequantize()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other)


@worlds
@pytest.mark.parametrize("name", VARIANTS)
def test_all_ranks_have_the_same_bits(runs: Runs, world: int, name: str) -> None:
    first, *others = (one["variants"][name]["out"] for one in runs(world))
    assert len(first) == STEPS
    assert all(same(first, other) for other in others)


@worlds
@pytest.mark.parametrize("name", [name for name, (options, _) in VARIANTS.items() if "rounding" not in options])
def test_it_is_the_equation_bit_for_bit(runs: Runs, world: int, name: str) -> None:
    """mean = cast(Q(sum of Q(g + e)) / ranks), blocks along each parameter, sums in the order of ranks."""
    options, dtype = VARIANTS[name]
    done = [one["variants"][name] for one in runs(world)]
    kept = options.get("memory_dtype", torch.float32)
    block = options.get("block_size", 256)
    for parameter in COMPRESSED:
        numel = gradients(0, 0)[parameter].numel()
        shard = -(-numel // (world * block)) * block
        errors = [torch.zeros(numel) for _ in range(world)]
        for step in range(STEPS):
            wanted = [
                gradients(step, rank, dtype)[parameter].float().view(-1) + errors[rank] for rank in range(world)
            ]
            sent = [quantized(x, options) for x in wanted]
            total = sent[0].clone()
            for other in sent[1:]:
                total += other
            mean = (quantized(total, options) / world).to(dtype)
            assert torch.equal(mean.view(SHAPES[parameter]), done[0]["out"][step][parameter])
            if options.get("error_feedback", True):
                errors = [x - y for x, y in zip(wanted, sent, strict=True)]
                for rank in range(world):
                    own = slice(rank * shard, (rank + 1) * shard)
                    errors[rank][own] += (total - mean.float() * world)[own]
                errors = [error.to(kept).float() for error in errors]
        for rank in range(world):
            found = done[rank]["errors"].get(parameter)
            if options.get("error_feedback", True):
                assert torch.equal(found, errors[rank].to(kept))
            else:
                assert found is None


@worlds
def test_what_is_exempt_is_torchs_own_result(runs: Runs, world: int) -> None:
    for one in runs(world):
        done = one["variants"]
        for name, plain in (("default", "none"), ("default bf16", "none bf16")):
            for step, (mine, torchs) in enumerate(zip(done[name]["out"], done[plain]["out"], strict=True)):
                for parameter in SHAPES.keys() - set(COMPRESSED):
                    # A sum of as many terms as there are ranks, whose order the ring decides.
                    given = [gradients(step, rank)[parameter].double().abs() for rank in range(world)]
                    bound = sum(given) * torch.finfo(torchs[parameter].dtype).eps
                    assert ((mine[parameter] - torchs[parameter]).double().abs() <= bound).all()
                for parameter in COMPRESSED:
                    assert not torch.equal(mine[parameter], torchs[parameter])


@worlds
def test_bytes_on_the_wire(runs: Runs, world: int) -> None:
    """As handed to the collectives, and beside an all-reduce in bfloat16."""
    rows = sum(-(-torch.Size(SHAPES[n]).numel() // (256 * world)) for n in COMPRESSED)  # blocks of a shard
    exempt = sum(torch.Size(SHAPES[n]).numel() for n in SHAPES if n not in COMPRESSED) * 2
    compressed = sum(torch.Size(SHAPES[n]).numel() for n in COMPRESSED)
    for one in runs(world):
        for name, bits in (("8", 8), ("4", 4)):
            done = one["counted"][name]
            message = rows * (256 * bits // 8 + 4)
            gather = next(done[key] for key in done if key.startswith("all_gather"))
            assert done["all_to_all_single"] == message * world
            assert gather == message
            assert done["all_reduce"] == exempt
            # A rank sends all but its own row, then its sum to all others.
            assert done["sent"] == 2 * (world - 1) * message + 2 * (world - 1) * exempt // world
            bf16 = 2 * (world - 1) / world * 2 * compressed
            ratio = 2 * (world - 1) * message / bf16
            whole = bits / 16 * (1 + 4 * 8 / (256 * bits))  # without padding
            assert whole < ratio < 1.13 * whole


@worlds
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_buckets_make_no_difference(runs: Runs, world: int, rounding: str) -> None:
    for one in runs(world):
        done = {name: run for (kind, name), run in one["buckets"].items() if kind == rounding}
        counts = {name: len(run["seen"]) for name, run in done.items()}
        assert counts["one"] == STEPS
        # Built anew after the first step, which had one; many from the first step on.
        assert len(set(done["rebuilt"]["seen"])) > 2
        assert counts["many"] > counts["rebuilt"] > STEPS
        for name in ("rebuilt", "many", "views"):
            for parameter in COMPRESSED:
                for mine, its in zip(done[name]["out"], done["one"]["out"], strict=True):
                    assert torch.equal(mine[parameter], its[parameter]), (name, parameter)
            assert same(done[name]["errors"], done["one"]["errors"])


def test_accumulated_gradients_are_reduced_once(runs: Runs) -> None:
    for one in runs(2):
        done = one["accumulated"]
        for name in ("plain", "views"):
            assert same(done[name]["out"], done["at once"]["out"])
            assert same(done[name]["errors"], done["at once"]["errors"])
            assert done[name]["step"] == 3


def test_what_is_not_finite_is_seen_by_all_and_remembered_by_none(runs: Runs) -> None:
    for one in runs(2):
        done = one["nonfinite"]
        before, hit, after = done["out"]
        matrix, ragged = hit["matrix"].view(-1), hit["ragged"].view(-1)
        # The block that held it, and no other.
        assert torch.isnan(matrix[256:512]).all()
        assert torch.isfinite(matrix[:256]).all()
        assert torch.isfinite(matrix[512:]).all()
        assert torch.isnan(ragged[4096:]).all()
        assert torch.isfinite(ragged[:4096]).all()
        assert torch.isneginf(hit["bias"][7])
        for step in (before, after):
            assert all(torch.isfinite(x).all() for x in step.values())
        for name in COMPRESSED:
            kept = torch.equal(done["errors"][1][name], done["errors"][0][name])
            assert kept == (name in ("matrix", "ragged"))
            assert torch.isfinite(done["errors"][2][name]).all()
            # An optimizer that skips such tensors skips these.
            moved = not torch.equal(done["weights"][1][name], done["weights"][0][name])
            assert moved == (name not in ("matrix", "ragged"))
        assert torch.equal(done["weights"][1]["bias"], done["weights"][0]["bias"])


@worlds
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_resumed_run_has_the_same_bits(runs: Runs, world: int, rounding: str) -> None:
    for rank, one in enumerate(runs(world)):
        done = one["resumed"]
        for mine, its in zip(done["resumed", rounding]["out"], done["whole", rounding]["out"], strict=True):
            assert all(torch.equal(mine[name], its[name]) for name in COMPRESSED)
        assert same(done["resumed", rounding]["errors"], done["whole", rounding]["errors"])
        state = done["state", rounding]
        assert state["saved"]["step"] == 2
        assert state["saved"]["ranks"] == world
        assert state["step"] == 4
        assert {name.split("/")[0] for name in state["saved"]["memory"]} == {str(rank)}
        assert same(state["saved"]["memory"], state["loaded"]["memory"])


def test_descent_stalls_on_nearest_codes_and_not_with_feedback(runs: Runs) -> None:
    done = {name: run["losses"] for name, run in runs(2)[0]["regression"].items()}
    # As shares of the loss before the first step.
    assert done["exact"][-1] < 1e-6
    # Where every block holds a pull of 8, a gradient below 8 / 14 becomes zero: nothing is learned at all.
    assert done["nearest"][-1] > 0.9
    assert done["feedback"][-1] < 2e-3
    assert done["stochastic"][-1] < 5e-3
    weights = [one["regression"]["feedback"]["weight"] for one in runs(2)]
    assert torch.equal(*weights)


@worlds
def test_a_rank_without_a_batch_takes_part(runs: Runs, world: int) -> None:
    done = [one["uneven"] for one in runs(world)]
    assert [len(one["out"]) for one in done] == [3] + [2] * (world - 1)
    for parameter in COMPRESSED:
        true = sum(gradients(s, r)[parameter].double() for s in range(2) for r in range(world))
        true = (true + gradients(2, 0)[parameter].double()).view(-1)
        applied = sum(out[parameter].double() for out in done[0]["out"]).view(-1) * world
        remembered = sum(one["errors"][parameter].double() for one in done)
        assert torch.allclose(applied + remembered, true, rtol=0, atol=1e-4)


def test_groups_of_ranks_reduce_among_themselves(runs: Runs) -> None:
    four, two = runs(4), runs(2)
    for rank, one in enumerate(four):
        # Each pair had what two ranks alone have.
        assert same(one["groups"]["out"], two[rank % 2]["variants"]["default"]["out"])
        assert same(one["groups"]["errors"], two[rank % 2]["variants"]["default"]["errors"])
        assert one["groups"]["error"].startswith("process_group must be one that this rank is in")


def test_what_a_backward_pass_refuses(runs: Runs) -> None:
    for one in runs(2):
        assert one["refused"]["second model"].startswith("bucket: got a new parameter; each ")
        assert one["refused"]["state"].startswith("state must be None, got 7")
        assert "float32.0 must have 12297 errors, got 5" in one["refused"]["foreign"]


@worlds
def test_it_is_said_what_takes_each_parameter(runs: Runs, world: int) -> None:
    wanted = "fused Triton" if on_gpus(world) else "fused C"
    for one in runs(world):
        head, _, *rows = one["variants"]["4 bits fp16"]["described"].splitlines()
        assert head.split() == ["parameter", "shape", "dtype", "sent", "memory", "path", "why"]
        assert len(rows) == len(SHAPES)
        taken = [row for row in rows if wanted in row]
        assert len(taken) == len(COMPRESSED)
        assert all("16 values, 4 bits, blocks of 128, nearest" in row for row in taken)
        assert sum("all-reduce" in row and row.endswith("exempt") for row in rows) == len(SHAPES) - len(COMPRESSED)
