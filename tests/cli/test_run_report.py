"""The page of a run: it says what the records say, leaves out what they have not, and lets nothing in."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from html_page import Page
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.cli import _charts, main
from narrowgauge.cli._charts import PALETTE
from narrowgauge.cli._report._page import number
from narrowgauge.cli._report._run_drawing import COLUMNS, ROWS, _paint, grid, medians, settle, short
from narrowgauge.cli._report._run_figures import embedding_and_middle
from narrowgauge.cli._report._run_page import page
from narrowgauge.gauges import read_records, write_report
from narrowgauge.gauges._history import History
from narrowgauge.gauges._records import line_of
from recorded import NAMES, changed, compared, header, sound, step, update

Records = list[dict[str, Any]]
# Tests whose pages have their pictures.
DRAWN = (
    "test_a_whole_run",
    "test_what_is_not_finite",
    "test_every_name",
    "test_the_page_needs",
    "test_a_large_run",
    "test_several",
)


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pictures out of the pages of tests that read the text: drawing them takes most of the time."""
    if not request.node.name.startswith(DRAWN):
        monkeypatch.setattr(
            _charts, "_to_svg", lambda figure, name, title: f'<svg aria-label="{escape(title)}"></svg>'
        )


def look(records: Records, damage: str | None = None, name: str = "run") -> tuple[Page, str]:
    source = page(History(records, damage), name)
    return Page(source), source


def save(records: Records, path: Path) -> Path:
    path.write_text("".join(map(line_of, records)))
    return path


def headings(source: str) -> list[str]:
    return re.findall(r"<figure>\s*<h3>([^<]*)</h3>", source)


def test_a_whole_run_has_every_figure_and_each_has_its_numbers() -> None:
    parsed, source = look(changed(sound(), "step", loss_scale=1024.0, skipped=0))
    assert headings(source) == [
        "Loss, its spikes, and RMS", "Effective descent quality", "Lost updates", "Narrower formats: gradients",
        "Narrower formats: activations", "Narrower formats: gradients of activations",
        "Feature magnitudes by depth", "Loss scale", "Quantization maps", "Use of codes",
    ]  # fmt: skip
    assert source.count("<summary>The numbers as a table</summary>") == 10
    assert "What is not here" not in parsed.text
    assert "No gauge crossed a threshold." in parsed.text
    assert "Nothing to say" in parsed.text
    assert "200 steps were watched" in parsed.text
    assert "The loss went from 3.005 to 2.04." in parsed.text
    # The embedding and a matrix of the middle block are compared.
    assert "RMS_t of wte.weight" in parsed.text
    assert "RMS_t of h.1.fc.weight" in parsed.text
    assert all(name in parsed.text for name in NAMES)


def test_rms_is_that_of_the_embedding_that_foretold() -> None:
    """Not of the first one in the model; without a loss spike that of the highest."""
    shapes = {"embed_words.weight": [8, 8], "embed_pixels.weight": [8, 8], **header()["parameters"]}
    records = sound(400)[1:]
    for at in range(5, 401, 5):
        spikes = {"embed_words.weight": 6.0 * (at == 200), "embed_pixels.weight": 5.0 * (at == 300)}
        records += [update(at, name, rms=max(1.0, value)) for name, value in spikes.items()]
    head = header(parameters=shapes)
    assert embedding_and_middle(History([head, *records]))[0] == "embed_words.weight"
    records = changed(records, "step", None, range(304, 307), loss=9.0)
    assert embedding_and_middle(History([head, *records]))[0] == "embed_pixels.weight"


def test_where_no_loss_spike_was_found_it_says_where_one_was_looked_for() -> None:
    first = 101  # a hundred losses are before it
    assert f"No loss spike was found from step {first} on." in look(sound())[0].text
    short = [record for record in sound() if record.get("step", 0) <= 60]
    text = look(short)[0].text
    assert "No loss spike was found" not in text
    assert "No loss was judged yet: that takes 100 losses before it" in text


def test_advice_stands_on_top_with_its_numbers() -> None:
    records = changed(sound(), "update", ["ln.weight"], lost=1.0, descent_quality=0.0)
    parsed, source = look(records)
    assert parsed.text.index("ln.weight does not move at all") < parsed.text.index("The figures")
    assert "ln.weight: effective descent quality 0 at step 200, threshold 0.9" in parsed.text
    assert "Advice: 1 to change." in parsed.text
    assert '<li class="change">' in source
    assert ["ln.weight", "0", "0", "0 (step 5)", "0"] in [[" ".join(c.split()) for c in r] for r in parsed.rows]


