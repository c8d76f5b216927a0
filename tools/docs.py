"""Write the API reference of all packages as HTML: ``make docs``.

pdoc renders the docstrings, which are in NumPy style. The HTML page of a package also contains the
README.md of the package, below the docstring. Usage::

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
from graft.tools.console import program

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("native", "cudagraph", "sampling", "grammar", "models", "tools")

#: Modules that are left out: private modules, programs (``__main__``), and training, which needs
#: torch.
_EXCLUDED = re.compile(r"^graft\.tools\.train$|\._")

#: Warnings about annotations of other packages, such as those of a base class from uvicorn.
_FOREIGN_ANNOTATION = re.compile(r" annotation.* for (?!graft\.)[\w.]+[:.]")

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


class PackageModule(pdoc.doc.Module):
    """A module of which pdoc lists all public submodules in the navigation.

    By default, pdoc lists the submodules that ``__all__`` contains. In graft's packages,
    ``__all__`` contains classes and functions, so pdoc would list no submodules.
    """

    @cached_property
    def submodules(self) -> list[pdoc.doc.Module]:
        return [PackageModule.from_name(name) for name in submodule_names(self.obj)]


def submodule_names(module: ModuleType) -> list[str]:
    """Return the names of a package's public submodules. A module has none."""
    found = pkgutil.iter_modules(getattr(module, "__path__", ()), f"{module.__name__}.")
    names = [info.name for info in found]
    return [name for name in names if not _EXCLUDED.search(name)]


def find_modules(name: str) -> dict[str, pdoc.doc.Module]:
    """Return a module and, recursively, all its public submodules, by name."""
    module = PackageModule.from_name(name)
    found: dict[str, pdoc.doc.Module] = {name: module}
    for submodule in submodule_names(module.obj):
        found |= find_modules(submodule)
    return found


def resolve_named_tuples(module: ModuleType) -> None:
    """Evaluate the annotations of the named tuples of a module.

    pdoc cannot evaluate these annotations itself, because the generated ``__new__`` method of a
    named tuple does not refer to the module that defines the names in the annotations.
    """
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
            value.__new__.__annotations__ = get_type_hints(value)


def add_readme(package: str, output: Path) -> None:
    """Append the README.md of a package to the package's docstring.

    A link to the README.md of another package becomes a link to the HTML page of that package.
    Images are copied to the output folder. Any other link into the repository is replaced by the
    link text.

    Parameters
    ----------
    package
        Name of the package without ``graft.``. The empty name stands for ``graft``; its page is the
        README.md of the repository.
    output
        Folder of the HTML pages.
    """
    page = ROOT / package / "README.md"
    if not page.is_file():
        return

    def replace_link(match: re.Match[str]) -> str:
        is_image, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or ":" in path:  # keep external links and links within the page
            return match[0]
        file = (page.parent / path).resolve()
        if is_image:
            folder = output / ("graft" if package else "")
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder)
            return f"![{text}]({file.name})"
        other = file.parent.name
        is_readme = file.name == "README.md" and file.parent.parent == ROOT
        if not is_readme or other not in PACKAGES:
            return text
        suffix = f"#{anchor}" if anchor else ""
        page_of_other = f"{other}.html" if package else f"graft/{other}.html"
        return f"[{text}]({page_of_other}{suffix})"

    text = page.read_text(encoding="utf-8")
    # Remove the title, because pdoc shows the name of the package as the title.
    text = re.sub(r"\A# .*\n", "", text)
    text = _LINK.sub(replace_link, text)
    module = importlib.import_module(f"graft.{package}".rstrip("."))
    docstring = module.__doc__ or ""
    module.__doc__ = f"{docstring}\n\n{text}"


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
        Texts of all warnings that were issued during the import and the writing of the pages.

    Raises
    ------
    OptionError
        If a package does not exist.
    """
    for package in packages:
        path = ROOT / package.replace(".", "/")
        if not path.is_dir() and not path.with_suffix(".py").is_file():
            raise OptionError(f"there is no package graft.{package}")
    if (output / "search.js").is_file():  # the folder contains pages of an earlier run
        shutil.rmtree(output / "graft", ignore_errors=True)
    pdoc.render.configure(
        docformat="numpy", footer_text="graft API reference", include_undocumented=False
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        modules: dict[str, pdoc.doc.Module] = {}
        for package in packages:
            modules |= _import_package(package, output)
        # The index page leads to the page of ``graft``, because it contains all other modules.
        add_readme("", output)
        modules["graft"] = PackageModule.from_name("graft")
        _write_pages(modules, output)
    texts = [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    return [text for text in texts if not _FOREIGN_ANNOTATION.search(text)]


def _import_package(package: str, output: Path) -> dict[str, pdoc.doc.Module]:
    """Import a package with all its modules, append its README.md, and return the modules."""
    started = time.monotonic()
    print(f"[docs] importing graft.{package} ...", end="", flush=True)
    modules = find_modules(f"graft.{package}")
    for module in modules.values():
        resolve_named_tuples(module.obj)
    add_readme(package, output)
    seconds = time.monotonic() - started
    print(f" {len(modules)} modules, {seconds:.1f} s", flush=True)
    return modules


def _write_pages(modules: dict[str, pdoc.doc.Module], output: Path) -> None:
    """Write the HTML pages of all modules, the index page and the search index."""
    started = time.monotonic()
    print("[docs] writing pages", end="", flush=True)
    for count, (name, module) in enumerate(modules.items(), 1):
        path = name.replace(".", "/")
        page = output / f"{path}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        html = pdoc.render.html_module(module, modules)
        page.write_text(html, encoding="utf-8")
        if count % 20 == 0:
            print(" .", end="", flush=True)
    index = pdoc.render.html_index(modules)
    (output / "index.html").write_text(index, encoding="utf-8")
    search_index = pdoc.render.search_index(modules)
    (output / "search.js").write_text(search_index, encoding="utf-8")
    seconds = time.monotonic() - started
    print(f" {len(modules)} in {seconds:.1f} s", flush=True)


@program
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages. Return 1 if pdoc issued a warning, else 0."""
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
