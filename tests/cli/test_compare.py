"""The main job as a user types it, on a small text: what it writes, and what it says to bad input."""

import contextlib
import io
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fitted_recipes import GPT, choice, fitted
from forked import Command
from narrowgauge import __version__
from narrowgauge.cli import main
from narrowgauge.trainers import _compare, build_model, prepare_tokens
from narrowgauge.trainers._parallel import ALONE
from narrowgauge.trainers._run_folder import locked

pytestmark = pytest.mark.usefixtures("surroundings")

SMALL = ("--steps", "4", "--batch", "2", "--sequence", "16", "--vocabulary", "256", "--validation-windows", "4")


@pytest.fixture
def unread_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page is drawn in tests that read the results only; drawing takes as long as training."""
    monkeypatch.setattr("narrowgauge.cli._compare.write_report", lambda results, path: None)


def compare(*arguments: object) -> int:
    return main(["compare", *map(str, arguments)])


def test_every_recipe_runs_side_by_side(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from narrowgauge import recipes

    out = tmp_path / "out"
    every = ",".join(recipes.names())
    assert compare("--out", out, "--data", text, "--recipes", every, *SMALL, "--steps", 3) == 0
    results = json.loads((out / "results.json").read_text())
    assert list(results["recipes"]) == list(recipes.names())
    assert results["reference"] == "master"
    assert results["interrupted"] is False
    assert results["settings"]["lr"] == 1e-4
    starts = set()
    for name, row in results["recipes"].items():
        assert row["bytes_per_parameter"] == recipes.get(name).bytes_per_parameter()
        assert row["bytes"]["measured"]["weights"] == row["bytes"]["planned"]["weights"]
        assert row["bytes"]["measured"]["gradients"] == row["bytes"]["planned"]["gradients"]
        # Small tensors keep fp32 states, and each tensor a step count and a counter.
        assert row["bytes"]["measured"]["total"] == pytest.approx(row["bytes_per_parameter"], abs=0.15)
        assert 4 < row["validation_loss"] < 6
        assert row["peak_memory_bytes"] > 0
        assert [seed["seed"] for seed in row["seeds"]] == [0]
        assert all(len(seed["history"]["loss"]) == 3 for seed in row["seeds"])
        starts.add((row["bytes"]["planned"]["weights"], row["seeds"][0]["history"]["loss"][0]))
    # Same weights, same batch: only the format of the forward pass may tell the first losses apart.
    assert len(starts) == 2
    printed = capsys.readouterr().out
    assert all(name in printed for name in recipes.names())
    page = (out / "report.html").read_text()
    assert page.count("<svg") >= 5
    assert "adamw8bit-split8" in page


def test_files_of_fitted_recipes_are_compared_by_their_names(text: Path, tmp_path: Path) -> None:
    one = GPT.save(tmp_path / "a" / "recipe.toml")
    two = replace(GPT, layers=()).save(tmp_path / "b" / "recipe.toml")
    names = f"D,{one},{two}@lr=3e-4,betas=0.9/0.99"
    assert compare("--out", tmp_path, "--data", text, "--recipes", names, *SMALL, "--steps", 3) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["recipes"]
    assert list(rows) == ["D", "a/recipe.toml", "b/recipe.toml@lr=3e-4,betas=0.9/0.99"]
    assert [row["recipe"] for row in rows.values()] == ["master", "by-hand", "by-hand"]
    assert rows["a/recipe.toml"]["bytes_per_parameter"] == pytest.approx(GPT.bytes_per_parameter())
    assert list(_compare.named_recipes([str(one), str(two)])) == ["a/recipe.toml", "b/recipe.toml"]
    assert list(_compare.named_recipes([str(one), GPT.with_settings(lr=0.1)])) == [
        "recipe.toml",
        "by-hand@lr=0.1",
    ]


def test_gauges_change_nothing_and_a_second_comparison_keeps_the_first(text: Path, tmp_path: Path) -> None:
    losses = []
    for every in (1, 0):
        arguments = ("--out", tmp_path / "out", "--data", text, "--recipes", "A,C", "--gauge-every", every)
        assert compare(*arguments, *SMALL) == 0
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        losses.append([row["seeds"][0]["history"]["loss"] for row in results["recipes"].values()])
        assert (results["recipes"]["A"]["edq"] is None) == (every == 0)
        assert results["reference"] == "A"  # no master, no fp32: the first
    assert losses[0] == losses[1]
    assert len(list((tmp_path / "out").glob("results*.json"))) == 2


@pytest.mark.usefixtures("unread_page")
def test_plain_bf16_loses_updates_that_the_others_keep(text: Path, tmp_path: Path) -> None:
    names = "A,B,C,D,D-MW,split8"
    assert (
        compare("--out", tmp_path, "--data", text, "--recipes", names, "--lr", "1e-5", "--warmup", 0, *SMALL) == 0
    )
    rows = json.loads((tmp_path / "results.json").read_text())["recipes"]
    for name in ("A", "D-MW"):
        assert rows[name]["lost_updates"] > 0.7
        assert rows[name]["edq"] < 0.7
    for name in ("B", "C", "D", "split8"):
        assert rows[name]["lost_updates"] < 0.05
        assert rows[name]["edq"] == pytest.approx(1, abs=0.02)
        assert rows[name]["lost_visible_updates"] > 0.7


@pytest.mark.usefixtures("unread_page")
def test_strict_arithmetic_is_honoured_where_there_is_one(text: Path, tmp_path: Path) -> None:
    losses = {}
    for arithmetic in ("fp32", "strict"):
        out = tmp_path / arithmetic
        assert (
            compare("--out", out, "--data", text, "--recipes", "C,split", "--arithmetic", arithmetic, *SMALL) == 0
        )
        rows = json.loads((out / "results.json").read_text())["recipes"]
        losses[arithmetic] = {name: row["validation_loss"] for name, row in rows.items()}
        assert [rows[name]["arithmetic"] for name in ("C", "split")] == [arithmetic, "fp32"]
    assert losses["fp32"]["C"] != losses["strict"]["C"]
    notes = json.loads((out / "results.json").read_text())["notes"]
    assert notes == ["split has no strict arithmetic: it was computed in fp32."]
    assert losses["fp32"]["split"] == losses["strict"]["split"]


def test_a_recipe_that_diverges_is_reported_and_the_others_go_on(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diverging = "A@lr=1e38,weight_decay=0"
    assert compare("--out", tmp_path, "--data", text, "--recipes", f"{diverging},D", *SMALL) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    rows = results["recipes"]
    assert set(rows) == {diverging, "D"}
    assert rows[diverging]["settings"] == {"lr": 1e38, "weight_decay": 0}
    assert rows[diverging]["diverged"] is True
    assert rows[diverging]["validation_loss"] is None
    assert 4 < rows["D"]["validation_loss"] < 6
    assert f"{diverging}, seed 0: diverged at step" in capsys.readouterr().out
    assert "diverged" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("unread_page")
def test_the_text_is_read_as_train_reads_it_and_what_is_left_out_is_said(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "one.txt").write_bytes(text.read_bytes() + b"caf\xe9\n")
    (data / "other.bin").write_bytes(bytes(9))
    few = (*SMALL, "--validation-windows", "1000", "--steps", "2")
    assert compare("--out", tmp_path, "--data", data, "--recipes", "D", *few) == 0
    said = capsys.readouterr().out
    assert "skipped lines that are not UTF-8: 1 (one.txt:401)" in said
    assert "skipped files: 1 binary" in said
    assert "windows; --validation-windows is 1000" in said
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["data"]["bytes"] == len(text.read_bytes())
    assert len(results["data"]["notes"]) == 3


@pytest.mark.parametrize("full", ["write_results", "write_report"])
def test_the_table_is_shown_where_the_disk_is_full(
    full: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*arguments: object) -> None:
        raise OSError(28, "No space left on device", "file")

    monkeypatch.setattr(f"narrowgauge.cli._compare.{full}", write)
    assert compare("--out", tmp_path, "--data", text, "--recipes", "A,D", *SMALL, "--steps", 2) == 2
    printed = capsys.readouterr()
    assert "(reference)" in printed.out
    ends = {
        "write_results": "only the table above is left",
        "write_report": f"narrowgauge report {tmp_path} makes it",
    }
    assert printed.err.startswith("narrowgauge: [Errno 28] No space left on device: 'file'; ")
    assert printed.err.strip().endswith(ends[full])


def test_a_recipe_that_was_fitted_to_another_model_is_refused_before_any_training(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for name, _ in build_model("micro", vocabulary=256, sequence=16, seed=0).named_parameters()]
    path = fitted(choice(*names, elements=9_000, chosen=GPT.choices[0].chosen)).save(tmp_path / "recipe.toml")
    options = ("--out", tmp_path, "--data", text, "--recipes", f"D,{path}", *SMALL, "--steps", 2)
    assert compare(*options, "--model", "llama-micro") == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("narrowgauge: choices must name parameters of the model")
    assert printed.err.count("\n") == 1
    assert "seed 0" not in printed.out
    assert compare(*options) == 0


@pytest.mark.usefixtures("unread_page")
def test_threads_are_those_asked_for_and_given_back(text: Path, tmp_path: Path) -> None:
    # One step: two threads beside those of other tests wait for one another.
    arguments = ("--recipes", "A", "--threads", 2, "--steps", 1)
    assert compare("--out", tmp_path, "--data", text, *SMALL, *arguments) == 0
    assert json.loads((tmp_path / "results.json").read_text())["environment"]["threads"] == "2"
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("unread_page")
def test_what_does_not_fit_into_memory_is_said_and_what_is_finished_stays(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = _compare.train, []

    def train(*arguments, **options):
        calls.append(arguments)
        if len(calls) > 1:
            torch.empty(2**46, dtype=torch.float64)  # half a petabyte: the allocator's own error
        return real(*arguments, **options)

    monkeypatch.setattr(_compare, "train", train)
    assert compare("--out", tmp_path, "--data", text, "--recipes", "A,D", *SMALL) == 2
    assert "--batch 2, --sequence 16: out of memory" in capsys.readouterr().err
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["recipes"]) == ["A"]
    assert results["interrupted"] is True
    assert results["command"].startswith("narrowgauge compare --out")


def prepare(folder: Path) -> None:
    """What the bad inputs refer to as FOLDER."""
    empty, binary, short, blocked = (folder / name for name in ("empty.txt", "binary.bin", "short.txt", "blocked"))
    empty.write_text("")
    binary.write_bytes(bytes(range(256)) * 10)
    short.write_text("too short")
    blocked.write_text("a file where a folder is wanted")
    prepare_tokens(short, folder / "tokens", vocabulary=256, workers=1)


BAD = {
    "binary data": (["--data", "FOLDER/binary.bin"], "binary.bin"),
    "short data": (["--data", "FOLDER/short.txt"], "tokens"),
    "prepared tokens": (["--data", "FOLDER/tokens"], "--data must be the text itself for compare, got prepared"),
    "unknown recipe": (["--recipes", "A,E"], "recipe must be one of fp32, bf16 (A)"),
    "no recipe": (["--recipes", ","], "--recipes must name one or more"),
    "a recipe twice": (
        ["--recipes", "A,bf16"],
        "--recipes must name each recipe once, got A and bf16, which are the same",
    ),
    "a near name": (["--recipes", "adamw-8bit"], "got 'adamw-8bit'; the nearest is 'adamw8bit'"),
    "a setting of no use": (
        ["--recipes", "lion8bit@eps=1e-8"],
        "settings of recipe 'lion8bit' must be among lr, betas",
    ),
    "a setting that is refused": (["--recipes", "A,D@lr=-1,eps=0"], "least 0 (recipe D@lr=-1,eps=0)"),
    "no threads": (["--threads", "0"], "--threads must be an integer of at least 1, got 0"),
    "unknown model": (["--model", "gpt5"], "--model must be one of micro"),
    "no steps": (["--steps", "0"], "--steps must be an integer of at least 1, got 0"),
    "short sequence": (["--sequence", "1"], "--sequence must be an integer of at least 2, got 1"),
    "bad beta": (["--beta2", "1"], "Invalid beta parameter at index 1: 1.0"),
    "no such device": (["--device", "cuda:77"], "--device must be one of this machine's"),
    "unwritable folder": (["--out", "FOLDER/blocked/runs"], "--out: cannot"),
    "no such user": (["--data", "~nosuchuser/x"], "nosuchuser"),
    "vast vocabulary": (
        ["--vocabulary", "5000000000"],
        "--vocabulary must be an integer of at most",
    ),
    "vast seed": (
        ["--seed", "4294967295", "--seeds", "2"],
        "--seed must leave all seeds below 2^32, got 4294967295 with --seeds 2",
    ),
    "unknown option": (["--recipies", "A"], "--recipies"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_and_status_2(
    case: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    arguments, words = BAD[case]
    arguments = [argument.replace("FOLDER", str(tmp_path)) for argument in arguments]
    defaults = ["--data", text, "--out", tmp_path / "out"]
    assert compare(*defaults, *SMALL, *arguments) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.startswith("narrowgauge: ")
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err + printed.out
    assert not (tmp_path / "out" / "results.json").exists()


def test_a_second_comparison_in_a_folder_is_refused_while_the_first_one_runs(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path, ALONE):
        assert compare("--data", text, "--out", tmp_path, "--steps", 1) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--out must be a folder that no other run writes into" in said


def test_several_processes_are_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert compare("--data", text, "--out", tmp_path / "out", *SMALL) == 2
    wanted = "narrowgauge: compare: got WORLD_SIZE=2, runs in one process; start it without torchrun\n"
    assert capsys.readouterr().err == wanted
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("unread_page")
def test_seeds_differ_recipes_of_one_share_their_batches_and_a_narrow_table_has_whole_numbers(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, seen = _compare.train, []

    def train(recipe, model, loss, batches, settings, **options):
        taken = [next(batches) for _ in range(settings.steps)]
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
        seen.append((options["seed"], weights, torch.stack(taken), torch.cat(list(options["validation"]))))
        return real(recipe, model, loss, iter(taken), settings, **options)

    monkeypatch.setattr(_compare, "train", train)
    monkeypatch.setenv("COLUMNS", "80")
    assert (
        compare("--out", tmp_path, "--data", text, "--recipes", "A,D,fp32", "--seeds", 2, *SMALL, "--steps", 3) == 0
    )
    printed = capsys.readouterr().out
    assert "…" not in printed
    for row in json.loads((tmp_path / "results.json").read_text())["recipes"].values():
        assert f"{row['validation_loss']:.4f}" in printed
        assert f"{row['peak_memory_bytes'] / 2**20:.1f}" in printed
    assert [seed for seed, *_ in seen] == [0, 0, 0, 1, 1, 1]
    for first in (0, 3):
        for other in (first + 1, first + 2):
            assert all(torch.equal(a, b) for a, b in zip(seen[first][1:], seen[other][1:], strict=True))
    assert not torch.equal(seen[0][1], seen[3][1])
    assert not torch.equal(seen[0][2], seen[3][2])
    assert torch.equal(seen[0][3], seen[3][3])


@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_terminal_that_takes_nothing_or_only_ascii_costs_no_result(
    text: Path, tmp_path: Path, ascii_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = os.open(os.devnull if ascii_only else "/dev/full", os.O_WRONLY)
    stream = io.TextIOWrapper(os.fdopen(sink, "wb"), encoding="ascii" if ascii_only else "utf-8", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    status = compare("--out", tmp_path, "--data", text, *SMALL, "--recipes", "A,D")
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        stream.close()
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results["recipes"]) == ["A", "D"]
    assert results["interrupted"] is False
    assert (tmp_path / "report.html").exists()
    assert status == 0


def test_help_and_version_answer(capsys: pytest.CaptureFixture[str]) -> None:
    for words, status, says in (
        (["--version"], 0, __version__),
        (["compare", "--help"], 0, "adamw8bit-dynamic-split8"),  # no name is cut off
        ([], 0, "compare"),
        (["conquer"], 2, "conquer"),
    ):
        assert main(words) == status
        printed = capsys.readouterr()
        assert says in printed.out + printed.err


def test_ctrl_c_keeps_the_recipes_that_are_finished(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["compare", "--out", str(out), "--data", str(text), *SMALL, "--recipes", "A,D"]
    # The first recipe is short of work; the seeds after it never end within the test.
    process = Command([*command, "--seeds", "100000"], tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not (out / "results.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    results = json.loads((out / "results.json").read_text())
    assert results["interrupted"] is True
    assert results["stopped"] is True
    assert results["recipes"]["A"]["validation_loss"] > 0
    assert "Interrupted" in printed
    assert "interrupted" in (out / "report.html").read_text().lower()
