"""One process: what is saved comes back, bit for bit, and only what is asked for is kept."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpointed import DIM, KIND, KINDS, Net, contents, made, ours, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowgauge as ng
from narrowgauge.distributed import (
    DamagedCheckpointError,
    LoadedCheckpoint,
    export_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
)
from narrowgauge.distributed._checkpoint import _save


@pytest.mark.parametrize("kind", KINDS)
def test_the_resumed_run_is_the_run_that_never_stopped(kind: str, tmp_path: Path) -> None:
    net, optimizer = made(kind)
    train(net, optimizer, range(4))
    path = save_checkpoint(tmp_path, model=net, optimizer=optimizer, step=4)
    wanted = train(net, optimizer, range(4, 8))
    fresh, loaded = made(kind, seed=1)
    assert load_checkpoint(path, model=fresh, optimizer=loaded) == LoadedCheckpoint(4, None)
    assert fresh.seen == 4
    assert train(fresh, loaded, range(4, 8)) == wanted
    for p, q in zip(net.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q)


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {
        "scheduler": {"last_epoch": 3, "_last_lr": [0.1, float("inf")], 7: (None, True, "é", -0.0)},
        "tensors": [torch.arange(5, dtype=dtype) for dtype in (torch.bfloat16, torch.uint8, torch.float64)],
        "codes": torch.ones(3).to(torch.float8_e4m3fn),
        "nothing": [(), {}, torch.empty(0, 3), torch.tensor(2)],
        "tensor": "tensor",
        "big": 2**100,
    }
    net = Net()
    path = save_checkpoint(tmp_path, model=net, optimizer=None, step=0, extra=extra)
    step, got = load_checkpoint(path, model=net, optimizer=None)
    assert step == 0
    assert same(got, extra)
    assert math.copysign(1, got["scheduler"][7][3]) == -1


def test_numbers_that_are_not_finite_are_valid_json(tmp_path: Path) -> None:
    """Bare NaN and Infinity are not JSON. Manifests of earlier releases have them, and are read."""
    net, optimizer = made("torch AdamW")
    optimizer.param_groups[0]["lr"] = math.inf
    extra = {"losses": [1.5, math.nan, math.inf, -math.inf], math.inf: (math.nan,)}

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    path = save_checkpoint(tmp_path, model=net, optimizer=optimizer, step=0, extra=extra)
    said = json.loads((path / "checkpoint.json").read_text(), parse_constant=refuse)
    got = load_checkpoint(path, model=net, optimizer=optimizer).extra
    assert repr(got) == repr(extra)
    assert optimizer.param_groups[0]["lr"] == math.inf
    # As before: the bare words, in the checksum too.
    said["values"]["extra"] = {"dict": [["losses", [math.nan, -math.inf]]]}
    del said["sha256"]
    digest = hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (path / "checkpoint.json").write_text(json.dumps({**said, "sha256": digest}))
    assert repr(load_checkpoint(path, model=net, optimizer=None).extra) == "{'losses': [nan, -inf]}"


class Copies(TorchDispatchMode):
    """Records the device of each copy that an operation makes of a tensor of some shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.devices = shape, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default) and args[0].shape == self.shape:
            self.devices.append((kwargs or {}).get("device", "its own"))
        return func(*args, **(kwargs or {}))


def test_loading_copies_no_weight_on_its_device(tmp_path: Path) -> None:
    """A model that barely fits on its GPU can resume: what a failed load restores is on the host."""
    net = Net()
    path = save_checkpoint(tmp_path, model=net, optimizer=None, step=0)
    with Copies((33, DIM)) as copies:
        load_checkpoint(path, model=net, optimizer=None)
    assert copies.devices == [torch.device("cpu")]


