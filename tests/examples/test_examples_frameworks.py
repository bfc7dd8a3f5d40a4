"""The examples for other people's training loops run as they stand, with `--smoke`."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forked import run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.usefixtures("one_thread")


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run an example in this process; what it has made."""
    arguments, sys.argv = sys.argv, [name, "--smoke", "--out", str(folder / "out")]
    try:
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = arguments


def test_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs the package accelerate")
    pytest.importorskip("transformers", reason="needs the package transformers")
    made = run("trainer.py", tmp_path)
    assert "torch.bfloat16, mean loss" in capsys.readouterr().out
    assert made["result"].training_loss < 4.5  # of log 128 = 4.85
    assert made["result"].global_step == 16
    assert "plan='SWITCHBACK: e4m3'" in repr(made["model"])
    again = run("trainer.py", tmp_path)
    assert again["resume"].endswith("checkpoint-16")
    assert "has ended; to train anew, give another folder: --out" in capsys.readouterr().out
    for p, q in zip(made["model"].parameters(), again["model"].parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:GPU available but not used")
def test_lightning_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning", reason="needs the package lightning")
    pytest.importorskip("transformers", reason="needs the package transformers")
    made = run("lightning_loop.py", tmp_path)
    assert "torch.bfloat16, loss" in capsys.readouterr().out
    assert made["trainer"].callback_metrics["loss"] < 5  # of log 256 = 5.5
    assert "plan='SWITCHBACK: e4m3'" in repr(made["module"])
    assert (tmp_path / "out" / "gauges.jsonl").is_file()
    with pytest.raises(SystemExit, match=r"^2$"):
        run("lightning_loop.py", tmp_path)
    assert "has a training; to train anew, give another folder: --out" in capsys.readouterr().err


def shard(rank: int, folder: Path) -> None:
    """Two processes that shard on a CPU: accelerate turns FSDP on for GPUs alone."""
    import accelerate

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=rank, world_size=2)
    kind = accelerate.Accelerator

    def sharding(fsdp_plugin: Any, **options: Any) -> Any:
        made = kind(fsdp_plugin=fsdp_plugin, **options)
        made.state.fsdp_plugin = fsdp_plugin
        made.state.distributed_type = accelerate.PartialState._shared_state["distributed_type"] = (
            accelerate.DistributedType.FSDP
        )
        return made

    accelerate.Accelerator = sharding
    made = run("accelerate_fsdp2.py", folder)
    assert made["accelerator"].is_fsdp2
    assert all(type(p).__name__ == "DTensor" and p.dtype == torch.bfloat16 for p in made["model"].parameters())
    assert made["loss"] < 5  # of log 256 = 5.5
    assert "plan='SWITCHBACK: e4m3'" in repr(made["model"])


def test_accelerate_fsdp2(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs the package accelerate")
    pytest.importorskip("transformers", reason="needs the package transformers")
    run_ranks(shard, 2, tmp_path)
    assert list((tmp_path / "out").glob("*/*.distcp"))


@pytest.mark.parametrize("name", ["lightning_loop.py", "accelerate_fsdp2.py", "trainer.py"])
def test_without_a_text_argparse_says_what_is_needed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(package, reason=f"needs the package {package}")
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert re.search(r"the following arguments are required: (--model, )?--text$", capsys.readouterr().err.strip())
