"""torch is never installed by make and never imported by graft."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
imported = []
for room in ("native", "cudagraph", "sampling", "grammar", "models", "tools"):
    package = importlib.import_module(f"graft.{room}")
    for found in pkgutil.walk_packages(package.__path__, f"graft.{room}."):
        if ".tools.train" in found.name or found.name.endswith("__main__"):
            continue
        importlib.import_module(found.name)
        imported.append(found.name)
from graft.tools import doctor
findings = [finding.name for finding in doctor.examine()]
foreign = [m for m in ("torch", "jax", "triton", "transformers", "cupy") if m in sys.modules]
print(json.dumps({"imported": imported, "findings": findings, "foreign": foreign}))
"""


def test_importing_all_of_graft_imports_no_torch():
    """Every module of graft and the doctor's checks leave torch, JAX and CuPy unimported."""
    done = subprocess.run([sys.executable, "-c", IMPORT_EVERYTHING], text=True,
                          capture_output=True, env={**os.environ, "GRAFT_DEVICE": "soft"})
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert {"graft.models.engine", "graft.cudagraph.graph", "graft.tools.cli"} <= set(
        said["imported"])
    assert "device" in said["findings"]
    assert said["foreign"] == []


def test_the_environment_that_make_builds_holds_no_torch():
    """No distribution named torch, triton, JAX or transformers is in make's environment."""
    if not (Path(sys.prefix) / ".graft-pins").exists():
        pytest.skip("this Python is not the environment that make builds")
    names = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    assert names & {"torch", "triton", "jax", "jaxlib", "transformers"} == set()