def test_a_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resuming reads the newest checkpoint for its checksums once, unless it has changed in between."""
    net = Net()
    save_checkpoint(tmp_path, model=net, optimizer=None, step=0)
    hashed, digest = [], hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, name: (hashed.append(file.name), digest(file, name))[1]
    )
    path = latest_checkpoint(tmp_path)
    assert path is not None
    load_checkpoint(path, model=net, optimizer=None)
    assert len(hashed) == 1
    file = path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="was changed: its checksum is another"):
        load_checkpoint(path, model=net, optimizer=None)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a.float() == b.float()).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_random_states_come_back_if_asked_for(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), random.gauss(0, 1), *np.random.rand(3)]  # noqa: NPY002

    net = Net()
    draw()
    path = save_checkpoint(tmp_path, model=net, optimizer=None, step=0, random_states=True)
    wanted = draw()
    load_checkpoint(path, model=net, optimizer=None)
    assert draw() != wanted
    load_checkpoint(path, model=net, optimizer=None, random_states=True)
    assert draw() == wanted
    without = save_checkpoint(tmp_path, model=net, optimizer=None, step=1)
    with pytest.raises(ValueError, match=r"random_states=True needs a checkpoint .* has none of rank 0"):
        load_checkpoint(without, model=net, optimizer=None, random_states=True)


def test_the_last_ones_are_kept_and_latest_moves(tmp_path: Path) -> None:
    net, optimizer = made("fp32")
    assert latest_checkpoint(tmp_path / "none") is None
    assert latest_checkpoint(tmp_path) is None
    for step in range(5):
        path = save_checkpoint(tmp_path, model=net, optimizer=optimizer, step=step, keep_last=3)
        assert (tmp_path / "latest").read_text() == f"{path.name}\n"
        assert latest_checkpoint(tmp_path) == path
    assert sorted(os.listdir(tmp_path)) == [
        ".lock", "latest", "step-000000002", "step-000000003", "step-000000004",
    ]  # fmt: skip
    save_checkpoint(tmp_path, model=net, optimizer=optimizer, step=9, keep_last=None)
    assert len(os.listdir(tmp_path)) == 6
    save_checkpoint(tmp_path, model=net, optimizer=optimizer, step=10, keep_last=1)
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step-000000010"]


def test_going_back_writes_nothing_over(tmp_path: Path) -> None:
    """The newest is the one that was saved last, whatever its step."""
    net, _ = made("fp32")
    first = save_checkpoint(tmp_path, model=net, optimizer=None, step=7, keep_last=None)
    before = contents(first)
    second = save_checkpoint(tmp_path, model=net, optimizer=None, step=7, keep_last=None)
    third = save_checkpoint(tmp_path, model=net, optimizer=None, step=3, keep_last=None)
    assert [p.name for p in (first, second, third)] == ["step-000000007", "step-000000007-1", "step-000000003"]
    assert contents(first) == before
    assert latest_checkpoint(tmp_path) == third
    save_checkpoint(tmp_path, model=net, optimizer=None, step=8, keep_last=3)
    assert not first.exists()
    assert second.exists()


def test_parameters_are_found_by_name_and_groups_may_be_ordered_otherwise(tmp_path: Path) -> None:
    net, optimizer = made("split, 8bit")
    train(net, optimizer, range(3))
    path = save_checkpoint(tmp_path, model=net, optimizer=optimizer, step=3)
    wanted = train(net, optimizer, range(3, 6))
    fresh = Net(torch.bfloat16, seed=1)
    turned = ours(list(fresh.named_parameters())[::-1], weights="split", states="8bit")
    load_checkpoint(path, model=fresh, optimizer=turned)
    assert train(fresh, turned, range(3, 6)) == wanted


def test_an_optimizer_keeps_its_own_names(tmp_path: Path) -> None:
    net, optimizer = made("fp32")
    train(net, optimizer, range(1))
    path = save_checkpoint(tmp_path, model=net, optimizer=optimizer, step=1)
    other = ours([(f"mine.{name}", p) for name, p in net.named_parameters()])
    load_checkpoint(path, model=net, optimizer=other)
    names = [f"mine.{name}" for name, _ in net.named_parameters()]
    assert other.param_groups[0]["param_names"] == names
    assert [plan.name for _, plan in other.plans()] == names


@pytest.mark.parametrize("called", ["by name", "by other names", "by place"])
def test_single_parameters_are_found_in_another_order(tmp_path: Path, called: str) -> None:
    """8bit and log8 have the same codes: a parameter that took another's storages would be read wrong."""

    def optimizer_of(net: Net, turned: bool) -> Any:
        named = list(net.named_parameters())[:: -1 if turned else 1]
        names = [f"0.{i}" if called == "by place" else f"other.{name}" if turned and "other" in called else name
                 for i, (name, _) in enumerate(named)]  # fmt: skip
        at = {real: name for name, (real, _) in zip(names, named, strict=True)}
        kept = {at["up.weight"]: {"m": "8bit", "v": "8bit"}}
        ps = [p for _, p in named]
        params = ps if called == "by place" else list(zip(names, ps, strict=True))
        made = ours([{"params": params, "kept": kept}], weights="split", states="log8")
        if not turned:
            made.convert(net.down.weight, v="8bit")
        return made

    nets = Net(torch.bfloat16), Net(torch.bfloat16, seed=1)
    first, second = optimizer_of(nets[0], False), optimizer_of(nets[1], True)
    train(nets[0], first, range(3))
    path = save_checkpoint(tmp_path, model=nets[0], optimizer=first, step=3)
    load_checkpoint(path, model=nets[1], optimizer=second)
    for some, others in ((nets[0].up.weight, nets[1].up.weight), (nets[0].down.weight, nets[1].down.weight)):
        assert [slot.storage for slot in first.plan_of(some).slots] == [
            slot.storage for slot in second.plan_of(others).slots
        ]
    assert train(nets[1], second, range(3, 6)) == train(nets[0], first, range(3, 6))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")  # as torch.compile imports it
