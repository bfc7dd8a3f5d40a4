# ruff: noqa: E501
"""Any damage to a model's folder: a plan or a model of it, or one error that names it; and no code of its own runs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from damage import contents, damages, dumped, fuzz, other_json, put, reading, refusal, tried
from hypothesis import strategies as st

from narrowgauge.cli._plan import find_model
from narrowgauge.recipes import plan_memory
from narrowgauge.trainers import build_model, configuration, load_model

NAMED = ("MODEL", "model_or_config", "sequence", "model", "loss")
FAMILIES = ("micro", "llama-micro")


def planned(folder: Path) -> int:
    model = find_model(str(folder), None, 16, None)
    return plan_memory(model, "master", batch=1, sequence=16).peak


@pytest.mark.parametrize("family", FAMILIES)
@tried(12, 1500)
def test_a_configuration_is_planned_or_named(family: str, tmp_path: Path, tries: int) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(configuration(family, vocabulary=300, sequence=16).to_json_string())
    whole, peak = contents(folder), planned(folder)

    def check(data: st.DataObject) -> None:
        done: object
        if data.draw(st.integers(0, 3)):
            put(folder, whole)
            done = data.draw(other_json(whole["config.json"]))
            config.write_bytes(dumped(done))
        else:
            done = data.draw(damages(folder, whole))
        with warnings.catch_warnings(), reading(folder):
            warnings.simplefilter("ignore")
            found, why = refusal(lambda: planned(folder))
        assert found is None or found > 0
        assert why is None or why.replace(":", " ").partition(" ")[0] in NAMED, (done, why)

    fuzz(tries, check)
    assert peak > 0


@tried(12, 1500)
def test_a_trained_model_is_loaded_or_named(tmp_path: Path, tries: int) -> None:
    folder = tmp_path / "model"
    build_model("micro", vocabulary=256, sequence=4, seed=0).save_pretrained(folder)
    whole = contents(folder)
    wanted = load_model(folder).state_dict()

    def check(data: st.DataObject) -> None:
        done = data.draw(damages(folder, whole).filter(lambda d: d.kind != "pipe"))
        with warnings.catch_warnings(), reading(folder):
            warnings.simplefilter("ignore")
            found, why = refusal(lambda: load_model(folder))
        assert why is None or (why.startswith("folder must be ") and str(folder) in why), (done, why)
        if found is not None and done.name == "generation_config.json":
            assert all(torch.equal(value, wanted[name]) for name, value in found.state_dict().items()), done

    fuzz(tries, check)


def test_nobodys_code_runs(tmp_path: Path) -> None:
    """A configuration may name code beside it; transformers would ask whether to run it."""
    mark = tmp_path / "mark"
    folder = tmp_path / "model"
    build_model("micro", vocabulary=256, sequence=4, seed=0).save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    said |= {
        "model_type": "theirs",
        "auto_map": {"AutoConfig": "theirs.Theirs", "AutoModelForCausalLM": "theirs.M"},
    }
    (folder / "theirs.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    for architectures in (["AutoModelForCausalLM"], ["GPT2LMHeadModel"], ["pipeline"], ["torch"], [3]):
        (folder / "config.json").write_text(json.dumps(said | {"architectures": architectures}))
        for read in (planned, load_model):
            with reading(folder):
                _, why = refusal(lambda read=read: read(folder))
            assert why is not None or architectures == ["GPT2LMHeadModel"]
    assert not mark.exists()


def test_a_pickle_of_weights_is_not_opened(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = build_model("micro", vocabulary=256, sequence=4, seed=0)
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with reading(folder), pytest.raises(ValueError, match=f"folder must be .*, got {folder}"):
        load_model(folder)
