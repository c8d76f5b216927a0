"""The rooms import downwards, and nothing imports itself by a detour."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
    above = [(name, other) for name in MODULES for other in imports(name)
             if ROOMS.index(other.split(".")[0]) > ROOMS.index(name.split(".")[0])]  # fmt: skip
    assert above == []


def test_no_import_comes_back_to_where_it_began():
    """Not at run time, not inside functions, and not for types alone."""
    try:
        TopologicalSorter({name: set(imports(name)) for name in MODULES}).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None
