"""Through torch.distributed.checkpoint, which names states by parameter and writes them to a folder."""

import copy
import warnings
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

from narrowgauge.optim import SGD, AdamW, RMSprop, ScheduleFreeAdamW
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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"weights": "split"}, {"weights": "master"}),
        ({"states": "log8"}, {"states": "fp32"}),
        ({"states": "log8", "min_quantized_size": 100}, {"states": "8bit"}),
        ({"states": "8bit"}, {"states": "log8", "min_quantized_size": 10**6}),
    ],
    ids=str,
)
def test_whole_states_convert_as_load_state_dict_does(old: Any, new: Any) -> None:
    """torch hands over what was saved and, beside it, the reader's own tensors under other keys."""
    options, net, fresh, other = StateDictOptions(full_state_dict=True), Net(), Net(), Net()
    saved = AdamW(net.parameters(), **{"min_quantized_size": 0, **old})
    drive(saved, range(3))
    weights, state = copy.deepcopy(get_state_dict(net, saved, options=options))
    loaded, wanted = (AdamW(n.parameters(), **{"min_quantized_size": 0, **old, **new}) for n in (fresh, other))
    other.load_state_dict(net.state_dict())
    wanted.load_state_dict(saved.state_dict())
    set_model_state_dict(fresh, weights, options=options)
    set_optimizer_state_dict(fresh, loaded, state, options=options)
    assert same(everything(wanted), everything(loaded))


@pytest.mark.parametrize("reader", [SGD, RMSprop])
def test_a_momentum_that_is_off_is_read_in_any_storage(reader: Any) -> None:
    """Storages of a first moment have some keys in common, and others not."""
    for states in ("log8", "expansion"):
        net = Net()
        saved = AdamW(net.parameters(), states=states, weights="split", min_quantized_size=0)
        drive(saved, range(2))
        loaded = reader(net.parameters(), states="8bit", weights="split", min_quantized_size=0)
        with pytest.warns(UserWarning, match="took moments of 'adamw' for those of"):
            loaded.load_state_dict(saved.state_dict())
        assert all(state["m.scales"].ne(0).all() for state in loaded.state.values())


@pytest.mark.parametrize("kind", [AdamW, ScheduleFreeAdamW])
def test_weights_that_are_loaded_after_their_low_words_were_converted_are_named(kind: Any) -> None:
    """As `set_state_dict` loads them. In the same storage low words are copied, in either order."""
    net = Net()
    saved = kind(net.parameters(), weights="split")
    drive(saved, range(3))
    weights, state = copy.deepcopy(get_state_dict(net, saved))
    for storage in ("split", "master", "master, in order"):
        fresh = Net()
        loaded = kind(fresh.parameters(), weights=storage.partition(",")[0])
        if storage.endswith("order"):
            fresh.load_state_dict(weights)
        set_state_dict(fresh, loaded, model_state_dict=weights, optim_state_dict=copy.deepcopy(state))
        if kind is ScheduleFreeAdamW:
            loaded.eval()
            loaded.train()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            drive(loaded, range(1))
        said = [str(one.message) for one in caught]
        if storage == "master":
            assert len(said) == 1
            assert said[0].startswith("step: 4 parameters were set after load_state_dict had converted")
        else:
            assert not said
        set_optimizer_state_dict(fresh, loaded, copy.deepcopy(state))
        loaded.set_full_weights(dict(zip(fresh.parameters(), saved.full_weights().values(), strict=True)))
        drive(loaded, range(2))  # they are set with their low words


def test_a_float32_model_that_is_loaded_after_its_low_words_is_named() -> None:
    net, fresh = Net(), Net().float()
    saved = AdamW(net.parameters(), weights="split")
    drive(saved, range(3))
    narrow = {name: value.float() for name, value in net.state_dict().items()}
    fresh.load_state_dict(narrow)
    loaded = AdamW(fresh.parameters())
    loaded.load_state_dict(saved.state_dict())
    fresh.load_state_dict(narrow)
    with pytest.warns(UserWarning, match=r"^step: 4 parameters were set after load_state_dict had converted"):
        drive(loaded, range(1))


@pytest.mark.parametrize(("old", "new"), [({}, {"weights": "master"}), ({"states": "log8"}, {"states": "8bit"})])
def test_a_state_of_the_readers_own_tensors_is_refused(old: Any, new: Any) -> None:
    """As ranks are given it by `broadcast_from_rank0`, with the groups and the count of steps that were saved."""
    common = {"weights": "split", "min_quantized_size": 0}
    saved, other = (AdamW(Net().parameters(), **{**common, **own}) for own in (old, new))
    drive(saved, range(3))
    state = saved.state_dict()
    for group in other.param_groups:
        for number, p in enumerate(group["params"]):
            state["state"][number] = {**other.plan_of(p).init(p, group), "step": torch.tensor(3.0)}
    with pytest.raises(
        ValueError, match=r"^state_dict: moments and low words must be those that were saved, got '.* of 0\.0 as"
    ):
        other.load_state_dict(state)
    state["state"][3] = saved.state_dict()["state"][3]
    other.load_state_dict(state)  # zeros were saved, if another parameter has what was saved


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
