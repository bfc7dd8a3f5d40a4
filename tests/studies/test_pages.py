"""The pages say what the committed results say, and the results name nobody's folders."""

import json
import re
from pathlib import Path

import pytest
import render

STUDIES = Path(render.__file__).parent
PAGES = sorted((STUDIES.parent / "docs" / "studies").glob("*.md"))
RESULTS = sorted((STUDIES / "results").glob("*.json"))


def test_there_is_a_page_for_each_study() -> None:
    assert [page.stem for page in PAGES] == [
        "bytes_and_loss",
        "collage_float8",
        "eight_bit_adam",
        "inner_product_noise",
        "loss_scaling",
        "loss_spikes",
        "memory_plans",
        "quantization_error",
        "state_codecs",
        "training_magnitudes",
    ]
    assert {render.study_of(path.name) for path in RESULTS} == {page.stem for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_what_its_results_say(page: Path) -> None:
    text = page.read_text()
    assert render.rendered(text) == text, "run: python studies/render.py"
    assert len(render.NUMBER.findall(text)) == text.count("<!--=")
    assert len(render.TABLE.findall(text)) == text.count("<!-- table:")
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


@pytest.mark.parametrize("study", ["quantization_error", "inner_product_noise"])
def test_pictures_are_drawn(study: str, tmp_path: Path) -> None:
    suffixes = ("_maps", "_codes") if study == "quantization_error" else ("",)
    for suffix in suffixes:
        picture = tmp_path / f"{study}_cpu{suffix}.png"
        render._pictures.draw(STUDIES / "results", picture)
        assert picture.read_bytes().startswith(b"\x89PNG")
