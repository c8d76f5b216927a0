"""Tests that the programs and commands of all pages run."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

from graft.tools import cli, notebook
from graft.tools.demo_model import demo_model

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"build", ".venv", "node_modules"}
#: Packages that blocks may import. A block is skipped if one of them is not installed.
OPTIONAL = (
    *("torch", "openai", "numba", "cupy", "cuda.core"),
    *("langchain_openai", "instructor", "pydantic_ai", "litellm"),
)
#: A block that matches needs a GPU.
NEEDS_GPU = re.compile(r"^import cupy|torch\.cuda\.", re.M)
#: A block that matches runs its kernels as PTX on the soft device, in another process.
NEEDS_PTX = re.compile(r"^from numba import", re.M)
SERVER_URL = "http://127.0.0.1:8000"
CLIENTS_PAGE = "tools/serve/CLIENTS.md"
#: Versions of the clients of the page with which the page is tested in an environment of their own,
#: because they need other versions of the package openai than the tests of graft.
CLIENT_PACKAGES = (
    *("langchain-openai==1.4.3", "instructor==1.17.0", "pydantic-ai-slim[openai]==2.31.1"),
    *("litellm==1.110.2", "openai==2.54.0"),
)
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
    for line in re.split(r"\n(?![ }])", block.text)  # the other lines of a command begin so
    if re.match(r"(\w+=\S+ )*(graft|make|mpiexec|python3?|pip|git|curl|cd) ", line)
]


def block_id(block):
    return f"{block.page}:{block.line}"


def test_pages_have_only_known_languages():
    assert {block.language for block in BLOCKS} <= {"python", "json", "text", *SHELLS}


@pytest.mark.parametrize("block", PROGRAMS, ids=map(block_id, PROGRAMS))
def test_page_program_prints_what_its_comments_say(block, tmp_path, monkeypatch, request):
    """The comment after a print statement is the beginning of the line that it prints."""
    if NEEDS_GPU.search(block.text) and os.environ.get("GRAFT_DEVICE") != "cuda":
        pytest.skip("the program needs a GPU")
    for package in OPTIONAL:
        if re.search(rf"^(import|from) {package}\b", block.text, re.M):
            pytest.importorskip(package)
    text = with_server(block.text, request)
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    path = tmp_path / "page.py"
    path.write_text(text)
    if NEEDS_PTX.search(text):
        command = [sys.executable, "-m", "graft.tools.cli", "soft", "--", path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        printed.write(done.stdout)
    else:
        with contextlib.redirect_stdout(printed):
            exec(compile(text, str(path), "exec"), {"__name__": "__main__"})
    check_printed(text, printed.getvalue())


def with_server(text: str, request: pytest.FixtureRequest) -> str:
    """Return a program or command that uses the server of the tests in place of ``graft serve``."""
    if SERVER_URL not in text:
        return text
    url = request.getfixturevalue("server").url.removesuffix("/v1")
    return text.replace(SERVER_URL, url).replace("graft-demo", "demo")


def check_printed(text: str, printed: str) -> None:
    """Check that the lines that a program printed begin with its comments after ``print(...)``."""
    lines = iter(printed.splitlines())
    for comment in re.findall(r"^ *print\(.*\)  # (.*)$", text, re.M):
        assert any(line.startswith(comment) for line in lines), (comment, printed)


@pytest.fixture(scope="module")
def clients_python(tmp_path_factory) -> Path:
    """Return the interpreter of an environment with the clients of the clients page."""
    folder = tmp_path_factory.mktemp("clients")
    venv.create(folder, symlinks=True, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-compile"]
    subprocess.run([*pip, *CLIENT_PACKAGES], check=True)
    return python


@pytest.mark.full
@pytest.mark.parametrize("block", [block for block in PROGRAMS if block.page == CLIENTS_PAGE])
def test_clients_get_structured_output(block, clients_python, tmp_path, request):
    program = tmp_path / "program.py"
    program.write_text(with_server(block.text, request))
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # LiteLLM downloads nothing
    done = subprocess.run(
        [str(clients_python), str(program)], text=True, capture_output=True, cwd=tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr
    check_printed(block.text, done.stdout)


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
        assert command_parser().parse_args(words[1:]).command == words[1]
    elif words[0] == "make":
        targets = subprocess.run(["make", "-pnq"], cwd=ROOT, capture_output=True, text=True).stdout
        assert all(f"\n{word}:" in targets for word in words[1:] if "=" not in word)
    elif words[:2] == ["python", "-m"] and words[2].startswith("graft."):
        assert importlib.util.find_spec(words[2]) is not None
    else:
        assert words[0] in OTHER_PROGRAMS


@functools.cache
def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command ``graft`` with the options of all subcommands."""
    return cli.parser()


def command_problem(line: str, make_targets: str) -> str:
    """Return what is wrong with a command in the text of a page, or an empty string."""
    program, *words = line.split()
    if program == "make":
        unknown = [word for word in words if "=" not in word and f"\n{word}:" not in make_targets]
    elif program == "python":
        module = words[1].removesuffix(".NAME")
        unknown = [] if importlib.util.find_spec(module) else [module]
    else:
        actions = command_parser()._actions
        [commands] = [a for a in actions if isinstance(a, argparse._SubParsersAction)]
        command = commands.choices.get(words[0])
        known = command._option_string_actions if command else {}
        options = [word for word in words[1:] if word.startswith("--") and word != "--"]
        unknown = [option for option in options if option not in known]
        unknown += [] if command else [words[0]]
    return f"{line}: {', '.join(unknown)}" if unknown else ""


