"""Tables and charts of the speculation benchmark."""

from __future__ import annotations

from typing import Any

from graft.tools.bench.harness import Chart
from graft.tools.bench.speculation_metrics import CONFIGURATION_KEYS
from graft.tools.console import table
from graft.tools.demo.command import SOFT_NOTE

LEGEND = """\
acceptance: acceptance length, the mean number of tokens of rounds that verified drafts, including
the bonus token, ± 95 %; speedup: throughput relative to decoding without speculation. The first row
compares decoding without speculation with itself and shows the noise of the measurement; same:
outputs that equal the outputs without speculation"""


def format_number(value: float | None, spec: str = ".2f") -> str:
    """Format a number with the format `spec`. None becomes a dash."""
    return "-" if value is None else format(value, spec)


def format_interval(estimate: dict[str, Any], spec: str = ".2f") -> str:
    """Format an estimate as mean ± half the width of its interval."""
    if estimate["high"] is None:
        return format_number(estimate["mean"], spec)
    half = estimate["high"] - estimate["mean"]
    return f"{estimate['mean']:{spec}} ± {half:.{spec[-2:]}}"


def label(configuration: dict[str, Any], *, length: bool = True) -> str:
    """Return a one-line label of a configuration: drafter, masking, draft length and tree.

    Without `length`, the label omits the draft length.
    """
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
    """Return the table of results, one line per configuration."""
    heading = "acceptance|by depth|tokens/round|tokens/s|speedup|tokens/s per request|same"
    rows = [["", "verify", "T", "batch", *heading.split("|")]]
    for one in configurations:
        rates = " ".join(f"{rate:.0%}" for rate in acceptance_rates(one))
        rows.append(
            [
                label(one),
                one["verify"] or "-",
                one["temperature"],
                one["batch"],
                format_interval(one["acceptance_length"]),
                rates or "-",
                format_interval(one["tokens_per_round"]),
                format_number(one["tokens_per_second"], ".0f"),
                format_number(one["speedup"]),
                format_number(one["request_tokens_per_second"], ".0f"),
                f"{one['same_outputs']}/{one['outputs']}",
            ]
        )
    return table(rows)


def _kind_table(results: dict[str, Any]) -> str:
    """Return a table of acceptance lengths by kind of prompt.

    The table shows only configurations with the longest drafts or automatic draft length, at the
    first temperature and the first batch size of the command line.
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
    rows = [["", *map(label, shown)]]
    for kind in results["prompts"]:
        means = [one["kinds"][kind]["acceptance_length"]["mean"] for one in shown]
        rows.append([kind, *map(format_number, means)])
    return table(rows)


def _difference_table(differences: list[dict[str, Any]]) -> str:
    """Return the paired comparisons, one per line."""
    rows = [["", "comparison", "verify", "T", "batch", "difference", "prompts"]]
    for one in differences:
        keys = [one[name] for name in ("comparison", "verify", "temperature", "batch")]
        rows.append([label(one), *keys, format_interval(one, "+.3f"), one["n"]])
    return table(rows, left=2)


def _length_table(groups: list[dict[str, Any]]) -> str:
    """Return predicted and measured throughput, one line per chain length."""
    heading = "drafts|rows|round us|predicted tokens/s|measured tokens/s|"
    rows = [["", "verify", "T", "batch", *heading.split("|")]]
    for group in groups:
        keys = [group[name] for name in ("verify", "temperature", "batch")]
        for one in group["lengths"]:
            times = [
                format_number(one[name], ".0f")
                for name in (
                    "round_us",
                    "predicted_tokens_per_second",
                    "measured_tokens_per_second",
                )
            ]
            best = "best" if one["length"] == group["best"] else ""
            name = label(group | {"length": None})
            rows.append([name, *keys, one["length"], one["rows"], *times, best])
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


# Charts -------------------------------------------------------------------------------------------


def charts(results: dict[str, Any]) -> list[Chart]:
    """Return the charts, which show the first temperature and the first verification mode."""
    configurations = results["configurations"]
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
            interactivity.setdefault(label(one), []).append((request_rate, tokens_per_second))
    return [
        Chart(
            "Acceptance rate by draft depth",
            "depth",
            "accepted share of verified drafts",
            acceptance,
        ),
        Chart(f"Throughput at batch size {max_batch}", "drafts per round", "tokens/s", throughput),
        Chart(
            "Throughput and interactivity, one point per batch size",
            "tokens/s per request",
            "tokens/s",
            interactivity,
        ),
    ]
