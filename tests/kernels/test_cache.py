"""The user's cache folder: where it is, and what happens where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from narrowgauge.kernels import _cache


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert _cache.folder() == Path("/home/someone/.cache/narrowgauge")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the convention says to leave alone
    assert _cache.folder() == Path("/home/someone/.cache/narrowgauge")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _cache.folder() == tmp_path / "narrowgauge"


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not in the folder where one works, from which anybody's compiled code would be loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where the user has no entry either
    file = _cache.folder() / "records.json"
    assert file.is_absolute()
    assert not file.exists()
    assert _cache.read_records(file) == {}
    assert not _cache.merge_records(file, "device", {"key": 1})
    assert list(tmp_path.iterdir()) == []
