"""graft doctor: what is there, what is missing, and that asking changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from graft.cudagraph import chooser
from graft.tools import cli, doctor


def test_a_complete_environment_is_healthy(capsys):
    """Where graft's tests can run, the doctor finds nothing missing and says so in JSON."""
    assert cli.main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in said["findings"]}
    assert said["healthy"] is True
    for name in ("python", "packages", "native part", "compiler", "xgrammar", "llguidance",
                 "tvm-ffi", "device"):
        assert found[name]["status"] == "ok", found[name]
    assert "llguidance@1.9" in found["llguidance"]["detail"]


@pytest.mark.parametrize(("package", "name", "status"), [
    ("xgrammar", "xgrammar", "absent"), ("llguidance", "llguidance", "missing"),
    ("apache-tvm-ffi", "tvm-ffi", "missing"), ("tokenizers", "packages", "missing")])
def test_a_missing_package_is_told_with_advice(package, name, status, monkeypatch, capsys):
    """A package that is not installed is reported with the command that installs it; graft does
    without XGrammar."""
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda p: None if p == package else real(p))
    assert cli.main(["doctor"]) == (status == "missing")
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(name))
    assert status in lines[at]
    assert "pip install" in lines[at + 1] and package in lines[at + 1]


@pytest.mark.parametrize(("variable", "value", "name"), [
    ("CXX", "no-such-compiler", "compiler"), ("GRAFT_DEVICE", "abacus", "device")])
def test_what_the_environment_names_wrongly_is_missing(variable, value, name):
    """A compiler that is none, or a device: a finding and not a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "graft.tools.cli", "doctor", "--json"], text=True,
        capture_output=True, env={**os.environ, "GRAFT_DEVICE": "soft", variable: value})
    assert done.returncode == 1 and done.stderr == ""
    found = {f["name"]: f for f in json.loads(done.stdout)["findings"]}
    assert found[name]["status"] == "missing" and value in found[name]["detail"]


def test_asking_the_driver_leaves_the_process_alone():
    """The real driver is asked in a child, so the soft device still answers here afterwards."""
    script = ("from graft.tools import doctor\n"
              "doctor.check_driver()\n"
              "assert 'libcuda' not in open('/proc/self/maps').read()\n"
              "print(doctor.check_device().detail)\n")
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True,
                          env={**os.environ, "GRAFT_DEVICE": "soft"})
    assert done.returncode == 0 and "soft" in done.stdout, done.stderr


def test_a_driver_that_hangs_is_reported(monkeypatch):
    """A driver that does not answer in time is a finding, not a hang."""
    monkeypatch.setattr(chooser, "PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "DRIVER_DEADLINE_S", 0.5)
    finding = doctor.check_driver()
    assert finding.status == "absent" and "no answer" in finding.detail


def test_a_gpu_without_cupy_is_not_healthy(monkeypatch):
    """Where NVIDIA's driver shows a device, CuPy is needed and its absence is missing."""
    gpu = doctor.Finding("nvidia driver", "ok", "CUDA 13.0, a device")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: gpu, doctor.check_cupy))
    monkeypatch.setattr(doctor, "version_of", lambda package: None)
    monkeypatch.delenv("GRAFT_DEVICE", raising=False)
    assert [finding.status for finding in doctor.examine()] == ["ok", "missing"]
