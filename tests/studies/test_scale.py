"""The calculation of scale: its page, figures that can be had in another way, and what must grow or fall."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from narrowgauge import recipes
from studies.scale import model as scale_model
from studies.scale import run as scale

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"


def test_the_page_is_what_the_script_prints() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert scale.rendered(text) == text
    for made in scale.TABLES.values():
        assert made() in text


def test_models_have_the_parameters_that_they_are_called_after() -> None:
    counts = {model.name: model.parameters for model in scale_model.MODELS.values()}
    # Those of LLaMA 7B, and of Llama 3 70B and 405B.
    assert counts == {"7B": 6_738_415_616, "70B": 70_553_706_496, "405B": 405_853_388_800}


@pytest.mark.parametrize("gpus", scale_model.MODELS)
def test_shards(gpus: int) -> None:
    model = scale_model.MODELS[gpus]
    for shape in set(model.shapes()):
        rows = [len(range(shape[0])[rank * math.ceil(shape[0] / gpus) :][: math.ceil(shape[0] / gpus)])
                for rank in range(gpus)]  # fmt: skip
        assert sum(rows) == shape[0]
        assert scale_model.fullest(shape, gpus) == max(rows) * math.prod(shape[1:])
    for recipe in scale.RECIPES:
        even, most = scale_model.sharded_bytes(model, gpus, recipe)
        assert even <= most
        assert even * gpus == pytest.approx(model.parameters * recipes.get(recipe).bytes_per_parameter())


def test_the_best_interval_between_checkpoints() -> None:
    for gpus in scale_model.MODELS:
        interval, lost = scale_model.best_interval(gpus, 30.0)
        between = 1 / (scale_model.FAILURES * gpus)
        for other in (interval / 1.1, interval * 1.1):  # none is better
            assert 30.0 / other + other / 2 / between > lost
    assert between == pytest.approx(54 * 24 * 3600 / 419)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model on two processes of this machine, all ways."""
    folder = tmp_path_factory.mktemp("trained")
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_data_parallel.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command += ["--model", "micro", "--vocabulary", "256", "--batch", "1", "--sequence", "16", "--rounds", "2"]
    subprocess.run(
        [*command, "--json", str(folder / "data_parallel_cpu.json")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    return folder


@pytest.mark.slow
def test_the_calculation_is_what_processes_hold_send_and_save(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = json.loads((trained / "data_parallel_cpu.json").read_text())
    assert list(results["rows"]) == [
        "alone", "DDP", "DDP, torch's AdamW", "DDP, 8-bit codes", "DDP, 4-bit codes", "DDP, SwitchBack",
        "FSDP", "FSDP, torch's AdamW", "FSDP, option D", "FSDP, SwitchBack",
    ]  # fmt: skip
    listed = 1000 * scale_model.WORDS * len(results["shapes"])  # names, sizes and checksums of pieces
    exempt = sum(math.prod(shape) for shape in results["shapes"] if len(shape) == 1 or math.prod(shape) < 4096)
    for way, row in results["rows"].items():
        said = scale.calculated(results, way)
        # Small parameters keep fp32 states, as the page's large models have next to none.
        more = 0 if way == "FSDP, option D" else 6 * exempt
        assert said["held"] <= row["held_bytes"] * 1.0001
        assert row["held_bytes"] == pytest.approx(said["held"], abs=more + 1e4)
        sent = 4 * exempt / 2 if "codes" in way else 0
        assert row["sent_bytes"] == pytest.approx(said["sent"], abs=sent + 1e4)
        if way != "alone":
            # All that is calculated is there, and beside it no more than the lists.
            assert said["checkpoint"] <= row["checkpoint_bytes"] <= said["checkpoint"] + more + listed
    lines = scale.measured(trained).splitlines()
    assert len(lines) == 2 + len(results["rows"])
    assert lines[3].startswith("| micro on 2 | DDP |")
