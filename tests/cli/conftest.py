"""What commands train on."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall, {n} bottles of beer.\n" for n in range(400)))
    return path
