"""`narrowgauge train` as a user types it: what it leaves, what a kill costs, and what it says to bad input."""

import errno
import json
import os
import re
import signal
import sys
import time
import tomllib
from pathlib import Path

import pytest

from forked import Command
from narrowgauge.cli import main
from narrowgauge.gauges import read_records

pytestmark = pytest.mark.usefixtures("surroundings")

TINY = (
    "--model", "micro", "--vocabulary", "256", "--sequence", "16", "--batch", "2", "--validation-windows", "4",
    "--warmup", "2", "--lr", "0.01",
)  # fmt: skip


def train(*arguments: object) -> int:
    return main(["train", *map(str, arguments)])


def history(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[tuple]:
    keys = ("loss", "lr", "validation_loss", "bits_per_byte")
    return [
        (r["step"], *(r.get(key) for key in keys)) for r in history(out) if "loss" in r or "validation_loss" in r
    ]


def typed(out: Path, text: Path, *more: str) -> list[str]:
    return ["train", "--out", str(out), "--data", str(text), *TINY, *more]


def kill(process: Command, out: Path) -> None:
    """After its first checkpoint, in steps that have to be taken again."""
    deadline = time.monotonic() + 120
    while not list((out / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "model.safetensors").exists(), "it had ended before it was killed"
    assert list((out / "checkpoints").glob("step-*"))


def test_killed_in_the_middle_it_ends_as_if_it_had_not_been(text: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = (
        "--steps", "40", "--save-every", "7", "--validate-every", "10", "--gauges-every", "3", "--log-every", "1",
        "--scaler", "dynamic", "--stable-embedding", "--layer-scale", "0.5", "--accumulate", "2",
    )  # fmt: skip
    process, reference = (Command(typed(out, text, *options), tmp_path) for out in (killed, whole))
    kill(process, killed)
    resumed = Command(typed(killed, text, *options), tmp_path)
    told, complaints = resumed.communicate()
    assert resumed.returncode == 0
    assert "going on from" in told
    for said in (complaints, reference.communicate()[1]):
        # One line: what a run that clips has no records of.
        assert said.startswith(
            "no records of quantized moments: max_grad_norm makes each step depend on all gradients"
        )
        assert len(said.splitlines()) == 1
    assert losses(killed) == losses(whole)
    assert [step for step, loss, *_ in losses(whole) if loss is not None] == list(range(1, 41))
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


def test_the_file_of_a_run_repeats_it_and_flags_win(text: Path, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    options = ("--steps", 4, "--no-compile", "--layer-scale", 0.5, "--stable-embedding", "--linear", "switchback",
               "--hold-activations", "int8")  # fmt: skip
    assert train("--data", text, "--out", first, *TINY, *options) == 0
    written = tomllib.loads((first / "config.toml").read_text())
    assert written["steps"] == 4
    assert written["lr"] == 0.01
    assert written["layer-scale"] == 0.5
    assert written["stable-embedding"] is True
    assert written["linear"] == "switchback"
    assert written["hold-activations"] == "int8"
    assert train("--config", first / "config.toml", "--out", second) == 0
    assert losses(second) == losses(first)
    assert (second / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert tomllib.loads((second / "config.toml").read_text()) == written | {"out": str(second)}
    assert train("--config", first / "config.toml", "--out", third, "--no-stable-embedding", "--lr", 0.02) == 0
    changed = tomllib.loads((third / "config.toml").read_text())
    assert changed == written | {"out": str(third), "stable-embedding": False, "lr": 0.02}
    assert losses(third) != losses(first)


def test_a_run_that_has_ended_goes_on_to_more_steps(text: Path, tmp_path: Path, capsys) -> None:
    for steps in (3, 5):
        assert train("--data", text, "--out", tmp_path, *TINY, "--schedule", "constant", "--steps", steps) == 0
    assert train("--data", text, "--out", tmp_path / "whole", *TINY, "--schedule", "constant", "--steps", 5) == 0
    steps = {r["step"]: r["loss"] for r in history(tmp_path) if "loss" in r}
    assert steps == {r["step"]: r["loss"] for r in history(tmp_path / "whole") if "loss" in r}
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    # Asked for again, it takes no step, and says what it said.
    assert train("--data", text, "--out", tmp_path, *TINY, "--schedule", "constant", "--steps", 5) == 0
    # Its records are where `report` and `watch` look.
    assert main(["report", str(tmp_path)]) == 0
    assert "<svg" in (tmp_path / "gauges.html").read_text()
    assert main(["watch", "--once", str(tmp_path)]) == 0
    assert "step 5" in capsys.readouterr().out


REFUSED = {
    "a model there is not": (("--model", "gpt-5"), "--model must be one of micro"),
    "no number": (("--lr", "fast"), "--lr"),
    "no steps": (("--steps", "0"), "--steps must be an integer from 1"),
    "parts that do not divide": (("--accumulate", "3"), "--accumulate must be a divisor of --batch 2"),
    "autocast of bf16 weights": (
        ("--autocast", "fp16"),
        "--autocast must be none with --recipe adamw8b",
    ),
    "what the optimizer has not": (
        ("--recipe", "lion8bit", "--beta2-schedule", "0.8"),
        "--beta2-schedule must be left out with --recipe lion8bit, whose Lion has none, got 0.8",
    ),
    "a decay out of range": (("--beta2", "1.5"), "--beta2 must be a number from 0 to below 1"),
    "a text that is not there": (("--data", "nowhere.txt"), "--data must be a UTF-8 text file"),
    "a file that is not there": (("--config", "nowhere.toml"), "--config: nowhere.toml: No such file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_that_names_the_flag(case: str, text: Path, tmp_path: Path, capsys) -> None:
    arguments, says = REFUSED[case]
    assert train("--data", text, "--out", tmp_path / "out", *TINY, "--steps", 2, *arguments) == 2
    complaint = capsys.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1
    assert not (tmp_path / "out" / "checkpoints").exists()


FILES = {
    "an unknown key": ("stepz = 3", "a key must be one of data, out, model"),
    "a misspelled key": ("weight-decai = 0.1", "got 'weight-decai'; the nearest is 'weight-decay'"),
    "a key in both spellings": (
        "save-every = 1\nsave_every = 2",
        "save-every must be given once, got it as 'save_every'",
    ),
    "a number for a switch": ("compile = 1", "compile must be true or false"),
    "a value out of range": ("keep = 0", "--keep must be an integer from 1"),
    "no TOML": ("steps: 3", "config.toml"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_one_line_that_names_the_key(case: str, text: Path, tmp_path: Path, capsys) -> None:
    lines, says = FILES[case]
    (tmp_path / "config.toml").write_text(lines)
    assert train("--data", text, "--out", tmp_path / "out", "--config", tmp_path / "config.toml") == 2
    complaint = capsys.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1


def test_a_full_disk_is_a_line(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def full(*arguments: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("narrowgauge.trainers._run_folder.save_checkpoint", full)
    assert train("--data", text, "--out", tmp_path, *TINY, "--steps", 2) == 2
    told = capsys.readouterr().err
    assert f"--out {tmp_path}: No space left on device: make room, and the same command with --resume auto" in told
    monkeypatch.setattr("narrowgauge.trainers._tokens.write_whole", full)
    assert main(["tokens", "--data", str(text), "--vocabulary", "300", "--out", str(tmp_path / "tokens")]) == 2
    assert f"--out: cannot write '{tmp_path / 'tokens'}': No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "tokens").iterdir())


def test_a_run_is_not_continued_as_another_or_begun_over_one(text: Path, tmp_path: Path, capsys) -> None:
    assert train("--data", text, "--out", tmp_path, *TINY, "--steps", 3) == 0
    before = (tmp_path / "config.toml").read_bytes()
    other = tmp_path / "other.txt"
    other.write_text(text.read_text() + "x")
    for arguments, says in (
        (("--beta2", "0.9", "--steps", "4"), "--beta2 must be 0.95 to go on from"),
        (("--model", "mini", "--steps", "4"), "--model must be 'micro' to go on"),
        (("--layer-scale", "1"), "--layer-scale must be None to go on"),
        (("--data", other, "--steps", "4"), "--data must have the content that"),
        (("--steps", "2"), "--steps must be at least the 3 of"),
        (("--resume", "no"), "--resume must be auto where --out"),
    ):
        assert train("--data", text, "--out", tmp_path, *TINY, "--steps", 3, *arguments) == 2
        complaint = capsys.readouterr().err
        assert says in complaint
        assert complaint.count("\n") == 1
        assert (tmp_path / "config.toml").read_bytes() == before


def test_ctrl_c_saves_and_the_same_command_goes_on(text: Path, tmp_path: Path) -> None:
    options = ("--steps", "4000", "--log-every", "1", "--gauges-every", "0", "--validate-every", "0")
    process = Command(typed(tmp_path, text, *options), tmp_path)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (
        (tmp_path / "history.jsonl").exists() and len(history(tmp_path)) > 4
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate()
    assert process.returncode == 130, told
    assert "the same command goes on from there" in told
    last = max(record["step"] for record in history(tmp_path))
    assert (tmp_path / "checkpoints" / f"step-{last:09d}").is_dir()


def test_a_second_run_in_a_folder_is_refused_until_the_first_one_dies(text: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    often = ("--log-every", "1", "--gauges-every", "1", "--validate-every", "0")
    process = Command(typed(out, text, "--steps", "4000", *often), tmp_path)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not ((out / "history.jsonl").exists() and len(history(out)) > 4):
            time.sleep(0.02)
        assert main(typed(out, text, "--steps", "2")) == 2
        said = capsys.readouterr().err
        assert f"--out must be a folder that no other run writes into, got {out}, which process " in said
        assert said.count("\n") == 1
    finally:
        process.kill()
        process.communicate()
    lost = (out / "history.jsonl").read_text()
    assert main(typed(out, text, "--steps", "2")) == 0
    assert f"kept of an earlier run: {out}/history." in capsys.readouterr().out
    (earlier,) = out.glob("history.*Z.jsonl")
    assert earlier.read_text() == lost
    assert [record["step"] for record in history(out) if "loss" in record] == [1, 2]


def test_it_goes_on_when_nobody_reads_what_it_prints(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a pipe whose reader has gone, such as `| head -1`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        status = main(typed(tmp_path, text, "--steps", "20", "--log-every", "1"))
    assert status == 0
    assert capsys.readouterr().err == ""
    assert (tmp_path / "model.safetensors").exists()


def test_prepared_tokens_train(text: Path, tmp_path: Path, capsys) -> None:
    shards = tmp_path / "shards"
    assert main(["tokens", "--data", str(text), "--out", str(shards), "--vocabulary", "300", "--workers", "1"]) == 0
    assert "tokens, 2.99 bytes a token" in capsys.readouterr().out
    assert train("--data", shards, "--out", tmp_path / "out", *TINY[:2], *TINY[4:], "--steps", 3) == 0
    assert train("--data", text, "--out", tmp_path / "text", *TINY, "--vocabulary", 300, "--steps", 3) == 0
    same = [[r["loss"] for r in history(tmp_path / name) if "loss" in r] for name in ("out", "text")]
    assert same[0] == same[1]
    shard = shards / "train.tokens"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    assert train("--data", shards, "--out", tmp_path / "bad", *TINY[:2], *TINY[4:], "--steps", 3) == 2
    assert f"{shard} is damaged" in capsys.readouterr().err
    assert main(["tokens", "--data", str(text), "--learn-from", "0", "--out", str(shards)]) == 2
    assert "--learn-from must be an integer from 1" in capsys.readouterr().err
    assert main(["tokens", "--data", str(text), "--out", str(shards)]) == 2
    assert "has prepared tokens already" in capsys.readouterr().err
    assert main(["tokens", "--data", str(text), "--out", str(text / "shards")]) == 2
    says = f"narrowgauge: --out: cannot make the folder {text / 'shards'}: Not a directory\n"
    assert capsys.readouterr().err == says


def test_damaged_lines_are_counted_named_and_skipped(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [f"{n} bottles of beer on the wall.".encode() for n in range(200)]
    (folder / "good.txt").write_bytes(b"\n".join(lines))
    lines[3] = b"\xff\xfe broken"
    lines[90] = b"latin \xe9"
    (folder / "worse.txt").write_bytes(b"\n".join(lines))
    assert train("--data", folder, "--out", tmp_path / "out", *TINY, "--steps", 2) == 0
    assert "skipped lines that are not UTF-8: 2 (worse.txt:4, worse.txt:91)" in capsys.readouterr().out


def test_a_loss_that_is_never_finite_ends_the_run(text: Path, tmp_path: Path, capsys) -> None:
    arguments = ("--lr", "1e30", "--recipe", "fp32", "--warmup", "0", "--clip", "0", "--log-every", "5")
    assert train("--data", text, "--out", tmp_path, *TINY, "--steps", 50, *arguments) == 1
    says = r"narrowgauge: --lr 1e\+30: no loss was finite up to step \d+; take a lower one"
    assert re.search(f"{says}, or --clip\n", capsys.readouterr().err)
    assert train("--data", text, "--out", tmp_path, *TINY, "--steps", 50, *arguments, "--clip", 1) == 1
    assert re.search(f"{says}\n", capsys.readouterr().err)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:.*steps skipped")
def test_a_run_that_diverges_between_two_looks_keeps_its_good_checkpoints(
    text: Path, tmp_path: Path, capsys
) -> None:
    often = ("--recipe", "fp32", "--warmup", "0", "--clip", "0", "--log-every", "20", "--save-every", "2")
    assert train("--data", text, "--out", tmp_path, *TINY, "--steps", 2, *often, "--keep", 1) == 0
    assert train("--data", text, "--out", tmp_path, *TINY, "--steps", 20, *often, "--keep", 1, "--lr", "1e30") == 1
    assert "step 4: no checkpoint, as its loss is not finite" in capsys.readouterr().out
    assert [folder.name for folder in (tmp_path / "checkpoints").glob("step-*")] == ["step-000000002"]
    assert train("--data", text, "--out", tmp_path, *TINY, "--steps", 4, *often) == 0
