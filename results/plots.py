"""Draw the charts of the recorded results, in colors for light and for dark pages.

    python results/plots.py

Each SVG file ends with a comment that contains a hash of the data in the chart. A test compares it
with the hash of the recorded results.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from packaging.version import Version

from graft.tools.bench.harness import Chart, draw

#: Folder of the newest version with recorded results.
FOLDER = max(
    (path.parent for path in Path(__file__).resolve().parent.glob("*/acceptance.json")),
    key=lambda folder: Version(folder.name),
)
#: Style sheets of matplotlib, by the name of the color scheme.
STYLES = {"light": "default", "dark": "dark_background"}


def read(name: str) -> dict[str, Any]:
    """Read a recorded file."""
    results: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return results


def acceptance_charts() -> list[Chart]:
    """Return the chart of acceptance lengths by drafter and draft length."""
    series: dict[str, list[tuple[float, float]]] = {}
    for one in read("acceptance")["configurations"]:
        mean = one["acceptance_length"]["mean"]
        if mean is not None and one["drafter"] != "none":
            series.setdefault(one["drafter"], []).append((one["length"], mean))
    title = "Acceptance length of the demo model, greedy, 40 held-out tasks"
    return [Chart(title, "drafts per round", "tokens per round with drafts", series)]


def memory_charts() -> list[Chart]:
    """Return the charts of anonymous memory and of live device objects."""
    memory = []
    objects = []
    for one in read("memory")["series"]:
        memory.append((one["requests"], round(one["anonymous_bytes"] / 2**20, 1)))
        objects.append((one["requests"], sum(one["live"].values())))
    return [
        Chart("Anonymous memory of the engine's process", "requests", "MiB", {"memory": memory}),
        Chart("Live objects of the soft device", "requests", "objects", {"objects": objects}),
    ]


CHARTS = {"acceptance": acceptance_charts, "memory": memory_charts}


def make_note(name: str) -> str:
    """Return the text above the charts of a recorded file."""
    record = read(name)
    return f"commit {record['commit']}, {record['date']}; soft device, no GPU"


def data_hash(name: str) -> str:
    """Return a hash of the note and of all data and texts in the charts of a recorded file."""
    data = [make_note(name), *map(dataclasses.asdict, CHARTS[name]())]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def main() -> None:
    """Draw all charts."""
    import matplotlib.style

    os.environ["SOURCE_DATE_EPOCH"] = "0"  # matplotlib writes a date; it must not change the file
    for name, charts in CHARTS.items():
        for scheme, style in STYLES.items():
            matplotlib.style.use(["default", style])
            matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name})
            matplotlib.rcParams.update({"font.size": 12, "savefig.transparent": True})
            path = FOLDER / f"{name}_{scheme}.svg"
            draw(charts(), make_note(name), path)
            text = path.read_text(encoding="utf-8").rstrip()
            lines = [line.rstrip() for line in text.splitlines()]
            lines.append(f"<!-- data: {data_hash(name)} -->")
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
