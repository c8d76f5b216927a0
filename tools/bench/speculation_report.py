"""How the benchmark of speculation is told: tables, a file of rows, and pictures."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from graft.tools.bench.chart import chart
from graft.tools.demo import SOFT_NOTE
from graft.tools.report import table

#: What tells one cell from another.
KEYS = ("drafter", "masking", "length", "tree", "verify", "temperature", "batch")


#: Of a cell as a whole, beside what each kind of prompt has.
WHOLE = (
    "rate",
    "predicted_length",
    "round_us",
    "tokens_a_second",
    "tokens_a_second_of_one",
    "speedup",
)
LEGEND = """\
acceptance: tokens of a round that tested drafts, the bonus token too, ± 95 %; by one rate: what
(1 - a^(K+1)) / (1 - a) says for the mean acceptance a of a draft; same: outputs that are those
without speculation, with which "x none" compares, also none with itself: as good is the clock"""


def number(value: float | None, form: str = ".2f") -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def interval(of: dict[str, Any], form: str = ".2f") -> str:
    """An estimate with half of its interval."""
    if of["high"] is None:
        return number(of["mean"], form)
    return f"{of['mean']:{form}} ± {of['high'] - of['mean']:.{form[-2:]}}"


def label(one: dict[str, Any], *, drafts: bool = True) -> str:
    """Drafter, masking and shape of a cell."""
    shape = f"{one['length']} drafts" if drafts and one["length"] else None
    return " ".join(filter(None, (one["drafter"], one["masking"], shape, one.get("tree"))))


def shares(one: dict[str, Any]) -> list[float]:
    """Acceptance by depth."""
    return [a / r for a, r in zip(one["accepted"], one["reached"], strict=True) if r]


def tables(found: dict[str, Any]) -> str:
    """What the terminal shows."""
    cells = found["cells"]
    main = [
        (
            "",
            "verify",
            "T",
            "batch",
            "acceptance",
            "variance",
            "by one rate",
            "by depth",
            "tokens/round",
            "tokens/s",
            "x none",
            "tokens/s of one",
            "same",
        )
    ]
    main += [
        (
            label(one),
            one["verify"] or "-",
            one["temperature"],
            one["batch"],
            interval(one["acceptance_length"]),
            number(one["acceptance_length"]["variance"]),
            number(one["predicted_length"]),
            " ".join(f"{share:.0%}" for share in shares(one)) or "-",
            interval(one["tokens_a_round"]),
            number(one["tokens_a_second"], ".0f"),
            number(one["speedup"]),
            number(one["tokens_a_second_of_one"], ".0f"),
            f"{one['same_outputs']}/{one['outputs']}",
        )
        for one in cells
    ]
    longest = max(one["length"] for one in cells if one["length"] != "auto")
    shown = [
        one
        for one in cells
        if one["length"] in (longest, "auto")
        and all(one[key] == cells[0][key] for key in ("temperature", "batch"))
    ]
    kinds = [("", *map(label, shown))]
    kinds += [
        (kind, *(number(one["kinds"][kind]["acceptance_length"]["mean"]) for one in shown))
        for kind in found["prompts"]
    ]
    said = [
        f"device: {found['device']}",
        table(main),
        LEGEND,
        f"acceptance length by kind of prompt\n{table(kinds)}",
    ]
    if found["differences"]:
        apart = [("", "of", "verify", "T", "batch", "difference", "prompts")]
        apart += [
            (
                label(one),
                one["of"],
                one["verify"],
                one["temperature"],
                one["batch"],
                interval(one, "+.3f"),
                one["n"],
            )
            for one in found["differences"]
        ]
        said.append(f"tokens a round, differences prompt by prompt\n{table(apart, left=2)}")
    chains = [("", "verify", "T", "batch", "drafts", "rows", "us", "tokens/s", "measured", "")]
    chains += [
        (
            label(one, drafts=False),
            one["verify"],
            one["temperature"],
            one["batch"],
            at["length"],
            at["rows"],
            number(at["round_us"], ".0f"),
            number(at["tokens_a_second"], ".0f"),
            number(at["measured"], ".0f"),
            "best" if at["length"] == one["best"] else "",
        )
        for one in found["costs"]
        for at in one["lengths"]
    ]
    said.append(
        "chains: time of a full round, and tokens a second by it and by survival, without "
        f"prompts and host; as measured, with them\n{table(chains)}"
    )
    said += [f"refused: {why}" for why in dict.fromkeys(found["refused"].values())]
    return "\n\n".join(said if found["times_are_a_gpus"] else [*said, SOFT_NOTE])


def pictures(found: dict[str, Any]) -> dict[str, str]:
    """Charts as SVG by file name, of the first temperature and way to verify."""
    cells = found["cells"]
    note = found["device"]
    if not found["times_are_a_gpus"]:
        note += "; none of these times is a GPU's"
    most = max(one["batch"] for one in cells)
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in cells:
        if one["temperature"] == cells[0]["temperature"]:
            seen.setdefault(tuple(one[key] for key in KEYS if key != "verify"), one)
    depths, speeds, front = (dict[str, list[tuple[float, float]]]() for _ in range(3))
    for one in seen.values():
        if one["batch"] == most:
            depths[label(one)] = list(enumerate(shares(one), 1))
            auto = one["length"] == "auto"
            speeds.setdefault(label(one, drafts=auto), []).append(
                (one["drafts_a_round" if auto else "length"], one["tokens_a_second"])
            )
        if one["tokens_a_second_of_one"]:
            front.setdefault(label(one), []).append(
                (one["tokens_a_second_of_one"], one["tokens_a_second"])
            )
    return {
        "acceptance.svg": chart(
            "Drafts accepted, by depth",
            note,
            "depth",
            "share of those tested",
            {name: line for name, line in depths.items() if line},
        ),
        "speed.svg": chart(
            f"Tokens a second of {most} requests", note, "drafts a round", "tokens/s", speeds
        ),
        "front.svg": chart(
            "Throughput over interactivity, a point a number of requests",
            note,
            "tokens/s of one request",
            "tokens/s of all",
            front,
        ),
    }


def write(found: dict[str, Any], folder: Path) -> None:
    """Write JSON, CSV (a row a cell, and one for each kind of prompt in it) and pictures."""
    (folder / "speculation.json").write_text(json.dumps(found, indent=1) + "\n")
    rows = [
        {key: one[key] for key in KEYS}
        | {"kind": kind}
        | {
            f"{name}_{what}": value
            for name in ("acceptance_length", "tokens_a_round")
            for what, value in own[name].items()
        }
        | {name: own.get(name) for name in WHOLE}
        for one in found["cells"]
        for kind, own in {"all": one, **one["kinds"]}.items()
    ]
    with (folder / "speculation.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    for name, text in pictures(found).items():
        (folder / name).write_text(text, encoding="utf-8")