def test_compiled_modules_have_their_plain_names(tmp_path: Path) -> None:
    net = nn.ModuleDict({"inner": nn.Linear(3, 2)})
    optimizer = torch.optim.AdamW(net.parameters())
    wrapped = torch.compile(nn.ModuleDict({"inner": torch.compile(net["inner"])}))
    path = save_checkpoint(tmp_path, model=wrapped, optimizer=optimizer, step=0)
    fresh = nn.ModuleDict({"inner": nn.Linear(3, 2)})
    load_checkpoint(path, model=fresh, optimizer=torch.optim.AdamW(fresh.parameters()))
    assert torch.equal(fresh["inner"].weight, net["inner"].weight)


@pytest.mark.parametrize("kind", ["torch AdamW", "split, 8bit"])
def test_the_export_is_what_torch_loads(kind: str, tmp_path: Path) -> None:
    net, optimizer = made(kind)
    train(net, optimizer, range(3))
    path = save_checkpoint(tmp_path, model=net, optimizer=optimizer, step=3, extra=[torch.ones(2)])
    file = export_checkpoint(path, tmp_path / "whole.pt")
    whole = torch.load(file, weights_only=True)
    wanted = train(net, optimizer, range(3, 6))
    fresh, loaded = made(kind, seed=1)
    fresh.load_state_dict(whole["model"])
    loaded.load_state_dict(whole["optimizer"])
    assert train(fresh, loaded, range(3, 6)) == wanted
    assert (whole["step"], whole["extra"][0].tolist()) == (3, [1.0, 1.0])
    with pytest.raises(ValueError, match=r"file must be the name of a new file, got .*whole\.pt, which exists"):
        export_checkpoint(path, file)


def test_tensors_are_in_plain_safetensors_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    net, optimizer = made("split8, log8")
    train(net, optimizer, range(2))
    path = save_checkpoint(tmp_path, model=net, optimizer=optimizer, step=2)
    read = safetensors.load_file(path / "rank-00000.safetensors")
    for name, tensor in net.state_dict().items():
        assert torch.equal(read[f"model/{name}"], tensor)
    said = json.loads((path / "checkpoint.json").read_text())
    assert said["tensors"].keys() == read.keys()


