"""Tests of the test suite without optional packages, as on a GPU machine without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Packages that need not be installed on a GPU machine, by the name under which they are imported.
HIDDEN = ("jsonschema", "llguidance", "openai", "xgrammar", "tvm_ffi", "starlette", "cuda.core")


def run_pytest_without_packages(folder: Path, *arguments: object) -> subprocess.CompletedProcess:
    """Run pytest in a process in which the packages `HIDDEN` cannot be imported."""
    (folder / "sitecustomize.py").write_text(
        f"import sys\nfor name in {HIDDEN}:\n    sys.modules[name] = None\n"
    )
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.full
def test_all_tests_are_collected_without_optional_packages(tmp_path):
    done = run_pytest_without_packages(tmp_path, "--collect-only", "tests")
    assert done.returncode == 0, done.stdout[-3000:]
    counts = re.search(r"(\d+)(?:/(\d+))? tests collected", done.stdout)
    assert counts is not None
    assert int(counts[2] or counts[1]) >= 4000


TEST_FILE = """
from pathlib import Path

import pytest

from graft.grammar import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.request import Request
from graft.tools.demo_model import demo_model

@pytest.fixture
def library():
    import llguidance
    return llguidance

@pytest.fixture(scope="module")
def engine():
    with Engine(*demo_model(), max_batch_size=1, max_length=64) as engine:
        yield engine

def test_fixture(library):
    pass

def test_request_without_grammar(engine):
    (output,) = engine.generate([Request(tokens=[5] * 8, max_tokens=4)])
    assert len(output.tokens) == 4

def test_request_with_grammar(engine):
    request = Request(tokens=[5], max_tokens=4, grammar=GrammarSpec.regex("a+"))
    (output,) = engine.generate([request])
    assert output.error is None

def test_failure():
    assert "llguidance" == "jsonschema"
"""


def test_tests_of_missing_packages_are_skipped(tmp_path):
    """An engine runs requests without a grammar. Other failures than a missing package remain."""
    (tmp_path / "test_it.py").write_text(TEST_FILE)
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest)
    done = run_pytest_without_packages(tmp_path, tmp_path, "-rA", "--rootdir", tmp_path)
    outcomes = dict(re.findall(r"(?m)^(PASSED|FAILED) \S*::(test_\w+)", done.stdout))
    assert outcomes == {"PASSED": "test_request_without_grammar", "FAILED": "test_failure"}
    assert done.stdout.count("the package llguidance is not installed") >= 1
    assert re.search(r"1 failed, 1 passed, 2 skipped", done.stdout), done.stdout[-3000:]
