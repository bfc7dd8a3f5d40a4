"""Pictures of formats: made where they are asked for, valid, repeatable, and of the values themselves."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread

from narrowgauge.cli import _formats_charts, main
from narrowgauge.cli._charts import save_figure
from narrowgauge.cli._format_names import FORMATS, find


def plot(*arguments: object) -> int:
    return main(["formats", *map(str, arguments)])


@pytest.mark.parametrize(
    "arguments",
    [[], ["dynamic_tree"], ["inverse_dynamic", "--unsigned"], ["fp4_e2m1", "--codebook"], ["fp16"], ["e11m20"]],
    ids=" ".join,
)
def test_a_png_is_an_image_of_two_panels(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "folder" / "a picture.PNG"
    assert plot(*arguments, "--plot", path) == 0
    assert capsys.readouterr().out == f"{path}\n"
    height, width, _ = imread(path).shape
    assert width > 1.8 * height > 1000


def svg(name: str | None) -> bytes:
    drawn = _formats_charts.maps(None) if name is None else _formats_charts.spacing(find(name))
    return save_figure(drawn, Path("x.svg"))


def test_svg_is_well_formed_repeats_to_the_letter_and_leaves_settings_alone() -> None:
    with matplotlib.rc_context():
        first = svg(None)
        assert ElementTree.fromstring(first).tag.endswith("svg")
        matplotlib.rcParams["font.size"] = 3
        before = dict(matplotlib.rcParams)
        assert svg(None) == first
        assert svg("fp16") == svg("fp16")
        assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--plot"], "formats.svg"),
        (["--plot", "BF16"], "formats-bf16.svg"),
        (["linear", "--plot", "--bits", "3"], "formats-linear.svg"),
    ],
)
def test_without_a_path_there_is_a_default(
    arguments: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plot(*arguments) == 0
    ElementTree.parse(tmp_path / "runs" / name)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_the_staircase_is_the_formats_spacing_and_error(fmt: object) -> None:
    edges, spacings, errors = _formats_charts._staircase(fmt)
    import torch

    inside = edges >= fmt.min_exponent - fmt.mantissa_bits
    x = torch.from_numpy(2.0 ** edges[inside])
    assert np.allclose(np.log2(fmt.ulp(x).numpy()), spacings[inside])
    assert edges[-1] == np.log2(fmt.max)
    # Just above a power of two, halfway to the next number, is the largest relative error of a binade.
    middle = x[:-1] + fmt.ulp(x[:-1]) / 2
    worst = (fmt.nearest(middle) - middle).abs() / x[:-1]
    assert np.allclose(worst.numpy(), 2.0 ** errors[inside][:-1])


@pytest.mark.parametrize("place", ["picture.jpg", "picture.", "blocked/picture.png", "folder.svg"])
def test_what_cannot_be_written_is_one_line(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "blocked").write_text("a file where a folder is wanted")
    (tmp_path / "folder.svg").mkdir()
    assert plot("--plot", tmp_path / place) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("narrowgauge: --plot")
    assert place in printed.err
    assert printed.err.count("\n") == 1


def test_options_that_a_picture_has_no_use_for_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plot("dynamic", "--codes", "--plot") == 2
    assert "--codes must not be given with --plot" in capsys.readouterr().err
    assert plot("--plot", "~nosuchuser/x.png") == 2
    assert "nosuchuser" in capsys.readouterr().err
