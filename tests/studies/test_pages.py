"""The pages say what the committed results say, and the results name nobody's folders."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from studies import render

PAGES = {page.stem: page for page in sorted(render.PAGES.glob("*.md"))}
RESULTS = sorted(render.STUDIES.glob("*/results/*.json"))
PICTURES = sorted({name for page in PAGES.values() for name in render.PICTURE.findall(page.read_text())})


def test_there_is_a_page_and_a_command_for_each_study() -> None:
    assert tuple(PAGES) == tuple(dict.fromkeys(path.parents[1].name for path in RESULTS))
    listed = (render.STUDIES / "README.md").read_text()
    for name in render.NAMES:
        assert (render.STUDIES / name / "run.py").is_file()
        assert (f"[docs/studies/{name}.md]" if name in PAGES else f"| `{name}` |") in listed
    assert all(render.page_of(path.name).__name__ == f"studies.{path.parents[1].name}.page" for path in RESULTS)


@pytest.mark.parametrize("page", [*PAGES.values(), render.ROOT / "README.md"], ids=lambda page: page.stem)
def test_a_page_is_what_its_results_say(page: Path) -> None:
    text = page.read_text()
    assert render.rendered(text) == text, "run: python -m studies.render"
    assert len(render.NUMBER.findall(text)) == text.count("<!--=")
    assert len(render.SHOWN.findall(text)) == text.count("<!-- picture:")
    if page.parent == render.PAGES:
        assert len(render.TABLE.findall(text)) == text.count("<!-- table:")
        assert all((page.parent / f"{name}.png").is_file() for name in render.PICTURE.findall(text))


def test_drawing_corrects_a_number() -> None:
    number = "<!--=inner_product_noise_h200.json tokens-->0<!--/-->"
    assert render.rendered(number) == "<!--=inner_product_noise_h200.json tokens-->65,536<!--/-->"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path: Path) -> None:
    results = json.loads(path.read_text())
    assert render.results(path.name)["command"].startswith(f"python -m studies.{path.parents[1].name}.run")
    assert {"device", "torch"} <= results["environment"].keys()
    if path.stem != "memory_plans":  # where nothing is trained
        assert {"seed", "steps", "model"} <= results["training"].keys()
    assert not re.search(r'"[^"]*(/home|/root|/tmp|/work|[A-Z]:\\)', path.read_text())


DRAWN = {render.page_of(name): name for name in PICTURES}.values()  # one of each page


@pytest.mark.parametrize("name", [n if n in DRAWN else pytest.param(n, marks=pytest.mark.slow) for n in PICTURES])
def test_a_picture_is_drawn(name: str, tmp_path: Path) -> None:
    render.draw(tmp_path / f"{name}.png")
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_a_page_names_by_mistake() -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no stability_x\.json"):
        render.rendered("<!-- table: stability_x.json ways -->\n<!-- end -->")
