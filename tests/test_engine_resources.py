"""An engine gives everything back, holds no GIL in the driver, and needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CHILD = """
import gc, json, sys
sys.path.insert(0, sys.argv[1])
from engine_util import demo_engine, mixed_requests
from graft.cudagraph.device import open_device
engine = demo_engine(max_batch_size=4)
outputs = engine.generate(mixed_requests(6))
engine.close()
del engine
gc.collect()
import time
device = open_device()
deadline = time.monotonic() + 5
while time.monotonic() < deadline:
    live = {k: v for k, v in device.stats()["live"].items() if k != "context"}
    if not any(live.values()):
        break
    time.sleep(0.05)
stats = device.stats()
held = {}
if device.kind == "soft":
    from graft.cudagraph import softstats
    held = softstats.gil_held_by_name()
print(json.dumps({
    "kind": device.kind, "live": live, "gil_held": held,
    "finished": sum(o.finished for o in outputs), "torch": "torch" in sys.modules,
}))
"""


def test_everything_is_given_back() -> None:
    """After close() nothing of the device is left, and no driver call was made with the GIL."""
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["finished"] == 6
    assert not report["torch"]
    if report["kind"] == "soft":
        assert not any(report["live"].values()), report["live"]
        # cuda.bindings looks entry points up with the GIL; that is no call into the driver's work.
        report["gil_held"].pop("cuGetProcAddress", None)
        assert not report["gil_held"]
