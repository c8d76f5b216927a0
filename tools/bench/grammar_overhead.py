"""Benchmark of the time that grammars add to a decoding round.

    python -m graft.tools.bench.grammar_overhead [--slots 1 8] [--drafts 0 3] [--kinds choice ...]
        [--modes fill device loop ...] [--shapes chain tree] [--hosts idle busy] [--minutes M]
        [--out FOLDER]

An engine generates alternately with grammars and without. All outputs have the same number of
tokens, so that all batch rows are in use in nearly all rounds. The overhead is the median over the
pairs of runs of the ratio of their times per round. It may be below 1, because masked rows are
faster to sample. The grammar time is the host time of all grammar steps per round, most of which
runs concurrently with the model. A mode says where mask rows come from:

``fill``
    LLGuidance fills the rows on the host (``draft_masking="fill"``).
``probe``
    LLGuidance tests the candidates of drafts; rows are filled for verification only.
``optimistic``
    LLGuidance tests sampled tokens, and rows are filled only for illegal ones.
``stored``
    Automata on the host, which store the row of each state.
``device``
    Automata on the device, which store the row of each state (`device_automata`).
``computed``
    Automata on the device that compute each row (``mask_row_bytes=0``).
``loop``
    Whole generations as one graph (``generation="graph"``). Grammars with an automaton run on the
    device, the others on the host.

The kinds ``recursive`` and ``ebnf`` have no automaton, so they are not measured in the modes
``stored``, ``device`` and ``computed``. Draft trees are not measured with ``fill``, because it
applies to chains.

The results are printed and written as JSON and as a chart. A measurement has at least three pairs
of runs, and more while the time that `--minutes` leaves for it has not passed. When all of the time
has passed, the other measurements have one pair each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from graft.cudagraph.errors import GraftError
from graft.grammar import GrammarSpec, LLGuidanceBackend, Vocabulary
from graft.models.engine.engine import Engine
from graft.models.request import Request
from graft.tools.bench.chart import chart
from graft.tools.demo_model import demo_model
from graft.tools.report import busy_python, program, table

PROMPT = "name: Olga Novak; age: 42; city: Oslo"
#: Number of tokens of each output.
TOKENS = 48
KINDS = ("choice", "regex", "schema", "recursive", "ebnf")
#: Kinds of grammars that have automata.
REGULAR = ("choice", "regex", "schema")
SHAPES = ("chain", "tree")
HOSTS = ("idle", "busy")
#: Engine options of each mode. The value of ``library`` is whether LLGuidance's matcher is used.
MODES: dict[str, dict[str, Any]] = {
    "fill": {"library": True},
    "probe": {"library": True, "draft_masking": "probe"},
    "optimistic": {"library": True, "draft_masking": "optimistic"},
    "stored": {},
    "device": {"device_automata": True},
    "computed": {"device_automata": True, "mask_row_bytes": 0},
    "loop": {"device_automata": True, "generation": "graph"},
}
_REGULAR_MODES = ("stored", "device", "computed")
#: Minimum and maximum number of pairs of runs.
MIN_PAIRS = 3
MAX_PAIRS = 25
#: Time to wait for the automaton of a grammar.
AUTOMATON_S = 30.0


def grammar_of(kind: str) -> GrammarSpec:
    """Return the grammar of a kind. All of its texts are longer than `TOKENS` tokens."""
    if kind == "choice":
        options = [f"{start}, " + "the answer is in the text above. " * 12 for start in "ABCD"]
        return GrammarSpec.choice(options)
    if kind == "regex":
        return GrammarSpec.regex("([a-z]{1,9} ){200}")
    if kind == "schema":
        row = {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
        return GrammarSpec.json_schema({"type": "array", "items": row, "minItems": 12})
    if kind == "recursive":
        reference = {"$ref": "#/$defs/node"}
        node = {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "next": {"anyOf": [reference, {"type": "null"}]},
            },
            "required": ["name", "next"],
            "additionalProperties": False,
        }
        schema = {"type": "array", "items": reference, "minItems": 60, "$defs": {"node": node}}
        return GrammarSpec.json_schema(schema)
    return GrammarSpec.ebnf('root ::= ("(" word ")" " "?){200}\nword ::= [a-z] [a-z] [a-z]')


class Setup(NamedTuple):
    """Configuration of an engine.

    Attributes
    ----------
    slots
        Batch size.
    drafts
        Drafts per round and request; 0 for no speculation.
    shape
        Shape of the drafts, "chain" or "tree".
    mode
        One of `MODES`.
    host
        Whether another Python thread is running: "idle" or "busy".
    """

    slots: int
    drafts: int
    shape: str
    mode: str
    host: str

    def kinds(self, kinds: Sequence[str]) -> list[str]:
        """Return the kinds of grammars that are measured in this mode."""
        return [kind for kind in kinds if kind in REGULAR or self.mode not in _REGULAR_MODES]


@dataclass(frozen=True)
class Result:
    """Times of a configuration and a kind of grammar.

    Attributes
    ----------
    setup
        The configuration.
    kind
        Kind of the grammar.
    pairs
        Number of pairs of runs.
    overhead
        Median of the paired ratios of the times per round, with and without a grammar.
    low, high
        Quartiles of these ratios.
    round_us
        Median time of a round without a grammar, in microseconds.
    grammar_us
        Median host time of the grammar steps per round, in microseconds.
    """

    setup: Setup
    kind: str
    pairs: int
    overhead: float
    low: float
    high: float
    round_us: float
    grammar_us: float

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, convertible to JSON."""
        return asdict(self) | {"setup": self.setup._asdict()}


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.bench.grammar_overhead",
        description=(__doc__ or "").splitlines()[0],
    )
    lists: dict[str, tuple[Any, Any, list[Any], str]] = {
        "--slots": (int, None, [1, 8], "batch sizes"),
        "--drafts": (int, None, [3], "drafts per round"),
        "--shapes": (str, SHAPES, ["chain"], "shapes of the drafts"),
        "--kinds": (str, KINDS, list(KINDS), "kinds of grammars"),
        "--modes": (str, tuple(MODES), list(MODES), "sources of mask rows"),
        "--hosts": (str, HOSTS, ["idle"], "with and without another Python thread"),
    }
    for name, (kind, choices, default, text) in lists.items():
        values = " ".join(str(value) for value in default)
        parser.add_argument(
            name,
            type=kind,
            nargs="+",
            choices=choices,
            default=default,
            help=f"{text} (default: {values})",
        )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="time for all measurements; see above (default %(default)s)",
    )
    parser.add_argument("--model", type=Path, help="target folder (default: the demo model)")
    parser.add_argument("--draft", type=Path, help="drafter folder")
    parser.add_argument("--out", type=Path, default=Path("build/grammar_overhead"))
    options = parser.parse_args(arguments)
    if min(options.slots) < 1 or min(options.drafts) < 0 or options.minutes <= 0:
        parser.error("--slots must be at least 1, --drafts at least 0, and --minutes positive")
    return options