def test_commands_in_the_text_of_pages_exist():
    """Each `graft COMMAND --option`, `make TARGET` and `python -m graft.MODULE` exists."""
    targets = subprocess.run(["make", "-pnq"], cwd=ROOT, capture_output=True, text=True).stdout
    problems = []
    found = 0
    for page in sorted({block.page for block in BLOCKS} | {"CONTRIBUTING.md", "CHANGELOG.md"}):
        text = re.sub(
            r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S
        )
        for line in re.findall(r"`((?:graft|make|python -m graft\.[\w.]+)(?: [^`\n]+)?)`", text):
            if line not in ("graft", "make"):
                found += 1
                problems.append(command_problem(line, targets))
    assert found > 80
    assert [problem for problem in problems if problem] == []


def test_notebook_has_text_and_programs_of_first_steps():
    """``python -m graft.tools.notebook`` writes the notebook."""
    written = json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8"))
    assert written == notebook.notebook((ROOT / "FIRST_STEPS.md").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in written["cells"] if cell["cell_type"] == "code"]
    programs = [block.text.rstrip() for block in PROGRAMS if block.page == "FIRST_STEPS.md"]
    assert len(programs) >= 4 and [cell for cell in cells if cell in programs] == programs


def test_notebook_program_refuses_arguments(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(notebook, "NOTEBOOK", tmp_path / "notebook.ipynb")
    for argument, status in (("other.ipynb", 2), ("--help", 0)):
        with pytest.raises(SystemExit, match=str(status)):
            notebook.main([argument])
    assert "unrecognized arguments: other.ipynb" in capsys.readouterr().err
    assert not notebook.NOTEBOOK.exists()


@pytest.mark.full
def test_notebook_runs(tmp_path):
    """All cells run one after another in one process, and print what their comments say."""
    cells = json.loads(notebook.NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = "import subprocess\n"
    for cell in cells:
        source = "".join(cell["source"]).replace("8000", port)
        if source.startswith("%%bash\n"):
            commands = source.removeprefix("%%bash\n")
            commands = re.sub(
                r"^graft ", f"{sys.executable} -m graft.tools.cli ", commands, flags=re.M
            )
            program += f"subprocess.run(['bash', '-e', '-c', {commands!r}], check=True)\n"
        elif cell["cell_type"] == "code":
            program += f"{source}\n"
    path = tmp_path / "notebook.py"
    path.write_text(program)
    env = {**os.environ, "GRAFT_DEVICE": "soft"}
    done = subprocess.run(
        [sys.executable, "-u", str(path)], text=True, capture_output=True, cwd=tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr
    check_printed(program, done.stdout)


#: Commands that the test below does not run: the start of the line, and the reason.
NOT_RUN = {
    "make ": "test_packaging.py tests the Makefile, and other tests what its targets run",
    "git clone ": "needs the address of the repository",
    "cd ": "changes the folder",
    "pip install ": "test_packaging.py installs graft and its requirements",
    "python -m sglang.launch_server ": "needs a GPU",
    "python results/record.py ": "replaces recorded results, which test_results.py checks",
}
#: Files that the commands of the pages name.
COMMAND_FILES = {
    "requests.jsonl": '{"prompt": "name: Olga Novak; age: 42"}\n',
    "record.json": '{"type": "object", "properties": {"age": {"type": "integer"}}}',
    "program.py": """
from graft.cudagraph import StreamLane, load_text, open_device
device = open_device()
source = 'extern "C" __global__ void double_all(float* x) { x[threadIdx.x] *= 2.0f; }'
x = device.pinned((4,), "float32")
x.array[:] = 1
kernel = load_text(device, source, "double_all.cu")["double_all"]
stream = device.stream()
StreamLane(stream).kernel(kernel, 1, 4, [x])
stream.synchronize()
assert x.array.sum() == 8
""",
    "tests/test_one.py": "def test_one():\n    pass\n",
}


@pytest.mark.full
@pytest.mark.parametrize(
    "line", dict.fromkeys(line for _, line in COMMANDS), ids=lambda line: line[:50]
)
def test_page_command_runs(line, tmp_path, request):
    if line.startswith(tuple(NOT_RUN)):
        return
    for name, text in COMMAND_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(tmp_path / "program.py", tmp_path / "my_graft_program.py")
    line = with_server(line, request).replace("path/to/llama", str(demo_model()[0]))
    words = shlex.split(line, comments=True)
    env = {**os.environ, "GRAFT_DEVICE": "soft"}
    while re.fullmatch(r"[A-Z_]+=\w+", words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    programs = {
        "graft": [sys.executable, "-m", "graft.tools.cli"],
        "python": [sys.executable],
        "pytest": [sys.executable, "-m", "pytest"],
    }
    command = [
        part
        for before, word in itertools.pairwise(["", *words])
        for part in ([word] if before == "-m" else programs.get(word, [word]))
    ]
    if "--replicas" in words:
        pytest.importorskip("ray")
    if words[0] in ("mpiexec", "curl") and not shutil.which(words[0]):
        pytest.skip(f"{words[0]} is not installed")
    if "serve" in words:
        check_serves([*command, "--port", "0"], env)
        return
    done = subprocess.run(command, text=True, capture_output=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    if words[0] == "curl":
        assert '"content": "42"' in done.stdout
    if words[:2] == ["graft", "generate"] and "--regex" in words:
        assert done.stdout == "42\n"


def check_serves(command: list[str], env: dict[str, str]) -> None:
    """Start a server, wait until it serves, send one request, and end the server with Ctrl-C."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as server:
        try:
            lines = iter(server.stdout.readline, "")
            [url] = re.findall(r"http://\S+", next(line for line in lines if " serving " in line))
            with urllib.request.urlopen(f"{url.removesuffix('/v1')}/health") as response:
                assert response.status == 200
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(30) in (0, 130)
