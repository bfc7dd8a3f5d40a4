"""Installed sources as a text: packages stand on one side, copies are left out, and the order is the seed's."""

from collections.abc import Callable
from pathlib import Path

import pytest

from narrowgauge.trainers import DataError
from studies.shared import installed

Root = Callable[[dict[str, str]], Path]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    def make(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def many(count: int = 30) -> dict[str, str]:
    return {f"package{i}/{part}.py": f"{part}_{i} = {i}\n" * 20 for i in range(count) for part in ("one", "two")}


def packages(documents) -> set[str]:
    return {document.name.split("/")[0].removesuffix(".py") for document in documents}


def test_no_package_is_on_both_sides(root: Root) -> None:
    corpus = installed.installed_sources(1 << 20, roots=[root(many())])
    assert packages(corpus.train) & packages(corpus.validation) == set()
    assert packages(corpus.documents) == {f"package{i}" for i in range(30)}
    held = sum(document.size for document in corpus.validation)
    assert 0.05 <= held / corpus.total_bytes < 0.1


def test_copies_and_what_is_no_package_are_left_out(root: Root) -> None:
    """Copies are known in spite of other comments and blanks."""
    files = many(4) | {"package0/vendored.py": "# a copy\n\n" + "  one_1 = 1\n" * 20, "module.py": "m = 1"}
    files |= {"a.dist-info/x.py": "x = 1", ".hidden/x.py": "x = 2", "site-packages/y.py": "y = 3", "pkg/t.txt": "z"}
    corpus = installed.installed_sources(1 << 20, roots=[root(files)])
    assert packages(corpus.documents) == {f"package{i}" for i in range(4)} | {"module"}
    assert corpus.skipped == {"duplicate": 1}
    assert sum("one_1 = 1" in document.text for document in corpus.documents) == 1


def test_there_is_an_end_and_no_package_takes_it_all(root: Root) -> None:
    files = many() | {f"huge/part{i}.py": f"huge_{i} = {i}\n" * 50 for i in range(100)}
    corpus = installed.installed_sources(8000, roots=[root(files)])
    largest = max(document.size for document in corpus.documents)
    assert 8000 <= corpus.total_bytes < 8000 + largest
    huge = sum(document.size for document in corpus.documents if document.name.startswith("huge/"))
    assert huge < 0.2 * 8000 + largest


def test_a_seed_is_an_order(root: Root) -> None:
    folder = root(many())
    again = [installed.installed_sources(4000, seed, [folder]) for seed in (0, 0, 1)]
    assert again[0] == again[1]
    assert packages(again[0].documents) != packages(again[2].documents)


def test_one_package_is_not_enough(root: Root) -> None:
    with pytest.raises(DataError, match=r"--data must be a text .* got 1"):
        installed.installed_sources(1 << 20, roots=[root({"only/a.py": "a = 1"})])


def test_shared_lines_are_those_of_both_sides(root: Root) -> None:
    long = "a_line_that_is_long_enough_to_be_alike = 'not by chance'\n"
    own = "another_long_line_that_is_nobody_elses_at_all_{} = 1\n"
    files = {f"package{i}/one.py": long + own.format(i) for i in range(9)}
    corpus = installed.installed_sources(1 << 20, roots=[root(files)])
    assert installed.shared_lines(corpus) == 0.5
