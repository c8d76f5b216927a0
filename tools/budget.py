"""Lines of every room against its budget (``tool.graft.lines`` of pyproject.toml).

Usage: ``python3 tools/budget.py``; exit status 1 when a room is above its budget. Lines are those
of every file that git knows but data: what somebody may have to read.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = {".json", ".jsonl", ".safetensors", ".npz", ".gz", ".svg"}
WHOLE = "whole"


def count(root: Path = ROOT) -> Counter[str]:
    """Lines by top folder ("." holds the files beside them), and of the whole."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, text=True, capture_output=True,
                            check=True)
    lines: Counter[str] = Counter()
    for path in map(Path, filter(None, listed.stdout.split("\0"))):
        if path.suffix not in DATA and (root / path).is_file():
            found = (root / path).read_bytes().count(b"\n")
            lines[path.parts[0] if len(path.parts) > 1 else "."] += found
            lines[WHOLE] += found
    return lines


def over(lines: Counter[str], budgets: dict[str, int]) -> list[str]:
    """Rooms above their budget, and folders that have none."""
    return [name for name, found in sorted(lines.items()) if found > budgets.get(name, 0)]


def main() -> int:
    """Print the table; returns 1 when a room is too large."""
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["graft"]["lines"]
    lines = count()
    wrong = over(lines, budgets)
    for name in sorted(lines, key=lambda name: (name == WHOLE, name)):
        mark = "  OVER" if name in wrong else ""
        print(f"{name:<12}{lines[name]:>8,} of {budgets.get(name, 0):>8,} lines{mark}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
