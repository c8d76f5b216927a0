"""What speculation brings: drafters, their lengths and trees, masked and blind, by temperature.

    python -m graft.tools.bench.speculation [--drafters forced ngram eagle] [--lengths 2 6]
        [--trees 2x4] [--masking fill none] [--temperatures 0] [--batches 1 8] [--out FOLDER]

Writes ``speculation.json``, a row a cell and kind of prompt as ``speculation.csv``, and pictures.
A drafter is ``forced``, ``ngram``, ``suffix``, ``eagle`` or ``dflash`` (the demo model's own), a
folder, or MODULE:NAME; ``ngram+``, ``suffix+`` and ``forced+`` put one before another. Every cell
is played in turn with decoding without speculation, which is what its speed is compared with. An
acceptance length has the bonus token in it. Intervals are of 95 %, with prompts as what is
independent.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from graft.cudagraph.errors import OptionError
from graft.models import CheckpointError, ConfigError, TokenizerError
from graft.models.drafters import CascadeDrafter, DrafterChoice, NGram, Suffix
from graft.models.engine.engine import Engine
from graft.models.engine.options import DRAFT_MASKINGS
from graft.models.engine.replay import ReplayInFlight, RowAssignment, RowResult
from graft.models.request import VERIFY_MODES, Output, Request
from graft.tools import generate
from graft.tools.bench import speculation_report as report
from graft.tools.bench.demo_evaluation import task_grammar
from graft.tools.bench.estimate import estimate, estimate_mean
from graft.tools.bench.speculation_report import KEYS
from graft.tools.demo_model import demo_model
from graft.tools.demo_prompts import demo_prompts, llm_prompts
from graft.tools.demo_tasks import held_out_tasks
from graft.tools.prompt_rows import Asked, read_requests
from graft.tools.report import program
from graft.tools.smollm import smollm

AT_ONCE = {"ngram": NGram, "suffix": Suffix}
OWN = {"eagle": "eagle3", "dflash": "dflash"}
#: Below it a request decodes greedily.
GREEDY = 1e-5


class Row(NamedTuple):
    """What a round brought a request: tokens, the drafts there were, those accepted."""

    tokens: int
    tested: int
    accepted: int


@dataclass
class Play:
    """Requests that were played once or more; rows and nanoseconds of rounds that were full."""

    outputs: list[Output] = field(default_factory=list)
    rows: list[list[Row]] = field(default_factory=list)
    round_ns: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens a second, of all requests together, by the host's clock."""
        return sum(len(output.tokens) for output in self.outputs) / self.seconds

    def add(self, engine: Engine, requests: Sequence[Request], batch: int) -> None:
        """Play requests, as many at a time as `batch`.

        Raises
        ------
        OptionError
            If one of them was refused or has failed: then nothing is measured.
        """
        rows: dict[str, list[Row]] = {str(request.id): [] for request in requests}
        done: dict[str, Output] = {}
        waiting = deque(requests)
        replays = engine._replays

        def read(seat: RowAssignment, row: RowResult) -> None:
            if not seat.stale:
                tested = row.tested if row.tokens else 0  # a row that waits for its masks
                rows[seat.running.id].append(Row(len(row.tokens), tested, row.accepted))

        def over(flight: ReplayInFlight, stamps: list[int]) -> None:
            if len(flight.seats) == batch and stamps[0] > 0:
                self.round_ns.append(max(stamps) - stamps[0])

        replays.on_row = read
        replays.on_parts = over
        begun = time.perf_counter()
        while len(done) < len(requests):
            while waiting and len(requests) - len(waiting) - len(done) < batch:
                engine.submit(waiting.popleft())
            done |= {event.id: event.output for event in engine.step() if event.output}
        self.seconds += time.perf_counter() - begun
        engine.settle()
        replays.on_row = replays.on_parts = None
        for output in done.values():
            if output.error:
                raise OptionError(f"request {output.id} {output.reason}: {output.error}")
        self.outputs += [done[name] for name in rows]
        self.rows += rows.values()


# Formulas -----------------------------------------------------------------------------------------


def expected_length(rate: float, drafts: int) -> float:
    """Tokens of a round whose drafts are accepted at one rate: (1 - a^(K+1)) / (1 - a)."""
    return sum(rate**j for j in range(drafts + 1))


def lengths(rows: Mapping[int, Sequence[Row]]) -> dict[str, Any]:
    """Acceptance length of rounds that tested drafts, and tokens of all rounds, rows by prompt."""
    tested = {prompt: [row.tokens for row in own if row.tested] for prompt, own in rows.items()}
    every = list(itertools.chain(*tested.values()))
    return {
        "acceptance_length": estimate([(sum(own), len(own)) for own in tested.values()])
        | {"variance": statistics.variance(every) if len(every) > 1 else None},
        "tokens_a_round": estimate(
            [(sum(row.tokens for row in own), len(own)) for own in rows.values()]
        ),
    }


def by_depth(rows: Sequence[Row], depth: int) -> tuple[list[int], list[int]]:
    """Per depth, in how many rounds a draft was reached, and in how many it was accepted.

    Verification ends at the first refusal; where a tree or a chain ends, nothing is reached.
    """
    reached = [0] * depth
    accepted = [0] * depth
    for row in rows:
        for j in range(min(row.tested, row.accepted + 1, depth)):
            reached[j] += 1
            accepted[j] += j < row.accepted
    return reached, accepted


def differences(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens a round of cells that differ in one thing alone, prompt by prompt.

    Masked minus blind drafts; a tree minus the chain of as many drafts, hence verified rows; one
    way to verify minus another; a drafter minus the first one that is named. However drafts are
    masked, those of a tree or another drafter are compared with them.
    """
    found = []
    first = next((cell["drafter"] for cell in cells if cell["length"]), None)
    chosen = [cell for cell in cells if cell["length"] != "auto"]  # else by the clock
    for one, other in itertools.permutations(chosen, 2):
        same = {key for key in KEYS if one[key] == other[key]}
        masked = [cell["masking"] != "none" for cell in (one, other)]
        if masked == [True, True]:
            same.add("masking")
        apart = set(KEYS) - same
        if not (
            (apart == {"masking"} and masked[0])
            or (apart == {"tree"} and other["tree"] is None)
            or (apart == {"drafter"} and other["drafter"] == first)
            or (apart == {"verify"} and one["verify"] < other["verify"])
        ):
            continue
        key = apart.pop()
        pairs = zip(one["by_prompt"], other["by_prompt"], strict=True)
        of = f"{one[key]} - {other[key] or 'chain'}"
        if masked[0] and masked[1] and other["masking"] not in (None, one["masking"]):
            of += f", {other['masking']}"
        found.append(
            {"of": of}
            | {name: one[name] for name in KEYS}
            | estimate_mean([a - b for a, b in pairs])
        )
    return found


def costs(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What lengths of chains should bring: tokens by survival over the time of so many rows.

    Survival to each depth is that of the longest chain; rounds are timed on the device's clock,
    full ones alone; prompts and the host are not in it. Length 0 is no speculation.
    """
    found: list[dict[str, Any]] = []
    chains = [cell for cell in cells if cell["tree"] is None and cell["length"] != "auto"]
    plain = [cell for cell in chains if not cell["length"]]
    rest = [key for key in KEYS if key != "length"]
    drafted = [cell for cell in chains if cell["length"]]
    for key in dict.fromkeys(tuple(cell[name] for name in rest) for cell in drafted):
        group = [cell for cell in drafted if tuple(cell[name] for name in rest) == key]
        last = max(group, key=lambda cell: cell["length"])
        base = [cell for cell in plain if all(cell[k] == last[k] for k in ("temperature", "batch"))]
        told = []
        for cell in sorted(base + group, key=lambda cell: cell["length"]):
            tokens = 1 + sum(last["accepted"][: cell["length"]]) / last["rounds"]
            took = cell["round_us"]
            told.append(
                {
                    "length": cell["length"],
                    "rows": cell["batch"] * (cell["length"] + 1),
                    "round_us": took,
                    "tokens_a_round": tokens,
                    "tokens_a_second": took and cell["batch"] * tokens / took * 1e6,
                    "measured": cell["tokens_a_second"],
                }
            )
        timed = [one for one in told if one["tokens_a_second"]]
        best = max(timed, key=lambda one: one["tokens_a_second"])["length"] if timed else None
        found.append(dict(zip(rest, key, strict=True)) | {"best": best, "lengths": told})
    return found


# Measuring ----------------------------------------------------------------------------------------


def read_prompts(options: argparse.Namespace) -> list[tuple[str, Asked]]:
    """Prompts with their kinds: of a file as of ``graft generate``, by the part of ids before /."""
    if options.prompts is not None:
        parser = argparse.ArgumentParser()
        generate.add_arguments(parser)
        asked = read_requests(parser.parse_args(["--prompts", str(options.prompts)]))
        for one in asked:
            if one.refusal is not None:
                raise OptionError(f"--prompts {options.prompts}, {one.refusal}")
        parts = [str(one.request.id).rpartition("/") for one in asked]
        return [(kind or "all", one) for (kind, _, _), one in zip(parts, asked, strict=True)]
    if options.tasks:
        return [
            (task.kind, Asked(Request(prompt=task.text, grammar=task_grammar(task))))
            for task in held_out_tasks(options.tasks)
        ]
    shown = demo_prompts() if options.model is None else llm_prompts()
    return [(p.shows, Asked(Request(prompt=p.text, grammar=p.grammar))) for p in shown]


def choose(name: str, head: Path | None) -> DrafterChoice | None:
    """The drafter of a name; what is forced is no drafter of its own. Raises OptionError."""
    first, plus, then = name.partition("+")
    if plus and first in AT_ONCE:
        return partial(CascadeDrafter, first=AT_ONCE[first], then=choose(then, head) or then)
    if plus and first == "forced":
        return choose(then, head)
    if name in OWN and head is None:
        raise OptionError(f"drafter {name} is the demo model's own; name another model's folder")
    own = {known: demo_model(folder)[1] for known, folder in OWN.items()}
    return {"forced": None, **own, **AT_ONCE}.get(name, name)


def cell(play: Play, plain: Play, kinds: Sequence[str], depth: int) -> dict[str, Any]:
    """Figures of what was played, beside the same without speculation; request i is of kind i."""
    rows: dict[int, list[Row]] = {i: [] for i in range(len(kinds))}
    for output, own in zip(play.outputs, play.rows, strict=True):
        rows[int(output.id) % len(kinds)] += own
    every = list(itertools.chain(*rows.values()))
    reached, accepted = by_depth(every, depth)
    rate = sum(accepted) / sum(reached) if any(reached) else 0.0
    lasted = [
        (len(o.tokens) - 1, o.total_s - o.first_token_s)
        for o in play.outputs
        if o.total_s is not None and o.first_token_s is not None
    ]
    waited = sum(seconds for _, seconds in lasted)
    predicted = [expected_length(rate, min(row.tested, depth)) for row in every if row.tested]
    return {
        "tokens": sum(row.tokens for row in every),
        "rounds": len(every),
        "seconds": play.seconds,
        "tokens_a_second": play.speed,
        "speedup": play.speed / plain.speed,
        "tokens_a_second_of_one": sum(n for n, _ in lasted) / waited if waited else None,
        "round_us": statistics.median(play.round_ns) / 1e3 if play.round_ns else None,
        "drafts_a_round": statistics.mean(row.tested for row in every),
        "outputs": len(play.outputs),
        "same_outputs": sum(
            a.tokens == b.tokens for a, b in zip(play.outputs, plain.outputs, strict=True)
        ),
        **lengths(rows),
        "reached": reached,
        "accepted": accepted,
        "rate": rate,
        "predicted_length": statistics.mean(predicted) if predicted else None,
        "kinds": {
            kind: lengths({i: own for i, own in rows.items() if kinds[i] == kind})
            for kind in dict.fromkeys(kinds)
        },
        "by_prompt": [sum(row.tokens for row in own) / len(own) for own in rows.values()],
    }


def masking_of(engine: Engine) -> str | None:
    """How the drafts of an engine come to be legal, where a drafter's logits are what is masked."""
    parts = next(iter(engine.rounds.values())).parts
    levels = parts.drafter is not None and parts.drafter.shape.levels
    return parts.masking.name if levels else None


def measure(
    engine: Engine,
    plain: Engine,
    drafter: str,
    prompts: Sequence[tuple[str, Asked]],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The cells of an engine, each played in turn with the same without speculation."""
    parts = next(iter(engine.rounds.values())).parts
    cells = []
    tree = f"{parts.branch}x{parts.depth}" if parts.branch > 1 else None
    asked = [one.for_engine(engine) for _, one in prompts]
    engine.generate([replace(one, id=None, max_tokens=1) for one in asked])  # compiles grammars
    for temperature, batch in itertools.product(options.temperatures, options.batches):
        same = "greedy" if temperature < GREEDY else "coupled" if tree else None
        modes: dict[str | None, str] = {
            mode if mode == "relaxed" else same or mode: mode for mode in options.verify
        }
        for label, mode in modes.items() if parts.drafter else [(None, options.verify[0])]:
            requests = [
                replace(
                    asked[i % len(asked)],
                    id=str(i),
                    seed=i,
                    temperature=temperature,
                    verify=mode,
                    max_tokens=options.max_tokens,
                )
                for i in range(max(batch, len(asked) * options.samples))
            ]
            played = Play()
            beside = Play()
            for _ in range(options.repeats):
                beside.add(plain, requests, batch)
                played.add(engine, requests, batch)
            length = "auto" if engine.options.draft_length == "auto" else parts.draft_length
            key = drafter, masking_of(engine), length, tree, label, temperature, batch
            cells.append(
                dict(zip(KEYS, key, strict=True))
                | cell(played, beside, [kind for kind, _ in prompts], parts.depth)
            )
    return cells


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is written as JSON; ways in which a drafter cannot be used are `refused`."""
    model, head = demo_model() if options.model is None else (options.model, None)
    prompts = read_prompts(options)
    cells = list[dict[str, Any]]()
    refused = dict[str, str]()
    sizes = {"max_batch_size": max(options.batches), "max_length": options.max_length}
    known = set[Any]()
    with Engine(model, **sizes) as plain:
        cells += measure(plain, plain, "none", prompts, options)
        for way in tqdm(
            list(
                itertools.product(
                    options.drafters, options.lengths, (None, *options.trees), options.masking
                )
            ),
            unit="engine",
            disable=None,
        ):
            drafter, length, tree, masking = way
            if (*way[:3], None) in known:
                continue  # these drafts are no different
            blind = masking == "none"
            named = [str(part) for part in way if part is not None]
            try:
                engine = Engine(
                    model,
                    choose(drafter, head),
                    draft_length=length,
                    draft_tree=tree,
                    mask_drafts=not blind,
                    draft_masking="fill" if blind else masking,
                    forced_drafts=drafter.startswith("forced"),
                    **sizes,
                )
            except (OptionError, ConfigError, CheckpointError, TokenizerError) as error:
                refused[", ".join(named)] = str(error)
                continue
            with engine:
                if (*way[:3], masking_of(engine)) not in known:
                    cells += measure(engine, plain, drafter, prompts, options)
                known.add((*way[:3], masking_of(engine)))
        device = plain.device
    return {
        "device": device.describe(),
        "times_are_a_gpus": device.kind != "soft",
        "model": str(model),
        "prompts": Counter(kind for kind, _ in prompts),
        "max_tokens": options.max_tokens,
        "cells": cells,
        "refused": refused,
        "differences": differences(cells),
        "costs": costs(cells),
    }


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises OptionError."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.bench.speculation", description=(__doc__ or "").split("\n\n")[0]
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="target folder (default: the demo model)")
    model.add_argument("--llm", action="store_true", help="SmolLM2-135M-Instruct, fetched once")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help="as of graft generate; an id KIND/NAME tells a prompt's kind "
        "(default: the prompts of the demo)",
    )
    prompts.add_argument("--tasks", type=int, default=0, help="so many of the demo's tasks instead")
    parser.add_argument("--drafters", nargs="+")
    parser.add_argument(
        "--lengths",
        type=generate.read_length,
        nargs="+",
        default=[2, 6],
        metavar="N|auto",
        help="drafts a round, or as many as pay",
    )
    parser.add_argument(
        "--trees",
        type=generate.read_tree,
        nargs="*",
        default=[(2, 4)],
        metavar="BRANCHxLEVELS",
        help="with each of the lengths",
    )
    parser.add_argument(
        "--masking", nargs="+", choices=(*DRAFT_MASKINGS, "none"), default=["fill", "none"]
    )
    parser.add_argument(
        "--verify",
        nargs="+",
        default=["rejection"],
        choices=VERIFY_MODES,
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="requests at a time")
    parser.add_argument("--most", type=int, help="batches 1, 2, 4 .. MOST instead")
    parser.add_argument("--samples", type=int, default=1, help="requests of each prompt")
    parser.add_argument("--repeats", type=int, default=1, help="plays of each cell")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("build", "speculation"))
    options = parser.parse_args(arguments)
    options.model = smollm() if options.llm else options.model
    if options.most is not None:
        options.batches = [1 << i for i in range(max(options.most, 1).bit_length())]
    options.drafters = options.drafters or [
        "forced",
        "ngram",
        "eagle" if options.model is None else "suffix",
    ]
    if min(options.samples, options.repeats, *options.batches) < 1 or options.tasks < 0:
        raise OptionError("--batches, --samples and --repeats must be at least 1")
    return options


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, write the files and print the tables; a drafter without a cell is refused then."""
    options = read_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    found = run(options)
    report.write(found, options.out)
    print(f"{report.tables(found)}\n\nfiles: {options.out}")
    measured = {one["drafter"] for one in found["cells"]}
    if missing := [name for name in options.drafters if name not in measured]:
        raise OptionError(f"measured in no way: {', '.join(missing)}")


if __name__ == "__main__":
    sys.exit(main())
