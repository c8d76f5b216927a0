"""Runs scripts that launch kernels, and counts what the kernels execute as PTX for sm_90."""

import json
import os
import subprocess
import sys
from pathlib import Path


def run(script, path, arguments):
    """Run a script of this folder. Return the counts of its launches in order, stored in `path`."""
    variables = {
        **os.environ,
        "GRAFT_DEVICE": "soft",
        "GRAFT_CODE": "ptx",
        "GRAFT_PTX_ARCH": "90",
        "SOFTCUDA_COUNT": str(path),
    }
    for name in ("SOFTCUDA_PTX_SEED", "SOFTCUDA_RACECHECK"):
        variables.pop(name, None)
    command = [sys.executable, str(Path(__file__).with_name(script)), json.dumps(arguments)]
    subprocess.run(command, env=variables, check=True)
    return [json.loads(line) for line in path.read_text().splitlines()]
