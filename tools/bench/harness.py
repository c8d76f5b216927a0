"""Command line, output files and charts that all benchmarks share.

A benchmark is a module with a function ``main``. It parses the command line with a parser of
`make_parser`, measures, and passes the results to `finish`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.cudagraph.errors import OptionError


def make_parser(module: str, docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have; a benchmark adds its own options.

    `module` and `docstring` are the benchmark's name and docstring, which the help text shows.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=(docstring or "").split("\n\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    return parser


def add_chart_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--chart`` of benchmarks that draw charts."""
    parser.add_argument(
        "--chart",
        type=_chart_path,
        metavar="FILE",
        help="draw the results as .svg, .png or .pdf (needs the extra charts)",
    )


def _chart_path(text: str) -> Path:
    """Parse the value of ``--chart``. An invalid value is refused before the measurement."""
    path = Path(text)
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text}: the name must end in .svg, .png or .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError("--chart needs matplotlib: pip install matplotlib")
    return path


def number_from(minimum: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers that are at least `minimum`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {minimum}, not {text}"
            )
        return int(text)

    return parse


def add_counts(parser: argparse.ArgumentParser, *counts: tuple[str, int, str]) -> None:
    """Add options for positive whole numbers, given their names, defaults and help texts."""
    for name, default, text in counts:
        text = f"{text} (default {default})"
        parser.add_argument(f"--{name}", type=number_from(1), default=default, help=text)


@dataclass(frozen=True)
class Chart:
    """A line chart. `series` maps the name of each line to its points (x, y)."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]


def finish(
    options: argparse.Namespace,
    results: Any,
    report: str,
    charts: Sequence[Chart] = (),
    note: str = "",
) -> None:
    """Print the report, and write results and charts to the files that the command line names.

    `note` is a line of text above the charts.
    """
    print(report)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if charts and options.chart is not None:
        options.chart.parent.mkdir(parents=True, exist_ok=True)
        draw(charts, note, options.chart)


def draw(charts: Sequence[Chart], note: str, path: Path) -> None:
    """Draw charts below each other with matplotlib, with the text `note` above them.

    Both axes of a chart begin at 0.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4 * len(charts)), layout="constrained")
    figure.suptitle(note, fontsize="medium")
    panels = figure.subplots(len(charts), squeeze=False).flat
    for panel, chart in zip(panels, charts, strict=True):
        for name, points in chart.series.items():
            x = [point[0] for point in points]
            y = [point[1] for point in points]
            panel.plot(x, y, marker="o", label=name)
        panel.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
        panel.set_xlim(left=0)
        panel.set_ylim(0, 1.05 * panel.get_ylim()[1])
        panel.grid(axis="y", alpha=0.4)
        if chart.series:
            panel.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path)
