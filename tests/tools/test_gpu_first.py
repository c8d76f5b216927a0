"""Tests of the GPU measurement (graft.tools.gpu_first) with small sizes."""

from __future__ import annotations

import inspect
import json
import os
import sys

import numpy as np
import pytest

from graft.grammar.errors import GrammarError
from graft.models.llm.kernels.products import Products
from graft.tools.demo_model import demo_model
from graft.tools.gpu_first import __main__ as gpu_first
from graft.tools.gpu_first import checks, model, programs
from graft.tools.gpu_first import session as session_module
from graft.tools.gpu_first.runner import read_lines, run_section
from graft.tools.gpu_first.sections import SECTIONS
from graft.tools.gpu_first.session import Session, failure, make_figure

#: Program of a section with the cases "first", "faulty" and "last". The first argument is the
#: output file, the second one a statement for the case "faulty", and the others are the cases to
#: skip.
SECTION_PROGRAM = """
import json, os, sys, time
def write(**line):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps(line) + "\\n")
for case in ("first", "faulty", "last"):
    if case in sys.argv[3:]:
        continue
    write(event="begin", case=case, time=time.monotonic())
    if case == "faulty":
        print("before the fault", flush=True)
        exec(sys.argv[2])
    write(event="figure", name=case, measured=3.0, unit="us", predicted=[1, 2], note="",
          passed=None)
    write(event="end", case=case)
"""


@pytest.fixture
def small(device, tmp_path):
    """Return a `Session` with small sizes."""
    return Session(tmp_path / "figures.jsonl", small=True)


def figures(session):
    """Return the figures of a session by name."""
    lines = read_lines(session._out)
    return {line["name"]: line for line in lines if line["event"] == "figure"}


# Processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("os.abort()", "exit status -6"),
        ("time.sleep(600)", "the case timed out after 2 s"),
        (f"sys.exit({session_module.DEVICE_LOST_STATUS})", "exit status 75"),
    ],
)
def test_gpu_first_runs_remaining_cases_after_a_fault(tmp_path, fault, why):
    path = tmp_path / "section.jsonl"
    command = [sys.executable, "-c", SECTION_PROGRAM, str(path), fault]
    result = run_section(lambda skip: [*command, *skip], path, 30.0, 2.0)
    assert result["status"] == "ok"
    assert result["processes"] == 2
    names = [figure["name"] for figure in result["figures"]]
    assert names == ["first", "faulty", "last"]
    assert result["figures"][1] == failure("faulty", why)
    assert path.with_suffix(".log").read_text() == "before the fault\n"
    rows = gpu_first.figure_rows(result["figures"])
    assert rows[0] == ("first", "1 to 2", "3 us", "2.00", "")
    assert rows[1][3] == "FAILED"


def test_gpu_first_keeps_figures_of_a_section_that_exceeds_its_limit(tmp_path):
    path = tmp_path / "section.jsonl"
    command = [sys.executable, "-c", SECTION_PROGRAM, str(path), "time.sleep(600)"]
    result = run_section(lambda skip: [*command, *skip], path, 3.0, 600.0)
    assert result["status"] == "timed out after 3 s"
    assert [figure["name"] for figure in result["figures"]] == ["first", "faulty"]
    assert result["output"] == "before the fault"


def test_gpu_first_does_not_restart_a_section_that_starts_no_case(tmp_path):
    path = tmp_path / "section.jsonl"
    command = [sys.executable, "-c", "import sys; sys.exit('no device')"]
    result = run_section(lambda skip: command, path, 30.0, 30.0)
    assert (result["status"], result["processes"]) == ("exit status 1", 1)
    assert result["output"] == "no device"


def test_gpu_first_ends_the_process_if_the_device_is_lost(small, monkeypatch):
    def crash():
        raise RuntimeError("a broken kernel")

    small.case("a", crash)
    small.case("b", small.check, "b", 0)
    assert figures(small)["a"]["note"] == "failed: RuntimeError: a broken kernel"
    assert figures(small)["b"]["passed"]
    monkeypatch.setattr(small, "_device_works", lambda: False)
    with pytest.raises(SystemExit) as exit_info:
        small.case("a", crash)
    assert exit_info.value.code == session_module.DEVICE_LOST_STATUS


# Runs ---------------------------------------------------------------------------------------------


