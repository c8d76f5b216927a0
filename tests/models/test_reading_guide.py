"""The reading guide of models/README.md."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FILES = 50


def test_reading_guide_lists_at_most_fifty_existing_files():
    text = (ROOT / "models" / "README.md").read_text(encoding="utf-8")
    section = text.split("\n## Reading guide\n")[1].split("\n## ")[0]
    files = re.findall(r"^\| `([^`]+)` \| \S", section, flags=re.M)
    assert 30 <= len(files) <= MAX_FILES
    assert len(set(files)) == len(files)
    assert [file for file in files if not (ROOT / file).is_file()] == []
