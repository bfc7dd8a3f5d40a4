"""Tests see nothing of the machine that would make them pass here and fail elsewhere."""

from __future__ import annotations

import os
import pwd
import socket
from pathlib import Path

import pytest

from narrowgauge.kernels import _cache
from narrowgauge.trainers import load_corpus


def test_the_home_is_not_the_users() -> None:
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert Path.home() != Path(home)
    assert not Path("~/.cache").expanduser().exists()
    assert _cache.folder() == Path(os.environ["XDG_CACHE_HOME"], "narrowgauge")


def test_fonts_are_matplotlibs_own() -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.font_manager import fontManager

    own = Path(matplotlib.get_data_path())
    assert {own in Path(own, font.fname).parents for font in fontManager.ttflist} == {True}


def test_there_is_no_network() -> None:
    with socket.socket() as one, pytest.raises(RuntimeError, match="tests have no network"):
        one.connect(("192.0.2.1", 80))  # of a network that is for documents only


def test_pythons_library_is_no_text() -> None:
    with pytest.raises(RuntimeError, match="give it a text of its own"):
        load_corpus(None)
