"""The pages say what the committed results say, and the results name nobody's folders."""

import json
import re
from pathlib import Path

import _unmeasured
import pytest
import render

STUDIES = Path(render.__file__).parent
PAGES = sorted((STUDIES.parent / "docs" / "studies").glob("*.md"))
RESULTS = sorted((STUDIES / "results").glob("*.json"))


def test_there_is_a_page_for_each_study() -> None:
    assert [page.stem for page in PAGES] == [
        "adam_variants",
        "bytes_and_loss",
        "clip_precision",
        "collage_float8",
        "collage_throughput",
        "collage_training",
        "compressed_training",
        "eight_bit_adam",
        "inner_product_noise",
        "loss_scaling",
        "loss_spikes",
        "memory_plans",
        "other_codes",
        "quantization_error",
        "stability",
        "state_codecs",
        "training_magnitudes",
    ]
    waiting = {render.study_of(name) for name in _unmeasured.OPTIONS}
    assert {render.study_of(path.name) for path in RESULTS} | waiting == {page.stem for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_what_its_results_say(page: Path) -> None:
    text = page.read_text()
    assert render.rendered(text) == text, "run: python studies/render.py"
    assert len(render.NUMBER.findall(text)) == text.count("<!--=")
    assert len(render.TABLE.findall(text)) == text.count("<!-- table:")
    assert len(render.SHOWN.findall(text)) == text.count("<!-- picture:")
    for picture in render.PICTURE.findall(text):
        assert (page.parent / f"{picture}.png").is_file()


def test_the_readme_says_what_the_results_say() -> None:
    text = (STUDIES.parent / "README.md").read_text()
    assert render.TABLE.search(text)
    assert render.rendered(text) == text, "run: python studies/render.py"


def test_rendering_puts_a_number_right() -> None:
    number = "<!--=inner_product_noise_h200.json tokens-->0<!--/-->"
    assert render.rendered(number) == "<!--=inner_product_noise_h200.json tokens-->65,536<!--/-->"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path: Path) -> None:
    results = json.loads(path.read_text())
    assert results["command"].startswith(f"python studies/{render.study_of(path.name)}.py")
    assert {"device", "torch"} <= results["environment"].keys()
    if path.stem != "memory_plans":  # where nothing is trained
        assert {"seed", "steps", "model"} <= results["training"].keys()
    assert not re.search(r'"[^"]*(/home|/root|/tmp|/work|[A-Z]:\\)', path.read_text())


@pytest.mark.parametrize("suffix", ["_maps", "_codes"])
def test_pictures_are_drawn(suffix: str, tmp_path: Path) -> None:
    picture = tmp_path / f"quantization_error_cpu{suffix}.png"
    render._pictures.draw(STUDIES / "results", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_page_gets_its_picture_with_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "inner_product_noise.md"
    marks = [
        f"<!-- picture: {name}.png Noise\nagainst length -->\n"
        for name in ("inner_product_noise_cpu", "stability_waiting")
    ]
    page.write_text("".join(f"{mark}<!-- end -->\n" for mark in marks))
    monkeypatch.setattr(render, "PAGES", tmp_path)
    monkeypatch.setattr(render, "OTHERS", ())
    monkeypatch.setitem(render._unmeasured.OPTIONS, "stability_waiting.json", "--device cuda")
    monkeypatch.setattr(render.sys, "argv", ["render.py", "--check"])
    assert render.main() == 1
    monkeypatch.setattr(render.sys, "argv", ["render.py"])
    assert render.main() == 0
    shown, waiting = page.read_text().split(marks[1])
    assert shown == f"{marks[0]}![Noise against length](inner_product_noise_cpu.png)\n<!-- end -->\n"
    assert waiting.startswith("Not measured yet.\n\n`python studies/stability.py ")
    assert [path.name for path in tmp_path.glob("*.png")] == ["inner_product_noise_cpu.png"]
    assert next(tmp_path.glob("*.png")).read_bytes().startswith(b"\x89PNG")
