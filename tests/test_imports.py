"""`import narrowgauge` in a fresh interpreter: light, silent, and without side effects."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import narrowgauge

# What costs time or memory at import and is wanted by kernels or programs alone.
HEAVY = {"triton", "transformers", "tokenizers", "matplotlib", "typer", "click", "rich", "jinja2"}
HEAVY |= {"lightning", "tensorboard"}

# Every read of the environment goes through this class, whatever name os.environ was imported under.
PROBE = """
import json, os, sys
import numpy, torch

modules, reads, kind = set(sys.modules), [], type(os.environ)
def recording(plain):
    def method(self, *key):
        reads.append(str(key))
        return plain(self, *key)
    return method
for name in ("__getitem__", "__iter__", "__setitem__", "__delitem__"):
    setattr(kind, name, recording(getattr(kind, name)))
print("before", flush=True)
print("before", file=sys.stderr, flush=True)

import narrowgauge

facts = {
    "reads": list(reads),
    "modules": sorted({name.split(".")[0] for name in set(sys.modules) - modules}),
    "own": [name for name in sys.modules if name.startswith("narrowgauge.")],
    "cuda": torch.cuda.is_initialized(),
    "file": narrowgauge.__file__,
}
if len(sys.argv) > 2:
    from narrowgauge.cli import main
    facts["status"] = main(["formats", "--value", "0.1"])
    facts["of_formats"] = [name for name in sys.modules if "." not in name]
with open(sys.argv[1], "w") as file:
    json.dump(facts, file)
"""


def probe(folder: Path, path: Path | None = None) -> dict[str, Any]:
    """Import narrowgauge in an interpreter of its own, and if it is ours run a command; what it did."""
    facts = folder / "facts.json"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(facts), *(["formats"] if path is None else [])],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    # What torch may say on import comes before the marker.
    out, err = (text.split("before\n", 1)[1] for text in (done.stdout, done.stderr))
    return json.loads(facts.read_text()) | {"out": out, "err": err}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return probe(tmp_path_factory.mktemp("import"))


def test_it_is_this_checkout(facts: dict[str, Any]) -> None:
    assert Path(facts["file"]) == Path(narrowgauge.__file__)


def test_it_has_no_side_effects(facts: dict[str, Any]) -> None:
    assert not facts["cuda"]
    assert "narrowgauge" in facts["modules"]
    assert not HEAVY & set(facts["modules"])
    assert facts["reads"] == []
    assert facts["err"] == ""
    assert facts["out"].startswith("0.1")
    assert "narrowgauge._version" in facts["own"]
    assert not {"narrowgauge.distributed", "narrowgauge.gauges"} & set(facts["own"])


def test_formats_are_shown_without_training_and_drawing(facts: dict[str, Any]) -> None:
    assert facts["status"] == 0
    assert "\x1b" not in facts["out"]
    assert not {"transformers", "tokenizers", "matplotlib", "jinja2", "triton"} & set(facts["of_formats"])


@pytest.mark.slow
def test_the_probe_sees_what_it_looks_for(tmp_path: Path) -> None:
    """A package of the same name that does all it should not."""
    package = tmp_path / "planted" / "narrowgauge"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import os, sys\nfrom os import environ\nimport rich\n"
        "os.getenv('A')\n'B' in environ\nos.environ.get('C')\n"
        "print('out')\nprint('err', file=sys.stderr)\n"
    )
    seen = probe(tmp_path, path=tmp_path / "planted")
    assert Path(seen["file"]).parent == package
    assert [name for name in "ABC" if f"('{name}',)" in seen["reads"]] == ["A", "B", "C"]
    assert "rich" in seen["modules"]
    assert "out" in seen["out"]
    assert "err" in seen["err"]


def test_all_names_what_there_is() -> None:
    assert len(narrowgauge.__all__) == len(set(narrowgauge.__all__))
    rooms = [name for name in narrowgauge.__all__ if isinstance(getattr(narrowgauge, name), ModuleType)]
    functions = [name for name in narrowgauge.__all__ if callable(getattr(narrowgauge, name))]
    assert {*rooms, *functions, "__version__"} == set(narrowgauge.__all__)
    assert rooms
    assert all(callable(getattr(narrowgauge, name)) and name in dir(narrowgauge) for name in functions)
    for name in rooms:
        module = importlib.import_module(f"narrowgauge.{name}")
        assert getattr(narrowgauge, name) is module
        assert name in dir(narrowgauge)
        for public in getattr(module, "__all__", ()):
            assert hasattr(module, public), f"narrowgauge.{name}.{public}"


def test_what_there_is_not_has_a_name() -> None:
    with pytest.raises(AttributeError, match="'narrowgauge' has no attribute 'gages'"):
        narrowgauge.gages  # noqa: B018
