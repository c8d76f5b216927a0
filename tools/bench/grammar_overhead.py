"""Benchmark of the time that grammars add to a decoding round.

    python -m graft.tools.bench.grammar_overhead [--slots 1 8] [--drafts 0 3] [--kinds choice ...]
        [--masking fill probe optimistic] [--matchers automaton library device] [--busy]
        [--out FOLDER]

Two engines with the same options generate alternately: one with grammars and one without. All
outputs have the same number of tokens, so that all batch rows are in use in nearly all rounds. The
overhead is the median over the pairs of runs of the ratio of their times per round. It may be below
1, because masked rows are faster to sample. The grammar time is the host time of all grammar steps
per round, most of which runs concurrently with the model.

Three kinds of matchers are compared. ``automaton`` runs regular grammars as automata, as engines do
by default. ``library`` runs all grammars with LLGuidance's matcher. ``device`` runs automata as
kernels (the engine option `device_automata`, also of the engine without grammars). The kinds
``recursive`` and ``ebnf`` have no automaton, so they run on the host with all matchers. ``device``
is measured with chains and the draft masking ``fill`` only.

The results are printed and written as JSON and as a chart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from graft.cudagraph.errors import GraftError
from graft.grammar import GrammarSpec, LLGuidanceBackend, Vocabulary
from graft.models.engine.engine import Engine
from graft.models.engine.options import DRAFT_MASKINGS
from graft.models.request import Request
from graft.tools.bench.chart import chart
from graft.tools.demo_model import demo_model
from graft.tools.report import busy_python, program, table

MATCHERS = ("automaton", "library", "device")
PROMPT = "name: Olga Novak; age: 42; city: Oslo"
#: Number of tokens of each output.
TOKENS = 48
KINDS = ("choice", "regex", "schema", "recursive", "ebnf")


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
        schema = {
            "type": "array",
            "items": reference,
            "minItems": 60,
            "$defs": {"node": node},
        }
        return GrammarSpec.json_schema(schema)
    return GrammarSpec.ebnf('root ::= ("(" word ")" " "?){200}\nword ::= [a-z] [a-z] [a-z]')


class Setup(NamedTuple):
    """Configuration of the two engines.

    Attributes
    ----------
    slots
        Batch size.
    drafts
        Drafts per round and request; 0 for no speculation.
    tree
        Whether the drafts form a tree.
    masking
        How drafts are masked; one of `DRAFT_MASKINGS`.
    matcher
        One of `MATCHERS`.
    """

    slots: int
    drafts: int
    tree: bool
    masking: str
    matcher: str


@dataclass(frozen=True)
class Result:
    """Times of a configuration and a kind of grammar.

    Attributes
    ----------
    setup
        The configuration.
    kind
        Kind of the grammar.
    busy
        Whether another Python thread was running.
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
    busy: bool
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
    parser.add_argument(
        "--slots",
        type=int,
        nargs="+",
        default=[1, 8],
        help="batch sizes",
    )
    parser.add_argument(
        "--drafts",
        type=int,
        nargs="+",
        default=[0, 3],
        help="drafts per round",
    )
    parser.add_argument("--trees", action="store_true", help="measure draft trees, too")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
    )
    parser.add_argument(
        "--masking",
        nargs="+",
        choices=DRAFT_MASKINGS,
        default=["fill"],
    )
    parser.add_argument(
        "--matchers",
        nargs="+",
        choices=MATCHERS,
        default=["automaton", "library"],
    )
    parser.add_argument("--busy", action="store_true", help="run another Python thread")
    parser.add_argument(
        "--pairs",
        type=int,
        default=7,
        help="pairs of runs (default %(default)s)",
    )
    parser.add_argument("--model", type=Path, help="target folder (default: the demo model)")
    parser.add_argument("--draft", type=Path, help="drafter folder")
    parser.add_argument("--out", type=Path, default=Path("build/grammar_overhead"))
    options = parser.parse_args(arguments)
    if min(*options.slots, options.pairs) < 1 or min(options.drafts) < 0:
        parser.error("--slots and --pairs must be at least 1, and --drafts at least 0")
    return options


