"""Everything that can go wrong on one machine: what was saved before is found, and what is wrong is named."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import KIND, Net, contents, curve, made, newest, ours, train

import narrowgauge as ng
from narrowgauge.distributed import (
    DamagedCheckpointError,
    export_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

FILE = "rank-00000.safetensors"


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped byte": (
        lambda p: flip(p / FILE, 0.7),
        r"rank-00000\.safetensors was changed: its checksum is another",
    ),
    "a file cut short": (lambda p: os.truncate(p / FILE, 1000), r"safetensors has 1000 bytes, \d+ were written"),
    "a file missing": (lambda p: (p / FILE).unlink(), r"rank-00000\.safetensors is missing"),
    "no manifest": (lambda p: (p / "checkpoint.json").unlink(), r"has no checkpoint\.json: it is no checkpoint"),
    "another JSON": (lambda p: (p / "checkpoint.json").write_text("[1]"), "is no manifest of a checkpoint"),
    "another number": (
        lambda p: edit(p, lambda said: said.update(step=5), sign=False),
        r"checkpoint\.json was changed: its checksum is another",
    ),
}


def edit(path: Path, change: Callable[[dict], Any], sign: bool = True) -> None:
    """Change a manifest, and make its checksum right again."""
    said = json.loads((path / "checkpoint.json").read_text())
    digest = said.pop("sha256")
    change(said)
    if sign:
        digest = hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (path / "checkpoint.json").write_text(json.dumps({**said, "sha256": digest}))


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_one_is_named_and_the_one_before_is_used(
    damage: Callable[[Path], Any], message: str, run: Path
) -> None:
    damage(newest(run))
    before = contents(run)
    with pytest.warns(
        UserWarning, match=f"latest_checkpoint: .*step-000000004.*{message}.*taking .*step-000000002$"
    ):
        path = latest_checkpoint(run)
    assert path == run / "step-000000002"
    net, optimizer = made(KIND, seed=1)
    kept = [p.detach().clone() for p in net.parameters()]
    for refused in (
        lambda: load_checkpoint(newest(run), model=net, optimizer=optimizer),
        lambda: export_checkpoint(newest(run), run.parent / "whole.pt"),
    ):
        with pytest.raises(DamagedCheckpointError, match=message):
            refused()
    # Neither model nor optimizer nor files.
    assert all(map(torch.equal, net.parameters(), kept))
    assert not optimizer.state
    assert contents(run) == before
    assert load_checkpoint(path, model=net, optimizer=optimizer) == (2, {"at": 2})
    wanted = curve(6)
    assert [loss.hex() for loss in train(net, optimizer, range(2, 6))] == [wanted[step] for step in range(3, 7)]


def test_where_none_is_whole_nobody_begins_anew_by_mistake(run: Path) -> None:
    for name in ("step-000000002", "step-000000004"):
        flip(run / name / FILE, 0.5)
    with pytest.raises(DamagedCheckpointError, match=r"no checkpoint in .* is whole: .*0004.*; .*0002"):
        latest_checkpoint(run)


@pytest.mark.parametrize("damage", [lambda p: flip(p, 0.5), lambda p: os.truncate(p, 100)], ids=["bytes", "size"])
def test_a_damaged_one_is_not_among_those_that_are_kept(damage: Callable[[Path], Any], run: Path) -> None:
    """Two are kept, so that one may be damaged: to count one that is would leave one."""
    damage(newest(run) / FILE)
    with pytest.warns(UserWarning, match="taking .*step-000000002"):
        latest_checkpoint(run)
    net, optimizer = made(KIND)

    def left_after(step: int) -> list[str]:
        save_checkpoint(run, model=net, optimizer=optimizer, step=step)
        return sorted(path.name for path in run.glob("step-*"))

    assert left_after(3) == ["step-000000002", "step-000000003", "step-000000004"]
    # It goes with those that are as old, and one of its name is another.
    assert left_after(4) == ["step-000000003", "step-000000004-1"]
    assert left_after(5) == ["step-000000004-1", "step-000000005"]


def test_one_that_cannot_be_read_for_a_while_is_not_the_newest_afterwards(run: Path) -> None:
    manifest = newest(run) / "checkpoint.json"
    manifest.rename(run / "elsewhere")
    save_checkpoint(run, model=Net(), optimizer=None, step=5, keep_last=None)
    (run / "elsewhere").rename(manifest)
    assert latest_checkpoint(run) == run / "step-000000005"


def test_a_link_to_a_folder_that_is_not_there_is_no_new_run(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "not mounted")
    with pytest.raises(ValueError, match=r"directory must be a folder, got .*run, a link to what is not there"):
        latest_checkpoint(tmp_path / "run")
    with pytest.raises(ValueError, match=r"directory must be a folder, got .*run, a link to what is not there"):
        save_checkpoint(tmp_path / "run", model=Net(), optimizer=None, step=1)


def test_links_to_checkpoints_are_neither_counted_nor_removed(run: Path) -> None:
    links = run / "step-000000100", run / "step-000000101"
    for link, name in zip(links, ("step-000000002", "step-000000004"), strict=True):
        link.symlink_to(name)
    save_checkpoint(run, model=Net(), optimizer=None, step=5)
    names = sorted(path.name for path in run.glob("step-*"))
    assert names == ["step-000000004", "step-000000005", "step-000000100", "step-000000101"]
    save_checkpoint(run, model=Net(), optimizer=None, step=6)
    assert all(link.is_symlink() for link in links)
    assert latest_checkpoint(run) == run / "step-000000006"


def test_warnings_point_at_the_caller(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "latest").write_text("nothing")
    with pytest.warns(UserWarning, match="latest names 'nothing'") as caught:
        latest_checkpoint(run)
    assert caught[0].filename == __file__

    def refuse(path: Path) -> None:
        raise OSError("busy")

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", refuse)
        with pytest.warns(UserWarning, match="could not be removed: busy") as caught:
            save_checkpoint(run, model=Net(), optimizer=None, step=5)
    assert caught[0].filename == __file__

    model, other = Net().bfloat16(), Net().bfloat16()
    optimizer = ng.optim.AdamW(model.parameters(), weights="split8", lr=1e-2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    path = save_checkpoint(run, model=model, optimizer=optimizer, step=6)
    other_optimizer = ng.optim.AdamW(other.parameters(), weights="stochastic")
    with pytest.warns(UserWarning, match="dropped .* of 'split8', which 'stochastic' has no place for") as caught:
        load_checkpoint(path, model=other, optimizer=other_optimizer)
    assert caught[-1].filename == __file__


def test_another_version_is_named(run: Path) -> None:
    edit(newest(run), lambda said: said.update(version=2))
    with pytest.raises(ValueError, match=r"checkpoint\.json has version 2, this release reads version 1"):
        load_checkpoint(newest(run), model=Net(), optimizer=None)
    with pytest.warns(UserWarning, match="has version 2, this release reads version 1; taking"):
        assert latest_checkpoint(run) == run / "step-000000002"


def test_the_newest_counts_whatever_latest_says(run: Path) -> None:
    (run / "latest").write_text("step-000000002\n")  # its saver died before it was moved
    assert latest_checkpoint(run) == newest(run)
    (run / "latest").write_bytes(b"../..\xff")
    with pytest.warns(UserWarning, match=r"latest names '.*', which is not there; taking .*step-000000004"):
        assert latest_checkpoint(run) == newest(run)


def test_a_half_written_one_is_named_and_cleared_by_the_next_save(run: Path) -> None:
    half = run / ".step-000000006.abc"
    half.mkdir()
    (half / FILE).write_bytes(b"half")
    (half / "token").write_text("abc")
    (run / ".step-000000007.def").mkdir()  # its saver died before it said who it is
    with pytest.warns(UserWarning, match=r"\.step-000000006\.abc was not finished; taking .*step-000000004"):
        assert latest_checkpoint(run) == newest(run)
    save_checkpoint(run, model=Net(), optimizer=None, step=6)
    assert not list(run.glob(".step-*"))


def test_two_savers_at_once_both_succeed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One saves the same step while the other is in the middle of it: neither clears or writes over the other."""
    from narrowgauge.distributed._checkpoint import _save

    real, inner = _save.write_tensors, []

    def slow(*args: Any) -> Any:
        if not inner:
            inner.append(None)
            inner.append(save_checkpoint(run, model=Net(), optimizer=None, step=8, keep_last=9))
            assert latest_checkpoint(run) == inner[1]  # the one in the middle is no half-written one
        return real(*args)

    monkeypatch.setattr(_save, "write_tensors", slow)
    outer = save_checkpoint(run, model=Net(), optimizer=None, step=8, keep_last=9)
    assert (inner[1].name, outer.name) == ("step-000000008", "step-000000008-1")
    assert latest_checkpoint(run) == outer
    for path in (inner[1], outer):
        load_checkpoint(path, model=Net(), optimizer=None)


