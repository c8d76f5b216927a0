"""Write the API reference of all packages as HTML: ``make docs``.

pdoc renders the docstrings, which are in NumPy style. The README page of a package is shown on the
page of the package, below its docstring. Usage::

    python -m graft.tools.docs [PACKAGE...] [--output build/docs]
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pdoc.doc
import pdoc.render

from graft.cudagraph.errors import OptionError
from graft.tools.report import program

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("native", "cudagraph", "sampling", "grammar", "models", "tools")

#: Modules that are left out: private modules, programs (``__main__``), and training, which needs
#: torch.
_EXCLUDED = re.compile(r"^graft\.tools\.train$|\._")

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


class PackageModule(pdoc.doc.Module):
    """A module whose navigation lists all public submodules.

    pdoc lists only submodules in ``__all__``, where the packages of graft have classes and
    functions.
    """

    @cached_property
    def submodules(self) -> list[pdoc.doc.Module]:
        return [PackageModule.from_name(name) for name in submodule_names(self.obj)]


def submodule_names(module: ModuleType) -> list[str]:
    """Return the names of the public submodules of a package; none for a module."""
    found = pkgutil.iter_modules(getattr(module, "__path__", ()), f"{module.__name__}.")
    names = [info.name for info in found]
    return [name for name in names if not _EXCLUDED.search(name)]


def find_modules(name: str) -> dict[str, pdoc.doc.Module]:
    """Return a module and all its submodules by name."""
    module = PackageModule.from_name(name)
    found: dict[str, pdoc.doc.Module] = {name: module}
    for submodule in submodule_names(module.obj):
        found |= find_modules(submodule)
    return found


def resolve_named_tuples(module: ModuleType) -> None:
    """Evaluate the annotations of the named tuples of a module.

    The generated ``__new__`` does not refer to the module, so pdoc cannot evaluate them itself.
    """
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
            value.__new__.__annotations__ = get_type_hints(value)


def add_readme(package: str, output: Path) -> None:
    """Append the README page of a package to the docstring of its module.

    Links to other README pages become links to the pages of these packages, and images are copied
    to the output folder. The text of any other link into the repository stays without the link.

    Parameters
    ----------
    package
        Name of the package without ``graft.``.
    output
        Folder of the HTML pages.
    """
    page = ROOT / package / "README.md"
    if not page.is_file():
        return

    def replace_link(match: re.Match[str]) -> str:
        is_image, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or ":" in path:
            return match[0]
        file = (page.parent / path).resolve()
        if is_image:
            folder = output / "graft"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder)
            return f"![{text}]({file.name})"
        other = file.parent.name
        if file.name == "README.md" and file.parent.parent == ROOT and other in PACKAGES:
            return f"[{text}]({other}.html{'#' + anchor if anchor else ''})"
        return text

    # The title repeats the module name that pdoc shows.
    text = re.sub(r"\A# .*\n", "", page.read_text(encoding="utf-8"))
    module = importlib.import_module(f"graft.{package}")
    module.__doc__ = f"{module.__doc__ or ''}\n\n{_LINK.sub(replace_link, text)}"


def write_docs(packages: Sequence[str], output: Path) -> list[str]:
    """Write the pages of the packages and return pdoc's warnings.

    Parameters
    ----------
    packages
        Names of packages without ``graft.``. A name with dots selects a subpackage or module.
    output
        Folder of the HTML pages. Pages of an earlier run are removed.

    Returns
    -------
    list of str
        Messages of all warnings that were issued while the pages were written.

    Raises
    ------
    OptionError
        If a package does not exist.
    """
    for package in packages:
        path = ROOT / package.replace(".", "/")
        if not path.is_dir() and not path.with_suffix(".py").is_file():
            raise OptionError(f"there is no package graft.{package}")
    if (output / "search.js").is_file():
        shutil.rmtree(output / "graft", ignore_errors=True)
    pdoc.render.configure(
        docformat="numpy", footer_text="graft API reference", include_undocumented=False
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        modules: dict[str, pdoc.doc.Module] = {}
        for package in packages:
            started = time.monotonic()
            print(f"[docs] importing graft.{package} ...", end="", flush=True)
            found = find_modules(f"graft.{package}")
            for module in found.values():
                resolve_named_tuples(module.obj)
            modules |= found
            add_readme(package, output)
            print(f" {len(found)} modules, {time.monotonic() - started:.1f} s", flush=True)
        started = time.monotonic()
        print("[docs] writing pages", end="", flush=True)
        for count, (name, module) in enumerate(modules.items(), 1):
            page = output / f"{name.replace('.', '/')}.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(pdoc.render.html_module(module, modules), encoding="utf-8")
            if count % 20 == 0:
                print(" .", end="", flush=True)
        (output / "index.html").write_text(pdoc.render.html_index(modules), encoding="utf-8")
        (output / "search.js").write_text(pdoc.render.search_index(modules), encoding="utf-8")
        print(f" {len(modules)} in {time.monotonic() - started:.1f} s", flush=True)
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]


@program
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages; return 1 if pdoc issued a warning."""
    parser = argparse.ArgumentParser(description="Write the API reference as HTML.")
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="default: all packages")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "docs")
    options = parser.parse_args(arguments)
    found = write_docs(options.packages or PACKAGES, options.output)
    for warning in found:
        print(f"graft: {warning}", file=sys.stderr)
    print(f"[docs] {options.output / 'index.html'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