def test_spikes_are_marked_with_their_precursors() -> None:
    records = changed(sound(400), "update", ["wte.weight"], range(300, 301), rms=5.0)
    records = changed(records, "step", None, range(304, 307), loss=9.0)
    parsed, _ = look(records)
    assert "1 loss spike, 1 of them after an RMS spike." in parsed.text
    assert ["304", "9", "wte.weight at step 300"] in [[c.strip() for c in row] for row in parsed.rows]


def test_an_rms_spike_within_a_loss_spike_is_told() -> None:
    records = changed(sound(400), "update", ["wte.weight"], range(305, 306), rms=5.0)
    records = changed(records, "step", None, range(304, 307), loss=9.0)
    parsed, _ = look(records)
    assert "1 loss spike, 0 of them after an RMS spike, 1 with one within." in parsed.text
    assert ["304", "9", "wte.weight at step 305"] in [[c.strip() for c in row] for row in parsed.rows]


@pytest.mark.parametrize(
    ("values", "room", "wanted"),
    [
        ([100.0, 100.00000025], 1.0, (99.0, 101.0)),
        ([0.0, 0.0], 1.0, (0.0, 1.0)),
        ([2.5, 2.5 + 1e-12], 0.0, (2.475, 2.525)),
        ([-1.0, 1.0], 0.0, (-1.1, 1.1)),
        ([0.0, 40.0], 1.0, (0.0, 42.0)),
    ],
)
def test_an_axis_shows_no_rounding_errors_and_no_negative_shares(
    values: list[float], room: float, wanted: tuple[float, float]
) -> None:
    figure = _charts.Figure()
    axis = figure.subplots()
    axis.plot([1, 2], values)
    settle(axis, "", 2, room=room)
    low, high = axis.get_ylim()
    assert low <= wanted[0] + 1e-6
    assert (low, high) == pytest.approx(wanted, rel=0.06)
    figure.draw_without_rendering()
    assert not axis.yaxis.get_offset_text().get_text()


@pytest.mark.parametrize(
    ("kind", "heading", "reason"),
    [
        ("activation", "Feature magnitudes by depth", "No activations were recorded"),
        ("adam_error", "Quantization maps", "the maps of 256 by 256 codes are left out"),
        ("state", "Use of codes", "No codes of quantized states"),
        ("gradient", "Narrower formats: gradients", "recorded of gradients:"),
        ("update", "Effective descent quality", "effective descent quality by layer is left out"),
    ],
)
def test_what_was_not_recorded_is_left_out_and_said(kind: str, heading: str, reason: str) -> None:
    parsed, source = look([record for record in sound() if record["kind"] != kind])
    assert heading not in headings(source)
    assert reason in parsed.text
    assert parsed.text.index("What is not here") < parsed.text.index(reason)


def test_without_losses_rms_stands_alone_and_without_both_nothing() -> None:
    records = changed(sound(), "step", loss=None)
    parsed, source = look(records)
    assert "Loss, its spikes, and RMS" in headings(source)
    assert "The loss was not recorded. Where the model does not return it" in parsed.text
    parsed, source = look([record for record in records if record["kind"] != "update"])
    assert "Loss, its spikes, and RMS" not in headings(source)
    assert "No loss and no RMS_t was recorded" in parsed.text
    parsed, source = look([record for record in sound() if record["kind"] != "update"])
    assert "RMS_t was not recorded" in parsed.text


def test_what_is_not_finite_is_shown() -> None:
    records = changed(sound(), "step", None, range(150, 201), loss=math.nan)
    records = changed(records, "update", ["wte.weight"], range(100, 120), descent_quality=math.inf, rms=math.inf)
    records = changed(records, "activation", ["h.1"], mean=math.inf)
    parsed, _ = look(records)
    assert "The loss is NaN at step 150 and every later step." in parsed.text
    assert "The loss went from 3.005 to NaN." in parsed.text
    assert "inf (step 100)" in parsed.text
    assert "Purple: not finite." in parsed.text


def test_a_header_alone_is_a_page() -> None:
    parsed, source = look([header()])
    assert "No step was recorded." in parsed.text
    assert headings(source) == []
    assert "AdamW8bit, cpu, 2026-11-22 07:30:00 UTC" in parsed.text


