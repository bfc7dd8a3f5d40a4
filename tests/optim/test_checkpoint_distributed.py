"""Through torch.distributed.checkpoint, which names states by parameter and writes them to a folder."""

import copy
from pathlib import Path

import pytest
import torch
from checkpoint_runs import drive, everything, same
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
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
