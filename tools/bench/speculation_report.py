"""Write the results of the speculation benchmark as tables, a CSV file and charts."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from graft.tools.bench.chart import chart
from graft.tools.bench.speculation_metrics import CONFIGURATION_KEYS
from graft.tools.console import table
from graft.tools.demo.command import SOFT_NOTE

#: Values of a configuration that are reported only for all prompts together, not by kind.
WHOLE_RUN_FIGURES = (
    "acceptance_rate",
    "predicted_length",
    "round_us",
    "tokens_per_second",
    "request_tokens_per_second",
    "speedup",
)
LEGEND = """\
acceptance: acceptance length, the mean number of tokens of rounds that verified drafts, including
the bonus token, ± 95 %; uniform: acceptance length predicted by (1 - a^(K+1)) / (1 - a) for the
mean acceptance rate a and K drafts; speedup: throughput relative to decoding without speculation.
The first row compares decoding without speculation with itself and shows the noise of the
measurement; same: outputs that equal the outputs without speculation"""


def format_number(value: float | None, spec: str = ".2f") -> str:
    """Format a number. None becomes a dash."""
    return "-" if value is None else format(value, spec)


def format_interval(estimate: dict[str, Any], spec: str = ".2f") -> str:
    """Format an estimate as mean ± half the width of its interval; see `estimate`."""
    if estimate["high"] is None:
        return format_number(estimate["mean"], spec)
    half = estimate["high"] - estimate["mean"]
    return f"{estimate['mean']:{spec}} ± {half:.{spec[-2:]}}"


def label(configuration: dict[str, Any], *, length: bool = True) -> str:
    """Return a one-line label of a configuration: drafter, masking, draft length and tree."""
    parts = [configuration["drafter"], configuration["masking"]]
    if length and configuration["length"]:
        parts.append(f"{configuration['length']} drafts")
    parts.append(configuration.get("tree"))
    return " ".join(filter(None, parts))


def acceptance_rates(configuration: dict[str, Any]) -> list[float]:
    """Return the acceptance rate at each depth."""
    counts = zip(configuration["accepted"], configuration["tested"], strict=True)
    return [accepted / tested for accepted, tested in counts if tested]


# Tables -------------------------------------------------------------------------------------------


def _configuration_table(configurations: list[dict[str, Any]]) -> str:
    """Return the main table, one line per configuration."""
    rows: list[tuple[object, ...]] = [
        (
            "",
            "verify",
            "T",
            "batch",
            "acceptance",
            "variance",
            "uniform",
            "by depth",
            "tokens/round",
            "tokens/s",
            "speedup",
            "tokens/s per request",
            "same",
        )
    ]
    for one in configurations:
        rates = " ".join(f"{rate:.0%}" for rate in acceptance_rates(one))
        rows.append(
            (
                label(one),
                one["verify"] or "-",
                one["temperature"],
                one["batch"],
                format_interval(one["acceptance_length"]),
                format_number(one["acceptance_length"]["variance"]),
                format_number(one["predicted_length"]),
                rates or "-",
                format_interval(one["tokens_per_round"]),
                format_number(one["tokens_per_second"], ".0f"),
                format_number(one["speedup"]),
                format_number(one["request_tokens_per_second"], ".0f"),
                f"{one['same_outputs']}/{one['outputs']}",
            )
        )
    return table(rows)


def _kind_table(results: dict[str, Any]) -> str:
    """Return a table of acceptance lengths by kind of prompt.

    Only configurations with the longest drafts or automatic draft length are shown, and of these
    only the ones with the first temperature and the first batch size.
    """
    configurations = results["configurations"]
    first = configurations[0]
    longest = max(one["length"] for one in configurations if one["length"] != "auto")
    shown = [
        one
        for one in configurations
        if one["length"] in (longest, "auto")
        and one["temperature"] == first["temperature"]
        and one["batch"] == first["batch"]
    ]
    rows: list[tuple[object, ...]] = [("", *map(label, shown))]
    for kind in results["prompts"]:
        means = [one["kinds"][kind]["acceptance_length"]["mean"] for one in shown]
        rows.append((kind, *map(format_number, means)))
    return table(rows)


def _difference_table(differences: list[dict[str, Any]]) -> str:
    """Return the paired comparisons, one per line."""
    rows: list[tuple[object, ...]] = [
        ("", "comparison", "verify", "T", "batch", "difference", "prompts")
    ]
    for one in differences:
        rows.append(
            (
                label(one),
                one["comparison"],
                one["verify"],
                one["temperature"],
                one["batch"],
                format_interval(one, "+.3f"),
                one["n"],
            )
        )
    return table(rows, left=2)


def _length_table(groups: list[dict[str, Any]]) -> str:
    """Return predicted and measured throughput, one line per chain length."""
    rows: list[tuple[object, ...]] = [
        (
            "",
            "verify",
            "T",
            "batch",
            "drafts",
            "rows",
            "round us",
            "predicted tokens/s",
            "measured tokens/s",
            "",
        )
    ]
    for group in groups:
        for one in group["lengths"]:
            rows.append(
                (
                    label(group | {"length": None}),
                    group["verify"],
                    group["temperature"],
                    group["batch"],
                    one["length"],
                    one["rows"],
                    format_number(one["round_us"], ".0f"),
                    format_number(one["predicted_tokens_per_second"], ".0f"),
                    format_number(one["measured_tokens_per_second"], ".0f"),
                    "best" if one["length"] == group["best"] else "",
                )
            )
    return table(rows)


def tables(results: dict[str, Any]) -> str:
    """Return all tables with their headings, as the benchmark prints them."""
    sections = [
        f"device: {results['device']}",
        _configuration_table(results["configurations"]),
        LEGEND,
        f"acceptance length by kind of prompt\n{_kind_table(results)}",
    ]
    if results["differences"]:
        comparisons = _difference_table(results["differences"])
        sections.append(f"differences of tokens per round, paired by prompt\n{comparisons}")
    sections.append(
        "throughput of chains by draft length: predicted from the share of accepted drafts and the "
        "device time\nof a round with a full batch, and measured including prefill and host time\n"
        f"{_length_table(results['throughput_by_length'])}"
    )
    for reason in dict.fromkeys(results["refused"].values()):
        sections.append(f"refused: {reason}")
    if not results["gpu_times"]:
        sections.append(SOFT_NOTE)
    return "\n\n".join(sections)


# Files --------------------------------------------------------------------------------------------


def charts(results: dict[str, Any]) -> dict[str, str]:
    """Return the charts as SVG by file name.

    The charts show only configurations with the first temperature and the first verification mode.
    """
    configurations = results["configurations"]
    note = results["device"]
    if not results["gpu_times"]:
        note += "; none of these times is a GPU's"
    max_batch = max(one["batch"] for one in configurations)
    shown: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in configurations:
        if one["temperature"] == configurations[0]["temperature"]:
            key = tuple(one[name] for name in CONFIGURATION_KEYS if name != "verify")
            shown.setdefault(key, one)
    acceptance: dict[str, list[tuple[float, float]]] = {}
    throughput: dict[str, list[tuple[float, float]]] = {}
    interactivity: dict[str, list[tuple[float, float]]] = {}
    for one in shown.values():
        tokens_per_second = one["tokens_per_second"]
        if one["batch"] == max_batch:
            rates = acceptance_rates(one)
            if rates:
                acceptance[label(one)] = list(enumerate(rates, 1))
            auto = one["length"] == "auto"
            drafts = one["drafts_per_round"] if auto else one["length"]
            series = throughput.setdefault(label(one, length=auto), [])
            series.append((drafts, tokens_per_second))
        request_rate = one["request_tokens_per_second"]
        if request_rate:
            series = interactivity.setdefault(label(one), [])
            series.append((request_rate, tokens_per_second))
    return {
        "acceptance.svg": chart(
            "Acceptance rate by draft depth",
            note,
            "depth",
            "accepted share of verified drafts",
            acceptance,
        ),
        "throughput.svg": chart(
            f"Throughput at batch size {max_batch}",
            note,
            "drafts per round",
            "tokens/s",
            throughput,
        ),
        "interactivity.svg": chart(
            "Throughput and interactivity, one point per batch size",
            note,
            "tokens/s per request",
            "tokens/s",
            interactivity,
        ),
    }


def _csv_rows(configurations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the CSV file.

    Each configuration has one row for all prompts and one row for each kind of prompt.
    """
    rows = []
    for one in configurations:
        for kind, figures in {"all": one, **one["kinds"]}.items():
            row = {key: one[key] for key in CONFIGURATION_KEYS} | {"kind": kind}
            for name in ("acceptance_length", "tokens_per_round"):
                for statistic, value in figures[name].items():
                    row[f"{name}_{statistic}"] = value
            for name in WHOLE_RUN_FIGURES:
                row[name] = figures.get(name)
            rows.append(row)
    return rows


def write(results: dict[str, Any], folder: Path) -> None:
    """Write ``speculation.json``, ``speculation.csv`` and the charts to a folder."""
    (folder / "speculation.json").write_text(json.dumps(results, indent=1) + "\n")
    rows = _csv_rows(results["configurations"])
    with (folder / "speculation.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    for name, svg in charts(results).items():
        (folder / name).write_text(svg, encoding="utf-8")