def setups(options: argparse.Namespace) -> Iterator[Setup]:
    """Yield the configurations that the command line selects."""
    for slots, drafts, shape, mode, host in itertools.product(
        options.slots, options.drafts, options.shapes, options.modes, options.hosts
    ):
        if shape == "tree" and (drafts < 2 or mode == "fill"):
            continue
        if mode == "probe" and not drafts:
            continue
        setup = Setup(slots, drafts, shape, mode, host)
        if setup.kinds(options.kinds):
            yield setup


def _library_backend(vocabulary: Vocabulary) -> LLGuidanceBackend:
    return LLGuidanceBackend(vocabulary, automata=False)


def make_engine(setup: Setup, options: argparse.Namespace) -> Engine:
    """Return an engine of a configuration."""
    model, drafter = options.model, options.draft
    if model is None:
        model, drafter = demo_model()
    extra = dict(MODES[setup.mode])
    if extra.pop("library", False):
        extra["grammar_backend"] = _library_backend
    if setup.drafts:
        extra["draft_length"] = setup.drafts
    if setup.shape == "tree":
        extra["draft_tree"] = (2, max(2, setup.drafts // 2))
    return Engine(
        model,
        drafter if setup.drafts else None,
        max_batch_size=setup.slots,
        prefix_cache_bytes=0,
        **extra,
    )


class Run(NamedTuple):
    """Times of one run.

    Attributes
    ----------
    round_us
        Device time per round, in microseconds.
    grammar_us
        Host time of the grammar steps per round, in microseconds.
    """

    round_us: float
    grammar_us: float


def run(engine: Engine, slots: int, grammar: GrammarSpec | None) -> Run:
    """Generate `TOKENS` tokens for each batch row.

    Raises
    ------
    GraftError
        If a request fails or ends early.
    """
    requests = [
        Request(
            prompt=PROMPT, grammar=grammar, max_tokens=TOKENS, min_tokens=0 if grammar else TOKENS
        )
        for _ in range(slots)
    ]
    engine.reset_stats()
    before = _step_ns(engine)
    for output in engine.generate(requests):
        if output.error is not None or len(output.tokens) < TOKENS:
            raise GraftError(f"a request ended early ({output.reason}): {output.error}")
    rounds = engine.stats.rounds
    grammar_ns = _step_ns(engine) - before
    return Run(engine.stats.round_ns / rounds / 1e3, grammar_ns / rounds / 1e3)


def _step_ns(engine: Engine) -> int:
    counters = engine.counters()["grammar"]
    return int(sum(value for name, value in counters.items() if name.endswith("_ns")))


def prepare(engine: Engine, setup: Setup, kind: str) -> GrammarSpec:
    """Compile a grammar, store its mask rows and wait for its automaton. Return the grammar.

    Raises
    ------
    GraftError
        If the engine does not run the automaton in time.
    """
    grammar = grammar_of(kind)
    on_device = kind in REGULAR and "device_automata" in MODES[setup.mode]
    deadline = time.monotonic() + AUTOMATON_S
    run(engine, setup.slots, grammar)
    while on_device and set(engine.stats.rounds_by_grammar) != {"device"}:
        if time.monotonic() > deadline:
            raise GraftError(f"the automaton of the grammar {kind!r} was not built in time")
        run(engine, setup.slots, grammar)
    return grammar


def measure(
    setup: Setup, options: argparse.Namespace, seconds: float, progress: tqdm
) -> Iterator[Result]:
    """Yield the results of a configuration for each kind of grammar.

    `seconds` is the time for each of them; if it is not positive, one pair of runs is measured.
    """
    with ExitStack() as stack:
        engine = stack.enter_context(make_engine(setup, options))
        busy = setup.host == "busy"
        stack.enter_context(busy_python(_busy_work) if busy else nullcontext())
        run(engine, setup.slots, None)
        for kind in setup.kinds(options.kinds):
            grammar = prepare(engine, setup, kind)
            yield _measure_pairs(engine, setup, kind, grammar, seconds)
            progress.update()


def _measure_pairs(
    engine: Engine, setup: Setup, kind: str, grammar: GrammarSpec, seconds: float
) -> Result:
    end = time.monotonic() + seconds
    pairs: list[tuple[Run, Run]] = []
    min_pairs = MIN_PAIRS if seconds > 0 else 1
    while len(pairs) < MAX_PAIRS and (len(pairs) < min_pairs or time.monotonic() < end):
        guided = run(engine, setup.slots, grammar)
        pairs.append((guided, run(engine, setup.slots, None)))
    ratios = [guided.round_us / free.round_us for guided, free in pairs]
    low, middle, high = quartiles(ratios)
    return Result(
        setup,
        kind,
        len(pairs),
        middle,
        low,
        high,
        statistics.median(free.round_us for _, free in pairs),
        statistics.median(guided.grammar_us for guided, _ in pairs),
    )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _busy_work() -> int:
    return sum(range(1000))


def report(results: Sequence[Result]) -> str:
    """Return tables of overheads and of grammar times, with a column for each mode."""
    modes = [mode for mode in MODES if any(result.setup.mode == mode for result in results)]
    parts = []
    for title, field, form in (
        ("time of a round with a grammar / without", "overhead", "{:.3f}"),
        ("host time of the grammar steps per round, in microseconds", "grammar_us", "{:.1f}"),
    ):
        cells: dict[tuple[object, ...], dict[str, str]] = {}
        for result in results:
            slots, drafts, shape, mode, host = result.setup
            row = cells.setdefault((result.kind, shape, host, slots, drafts), {})
            row[mode] = form.format(getattr(result, field))
        rows: list[Sequence[object]] = [("grammar", "drafts", "host", "slots", "K", *modes)]
        rows += [(*key, *(row.get(mode, "-") for mode in modes)) for key, row in cells.items()]
        parts.append(f"{title}\n{table(rows, left=3)}")
    return "\n\n".join(parts)


def draw(results: Sequence[Result]) -> str:
    """Return a chart of the overheads by batch size, as SVG."""
    series: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        setup = result.setup
        name = f"{result.kind}, {setup.mode}, {setup.shape} of {setup.drafts}, {setup.host}"
        series.setdefault(name, []).append((setup.slots, result.overhead))
    return chart(
        "Time of a round with a grammar divided by the time without",
        "medians of pairs of runs of one engine",
        "batch size",
        "overhead",
        series,
    )


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the tables and write the files."""
    options = parse_options(arguments)
    selected = list(setups(options))
    num_results = sum(len(setup.kinds(options.kinds)) for setup in selected)
    end = time.monotonic() + 60 * options.minutes
    results: list[Result] = []
    with tqdm(total=num_results, unit="measurement", disable=None) as progress:
        for setup in selected:
            # Engines and compilations take about half of the time.
            seconds = 0.5 * (end - time.monotonic()) / max(num_results - len(results), 1)
            results += measure(setup, options, seconds, progress)
    print(report(results))
    options.out.mkdir(parents=True, exist_ok=True)
    document = [result.as_dict() for result in results]
    (options.out / "grammar_overhead.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.out / "grammar_overhead.svg").write_text(draw(results), encoding="utf-8")
    print(f"written to {options.out}")


if __name__ == "__main__":
    sys.exit(main())
