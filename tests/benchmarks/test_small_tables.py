"""Tables of results that stand on pages about something else."""

import json
from pathlib import Path
from typing import Any

import _small_tables

PAGE = "before\n<!-- NAME -->\nstale\n<!-- end -->\nafter\n"


def memory() -> dict[str, Any]:
    row = {"model": "tiny", "recipe": "D", "batch": 2, "sequence": 8, "linear": "", "checkpointing": True}
    good = {**row, "planned": 1.01e9, "measured": 1e9, "ratio": 1.01}
    bad = {**row, "linear": "SWITCHBACK", "checkpointing": False, "error": "RuntimeError: no memory"}
    return {"device": "a GPU", "torch": "2.11.0+cu130", "command": "python bench.py", "rows": [good, bad]}


def watch() -> dict[str, Any]:
    row = {"step ms": 33.26, "parameters": 124e6, "all": {"cost": 0.005}, "losses": {"cost": -0.0012}}
    model = {"batch": 8, "length": 1024}
    both = {"torch": row, "adamw8bit": {**row, "moments": {"ms": 20.0, "cost": 0.0012}}}
    return {
        "device": "a GPU", "torch": "2.11.0", "command": "python bench.py", "every": 10, "model": model,
        "optimizers": both,
    }  # fmt: skip


def compressed() -> dict[str, Any]:
    codec: dict[str, float] = {"2 ranks pay below GB/s": 1.234, "encode_ms": 1, "add_ms": 2.5, "finish_ms": 0.125}
    codec |= {"encode of limit": 0.5, "add of limit": 0.75, "finish of limit": 1.5}
    plain = {"all-reduce bf16": {"bytes": 2e6, "ms": 4.0, "GB/s": 0.5}, "copy": {"GB/s": 9.0}}
    bucket = {**plain, "8 bits": {"bytes": 1.01e6, "ms": 3.14159, "codec": codec}}
    step = {"layers": 3, "width": 64, "batch": 5, "rows": {"DDP": {"ms": 10.0}, "8 bits": {"ms": 8.25}}}
    run = {"ranks": 2, "buckets": {"1000000": bucket, "64000": {}}, "step": step}
    return {"device": "a CPU", "torch": "2.13.0+cpu", "command": "python bench.py", "runs": [run]}


def offload() -> dict[str, Any]:
    row = {"ms": 1068.9, "step_ms": 983.9, "gpu_peak_bytes": 27.25e9, "host_bytes": 53.9e9}
    peer = {"ms": 860.4, "step_ms": 758.6, "gpu_peak_bytes": 27.3e9}
    rows = {"ours": row, "peer": peer, "absent": {"failed": "not installed"}}
    large = {"parameters": 6.7e9, "backward_ms": 167.9, "rows": rows}
    return {
        "environment": {"device": "a GPU", "torch": "2.11.0"}, "command": "python bench.py", "cores": 32,
        "threads": 24, "lists": {"7b": large, "1b": large | {"parameters": 1e9, "rows": {}}},
    }  # fmt: skip


def test_planned_beside_measured() -> None:
    lines = _small_tables.memory(memory()).splitlines()
    assert lines[2] == "| tiny | `D` | 2 x 8 | bf16 | yes | 1.01 | 1.00 | 1.010 |"
    assert lines[3] == "| tiny | `D` | 2 x 8 | SWITCHBACK |  | RuntimeError: no memory |  |  |"
    assert lines[-1] == "1 of 2 measured, none further off than 1.0 %. `python bench.py`; a GPU, torch 2.11.0."


def test_what_watching_costs() -> None:
    lines = _small_tables.watch(watch()).splitlines()
    assert lines[0] == "| optimizer | step | + all | + losses | + moments |"
    assert lines[2:4] == [
        "| torch | 33.3 ms | 0.50 % | -0.12 % | – |",
        "| adamw8bit | 33.3 ms | 0.50 % | -0.12 % | 0.12 % |",
    ]
    assert "GPT-2 of 124 million parameters, 8 x 1024 tokens, every 10th step" in lines[-1]


def test_what_compressed_gradients_take() -> None:
    lines = _small_tables.compressed(compressed()).splitlines()
    assert lines[2:4] == [
        "| 2 | bf16 | 2.0 MB | 4 ms |  |  |  | 10 ms |",
        "| 2 | 8 bits | 1.0 MB | 3.14 ms | 1 + 2.5 + 0.125 ms | 50 % / 75 % / 150 % | 1.23 GB/s | 8.25 ms |",
    ]
    assert lines[-1].startswith(
        "A bucket of 1,000,000 gradients in bf16. Bf16's own all-reduce had 0.5 GB/s on 2 ranks. A step is forward "
        "and backward of 3 layers of 64 x 64, 5 rows a rank."
    )


def test_what_states_on_the_host_cost() -> None:
    lines = _small_tables.offload(offload()).splitlines()
    assert lines[2:5] == [
        "| ours | 1069 ms | 984 ms | 27.2 GB | 53.9 GB |",
        "| peer | 860 ms | 759 ms | 27.3 GB |  |",
        "| absent | not installed |  |  |  |",
    ]
    assert lines[-1].startswith(
        "6.7 billion parameters in bf16; a backward pass alone takes 168 ms. 24 threads of 32"
    )


def test_tables_of_one_page_do_not_replace_each_other(tmp_path: Path) -> None:
    page = PAGE.replace("NAME", "compressed on CPUs") + PAGE.replace("NAME", "compressed on GPUs")
    for file in ("compressed_cpu.json", "compressed_h200.json"):
        (tmp_path / file).write_text(json.dumps(compressed() | {"device": file}))
    drawn = _small_tables.rendered(page, "distributed.md", tmp_path)
    assert "compressed_cpu.json" in drawn
    assert "compressed_h200.json" in drawn
    assert _small_tables.rendered(page, "plan.md", tmp_path) == page


def test_a_page_has_its_table_once_there_are_results(tmp_path: Path) -> None:
    tables = {"memory": memory(), "watch": watch(), "compressed on CPUs": compressed(), "offload": offload()}
    for name, made in tables.items():
        page = PAGE.replace("NAME", name)
        where, file, draw = _small_tables.TABLES[name]
        assert _small_tables.rendered(page, where, tmp_path) == page.replace("stale\n", "")
        (tmp_path / file).write_text(json.dumps(made))
        drawn = _small_tables.rendered(page, where, tmp_path)
        assert drawn == page.replace("stale", f"\n{draw(made)}")
        assert _small_tables.rendered(drawn, where, tmp_path) == drawn
