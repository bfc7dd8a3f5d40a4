"""fp16 and loss scaling: bins count what is in them, scales save what is small, and spikes do what scalers say."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import _pictures
import _scaling_look as look
import _scaling_reading
import _scaling_rows as rows
import _scaling_tables as tables
import loss_scaling as study
import pytest
import render
import torch
import typer
from _scaling_run import Plan, Task, changes, run
from torch import nn
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("one_thread")
SPIKED = 9  # and the 19 steps after it
KINDS = ("formats", "none", "inf × 20", "large × 20")


@pytest.fixture(scope="module")
def plan(training: Any) -> Plan:
    setting = replace(
        study.CHECK.language,
        data=training.data,
        vocabulary=256,
        sequence=24,
        batch=4,
        steps=30,
        warmup=4,
        windows=4,
    )
    return Plan(setting, moments=(0.1, 1.0), spike=0.25)


@pytest.fixture(scope="module")
def file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of one seed, but for those with a spike of one step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("results") / "loss_scaling_x.json"
    study.study(out, plan, kinds=KINDS, seeds=1, spike_seeds=1)
    torch.set_num_threads(threads)
    return out


@pytest.fixture(scope="module")
def results(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def of(results: dict[str, Any], kind: str, row: str) -> dict[str, Any]:
    (found,) = tables.runs_of(results, kind, row)
    return found


def test_bins_are_powers_of_two() -> None:
    x = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-25, 4, 4000)
    x[::7] = 0
    x[1], x[2], x[3] = 2.0**-24, 2.0**-14, -(2.0**-149)
    histogram = look.Histogram()
    for part in x.view(4, -1):
        histogram.add(part)
    # A mantissa of at least 1 is twice that of frexp.
    exact = Counter(max(look.LOW, math.frexp(abs(v))[1] - 1) for v in x.tolist() if v)
    found = histogram.found()
    assert found["zeros"] == int((x == 0).sum())
    assert {k: n for k, n in enumerate(found["counts"], look.LOW) if n} == exact
    nonzero = x[x != 0].abs().double()
    for power in (look.NORMAL, look.SMALLEST):
        assert look.below(found, power) == pytest.approx(float((nonzero < 2.0**power).double().mean()), abs=1e-12)


def test_a_scale_of_a_power_of_two_shifts_a_histogram() -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(1)) * 1e-6
    plain, scaled = look.Histogram(), look.Histogram()
    plain.add(x)
    scaled.add(x * 2.0**10)
    assert scaled.found()["counts"][10:] == plain.found()["counts"][:-10]
    assert look.below(plain.found(), look.SMALLEST - 10) == look.below(scaled.found(), look.SMALLEST)


class Sum(nn.Module):
    """A weighted sum, so that the gradient is the weights of the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 1))


def test_fp16_loses_what_lies_below_its_numbers_and_a_scale_saves_it() -> None:
    exact = torch.tensor([[2.0**-26], [2.0**-17], [2.0**-1], [0.0]])

    def loss(model: nn.Module) -> torch.Tensor:
        (p,) = model.parameters()
        return _Times.apply(p, exact).sum()

    found = {made["scale"]: made for made in look.in_fp16(Sum(), loss)}
    assert [found[c]["vanished"] for c in look.SCALES] == pytest.approx([1 / 3, 0, 0, 0])
    assert [found[c]["subnormal"] for c in look.SCALES] == pytest.approx([1 / 2, 1 / 3, 1 / 3, 0])
    length = math.sqrt(2.0**-52 + 2.0**-34 + 0.25)
    assert found[1.0]["error"] == pytest.approx(2.0**-26 / length, rel=1e-6)
    assert found[8.0]["error"] == 0
    assert [found[c]["infinite"] > 0 for c in look.SCALES] == [False] * 4


