"""What all tests share: which of them run here, how random the property tests are, and how many threads."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from forked import START
from interpreted import quicken

if not torch.cuda.is_available():
    # Kernels run in triton's interpreter, which has to be said before anything imports triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    quicken()

# The same examples on every machine and at every run, and no clock in the verdict. A search for new examples is
# one option away: --hypothesis-profile=explore.
settings.register_profile("fixed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores already; more threads in each would only wait for one another.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the tests' own, in which compiled steps and tokens of one test are found again by the next."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def surroundings(cache: Path) -> Iterator[None]:
    """Those of small trainings: the tests' own cache, one thread, and a terminal that is wide enough."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setenv("COLUMNS", "200")
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for spawned processes is given forks of the server, with its imports."""
    plain = multiprocessing.get_context
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda method=None: plain(START if method == "spawn" else method)
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    with_slow = config.getoption("--slow") or "slow" in config.getoption("markexpr")
    no_slow = pytest.mark.skip(reason="slow: takes minutes; run with --slow or -m slow")
    no_gpu = pytest.mark.skip(reason="gpu: needs a CUDA device, torch sees none")
    with_gpu: bool | None = None  # asked of the driver only if a test wants to know
    for item in items:
        if not with_slow and item.get_closest_marker("slow"):
            item.add_marker(no_slow)
        if item.get_closest_marker("gpu"):
            with_gpu = torch.cuda.is_available() if with_gpu is None else with_gpu
            if not with_gpu:
                item.add_marker(no_gpu)
