"""States on the CPU: on a CPU a run with them is the run without, to the bit, and goes on from its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import CPU, Silent, run, weights
from pictured import csv_pairs

from narrowgauge.distributed import CPUOffload
from narrowgauge.gauges import read_records
from narrowgauge.gauges._watch._update_stats import measures_itself
from narrowgauge.trainers import SettingsError, TrainSettings, fit
from narrowgauge.trainers._build import build_parts
from narrowgauge.trainers._parallel import ProcessGroup
from narrowgauge.trainers._run_folder import GAUGES, HISTORY, read_history

pytestmark = pytest.mark.usefixtures("surroundings")


RUNS: dict[str, dict[str, Any]] = {
    "8-bit states and low words, clipped": {"recipe": "adamw8bit-split8", "clip": 0.01},
    "in parts, stochastic rounding": {"recipe": "stochastic", "accumulate": 2},
    "a scaler, no clipping": {"recipe": "collage-plus", "scaler": "tensor", "clip": 0.0},
    "a plan, a beta2 schedule": {"recipe": "master", "linear": "SWITCHBACK", "beta2_schedule": 0.8},
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_is_the_one_without_and_goes_on(
    case: str, small: TrainSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, step = [], CPUOffload.step

    def counted(self: CPUOffload, *given: Any) -> Any:
        loss = step(self, *given)
        late.append(self.late)
        return loss

    monkeypatch.setattr(CPUOffload, "step", counted)
    changes = RUNS[case]
    wanted = run(small, tmp_path / "none", **changes)
    a = weights(tmp_path / "none")
    for offload in ("states", "gradients")[: 1 if "accumulate" in changes else 2]:
        settings = replace(small, out=tmp_path / offload, offload=offload, **changes)
        asked = iter([False, False, True, False, False, False])
        assert fit(settings, CPU, Silent(), lambda asked=asked: next(asked)).stopped
        torch.manual_seed(999)  # whatever happens in between
        assert fit(settings, CPU, Silent()).step == 6
        found = [record["loss"] for record in read_history(tmp_path / offload / HISTORY) if "loss" in record]
        assert found == wanted
        b = weights(tmp_path / offload)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(late)  # no gradient waited for the step
    assert len(late) in (6, 12)


def test_a_run_goes_on_with_states_elsewhere(small: TrainSettings, tmp_path: Path) -> None:
    changes = {"recipe": "adamw8bit-split8", "schedule": "constant"}
    wanted = run(small, tmp_path / "whole", **changes)
    for steps, offload in ((2, "none"), (4, "states"), (5, "gradients"), (6, "none")):
        found = run(small, tmp_path / "moved", steps=steps, offload=offload, **changes)
    assert found == wanted


@pytest.mark.slow
def test_a_clip_whose_scale_is_bounded_after_each_step(tmp_path: Path) -> None:
    """The bound is written to the weight between steps, which the CPU's copy has to follow."""
    clip = TrainSettings(
        data=csv_pairs(tmp_path, repeat=2), model="clip-micro", recipe="adamw8bit-split8", steps=5, batch=8,
        vocabulary=300, lr=2e-2, warmup=0, validation_windows=8, gauges_every=0, save_every=0, log_every=1,
        max_logit_scale=9.0, patch_dropout=0.5, gradient_checkpointing=True,
    )  # fmt: skip
    wanted, found = (run(clip, tmp_path / o, offload=o) for o in ("none", "gradients"))
    assert found == wanted
    assert weights(tmp_path / "gradients")["logit_scale"].float().exp() <= 9.05
    assert run(clip, tmp_path / "free", max_logit_scale=0.0) != wanted


@pytest.mark.parametrize("offload", ["states", "gradients"])
def test_gauges_say_the_same(offload: str, small: TrainSettings, tmp_path: Path) -> None:
    """Updates and RMS_t of the step on the CPU; gradients while they are to be seen, quantized moments never."""
    kinds = {}
    for name in ("none", offload):
        run(small, tmp_path / name, recipe="adamw8bit-split8", gauges_every=2, clip=0.0, offload=name)
        records = read_records(tmp_path / name / GAUGES)
        kinds[name] = {
            kind: [r for r in records if r["kind"] == kind and r["step"] > 0]
            for kind in ("update", "gradient", "activation", "rms", "state")
        }
    without, found = kinds["none"], kinds[offload]
    assert without["update"]
    for kind in ("update", "activation", "rms"):
        assert found[kind] == without[kind]
    assert found["gradient"] == ([] if offload == "gradients" else without["gradient"])
    assert without["gradient"]


def test_watched_states_are_named_as_missing(small: TrainSettings, tmp_path: Path) -> None:
    parts = build_parts(replace(small, offload="states", recipe="adamw8bit-split8", out=tmp_path), 256, CPU)
    assert isinstance(parts.optimizer, CPUOffload)
    assert measures_itself(parts.optimizer)
    assert any("the step is the CPU's: states and low words are there" in note for note in parts.notes)
    table, *_ = parts.model.parameters()
    assert "on their way to the CPU" in parts.optimizer.preview_unavailable(table)
    assert parts.optimizer.keeps_codes(table)
    view = parts.optimizer.parameter_view(table)
    assert view is not None
    assert (view.p.device, view.p.shape) == (CPU, table.shape)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a word": ({"offload": "yes"}, r"--offload must be one of none, states, gradients, got 'yes'"),
    "fsdp": ({"offload": "states", "parallel": "fsdp"}, r"--offload must be none with --par.*, got 'states'"),
    "parts": ({"offload": "gradients", "accumulate": 2}, r"--offload must be none or states with --acc"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(case: str, small: TrainSettings) -> None:
    changes, says = REFUSED[case]
    with pytest.raises(SettingsError, match=says) as caught:
        replace(small, **changes)
    assert "\n" not in str(caught.value)


def test_gradients_stay_where_several_average_them(small: TrainSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    assert ProcessGroup.of(replace(small, offload="states")).world == 2
    with pytest.raises(SettingsError, match=r"^--offload must be none or states under torchrun, got 'gradients'"):
        ProcessGroup.of(replace(small, offload="gradients"))
