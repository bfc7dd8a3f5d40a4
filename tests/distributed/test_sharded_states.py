"""States of shared parameters: resumed on any number of ranks, and what torch's tools make of them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_states import (
    ALL,
    BLOCKS,
    BY_TORCH,
    FEW,
    block_of_two,
    by_hand,
    by_torch,
    from_torch,
    in_backward,
    model,
    muon,
    of_the_page,
    offloaded,
    on_one,
    others_by_torch,
    refusing,
    resumed,
    saving,
    saving_on_meshes,
    steps_of_block,
    train,
    without_rows,
)
from test_checkpoint_ranks import on_ranks, several

from narrowgauge.distributed import load_checkpoint
from narrowgauge.formats import codebook

Saved = tuple[Path, list[tuple[str, str, int]], dict[Any, Any], dict[int, dict[Any, Any]]]


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.slow)])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """By four ranks, one of which has nothing of one parameter; resumed by two ranks and by one."""
    folder, cases = tmp_path_factory.mktemp("saved"), ALL if request.param == "all" else FEW
    told = on_ranks(4, folder, saving, cases)[0]
    torch.save(told, folder / "moments.pt")
    two = on_ranks(2, folder, resumed, cases)[0]
    return folder, cases, told, {2: two, 1: resumed(0, folder, cases, shared=False)}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What each of four ranks did, and where. They are spawned: no rank gathers in the order of a set."""
    folder = tmp_path_factory.mktemp("four")
    return folder, on_ranks(4, folder, several, (by_torch, by_hand, saving_on_meshes, muon), start="spawn")


