"""Write the API reference of all packages as HTML: ``make docs``.

pdoc renders the docstrings, which are in NumPy style. The HTML page of a package also contains the
README.md of the package, below the docstring. The index is FIRST_STEPS.md, with links to the
packages. Usage::

    python -m graft.tools.docs [PACKAGE...] [--output build/docs]
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import get_type_hints

import pdoc

from graft.cudagraph.errors import OptionError
from graft.tools.console import program

ROOT = Path(__file__).resolve().parent.parent
#: The packages, in the order in which the index lists them.
PACKAGES = ("models", "grammar", "sampling", "cudagraph", "tools", "native")

#: Pattern of the link from the page of a package to the page of another package.
PACKAGE_PAGE = r"\1.html"

#: Modules that are left out: private modules, programs (``__main__``), and training, which needs
#: torch.
_EXCLUDED = re.compile(r"^graft\.tools\.train$|\._")

#: Warnings about annotations of other packages, such as those of a base class from uvicorn.
_FOREIGN_ANNOTATION = re.compile(r" annotation.* for (?!graft\.)[\w.]+[:.]")


def find_modules(name: str) -> Iterator[ModuleType]:
    """Import a module and, recursively, all its public submodules, and yield them."""
    module = importlib.import_module(name)
    yield module
    for found in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}."):
        if not _EXCLUDED.search(found.name):
            yield from find_modules(found.name)


def public_objects(modules: Mapping[str, ModuleType]) -> list[object]:
    """Return the classes and functions that the packages among the modules export."""
    packages = [modules[name] for name in modules if name.count(".") == 1]
    return [getattr(package, name) for package in packages for name in names_of(package)]


def names_of(module: ModuleType) -> list[str]:
    """Return the documented names of a module: those in ``__all__``, or else those it defines."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and isinstance(value, type | FunctionType)
        and value.__module__ == module.__name__
    ]


def prepare(module: ModuleType, submodules: Sequence[str], public: Sequence[object]) -> None:
    """Change a module so that pdoc documents all of it, public names first and errors last.

    pdoc lists only submodules that ``__all__`` contains. In graft's packages, ``__all__`` contains
    classes and functions, so this function adds the names of the submodules. It imports the names
    that a package imports only when they are used. It also makes the annotations of named tuples
    readable: pdoc cannot evaluate them by itself, because the generated ``__new__`` method does not
    refer to the module that defines the names in the annotations.
    """
    attributes = vars(module)
    names = names_of(module)
    for name in names:
        attributes.setdefault(name, getattr(module, name))

    def order(name: str) -> tuple[bool, bool]:
        value = attributes[name]
        is_error = isinstance(value, type) and issubclass(value, Exception)
        return not any(value is other for other in public), is_error

    names.sort(key=order)
    attributes["__all__"] = [*names, *submodules]
    for value in list(attributes.values()):
        if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
            value.__new__.__annotations__ = get_type_hints(value)


def page_text(page: Path, links: str) -> str:
    """Return the text of a page without its title, which pdoc shows, and with links between pages.

    A link to the README.md of a package becomes a link to the HTML page of the package: `links`,
    with ``\\1`` for the name of the package. Any other link into the repository is replaced by the
    link text.
    """
    text = re.sub(r"\A# .*\n", "", page.read_text(encoding="utf-8"))
    text = re.sub(rf"\]\((?:\.\./)?({'|'.join(PACKAGES)})/README\.md", f"]({links}", text)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?![#\w/]+\.html|#|\w+:)[^)\s]+\)", r"\1", text)


def add_readme(package: str) -> None:
    """Append the README.md of a package to the package's docstring."""
    page = ROOT / package / "README.md"
    if page.is_file():
        module = importlib.import_module(f"graft.{package}")
        module.__doc__ = f"{module.__doc__ or ''}\n\n{page_text(page, PACKAGE_PAGE)}"


def make_index() -> None:
    """Make FIRST_STEPS.md the docstring of ``graft``, to which pdoc's index leads."""
    graft = importlib.import_module("graft")
    graft.__doc__ = page_text(ROOT / "FIRST_STEPS.md", r"graft/\1.html")
    vars(graft)["__all__"] = list(PACKAGES)


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
    shutil.rmtree(output / "graft", ignore_errors=True)
    pdoc.render.configure(
        docformat="numpy", footer_text="graft API reference", include_undocumented=False
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = [f"graft.{package}" for package in packages]
        modules = {module.__name__: module for name in names for module in find_modules(name)}
        paths = [name.rpartition(".") for name in modules]
        public = public_objects(modules)
        for name, module in modules.items():
            prepare(module, [child for parent, _, child in paths if parent == name], public)
        for package in packages:
            add_readme(package)
        if tuple(packages) == PACKAGES:
            make_index()
            names = ["graft"]
        pdoc.pdoc(*names, output_directory=output)
    texts = [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    return [text for text in texts if not _FOREIGN_ANNOTATION.search(text)]


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
