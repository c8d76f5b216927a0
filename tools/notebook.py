"""Write FIRST_STEPS.ipynb, the notebook with the text and the programs of FIRST_STEPS.md.

Usage::

    python -m graft.tools.notebook
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["NOTEBOOK", "main", "notebook"]

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "FIRST_STEPS.md"
NOTEBOOK = ROOT / "FIRST_STEPS.ipynb"
#: Cell in place of the command that starts the server. The program waits until the server serves.
START_SERVER = """\
import subprocess
import sys

command = [sys.executable, "-m", "graft.tools.cli", "serve", "--port", "8000"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
print(server.stdout.readline())"""
#: Cell after the program that uses the server.
STOP_SERVER = "server.terminate()"


def notebook(text: str) -> dict[str, Any]:
    """Return a notebook with the text, programs and commands of graft of a page.

    Other commands, which install graft, stay a part of the text.
    """
    cells = []
    uses_server = False
    for part in re.split(r"^(```\w*\n.*?^```\n)", text, flags=re.M | re.S):
        fence = re.fullmatch(r"```(\w*)\n(.*?)\n```\n", part, re.S)
        if fence and fence[1] == "python":
            cells.append(_code(fence[2]))
            if uses_server:
                cells.append(_code(STOP_SERVER))
                uses_server = False
        elif fence and fence[2].startswith("graft serve"):
            cells.append(_code(START_SERVER))
            uses_server = True
        elif fence and fence[2].startswith("graft "):
            cells.append(_code(f"%%bash\n{fence[2]}"))
        elif part.strip():
            cells.append({"cell_type": "markdown", "metadata": {}, "source": _lines(part.strip())})
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _code(source: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": _lines(source),
    }


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the notebook."""
    argparse.ArgumentParser(description=main.__doc__).parse_args(arguments)
    content = json.dumps(notebook(PAGE.read_text(encoding="utf-8")), indent=1, ensure_ascii=False)
    NOTEBOOK.write_text(f"{content}\n", encoding="utf-8")
    print(NOTEBOOK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
