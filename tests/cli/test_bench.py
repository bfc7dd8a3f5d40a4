"""`narrowgauge bench optimizers`: what it measures, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.cli import main
from narrowgauge.cli._bench import _optimizers, _rows, _timing
from narrowgauge.cli._bench._optimizers import measure
from narrowgauge.cli._bench._rows import Row, parameter_list

CPU = torch.device("cpu")


def bench(*arguments: Any) -> int:
    return main(["bench", "optimizers", "--device", "cpu", "--seconds", "0.001", *map(str, arguments)])


@pytest.fixture(autouse=True)
def small_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of a copy that stays in the cache: no time for it here."""
    monkeypatch.setattr(_timing, "_CPU_COPY", 1 << 20)


def row(name: str, device: str = "cpu") -> Row:
    return next(found for found in _rows.rows(torch.device(device)) if found.name == name)


def test_a_table_and_a_results_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "b.json"
    assert (
        bench(
            "--lists", "64x64,3", "--only", "bit-split8,fused", "--json", out, "--figure", out.with_suffix(".svg")
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "recipe adamw8bit-split8" in printed
    assert "torch AdamW fused, bf16" in printed
    assert "GB/s" in printed
    assert max(len(line) for line in printed.splitlines() if str(tmp_path) not in line) <= 80
    results = json.loads(out.read_text())
    assert results["command"].startswith("narrowgauge bench optimizers --device cpu")
    assert results["copy_bytes_per_second"] > 0
    assert results["environment"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert "bitsandbytes" not in results["environment"]
    assert results["lists"].keys() == {"64x64", "3"}
    square = results["lists"]["64x64"]
    assert (square["tensors"], square["parameters"]) == (1, 4096)
    for figures in square["rows"].values():
        assert figures["steps"] >= 5
        assert figures["ms_per_1e9"] == pytest.approx(figures["ms"] * 1e9 / 4096)
        assert figures["share"] == pytest.approx(figures["limit_ms"] / figures["ms"])
        assert figures["first_step_seconds"] > 0
        assert figures["group"]
        assert "host_ms" not in figures  # on a CPU it would be `ms` again
    assert sorted(path.name for path in out.parent.iterdir()) == ["b.json", "b.svg"]


# What a step has to move, bytes a parameter, by hand: parameter and state twice, the gradient once. Read again is
# the gradient where it must be finite, the gradient and v for update clipping, and everything for LAMB's norms.
MOVED = {
    "AdamW 8bit": 10.0625, "AdamW 8bit, skip": 12.0625, "AdamW 8bit, split8": 12.0625, "AdamW 8bit, split": 14.0625,
    "AdamW 8bit, split8, skip": 14.0625, "AdamW 8bit, split, skip": 16.0625, "AdamW 8bit, expansion": 14.0625,
    "AdamW log8, skip": 12.0625, "AdamW log8": 10.0625, "AdamW log8, split8": 12.0625, "AdamW fp8": 10.0625,
    "AdamW log8, fp8split8": 10.0625,
    "recipe adamw8bit-split8": 14.0625, "Collage-light": 18, "Collage-plus": 22, "AdamW bf16": 14,
    "AdamW fp32 states": 22, "AdamW fp32": 28, "torch AdamW fused, fp32": 28, "torch AdamW fused, bf16": 14,
    "StableAdamW 8bit": 10.0625 + 2 + 1.015625, "StableAdamW bf16": 14 + 2 + 2, "StableAdamW fp32": 28 + 4 + 4,
    "LAMB log8": 10.0625 + 2 + 2 + 2.03125, "SGD 8bit": 8.03125, "SGD log8": 8.0625, "Lion 8bit": 8.03125,
    "Lion log8": 8.0625,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of the peers
@pytest.mark.parametrize(
    ("device", "found"),
    [
        pytest.param(kind, found, id=f"{kind}-{found.name}", marks=marks)
        for kind in ("cpu", "cuda")
        for number, found in enumerate(_rows.rows(torch.device(kind)))
        for marks in [pytest.mark.gpu if kind == "cuda" else pytest.mark.slow if number % 3 else ()]
    ],
)
def test_every_row_steps_and_moves_its_bytes(device: str, found: Row) -> None:
    if not _rows.installed_version(found.family):
        pytest.skip(reason=f"needs {found.family}, which is not installed")
    if found.family in ("torchao", "heavyball"):
        pytest.skip(reason=f"takes minutes to compile: {found.name}")
    figures = measure(found, parameter_list("256x256"), torch.device(device), 1e9, 1e-3)
    if found.moments is not None and "failed" in figures:
        pytest.skip(reason=f"this torch has no such kernel: {figures['failed']}")
    assert figures.get("ms", 0) > 0, figures
    if found.name in MOVED and device == "cpu":
        assert figures["moved_bytes"] == pytest.approx(MOVED[found.name], abs=1e-3)  # counters are a few bytes
        assert figures["limit_ms"] == pytest.approx(1e3 * MOVED[found.name] * 65536 / 1e9, rel=1e-3)


def test_a_row_is_known_by_its_name() -> None:
    names = [found.name for found in _rows.rows(torch.device("cuda"))]
    assert len(set(names)) == len(names)
    assert {found.name for found in _rows.rows(CPU)} <= set(names)
    assert all(found.group for found in _rows.rows(torch.device("cuda")))
    assert set(MOVED) <= set(names)


class Machine:
    """A host and a device, and the seconds that a step keeps each, in place of torch's and Python's clocks.

    Args:
        host, device: seconds of a step.
        launched: how far into the host's seconds the launch is, as a share.
    """

    def __init__(self, host: float, device: float, launched: float) -> None:
        self.now = self.free = 0.0
        self.host, self.device, self.launched, self.steps = host, device, launched, 0

    def step(self) -> None:
        self.now += self.launched * self.host
        self.free = max(self.free, self.now) + self.device
        self.now += (1 - self.launched) * self.host
        self.steps += 1

    def synchronize(self, device: object = None) -> None:
        self.now = max(self.now, self.free)

    def event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=0.0)

        def record(stream: object) -> None:
            event.at = max(self.free, self.now)

        event.record, event.elapsed_time = record, lambda later: 1e3 * (later.at - event.at)
        event.query = lambda: event.at <= self.now
        return event

    def sleep(self, cycles: int) -> None:
        self.free = max(self.free, self.now) + cycles / 1.7e9


@given(st.floats(1e-5, 2e-3), st.floats(1e-5, 2e-3), st.floats(0, 1))
def test_a_step_on_a_gpu_costs_what_the_slower_of_host_and_device_takes(
    host: float, device: float, launched: float
) -> None:
    machine = Machine(host, device, launched)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_timing, "time", SimpleNamespace(perf_counter=lambda: machine.now))
        patch.setattr(torch.cuda, "Event", machine.event)
        patch.setattr(torch.cuda, "synchronize", machine.synchronize)
        patch.setattr(torch.cuda, "current_stream", lambda device: None)
        patch.setattr(torch.cuda, "_sleep", machine.sleep)
        times = _timing.time_steps(machine.step, torch.device("cuda"), seconds=0.3)
    assert times.seconds == pytest.approx(max(host, device), rel=1e-9)
    assert times.host_seconds == pytest.approx(host, rel=1e-9)
    assert times.device_seconds == pytest.approx(device, rel=1e-9)  # whichever is the slower
    assert 50 <= times.steps <= machine.steps
    assert times.steps * max(host, device) >= min(0.25, 5000 * max(host, device))  # long runs


def test_a_step_whose_launches_the_device_does_not_wait_for_has_no_time_of_its_own() -> None:
    machine = Machine(host=1e-3, device=1e-3, launched=0.0)
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in (("Event", machine.event), ("synchronize", machine.synchronize)):
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.cuda, "current_stream", lambda device: None)
        patch.setattr(torch.cuda, "_sleep", lambda cycles: None)  # as where the queue is full
        assert _timing.timed_queued(machine.step, 1e-3, torch.device("cuda")) is None


def test_what_fails_is_a_result_of_its_own(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    broken = Row("broken", "nothing", torch.float32, "torch.optim", "AdamW", {"lr": -1.0})
    monkeypatch.setattr("narrowgauge.cli._bench._optimizers.rows", lambda device: (broken, row("AdamW fp32")))
    assert bench("--lists", "8x8") == 1
    printed = capsys.readouterr().out
    assert "ValueError: Invalid learning rate" in printed
    assert "AdamW fp32" in printed


def test_the_lists_are_the_models() -> None:
    counts = {name: parameter_list(name).counts() for name in _rows.LISTS}
    assert counts["big"] == {"tensors": 16, "parameters": 2**30}
    assert counts["gpt2"]["parameters"] == 124_439_808
    assert counts["gpt2-medium"] == {"tensors": 292, "parameters": 354_823_168}
    assert counts["vit-huge"]["parameters"] == pytest.approx(631e6, rel=0.01)
    assert parameter_list("5x6x7").counts() == {"tensors": 1, "parameters": 210}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lists", ","], "--lists must be big, matrix, many-64, many-768, gpt2,"),
        (["--lists", "8x8,8xe"], "--lists must be big, matrix"),
        (["--lists", "0x5"], "--lists must be big, matrix"),
        (["--only", "nothing"], "--only must be parts of AdamW 8bit; AdamW 8bit, skip;"),
        (["--only", "bitsandbytes"], "--only must name rows that run here, got 'bitsandbytes': give --peers too"),
        (["--device", "mps"], "--device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'mps'"),
        (["--seconds", "inf"], "--seconds must be a finite number above 0, got inf"),
        (["--json", "/dev/null/b.json"], "--json: cannot write '/dev/null/b.json': "),
        (["--json", "/dev"], "--json: cannot write '/dev': it is a folder"),
        (["--figure", "b.txt"], "--figure must end in .svg, .png, .pdf, got 'b.txt'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"narrowgauge: {message}")


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    """Packages that are not installed, and peers that all others are."""
    versions = {family: None if family in missing else "1.0" for family in {row.family for row in _rows._ROWS}}
    monkeypatch.setattr(_optimizers, "installed_version", versions.__getitem__)


OTHERS = ("bitsandbytes", "torchao", "optimi", "flashoptim", "heavyball")


@pytest.mark.parametrize(
    ("missing", "arguments", "status", "says"),
    [
        (
            OTHERS[:2],
            ["--lists", "8x8", "--only", "adamw fp32,adamw8bit"],
            0,
            "Not installed: bitsandbytes, torchao.",
        ),
        (OTHERS, ["--lists", "8x8"], 2, "--peers: none is installed of bitsandbytes, torchao, optimi"),
        (
            OTHERS[1:2],
            ["--only", "torchao"],
            2,
            "--only must name rows that run here, got 'torchao': torchao is not installed",
        ),
    ],
)
def test_peers_that_are_not_installed_are_named(
    missing: tuple[str, ...], arguments: list[str], status: int, says: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: Path,
) -> None:  # fmt: skip
    versions = {family: None if family in missing else "1.0" for family in {row.family for row in _rows._ROWS}}
    monkeypatch.setattr(_optimizers, "installed_version", versions.__getitem__)
    assert bench("--peers", "--json", tmp_path / "b.json", *arguments) == status
    printed = capsys.readouterr()
    assert says in printed.out + printed.err
    if status == 0:
        rows = json.loads((tmp_path / "b.json").read_text())["lists"]["8x8"]["rows"]
        assert rows.keys() >= {"recipe adamw8bit-split8", "AdamW fp32"}
        assert not [name for name, found in rows.items() if found["of"] in missing]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = torch.device("cuda")
    speed = _timing.copy_speed(device)
    figures = measure(row("torch AdamW fused, fp32", "cuda"), parameter_list("4096x4096"), device, speed, 0.1)
    assert speed > 1e11
    assert 0.01 < figures["share"] < 1.5
    assert 0 < figures["host_ms"] < 1e3 * figures["first_step_seconds"]
    assert figures["limit_ms"] / 1.5 < figures["device_ms"] < 1.2 * figures["ms"]
    assert figures["steps"] >= 50
    assert 0 <= figures["peak_extra_bytes"] < 8