def run_section_in_this_process(command, path, *limits_s):
    """Replacement of `run_section` without child processes, which take a second each to start."""
    path.touch()
    assert gpu_first.main(command([])[3:]) == 0
    figures = [line for line in read_lines(path) if line["event"] == "figure"]
    return {"status": "ok", "figures": figures, "output": ""}


#: Sections that take more than a second.
SLOW_SECTIONS = {"compile", "truth_linears", "truth_model", "rounds"}


@pytest.mark.parametrize(
    ("sections", "checks"),
    [
        ([name for name in gpu_first.DEFAULT_SECTIONS if name not in SLOW_SECTIONS], 53),
        pytest.param(gpu_first.DEFAULT_SECTIONS, 155, marks=pytest.mark.full),
    ],
    ids=["quick", "all"],
)
def test_gpu_first_runs_sections(device, tmp_path, capfd, monkeypatch, sections, checks):
    """All checks pass, all values are measured, and the output folder contains all of them.

    All sections run in this process. Other tests run sections in child processes.
    """
    monkeypatch.setattr(gpu_first, "run_section", run_section_in_this_process)
    options = ["--small", "--minutes", "30", "--out", str(tmp_path), "--sections", *sections]
    assert gpu_first.main(options) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["sections"]) == sections
    missing = []
    for name, section in report["sections"].items():
        assert section["status"] == "ok", section
        stored = read_lines(tmp_path / f"{name}.jsonl")
        assert section["figures"] == [line for line in stored if line["event"] == "figure"]
        for figure in section["figures"]:
            assert figure["passed"] is not False, figure
            if figure["measured"] is None:
                missing.append(name)
    # The first section prints a description of the device. The others need an NVIDIA tool.
    assert set(missing) <= {"compile", "sanitizer", "cublas", "ncu"}
    printed = capfd.readouterr().out
    assert f"{checks} of {checks} checks passed; 0 failures" in printed
    assert "device         ok" in (tmp_path / "doctor.txt").read_text()
    if "compile" in sections:
        assert device.describe() in (tmp_path / "report.txt").read_text()


#: Module that Python imports at startup. It hides packages and refuses network connections.
MINIMAL_ENVIRONMENT = """
import socket, sys

class Socket(socket.socket):
    def connect(self, address):
        raise OSError(f"no network: {address}")

socket.socket = Socket
for name in ("llguidance", "xgrammar", "pytest"):
    sys.modules[name] = None
"""