def test_every_name_is_escaped() -> None:
    hostile = """<script>alert(1)</script>"'><img src=x onerror=alert(1)>{{ 7*7 }}a&amp;b$\\frac{1}$"""
    renamed = [record | {"name": hostile} if record.get("name") == "wte.weight" else record for record in sound()]
    renamed[0] = header(optimizer=hostile, device=hostile, started=hostile, parameters={hostile: [8, 8]})
    renamed = [
        record | {"slot": hostile, "format": hostile} if record["kind"] == "state" else record for record in renamed
    ]
    renamed.append({"kind": "spike", "step": 3, "of": hostile, "name": hostile, "value": 3.0, "threshold": 2.3})
    renamed = changed(renamed, "update", [hostile], lost=1.0, descent_quality=0.0)
    renamed = changed(renamed, "gradient", [hostile], formats={hostile: {"underflow": 1.0}})
    parsed, source = look(renamed, damage=hostile, name=hostile)
    assert not [tag for tag, _, _ in parsed.attributes if tag in ("script", "img")]
    assert not [name for _, name, _ in parsed.attributes if name.startswith("on")]
    assert "<script" not in source
    assert parsed.text.count(hostile) > 8


def test_the_page_needs_nothing_from_outside_and_runs_nothing() -> None:
    parsed, source = look(sound())
    for tag, name, value in parsed.attributes:
        if name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value[:40])
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?([^)]*)", source))
    assert set(re.findall(r"https?://[^\"'\s<]*", source)) <= {"http://www.w3.org/2000/svg"}
    (policy,) = [value for tag, name, value in parsed.attributes if tag == "meta" and "default-src" in value]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    ids = Counter(value for _, name, value in parsed.attributes if name == "id")
    assert max(ids.values()) == 1
    defined = Counter(re.findall(r"(?<![\w(-])--([\w-]+):", source))
    assert set(re.findall(r"var\(--([\w-]+)", source)) <= set(defined)
    assert all(defined[name] == 2 for name in PALETTE), "light and dark"


@pytest.mark.slow
def test_a_large_run_stays_small_and_says_what_shares_a_cell() -> None:
    names = [f"model.layers.{i}.weight" for i in range(330)]
    records = [header(parameters={name: [8, 8] for name in names})]
    for number_ in range(1, 331):
        records.append(step(number_))
        if number_ % 2 == 0:
            records += [update(number_, name, lost=(i % 7) / 7) for i, name in enumerate(names)]
    records = changed(records, "update", [names[200]], range(100, 101), lost=1.0)
    history = History(records)
    cells = grid(history, "update", "lost", 0.0)
    assert cells is not None
    assert cells.values.shape == (ROWS, COLUMNS)
    assert cells.shared == (2, 2)
    assert np.nanmax(cells.values) == 1.0, "the worst of what shares a cell is what is seen"
    source = page(history, "large")
    assert len(source) < 2_000_000
    assert "A cell is the worst of up to 2 measured steps and 2 neighboring tensors." in source
    assert f"The first {ROWS} of 330 tensors." in source


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 400), st.floats(0, 1)), min_size=1, max_size=300))
@settings(max_examples=30)
def test_a_heat_map_never_hides_the_worst(measured: list[tuple[int, int, float]]) -> None:
    history = History(update(number_, f"t{name}", lost=value) for name, number_, value in measured)
    cells = grid(history, "update", "lost", 0.0)
    kept = {(name, number_): value for name, number_, value in measured}
    assert cells is not None
    assert np.nanmax(cells.values) == max(kept.values())


@pytest.mark.parametrize("seed", range(2))
def test_a_run_with_odd_values_anywhere_is_a_page(seed: int) -> None:
    """A sound run, of which one field in ten holds something else."""
    generator = random.Random(seed)
    odd = [
        None, "nan", math.nan, math.inf, -math.inf, -1, 0, 1e300, 1e-300, 10**30, "text", [], {}, True, [[1, 2, 3]],
    ]  # fmt: skip
    records: Records = []
    for record in changed(sound(120), "step", loss_scale=1024.0, skipped=0):
        fields = [field for field in record if field != "kind"]
        chosen = [field for field in fields if generator.random() < 0.1]
        records.append(record | {field: generator.choice(odd) for field in chosen})
    Page(page(History(records), "odd"))


