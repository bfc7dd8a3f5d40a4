"""The page of linear layers: what it says of results that were made up, and that the committed ones are on it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import _layers
import _layers_pictures
import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("linear_*.json"))
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


def cells(text: str) -> list[list[str]]:
    """Cells of the table rows."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]


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


def test_a_section_has_tables_and_says_what_is_missing() -> None:
    section = _layers.section(made_up(), "cpu")
    assert section.startswith(
        "## a CPU\n\n`narrowgauge bench linear --peers`: bf16, narrowgauge 1.2, torch 2.11.0."
    )
    assert re.findall(r"\((linear\w+\.png)\)", section) == ["linear_cpu.png", "linear_operations_cpu.png"]
    assert "- shapes 2048x128x128, torchao rowwise: ValueError: why" in section
    assert "CUDA graph" not in section
    rows = cells(section)
    assert ["SWITCHBACK int8", "512", "20 %", "20 %"] in rows
    assert ["SWITCHBACK int8", "4,096", "1.30", "1.30"] in rows
    assert ["SWITCHBACK_M int8", "1.01 B, 49 % less", "1.01 B, 49 % less", "0.00"] in rows
    assert ["nn.Linear", "2.00 B", "2.00 B", "0.00"] in rows
    assert ["SWITCHBACK int8", "41.0", "42.0", "55.6", "41.0", "42.0", "55.6"] in rows


def test_all_commands_are_told() -> None:
    results = made_up() | {"resumed": ["narrowgauge bench linear --resume"]}
    assert "`narrowgauge bench linear --peers` and `narrowgauge bench linear --resume`: " in _layers.origin(results)


def test_steps_of_clip_stand_beside_layers(tmp_path: Path) -> None:
    row = {
        "swapped": 144,
        "ms": 301.2,
        "speedup": 1.156,
        "ceiling": 1.25,
        "peak_bytes": 41.2e9,
        "warm_up_seconds": 31.4,
    }
    clip = {
        "command": "python benchmarks/bench_clip.py --compile",
        "models": {
            "vit-h-14": {"linear_share": 0.667, "rows": {"SWITCHBACK int8": row, "torchao x": {"failed": "w"}}},
            "vit-b-16": {
                "linear_share": 0.5,
                "rows": {"SWITCHBACK e4m3": row | {"graph_ms": 9, "graph_speedup": 2}},
            },
        },
    }
    (tmp_path / "linear_h200.json").write_text(json.dumps(made_up(gpu=True)))
    (tmp_path / "clip_h200.json").write_text(json.dumps(clip))
    row |= {"swapped": 0, "graph_swapped": 24}
    clip |= {
        "models": {
            "filtered": {"linear_share": 0.5, "rows": {"SWITCHBACK int8": row}, "settings": {"filter": True}}
        }
    }
    (tmp_path / "clip_filter_h200.json").write_text(json.dumps(clip))
    (tmp_path / "peers_linear_h200.json").write_text(json.dumps(made_up(gpu=True)))
    (tmp_path / "linear_cpu.json").write_text(json.dumps(made_up()))
    page = _layers.rendered("<!-- linear -->\nstale\n<!-- end -->\n", _layers.found(tmp_path))
    assert re.findall("^## (.*)", page, re.MULTILINE) == ["a GPU", "a CPU"]
    assert page.count("### A training step of CLIP") == 1
    assert ["vit-h-14", "SWITCHBACK int8", "144", "301", "1.16", "1.25", "41.2", "31 s"] in cells(page)
    assert ["vit-b-16", "SWITCHBACK e4m3", "144", "301", "1.16 (*2.00*)", "1.25", "41.2", "31 s"] in cells(page)
    assert ["filtered", "SWITCHBACK int8", "0 (*24*)", "301", "1.16", "1.25", "41.2", "31 s"] in cells(page)
    assert page.count("### Beside other libraries") == page.count("With the filter") == 1
    assert "In brackets: the device's work alone" in " ".join(page.split())
    assert "vit-h-14 67 %, vit-b-16 50 % of the step" in " ".join(page.split())
    assert page.count("1.16 to 1.16 is what the host's launches make of the same step") == 1
    assert "stale" not in page
    assert _layers.rendered(page, _layers.found(tmp_path)) == page


@pytest.mark.parametrize("gpu", [False, True])
def test_pictures_are_drawn(gpu: bool, tmp_path: Path) -> None:
    for name, draw in zip(
        _layers.pictures("x"), (_layers_pictures.draw_speed, _layers_pictures.draw_operations), strict=True
    ):
        draw(made_up(gpu), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_pictures_are_drawn_of_part_of_the_sections(tmp_path: Path) -> None:
    results = made_up()
    del results["grid"]
    for draw in (_layers_pictures.draw_speed, _layers_pictures.draw_operations):
        draw(results, tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_say_where_they_come_from(path: Path) -> None:
    results = json.loads(path.read_text())
    assert results["command"].startswith("narrowgauge bench linear ")
    assert {"device", "torch", "narrowgauge"} <= results["environment"].keys()
    assert not re.search(r'"[^"]*(/home|/root|/tmp|/work|[A-Z]:\\)', path.read_text())
    page = (ROOT / "docs" / "which_linear.md").read_text()
    assert f"## {results['environment']['device']}\n" in page


def test_there_are_committed_results() -> None:
    assert "linear_cpu" in [path.stem for path in RESULTS]
