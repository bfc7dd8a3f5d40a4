# ruff: noqa: B023, E501
"""Any damage to checkpoints, records, histories and configurations: what they said, or one error that names them."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

import pytest
import torch
from damage import contents, damages, dumped, fuzz, other_json, reading, refusal, tried
from hypothesis import strategies as st
from torch import nn

from narrowgauge.distributed import export_checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from narrowgauge.optim import AdamW


def made(seed: int) -> tuple[nn.Linear, AdamW]:
    torch.manual_seed(seed)
    model = nn.Linear(9, 7, dtype=torch.bfloat16)
    return model, AdamW(
        list(model.named_parameters()),
        lr=1e-2,
        weights="split8",
        states="log8",
        min_quantized_size=32,
        block_size=32,
    )


def trained(model: nn.Linear, optimizer: AdamW) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()


def words(model: nn.Linear, optimizer: AdamW) -> list[torch.Tensor]:
    found = [value.clone() for value in model.state_dict().values()]
    return found + [word.clone() for state in optimizer.state.values() for word in state.values()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints, of steps 1 and 2."""
    folder = tmp_path / "run"
    model, optimizer = made(0)
    for step in (1, 2):
        trained(model, optimizer)
        save_checkpoint(folder, model=model, optimizer=optimizer, step=step, extra={"at": step})
    return folder


@tried(12, 3000)
def test_a_damaged_checkpoint_is_what_was_saved_or_is_named(run: Path, tries: int) -> None:
    whole = contents(run)
    wanted = {}
    for path in sorted(run.glob("step-*")):
        wanted[path.name] = words(*loaded(path))

    def check(data: st.DataObject) -> None:
        done = data.draw(damages(run, whole))
        with warnings.catch_warnings(), reading(run):
            warnings.simplefilter("ignore")
            newest, why = refusal(lambda: latest_checkpoint(run))
        if newest is None:
            assert why is None or str(run) in why, done
        else:
            # It says that it is whole: then it is.
            assert all(map(torch.equal, words(*loaded(newest)), wanted[f"step-00000000{newest_step(newest)}"])), (
                done
            )
        for path in sorted(run.glob("*step-*")):
            model, optimizer = made(1)
            before = words(model, optimizer)
            with reading(run):
                found, why = refusal(lambda: load_checkpoint(path, model=model, optimizer=optimizer))
            if why is not None:
                assert path.name in why, done
                assert all(map(torch.equal, words(model, optimizer), before)), done
            else:
                step = f"step-00000000{found.step}"
                assert found.extra == {"at": found.step}
                assert all(map(torch.equal, words(model, optimizer), wanted[step])), done
            target = run.parent / "whole.pt"
            target.unlink(missing_ok=True)
            if refusal(lambda: export_checkpoint(path, target))[1] is None:
                assert why is None, done
                assert torch.load(target)["step"] == found.step
            else:
                assert why is not None, done
                assert not target.exists(), done
        assert [path.name for path in run.parent.iterdir() if path.name not in ("run", "whole.pt")] == []

    fuzz(tries, check)


@tried(80, 20000)
def test_any_other_value_in_a_manifest_loads_or_is_refused(run: Path, tries: int) -> None:
    """Anything anywhere, with a checksum that is right: sizes that it claims are no reason to take memory."""
    path = run / "step-000000002"
    text = (path / "checkpoint.json").read_bytes()
    loaded(path)

    def check(data: st.DataObject) -> None:
        said = data.draw(other_json(text))
        said.pop("sha256", None)
        digest = hashlib.sha256(dumped(said, sort_keys=True, separators=(",", ":"))).hexdigest()
        (path / "checkpoint.json").write_bytes(dumped({**said, "sha256": digest}))
        model, optimizer = made(1)
        before = words(model, optimizer)
        with warnings.catch_warnings(), reading(run):
            warnings.simplefilter("ignore")
            _, why = refusal(lambda: load_checkpoint(path, model=model, optimizer=optimizer))
        assert why is None or all(map(torch.equal, words(model, optimizer), before))
        target = run.parent / "whole.pt"
        target.unlink(missing_ok=True)
        refusal(lambda: export_checkpoint(path, target))

    fuzz(tries, check)


def newest_step(path: Path) -> int:
    return int(json.loads((path / "checkpoint.json").read_text())["step"])


def loaded(path: Path) -> tuple[nn.Linear, AdamW]:
    model, optimizer = made(1)
    load_checkpoint(path, model=model, optimizer=optimizer)
    return model, optimizer
