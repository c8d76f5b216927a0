"""Repository rules: imports point down, nothing imports torch, pages are readable."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONGEST_PARAGRAPH = 600


@pytest.mark.parametrize(
    "page",
    sorted(
        str(path.relative_to(ROOT))
        for path in ROOT.glob("**/README.md")
        if not {"build", ".venv"} & set(path.relative_to(ROOT).parts)
    ),
)
def test_pages_can_be_read(page):
    """No paragraph, list item or cell is long, and every file that is linked is there."""
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    parts = re.split(r"\n\s*\n|\n(?=[*-] |\d+\. |\|)", prose)
    assert [part[:60] for part in parts if len(part) > LONGEST_PARAGRAPH] == []
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


#: From the bottom up; a room imports those before it.
ROOMS = ("native", "cudagraph", "sampling", "grammar", "models", "tools")


def modules() -> dict[str, Path]:
    """Every module of the product by name."""
    paths = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return {name.removesuffix(".__init__"): path for name, path in zip(names, paths, strict=True)}


MODULES = modules()


def imports(name: str) -> Iterator[str]:
    """Modules that one imports, at its top, inside its functions or for types alone."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            named = [(f"{base}.{alias.name}", base) for alias in node.names]
        else:
            continue
        for choices in named:
            short = [choice.removeprefix("graft.") for choice in choices]
            yield from [choice for choice in short if choice in MODULES and choice != name][:1]


def test_no_room_imports_one_above_it():
    """An arrow never points back up."""
    above = [
        (name, other)
        for name in MODULES
        for other in imports(name)
        if ROOMS.index(other.split(".")[0]) > ROOMS.index(name.split(".")[0])
    ]
    assert above == []


def test_no_import_comes_back_to_where_it_began():
    """Not at run time, not inside functions, and not for types alone; the device stands on top of
    its room."""
    try:
        TopologicalSorter({name: set(imports(name)) for name in MODULES}).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None
    room = [name for name in MODULES if name.startswith("cudagraph.")]
    assert [name for name in room if "cudagraph.device" in imports(name)] == []


def test_grammar_folders_import_without_cycles():
    """Not even as folders: each folder of the grammar package counts as one module."""
    folders = {"grammar.backends", "grammar.compile", "grammar.schema"}

    def unit(name: str) -> str:
        folder = ".".join(name.split(".")[:2])
        return folder if folder in folders else name

    graph: dict[str, set[str]] = {}
    for name in MODULES:
        if name.startswith("grammar."):
            imported = {unit(other) for other in imports(name)}
            graph.setdefault(unit(name), set()).update(imported - {unit(name)})
    assert folders <= graph.keys()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
from graft.tools.serve.command import PACKAGES
imported = []
for room in ("native", "cudagraph", "sampling", "grammar", "models", "tools"):
    package = importlib.import_module(f"graft.{room}")
    for found in pkgutil.walk_packages(package.__path__, f"graft.{room}."):
        if ".tools.train" in found.name or found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:  # of an extra
            if (error.name or "").split(".")[0] not in PACKAGES:
                raise
        imported.append(found.name)
from graft.tools import doctor
findings = [finding.name for finding in doctor.examine()]
foreign = [m for m in ("torch", "jax", "triton", "transformers", "cupy") if m in sys.modules]
print(json.dumps({"imported": imported, "findings": findings, "foreign": foreign}))
"""


def test_importing_all_of_graft_imports_no_torch():
    """Every module of graft and the doctor's checks leave torch, JAX and CuPy unimported."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING],
        text=True,
        capture_output=True,
        env={**os.environ, "GRAFT_DEVICE": "soft"},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert {"graft.models.engine.engine", "graft.cudagraph.graph", "graft.tools.cli"} <= set(
        said["imported"]
    )
    assert "device" in said["findings"]
    assert said["foreign"] == []


def test_the_environment_that_make_builds_holds_no_torch():
    """No distribution named torch, triton, JAX or transformers is in make's environment."""
    if not (Path(sys.prefix) / ".graft-pins").exists():
        pytest.skip("this Python is not the environment that make builds")
    names = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    assert names & {"torch", "triton", "jax", "jaxlib", "transformers"} == set()
