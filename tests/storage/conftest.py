"""Expansions are walked by one thread: in thousands of small operations more would only wait for one another."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    threads = torch.get_num_threads()
    if request.module.__name__.startswith("test_expansion_"):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
