"""Tests of packaging: pinned versions, contents of the wheel, and setup of the environment."""

from __future__ import annotations

import json
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
from graft.grammar.backends.xgrammar import RELEASES
from graft.native import _native
from graft.native.softcuda import prebuild
from graft.tools.demo_model import DRAFTERS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("native", "cudagraph", "sampling", "grammar", "models", "tools")
TABLE = PROJECT["project"]
EXTRAS = TABLE["optional-dependencies"]
#: The extras that the targets of the Makefile install, and the extras that they contain.
MAKE_EXTRAS = ("test", "lint", "docs", "kernels", "charts", "serve", "gguf", "parallel", "ptx")
#: Packages that the Makefile names.
MAKE_PACKAGES = ("cmake", "ninja", "nanobind", "scikit-build-core", "xgrammar")
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
)


def test_requirements_have_bounds_that_contain_the_pins():
    """Each requirement has a lower bound, an upper bound and a pinned version between the bounds.

    The upper bound is the next major or minor release after the lower bound.
    """
    for text in (*TABLE["dependencies"], *PROJECT["build-system"]["requires"]):
        wanted = Requirement(text)
        ends = {s.operator: s.version for s in wanted.specifier}
        assert set(ends) == {">=", "<"}, text
        assert wanted.specifier.contains(PINS[wanted.name]), text
        low = Version(ends[">="])
        high = Version(ends["<"])
        next_releases = [(low.major + 1, 0), (low.major, low.minor + 1)]
        assert (high.major, high.minor) in next_releases, text
    assert PINS["xgrammar"] in RELEASES


def test_changelog_citation_and_version_agree():
    """A development version belongs to the changes that are not released yet."""
    pages = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest, *older = re.findall(r"^## (.*)$", pages, re.M)
    version = Version(TABLE["version"])
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation
    if version.is_devrelease:
        assert newest == "Unreleased"
        assert not any(title.startswith(version.base_version) for title in older)
    else:
        assert newest.split()[0] == TABLE["version"]


def test_package_description_needs_no_repository():
    """The description that a package index shows has no relative links."""
    text = (ROOT / TABLE["readme"]).read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []


def test_pins_are_the_packages_that_make_installs():
    texts = [*TABLE["dependencies"], *PROJECT["build-system"]["requires"]]
    texts += [text for extra in MAKE_EXTRAS for text in EXTRAS[extra]]
    wanted = [Requirement(text) for text in texts]
    assert {e for text in wanted for e in text.extras} <= set(MAKE_EXTRAS)
    names = {text.name for text in wanted if not text.extras}
    assert names | set(MAKE_PACKAGES) == set(PINS)
    assert all(text.specifier.contains(PINS[text.name]) for text in wanted if not text.extras)
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", pin) for pin in PINS.values())


def test_packages_are_marked_as_typed():
    assert all((ROOT / package / "py.typed").is_file() for package in PACKAGES)


def test_graft_is_a_namespace_of_packages():
    mapping = PROJECT["tool"]["scikit-build"]["wheel"]["packages"]
    assert mapping == {f"graft/{package}": package for package in PACKAGES}
    assert all((ROOT / package / "__init__.py").is_file() for package in PACKAGES)
    assert getattr(graft, "__file__", None) is None


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the stable ABI is used from Python 3.12 on")
def test_native_module_uses_the_stable_abi():
    assert Path(_native.__file__).name == "_native.abi3.so"


def test_installed_graft_is_this_working_tree():
    assert Path(graft.tools.__file__).resolve() == ROOT / "tools" / "__init__.py"


