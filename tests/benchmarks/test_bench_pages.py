"""The pages of docs: committed results are on them as they say, and what results that were made up look like."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _layers
import _layers_pictures
import _small_tables
import _steps
import _whole_steps
import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "results"
RESULTS = sorted([*FOLDER.glob("linear_*.json"), *FOLDER.glob("optimizers_*.json")])
PAGES: dict[str, Callable[[str, Path], str]] = {
    "speed.md": lambda text, folder: _steps.rendered(text, _steps.found(folder)),
    "which_linear.md": lambda text, folder: _layers.rendered(text, _layers.found(folder)),
    **{
        page: lambda text, folder, page=page: _small_tables.rendered(text, page, folder)
        for page, _, _ in _small_tables.TABLES.values()
    },
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_drawn_from_the_committed_results(page: str, tmp_path: Path) -> None:
    text, render = (ROOT / "docs" / page).read_text(), PAGES[page]
    empty = render(text, tmp_path)
    assert len(empty) < len(text)
    assert render(empty, FOLDER) == text
    assert render(text, FOLDER) == text


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_say_where_they_come_from(path: Path) -> None:
    results = json.loads(path.read_text())
    assert results["command"].startswith("narrowgauge bench ")
    assert {"device", "torch", "narrowgauge"} <= results["environment"].keys()
    assert not re.search(r'"[^"]*(/home|/root|/tmp|/work|[A-Z]:\\)', path.read_text())
    for of in results.get("lists", {}).values():
        for row in of["rows"].values():
            assert "failed" in row or row["ms_per_1e9"] == pytest.approx(row["ms"] * 1e9 / of["parameters"])


def cells(text: str) -> list[list[str]]:
    """Cells of the table rows."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]


FIGURES = {
    "what": "bf16", "group": "AdamW", "ms": 1.21, "steps": 40, "ms_per_1e9": 1210.0, "state_bytes": 2.03125,
    "moved_bytes": 10.0625, "limit_ms": 0.6, "share": 0.4959, "first_step_seconds": 0.126,
}  # fmt: skip
ON_GPU = {"host_ms": 0.1234, "peak_extra_bytes": 4.0}


def steps_made_up(device: str, lists: tuple[str, ...], **figures: Any) -> dict[str, Any]:
    """Results of three optimizers, one of which fails."""
    rows = {
        "AdamW 8bit": {**FIGURES, "of": "narrowgauge", **figures},
        "torch AdamW fused, fp32": {**FIGURES, "of": "torch", **figures, "share": 1.5, "ms_per_1e9": 99.94},
        "torchao AdamW4bit": {**FIGURES, "of": "torchao", **figures, "share": 0.02, "group": "another"},
        "FlashAdamW": {"what": "24 bits", "of": "flashoptim", "group": "another", "failed": "ValueError: why"},
    }
    return {
        "command": "narrowgauge bench optimizers --peers",
        "environment": {"narrowgauge": "1.2", "torch": "2.11.0", "device": device, "torchao": "0.18.0"},
        "copy_bytes_per_second": 4.2712e12 if "host_ms" in figures else 2.5e10,
        "lists": {
            name: {"title": f"list {name}", "tensors": 3, "parameters": 1_000_000, "rows": rows} for name in lists
        },
    }


def test_steps_on_a_cpu_and_on_a_gpu() -> None:
    section = _steps.section(steps_made_up("2-core CPU", ("matrix",)), "speed_cpu.png")
    assert "- FlashAdamW: ValueError: why" in section
    head, _, *rows = cells(section)
    assert head == ["optimizer", "state B", "moved B", "ms", "ms / 10⁹", "of limit", "first step"]
    assert rows[0] == ["*AdamW*", *[""] * 6]
    assert rows[1] == ["**AdamW 8bit**<br>bf16", "2.03", "10.06", "1.21", "1,210", "49.6 %", "0.13 s"]
    results = steps_made_up("a GPU", ("big",), **ON_GPU, device_ms=0.9876)
    next(iter(results["lists"]["big"]["rows"].values()))["device_ms"] = None
    head, _, _, first, second, *_ = cells(_steps.section(results, "speed_gpu.png"))
    at = head.index("device ms")
    assert (first[at], second[at]) == ("–", "0.988")
    assert first[head.index("extra B")] == "4.00"


