"""Conformance of the soft device: error codes of every function in valid and invalid calls.

Every function is called in several states of the driver: with valid arguments and with each invalid
argument in turn, before cuInit, without a context, inside a host function, during a stream capture,
and after a fault. A separate process is used for each state. ``conformance_table.py`` lists the
expected error codes, which come from the driver's documentation.
"""

from __future__ import annotations

import json
import os

import pytest
import softcuda_util as util
from conformance_child import STATES, TEXT
from fork_server import run_forked

#: Program that writes the error codes in the state that its first argument names.
PROGRAM = """
import pathlib, sys
import conformance_child
conformance_child.main(sys.argv[1], pathlib.Path(sys.argv[2]))
"""


@pytest.mark.parametrize("state", STATES)
def test_conformance_error_codes_match_documentation(state, tmp_path, ptx_stub):
    """Check the error code of each call, and that functions outside of the table are not found.

    The script must also call a minimum number of functions. Otherwise the test would pass in a
    state in which the script calls nothing.
    """
    image = tmp_path / "image"
    image.write_bytes(util.compile_kernel(TEXT))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SOFTCUDA_")}
    environment["SOFTCUDA_PTX_LIBRARY"] = str(ptx_stub)  # for the functions that link PTX
    done = run_forked(PROGRAM, state, str(image), env=environment)
    assert done.returncode == 0, done.stderr
    calls = json.loads(done.stdout)
    mismatches = []
    for function, case, expected, code in calls:
        if code != expected:
            mismatches.append((function, case, expected, code))
    assert mismatches == []
    minimum = {"no-context": 28, "capture": 22}.get(state, 128)
    assert len({function for function, *_ in calls}) >= minimum
