"""`narrowgauge train` as a user types it: what it leaves, what a kill costs, and what it says to bad input."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

from narrowgauge.cli import main
from narrowgauge.gauges import read_records

TINY = (
    "--model", "micro", "--vocabulary", "256", "--sequence", "16", "--batch", "2", "--validation-windows", "4",
    "--warmup", "2", "--lr", "0.01",
)  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall, {n} bottles of beer.\n" for n in range(400)))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


def train(*arguments: object) -> int:
    return main(["train", *map(str, arguments)])


def history(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[tuple]:
    keys = ("loss", "lr", "validation_loss", "bits_per_byte")
    return [(r["step"], *(r.get(key) for key in keys)) for r in history(out) if "loss" in r or "validation_loss" in r]


def started(out: Path, text: Path, *more: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "narrowgauge.cli", "train", "--out", str(out), "--data", str(text), *TINY, *more]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_in_the_middle_it_ends_as_if_it_had_not_been(text: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = (
        "--steps", "60", "--save-every", "7", "--validate-every", "10", "--gauges-every", "3", "--log-every", "1",
        "--scaler", "dynamic", "--stable-embedding", "--layer-scale", "0.5", "--accumulate", "2",
    )  # fmt: skip
    process, reference = started(killed, text, *options), started(whole, text, *options)
    deadline = time.monotonic() + 120
    while not list((killed / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # beyond the checkpoint, into steps that have to be taken again
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (killed / "model.safetensors").exists(), "it had ended before it was killed"
    saved = sorted((killed / "checkpoints").glob("step-*"))
    assert saved
    resumed = started(killed, text, *options)
    told, complaints = resumed.communicate()
    assert (resumed.returncode, complaints) == (0, "")
    assert "going on from" in told
    assert reference.communicate()[1] == ""
    assert losses(killed) == losses(whole)
    assert [step for step, loss, *_ in losses(whole) if loss is not None] == list(range(1, 61))
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    records = [[without_times(r) for r in read_records(out / "gauges.jsonl")] for out in (killed, whole)]
    assert records[0] == records[1]
    generates(killed)


def without_times(record: dict) -> dict:
    return {key: value for key, value in record.items() if key not in ("seconds", "started", "time")}


def generates(out: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    model, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told.values())
    prompt = tokenizer("99 bottles", return_tensors="pt")
    said = model.generate(prompt.input_ids, attention_mask=prompt.attention_mask, max_new_tokens=5, do_sample=False)
    assert said.shape == (1, 15)
    assert tokenizer.decode(said[0]).startswith("99 bottles")
