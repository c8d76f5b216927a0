"""How much longer a round takes with grammar than without: guided and free rounds in pairs.

    python -m graft.tools.bench.round_time [--batch 8] [--pairs 60] [--legality fill probe]

Two engines, one whose requests are guided and one whose are not, take turns of a few rounds with
the same prompts; every pair of turns gives a ratio, and the median of the ratios is told. Other
work on the machine meets both sides of a pair, so it cancels. Only pairs in which every row ran all
the time count.
Times are the host's clock from the first step to the last result; the soft device's say nothing
of a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

from graft.cudagraph.device import open_device
from graft.cudagraph.errors import OptionError
from graft.grammar.statement import GrammarSpec
from graft.models.engine import Engine
from graft.models.options import LEGALITIES
from graft.models.request import Request
from graft.tools.demo_model import demo_model
from graft.tools.demo_tasks import held_out_tasks
from graft.tools.report import program

#: A round with grammar may take this much of a round without.
BAR = 1.05
#: Characters of an answer that lasts for some rounds.
LEAST = 120
#: Turns that are not counted: grammars compile, caches fill.
WARM_UP = 4


class Side:
    """One engine and the requests of one side, which begin anew for every turn."""

    def __init__(self, engine: Engine, requests: Sequence[Request], batch: int):
        self._engine, self._requests, self._batch = engine, itertools.cycle(requests), batch

    def turn(self, rounds: int) -> float | None:
        """Nanoseconds of a round, over so many; None when not all rows ran in all of them."""
        stats = self._engine.stats
        ids = [self._engine.submit(next(self._requests)) for _ in range(self._batch)]
        rows = -1
        while rows < self._batch and self._engine.busy:  # until all have joined
            before = stats.row_rounds
            self._engine.step()
            self._engine.settle()
            rows = stats.row_rounds - before
        launches, taken, begun = stats.rounds, stats.row_rounds, time.perf_counter_ns()
        for _ in range(rounds):
            self._engine.step()
        self._engine.settle()
        took = time.perf_counter_ns() - begun
        launches, taken = stats.rounds - launches, stats.row_rounds - taken
        for name in ids:
            self._engine.cancel(name)
        while self._engine.busy:
            self._engine.step()
        return took / launches if launches and taken == launches * self._batch else None


def requests(guided: bool, count: int) -> list[Request]:
    """Prompts with long answers, each with its schema, as grammar or only as text."""
    tasks = [task for task in held_out_tasks(20 * count, 7)
             if task.schema is not None and len(task.answer) > LEAST]  # fmt: skip
    return [Request(prompt=task.text, max_tokens=256, schema=None if guided else task.schema,
                    grammar=GrammarSpec.json_schema(task.schema or {}) if guided else None)
            for task in tasks[:count]]  # fmt: skip


def measure(batch: int, pairs: int, rounds: int, legality: str, overlap: bool) -> dict[str, Any]:
    """Ratios of guided to free, over pairs of bursts of rounds."""
    target, drafter = demo_model()
    ratios: list[float] = []
    times: list[float] = []
    with ExitStack() as stack:
        sides = [Side(stack.enter_context(Engine(target, drafter, max_batch_size=batch,
                                                 overlap=overlap, draft_legality=legality)),
                      requests(guided, 4 * batch), batch) for guided in (True, False)]
        for turn in tqdm(range(pairs + WARM_UP), desc=f"{legality}, overlap {overlap}",
                         disable=None):  # fmt: skip
            order = sides[::-1] if turn % 2 else sides
            took = {side: side.turn(rounds) for side in order}
            guided, free = (took[side] for side in sides)
            if turn >= WARM_UP and guided is not None and free is not None:
                ratios.append(guided / free)
                times.append(free)
    if not ratios:
        raise OptionError(f"no {rounds} rounds in a row had all {batch} rows taken")
    return {"legality": legality, "overlap": overlap, "pairs": len(ratios),
            "free_round_us": statistics.median(times) / 1e3,
            "guided_to_free": statistics.median(ratios), "bar": BAR,
            "quartiles": statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3}


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a JSON object a line."""
    parser = argparse.ArgumentParser(prog="python -m graft.tools.bench.round_time",
                                     description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=8, help="rows of a round (default 8)")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of turns (default 60)")
    parser.add_argument("--rounds", type=int, default=6, help="of a side in a turn (default 6)")
    parser.add_argument("--legality", nargs="+", choices=LEGALITIES, default=LEGALITIES)
    options = parser.parse_args(arguments)
    if min(options.batch, options.pairs, options.rounds) < 1:
        parser.error("--batch, --pairs and --rounds must be at least 1")
    print(open_device().describe())
    for legality, overlap in itertools.product(options.legality, (True, False)):
        print(json.dumps(measure(options.batch, options.pairs, options.rounds, legality, overlap)),
              flush=True)


if __name__ == "__main__":
    sys.exit(main())