def test_without_what_draws_a_report_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("narrowgauge.cli._report", "narrowgauge.cli._charts"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for kept in (tmp_path / "x.jsonl", tmp_path / "x2.jsonl"):
        with pytest.raises(ModuleNotFoundError) as raised:
            write_report(sound(3), tmp_path / "x.html")
        command = f"pip install 'narrowgauge[train]', then: narrowgauge report {kept}"
        assert str(raised.value) == f"a report needs matplotlib: {command}"
        assert list(read_records(kept)) == sound(3)


def test_cells_are_painted_by_their_distance_and_side() -> None:
    values = np.array([[0.5, 0.75, 1.0, 1.25, 1.5, np.nan]])
    broken = np.array([[False, False, False, False, False, False]])
    colors = _paint(values, 0.5, 1.0, 1.5, broken)[0]
    assert colors[0][3] == colors[4][3] == 255
    assert colors[2][3] < colors[1][3] < colors[0][3]
    assert colors[1][:3].tolist() == colors[0][:3].tolist() != colors[4][:3].tolist()
    assert colors[5][3] == 0
    nearly = _paint(np.array([[0.996, 1.0, 1.004]]), 0.5, 1.0, 1.5, None)[0].tolist()
    assert nearly[0] == nearly[1] == nearly[2]  # rounding in fp32, on both sides
    shares = _paint(np.array([[0.0, 0.001]]), 0.0, 0.0, 1.0, None)[0].tolist()
    assert shares[0] != shares[1]  # any loss at all
    assert _paint(values, 0.5, 1.0, 1.5, np.isnan(values))[0][5].tolist()[3] == 255


def test_the_smoothed_loss_rises_with_a_spike_and_not_before_it() -> None:
    values = np.full(400, 2.0)
    values[300:304] = 9.0
    at = np.arange(400)
    assert medians(values, at).tolist() == [2.0] * 400
    values[300:] = 9.0
    assert medians(values, at).tolist() == values.tolist()


def test_labels_leave_out_what_all_share() -> None:
    assert short(["model.h.0.w", "model.h.1.w"]) == ["0.w", "1.w"]
    assert short(["a.b"]) == ["a.b"]
    assert short(["w", "model.w"]) == ["w", "model.w"]
    (label, _) = short(["x" * 60, "y"])
    assert len(label) == 26
    assert label.startswith("…")
    values = (None, math.nan, -math.inf, 0.0, 1.23456, -2.0, 1e-8)
    assert [number(value) for value in values] == ["—", "NaN", "−inf", "0", "1.235", "−2", "1.000e−08"]


def test_the_command_writes_beside_the_records_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(sound(30), tmp_path / "gauges.jsonl")
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'gauges.html'}\n"
    Page((tmp_path / "gauges.html").read_text())
    assert main(["report", str(tmp_path / "gauges.jsonl"), "--out", str(tmp_path / "new" / "p.html")]) == 0
    assert (tmp_path / "new" / "p.html").is_file()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "gauges.html").is_file()


def test_a_page_that_cannot_be_written_is_one_line_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save(sound(30), tmp_path / "gauges.jsonl")
    save(sound(30), tmp_path / "other.jsonl")
    run, below = str(tmp_path / "gauges.jsonl"), tmp_path / "gauges.jsonl" / "page.html"
    assert main(["report", run, "--out", str(below)]) == 2
    assert capsys.readouterr().err == f"narrowgauge: --out: cannot write '{below}': File exists\n"
    (tmp_path / "compared").mkdir()
    (tmp_path / "compared" / "results.json").write_text(json.dumps(compared()))
    monkeypatch.chdir(tmp_path)

    def refuse(path: Path, content: bytes) -> None:  # as a folder without write permission does, but for root
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    for words, out in (
        ([str(tmp_path)], str(tmp_path / "gauges.html")),
        ([run, "other.jsonl"], "runs.html"),
        (["compared"], "compared/report.html"),
    ):
        assert main(["report", *words]) == 2
        assert capsys.readouterr().err == f"narrowgauge: --out: cannot write '{out}': Permission denied\n"


def test_several_runs_are_one_page_with_a_table_and_their_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = "<b>&"
    for name in ("a", hostile, "cut", "compared"):
        Path(name).mkdir()
    save(sound(), Path("a", "gauges.jsonl"))
    broken = changed(sound(100), "update", ["ln.weight"], lost=1.0, descent_quality=0.0)
    save(changed(broken, "step", loss=1.5), Path(hostile, "gauges.jsonl"))
    save([header(), step(1, 7.0), {"kind": "step", "step": "cut"}], Path("cut", "gauges.jsonl"))
    Path("cut", "gauges.jsonl").write_text(Path("cut", "gauges.jsonl").read_text()[:-3])
    Path("compared", "results.json").write_text(json.dumps(compared()))
    assert main(["report", "a", hostile, "cut", "compared"]) == 0
    printed = capsys.readouterr().out
    assert "cut/gauges.jsonl: read up to a damage: line" in printed
    assert printed.endswith("\nruns.html\n")
    source = Path("runs.html").read_text()
    parsed = Page(source)
    assert headings(source) == ["Training loss", "Effective descent quality, %", "Lost updates, %", "RMS_t"]
    assert parsed.row("a")[1:] == ["AdamW8bit", "200", "2.078", "100", "0", "1", "0", "0", "0"]
    assert parsed.row(hostile)[1:4] == ["AdamW8bit", "100", "1.5"]
    assert parsed.row(hostile)[-1] == "1"
    assert parsed.row("compared: A, seed 1")[1:6] == ["A", "3", "2.5", "50", "40"]
    assert "7 runs side by side. The lowest loss at the end is that of <b>&, 1.5; the highest that of cut, 7." in (
        parsed.text
    )
    assert "<b>&: lost updates" in parsed.text
    assert "Not recorded: cut." in parsed.text
    assert max(Counter(value for _, name, value in parsed.attributes if name == "id").values()) == 1
    assert main(["report", "a", "a"]) == 2
    assert "RUN must name each run once, got 'a' twice" in capsys.readouterr().err
    assert main(["report", "a", "cut", "--out", "a/gauges.jsonl"]) == 2
    assert "--out must not be the file of records" in capsys.readouterr().err


