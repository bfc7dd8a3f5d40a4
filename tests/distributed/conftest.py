"""What starts processes, once: importing torch is most of what they take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from saving_process import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()
