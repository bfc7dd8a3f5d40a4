"""The wheel, built from the working tree and installed into an environment of its own: what users get."""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import narrowgauge

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "narrowgauge"

# Everything but Python that the package carries.
DATA = {"narrowgauge/py.typed"} | {
    f"narrowgauge/{path.relative_to(SOURCE).as_posix()}" for path in SOURCE.glob("cli/templates/*.j2")
}

LOOK = """
import importlib.metadata, importlib.resources, json, narrowgauge
package = importlib.resources.files("narrowgauge")
print(json.dumps({
    "file": narrowgauge.__file__,
    "version": narrowgauge.__version__,
    "metadata": importlib.metadata.version("narrowgauge"),
    "typed": package.joinpath("py.typed").is_file(),
    "names": narrowgauge.__all__,
    "pages": [package.joinpath("cli", "templates", f"{name}.html.j2").read_text(encoding="utf-8")
              for name in ("page", "compare", "run")],
}))
"""


def run(*command: str | Path, folder: Path) -> str:
    """Run a command with no Python path but the interpreter's own; its standard output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree; hatchling builds it here, without network or isolation."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, folder=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it, and torch and numpy borrowed from the one that runs the tests.

    They are borrowed through a .pth file, which puts their folder behind the fresh one's own. Such files in the
    borrowed folder have no effect, so an editable narrowgauge there stays out of sight.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
    (site,) = folder.glob("**/site-packages")
    borrowed = dict.fromkeys(
        [str(Path(torch.__file__).parents[1]), *map(sysconfig.get_path, ("purelib", "platlib"))]
    )
    (site / "borrowed.pth").write_text("\n".join(borrowed))
    options = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile")
    run(sys.executable, "-m", "pip", "--python", python(folder), "install", *options, wheel, folder=folder)
    return folder


def python(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        licence = archive.read(next(name for name in names if name.endswith("/LICENSE")))
    about = f"narrowgauge-{narrowgauge.__version__}.dist-info"
    sources = [*SOURCE.rglob("*.py"), *(SOURCE / "kernels" / "c").glob("*.h")]
    modules = {f"narrowgauge/{path.relative_to(SOURCE).as_posix()}" for path in sources}
    extras = {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert names == modules | DATA | extras
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert b"narrowgauge developers" in licence


def test_it_imports_and_runs_from_where_it_was_installed(environment: Path) -> None:
    seen = json.loads(run(python(environment), "-c", LOOK, folder=environment))
    assert Path(seen["file"]).is_relative_to(environment)
    assert seen["version"] == seen["metadata"] == narrowgauge.__version__
    assert seen["typed"]
    assert seen["names"] == narrowgauge.__all__
    assert ["<html" in page for page in seen["pages"]] == [True, False, False]
    assert ['{% extends "page.html.j2" %}' in page for page in seen["pages"]] == [False, True, True]
    command = python(environment).with_name("narrowgauge.exe" if os.name == "nt" else "narrowgauge")
    assert run(command, "--version", folder=environment).strip() == narrowgauge.__version__


def test_the_torch_it_asks_for(metadata: Message) -> None:
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    core = {requirement.name: requirement.specifier for requirement in requirements if requirement.marker is None}
    assert set(core) == {"torch", "numpy"}
    for version in ("2.11.0", "2.12.1", "2.13.0+cpu", "2.14.1"):
        assert version in core["torch"], version
    for version in ("2.10.9", "2.15", "2.15.0", "3.0"):
        assert version not in core["torch"], version
    assert torch.__version__ in core["torch"]


def test_its_python_licence_and_description(metadata: Message) -> None:
    asked = SpecifierSet(metadata["Requires-Python"])
    assert [minor for minor in range(20) if f"3.{minor}.0" in asked] == [11, 12, 13]
    named = [line.rsplit(" ", 1)[1] for line in metadata.get_all("Classifier", []) if "Python :: 3." in line]
    assert named == ["3.11", "3.12", "3.13"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Summary"]
    body = metadata.get_payload(decode=True)
    assert isinstance(body, bytes)
    assert body.decode().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
