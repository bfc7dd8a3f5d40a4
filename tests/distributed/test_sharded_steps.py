"""Optimizers of parameters that ranks share: what one process does, on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_steps import (
    BAD,
    BY_TRITON,
    COLLECTIVES,
    RULES,
    STORAGES,
    by_triton_and_eager,
    cases,
    few,
    in_two_dimensions,
    on_gpus,
    stepping,
)
from test_checkpoint_ranks import on_ranks


@pytest.fixture(
    scope="module",
    params=[
        (2, None),
        (4, None),
        *(pytest.param((n, list(cases())), marks=pytest.mark.slow) for n in (2, 4)),
    ],
    ids=["2", "4", "2 all", "4 all"],
)
def stepped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    world, only = request.param
    return on_ranks(world, tmp_path_factory.mktemp("stepped"), stepping, only)


def check(told: dict[Any, Any]) -> None:
    for (how, rule, storage), one in told.items():
        # Its shards begin within eight elements: random numbers are their own.
        loose = {"bias"} if storage.startswith(("stochastic", "split4")) else set()
        off = {name: value for name, value in one["off"].items() if value and name not in loose}
        kept = [word for word in one["kept"] if word[0] not in loose]
        assert (off, kept) == ({}, []), (how, rule, storage)


def test_steps_are_those_of_one_process(stepped: list[dict[Any, Any]]) -> None:
    """Bit for bit, with sums too: float32 does not see in which order float64 was added up."""
    for told in stepped:
        assert len(told) > 9
        check(told)


@pytest.mark.gpu
def test_on_gpus(tmp_path: Path) -> None:
    """By Triton's kernels and NCCL, on two or four GPUs."""
    world = 4 if torch.cuda.device_count() >= 4 else 2
    if torch.cuda.device_count() < world:
        pytest.skip(reason=f"gpu: needs {world} of them, torch sees {torch.cuda.device_count()}")
    for told in on_ranks(world, tmp_path, on_gpus):
        check(told)
        for (_, rule, storage), one in told.items():
            assert one["skipped"] == (({}, {}) if rule == "propagate" else ({BAD: 1}, {BAD: 1}))
            assert one["collectives"] == [COLLECTIVES.get(rule, 1)] * 4
            if rule not in ("strict", "Adan"):  # whose four moments in fp8 are more tensors than a kernel takes
                assert all(path.startswith("fused Triton") for path in one["paths"]), (rule, storage)


@pytest.mark.parametrize("triton", [1, pytest.param(len(BY_TRITON), marks=pytest.mark.slow)])
def test_on_other_paths(triton: int, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed: kernels cannot run, not even interpreted")
    interpreted = 0 if torch.cuda.is_available() else triton  # where there are GPUs `test_on_gpus` runs them
    for told in on_ranks(2, tmp_path, by_triton_and_eager, interpreted):
        check(told)
        for (how, rule, _), one in told.items():
            assert one["skipped"] == ({BAD: 1}, {BAD: 1})
            assert set(one["collectives"]) == {COLLECTIVES.get(rule, 1)}
            if how == "fused Triton":
                assert all(path.startswith("fused Triton") for path in one["paths"])


def test_a_gradient_that_is_bad_on_one_rank_is_skipped_on_all(stepped: list[dict[Any, Any]]) -> None:
    for told in stepped:
        for (_, rule, _), one in told.items():
            assert one["skipped"] == (({}, {}) if rule == "propagate" else ({BAD: 1}, {BAD: 1}))


def test_ranks_agree_in_one_collective(stepped: list[dict[Any, Any]]) -> None:
    for told in stepped:
        for (_, rule, _), one in told.items():
            assert one["collectives"] == [COLLECTIVES.get(rule, 1)] * 4, rule


def test_states_are_shared_as_parameters_are(stepped: list[dict[Any, Any]]) -> None:
    for case in stepped[0]:
        parts = [told[case]["bytes"][0] for told in stepped]
        whole = stepped[0][case]["bytes"][1]
        copies = 2 if case[0] == "hybrid" else 1
        counters = 4 * 12 + 4 * 400  # a rank's, and norms
        assert whole - counters <= sum(parts) / copies <= whole + len(stepped) * counters
        assert max(parts) < 0.8 * whole


def test_rows_columns_and_both(tmp_path: Path) -> None:
    """FSDP over tensor parallelism. Blocks begin with the box: each is stepped as a plain parameter of its size."""
    for told in on_ranks(4, tmp_path, in_two_dimensions):
        for (rule, storage), one in told.items():
            assert {ndim for ndim, _ in one["placements"].values()} == {1, 2}
            assert one["collectives"] == 1
            assert one["skipped"] == {"norm.bias": 1, "up.weight": 1}
            assert not any(one["off"].values()), (rule, storage, one["off"])


def test_cases_cover_rules_and_storages() -> None:
    for listed in (few(), list(cases())):
        assert {rule for rule, _ in listed} == set(RULES)
        assert {storage for _, storage in listed} == set(STORAGES)