def test_a_picture_is_described_by_what_is_in_it() -> None:
    results = steps_made_up("a GPU", ("big",))
    assert _steps.alternative(results).endswith("a GPU: ours, torch's and other libraries'")
    rows = results["lists"]["big"]["rows"]
    del rows["torchao AdamW4bit"], rows["FlashAdamW"]
    assert _steps.alternative(results).endswith("a GPU: ours and torch's")
    del rows["torch AdamW fused, fp32"]
    assert _steps.alternative(results).endswith("a GPU: ours")


ABOUT = {
    "nn.Linear": ("torch", 0), "SWITCHBACK int8": ("narrowgauge", 2), "SWITCHBACK_M int8": ("narrowgauge", 2),
    "TENSORWISE_FP8 e4m3": ("narrowgauge", 3), "HIGH_PRECISION": ("narrowgauge", 0),
    "torchao rowwise": ("torchao", 3),
}  # fmt: skip
SPEEDS = {"nn.Linear": 1.0, "SWITCHBACK int8": 1.3, "SWITCHBACK_M int8": 1.25, "TENSORWISE_FP8 e4m3": 1.6,
          "HIGH_PRECISION": 1.9, "torchao rowwise": 2.0}  # fmt: skip
SAVED = {"SWITCHBACK_M int8": 0.494, "TENSORWISE_FP8 e4m3": 0.5}
NOISE = {"SWITCHBACK int8": 41.0, "SWITCHBACK_M int8": 40.0, "TENSORWISE_FP8 e4m3": 28.5, "HIGH_PRECISION": 55.0}


def rows_of(of: dict[str, float], key: str) -> dict[str, dict[str, Any]]:
    return {name: {key: of.get(name, 0.0)} for name in ABOUT if not name.startswith("torchao")}


def made_up(gpu: bool = False, slower: float = 1.0) -> dict[str, Any]:
    """Results of two shapes, the second 0.1 slower in everything; `slower` divides all speed-ups."""
    shapes: dict[str, Any] = {}
    for i, shape in enumerate(("1024x128x512", "2048x128x128")):
        rows: dict[str, dict[str, Any]] = {}
        for name, speed in SPEEDS.items():
            speedup = 1.0 if name == "nn.Linear" else (speed - 0.1 * i) / slower
            rows[name] = {"ms": 2.0 / speedup, "speedup": speedup}
            if gpu:  # the host is in the way of the first two
                bound = name.startswith("SWITCHBACK")
                rows[name] |= {"host_ms": 0.25, "graph_ms": 2.0 / speedup / (2 if bound else 1)}
                rows[name]["graph_speedup"] = speedup * (2 if bound else 1)
        rows["torchao rowwise"] = {"failed": "ValueError: why"} if i else rows["torchao rowwise"]
        shapes[shape] = rows
    memory = {
        name: {"bytes_per_token_feature": 2 - 2 * SAVED.get(name, 0.0), "bytes_per_weight": 0.0,
               "saving": SAVED.get(name, 0.0)}
        for name in ABOUT
    }  # fmt: skip
    noise = {
        name: {"output": NOISE.get(name, 55.6), "grad_input": NOISE.get(name, 55.6) + 1, "grad_weight": 55.6}
        for name in ABOUT
    }
    operations = {
        name: {"operations": {"output": 1.0, "quantize X": 0.25, "zeros": 0.01}, "ms": 1.26, "quantize_share": 0.2}
        for name in ABOUT
    }
    grid = {f"{tokens}x{dim}": rows_of(SPEEDS, "speedup") for tokens in (512, 4096) for dim in (128, 1280)}
    device = "a GPU" if gpu else "a CPU"
    return {
        "command": "narrowgauge bench linear --peers",
        "environment": {"narrowgauge": "1.2", "torch": "2.11.0", "python": "3.12", "device": device},
        "dtype": "bf16",
        "layers": {name: {"of": of, "what": "what", "eight_bits": eight} for name, (of, eight) in ABOUT.items()},
        "shapes": shapes,
        "memory": dict.fromkeys(("an MLP", _layers.BLOCK), memory),
        "noise": {"normal": noise, "outliers": noise},
        "operations": {f"512x{dim}": operations for dim in (128, 1280)},
        "grid": grid,
    }  # fmt: skip


