"""An engine gives everything back, holds no GIL in the driver, and needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from engine_util import demo_engine, mixed_requests
from graft.cudagraph.device import open_device
engine = demo_engine(max_batch_size=4)
outputs = engine.generate(mixed_requests(6))
for request in mixed_requests(6):
    engine.submit(request)
while not engine.counters()["held"]["unread_replays"]:
    engine.step()
engine.close()
device = open_device()
live, leaked = device.stats()["live"], device.stats()["leaked"]
held = {}
if device.kind == "soft":
    from graft.cudagraph import softstats
    held = softstats.gil_held_by_name()
with demo_engine(max_batch_size=4) as engine:
    again = [o.tokens for o in engine.generate(mixed_requests(6))] == [o.tokens for o in outputs]
print(json.dumps({
    "kind": device.kind, "live": live, "leaked": leaked, "again": again, "gil_held": held,
    "finished": sum(o.finished for o in outputs), "torch": "torch" in sys.modules,
}))
"""


def test_everything_is_given_back() -> None:
    """close() with rounds in flight leaves nothing on the device, and no call held the GIL."""
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["finished"] == 6
    assert report["again"]
    assert not report["torch"]
    if report["kind"] == "soft":
        assert not any(report["live"].values()), report["live"]
        assert not any(report["leaked"].values()), report["leaked"]
        # cuda.bindings looks entry points up with the GIL; that is no call into the driver's work.
        report["gil_held"].pop("cuGetProcAddress", None)
        assert not report["gil_held"]
