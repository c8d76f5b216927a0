"""Tests of ``make docs``, which writes the API reference."""

from __future__ import annotations

import re
import sys
import types
from importlib.machinery import ModuleSpec

import pytest

pytest.importorskip("pdoc")

from graft.tools import docs


def test_docs_write_page_with_docstrings_and_readme(tmp_path):
    """The HTML page of a package contains the package's docstring, README.md and public classes.

    The index leads to the page.
    """
    assert docs.main(["sampling", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "graft" / "sampling.html").read_text(encoding="utf-8")
    assert 'id="MaskApply"' in page
    assert 'href="../graft/sampling/mask.html"' in page or 'href="sampling/mask.html"' in page
    readme = (docs.ROOT / "sampling" / "README.md").read_text(encoding="utf-8")
    title = next(line for line in readme.splitlines() if line.startswith("## "))
    assert title.removeprefix("## ") in page
    assert (tmp_path / "graft" / "sampling" / "mask.html").is_file()
    assert "graft/sampling.html" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "search.js").is_file()


@pytest.mark.full
def test_docs_of_all_packages_have_no_warnings(tmp_path):
    """The index leads to the first steps, from which links lead to the packages."""
    assert docs.write_docs(docs.PACKAGES, tmp_path) == []
    assert 'url=./graft.html"' in (tmp_path / "index.html").read_text(encoding="utf-8")
    page = (tmp_path / "graft.html").read_text(encoding="utf-8")
    assert "Generate text from Python" in page
    links = {link for link in re.findall(r'href="([^"#:]+)', page) if link.endswith(".html")}
    assert links >= {f"graft/{package}.html" for package in docs.PACKAGES}
    assert [link for link in links if not (tmp_path / link).is_file()] == []


def test_docs_list_public_names_first_and_errors_last():
    class Internal:
        """Not exported by a package."""

    class PublicError(Exception):
        """Exported by a package."""

    class Public:
        """Exported by a package."""

    module = types.ModuleType("graft.example")
    for value in (Internal, PublicError, Public):
        value.__module__ = module.__name__
        setattr(module, value.__name__, value)
    docs.prepare(module, ["child"], [Public, PublicError])
    assert module.__all__ == ["Public", "PublicError", "Internal", "child"]


def test_docs_fail_on_warning(tmp_path, monkeypatch, capsys):
    """If pdoc issues a warning, ``make docs`` prints the warning and returns exit status 1."""
    monkeypatch.setattr(docs, "write_docs", lambda packages, output: ["UserWarning: no such name"])
    assert docs.main(["sampling", "--output", str(tmp_path)]) == 1
    assert "graft: UserWarning: no such name" in capsys.readouterr().err


def test_docs_report_unresolved_annotations(tmp_path, monkeypatch):
    module = types.ModuleType("graft.native.example", "A module.")
    exec(
        "from __future__ import annotations\ndef broken(value: Missing):\n    'Return nothing.'\n",
        module.__dict__,
    )
    module.broken.__module__ = module.__name__
    module.__spec__ = ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "example.py").touch()
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    warnings = docs.write_docs(["native.example"], tmp_path / "out")
    assert any("Missing" in warning for warning in warnings)