def test_gpu_first_runs_without_optional_packages_and_network(device, tmp_path, monkeypatch):
    """Without a grammar library, rounds are measured without a grammar."""
    (tmp_path / "sitecustomize.py").write_text(MINIMAL_ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    options = ["--small", "--minutes", "30", "--out", str(tmp_path / "out")]
    assert gpu_first.main([*options, "--sections", "rounds", "suite"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    notes = {}
    for section in report["sections"].values():
        assert section["status"] == "ok", section
        notes.update((figure["name"], figure["note"]) for figure in section["figures"])
    assert notes["batch 8, 3 drafts, programmatic: round"] == ""
    assert notes["batch 8, 3 drafts, grammar"] == "no grammar backend is installed"
    assert notes["suite"] == "pytest is not installed"


def test_gpu_first_writes_the_doctor_report_before_it_opens_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(session_module, "open_device", None)
    options = ["--minutes", "0.01", "--out", str(tmp_path), "--sections", "gaps"]
    assert gpu_first.main(options) == 0
    assert (tmp_path / "doctor.txt").read_text().startswith("python ")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["sections"]["gaps"]["status"] == "no time left"


def test_gpu_first_sections_fit_in_one_call():
    limits_s = [SECTIONS[name].limit_s for name in gpu_first.DEFAULT_SECTIONS]
    assert sum(limits_s) <= 60 * gpu_first.parse_options([]).minutes
    assert SECTIONS["suite"].limit_s < 600


def test_gpu_first_exit_status_is_1_if_a_check_fails(tmp_path, monkeypatch, capsys):
    result = {"status": "ok", "figures": [make_figure("x", 2, "wrong", passed=False)], "output": ""}
    monkeypatch.setattr(gpu_first, "run_section", lambda *_: result)
    monkeypatch.setattr(gpu_first, "write_doctor_report", lambda report: None)
    assert gpu_first.main(["--out", str(tmp_path), "--sections", "truth_hops"]) == 1
    assert "0 of 1 checks passed; 1 failures\n  truth_hops: x" in capsys.readouterr().out


@pytest.mark.full
def test_gpu_first_runs_the_suite(device, tmp_path):
    options = ["--small", "--minutes", "30", "--out", str(tmp_path), "--sections", "suite"]
    assert gpu_first.main(options) == 0
    section = json.loads((tmp_path / "report.json").read_text())["sections"]["suite"]
    assert [figure["passed"] for figure in section["figures"]] == [True]


# Checks -------------------------------------------------------------------------------------------


def linear_without_residual(kernels, lane, x, weight, out, **options):
    original_linear(kernels, lane, x, weight, out)


def linear_beyond_the_output(kernels, lane, x, weight, out, **options):
    original_linear(kernels, lane, x, weight, out, **options)
    row = out.shape[0]
    whole = out._view((row + 1, out.shape[1]), 0)
    lane.fill(whole[row:], 0)


def linear_that_depends_on_rows(kernels, lane, x, weight, out, **options):
    original_linear(kernels, lane, x, weight, out, **options)
    if out.shape[0] == 8:
        lane.fill(out[:1], 0)


original_linear = Products.linear


@pytest.mark.parametrize(
    ("broken", "case", "check"),
    [
        (linear_without_residual, "values", "qkv of bfloat16, 1 rows"),
        (linear_beyond_the_output, "values", "qkv of bfloat16, 8 rows, writes"),
        (linear_that_depends_on_rows, "bits by number of rows", "qkv of bfloat16, bits of rows"),
        (linear_that_depends_on_rows, "bits by column", "qkv of bfloat16, bits of columns"),
    ],
)
def test_gpu_first_finds_wrong_products(small, monkeypatch, broken, case, check):
    monkeypatch.setattr(Products, "linear", broken)
    only_case(monkeypatch, f"qkv of bfloat16: {case}")
    checks.check_linears(small)
    assert figures(small)[check]["passed"] is False


def only_case(monkeypatch, prefix):
    """Skip all cases of a section except those whose names begin with a text."""
    run_case = Session.case

    def case(self, name, *arguments):
        if name.startswith(prefix):
            run_case(self, name, *arguments)

    monkeypatch.setattr(Session, "case", case)


def test_gpu_first_finds_wrong_probabilities(small, monkeypatch):
    """In the second run, the reference has the probabilities of other tokens."""
    only_case(monkeypatch, "temperature 1")
    expected_probabilities = checks.expected_probabilities
    checks.check_sampling(small)
    assert figures(small)["temperature 1"]["passed"] is True

    def shifted(params):
        return np.roll(expected_probabilities(params), 1)

    monkeypatch.setattr(checks, "expected_probabilities", shifted)
    checks.check_sampling(small)
    assert figures(small)["temperature 1"]["passed"] is False


def test_gpu_first_finds_wrong_answers_of_host_steps(small, monkeypatch):
    monkeypatch.setattr(checks, "PythonWork", lambda reply: int)
    checks.check_hops(small)
    assert [figure["passed"] for figure in figures(small).values()] == [False] * 3


@pytest.mark.parametrize("errors", [0, 3])
def test_gpu_first_reports_errors_of_the_sanitizer(small, tmp_path, monkeypatch, errors):
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho ERROR SUMMARY: {errors} errors\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    programs.check_memory(small)
    assert figures(small)["memcheck"]["passed"] == (errors == 0)
    assert (tmp_path / "memcheck.txt").exists()


# Models -------------------------------------------------------------------------------------------


def test_gpu_first_tokenizer_has_the_vocabulary_of_the_model():
    demo = json.loads((demo_model()[0] / "tokenizer.json").read_text())
    tokenizer = model.make_tokenizer(demo, 5000)
    assert sorted(tokenizer["model"]["vocab"].values()) == list(range(5000))


def test_gpu_first_placeholder_backend_implements_the_protocol():
    """From Python 3.12 on, isinstance checks the members of a protocol with getattr_static."""
    backend = model.UnusedBackend(None)
    for name in ("name", "vocabulary", "compile", "matcher"):
        inspect.getattr_static(backend, name)
    with pytest.raises(GrammarError, match="no grammar backend is installed"):
        backend.compile(None)