class Evil:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.mark,))


def test_what_is_loaded_cannot_run_code(run: Path, tmp_path: Path) -> None:
    """Pickles wherever torch would read one: none is opened, and nobody's file outside is."""
    mark = tmp_path / "mark"
    evil = pickle.dumps(Evil(mark))
    pickle.loads(evil)
    assert mark.exists()
    mark.unlink()
    path = newest(run)
    for name in (".metadata", "__0_0.distcp", "model.pt", "token"):
        (path / name).write_bytes(evil)
    load_checkpoint(path, model=made(KIND)[0], optimizer=None)  # what the manifest does not name is not looked at
    for name in (FILE, "checkpoint.json"):
        (path / name).write_bytes(evil)
        with pytest.raises(DamagedCheckpointError):
            load_checkpoint(path, model=made(KIND)[0], optimizer=None)
    assert not mark.exists()


LIES: dict[str, tuple[Callable[[dict], Any], str]] = {
    "a file elsewhere": (
        lambda said: said["files"].update({"../x": said["files"][FILE]}),
        r"the file name '\.\./x' leads out of the folder",
    ),
    "a piece beyond its file": (lambda said: piece(said).update(start=10**9), "lies outside of its file or tensor"),
    "a piece before its file": (lambda said: piece(said).update(start=-8), "lies outside of its file or tensor"),
    "a piece beyond its tensor": (lambda said: piece(said).update(offsets=[30, 0]), "lies outside"),
    "a piece missing": (lambda said: weight(said).update(pieces=[]), "are not all of it"),
    "a piece twice": (lambda said: weight(said).update(pieces=2 * weight(said)["pieces"]), "are not all of it"),
    "another shape": (lambda said: weight(said).update(shape=[34, 24]), "are not all of it"),
    "an unknown dtype": (lambda said: weight(said).update(dtype="C64"), "has dtype 'C64'"),
    "no tensors": (lambda said: said.update(tensors={}), "the tensor .* is not there"),
    "no values": (lambda said: said.pop("values"), "lacks what a manifest has: KeyError"),
    "other values": (lambda said: said.update(values=[1, 2]), "lacks what a manifest has: TypeError"),
}