def test_the_answers_follow_from_the_numbers() -> None:
    answers = {row[0]: row[1:] for row in cells(_layers.answers(made_up()))}
    assert answers["speed, weight gradient not in eight bits"] == [
        "**SWITCHBACK int8**", "1.20 to 1.30 times as fast as `nn.Linear`",
    ]  # fmt: skip
    # Neither the plan in high precision nor a peer's, though they are faster.
    assert answers["speed, all in eight bits"][0] == "**TENSORWISE_FP8 e4m3**"
    assert answers["memory, weight gradient not in eight bits"] == [
        "**SWITCHBACK_M int8**", f"49 % less held for tokens by {_layers.BLOCK}",
    ]  # fmt: skip
    assert answers["least noise, normal"] == ["**SWITCHBACK int8**", "41.0 dB at its worst"]
    slow = {row[0]: row[1:] for row in cells(_layers.answers(made_up(slower=4.0)))}
    assert slow["speed, all in eight bits"][1] == (
        "0.38 to 0.40 times as fast as `nn.Linear`: stay with that where time is all that counts"
    )


def test_answers_are_of_what_was_measured() -> None:
    results = made_up()
    for missing in ("memory", "noise"):
        del results[missing]
    assert len(cells(_layers.answers(results))) == 2 + 2
    assert "### Noise" not in _layers.section(results, "cpu")


def _speed_rows(results: dict[str, Any]) -> list[list[str]]:
    return cells(_layers.speed_table(results["shapes"], results["layers"]))


def test_speeds_on_a_gpu_tell_the_host_from_the_device() -> None:
    table = {row[0].partition("<br>")[0]: row[1:] for row in _speed_rows(made_up(gpu=True))}
    assert table["**SWITCHBACK int8**"] == ["1.30 (*2.60*)", "1.20 (*2.40*)", "0.250"]
    assert table["**TENSORWISE_FP8 e4m3**"] == ["1.60", "1.50", "0.250"]
    assert table["nn.Linear"] == ["2.00 ms", "2.00 ms", "0.250"]
    assert table["torchao rowwise"] == ["2.00", "–", "0.250"]
    answers = {row[0]: row[1:] for row in cells(_layers.answers(made_up(gpu=True)))}
    assert answers["speed, weight gradient not in eight bits"][1].startswith("2.40 to 2.60 times")


def test_layers_that_failed_are_named_and_all_commands_told() -> None:
    section = _layers.section(made_up() | {"resumed": ["narrowgauge bench linear --resume"]}, "cpu")
    assert (
        "`narrowgauge bench linear --peers` and `narrowgauge bench linear --resume`: bf16, narrowgauge" in section
    )
    assert "- shapes 2048x128x128, torchao rowwise: ValueError: why" in section
    assert "CUDA graph" not in section