def check_requirements(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script that checks what ``make`` cannot install."""
    script = ROOT / "tools" / "check_requirements.sh"
    env = {"PATH": os.environ["PATH"], **env}
    command = ["sh", str(script), *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env=env)


def write_script(path: Path, script: str) -> None:
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


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
def test_setup_reports_why_python_interpreters_are_unusable(tmp_path, name, script, words):
    """If no suitable Python is found, a one-sentence error says what to install.

    Interpreters that do not run or are too old are skipped. The error contains the reason.
    """
    for tool in ("sh", "head", "uname", "git", "flock"):
        found = shutil.which(tool)
        assert found
        (tmp_path / tool).symlink_to(found)
    write_script(tmp_path / "c++", "while read line; do :; done")
    if name:
        write_script(tmp_path / name, script)
    done = check_requirements(PATH=str(tmp_path))
    assert done.returncode == 1
    assert (f"{name}: {words}" if name else words) in done.stderr
    assert done.stderr.count("\n") == 1


def test_setup_uses_named_python():
    base = getattr(sys, "_base_executable", sys.executable)
    done = check_requirements(base)
    assert done.returncode == 0, done.stderr
    command = [done.stdout.strip(), "-c", "import sys; print(sys.version_info[:2])"]
    version = subprocess.run(command, text=True, capture_output=True, check=True)
    assert version.stdout.strip() == str(sys.version_info[:2])


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("", "not found"),
        ("echo 'unrecognized option -std=c++17' >&2; exit 1", "unrecognized option -std=c++17"),
    ],
)
def test_setup_rejects_missing_or_old_compiler(tmp_path, script, reason):
    fake = tmp_path / "c++"
    if script:
        write_script(fake, script)
    done = check_requirements(CXX=str(fake))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"graft: graft needs a C++17 compiler and found none ({fake}: {reason}). "
        "Debian and Ubuntu: apt install g++\n"
    )


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


def build_wheel(folder: Path) -> Path:
    """Build a wheel from a copy of the repository's files."""
    for name in repository_files():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "source" / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "wheel"),
            *("--no-build-isolation", "--no-deps", "-w", str(folder), str(folder / "source")),
        ],
        check=True,
        env={**os.environ, "PATH": path},
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


#: Program that calls the build backend as pip does, without the C++ part.
BUILD_WITHOUT_NATIVE_PART = """
import sys
from scikit_build_core.build import build_wheel
build_wheel(sys.argv[1], {"wheel.cmake": "false", "wheel.py-api": ""})
"""


def names_in_wheel(folder: Path) -> set[Path]:
    """Return the names of the files in a wheel that lacks the C++ part.

    The wheel is built from empty files with the names of the repository's files, which takes less
    time than to compress their contents.
    """
    for name in repository_files():
        path = folder / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if len(name.parts) == 1:  # the metadata is in files of the root folder
            shutil.copy2(ROOT / name, path)
        else:
            path.touch()
    command = [sys.executable, "-c", BUILD_WITHOUT_NATIVE_PART, str(folder)]
    subprocess.run(command, cwd=folder / "source", check=True)
    (wheel,) = folder.glob("*.whl")
    return {Path(name) for name in zipfile.ZipFile(wheel).namelist()}


