"""Products with K splits whose blocks run at the same time and wait for each other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_PARTS = 4  # partial sums of an output


@pytest.mark.parametrize(
    ("rows", "splits"), [(64, 4), (64, 2), pytest.param(256, 4, marks=pytest.mark.full)]
)
def test_linear_stores_only_sums_of_other_shares_if_blocks_run_together(rows, splits):
    """The launch has several blocks per tile, and a worker of the soft device for each of them.

    Each block adds the sums of its share of the rows, and does not store its own sums of this
    share. The roofline model counts the sums that the other shares need.
    """
    columns = 256
    arguments = {"rows": rows, "columns": columns, "inner": 1024, "splits": splits}
    script = Path(__file__).with_name("shares_launch.py")
    variables = {**os.environ, "SOFTCUDA_WORKERS": "4"}
    variables.pop("SOFTCUDA_COUNT", None)
    output = subprocess.run(
        [sys.executable, str(script), json.dumps(arguments)],
        env=variables,
        check=True,
        capture_output=True,
        timeout=600,
    ).stdout
    stored, has_same_bits = json.loads(output)
    assert has_same_bits
    assert stored == rows * columns * (_PARTS - _PARTS // splits)
