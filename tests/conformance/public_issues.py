"""Rows of the conformance suite: public issues of inference engines, and the tests for them.

A test names its issues with the decorator `issue`. `write_page` writes the table of all rows in
README.md; `test_page.py` checks that the page is up to date. Run this file to write the page.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"
#: Lines of README.md between which the table stands.
BEGIN = "<!-- The table is written by public_issues.py. -->"
END = "<!-- End of the table. -->"
#: Repository of each project.
PROJECTS = {
    "vLLM": "vllm-project/vllm",
    "SGLang": "sgl-project/sglang",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "TokenSpeed": "lightseekorg/tokenspeed",
    "LMDeploy": "InternLM/lmdeploy",
    "MLC-LLM": "mlc-ai/mlc-llm",
    "llama.cpp": "ggml-org/llama.cpp",
    "XGrammar": "mlc-ai/xgrammar",
    "LLGuidance": "guidance-ai/llguidance",
    "Outlines": "dottxt-ai/outlines",
    "outlines-core": "dottxt-ai/outlines-core",
}


@dataclass(frozen=True)
class Row:
    """A public issue.

    Attributes
    ----------
    project, number
        Project of `PROJECTS`, and number of the issue or pull request.
    wrong
        The error of the project.
    right
        Correct behavior, as the test checks it.
    """

    project: str
    number: int
    wrong: str
    right: str

    @property
    def link(self) -> str:
        url = f"https://github.com/{PROJECTS[self.project]}/issues/{self.number}"
        return f"[{self.project} {self.number}]({url})"


def issue(project: str, number: int, wrong: str, right: str) -> Callable[[Any], Any]:
    """Return a decorator that adds a row to a test. A test may have several rows."""

    def decorate(test: Any) -> Any:
        test.rows = [Row(project, number, wrong, right), *getattr(test, "rows", [])]
        return test

    return decorate


def themes() -> Iterator[ModuleType]:
    """Yield the modules with tests. The first line of a module's docstring is its heading."""
    for path in sorted(HERE.glob("test_*.py")):
        if path.name != "test_page.py":
            spec = importlib.util.spec_from_file_location(f"conformance_{path.stem}", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            yield module


def result(test: Any) -> str:
    """Return what the table says of a test: it passes, unless it is marked as expected to fail."""
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "xfail":
            return f"fails: {mark.kwargs['reason']}"
    return "passes"


def named_tests(theme: ModuleType) -> dict[str, Any]:
    """Return the tests of a module that have rows, by name."""
    return {name: test for name, test in vars(theme).items() if hasattr(test, "rows")}


def table() -> str:
    """Return the tables of all rows in Markdown, one for each theme."""
    parts = []
    for theme in themes():
        heading = (theme.__doc__ or "").splitlines()[0].rstrip(".")
        file = Path(theme.__file__ or "").name
        parts += [f"### {heading}", "", f"Tests: [{file}]({file})", ""]
        parts += ["| issue | error | correct behavior | test | graft |", "|---|---|---|---|---|"]
        for name, test in named_tests(theme).items():
            for row in test.rows:
                short = name.removeprefix("test_")
                cells = (row.link, row.wrong, row.right, f"`{short}`", result(test))
                parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def page() -> str:
    """Return the text of README.md with an up-to-date table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n{END}{after}"


if __name__ == "__main__":
    for folder in ("conformance", "simulators", "models", "grammar", "tools", ""):
        sys.path.append(str(HERE.parent / folder))
    PAGE.write_text(page(), encoding="utf-8")
