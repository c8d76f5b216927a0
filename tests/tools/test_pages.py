"""Tests that the code blocks of all pages run, and that their commands exist."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from graft.tools import cli

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"build", ".venv", "node_modules"}
#: Packages that blocks may import. A block is skipped if one of them is not installed.
OPTIONAL = ("torch", "openai")
SERVER_URL = "http://127.0.0.1:8000"
#: Languages of blocks with commands.
SHELLS = ("", "bash", "sh")
#: Programs of command lines that are not part of graft.
OTHER_PROGRAMS = ("pip", "git", "cd", "python", "curl")


class Block(NamedTuple):
    """A fenced code block of a page."""

    page: str
    line: int
    language: str
    text: str


def find_blocks():
    """Return the code blocks of all pages."""
    blocks = []
    for path in sorted(ROOT.glob("**/*.md")):
        page = path.relative_to(ROOT)
        if FOLDERS & set(page.parts):
            continue
        text = path.read_text(encoding="utf-8")
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
            line = text.count("\n", 0, found.start()) + 1
            blocks.append(Block(str(page), line, found[1], found[2]))
    return blocks


BLOCKS = find_blocks()
PROGRAMS = [block for block in BLOCKS if block.language == "python"]
COMMANDS = [
    (block, line)
    for block in BLOCKS
    if block.language in SHELLS
    for line in block.text.splitlines()
    if re.match(r"(\w+=\S+ )*(graft|make|mpiexec|python3?|pip|git|curl|cd) ", line)
]


def block_id(block):
    return f"{block.page}:{block.line}"


def test_pages_have_only_known_languages():
    assert {block.language for block in BLOCKS} <= {"python", "json", "text", *SHELLS}


@pytest.mark.parametrize("block", PROGRAMS, ids=map(block_id, PROGRAMS))
def test_page_program_prints_what_its_comments_say(block, tmp_path, monkeypatch, request):
    """The comment after a print statement is the beginning of the line that it prints."""
    for package in OPTIONAL:
        if re.search(rf"^(import|from) {package}\b", block.text, re.M):
            pytest.importorskip(package)
    text = block.text
    if SERVER_URL in text:
        text = text.replace(SERVER_URL, request.getfixturevalue("server").url.removesuffix("/v1"))
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    path = tmp_path / "page.py"
    path.write_text(text)
    with contextlib.redirect_stdout(printed):
        exec(compile(text, str(path), "exec"), {"__name__": "__main__"})
    expected = re.findall(r"^ *print\(.*\)  # (.*)$", text, re.M)
    lines = iter(printed.getvalue().splitlines())
    for comment in expected:
        assert any(line.startswith(comment) for line in lines), (comment, printed.getvalue())


@pytest.mark.parametrize(
    ("block", "line"), COMMANDS, ids=[f"{block_id(block)} {line}" for block, line in COMMANDS]
)
def test_page_command_exists(block, line):
    words = shlex.split(re.sub(r" \.\.\.(?= |$)", "", line), comments=True)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    if words[0] == "mpiexec":
        words = words[3:]  # mpiexec -n 2
    if words[0] == "graft":
        assert cli.parser().parse_args(words[1:]).command == words[1]
    elif words[0] == "make":
        targets = subprocess.run(["make", "-pnq"], cwd=ROOT, capture_output=True, text=True).stdout
        assert all(f"\n{word}:" in targets for word in words[1:] if "=" not in word)
    elif words[:2] == ["python", "-m"] and words[2].startswith("graft."):
        assert importlib.util.find_spec(words[2]) is not None
    else:
        assert words[0] in OTHER_PROGRAMS