class _Times(torch.autograd.Function):
    """A product in fp32, of which only the gradient is rounded, to the format of the parameter."""

    @staticmethod
    def forward(ctx: Any, p: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        ctx.dtype = p.dtype
        return p.float() * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (factor,) = ctx.saved_tensors
        return (grad * factor).to(ctx.dtype), None


def test_kinds_go_by_names() -> None:
    matrix = torch.ones(2, 2)
    assert look.kind_of("transformer.h.0.attn.c_attn.weight", matrix) == "attention"
    assert look.kind_of("transformer.wte.weight", matrix) == "embedding"
    assert look.kind_of("transformer.h.0.mlp.c_fc.bias", matrix[0]) == "norms and biases"
    assert look.kind_of("transformer.h.0.ln_1") == "norms"


def test_scales_are_kept_where_they_change() -> None:
    assert changes([8.0, 8.0, 4.0, 4.0, 8.0]) == [[1, 8.0], [3, 4.0], [5, 8.0]]


def test_the_plan_has_a_seed_of_everything_before_the_next() -> None:
    tasks = study.plan_of(study.KINDS, 3, 1)
    assert len(set(tasks)) == len(tasks) == 3 * len(rows.ROWS) + len(rows.SPIKED) * len(rows.INJECTIONS)
    assert {t.seed for t in tasks[: len(rows.ROWS) + 12]} == {0}
    assert study.plan_of(["none"], 2, 1) == [Task("none", row.name, 0) for row in rows.SPIKED]


def test_formats_begin_alike_and_train(results: dict[str, Any]) -> None:
    runs = {row.name: of(results, "formats", row.name) for row in rows.ROWS}
    for name, made in runs.items():
        assert made["validation_loss"] == pytest.approx(runs["fp32"]["validation_loss"], abs=0.05), name
        if made["scales"] and made["scales"][0][1] <= 1024:
            assert made["missed"] == 0, name
    assert len({made["validation_loss"] for made in runs.values()}) > 5
    assert [name for name, made in runs.items() if "gradients" in made] == ["fp32"]


def test_gradients_are_counted_at_the_moments(results: dict[str, Any]) -> None:
    found = of(results, "formats", "fp32")["gradients"]
    assert [made["step"] for made in found] == [3, 30]
    size = results["parameters"]
    for made in found:
        weights = tables.together(made["weights"])
        assert weights["zeros"] + sum(weights["counts"]) == size
        assert made["updates"]["zeros"] + sum(made["updates"]["counts"]) == size
        assert {"logits", "attention", "feed-forward", "norms", "embedding"} <= made["outputs"].keys()
        # logits: (batch, sequence, vocabulary)
        assert made["outputs"]["logits"]["zeros"] + sum(made["outputs"]["logits"]["counts"]) == 4 * 24 * 256
        vanished = [scale["vanished"] for scale in made["fp16"]]
        assert max(vanished[1:]) <= vanished[0]
        assert made["fp16"][-1]["error"] < 0.01


def test_looking_changes_nothing(plan: Plan, results: dict[str, Any]) -> None:
    short = replace(plan, moments=())
    again = run(Task("formats", "fp32", 0), short)
    assert again["validation_loss"] == pytest.approx(of(results, "formats", "fp32")["validation_loss"], rel=1e-5)


def test_a_global_scaler_halves_and_skips_and_one_by_tensor_does_not(results: dict[str, Any]) -> None:
    made = {row.name: of(results, "inf × 20", row.name) for row in rows.SPIKED}
    halved = [[1, 2.0**16], *([SPIKED + 1 + i, 2.0 ** (15 - i)] for i in range(20))]
    assert made["dynamic"]["scales"] == halved
    assert made["by tensor"]["scales"] == made["whole step"]["scales"] == [[1, 2.0**16]]
    assert [made[name]["skipped_steps"] for name in ("dynamic", "whole step", "by tensor")] == [20, 20, 0]
    assert all(m["skipped"] == {"transformer.wte.weight": 20} for m in made.values())
    assert made["dynamic"]["missed"] == 20
    embedding = 256 * 96
    assert made["by tensor"]["missed"] == pytest.approx(20 * embedding / results["parameters"], rel=1e-5)


@pytest.mark.parametrize("injection", ["inf × 20", "large × 20"])
def test_nothing_happens_before_the_spike(injection: str, results: dict[str, Any]) -> None:
    for row in rows.SPIKED:
        quiet, hit = of(results, "none", row.name)["around"], of(results, injection, row.name)["around"]
        before = SPIKED + 1 - hit["first"]  # the loss of the first step that is hit is taken before it is
        assert hit["losses"][:before] == quiet["losses"][:before]
        assert hit["losses"][-1] != quiet["losses"][-1]


def test_large_gradients_bring_the_scale_down_until_they_fit(results: dict[str, Any]) -> None:
    made = of(results, "large × 20", "dynamic")
    assert 0 < made["skipped_steps"] < 20
    assert made["scales"][-1][1] == 2.0 ** (16 - made["skipped_steps"])
    assert of(results, "large × 20", "whole step")["skipped_steps"] == 20


def test_it_goes_on_where_it_ended(plan: Plan, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "loss_scaling_x.json"
    found = json.loads(file.read_text())
    lacking = found["runs"].pop()
    out.write_text(json.dumps(found))
    study.study(out, plan, kinds=KINDS, seeds=1, spike_seeds=1, resume=True)
    assert capsys.readouterr().out.count("validation") == 1
    again = json.loads(out.read_text())["runs"][-1]
    assert again["validation_loss"] == lacking["validation_loss"]
    with pytest.raises(typer.BadParameter, match="--resume: got interval 7, takes 2000"):
        study.study(out, replace(plan, interval=7), resume=True)


def test_the_check(training: Any, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(study.main)
    out = tmp_path / "loss_scaling_check.json"
    words = ["--check", "--data", str(training.data), "--out", str(out), "--only", "inf × 1", "--steps", "10"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert len(json.loads(out.read_text())["runs"]) == len(rows.SPIKED)


def test_kinds_that_there_are_not() -> None:
    with pytest.raises(typer.BadParameter, match="--only: got nan, takes patterns of formats, none, inf × 20"):
        study.chosen(["nan"])


def test_tables_picture_and_page(
    file: Path, results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tables.moments(results).count("\n") == 2 + 2
    assert "| `by tensor` | 0 |" in tables.spikes(results)
    assert "40,000" in tables.spikes(results)
    assert "All runs were made." in tables.origin(results)
    assert tables.backward(results).count("\n") == 2 + len(look.SCALES)
    _pictures.draw(file.parent, tmp_path / "loss_scaling_x.png")
    assert (tmp_path / "loss_scaling_x.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(render, "RESULTS", file.parent)
    render.results.cache_clear()
    drawn = render.rendered("<!--=loss_scaling_x.json back_dynamic_inf_20-->?<!--/-->")
    render.results.cache_clear()
    assert "-->40,000<!--/-->" in drawn


def test_its_page(results: dict[str, Any], page_with: Callable[..., str]) -> None:
    drawn = page_with("loss_scaling", {"loss_scaling_h200.json": results})
    assert "Not measured yet" not in drawn
    assert "](loss_scaling_h200.png)" in drawn


def test_tables_of_a_study_that_has_no_runs_yet(
    results: dict[str, Any], readings: Callable[[str], dict[str, list[str]]]
) -> None:
    found = readings(_scaling_reading.reading(results | {"runs": []}))
    assert {tuple(cells[1:]) for cells in found.values()} == {("not run", "")}
    empty = results | {"runs": [], "unfinished": [{"kind": "none", "row": "dynamic", "seed": 0}]}
    for table in tables.TABLES.values():
        assert isinstance(table(empty), str)
    assert tables.facts(empty)["runs"] == "0"
    assert "1 runs were left out" in tables.origin(empty)


def test_the_page_holds_for_what_is_committed() -> None:
    """Sentences of the page that no table says: each would be wrong, were the results others."""
    committed = json.loads((Path(study.__file__).parent / "results" / "loss_scaling_cpu.json").read_text())

    def cost(injection: str, row: str) -> list[float]:
        return tables.apart(tables.runs_of(committed, injection, row), tables.runs_of(committed, "none", row))

    columns = zip(*(cost("inf × 20", name) for name in ("by tensor", "whole step", "dynamic")), strict=True)
    assert all(by_tensor < whole < dynamic for by_tensor, whole, dynamic in columns)
    assert cost("large × 20", "by tensor") == cost("large × 20", "whole step")
    assert min(cost("large × 20", "dynamic")) > max(cost("large × 20", "by tensor"))
    reference = tables.runs_of(committed, "formats", "fp32")
    alone = tables.apart(tables.runs_of(committed, "formats", "fp16 alone, dynamic"), reference)
    assert min(alone) > 0
    errors = [[scale["error"] for scale in made["fp16"]] for made in tables.looks(committed)]
    assert all(abs(at[1] - at[3]) < 0.1 * at[3] for at in errors)


def test_what_was_said_is_read_from_what_is_committed(readings: Callable[[str], dict[str, list[str]]]) -> None:
    """The page's own sentences on the small model, drawn from its results by rule."""
    committed = json.loads((Path(study.__file__).parent / "results" / "loss_scaling_cpu.json").read_text())
    found = readings(_scaling_reading.reading(committed))
    assert [cells[2] for cells in found.values()] == [
        "does not hold", "does not hold", "holds", "cannot tell", "holds", "holds", "cannot tell", *["holds"] * 3,
    ]  # fmt: skip
    assert found["A scale that skips tensor by tensor stays"][1] == "2¹⁶ throughout"
    for made in committed["runs"]:
        if (made["kind"], made["row"], made["seed"]) == ("inf × 20", "by tensor", 0):
            made |= {"validation_loss": made["validation_loss"] + 1, "scales": [[0, 2.0**16], [9, 4.0]]}
        if (made["kind"], made["row"]) == ("formats", "fp16"):
            made["validation_loss"] += 0.03
    found = readings(_scaling_reading.reading(committed))
    assert found["A scale that skips tensor by tensor stays"][1:] == ["down to 4", "does not hold"]
    assert found["fp16 without scaling ends behind fp32"][2] == "holds"
    less = "Skipping by tensor costs less loss than a dynamic scale, with every seed"
    assert found[less][2] == "cannot tell"
    # Less with every seed is not enough: a coin for each of three falls so once in eight times.
    again = json.loads((Path(study.__file__).parent / "results" / "loss_scaling_cpu.json").read_text())
    by = {(run["kind"], run["row"], run["seed"]): run for run in again["runs"]}
    for seed, gap in enumerate((0.001, 0.002, 0.2)):
        for kind, cost in (("none", 0.0), ("inf × 20", gap)):
            by[kind, "dynamic", seed]["validation_loss"] = by[kind, "by tensor", seed]["validation_loss"] = 6.0
            by[kind, "dynamic", seed]["validation_loss"] += cost
    assert readings(_scaling_reading.reading(again))[less][2] == "cannot tell"
    # One seed tells what is larger than fp32's seeds lie apart, and no more.
    for cost, verdict in ((0.03, "holds"), (0.001, "cannot tell")):
        committed["runs"] = [run for run in committed["runs"] if run["seed"] == 0 or run["kind"] == "formats"]
        by = {run["row"]: run for run in committed["runs"] if run["kind"] == "inf × 20"}
        quiet = {run["row"]: run["validation_loss"] for run in committed["runs"] if run["kind"] == "none"}
        by["dynamic"]["validation_loss"] = quiet["dynamic"] + cost
        by["by tensor"]["validation_loss"] = quiet["by tensor"]
        found = readings(_scaling_reading.reading(committed))
        assert found[less][1:] == [f"+0.0000; dynamic {cost:+.4f}; 1 seed", verdict]


def test_powers_are_written_as_such() -> None:
    assert [tables.power(x) for x in (2.0**16, 8.0, 2.0**-4, 1024.0)] == ["2¹⁶", "8", "2⁻⁴", "1,024"]