def test_wheel_contains_runtime_files_only(tmp_path):
    """The wheel contains the kernels, headers, models and commands.

    C++ sources, training code and development scripts are excluded, except for the sources of the
    PTX library, which users compile when they first need it. The wheel of this test lacks the C++
    part, because building the C++ part takes minutes.
    """
    names = names_in_wheel(tmp_path)
    files = [Path("graft", name) for name in repository_files() if name.parts[0] in PACKAGES]
    excluded = {
        *(Path("graft/tools/train"), Path("graft/native/tests"), Path("graft/models/smollm")),
        Path("graft/native/softcuda/prebuild.py"),
    }
    compiled_later = Path("graft/native/softcuda/ptx")
    required = {
        name
        for name in files
        if not excluded & {name, *name.parents}
        and (
            name.suffix in (".cu", ".cuh", ".json", ".safetensors")
            or (name.suffix == ".txt" and "native" not in name.parts)
            or {"include", "kernels", "records"} & set(name.parts)
            or (name.suffix == ".py" and name.parent != Path("graft/tools"))
            or (name.parent == compiled_later and name.name != "CMakeLists.txt")
        )
    }
    assert len(required) > 100 and required <= names
    folders = {name.parts[:2] for name in names if "dist-info" not in name.parts[0]}
    assert folders == {("graft", package) for package in PACKAGES}
    extra = {
        name
        for name in names - required
        if excluded & {name, *name.parents}
        or name.suffix == ".cpp"
        or (name.suffix == ".txt" and "native" in name.parts)
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
        Path("graft/tools", name) for name in ("check_requirements.sh", "docs.py", "notebook.py")
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Return a complete wheel, including the C++ part."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_wheel_contains_each_compiled_kernel_or_leaves_it_out():
    sources = {
        str(name)
        for name in repository_files()
        if name.suffix == ".cu" and "tests" not in name.parts
    }
    prebuilt = {path for path, _ in prebuild.variants()}
    assert prebuilt | set(prebuild.LEFT_OUT) == sources


RECORD_KERNELS = """
import json
from graft.cudagraph.kernels import compiler
from graft.models import Engine, Request
from graft.tools.demo_model import DRAFTERS, demo_model

compiled = []

def record(text, name, defines, **options):
    compiled.append([name, dict(defines)])
    return compile_cpu(text, name, defines=defines, **options)

compile_cpu, compiler.compile_cpu = compiler.compile_cpu, record
for drafter in DRAFTERS:
    with Engine(*demo_model(drafter), max_batch_size=2) as engine:
        engine.generate([Request(prompt="code: QF-5702", max_tokens=2, temperature=0.5)])
print(json.dumps(compiled))
"""


def test_wheel_contains_compiled_kernels_of_demo_model():
    done = subprocess.run(
        [sys.executable, "-c", RECORD_KERNELS],
        text=True,
        capture_output=True,
        check=True,
        env={**os.environ, "GRAFT_DEVICE": "soft"},
    )
    compiled = json.loads(done.stdout)
    prebuilt = [[Path(path).name, defines] for path, defines in prebuild.variants()]
    assert len(compiled) > 20
    assert [kernel for kernel in compiled if kernel not in prebuilt] == []


@pytest.mark.full
@pytest.mark.parametrize("which", ["lower", "upper"])
def test_wheel_runs_in_empty_environment(tmp_path, wheel, which):
    """The demo runs from the installed wheel, without the repository and without a compiler.

    The required packages are installed in the oldest or the newest supported versions. If XGrammar,
    the server or a model that is not in the wheel is used, an error names what is needed.
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
    (tmp_path / "empty").mkdir()
    env = {"PATH": str(tmp_path / "empty"), "HOME": str(tmp_path)}

    def graft(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(command), *arguments], text=True, capture_output=True, cwd=tmp_path, env=env
        )

    done = graft("generate", "--prompt", "name: Olga Novak; age: 42", "--regex", "[0-9]+")
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    for drafter in DRAFTERS:
        done = graft("demo", "--drafter", drafter)
        assert done.returncode == 0, done.stdout + done.stderr
    done = graft("doctor")
    assert done.returncode == 0, done.stdout
    assert "no C++ compiler was found" in done.stdout
    done = graft("demo", "--llm")
    assert done.returncode == 2 and "make demo-llm" in done.stderr
    done = graft("generate", "--prompt", "x", "--regex", "a+", "--backend", "xgrammar")
    assert done.returncode == 2
    assert "pip install --no-deps xgrammar" in done.stderr and "Traceback" not in done.stderr
    done = graft("serve")
    assert done.returncode == 2
    assert (
        "pip install starlette uvicorn prometheus-client" in done.stderr
        and "Traceback" not in done.stderr
    )


def check_types(checker: str, python: Path, program: Path) -> set[int]:
    """Return the lines of a program in which a type checker finds errors."""
    if checker == "mypy":
        pytest.importorskip("mypy")
        command = [sys.executable, "-m", "mypy", "--strict", "--python-executable"]
    else:
        found = shutil.which("pyright")
        if not found:
            pytest.skip("pyright is not installed")
        command = [found, "--pythonpath"]
    done = subprocess.run(
        [*command, str(python), program.name], cwd=program.parent, text=True, capture_output=True
    )
    errors = re.findall(r"^ *(\S+?):(\d+)(?::\d+)?(?: -|:) error", done.stdout, re.M)
    assert {Path(file).name for file, _ in errors} == {program.name}, done.stdout + done.stderr
    return {int(line) for _, line in errors}


@pytest.mark.full
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_know_installed_graft(tmp_path, wheel, checker):
    """Type checkers find each wrong argument and attribute in a user's program, and no others."""
    venv.create(tmp_path / "venv", symlinks=True)
    [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    native = packages / "graft" / "native" / "_native"
    assert {path.name for path in native.iterdir()} == {"__init__.pyi", "guide.pyi", "labs.pyi"}
    (tmp_path / "program").mkdir()
    program = tmp_path / "program" / "program.py"
    shutil.copy(Path(__file__).with_name("typed_program.py"), program)
    lines = program.read_text().splitlines()
    planted = {number for number, line in enumerate(lines, 1) if line.endswith("# error")}
    assert check_types(checker, tmp_path / "venv" / "bin" / "python", program) == planted


@pytest.fixture
def project(tmp_path) -> Path:
    """Return a folder with the Makefile, one C++ source and a virtual environment.

    The Python of the environment writes its arguments to the file ``log`` and fails if the file
    ``fail`` exists.
    """
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in ("native/guide", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("worker.cpp", "worker.h", "CMakeLists.txt", "guide.py"):
        (tmp_path / "native" / "guide" / name).touch()
    write_script(tmp_path / ".venv" / "bin" / "python", 'echo "$@" >> log; test ! -e fail')
    (tmp_path / ".venv" / ".create").touch()
    return tmp_path


def run_make(project: Path, *arguments: str, processes: int = 1) -> tuple[int, list[str]]:
    """Run make in one or more processes at once.

    Return the highest exit status and the pip commands that the processes ran.
    """
    log = project / "log"
    log.write_text("")
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "-C", str(project), *arguments]
    running = [subprocess.Popen(command, env=env) for _ in range(processes)]
    status = max(process.wait() for process in running)
    commands = [line for line in log.read_text().splitlines() if "pip install" in line]
    return status, [command.partition("constraints.txt ")[2] for command in commands]


BUILD = ["cmake ninja nanobind scikit-build-core", "--no-build-isolation --editable ."]
TEST = ["graft-cuda[test]", "--no-deps xgrammar"]


@pytest.mark.parametrize(
    ("changed", "commands"),
    [
        ("native/guide/worker.cpp", BUILD),
        ("native/guide/worker.h", BUILD),
        ("native/guide/CMakeLists.txt", BUILD),
        ("native/guide/guide.py", []),
        ("constraints.txt", BUILD + TEST),
        ("pyproject.toml", BUILD + TEST),
    ],
)
@pytest.mark.full("worker.h", "guide.py", "pyproject")
def test_make_installs_again_only_after_changes(project, changed, commands):
    """A changed C++ source, header or CMake file causes a rebuild. A Python file does not."""
    assert run_make(project, "install-graft") == (0, BUILD)
    assert run_make(project, "setup") == (0, TEST)
    assert run_make(project, "setup") == (0, [])
    (project / changed).write_text("changed")
    assert run_make(project, "setup") == (0, commands)
    assert run_make(project, "setup") == (0, [])


def test_make_repeats_failed_installation(project):
    (project / "fail").touch()
    for _ in range(2):
        assert run_make(project, "setup") == (2, BUILD[:1])
    (project / "fail").unlink()
    assert run_make(project, "setup") == (0, BUILD + TEST)


def test_concurrent_runs_of_make_install_once(project):
    assert run_make(project, "setup", processes=3) == (0, BUILD + TEST)


def test_make_tree_links_packages_and_removes_stale_links(project):
    """`make tree` keeps the built libraries, which are in the same folder as the links."""
    packages = [name for name in PACKAGES if name != "native"]
    for name in packages:
        (project / name).mkdir()
    for name in ("__init__.py", "py.typed"):
        (project / "native" / name).touch()
    assert run_make(project, "tree", "VENV=none")[0] == 0
    made = project / "build" / "tree" / "graft"
    (made / "native" / "gone.py").symlink_to("nowhere.py")
    (made / "native" / "_native.so").write_text("built")
    assert run_make(project, "tree", "VENV=none")[0] == 0
    for name in (*packages, "native/guide", "native/__init__.py", "native/py.typed"):
        assert (made / name).is_symlink() and (made / name).samefile(project / name)
    assert not (made / "native" / "gone.py").is_symlink()
    assert (made / "native" / "_native.so").read_text() == "built"


def test_make_test_ptx_runs_all_files_with_ptx_tests():
    """No other target runs the tests marked ``ptx``."""
    done = subprocess.run(
        ["make", "-C", str(ROOT), "--dry-run", "test-ptx", "VENV=none", f"PYTHON={sys.executable}"],
        capture_output=True,
        text=True,
        check=True,
    )
    marked = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("tests/*/test_*.py")
        if re.search(r"pytest\.mark\.ptx\b", path.read_text(encoding="utf-8"))
    }
    assert len(marked) > 15
    assert marked - set(done.stdout.split()) == set()


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
    tree = ROOT / "build" / "tree"
    code = "import graft.native._native as n, graft.tools as t; print(n.__file__, t.__file__)"
    paths = subprocess.run(
        [str(python), "-c", code],
        text=True,
        capture_output=True,
        check=True,
        env={**env, "PYTHONPATH": f"{tree}:{env['PYTHONPATH']}"},
    ).stdout
    assert all(Path(path).is_relative_to(tree) for path in paths.split())
