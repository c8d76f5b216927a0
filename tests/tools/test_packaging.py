"""Tests of packaging: pinned versions, contents of the wheel, and setup of the environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import graft.tools
from graft.tools import bootstrap, tree

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("native", "cudagraph", "sampling", "grammar", "models", "tools")
TABLE = PROJECT["project"]
NO_DEPS = PROJECT["tool"]["graft"]["no-deps"]
REQUIRED = [*TABLE["dependencies"], *NO_DEPS]
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)


def test_requirements_have_bounds_that_contain_the_pins():
    """Each requirement has a lower bound, an upper bound and a pinned version between the bounds.

    The upper bound is the next major or minor release after the lower bound, or a later patch
    release of a library whose interface graft checks by release.
    """
    for text in (*REQUIRED, *PROJECT["build-system"]["requires"]):
        wanted = Requirement(text)
        ends = {s.operator: s.version for s in wanted.specifier}
        assert set(ends) == {">=", "<"}, text
        assert wanted.specifier.contains(PINS[wanted.name]), text
        low = Version(ends[">="])
        high = Version(ends["<"])
        ends_of_range = [(low.major + 1, 0), (low.major, low.minor + 1)]
        if text in NO_DEPS:
            ends_of_range.append((low.major, low.minor))
        assert (high.major, high.minor) in ends_of_range, text
    names = {
        Requirement(text).name
        for text in (
            *REQUIRED,
            *PROJECT["build-system"]["requires"],
            *TABLE["optional-dependencies"]["dev"],
        )
    }
    assert names == set(PINS)
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", pin) for pin in PINS.values())


def test_graft_is_a_namespace_of_packages():
    mapping = PROJECT["tool"]["scikit-build"]["wheel"]["packages"]
    assert mapping == {f"graft/{package}": package for package in PACKAGES}
    assert all((ROOT / package / "__init__.py").is_file() for package in PACKAGES)
    assert getattr(graft, "__file__", None) is None


def test_installed_graft_is_this_working_tree():
    assert Path(graft.tools.__file__).resolve() == ROOT / "tools" / "__init__.py"


@pytest.mark.parametrize(
    ("name", "script", "words"),
    [
        ("", "", "Python 3.11 or newer"),
        (
            "python3.12",
            "echo 'command not found in this version' >&2; exit 127",
            "command not found",
        ),
        ("python3.12", "echo 'it is Python 3.9' >&2; exit 1", "it is Python 3.9"),
    ],
)
def test_find_python_reports_why_candidates_are_unusable(tmp_path, name, script, words):
    """If no suitable Python is found, a one-sentence error says what to install.

    Interpreters that do not run or are too old are skipped. The error contains the reason.
    """
    for tool in ("sh", "tail"):
        found = shutil.which(tool)
        assert found
        (tmp_path / tool).symlink_to(found)
    if name:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["sh", str(ROOT / "tools" / "find_python.sh")],
        text=True,
        capture_output=True,
        env={"PATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert (f"{name}: {words}" if name else words) in done.stderr
    assert name or done.stderr.count("\n") == 1


def test_find_python_prints_usable_interpreter():
    base = getattr(sys, "_base_executable", sys.executable)
    done = subprocess.run(
        ["sh", str(ROOT / "tools" / "find_python.sh"), base],
        text=True,
        capture_output=True,
        check=True,
    )
    version = subprocess.run(
        [done.stdout.strip(), "-c", "import sys; print(sys.version_info[:2])"],
        text=True,
        capture_output=True,
        check=True,
    )
    assert version.stdout.strip() == str(sys.version_info[:2])


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "",
            "graft needs a C++17 compiler and found none (CXX={}); Debian and Ubuntu: apt install "
            "g++\n",
        ),
        (
            "echo 'unrecognized option -std=c++17' >&2; exit 1",
            "CXX={} does not compile C++17: unrecognized option -std=c++17\n",
        ),
    ],
)
def test_bootstrap_rejects_missing_or_old_compiler(tmp_path, script, message):
    """An unsuitable compiler is reported before the virtual environment is created."""
    fake = tmp_path / "c++"
    if script:
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bootstrap.py"), str(tmp_path / "venv")],
        text=True,
        capture_output=True,
        env={**os.environ, "CXX": str(fake)},
    )
    assert (done.returncode, done.stderr) == (1, "graft: " + message.format(fake))
    assert not (tmp_path / "venv").exists()


def repository_files() -> list[Path]:
    """Return the files that git tracks, and new files that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    )
    return [Path(name) for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def build_wheel(folder: Path, *options: str) -> Path:
    """Build a wheel from a copy of the repository's files."""
    for name in repository_files():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "source" / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "-q",
            "wheel",
            "--no-build-isolation",
            "--no-deps",
            "-w",
            str(folder),
            *options,
            str(folder / "source"),
        ],
        check=True,
        env={**os.environ, "PATH": path},
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_wheel_contains_runtime_files_only(tmp_path):
    """The wheel contains the kernels, headers, models and commands.

    C++ sources, training code and development scripts are excluded. The wheel of this test lacks
    the C++ part, because building the C++ part takes minutes.
    """
    wheel = build_wheel(tmp_path, "--config-settings=wheel.cmake=false")
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    files = [Path("graft", name) for name in repository_files() if name.parts[0] in PACKAGES]
    excluded = {Path("graft/tools/train"), Path("graft/native/tests")}
    required = {
        name
        for name in files
        if not excluded & set(name.parents)
        and (
            name.suffix in (".cu", ".cuh", ".json", ".safetensors")
            or {"include", "kernels", "records"} & set(name.parts)
            or (name.suffix == ".py" and name.parent != Path("graft/tools"))
        )
    }
    assert len(required) > 100 and required <= names
    extra = {
        name
        for name in names
        if excluded & set(name.parents)
        or name.suffix in (".cpp", ".txt")
        or (name.suffix == ".h" and not {"include", "kernels", "records"} & set(name.parts))
    }
    assert {name for name in extra if "dist-info" not in name.parts[0]} == set()
    assert {
        Path("graft/tools", name)
        for name in (
            "cli.py",
            "demo/words.json",
            "demo/demo_prompts.jsonl",
            "demo/llm_prompts.jsonl",
        )
    } <= names
    assert not names & {
        Path("graft/tools", name) for name in ("bootstrap.py", "docs.py", "tree.py")
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Return a complete wheel, including the C++ part."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.full
@pytest.mark.parametrize("which", ["lower", "upper"])
def test_wheel_runs_in_empty_environment(tmp_path, wheel, which):
    """The demo runs from the installed wheel, without the repository.

    The required packages are installed in the oldest or the newest supported versions. If XGrammar
    or the server is used, an error names the optional packages to install.
    """
    venv.create(tmp_path / "venv", symlinks=True, with_pip=True)
    limits = tmp_path / "limits.txt"
    limits.write_text(
        "".join(
            f"{wanted.name}=={end.version}\n"
            for wanted in map(Requirement, TABLE["dependencies"])
            for end in wanted.specifier
            if which == "lower" and end.operator == ">="
        )
    )
    command = tmp_path / "venv" / "bin" / "graft"
    pip = [str(command.with_name("python")), "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "install", "-c", str(limits), str(wheel)], check=True)
    env = {"PATH": os.environ["PATH"], "GRAFT_DEVICE": "soft", "HOME": str(tmp_path)}

    def graft(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(command), *arguments], text=True, capture_output=True, cwd=tmp_path, env=env
        )

    done = graft("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert graft("doctor").returncode == 0
    done = graft("generate", "--prompt", "x", "--regex", "a+", "--backend", "xgrammar")
    assert done.returncode == 2
    assert "pip install --no-deps xgrammar" in done.stderr and "Traceback" not in done.stderr
    done = graft("serve")
    assert done.returncode == 2
    assert (
        "pip install starlette uvicorn prometheus-client" in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.fixture
def commands(monkeypatch):
    """Return a list to which the bootstrap appends its commands instead of running them."""
    recorded: list[list[str]] = []

    def record(command, doing, **env):
        recorded.append(list(command))

    monkeypatch.setattr(bootstrap, "run", record)
    return recorded


def test_bootstrap_installs_pins_again_only_after_changes(tmp_path, commands, monkeypatch):
    """The package xgrammar is installed without its dependencies."""
    project = bootstrap.read_project()
    for _ in range(2):
        bootstrap.install_pins(tmp_path, Path("python"), project)
    assert len(commands) == 2
    [without_dependencies] = [command for command in commands if "--no-deps" in command]
    assert [pin for pin in without_dependencies if pin.startswith("xgrammar")]
    assert not [pin for pin in commands[0] if "xgrammar" in pin]
    assert all(str(ROOT / "constraints.txt") in command for command in commands)
    project["project"]["dependencies"][0] += ",!=13.4"
    bootstrap.install_pins(tmp_path, Path("python"), project)
    assert len(commands) == 4
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    (tmp_path / "constraints.txt").write_text("numpy==2.4.5\n")
    bootstrap.install_pins(tmp_path, Path("python"), project)
    assert len(commands) == 6


def test_bootstrap_repeats_failed_installation(tmp_path, monkeypatch):

    def fail(command, doing, **env):
        raise bootstrap.BootstrapError("no network")

    monkeypatch.setattr(bootstrap, "run", fail)
    for _ in range(2):
        with pytest.raises(bootstrap.BootstrapError):
            bootstrap.install_pins(tmp_path, Path("python"), bootstrap.read_project())


@pytest.mark.parametrize("name", ["worker.cpp", "worker.h", "CMakeLists.txt"])
def test_bootstrap_rebuilds_after_source_changes(tmp_path, commands, monkeypatch, name):
    """A changed C++ source, header or CMake file causes a rebuild. A Python file does not."""
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = tmp_path / "native" / "guide" / name
    source.parent.mkdir(parents=True)
    for path, text, force, built in (
        (source, "one", False, 1),
        (source, "one", False, 1),
        (source.parent / "guide.py", "two", False, 1),
        (source, "two", False, 2),
        (source, "two", True, 3),
    ):
        path.write_text(text)
        bootstrap.build_native(tmp_path, Path("python"), force=force)
        assert len(commands) == built


def test_bootstrap_error_contains_output_of_failed_command():
    bootstrap.run([sys.executable, "-c", "print('fine')"], "trying")
    with pytest.raises(bootstrap.BootstrapError, match=r"trying failed.*\n.*the reason"):
        bootstrap.run([sys.executable, "-c", "raise SystemExit('the reason')"], "trying")


def test_tree_links_packages_and_removes_stale_links(tmp_path, monkeypatch):
    """`make_tree` links all packages and removes links to deleted files.

    It keeps the built libraries, which are in the same folder as the links.
    """
    monkeypatch.setattr(tree, "TREE", tmp_path / "tree")
    made = tree.make_tree() / "graft"
    native = made / "native"
    (native / "gone.py").symlink_to("nowhere.py")
    (native / "_native.so").write_text("built")
    tree.make_tree()
    for package in tree.PACKAGES:
        assert (made / package / "__init__.py").samefile(ROOT / package / "__init__.py")
    assert (native / "__init__.py").samefile(ROOT / "native" / "__init__.py")
    assert not (native / "gone.py").is_symlink()
    assert (native / "_native.so").read_text() == "built"


@pytest.mark.full
def test_make_test_cuda_runs_without_installation():
    """With VENV=none, ``make test-cuda`` builds with CMake and runs the tests from build/tree."""
    python = Path(sys.executable).resolve()
    env = {**os.environ, "PYTHONPATH": str(Path(pytest.__file__).parents[1])}
    done = subprocess.run(
        [
            "make",
            "-C",
            str(ROOT),
            "test-cuda",
            "VENV=none",
            f"PYTHON={python}",
            "GRAFT_DEVICE=soft",
            "TESTS=tests/cudagraph/test_memory.py",
            "PYTEST=-q",
        ],
        env=env,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    code = "import graft.native._native as n, graft.tools as t; print(n.__file__, t.__file__)"
    paths = subprocess.run(
        [str(python), "-c", code],
        text=True,
        capture_output=True,
        check=True,
        env={**env, "PYTHONPATH": f"{tree.TREE}:{env['PYTHONPATH']}"},
    ).stdout
    assert all(Path(path).is_relative_to(tree.TREE) for path in paths.split())