def test_steps_of_clip_with_and_without_a_filter() -> None:
    row = {"swapped": 144, "ms": 301.2, "speedup": 1.156, "ceiling": 1.25, "warm_up_seconds": 31.4}
    graphed = row | {"peak_bytes": 41.2e9, "graph_ms": 9, "graph_speedup": 2}
    left = row | {"swapped": 0, "graph_swapped": 24}
    clip = {
        "command": "python benchmarks/bench_clip.py --compile",
        "models": {
            "vit-h-14": {"linear_share": 0.667, "rows": {"int8": graphed, "torchao x": {"failed": "w"}}},
            "vit-b-16": {"linear_share": 0.5, "rows": {"int8": left}, "settings": {"filter": True}},
        },
    }
    drawn = _whole_steps.clip_table(clip)
    assert cells(drawn)[2:] == [
        ["vit-h-14", "int8", "144", "301", "1.16 (*2.00*)", "1.25", "41.2", "31 s"],
        ["vit-b-16", "int8", "0 (*24*)", "301", "1.16", "1.25", "–", "31 s"],
    ]
    assert "vit-h-14 67 %, vit-b-16 50 % of the step" in drawn
    assert "1.16 to 1.16 is what the host's launches make of the same step" in drawn
    # Replayed steps say nothing of what multiplies take.
    replayed = clip | {"layers": {"INT8": "two"}, "environment": {"device": "a GPU"}}
    replayed["models"] = {"vit-h-14": {"rows": {"INT8": {k: v for k, v in row.items() if k != "ceiling"}}}}
    section = _layers.section({"graphs_clip": replayed}, "h100")
    assert cells(section)[2:] == [["vit-h-14", "**INT8**", "144", "301", "1.16", "–", "31 s"]]
    assert "share" not in section
    assert 'With `mode="reduce-overhead"`, which' in section
    assert cells(_whole_steps.opening({"h100": {"graphs_clip": replayed}}))[2:] == [
        ["a GPU", "vit-h-14", "–", "–", "1.16 (INT8)"]
    ]
    bare = replayed | {"command": "python benchmarks/bench_clip.py --compile --no-checkpointing"}
    assert "Without gradient checkpoints." in _layers.section({"cpp_clip": bare}, "h100")
    assert "Without gradient checkpoints." not in section


def test_steps_of_language_models() -> None:
    """The fastest at a peer's noise is another than the fastest; failed sides are named, and not in the table."""
    swapped = {"layer": "TENSORWISE_FP8 e4m3", "ms": 100.0, "speedup": 1.4, "speedup_range": [1.37, 1.42],
               "tokens_per_second": 81920.0, "device_ms": 80.0, "peak_bytes": 40e9}  # fmt: skip
    rows = {
        "nn.Linear": swapped | {"layer": "nn.Linear", "ms": 140.0, "device_ms": 139.0, "speedup": 1.0},
        "SWITCHBACK int8": swapped | {"layer": "SWITCHBACK int8", "speedup": 1.2},
        "TENSORWISE_FP8 e4m3": swapped,
        "torchao rowwise": swapped | {"layer": "torchao rowwise", "speedup": 1.25},
        "SWITCHBACK int8, torch AdamW fused": swapped | {"layer": "SWITCHBACK int8", "speedup": 9.0},
        "torchao blockwise": {"failed": "AssertionError: unsupported", "layer": "torchao blockwise"},
    }
    sizes = {"blocks": 16, "whole": 32, "width": 4096, "hidden": 14336, "heads": 32, "kv_heads": 8,
             "vocabulary": 32000, "tokens": 8192, "compile": "blocks"}  # fmt: skip
    noise = {"nn.Linear": 55.0, "SWITCHBACK int8": 40.0, "TENSORWISE_FP8 e4m3": 28.5}
    decibels = rows_of(noise, "output") | {"torchao rowwise": {"output": 31.04}}
    curve = {"mean_of": 30, "steps": 300, "blocks": 4}
    results = made_up(gpu=True) | {
        "models": {"llama-8b": {"settings": sizes, "parameters": 3.5e9, "rows": rows}},
        "noise": {"llama-8b": {"normal": decibels, "outliers": decibels}},
        "curves": {"llama-8b": {"nn.Linear": curve | {"end": 3.25}, "SWITCHBACK int8": curve | {"end": 3.2512},
                                "nn.Linear, other weights": curve | {"end": 3.24}}},
    }  # fmt: skip
    opened = _whole_steps.opening({"h100": {"language": results, "cpp_language": results}, "cpu": {}})
    assert cells(opened)[2:] == [["a GPU", "llama-8b", "1.40 (TENSORWISE_FP8)", "1.40 (TENSORWISE_FP8)", "–"]]
    section = _layers.section({"language": results}, "h100")
    assert "16 of its 32 blocks (each compiled), width 4,096" in section
    assert "- llama-8b, torchao blockwise: AssertionError: unsupported" in section
    answer, *table = cells(section)[2:]
    assert answer == [
        "llama-8b", "**TENSORWISE_FP8 e4m3** 1.40 at 28.5 dB", "torchao rowwise 1.25 at 31.0 dB",
        "**SWITCHBACK int8** 1.20 at 40.0 dB, -4 %",
    ]  # fmt: skip
    drawn = {row[0]: row[1:] for row in table}
    assert drawn["nn.Linear"][-1] == "3.2500"
    assert drawn["nn.Linear, other weights"] == ["–"] * 6 + ["-0.0100"]
    assert drawn["**SWITCHBACK int8**"] == [
        "100", "1.20 (1.37–1.42)", "81,920", "*80.0*", "40.0", "40.0 / 40.0", "+0.0012",
    ]  # fmt: skip
    assert drawn["torchao rowwise"][-2:] == ["31.0 / 31.0", "–"]
    assert "torchao blockwise" not in drawn
    # With graphs, and without noise and the losses of other weights, which a difference is compared with.
    bare = results | {"noise": {}, "curves": {"llama-8b": {"nn.Linear": curve | {"end": 3.25}}}}
    assert 'With `mode="reduce-overhead"`, which' in _layers.section({"graphs_language": bare}, "h100")
    cut = bare | {"command": "python x.py --models llama-8b,gpt2"}
    assert "- gpt2: the run ended before" in _layers.section({"graphs_language": cut}, "h100")
    assert "ended before" not in _layers.section({"graphs_language": bare}, "h100")
    answer, *table = cells(_layers.section({"language": bare}, "h100"))[2:]
    assert answer == ["llama-8b", "**TENSORWISE_FP8 e4m3** 1.40", "torchao rowwise 1.25", "–"]
    assert {row[0]: row[1:] for row in table}["nn.Linear"] == [
        "140",
        "1.00 (1.37–1.42)",
        "81,920",
        "139",
        "40.0",
        "–",
    ]


