"""The house stays small: line budgets, the way of one round, pages that can be read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graft.tools import budget

ROOT = Path(__file__).resolve().parents[2]
#: A round's way as it is; it may get shorter, and these with it.
MOST_FILES, MOST_LINES = 36, 6500
LONGEST_PARAGRAPH = 600


def repository(folder: Path, files: dict[str, str]) -> Path:
    """A git repository that knows these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def test_lines_are_counted_by_room_and_held_against_budgets(tmp_path):
    """Data and what git does not know count nothing; a room without a budget is over it."""
    folder = repository(tmp_path, {"a/b/c.py": "1\n2\n", "a/d.json": "1\n" * 9, "e.md": "1\n"})
    (folder / "a" / "new.py").write_text("1\n")
    lines = budget.count(folder)
    assert lines == {"a": 2, ".": 1, "whole": 3}
    assert budget.over(lines, {"a": 2, ".": 1, "whole": 3}) == []
    assert budget.over(lines, {"a": 1, ".": 1, "whole": 3}) == ["a"]
    assert budget.over(lines, {"a": 2, "whole": 9}) == ["."]


def test_the_way_of_a_round_does_not_grow(device):
    """It has its scheduler, worker and verification, and no more files and lines than now."""
    shown = subprocess.run([sys.executable, "-m", "graft.tools.round_way"], check=True, text=True,
                           capture_output=True, env={**os.environ, "GRAFT_DEVICE": device.kind})
    *listed, total = shown.stdout.splitlines()
    lines = {path: int(count) for count, path in (
        line.split() for line in listed if line.startswith(" "))}
    assert {"models/engine.py", "models/scheduler.py", "native/guide/worker.cpp",
            "cudagraph/kernels/graft.cuh"} <= set(lines)
    assert not any(name.startswith(("tools", "tests")) for name in lines)
    assert total == f"the way of a round: {len(lines)} files, {sum(lines.values()):,} lines"
    assert len(lines) <= MOST_FILES and sum(lines.values()) <= MOST_LINES


@pytest.mark.parametrize("page", sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(
    "**/README.md") if not {"build", ".venv"} & set(path.relative_to(ROOT).parts)))
def test_pages_can_be_read(page):
    """No paragraph, list item or cell is long, and every file that is linked is there."""
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    parts = re.split(r"\n\s*\n|\n(?=[*-] |\d+\. |\|)", prose)
    assert [part[:60] for part in parts if len(part) > LONGEST_PARAGRAPH] == []
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []
