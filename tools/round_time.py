"""How long a round takes with grammar and without, and how much of the grammar's work shows.

    python -m graft.tools.round_time [--requests 48] [--batch 8] [--repeats 5] [--json FILE]

The same prompts run guided and free, on engines with two rounds in flight and with one, in turns.
Only rounds in which every row was taken are compared. Times are the device's own: the soft device's
say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from graft.cudagraph.device import open_device
from graft.cudagraph.errors import GraftError, OptionError
from graft.grammar.decoder import LEGALITIES
from graft.grammar.statement import GrammarSpec
from graft.models.engine import Engine
from graft.models.request import Request
from graft.models.timing import RoundTiming
from graft.models.tracing import RoundTimes, time_rounds
from graft.tools.demo_model import demo_model
from graft.tools.demo_tasks import held_out_tasks

MAX_TOKENS = 96
#: A round with grammar may take this much of a round without, where drafting can hide the fills.
BAR = 1.05


@dataclass
class Arm:
    """Full rounds of one way to run the prompts, in device nanoseconds."""

    overlap: bool
    guided: bool
    batch: int
    timing: RoundTiming
    rounds: list[RoundTimes] = field(default_factory=list)
    host_ns: int = 0
    fills: int = 0

    @property
    def flight(self) -> str:
        """How rounds follow each other."""
        return "two in flight" if self.overlap else "one by one"

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{'guided' if self.guided else 'free'}, {self.flight}"

    def figures(self) -> dict[str, float]:
        """Microseconds of a round: all of it, what it waited for the grammar, what hides fills.

        `step`: from a draft to the stamp before it waits for the next row. `row`: the grammar's
        host time for one row of the whole batch.
        """
        if not self.rounds:
            raise OptionError(f"no round of {self.name!r} had all its rows taken")
        spans = self.timing.spans
        waits = [sum(one.part_ns(s) for s in spans if s[0] in self.timing.waits)
                 for one in self.rounds]  # fmt: skip
        steps = [one.part_ns(s) for one in self.rounds for s in spans if s[0] == "drafting"]
        whole = [one.round_ns for one in self.rounds]
        deciles = statistics.quantiles(whole, n=10) if len(whole) > 1 else whole * 9
        return {
            "rounds": len(self.rounds),
            "round_us": statistics.median(whole) / 1e3,
            "round_p10_us": deciles[0] / 1e3,
            "round_p90_us": deciles[-1] / 1e3,
            "exposed_us": statistics.median(waits) / 1e3,
            "exposed_share": sum(waits) / sum(whole),
            "target_us": statistics.median(one.part_ns(spans[0]) for one in self.rounds) / 1e3,
            "step_us": statistics.median(steps) / 1e3,
            "row_us": self.host_ns / self.fills * self.batch / 1e3 if self.fills else 0.0,
        }


def run_arm(engine: Engine, arm: Arm, requests: Sequence[Request]) -> None:
    """Run all requests once and keep the full rounds."""
    before = engine.counters()["grammar"]
    with time_rounds(engine) as rounds:
        engine.generate(requests)
    after = engine.counters()["grammar"]
    arm.rounds += [one for one in rounds if one.requests == arm.batch]
    arm.fills += after["fills"] - before["fills"]
    arm.host_ns += sum(after[f"{s}_ns"] - before[f"{s}_ns"] for s in ("open", "commit", "draft"))


def measure(batch: int, count: int, repeats: int, legality: str) -> list[Arm]:
    """Run the four arms in turns."""
    tasks = [task for task in held_out_tasks(count, 7) if task.schema is not None]
    guided = [Request(prompt=task.text, grammar=GrammarSpec.json_schema(task.schema or {}),
                      max_tokens=MAX_TOKENS) for task in tasks]  # fmt: skip
    free = [replace(request, grammar=None, schema=task.schema)
            for request, task in zip(guided, tasks, strict=True)]  # fmt: skip
    arms: list[Arm] = []
    with ExitStack() as stack:
        engines = {}
        for overlap in (True, False):
            target, drafter = demo_model()
            engines[overlap] = stack.enter_context(
                Engine(
                    target, drafter, max_batch_size=batch, overlap=overlap, draft_legality=legality
                )
            )
            engines[overlap].generate(guided)  # compiles every grammar, warms everything
            timing = engines[overlap].rounds[batch].parts.timing
            arms += [Arm(overlap, True, batch, timing), Arm(overlap, False, batch, timing)]
        for _ in tqdm(range(repeats), unit="turn", disable=None):
            for arm in arms:
                run_arm(engines[arm.overlap], arm, guided if arm.guided else free)
    return arms


def report(arms: Sequence[Arm], device: str) -> dict[str, Any]:
    """Figures of every arm, and guided against free."""
    figures = {arm.name: arm.figures() for arm in arms}
    ratios = {}
    for guided, free in zip(arms[::2], arms[1::2], strict=True):
        own, timing = figures[guided.name], guided.timing
        room, rows = (
            (own["target_us"], timing.draft_length + 1) if timing.probed else (own["step_us"], 1)
        )
        ratios[guided.flight] = {
            "guided_to_free": own["round_us"] / figures[free.name]["round_us"],
            "p10": own["round_p10_us"] / figures[free.name]["round_p10_us"],
            "bar": BAR,
            "hides": room > rows * own["row_us"],
        }
    return {"device": device, "batch": arms[0].batch, "arms": figures, "ratios": ratios}


def print_report(said: dict[str, Any]) -> None:
    """Print both tables."""
    print(f"{said['device']}; full rounds of {said['batch']}, microseconds of the device's clock")
    columns = ("rounds", "p10", "round", "p90", "exposed", "share", "target", "step", "row")
    print(f"{'':<24}" + "".join(f"{c:>10}" for c in columns))
    for name, f in said["arms"].items():
        print(f"{name:<24}{f['rounds']:>10.0f}{f['round_p10_us']:>10.0f}{f['round_us']:>10.0f}"
              f"{f['round_p90_us']:>10.0f}{f['exposed_us']:>10.1f}{f['exposed_share']:>10.2%}"
              f"{f['target_us']:>10.0f}{f['step_us']:>10.0f}{f['row_us']:>10.1f}")
    print("exposed: the model waited for the grammar; target, step: its forward, a drafter step;\n"
          "row: one mask row of the whole batch on the grammar's side, hidden where a step takes\n"
          "longer (probing: where the target's forward takes longer than all rows)")
    for flight, ratio in said["ratios"].items():
        hides = "" if ratio["hides"] else " (the rows are longer than what could hide them)"
        print(f"guided / free, {flight}: {ratio['guided_to_free']:.3f} (of p10: "
              f"{ratio['p10']:.3f}), bar {BAR}{hides}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(prog="python -m graft.tools.round_time", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="rows of a round (default 8)")
    parser.add_argument("--requests", type=int, default=48, help="per arm and turn (default 48)")
    parser.add_argument("--repeats", type=int, default=5, help="turns (default 5)")
    parser.add_argument("--draft-legality", choices=LEGALITIES, default=LEGALITIES[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)
    try:
        arms = measure(options.batch, options.requests, options.repeats,
                       options.draft_legality)
        said = report(arms, open_device().describe())
    except GraftError as error:
        print(f"graft: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print_report(said)
    if options.json is not None:
        options.json.write_text(json.dumps(said, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
