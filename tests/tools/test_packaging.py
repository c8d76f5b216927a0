"""The package: pins, rooms, files that must travel, and the scripts that build the environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = ("native", "cudagraph", "sampling", "grammar", "models", "tools")


def test_every_requirement_is_pinned_exactly():
    """Two clean clones at different times install the same packages."""
    table = PROJECT["project"]
    extras = [pin for pins in table["optional-dependencies"].values() for pin in pins]
    pins = [*table["dependencies"], *extras, *PROJECT["tool"]["graft"]["no-deps"],
            *PROJECT["build-system"]["requires"]]
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", pin)] == []


def test_build_requirements_match_the_dev_extra():
    """The build without isolation uses the very versions that an isolated build would."""
    assert set(PROJECT["build-system"]["requires"]) <= set(
        PROJECT["project"]["optional-dependencies"]["dev"])


def test_rooms_are_packages_of_a_namespace():
    """Each room is a package, and graft itself is a namespace without a file of its own."""
    mapping = PROJECT["tool"]["scikit-build"]["wheel"]["packages"]
    assert mapping == {f"graft/{room}": room for room in ROOMS}
    assert [room for room in ROOMS if not (ROOT / room / "__init__.py").is_file()] == []
    import graft

    assert getattr(graft, "__file__", None) is None


def test_installed_graft_is_this_tree():
    """The tests run against the files beside them, not against another installation."""
    import graft.tools

    assert Path(graft.tools.__file__).resolve() == ROOT / "tools" / "__init__.py"


def run_find_python(tmp_path: Path, name: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run find_python.sh where the only Python is a script of that name."""
    for tool in ("sh", "tail"):
        found = shutil.which(tool)
        assert found
        (tmp_path / tool).symlink_to(found)
    if script:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    return subprocess.run(["sh", str(ROOT / "tools" / "find_python.sh")], text=True,
                          capture_output=True, env={"PATH": str(tmp_path)})


def test_a_missing_python_is_said_in_one_sentence(tmp_path):
    """Without any Python the build stops with a sentence that says what to install."""
    done = run_find_python(tmp_path, "python3", "")
    assert done.returncode == 1
    assert "Python 3.11 or newer" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(("script", "words"), [
    ("echo 'command not found in this version' >&2; exit 127", "command not found"),
    ("echo 'it is Python 3.9' >&2; exit 1", "it is Python 3.9"),
])
def test_a_python_that_does_not_do_is_named_with_its_reason(tmp_path, script, words):
    """A broken shim or an old Python is passed over, and the sentence tells why."""
    done = run_find_python(tmp_path, "python3.12", script)
    assert done.returncode == 1
    assert f"python3.12: {words}" in done.stderr


def test_a_usable_python_is_found():
    """The script prints an interpreter that runs and is at least 3.11."""
    base = getattr(sys, "_base_executable", sys.executable)
    done = subprocess.run(["sh", str(ROOT / "tools" / "find_python.sh"), base], text=True,
                          capture_output=True, check=True)
    said = subprocess.run([done.stdout.strip(), "-c", "import sys; print(sys.version_info[:2])"],
                          text=True, capture_output=True, check=True)
    assert said.stdout.strip() == str(sys.version_info[:2])


def test_a_missing_compiler_is_said_in_one_sentence(tmp_path):
    """The environment is not begun when the compiler that it would end with is not there."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bootstrap.py"), str(tmp_path / "venv")], text=True,
        capture_output=True, env={**os.environ, "CXX": "no-such-compiler"})
    assert done.returncode == 1
    assert done.stderr == ("graft: graft needs a C++17 compiler and found none "
                           "(CXX=no-such-compiler); Debian and Ubuntu: apt install g++\n")
    assert not (tmp_path / "venv").exists()


def test_a_compiler_without_cpp17_is_refused(tmp_path):
    """A compiler that exists but cannot compile C++17 is refused with its own words."""
    fake = tmp_path / "old-c++"
    fake.write_text("#!/bin/sh\necho 'unrecognized option -std=c++17' >&2; exit 1\n")
    fake.chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bootstrap.py"), str(tmp_path / "venv")], text=True,
        capture_output=True, env={**os.environ, "CXX": str(fake)})
    assert done.returncode == 1
    assert "does not compile C++17: unrecognized option" in done.stderr


@pytest.mark.full
def test_a_wheel_carries_everything_it_needs(tmp_path):
    """A wheel installed far from the repository has its kernels, headers, models and commands."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True,
                            capture_output=True, check=True)
    tracked = [Path(name) for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    for name in tracked:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / "source" / name)
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path),
                    str(tmp_path / "source")], check=True, env={**os.environ, "PATH": path})
    venv.create(tmp_path / "venv", symlinks=True)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)

    script = "from graft.tools.cli import main; raise SystemExit(main(['doctor']))"
    packages = f"{site}{os.pathsep}{Path(pytest.__file__).parents[1]}"
    done = subprocess.run([str(tmp_path / "venv" / "bin" / "python"), "-c", script], text=True,
                          capture_output=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": packages, "GRAFT_DEVICE": "soft"})
    assert done.returncode == 0, done.stdout + done.stderr
    data = [name for name in tracked if name.parts[0] in ROOMS and (
        name.suffix in (".py", ".cu", ".cuh", ".json", ".safetensors") or "include" in name.parts)]
    assert data
    assert [name for name in data if not (site / "graft" / name).exists()] == []
    assert not list((site / "graft").rglob("*.cpp"))