def test_pictures_are_drawn(tmp_path: Path) -> None:
    """Of a GPU, of a CPU, and of part of the sections."""
    part = {key: of for key, of in made_up().items() if key != "grid"}
    for results in (made_up(gpu=True), made_up(), part):
        for draw in (_layers_pictures.draw_speed, _layers_pictures.draw_operations):
            draw(results, tmp_path / "x.png")
            assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    _steps.draw(steps_made_up("a GPU", ("matrix",), **ON_GPU), tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_rows_that_failed_are_in_the_small_tables() -> None:
    row = {"model": "tiny", "recipe": "D", "batch": 2, "sequence": 8, "linear": "", "checkpointing": True}
    good = {**row, "planned": 1.01e9, "measured": 1e9, "ratio": 1.01}
    bad = {**row, "linear": "SWITCHBACK", "checkpointing": False, "error": "RuntimeError: no memory"}
    about = {"device": "a GPU", "torch": "2.11.0+cu130", "command": "python bench.py"}
    lines = _small_tables.memory({**about, "rows": [good, bad]}).splitlines()
    assert lines[2] == "| tiny | `D` | 2 x 8 | bf16 | yes | 1.01 | 1.00 | 1.010 |"
    assert lines[3] == "| tiny | `D` | 2 x 8 | SWITCHBACK |  | RuntimeError: no memory |  |  |"
    assert lines[-1] == "1 of 2 measured, none further off than 1.0 %. `python bench.py`; a GPU, torch 2.11.0."
    peer = {"ms": 860.4, "step_ms": 758.6, "gpu_peak_bytes": 27.3e9}
    rows = {"peer": peer, "absent": {"failed": "not installed"}}
    large = {"parameters": 6.7e9, "backward_ms": 1.0, "rows": rows}
    found = {"environment": about, "command": "x", "cores": 32, "threads": 24, "lists": {"7b": large}}
    assert cells(_small_tables.offload(found))[2:] == [
        ["peer", "860 ms", "759 ms", "27.3 GB", ""], ["absent", "not installed", "", "", ""],
    ]  # fmt: skip