def setups(options: argparse.Namespace) -> Iterator[Setup]:
    """Yield the configurations that the command line selects."""
    for slots, drafts, matcher in itertools.product(
        options.slots,
        options.drafts,
        options.matchers,
    ):
        on_device = matcher == "device"
        maskings = [name for name in options.masking if drafts or name != "probe"]
        for masking in ["fill"] if on_device else maskings or ["fill"]:
            yield Setup(slots, drafts, False, masking, matcher)
        if options.trees and drafts > 1 and not on_device:
            yield Setup(slots, drafts, True, "probe", matcher)


def _library_backend(vocabulary: Vocabulary) -> LLGuidanceBackend:
    return LLGuidanceBackend(vocabulary, automata=False)


def make_engine(setup: Setup, options: argparse.Namespace) -> Engine:
    """Return an engine of a configuration."""
    model, drafter = options.model, options.draft
    if model is None:
        model, drafter = demo_model()
    extra: dict[str, Any] = {}
    if setup.drafts:
        extra["draft_length"] = setup.drafts
    if setup.tree:
        extra["draft_tree"] = (2, max(2, setup.drafts // 2))
    if setup.matcher == "library":
        extra["grammar_backend"] = _library_backend
    extra["device_automata"] = setup.matcher == "device"
    return Engine(
        model,
        drafter if setup.drafts else None,
        max_batch_size=setup.slots,
        draft_masking=setup.masking,
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
            prompt=PROMPT,
            grammar=grammar,
            max_tokens=TOKENS,
            min_tokens=0 if grammar else TOKENS,
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


def measure(setup: Setup, options: argparse.Namespace) -> Iterator[Result]:
    """Yield the results of a configuration for each kind of grammar."""
    with ExitStack() as stack:
        guided = stack.enter_context(make_engine(setup, options))
        free = stack.enter_context(make_engine(setup, options))
        stack.enter_context(busy_python(_busy_work) if options.busy else nullcontext())
        run(free, setup.slots, None)
        for kind in options.kinds:
            grammar = grammar_of(kind)
            run(guided, setup.slots, grammar)  # compiles the grammar and stores mask rows
            pairs = [
                (run(guided, setup.slots, grammar), run(free, setup.slots, None))
                for _ in range(options.pairs)
            ]
            ratios = [with_grammar.round_us / without.round_us for with_grammar, without in pairs]
            low, middle, high = quartiles(ratios)
            yield Result(
                setup,
                kind,
                options.busy,
                middle,
                low,
                high,
                statistics.median(without.round_us for _, without in pairs),
                statistics.median(with_grammar.grammar_us for with_grammar, _ in pairs),
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
    """Return the results as a table."""
    header = "grammar,matcher,masking,slots,drafts,overhead,quartiles,round us,grammar us"
    rows: list[Sequence[object]] = [header.split(",")]
    for result in results:
        setup = result.setup
        rows.append(
            (
                result.kind,
                setup.matcher,
                setup.masking if setup.drafts or setup.masking == "optimistic" else "-",
                setup.slots,
                f"{setup.drafts}{' (tree)' if setup.tree else ''}",
                f"{result.overhead:.3f}",
                f"{result.low:.3f} to {result.high:.3f}",
                f"{result.round_us:.0f}",
                f"{result.grammar_us:.1f}",
            )
        )
    return table(rows, left=3)


def draw(results: Sequence[Result]) -> str:
    """Return a chart of the grammar time per round by batch size, as SVG."""
    series: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        setup = result.setup
        if setup.tree:
            continue
        name = f"{result.kind}, {setup.matcher}, {setup.drafts} drafts, {setup.masking}"
        series.setdefault(name, []).append((setup.slots, result.grammar_us))
    return chart(
        "Host time of the grammar steps per round",
        "median of all runs; most of the time is hidden behind the model's kernels",
        "batch size",
        "microseconds",
        series,
    )


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the table and write the files."""
    options = parse_options(arguments)
    results: list[Result] = []
    for setup in tqdm(list(setups(options)), unit="configuration", disable=None):
        results += measure(setup, options)
    print(report(results))
    options.out.mkdir(parents=True, exist_ok=True)
    document = [result.as_dict() for result in results]
    (options.out / "grammar_overhead.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.out / "grammar_overhead.svg").write_text(draw(results), encoding="utf-8")
    print(f"written to {options.out}")


if __name__ == "__main__":
    sys.exit(main())