def weight(said: dict) -> dict:
    return said["tensors"]["model/up.weight"]


def piece(said: dict) -> dict:
    return weight(said)["pieces"][0]


@pytest.mark.parametrize(("lie", "message"), LIES.values(), ids=LIES)
def test_a_manifest_that_lies_is_refused(lie: Callable[[dict], Any], message: str, run: Path) -> None:
    """With a checksum that is right: what it says cannot be."""
    edit(newest(run), lie)
    with pytest.raises(DamagedCheckpointError, match=message):
        load_checkpoint(newest(run), model=made(KIND)[0], optimizer=None)


def test_another_model_or_optimizer_is_named(run: Path) -> None:
    net, optimizer = made(KIND)
    with pytest.raises(ValueError, match=r"model: the checkpoint has no 'weight', 'bias' \(2 names\)"):
        load_checkpoint(newest(run), model=torch.nn.Linear(3, 2), optimizer=None)
    with pytest.raises(ValueError, match=r"model: 'up\.weight' is torch\.float32 of shape \(33, 24\), the check"):
        load_checkpoint(newest(run), model=Net(), optimizer=None)
    fewer = ours(list(net.up.named_parameters()), weights="split8", states="log8")
    with pytest.raises(
        ValueError, match=r"optimizer: group 0 has other .*: only in the checkpoint down\.bias, down\.weight"
    ):
        load_checkpoint(newest(run), model=net, optimizer=fewer)
    groups = ng.optim.AdamW([{"params": net.up.parameters()}, {"params": net.down.parameters()}])
    with pytest.raises(ValueError, match="optimizer must have as many groups as the checkpoint, 1, got 2"):
        load_checkpoint(newest(run), model=net, optimizer=groups)
    alone = save_checkpoint(run, model=net, optimizer=None, step=11)
    with pytest.raises(
        ValueError, match="optimizer must be None for a checkpoint that was saved with optimizer=None"
    ):
        load_checkpoint(alone, model=net, optimizer=optimizer)


def test_where_the_optimizer_refuses_the_model_is_put_back(run: Path) -> None:
    net, _ = made("fp32")
    other = torch.optim.Adadelta(net.parameters())
    train(net, other, range(2))
    path = save_checkpoint(run, model=net, optimizer=other, step=10)
    fresh, optimizer = made("fp32", seed=1)
    kept = {name: value.clone() for name, value in fresh.state_dict().items()}
    with pytest.raises(ValueError, match="state_dict: "):
        load_checkpoint(path, model=fresh, optimizer=optimizer)
    assert all(torch.equal(value, kept[name]) for name, value in fresh.state_dict().items())
    assert not optimizer.state


def test_the_folder_of_all_is_no_checkpoint(run: Path) -> None:
    with pytest.raises(
        ValueError, match=r"path must be one checkpoint, got .*run, a folder of checkpoints; see latest"
    ):
        load_checkpoint(run, model=Net(), optimizer=None)
    with pytest.raises(ValueError, match=r"path must be a checkpoint, got .*none, which is no folder"):
        load_checkpoint(run / "none", model=Net(), optimizer=None)
    with pytest.raises(ValueError, match=r"^path must be a checkpoint, got None: latest_checkpoint found none$"):
        load_checkpoint(latest_checkpoint(run / "none"), model=Net(), optimizer=None)
    with pytest.raises(ValueError, match=r"directory must be a folder, got .*latest, which is a file"):
        latest_checkpoint(run / "latest")
    with pytest.raises(ValueError, match=r"directory must be a folder, got .*latest, which is a file"):
        save_checkpoint(run / "latest", model=Net(), optimizer=None, step=1)