@pytest.fixture(scope="module")
def two(four: tuple[Path, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each of two ranks did."""
    return on_ranks(2, four[0], several, (from_torch, refusing, in_backward, offloaded, of_the_page))


def in_blocks(storage: str) -> bool:
    return storage.split(", ")[1] in ("8bit", "log8", "log4", "4bit", "fp8")


def test_where_blocks_align_another_number_of_ranks_goes_on_bit_for_bit(saved: Saved) -> None:
    """As does one process that never stopped. Random numbers of the bias are those of its shards."""
    _, cases, told, others = saved
    aligned = [case for case in cases if case[2] == BLOCKS[0]]
    assert aligned
    for rule, storage, block in aligned:
        net, optimizer = model(rule, storage, block, shared=False)
        train(net, optimizer, range(6))
        for one in (told, *others.values()):
            end = one[rule, storage, block]["end"]
            for name, p in net.items():
                if name != "bias" or not storage.startswith("stochastic"):
                    assert torch.equal(p.detach(), end[name]), (rule, storage, name)
        for one in others.values():
            assert one[rule, storage, block]["said"] == []
            assert not any(off for off, _ in one[rule, storage, block]["off"].values())


def test_where_they_do_not_moments_are_encoded_anew_and_that_is_said(saved: Saved) -> None:
    """By one rounding of the storage: for the paper's 8 bits half the widest step of its map, of the largest."""
    _, cases, told, others = saved
    unaligned = [case for case in cases if case[2] != BLOCKS[0]]
    assert unaligned
    for case, world in ((case, world) for case in unaligned for world in others):
        one, storage = others[world][case], case[1]
        assert bool(one["said"]) == in_blocks(storage), (case, world)
        if not in_blocks(storage):
            assert not any(off for off, _ in one["off"].values())
            continue
        assert "encoded moments anew, whose blocks were those of other shards (long" in one["said"][0]
        if storage.endswith("8bit"):
            for (_, slot), (off, largest) in one["off"].items():
                steps = codebook("dynamic", signed=slot == "m").diff()
                assert off <= float(steps.max()) / 2 * largest * (1 + 1e-6)
        wanted = told[case]["end"]
        for name, end in one["end"].items():
            # Three steps of at most a few lr each, whatever moments are.
            assert float((end.float() - wanted[name].float()).abs().max()) < 0.1


def test_by_torch_on_as_many_ranks_every_bit_comes_back(four: tuple[Path, list[dict[str, Any]]]) -> None:
    """By a whole state from the first rank, in parts, and flattened; where blocks align and where they do not."""
    for told in four[1]:
        for case, found in told["by_torch"].items():
            assert found == [([], True)] * len(found), case


@pytest.mark.slow
def test_by_torch_with_the_other_storages(tmp_path: Path) -> None:
    for told in on_ranks(4, tmp_path, others_by_torch):
        for case, found in told.items():
            assert found == [([], True)] * len(found), case


def test_by_torch_on_another_number_of_ranks(
    four: tuple[Path, list[dict[str, Any]]], two: list[dict[str, Any]]
) -> None:
    """From four to two and to one, and from two to one: whole, and in place by names.

    Bit for bit where blocks align; elsewhere encoded anew, and that is said.
    """
    kept = torch.load(four[0] / "by_torch" / "full.pt")
    for storage, block in BY_TORCH:
        found = [told["from_torch"][storage, block] for told in two]
        weights, state, decoded = kept[storage, block]
        alone = [found[0].pop("alone"), on_one(storage, block, weights, state, decoded)]
        assert all(one["flat"] and one["flat said"] == one["said"] for one in found), (storage, block)
        for one in (*found, *alone):
            if block == BLOCKS[0]:
                assert (one["said"], one["off"]) == ([], 0), (storage, block)
                assert one.get("twin", True), (storage, block)
            else:
                assert "encoded moments anew, whose blocks were those of other shards (long" in one["said"][0]
                assert 0 < one["off"] < 0.15


def test_what_the_page_shows_gives_all_bits_back(two: list[dict[str, Any]]) -> None:
    assert all(told["of_the_page"] for told in two)


def test_by_hand(four: tuple[Path, list[dict[str, Any]]]) -> None:
    for told in (dict(one["by_hand"]) for one in four[1]):
        unsharded, wrong = told.pop("unsharded"), told.pop("wrong")
        assert all(told.values()), told
        assert wrong == "ValueError: state_dict: 'weight.lo' of long must have shape (33, 64), got (3,)"
        assert unsharded.startswith("ValueError: state_dict: the state of long must be full tensors")


def test_a_rank_without_rows_has_lost_nothing(tmp_path: Path) -> None:
    assert on_ranks(3, tmp_path, without_rows) == [[]] * 3


def test_refusals(two: list[dict[str, Any]]) -> None:
    for told in (one["refusing"] for one in two):
        for path in ("C", "eager"):
            said, unchanged = told[path]
            assert said.startswith("FloatingPointError: long: the gradient has inf or NaN (nonfinite='raise')")
            assert unchanged
            assert told[f"{path}, then"] == "nothing"


def test_meshes_of_two_dimensions(four: tuple[Path, list[dict[str, Any]]]) -> None:
    """Saved by four ranks; resumed on as many to the bit, and on one: replicas to the bit, boxes encoded anew."""
    folder = four[0] / "saving_on_meshes"
    for told in four[1]:
        assert told["saving_on_meshes"] == {"split, 8bit": True, "plain, fp32": True}
    nets = []
    for seed in (0, 1):
        net, optimizer = model("AdamW", "split8, log8", BLOCKS[0], shared=False, seed=seed)
        if seed:
            load_checkpoint(folder / "hybrid" / "step-000000003", model=net, optimizer=optimizer)
        train(net, optimizer, range(3 * seed, 6))
        nets.append(net)
    assert all(torch.equal(p, q) for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
    for storage in ("split, 8bit", "plain, fp32"):
        whole, fresh = block_of_two(False, storage), block_of_two(False, storage, seed=1)
        steps_of_block(*whole, range(2))
        exact = storage == "plain, fp32"
        with nullcontext() if exact else pytest.warns(UserWarning, match="encoded moments anew"):
            load_checkpoint(folder / storage / "step-000000002", model=fresh[0], optimizer=fresh[1])
        for one in (whole, fresh):
            steps_of_block(*one, range(2, 4))
        for p, q in zip(whole[0].parameters(), fresh[0].parameters(), strict=True):
            assert torch.equal(p, q) if exact else torch.allclose(p, q, atol=0.02)


def test_stepping_in_the_backward_pass(two: list[dict[str, Any]]) -> None:
    for told in two:
        assert told["in_backward"] == [True] * 8


def test_muon_sees_whole_matrices(four: tuple[Path, list[dict[str, Any]]]) -> None:
    assert all(told["muon"][0] for told in four[1])
    # Three matrices, three steps; of four ranks the last one owns none.
    assert [told["muon"][1] for told in four[1]] == [3, 3, 3, 0]


def test_low_precision_linear_layers_on_the_cpu(two: list[dict[str, Any]], tmp_path: Path) -> None:
    alone = offloaded(0, tmp_path)
    for told in two:
        assert told["offloaded"] == pytest.approx(alone, rel=2e-2)
    assert alone[-1] < alone[0]
