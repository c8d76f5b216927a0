"""When the environment is built anew, and the tree that needs no installation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from graft.tools import bootstrap, tree

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def commands(monkeypatch):
    """Commands that the bootstrap would run, recorded and not run."""
    ran: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "run", lambda command, doing, **env: ran.append(list(command)))
    return ran


def test_pins_are_installed_once_and_again_when_one_changes(tmp_path, commands, monkeypatch):
    """A second run installs nothing; a changed pin installs all; xgrammar comes without torch."""
    project = bootstrap.read_project()
    for _ in range(2):
        bootstrap.install_pins(tmp_path, Path("python"), project)
    assert len(commands) == 2
    (bare,) = [command for command in commands if "--no-deps" in command]
    assert [pin for pin in bare if pin.startswith("xgrammar")]
    assert not [pin for pin in commands[0] if "xgrammar" in pin]
    assert all(str(ROOT / "constraints.txt") in command for command in commands)
    project["project"]["dependencies"][0] += ",!=13.4"
    bootstrap.install_pins(tmp_path, Path("python"), project)
    assert len(commands) == 4
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    (tmp_path / "constraints.txt").write_text("numpy==2.4.5\n")
    bootstrap.install_pins(tmp_path, Path("python"), project)
    assert len(commands) == 6


def test_a_failed_installation_is_tried_again(tmp_path, monkeypatch):
    """Nothing is stamped as done before it is done."""
    def fail(command, doing, **env):
        raise bootstrap.BootstrapError("no network")

    monkeypatch.setattr(bootstrap, "run", fail)
    for _ in range(2):
        with pytest.raises(bootstrap.BootstrapError):
            bootstrap.install_pins(tmp_path, Path("python"), bootstrap.read_project())


@pytest.mark.parametrize("name", ["worker.cpp", "worker.h", "CMakeLists.txt"])
def test_the_native_part_is_rebuilt_when_a_source_changes(tmp_path, commands, monkeypatch, name):
    """Every kind of source counts; an unchanged tree and a Python file build nothing."""
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = tmp_path / "native" / "guide" / name
    source.parent.mkdir(parents=True)
    for path, text, force, built in (
        (source, "one", False, 1), (source, "one", False, 1),
        (source.parent / "guide.py", "two", False, 1), (source, "two", False, 2),
        (source, "two", True, 3),
    ):
        path.write_text(text)
        bootstrap.build_native(tmp_path, Path("python"), force=force)
        assert len(commands) == built


def test_a_failing_step_shows_what_the_command_said():
    """The end of a failed command's output is in the error; a good one says nothing."""
    bootstrap.run([sys.executable, "-c", "print('fine')"], "trying")
    with pytest.raises(bootstrap.BootstrapError, match=r"trying failed.*\n.*the reason"):
        bootstrap.run([sys.executable, "-c", "raise SystemExit('the reason')"], "trying")


def test_the_tree_links_every_room_and_forgets_what_is_gone(tmp_path, monkeypatch):
    """The tree holds links to the rooms and native's files, and libraries survive a relink."""
    monkeypatch.setattr(tree, "TREE", tmp_path / "tree")
    made = tree.make_tree() / "graft"
    native = made / "native"
    (native / "gone.py").symlink_to("nowhere.py")
    (native / "_native.so").write_text("built")
    tree.make_tree()
    for room in tree.LINKED:
        assert (made / room / "__init__.py").samefile(ROOT / room / "__init__.py")
    assert (native / "__init__.py").samefile(ROOT / "native" / "__init__.py")
    assert not (native / "gone.py").is_symlink()
    assert (native / "_native.so").read_text() == "built"


@pytest.mark.full
def test_tests_run_without_an_installation():
    """`make test-cuda VENV=none` builds with CMake alone and runs the tests from its own tree."""
    python = Path(sys.executable).resolve()
    env = {**os.environ, "PYTHONPATH": str(Path(pytest.__file__).parents[1])}
    done = subprocess.run(
        ["make", "-C", str(ROOT), "test-cuda", "VENV=none", f"PYTHON={python}",
         "GRAFT_DEVICE=soft", "TESTS=tests/cudagraph/test_memory.py", "PYTEST=-q"],
        env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    where = "import graft.native._native as n, graft.tools as t; print(n.__file__, t.__file__)"
    said = subprocess.run([str(python), "-c", where], text=True, capture_output=True, check=True,
                          env={**env, "PYTHONPATH": f"{tree.TREE}:{env['PYTHONPATH']}"}).stdout
    assert all(Path(path).is_relative_to(tree.TREE) for path in said.split())
