"""The documentation is true where a machine can tell: its code runs, its tables are those of the program."""

import importlib
import json
import math
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import typer

import narrowgauge.formats._codebooks as registry
from narrowgauge import formats, optim, recipes, storage
from narrowgauge.cli import main
from narrowgauge.cli._app import app
from narrowgauge.recipes import Recipe, _book
from narrowgauge.storage import _states
from narrowgauge.trainers import presets

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def rows(page: str, section: str | None = None) -> list[list[str]]:
    """Cells of all table rows of a page, or of its part under a heading of the second level."""
    text = (ROOT / "docs" / page).read_text()
    if section is not None:
        (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    lines = text.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def results(name: str) -> dict:
    """The committed results of a benchmark."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def prose(page: str, end: str = "\0") -> str:
    """The text of a page up to a mark, on one line."""
    return " ".join((ROOT / page).read_text().partition(end)[0].split())


def options(*command: str) -> dict:
    """The options of a command with their defaults."""
    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]  # type: ignore[attr-defined]
    return {p.opts[0]: p.default for p in found.params if p.name not in ("help", "name")}


def as_listed(option: str, default: object) -> str:
    """A default as the tables of options write it."""
    if option == "--data":
        return "Python's standard library"
    if isinstance(default, float):
        return f"{default:g}"
    return {"None": "none", "False": "off"}.get(str(default), str(default))


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_MAPS", dict(registry._MAPS))  # what a page registers is gone after it
    monkeypatch.setattr(_states, "_STORAGES", dict(_states._STORAGES))
    monkeypatch.setattr(_book, "_REGISTERED", dict(_book._REGISTERED))
    torch.manual_seed(0)
    space: dict = {}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), space)


def test_links_lead_to_files_and_on_the_site_to_pages_of_the_site() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        top = ROOT / "docs" if ROOT / "docs" in page.parents else ROOT
        prose = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose):
            found = (page.parent / target).resolve()
            assert found.exists(), f"{page.relative_to(ROOT)}: {target}"
            assert top in (found, *found.parents), f"{page.relative_to(ROOT)}: {target}"


def test_the_axes_on_the_front_page_are_the_programs() -> None:
    axes = {cells[0]: re.findall(r"`(\w+)`", cells[1]) for cells in rows("index.md")}
    named = [name for name in optim.__all__ if isinstance(getattr(optim, name), type)]
    kinds = {name for name in named if issubclass(getattr(optim, name), optim.NarrowOptimizer)}
    rules = {name for name in kinds if "8bit" not in name} - {"NarrowOptimizer", "CollageAdamW"}
    assert set(axes["[rule](rules.md)"]) == rules
    assert tuple(axes["[weight storage](weights.md)"]) == storage.weight_storages()
    assert tuple(axes["[state storage](states.md), per moment"]) == storage.state_storages()
    listed = {cells[0].strip("`") for cells in rows("rules.md") if len(cells) == 4 and cells[0].startswith("`")}
    assert listed == rules
    bytes_of = {match[1]: cells[3] for cells in rows("states.md") if (match := re.match(r"\[`(\w+)`]", cells[0]))}
    assert tuple(bytes_of) == storage.state_storages()
    for name, cell in bytes_of.items():
        assert float(cell) == pytest.approx(
            Recipe("", "", torch.float32, states=name).byte_breakdown()["states"], rel=5e-3
        )


def test_the_extras_and_versions_of_the_install_section_are_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = {cells[0].strip("`") for cells in rows("start.md", "Install")[2:]} - {"(none)"}
    assert listed == project["optional-dependencies"].keys()
    for text in (prose("docs/start.md"), prose("README.md")):
        assert "Python 3.11 to 3.13" in text
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "torch>=2.11,<2.15" in project["dependencies"]
    assert "torch 2.11 to 2.14" in prose("docs/start.md")


def test_the_choice_of_a_recipe_is_that_of_the_committed_results() -> None:
    def study(name: str) -> dict:
        (path,) = (ROOT / "studies").rglob(name)
        return json.loads(path.read_text())

    lost = study("bytes_and_loss_h100.json")
    losses: dict[str, dict[int, float]] = {}
    for run in lost["runs"]:
        losses.setdefault(run["row"], {})[run["seed"]] = run["validation_loss"]
    timed = study("collage_throughput_h200.json")["runs"]
    measured = {run["row"]: run for run in timed if run["kind"] == "GPT-6.7B"}
    rows_of = {
        "adamw8bit-split8": ("split8 + log8", "adamw8bit-split8"), "collage-plus": ("C", "C"),
        "collage-light": ("B", "B"), "master": ("D", "D"), "bf16": ("A", "A"),
    }  # fmt: skip

    def difference(row: str) -> str:
        found = [loss - losses["D"][seed] for seed, loss in losses[row].items()]
        assert len(found) == 3
        return f"{sum(found) / len(found):+.4f}"

    table = {cells[1].strip("`"): cells[2:] for cells in rows("start.md") if len(cells) == 6 and "`" in cells[1]}
    assert list(table) == list(rows_of)
    for recipe, (loss, step) in rows_of.items():
        run = measured[step]
        assert table[recipe] == [
            f"{recipes.get(recipe).bytes_per_parameter():.2f}".removesuffix(".00"),
            "–" if loss == "D" else difference(loss),
            f"{run['optimizer_ms']:.1f} ms",
            f"{run['peak_memory'] / 1e9:.0f} GB",
        ]
    text = prose("docs/start.md")
    assert f"torch's fused fp32 AdamW takes {measured['torch fused, fp32']['optimizer_ms']:.1f} ms" in text


def test_the_recipe_table_is_the_programs() -> None:
    table = {cells[0].strip("`"): cells for cells in rows("recipes.md") if len(cells) == 6 and cells[0][0] == "`"}
    assert tuple(table) == recipes.names()
    for name, cells in table.items():
        recipe = recipes.get(name)
        assert cells[1] == (recipe.letters or "")
        states = recipe.states
        listed = states if isinstance(states, str) else ", ".join(map(" ".join, states.items()))
        assert [cell.replace("`", "") for cell in cells[3:5]] == [recipe.weights, listed]
        assert cells[5] == f"{recipe.bytes_per_parameter():.2f}".removesuffix(".00")


def test_the_option_tables_are_the_programs() -> None:
    listed = {}
    for cells in rows("compare.md"):
        names = re.findall(r"`(--[\w-]+)`", cells[0])
        defaults = cells[1].split(", ") if len(names) > 1 else [cells[1].strip("`")]
        listed |= dict(zip(names, defaults, strict=False))
    assert {name: _plain(text) for name, text in listed.items()} == {
        name: as_listed(name, default) for name, default in options("compare").items()
    }
    table = {cells[0].strip("`"): cells for cells in rows("train.md") if cells[0].startswith("`--")}
    assert {name: _plain(cells[1].strip("`")) for name, cells in table.items()} == {
        name: as_listed(name, default) for name, default in options("train").items()
    }
    assert list(table) == list(options("train"))
    assert tuple(re.findall(r"`([\w-]+)`", table["--model"][2])) == presets(None)


def _plain(text: str) -> str:
    """A number as Python writes it shortest, anything else as it is."""
    try:
        return f"{float(text):g}" if "." in text or "e" in text else text
    except ValueError:
        return text


def test_the_presets_are_listed() -> None:
    (cells,) = [cells for cells in rows("compare.md") if "`--model`" in cells[0]]
    assert tuple(re.findall(r"`([\w-]+)`", cells[2])) == presets()


SHOWN = re.compile(r"^```\n\$ narrowgauge formats(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


@pytest.mark.parametrize("shown", SHOWN.findall((ROOT / "docs" / "formats.md").read_text()), ids=lambda s: s[0])
def test_the_output_shown_is_the_programs(
    shown: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    arguments, text = shown
    assert main(["formats", *shlex.split(arguments)]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()) + "\n"
    first, *parts = text.split("[...]\n")
    assert printed.startswith(first)
    for part in parts:
        assert part in printed
    assert printed.endswith(parts[-1] if parts else first)


def test_the_format_table_is_the_programs() -> None:
    known = {name: fmt for name, fmt in vars(formats).items() if isinstance(fmt, formats.FloatFormat)}
    table = {cells[0].strip("`"): cells[1:] for cells in rows("formats.md") if len(cells) == 8 and "`" in cells[0]}
    assert table.keys() == known.keys()
    for name, fmt in known.items():
        exponent, mantissa, largest, *powers, overflow = table[name]
        assert (int(exponent), int(mantissa), float(largest)) == (
            fmt.exponent_bits, fmt.mantissa_bits, pytest.approx(fmt.max, rel=1e-8)
        )  # fmt: skip
        ulp = fmt.ulp(torch.tensor([1.0, fmt.max], dtype=torch.float64)).tolist()
        assert [_number(text) for text in powers] == [fmt.min_normal, fmt.min_subnormal, ulp[0]]
        if fmt.has_infinity:
            assert float(overflow.removeprefix("infinity from ")) == pytest.approx(fmt.max + ulp[1] / 2, rel=1e-8)
        else:
            assert overflow == f"{fmt.max:g} for all above it"


def _number(text: str) -> float:
    return math.ldexp(1.0, int(text[2:])) if text.startswith("2^") else 1 / float(text.removeprefix("1/"))


def test_the_options_of_formats_are_listed() -> None:
    listed = [re.findall(r"`(--[\w-]+)", cells[0]) for cells in rows("formats.md")]
    assert {option for found in listed for option in found} == set(options("formats"))


BENCHES = {"optimizers": "An optimizer's step", "linear": "Timing linear layers"}


@pytest.mark.parametrize("command", BENCHES)
def test_the_options_of_the_benchmarks_are_listed(command: str) -> None:
    known = options("bench", command)
    listed = {cells[0]: cells[1] for cells in rows("bench.md", BENCHES[command]) if "`--" in cells[0]}
    assert [name.strip("`") for name in listed] == list(known)
    for name, default in known.items():
        if default not in (None, False):
            assert listed[f"`{name}`"].strip("`") == str(default), name


def test_the_keys_of_the_benchmarks_results_are_listed() -> None:
    lists = [of for device in ("cpu", "h200") for of in results(f"optimizers_{device}")["lists"].values()]
    known = {key for of in lists for row in of["rows"].values() for key in row}
    table = [cells for cells in rows("bench.md", BENCHES["optimizers"]) if len(cells) == 2]
    listed = [key for cells in table for key in re.findall(r"`(\w+)`", cells[0])]
    assert len(listed) == len(set(listed))
    assert set(listed) == known | {"failed"}


def test_the_keys_and_sections_of_layers_results_are_listed() -> None:
    layers = results("linear_cpu")
    sections = ("shapes", "memory", "noise", "operations", "grid")
    table = [cells for cells in rows("bench.md", BENCHES["linear"]) if len(cells) == 2]
    listed = [key for cells in table for key in re.findall(r"`(\w+)`", cells[0])]
    known = {key for name in sections for of in layers[name].values() for row in of.values() for key in row}
    on_gpu = {"host_ms", "graph_ms", "graph_speedup"}
    assert set(listed) == known | {*sections} | on_gpu | {"failed"}


def test_the_readmes_times_are_those_of_the_committed_results() -> None:
    ms = {
        name: row["ms"] for name, row in results("optimizers_cpu")["lists"]["matrix"]["rows"].items() if "ms" in row
    }
    fused = ms["torch AdamW fused, fp32"]
    ours, bitsandbytes, torchao = (
        ms[name] / fused for name in ("recipe adamw8bit-split8", "bitsandbytes AdamW8bit", "torchao AdamW8bit")
    )
    text = prose("README.md")
    bf16 = ms["AdamW bf16"] / ms["torch AdamW fused, bf16"]
    assert f"AdamW in bf16 takes {bf16:.2f} of the time of torch's fused AdamW in bf16" in text
    assert f"takes {ours:.1f} times as long as torch's fused fp32 step there" in text
    assert f"bitsandbytes' {bitsandbytes:.0f} times, torchao's {torchao:.0f} times" in text


def speedups(name: str, model: str) -> dict[str, str]:
    rows = results(name)["models"][model]["rows"]
    return {side: f"{row['speedup']:.2f}" for side, row in rows.items() if "speedup" in row}


def test_the_readmes_speed_ups_of_linear_layers_are_those_of_the_committed_results() -> None:
    fast, careful, peer = "TENSORWISE_FP8 e4m3", "SWITCHBACK e4m3", "torchao tensorwise"
    large = speedups("language_h200", "llama-8b")
    python, cpp = (speedups(name, "llama-1b") for name in ("language_h200", "cpp_language_h200"))
    assert max((side for side in large if "torchao" in side), key=lambda side: float(large[side])) == peer
    for graphs in (False, True):
        file = "graphs_language_h200" if graphs else "cpp_language_h200"
        assert (float(speedups(file, "gpt2-large")[fast]) > 1) is graphs
    noise = results("language_h200")["noise"]["llama-8b"]["normal"]
    louder = min(noise[fast].values()) - min(noise[peer].values())
    text = prose("README.md")
    for said in (
        f"{large[fast]} times as fast with tensor-wise float8 as with `nn.Linear`, and {large[careful]} times with",
        f"float8 is {large[peer]} times as fast, with {louder:.0f} dB more noise",
        f"torchao's is ahead, with {python[peer]} against our {python[fast]}",
        f"from C++ ours is, with {cpp[fast]} against {cpp[peer]}",
        "GPT-2 large gains reliably only in CUDA graphs",
    ):
        assert said in text


def test_the_readmes_times_on_a_gpu_are_those_of_the_committed_results() -> None:
    found = results("optimizers_h200")["lists"]["big"]["rows"]
    ms = {name: f"{row['ms_per_1e9']:.2f} ms" for name, row in found.items() if "ms_per_1e9" in row}
    text = prose("README.md")
    share = 100 * found["recipe adamw8bit-split8"]["share"]
    assert f"with its defaults takes {ms['recipe adamw8bit-split8']} for 10⁹ parameters" in text
    assert f"it moves its bytes at {share:.0f} % of the speed of a plain copy" in text
    assert f"{ms['torch AdamW fused, bf16']} in bf16 and {ms['torch AdamW fused, fp32']} in fp32" in text


def test_the_tables_of_compare_and_speed_are_those_of_the_committed_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["render.py", "--check"])
    assert importlib.import_module("render").main() == 0, "run: python benchmarks/render.py"
    assert "<!-- table: benchmarks/results/" in (ROOT / "docs" / "compare.md").read_text()
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / picture).is_file(), picture
    speed = (ROOT / "docs" / "speed.md").read_text()
    files = sorted((ROOT / "benchmarks" / "results").glob("optimizers_*.json"))
    assert sorted(re.findall(r"\]\(speed_(\w+)\.png\)", speed)) == [
        path.stem.removeprefix("optimizers_") for path in files
    ]


def test_measured_pages_begin_with_the_answer_that_their_results_give() -> None:
    big, gpt2 = (
        {name: row.get(figure) for name, row in results(file)["lists"][of]["rows"].items()}
        for file, of, figure in (
            ("optimizers_h200", "big", "ms_per_1e9"), ("optimizers_models_h200", "gpt2-medium", "ms"),
        )
    )  # fmt: skip
    answer = prose("docs/speed.md", "\n## ")
    for said in (
        f"takes {big['recipe adamw8bit-split8']:.2f} ms for 10⁹ parameters",
        f"torch's fused AdamW takes {big['torch AdamW fused, bf16']:.2f} ms in bf16 and "
        f"{big['torch AdamW fused, fp32']:.2f} ms in fp32",
        f"FlashAdamW takes {big['FlashAdamW']:.2f} ms and HeavyBall's AdamW "
        f"{big['HeavyBall AdamW, bf16+8']:.1f} ms",
        f"torchao's AdamW8bit takes {big['torchao AdamW8bit']:.1f} ms and bitsandbytes' "
        f"{big['bitsandbytes AdamW8bit']:.1f} ms",
        f"292 tensors, takes {gpt2['recipe adamw8bit-split8']:.2f} ms, and "
        f"{gpt2['FlashAdamW']:.1f} ms with FlashAdamW",
    ):
        assert said in answer
    on_cpu = results("optimizers_cpu")["lists"]["matrix"]["rows"]
    bf16, fp32 = (on_cpu[f"torch AdamW fused, {dtype}"]["ms"] for dtype in ("bf16", "fp32"))
    plain, eight = (on_cpu[name]["ms"] for name in ("AdamW bf16", "recipe adamw8bit-split8"))
    assert f"AdamW in bf16 takes {plain / bf16:.2f} of the time of torch's fused AdamW in bf16" in answer
    assert f"takes {eight / bf16:.1f} times as long as that, and {eight / fp32:.1f} times as long" in answer

    answer = prose("docs/which_linear.md", "<!-- linear -->")
    huge_graphs, large_graphs, base = (
        speedups("graphs_clip_h200", model)["SWITCHBACK e4m3"] for model in ("vit-h-14", "vit-l-14", "vit-b-16")
    )
    newer, older, llama, gpt2, launched, slow, huge, large, small = (
        [speedups(name, model)[side] for side in ("TENSORWISE_FP8 e4m3", "SWITCHBACK e4m3")]
        for name, model in (
            ("language_h200", "llama-8b"), ("language_h100", "llama-8b"), ("cpp_language_h200", "llama-1b"),
            ("cpp_language_h200", "gpt2-large"), ("language_h200", "llama-1b"), ("language_h200", "gpt2-large"),
            ("cpp_clip_h200", "vit-h-14"), ("cpp_clip_h200", "vit-l-14"), ("cpp_clip_h200", "vit-b-16"),
        )
    )  # fmt: skip
    graphs = speedups("graphs_language_h200", "gpt2-large")["TENSORWISE_FP8 e4m3"]
    rows = results("cpp_language_h200")["models"]["gpt2-large"]["rows"]
    rounds = [
        "{:.2f} to {:.2f}".format(*rows[side]["speedup_range"])
        for side in ("TENSORWISE_FP8 e4m3", "SWITCHBACK e4m3")
    ]
    fused = {
        model: speedups("language_h100", model)["SWITCHBACK e4m3, torch AdamW fused"]
        for model in ("llama-8b", "llama-1b")
    }
    saved = {
        name: results(name)["models"]["vit-h-14"]["rows"]["nn.Linear"]["peak_bytes"] / 1e9
        for name in ("cpp_clip_h200", "clip_h200")
    }
    base_ms = {
        name: results(name)["models"]["vit-b-16"]["rows"]["nn.Linear"]["ms"]
        for name in ("graphs_clip_h200", "clip_h200", "cpp_clip_h200")
    }
    apart = {
        (model, side): of["end"] - curves["nn.Linear"]["end"]
        for name in ("language_h100", "language_h200")
        for model, curves in results(name)["curves"].items()
        for side, of in curves.items()
    }
    ours = [each for (_, side), each in apart.items() if side[0].isupper()]
    starts = [each for (_, side), each in apart.items() if side == "nn.Linear, other weights"]
    for said in (
        f"`TENSORWISE_FP8` is {newer[0]} times as fast on an H200 and `SWITCHBACK` {newer[1]} times",
        f"on an H100 {older[0]} and {older[1]} times",
        f"`TENSORWISE_FP8` is {llama[0]} times as fast and `SWITCHBACK` {llama[1]} times on an H200",
        f"Launched from Python they are {launched[0]} and {launched[1]} times as fast",
        f"`TENSORWISE_FP8` is {graphs} times as fast there, on an H200",
        f"From C++ it is {gpt2[0]} times as fast ({rounds[0]} in single rounds) and `SWITCHBACK` {gpt2[1]} times "
        f"({rounds[1]}). From Python they are {slow[0]} and {slow[1]} times as fast",
        f"`TENSORWISE_FP8` is {huge[0]} times as fast and `SWITCHBACK` {huge[1]} times for ViT-Huge, {large[0]} "
        f"and {large[1]} times for ViT-Large",
        f"needs {saved['cpp_clip_h200']:.1f} GB in place of {saved['clip_h200']:.1f}",
        f"`SWITCHBACK` is then {huge_graphs} times as fast for ViT-Huge and {large_graphs} times for ViT-Large",
        f"its step takes {base_ms['graphs_clip_h200']:.1f} ms on an H200, launched from Python "
        f"{base_ms['clip_h200']:.1f}, in separate runs. `SWITCHBACK` is {base} times as fast there",
        f"the step takes {base_ms['cpp_clip_h200']:.1f} ms from C++",
        f"is {fused['llama-8b']} times as fast for LLaMA 8B and {fused['llama-1b']} times for LLaMA 1B",
        f"change them by −{-min(ours):.2f} to +{max(ours):.2f}",
        f"other initial weights by −{-min(starts):.2f} to +{max(starts):.2f}",
    ):
        assert said in answer
    assert all(float(each) < 1 for each in small)
    both = f"{llama[0]} times as fast as with `nn.Linear` if C++ launches both, and {launched[0]} times if Python"
    assert both in prose("docs/linear.md")


def test_no_line_begins_with_the_mark_of_a_figure() -> None:
    """In Markdown a comment at the beginning of a line ends the paragraph, and the list that it is in."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"^\s*<!--=", page.read_text(encoding="utf-8"), re.MULTILINE), page


def test_decisions_are_listed_and_say_what_would_change_them() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = {path.name for path in folder.glob("*.md")} - {"index.md"}
    targets = re.findall(r"\]\(([^)#:\s]+)", (folder / "index.md").read_text())
    assert sorted(target for target in targets if "/" not in target) == sorted(pages)
    for name in pages:
        text = (folder / name).read_text()
        assert "**Question.**" in text, name
        assert name == "known-limits.md" or "**What would change it.**" in text, name


def test_what_contributing_names_is_there() -> None:
    named = set(re.findall(r"`([\w./]+/[\w./]*)", (ROOT / "CONTRIBUTING.md").read_text())) - {"site/"}
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert len(named) > 10


def test_the_front_page_says_how_near_memory_plans_are() -> None:
    rows = results("memory_h200")["rows"]
    count, percent = len(rows), max(100 * abs(row["ratio"] - 1) for row in rows)
    text = prose("README.md")
    peak = f"The planned peak is within {math.ceil(percent)} % of the measured peak in all {count} configurations"
    near = sum(abs(row["ratio"] - 1) <= 0.02 for row in rows)
    assert f"{peak} measured on an H200, {near} of them within 2 %" in text