def test_saving_beside_training_saves_what_was(tmp_path: Path) -> None:
    net, optimizer = made("split, 8bit")
    train(net, optimizer, range(3))
    pending = [save_checkpoint_async(tmp_path, model=net, optimizer=optimizer, step=3)]
    wanted = train(net, optimizer, range(3, 6))
    pending.append(save_checkpoint_async(tmp_path, model=net, optimizer=optimizer, step=6))
    assert pending[0].done()  # the second waited for the first
    paths = [one.wait() for one in pending]
    assert [path.name for path in paths] == ["step-000000003", "step-000000006"]
    fresh, loaded = made("split, 8bit", seed=1)
    load_checkpoint(paths[0], model=fresh, optimizer=loaded)
    assert train(fresh, loaded, range(3, 6)) == wanted


def test_training_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), _save.write_checkpoint

    def slow(job: Any) -> Path:
        assert go.wait(20)
        return real(job)

    monkeypatch.setattr(_save, "write_checkpoint", slow)
    pending = save_checkpoint_async(tmp_path, model=Net(), optimizer=None, step=0)
    assert not pending.done()
    assert latest_checkpoint(tmp_path) is None
    go.set()
    assert latest_checkpoint(tmp_path) in (None, pending.wait())
    assert latest_checkpoint(tmp_path) == pending.wait()


def test_an_error_beside_training_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    net = Net()
    with pytest.raises(ValueError, match=r"directory must be a folder, got .*file, which is a file"):
        save_checkpoint_async(tmp_path / "file", model=net, optimizer=None, step=0)
    with pytest.raises(NotADirectoryError):
        save_checkpoint_async(tmp_path / "file" / "below", model=net, optimizer=None, step=0)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_save, "write_tensors", full)
        pending = save_checkpoint_async(tmp_path, model=net, optimizer=None, step=0)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint_async(tmp_path, model=net, optimizer=None, step=1)  # the first's error, not seen yet
    with pytest.raises(OSError, match="No space left"):
        pending.wait()
    assert save_checkpoint_async(tmp_path, model=net, optimizer=None, step=2).wait().name == "step-000000002"


