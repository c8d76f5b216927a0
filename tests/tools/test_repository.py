"""Tests of the rules of the repository: layered imports, no torch, readable pages."""

from __future__ import annotations

import ast
import functools
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
MAX_PARAGRAPH_CHARACTERS = 600
#: The packages, lowest layer first. A package may import only from packages before it.
PACKAGES = ("native", "cudagraph", "sampling", "grammar", "models", "tools")


@pytest.mark.parametrize(
    "page",
    sorted(
        str(path.relative_to(ROOT))
        for path in (*ROOT.glob("*.md"), *ROOT.glob("*/**/README.md"))
        if not {"build", ".venv"} & set(path.relative_to(ROOT).parts)
    ),
)
def test_page_has_short_paragraphs_and_valid_links(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    parts = re.split(r"\n\s*\n|\n(?=[*-] |\d+\. |\|)", prose)
    assert [part[:60] for part in parts if len(part) > MAX_PARAGRAPH_CHARACTERS] == []
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "NOTICE"])
def test_files_that_page_names_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w./])(?:\w+/)+[\w.-]*\w(?![\w/])", text))
    assert len(named) >= 4
    assert [name for name in named if not (ROOT / name).exists()] == []


def find_modules() -> dict[str, Path]:
    """Return the file of each module, by module name without the prefix ``graft.``."""
    modules = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            modules[name.removesuffix(".__init__")] = path
    return modules


MODULES = find_modules()


@functools.cache
def imports(name: str) -> tuple[str, ...]:
    """Return the modules that a module imports.

    Imports inside functions and for type checking are included.
    """
    return tuple(find_imports(name))


def find_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements inside a node. Their expressions are not searched."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield child
            yield from find_statements(child)


def find_imports(name: str) -> Iterator[str]:
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in find_statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            candidates = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            if node.module:
                parts = [*parts, node.module]
            base = ".".join(parts)
            candidates = [(f"{base}.{alias.name}", base) for alias in node.names]
        else:
            continue
        for names in candidates:
            # In ``from a import b``, b is a module or an attribute of module a: try a.b, then a.
            short_names = [candidate.removeprefix("graft.") for candidate in names]
            found = [short for short in short_names if short in MODULES and short != name]
            yield from found[:1]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_lists_its_public_names(package):
    """``__all__`` contains all imported names; type checkers do not allow the use of others."""
    imported = set()
    listed = []
    for node in ast.parse(MODULES[package].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graft."):
            imported |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
    assert imported <= set(listed)


def layer(name: str) -> int:
    """Return the position of a module's package in `PACKAGES`."""
    return PACKAGES.index(name.split(".")[0])


def test_packages_import_only_from_lower_packages():
    upward = [
        (name, other) for name in MODULES for other in imports(name) if layer(other) > layer(name)
    ]
    assert upward == []


def test_modules_import_without_cycles():
    """No module imports itself indirectly, even inside functions or for type checking.

    In the package cudagraph, no other module imports the module ``device``.
    """
    try:
        TopologicalSorter({name: set(imports(name)) for name in MODULES}).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None
    cudagraph = [name for name in MODULES if name.startswith("cudagraph.")]
    assert [name for name in cudagraph if "cudagraph.device" in imports(name)] == []


def test_folders_import_without_cycles():
    """The folders inside each package do not import each other in a cycle.

    Each folder below a package, and each module directly in a package, is one node of the graph.
    """

    def unit(name: str) -> tuple[str, ...]:
        return tuple(name.split(".")[:2])

    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for name in MODULES:
        if len(unit(name)) == 2:
            imported = {unit(other) for other in imports(name)}
            graph.setdefault(unit(name), set()).update(imported - {unit(name)})
    folders = {unit(name) for name in MODULES if name.count(".") == 2}
    assert folders <= graph.keys()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(".".join(unit) for unit in error.args[1])) from None


IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
from graft.tools.serve.command import EXTRA_MODULES
imported = []
for name in ("native", "cudagraph", "sampling", "grammar", "models", "tools"):
    package = importlib.import_module(f"graft.{name}")
    for found in pkgutil.walk_packages(package.__path__, f"graft.{name}."):
        if ".tools.train" in found.name or found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:  # an optional package
            if (error.name or "").split(".")[0] not in {*EXTRA_MODULES, "pdoc"}:
                raise
        imported.append(found.name)
from graft.cudagraph.host import transports
from graft.tools import doctor
transports.probe_transport = lambda *arguments: ""  # probes run in other processes
findings = [finding.name for finding in doctor.examine()]
foreign = [m for m in ("torch", "jax", "triton", "transformers", "cupy") if m in sys.modules]
print(json.dumps({"imported": imported, "findings": findings, "foreign": foreign}))
"""


def test_imports_and_doctor_do_not_import_torch():
    """Importing all modules of graft and running the doctor imports neither torch, JAX nor CuPy."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING],
        text=True,
        capture_output=True,
        env={**os.environ, "GRAFT_DEVICE": "soft"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    expected = {"graft.models.engine.engine", "graft.cudagraph.graph.graph", "graft.tools.cli"}
    assert expected <= set(report["imported"])
    assert "device" in report["findings"]
    assert report["foreign"] == []


def test_environment_of_make_does_not_contain_torch():
    if not (Path(sys.prefix) / ".graft-pins").exists():
        pytest.skip("this Python is not the environment that make builds")
    names = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    assert names & {"torch", "triton", "jax", "jaxlib", "transformers"} == set()
