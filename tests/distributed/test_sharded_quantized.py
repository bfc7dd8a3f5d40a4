"""Quantized gradients of parameters that ranks share: what one process does, on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_quantized import INNER, ends, model, quantizing, train
from test_checkpoint_ranks import on_ranks

from narrowgauge.distributed import load_checkpoint


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[Any, Any]]]:
    folder = tmp_path_factory.mktemp("quantized")
    return folder, on_ranks(2, folder, quantizing)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("inner", INNER)
def test_steps_are_those_of_one_process(ranks: Any, inner: str, rounding: str) -> None:
    """Bit for bit: what arrives, what is remembered, and the weights, with NaN on one rank."""
    for told in ranks[1]:
        one = told[inner, rounding]
        assert one["differ"] == []
        assert one["collectives"] == [INNER[inner][2]] * len(one["collectives"])
        alone, together = one["skipped"]
        assert alone == together
        if inner not in ("propagate", "torch SGD"):
            assert alone["long"] == 1
        if inner == "fp16":
            assert alone["flat"] == 1, "what a residual makes overflow on one rank is skipped on all"


def test_blocks_begin_with_the_shard(ranks: Any) -> None:
    assert all(told["odd"] for told in ranks[1])


def test_columns_and_copies(ranks: Any) -> None:
    for told in ranks[1]:
        assert all(told["columns and copies"].values()), told["columns and copies"]


def test_saved_by_two_ranks_and_resumed_on_any_number(ranks: Any) -> None:
    folder, all_told = ranks
    for told in all_told:
        assert told["saved"]["same"]
    net, optimizer = model(shared=False, seed=1)
    with pytest.warns(UserWarning, match=r"encoded moments anew, whose blocks were those of other shards \(odd\)"):
        load_checkpoint(folder / "run" / "step-000000002", model=net, optimizer=optimizer)
    for name, whole in all_told[0]["saved"]["residuals"].items():
        assert torch.equal(optimizer._residuals[net[name]], whole)
        assert whole.any()
    train(net, optimizer, range(2, 4))
    for name, end in ends(net).items():
        assert name == "odd" or torch.equal(end, all_told[0]["saved"]["end"][name])


def test_by_torch_and_by_hand(ranks: Any) -> None:
    for told in ranks[1]:
        assert told["by torch"]
        assert told["refused"].startswith(
            "state_dict: the residual of parameter 0 is a DTensor, the parameter is none"
        )