def test_equal_losses_have_no_lowest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        save(changed(sound(50), "step", loss=2.5), Path(f"{name}.jsonl"))
    assert main(["report", "a.jsonl", "b.jsonl"]) == 0
    text = Page(Path("runs.html").read_text()).text
    assert "2 runs side by side. The losses at the end are equal, 2.5." in text
    assert "lowest" not in text


def test_of_a_comparison_it_draws_the_page_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text(json.dumps(compared()))
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert "What narrow numbers cost" in (tmp_path / "report.html").read_text()
    assert main(["report", str(tmp_path / "results.json"), "--out", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == (tmp_path / "report.html").read_text()
    for content in ("{", "[]", '{"schema": 1, "recipes": {}}', json.dumps(compared() | {"schema": 2})):
        (tmp_path / "results.json").write_text(content)
        assert main(["report", str(tmp_path)]) == 2
        complaint = capsys.readouterr().err
        assert "RUN must have the results of a comparison, got" in complaint
    assert complaint.endswith("its schema must be 1, got 2\n")


def test_a_cut_file_is_read_up_to_the_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(sound(30), tmp_path / "gauges.jsonl")
    path.write_bytes(path.read_bytes()[:-20])
    assert main(["report", str(path)]) == 0
    assert "read up to a damage: line" in capsys.readouterr().out
    text = Page((tmp_path / "gauges.html").read_text()).text
    assert text.index("The records end early. line") < text.index("The page shows what stands before.")
    assert text.index("end early") < text.index("Advice")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "which does not exist"), (b"", "the file is empty"), (b"hello\n", "nothing to read: line 1"),
     (b"\xff\xfe\x00", "nothing to read: line 1"), (b'{"kind": "step", "step": 1}\n', "must be 'run'")],
)  # fmt: skip
def test_what_is_no_file_of_records_is_refused_in_one_line(
    content: bytes | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    assert main(["report", str(tmp_path)]) == 2
    assert "a folder without gauges.jsonl" in capsys.readouterr().err
    if content is not None:
        path.write_bytes(content)
    assert main(["report", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("narrowgauge: RUN must ")
    assert complaint in error
    assert error.count("\n") == 1
    assert not path.with_suffix(".html").exists()


def test_only_pages_are_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(sound(10), tmp_path / "gauges.jsonl")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    assert main(["report", str(path), "--out", str(weights)]) == 2
    assert f"--out must be a new file, or a page to write over, got {str(weights)!r}" in capsys.readouterr().err
    assert weights.read_bytes() == b"weights"
    for out in (tmp_path / "page.html", tmp_path / "new", tmp_path / "page.html", tmp_path / "new"):
        assert main(["report", str(path), "--out", str(out)]) == 0
        assert out.read_text().startswith("<!doctype html>")


def test_a_run_without_gauges_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "history.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    for command in (["report"], ["watch", "--once"]):
        assert main([*command, str(tmp_path)]) == 2
        assert capsys.readouterr().err.endswith(": its training had --gauges-every 0\n")


def test_the_records_are_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(sound(10), tmp_path / "run.html")
    before = path.read_bytes()
    assert main(["report", str(path)]) == 2
    assert "--out must not be the file of records" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_what_a_run_could_not_record_is_named() -> None:
    missing = {"kind": "missing", "step": 5, "of": "activation", "names": ["h.0", "h.1"], "why": "compiled <away>"}
    text = page(History([*sound(), missing]), "run")
    assert "No features were recorded of h.0 and h.1: compiled &lt;away&gt;." in text
    for strange in ({"names": 3}, {"why": None}, {"of": [1]}, {"names": [None, {}]}):
        page(History([header(), missing | strange]), "run")
