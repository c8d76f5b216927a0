"""The table of conformance: every function of the soft device, called rightly and wrongly.

It is the test of the soft device's refusals: each function with right arguments, with one wrong
argument at a time, before cuInit, without a context, inside a host function, while a stream
captures and after a fault, each state in a process of its own. What must be answered is written
down in ``conformance_table.py`` from the driver's documentation; the exceptions from it stand
there, behind ``->``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import softcuda_util as util
from conformance_child import STATES, TEXT


@pytest.mark.parametrize("state", STATES)
def test_every_answer_is_the_documented_one(state, tmp_path):
    """No function is answered with another code than the table's; what is not in it is absent."""
    image = tmp_path / "image"
    image.write_bytes(util.compile_kernel(TEXT))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SOFTCUDA_")}
    command = [sys.executable, str(util.HERE / "conformance_child.py"), state, str(image)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)  # function, what was done, the code wanted, the code that came
    assert [row for row in rows if row[2] != row[3]] == []
    assert len({row[0] for row in rows}) >= {"no-context": 28, "capture": 22}.get(state, 128)