REFUSED = {
    "step": ({"step": -1}, "step must be an integer of at least 0, got -1"),
    "keep_last": ({"keep_last": 0}, "keep_last must be an integer of at least 1, got 0"),
    "extra": ({"extra": {"a": [1, object()]}}, r"extra\['a'\]\[1\] must be None, bool, int, .*, got object"),
    "extra, key": ({"extra": {(1, 2): 3}}, r"extra: keys must be str or int, got \(1, 2\) of type tuple"),
    "extra, tensor": (
        {"extra": {"a": torch.ones(1), "b": [torch.ones(1, dtype=torch.complex64)]}},
        r"extra\['b'\]\[0\] must be a dense tensor .* got torch\.complex64",
    ),
    "sparse": (
        {"extra": torch.eye(2).to_sparse()},
        r"extra must be a dense tensor .* got torch\.float32 \(torch\.sparse_coo",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_saved_is_refused_by_name(arguments: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path / "run", **{"model": Net(), "optimizer": None, "step": 0, **arguments})
    assert not (tmp_path / "run").exists()


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    optimizer = ng.optim.AdamW(Net().parameters())
    with pytest.raises(
        ValueError, match=r"optimizer: parameter 0 of group 0, of shape \(33, 24\), is not the model"
    ):
        save_checkpoint(tmp_path, model=Net(), optimizer=optimizer, step=0)


class WithExtra(nn.Module):
    """Its state is more than tensors, one tensor has two names, and one of its parts is called as DDP calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.weight = nn.Linear(3, 2), nn.Parameter(torch.randn(2))
        self.tied = self.module.weight
        self.kept: dict = {"table": torch.randn(2), "count": 3}

    def get_extra_state(self) -> dict:
        return self.kept

    def set_extra_state(self, state: dict) -> None:
        self.kept = state


def test_what_modules_keep_beside_tensors_comes_back(tmp_path: Path) -> None:
    saved, fresh = WithExtra(), WithExtra()
    saved.kept["count"] = 4
    path = save_checkpoint(tmp_path, model=saved, optimizer=torch.optim.SGD(saved.parameters()), step=1)
    load_checkpoint(path, model=fresh, optimizer=torch.optim.SGD(fresh.parameters()))
    assert fresh.kept["count"] == 4
    assert torch.equal(fresh.kept["table"], saved.kept["table"])
    assert fresh.tied is fresh.module.weight
    for name, p in saved.named_parameters():
        assert torch.equal(p, fresh.get_parameter(name))


@pytest.mark.parametrize("later", [False, True])
def test_tied_weights_are_written_once_and_read_by_both_names(tmp_path: Path, later: bool) -> None:
    class Tied(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(50, 40), nn.Linear(40, 50, bias=False)
            self.none, self.nothing = (nn.Parameter(torch.zeros(0)) for _ in range(2))
            if tied:
                self.head.weight = self.table.weight

    saved = Tied(True)
    if later:
        path = save_checkpoint_async(tmp_path, model=saved, optimizer=None, step=1).wait()
    else:
        path = save_checkpoint(tmp_path, model=saved, optimizer=None, step=1)
    assert 50 * 40 * 4 <= (path / "rank-00000.safetensors").stat().st_size < 2 * 50 * 40 * 4
    for tied in (True, False):
        fresh = Tied(tied)
        load_checkpoint(path, model=fresh, optimizer=None)
        assert torch.equal(fresh.table.weight, saved.table.weight)
        assert torch.equal(fresh.head.weight, saved.table.weight)
        assert (fresh.head.weight is fresh.table.weight) == tied


@pytest.mark.parametrize("later", [False, True])
def test_views_of_one_memory_come_back_as_they_were(tmp_path: Path, later: bool) -> None:
    """Whatever their strides: also those that negate, and of one column, whose stride is that of rows."""
    table, z = torch.arange(24.0).view(4, 6), torch.randn(5, dtype=torch.complex64)
    views = {
        "table": table, "again": table, "rows": table[1:], "column": table[:, :1], "first": table[:1, 0],
        "corner": table[:1, :1], "turned": table[:4, :4].t(), "square": table[:4, :4], "number": table[0, 0],
        "bits": table.view(torch.int32),
        "spread": table[0, 0].expand(4, 6), "overlapping": table.as_strided((4, 4), (1, 1)),
        "imaginary": z.imag, "negated": z.conj().imag, "minus": torch._neg_view(table),
    }  # fmt: skip
    save = save_checkpoint_async if later else save_checkpoint
    saved = save(tmp_path, model=nn.Linear(1, 1), optimizer=None, step=1, extra=views)
    path = saved if isinstance(saved, Path) else saved.wait()
    found = load_checkpoint(path, model=nn.Linear(1, 1), optimizer=None)[1]
    for name, view in views.items():
        assert found[name].dtype == view.dtype
        assert torch.equal(found[name], view.resolve_neg()), name


def test_the_program_ends_when_the_last_one_is_written(tmp_path: Path) -> None:
    """And one that saves nothing does not wait for torch's distributed packages either."""
    program = (
        "import sys, time, torch, narrowgauge as ng\n"
        "assert not {'torch.distributed.checkpoint', 'narrowgauge.distributed'} & sys.modules.keys()\n"
        "assert 'distributed' in dir(ng) and ng.distributed.save_checkpoint\n"
        "from narrowgauge.distributed._checkpoint import _save as saving\n"
        "real = saving.write_checkpoint\n"
        "saving.write_checkpoint = lambda job: (time.sleep(0.3), real(job))[1]\n"
        "saving.save_checkpoint_async(sys.argv[1], model=torch.nn.Linear(2, 2), optimizer=None, step=5)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000000005"


def test_a_relative_folder_is_where_the_process_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside training the thread writes later than it was asked to."""
    net, optimizer = made(KIND)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    # The thread is busy until the process has gone elsewhere.
    gone, real = threading.Event(), _save.write_checkpoint
    monkeypatch.setattr(_save, "write_checkpoint", lambda job: (gone.wait(20), real(job))[1])
    pending = save_checkpoint_async("run", model=net, optimizer=optimizer, step=1)
    monkeypatch.chdir(tmp_path / "there")
    gone.set()
    assert pending.wait() == tmp_path / "here" / "run" / "step-000000001"
    assert list((tmp_path / "there").iterdir()) == []
