"""Checks the reading guide in models/README.md."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FILES = 30
MAX_LINES = 11_000


def listed_files(text: str) -> list[str]:
    """Return the paths in the first column of the tables of a text."""
    first_cells = re.findall(r"^\| ([^|]*`[^|]*)\|", text, flags=re.M)
    return [path for cell in first_cells for path in re.findall(r"`([^`]+)`", cell)]


def test_reading_guide_lists_few_files_first():
    """The first list can be read in one sitting. Each file is listed once, and exists."""
    text = (ROOT / "models" / "README.md").read_text(encoding="utf-8")
    section = text.split("\n## Reading guide\n")[1].split("\n## ")[0]
    first, further = map(listed_files, section.split("\nFurther files"))
    assert 20 <= len(first) <= MAX_FILES
    assert sum(len((ROOT / path).read_text("utf-8").splitlines()) for path in first) <= MAX_LINES
    paths = [*first, *further]
    assert len(set(paths)) == len(paths) > len(first)
    assert [path for path in paths if not (ROOT / path).is_file()] == []
