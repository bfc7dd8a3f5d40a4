"""The table of who may import whom, enforced over the source.

Rooms are the packages and modules directly under `narrowgauge`. Every import counts, wherever it stands: at the
top, inside a function, under TYPE_CHECKING, through `import_module` with a literal name.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "narrowgauge"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE

# Room: the rooms it may import beside itself.
TABLE: dict[str, set[str]] = {
    "formats": set(),
    "rules": set(),
    "scaling": set(),
    "kernels": {"formats"},
    "storage": {"formats", "kernels"},
    "nn": {"storage"},
    # A float8 weight is the codes that a layer multiplies.
    "linear": {"formats", "kernels", "storage"},
    # What torch's own optimizers intended is worked out by the rules' equations.
    "gauges": {"formats", "storage", "rules", "kernels"},
    "optim": {"formats", "storage", "rules", "kernels"},
    "distributed": {"formats", "storage", "kernels", "optim", "linear", "scaling"},
    "recipes": {"formats", "storage", "rules", "kernels", "optim", "linear", "nn", "scaling"},
}
TABLE["integrations"] = set(TABLE)
TABLE["trainers"] = set(TABLE)
TABLE["cli"] = set(TABLE)

# The package's own __init__ shows the rooms of the library, not its programs.
TOP = set(TABLE) - {"integrations", "trainers", "cli"}

# What hands over to a program: pages need what the library does without, comparisons train, and a plan by the name
# of a model is of the model that a training of that name makes.
HANDED_OVER = {
    ("gauges/_report.py", "narrowgauge.cli._report._run_page.write_run_report"),
    ("recipes/_plan.py", "narrowgauge.trainers._named_models.named_model"),
    ("trainers/_compare.py", "narrowgauge.cli._results.save"),
    ("__init__.py", "narrowgauge.trainers._compare.compare"),
}

# What may be imported from outside beside the standard library. The programs bring what they need; triton and the
# peers that benchmarks compare with are nobody's to import (kernels excepted, for triton).
LIBRARY = {"torch", "numpy"}
PROGRAMS = {"trainers", "cli"}
# What plugs into a framework is made of that framework's class: one file for each, imported when it is asked for.
PLUGINS = {
    "gauges/_huggingface.py": "transformers",
    "gauges/_lightning.py": "lightning",
    **{
        f"integrations/{name}.py": name for name in ("lightning", "open_clip", "timm", "torchtitan", "transformers")
    },
    "integrations/axolotl.py": "axolotl pydantic",
}
PEERS = {"bitsandbytes", "torchao", "optimi", "flashoptim", "heavyball"}


def violations(source: Path) -> list[str]:
    """Every import under a package folder that the table forbids, as `file:line: what and why`."""
    found = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        room = parts[0]
        if room not in TABLE and not room.startswith("_"):
            found.append(f"{path.relative_to(source)}:1: the room {room!r} is not in the table")
            continue
        package = [PACKAGE, *parts[:-1]]
        for line, target in imports(path, package):
            place = path.relative_to(source).as_posix()
            handed_over = (place, ".".join(target)) in HANDED_OVER
            plugs = bool(target) and target[0] in PLUGINS.get(place, "").split()
            why = None if handed_over or plugs else forbidden(room, target)
            if why is not None:
                found.append(f"{path.relative_to(source)}:{line}: {'.'.join(target) or '(nothing)'}: {why}")
    return found


@functools.cache
def looked_through(code: str) -> tuple[list[tuple[int, int, str]], list[tuple[int, str, str]]]:
    """Line, level and dotted name of all that some code imports; line, name and attribute where it reads one."""
    imported, read = [], []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name):
                read.append((node.lineno, node.value.id, node.attr))
        elif isinstance(node, ast.Import):
            imported += [(node.lineno, 0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = f"{node.module}." if node.module else ""
            imported += [(node.lineno, node.level, start + alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            argument = node.args[0].value
            if name in ("import_module", "__import__") and isinstance(argument, str):
                stripped = argument.lstrip(".")
                imported.append((node.lineno, len(argument) - len(stripped), stripped))
    return imported, read


def imports(path: Path, package: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Line and dotted name, as a list, of everything that a module imports."""
    for line, level, name in looked_through(path.read_text(encoding="utf-8"))[0]:
        yield line, absolute(name, level, package)


def absolute(name: str, level: int, package: list[str]) -> list[str]:
    """A name with its leading dots resolved; empty if they lead out of the package."""
    names = name.split(".") if name else []
    if level == 0:
        return names
    return [*package[: len(package) - level + 1], *names] if level <= len(package) else []


def forbidden(room: str, target: list[str]) -> str | None:
    """Why a room may not import a dotted name, or None if it may."""
    own = TOP if room == "__init__" else TABLE.get(room, set())  # other private modules: nothing of ours
    if not target:
        return "leads out of the package"
    if target[0] == PACKAGE:
        if len(target) == 1 or target[1] == "*":
            return None if own >= TOP else f"{room} may not import the package as a whole"
        wanted = target[1]
        free = wanted == room or wanted.startswith("_")
        return None if free or wanted in own else f"{room} may not import {wanted}"
    if target[0] in PEERS:
        return "peers are imported nowhere in the library"
    if target[0] == "triton":
        return None if room == "kernels" else "only kernels may import triton"
    if target[0] in sys.stdlib_module_names or target[0] in LIBRARY or room in PROGRAMS:
        return None
    return f"only {' and '.join(sorted(PROGRAMS))} may import it"


def circle(source: Path) -> list[str]:
    """Modules that import each other in a circle, the first of them twice; empty if there are none."""
    files = {}
    for path in source.rglob("*.py"):
        parts = (PACKAGE, *path.relative_to(source).with_suffix("").parts)
        files[parts[:-1] if parts[-1] == "__init__" else parts] = path
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for name, path in files.items():
        package = list(name) if path.name == "__init__.py" else list(name[:-1])
        found = [tuple(target) for _, target in imports(path, package)]
        graph[name] = {target if target in files else target[:-1] for target in found} & set(files) - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [".".join(name) for name in error.args[1]]
    return []


def reaches(source: Path) -> list[str]:
    """Every use of an optimizer's private attribute from outside, as `file:line name.attribute`."""
    found = []
    for path in sorted(source.rglob("*.py")):
        for line, name, attribute in looked_through(path.read_text(encoding="utf-8"))[1]:
            private = attribute.startswith("_") and not attribute.startswith("__")
            if private and name in ("optimizer", "opt", "owner"):
                found.append(f"{path.relative_to(source).as_posix()}:{line} {name}.{attribute}")
    return found


def test_the_source_keeps_to_the_table() -> None:
    assert violations(SOURCE) == circle(SOURCE) == reaches(SOURCE) == []
    assert {path.parts[-2] for path in SOURCE.rglob("__init__.py")} >= {"formats", "storage", "rules", "optim"}


@pytest.mark.parametrize(
    "back",
    [
        "from narrowgauge.optim._a import f",
        "if TYPE_CHECKING:\n    from . import _a",
        "def g():\n    from ._a import f",
    ],
)
def test_a_planted_circle_is_found(tmp_path: Path, back: str) -> None:
    plant(tmp_path, "optim/_a.py", "from narrowgauge.optim._b import g")
    plant(tmp_path, "optim/_b.py", "import narrowgauge.formats")
    assert circle(tmp_path) == []
    plant(tmp_path, "optim/_b.py", back)
    assert set(circle(tmp_path)) == {"narrowgauge.optim._a", "narrowgauge.optim._b"}


def test_a_planted_reach_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "optim/_x.py", "def f(optimizer):\n    optimizer.step()\n    return optimizer._engine")
    assert reaches(tmp_path) == ["optim/_x.py:3 optimizer._engine"]


FORBIDDEN = {
    "absolute": ("formats/_x.py", "import narrowgauge.storage"),
    "absolute, a private module of another room": ("kernels/_x.py", "from narrowgauge.storage._weights import cut"),
    "room as a name": ("gauges/_x.py", "from narrowgauge import optim"),
    "relative": ("storage/_x.py", "from ..optim import AdamW"),
    "relative, in a room's __init__": ("storage/__init__.py", "from ..optim import AdamW"),
    "relative, deeper": ("kernels/triton/_x.py", "from ...optim import AdamW"),
    "relative, out of the package": ("formats/_x.py", "from ... import something"),
    "lazy": ("optim/_x.py", "def f():\n    from narrowgauge.gauges import lost_updates"),
    "type checking": ("nn.py", "if TYPE_CHECKING:\n    from narrowgauge.optim import AdamW"),
    "guarded": ("scaling/_x.py", "try:\n    import narrowgauge.storage\nexcept ImportError:\n    pass"),
    "import_module": ("optim/_x.py", "import importlib\nimportlib.import_module('narrowgauge.recipes')"),
    "__import__": ("optim/_x.py", "__import__('narrowgauge.recipes')"),
    "package as a whole": ("optim/_x.py", "import narrowgauge as ng"),
    "star": ("optim/_x.py", "from narrowgauge import *"),
    "trainers in the library": ("recipes.py", "from narrowgauge.trainers import train"),
    "more than is handed over": ("gauges/_report.py", "from narrowgauge.cli._report._run_page import page"),
    "trainers at the top": ("__init__.py", "from narrowgauge import trainers"),
    "a tunnel through a private module": ("_shared.py", "from narrowgauge.optim import AdamW"),
    "triton outside kernels": ("optim/_x.py", "def f():\n    import triton.language as tl"),
    "an unknown room": ("extras/__init__.py", ""),
    "another framework in a plug-in": ("gauges/_lightning.py", "import transformers"),
    "a peer": ("trainers/_x.py", "import torchao"),
    "a program's package in the library": ("gauges/_x.py", "def f():\n    from matplotlib import figure"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "code"), FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_planted_violation_is_found(tmp_path: Path, path: str, code: str) -> None:
    plant(tmp_path, path, code)
    found = violations(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(f"{path}:")


ALLOWED = {
    "own room": ("storage/_x.py", "import narrowgauge.storage\nfrom ._weights import cut\nfrom . import _y"),
    "what the table grants": ("optim/_x.py", "from narrowgauge import formats, rules, storage, kernels"),
    "the library at the top": ("__init__.py", f"from narrowgauge import {', '.join(sorted(TOP))}"),
    "private modules": ("formats/_x.py", "from narrowgauge import __version__\nfrom .._version import __version__"),
    "triton in kernels": ("kernels/_x.py", "import triton\nfrom triton import language as tl"),
    "a program's own": ("cli/_x.py", "import rich.table\nfrom matplotlib import figure\nimport typer, jinja2"),
    "a plug-in's framework": ("gauges/_huggingface.py", "from transformers import TrainerCallback"),
    "names that only look alike": ("rules/_x.py", "import numpy.random\nprint('triton')\nrecipes = optim = None"),
}  # fmt: skip


@pytest.mark.parametrize(("path", "code"), ALLOWED.values(), ids=ALLOWED)
def test_what_is_allowed_is_not_found(tmp_path: Path, path: str, code: str) -> None:
    plant(tmp_path, path, code)
    assert violations(tmp_path) == []


def plant(root: Path, path: str, code: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(code)
