"""Through torch.distributed.checkpoint, which names states by parameter and writes them to a folder."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import drive, everything, same
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from narrowgauge.optim import AdamW
from narrowgauge.storage import weight_storage


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(20, 30, dtype=torch.bfloat16)
        self.out = torch.nn.Linear(30, 4, dtype=torch.bfloat16)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_distributed_checkpoints_name_parameters_and_come_back(flat: bool, states: str) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    net, fresh = Net(), Net()
    saved, loaded = (
        AdamW(n.parameters(), states=states, weights="split", min_quantized_size=100) for n in (net, fresh)
    )
    drive(saved, range(3))
    kept = copy.deepcopy(get_optimizer_state_dict(net, saved, options=options))
    assert any("inner.weight" in key for key in (kept if flat else kept["state"]))
    fresh.load_state_dict(net.state_dict())
    set_optimizer_state_dict(fresh, loaded, kept, options=options)
    assert same(everything(saved), everything(loaded))


def test_distributed_checkpoints_convert() -> None:
    net = Net()
    saved = AdamW(net.parameters(), states="8bit", weights="split", min_quantized_size=100)
    drive(saved, range(3))
    other = AdamW(net.parameters(), states="fp32", weights="master")
    set_optimizer_state_dict(net, other, copy.deepcopy(get_optimizer_state_dict(net, saved)))
    for p in net.parameters():
        assert set(other.state[p]) == {"step", "skipped", "m", "v", "weight.master"}
        low = saved.state[p]["weight.lo"]
        assert torch.equal(other.state[p]["weight.master"], weight_storage("split").read(p.detach(), low))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"weights": "split"}, {"weights": "master"}),
        ({"weights": "master"}, {"weights": "split"}),
        ({"states": "log8"}, {"states": "fp32"}),
        ({"states": "log8", "min_quantized_size": 100}, {"states": "8bit"}),
        ({"states": "8bit"}, {"states": "log8", "min_quantized_size": 10**6}),
    ],
    ids=str,
)
def test_whole_states_convert_as_load_state_dict_does(old: Any, new: Any, full: bool) -> None:
    """torch hands the reader's tensors over beside the saved ones."""
    options, kinds = StateDictOptions(full_state_dict=full), ({"min_quantized_size": 0} | old, {**old, **new})
    net, fresh, other = Net(), Net(), Net()
    saved = AdamW(net.parameters(), **kinds[0])
    drive(saved, range(3))
    weights, state = copy.deepcopy(get_state_dict(net, saved, options=options))
    loaded, wanted = (AdamW(n.parameters(), **{"min_quantized_size": 0, **new}) for n in (fresh, other))
    other.load_state_dict(net.state_dict())
    wanted.load_state_dict(saved.state_dict())
    set_model_state_dict(fresh, weights, options=options)
    set_optimizer_state_dict(fresh, loaded, state, options=options)
    assert same(everything(wanted), everything(loaded))
    drive(loaded, range(1))


def test_weights_that_are_loaded_after_their_low_words_were_converted_are_named() -> None:
    """As `set_state_dict` does; in the same storage low words are copied, in either order."""
    net = Net()
    saved = AdamW(net.parameters(), weights="split")
    drive(saved, range(3))
    weights, state = copy.deepcopy(get_state_dict(net, saved))
    for storage in ("split", "master"):
        fresh = Net()
        loaded = AdamW(fresh.parameters(), weights=storage)
        set_state_dict(fresh, loaded, model_state_dict=weights, optim_state_dict=copy.deepcopy(state))
        if storage == "split":
            drive(loaded, range(1))
            continue
        with pytest.warns(UserWarning, match=r"^step: 4 parameters were set after load_state_dict had converted"):
            drive(loaded, range(1))
        set_optimizer_state_dict(fresh, loaded, copy.deepcopy(state))
        loaded.set_full_weights(dict(zip(fresh.parameters(), saved.full_weights().values(), strict=True)))
        drive(loaded, range(2))  # they are set with their low words


def test_a_low_word_of_another_storage_than_the_groups_is_named() -> None:
    """As ranks have it that were given nothing but their own keys by `broadcast_from_rank0`."""
    net = Net()
    saved, other = (AdamW(net.parameters(), weights=weights) for weights in ("split", "master"))
    for optimizer in (saved, other):
        drive(optimizer, range(1))
    state = {**other.state_dict(), "param_groups": saved.state_dict()["param_groups"]}
    with pytest.warns(UserWarning, match=r"found 'weight\.master' in place of 'weight\.lo', which 'split' writes"):
        other.load_state_dict(state)


@pytest.mark.parametrize(("old", "new", "words"), [("8bit", "fp32", "'m'"), ("fp32", "8bit", r"'m\.codes'")])
def test_flattened_states_ask_for_the_same_storages(old: str, new: str, words: str) -> None:
    """torch looks the words up by the names that the reader has; with gradients around, by none at all."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    net = Net()
    saved, other = (AdamW(net.parameters(), states=states, min_quantized_size=0) for states in (old, new))
    drive(saved, range(1))
    kept = get_optimizer_state_dict(net, saved, options=options)
    with pytest.warns(
        UserWarning, match=r"found an empty state, which starts anew \(0\.0, 0\.1, 0\.2 and 1 more\)$"
    ):
        set_optimizer_state_dict(net, other, kept, options=options)
    saved.zero_grad()
    with pytest.raises(ValueError, match=rf"{words} of 0\.0 must be a tensor or a number, got dict"):
        set_optimizer_state_dict(net, other, kept, options=options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_written_by_dcp_is_read_in_place(tmp_path: Path) -> None:
    def made() -> tuple[Net, AdamW]:
        net = Net()
        return net, AdamW(net.parameters(), states="8bit", weights="split8", min_quantized_size=100)

    (net, saved), (fresh, loaded) = made(), made()
    drive(saved, range(3))
    dcp.save({"optimizer": get_optimizer_state_dict(net, saved)}, checkpoint_id=tmp_path, no_dist=True)
    target = {"optimizer": get_optimizer_state_dict(fresh, loaded)}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(fresh, loaded, target["optimizer"])
    assert same(everything(saved), everything(loaded))
