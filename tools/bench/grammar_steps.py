"""Benchmark of the grammar steps of rounds, with JSON schemas and without a model.

    python -m graft.tools.bench.grammar_steps FOLDER --tokenizer FILE --slots 64 --drafts 3

Each request generates a valid instance of a schema. A simulated drafter proposes the next tokens of
the instance, and some wrong ones. A simulated target samples the tokens of the instance; without a
mask, some of its tokens are replaced by random ids, most of which are illegal. Two decoders run the
same rounds:

fill
    A mask row is filled for the last token and for each draft.
optimistic
    Tokens are sampled without masks and then checked; rows are filled for illegal tokens.

The grammar time is the processor time of the grammar steps of a round, median over the rounds. One
thread runs the steps. The decoders run a few rounds in turn, so that a change of the machine's load
affects all of them. Times of the device are not measured.

The table shows the grammar time relative to that of ``fill``, and relative to K+1 fills: to the
time in which ``fill`` would fill the rows of all K drafts. It fills fewer rows, because none is
needed after an illegal draft.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from graft.cudagraph.device import open_device
from graft.cudagraph.driver.cstruct import read_numbers
from graft.cudagraph.errors import GraftError
from graft.cudagraph.host.hostwork import NativeWork
from graft.grammar import CompiledGrammar, GrammarSpec, LLGuidanceBackend
from graft.grammar.decoder import GuidedDecoder, GuidedRequest
from graft.sampling.exchange import Exchange
from graft.sampling.mode import RECORDS_HEADER, DraftMode
from graft.tools.bench.data import add_arguments, load_tokenizer, read_schemas
from graft.tools.report import program, table

#: Instances with fewer tokens are not used.
MIN_TOKENS = 24
_NUMBERS = read_numbers(RECORDS_HEADER)
#: States of the mask rows under which verification accepts tokens.
FINISHED = tuple(_NUMBERS[name] for name in ("ROW_READY", "ROW_FREE", "ROW_CHECKED"))
#: Number of rounds that a decoder runs before the next decoder's turn.
TURN = 5


@dataclass
class Text:
    """An instance of a schema: its compiled grammar, and its tokens with the stop id."""

    compiled: CompiledGrammar
    tokens: list[int]


@dataclass
class Running:
    """A request of a simulated round.

    Attributes
    ----------
    text
        What the request generates.
    request
        The request as the decoder sees it.
    done
        Number of tokens that have been committed.
    drafts
        Drafts for the next round.
    """

    text: Text
    request: GuidedRequest
    done: int = 0
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Result:
    """Figures of one way of masking.

    Attributes
    ----------
    masking
        "fill" or "optimistic".
    replaced
        Share of the tokens that are replaced by random ids if they are sampled without a mask.
    rounds
        Number of rounds.
    tokens
        Committed tokens per round and request.
    fills
        Filled mask rows per round and request.
    grammar_us
        Median of the processor time of the grammar steps of a round, in microseconds.
    """

    masking: str
    replaced: float
    rounds: int
    tokens: float
    fills: float
    grammar_us: float


def read_texts(options: argparse.Namespace) -> list[Text]:
    """Compile the schemas and tokenize an instance of each."""
    tokenizer, vocabulary = load_tokenizer(options.tokenizer, options.stop_token)
    backend = LLGuidanceBackend(vocabulary, automata=options.automata)
    texts: list[Text] = []
    for row in read_schemas(options.folder, options.every):
        for instance in row["valid"][:1]:
            text = json.dumps(instance, ensure_ascii=False)
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            tokens = [*ids, vocabulary.stop_ids[0]]
            try:
                compiled = backend.compile(GrammarSpec.json_schema(row["schema"]))
            except GraftError:
                continue
            matcher = compiled.matcher()
            if len(tokens) >= MIN_TOKENS and all(map(matcher.accept, tokens)):
                texts.append(Text(compiled, tokens))
        if len(texts) >= options.texts:
            break
    return texts


class Simulation:
    """Rounds with one kind of masking, run by one decoder."""

    def __init__(self, texts: Sequence[Text], masking: str, options: argparse.Namespace):
        self._texts = itertools.cycle(texts)
        self._optimistic = masking == "optimistic"
        self._replaced = options.replaced
        self._wrong_drafts = options.wrong_drafts
        self._drafts = options.drafts
        self._random = random.Random(1)
        vocabulary = texts[0].compiled.backend.vocabulary
        self._vocab_size = vocabulary.size
        mode = DraftMode(drafts=options.drafts)
        self.exchange = Exchange(open_device(), options.slots, vocabulary.size, mode)
        self.decoder = GuidedDecoder(
            self.exchange, masked_drafts=False, threads=1, budget_us=options.budget_us
        )
        self._open = self.decoder.open_work()
        self._check = self.decoder.check_work()
        self._commit = self.decoder.commit_work()
        self._epochs = itertools.count(1)
        self._replay = 0
        self.num_tokens = 0
        self.step_ns = 0
        self._running = [self._start(slot) for slot in range(options.slots)]

    def _start(self, slot: int) -> Running:
        text = next(self._texts)
        matcher = text.compiled.matcher()
        epoch = next(self._epochs)
        return Running(text, GuidedRequest(slot, epoch, matcher, 0, self._optimistic))

    def round(self) -> None:
        """Run one round of all requests."""
        self._replay += 1
        self.decoder.publish(self._replay, [running.request for running in self._running])
        self._run(self._open)
        if self._optimistic:
            for running in self._running:
                self._sample(running)
            self._run(self._check)
        took_part = [self._verify(running) for running in self._running]
        self._run(self._commit)
        for slot, running in enumerate(self._running):
            if took_part[slot]:
                self._draft(running)
            if running.done == len(running.text.tokens):
                self._running[slot] = self._start(slot)
        self.decoder.retire(self._replay)

    def _run(self, work: NativeWork) -> None:
        """Run a host step without the GIL, as the CUDA driver does, and add its processor time."""
        step = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work.address)
        start = time.thread_time_ns()
        step(work.data)
        self.step_ns += time.thread_time_ns() - start

    def _sample(self, running: Running) -> None:
        """Publish the tokens that the target samples without masks."""
        sampled = self.exchange.sampled[running.request.slot]
        upcoming = running.text.tokens[running.done : running.done + len(running.drafts) + 1]
        for j, token in enumerate(upcoming):
            if self._random.random() < self._replaced:
                token = self._random.randrange(self._vocab_size)
            sampled[j] = (self._replay, token)

    def _verify(self, running: Running) -> bool:
        """Accept the drafts that equal the tokens of the instance, and one more token.

        As on the device, only tokens of finished rows are accepted. If the matcher is late, so that
        no row is finished, the request is left out of the round. Return whether it took part.
        """
        upcoming = running.text.tokens[running.done :]
        states = self.exchange.stamps[running.request.slot]["state"]
        count = 0
        while count < len(upcoming) and states[count] in FINISHED:
            count += 1
            if running.drafts[count - 1 : count] != tuple(upcoming[count - 1 : count]):
                break
        tokens = upcoming[:count]
        words = self.exchange.committed[running.request.slot]
        words[: 2 + len(tokens)] = (self._replay, len(tokens), *tokens)
        running.done += len(tokens)
        self.num_tokens += len(tokens)
        return bool(tokens)

    def _draft(self, running: Running) -> None:
        """Write the drafts for the next round; some may be wrong."""
        upcoming = running.text.tokens[running.done : running.done + self._drafts]
        drafts = list(upcoming)
        for j in range(len(drafts)):
            if self._random.random() < self._wrong_drafts:
                drafts[j] = self._random.choice(running.text.tokens)
        running.drafts = tuple(drafts)
        words = self.exchange.drafted[running.request.slot]
        words[: 2 + len(drafts)] = (self._replay, len(drafts), *drafts)
        first_parent = 2 + self.exchange.layout["drafts"]
        words[first_parent : first_parent + len(drafts)] = np.arange(len(drafts))


class Measurement:
    """Rounds of one simulation that are timed, after some rounds to warm up."""

    def __init__(self, texts: Sequence[Text], masking: str, options: argparse.Namespace):
        self._masking = masking
        self._options = options
        self._simulation = Simulation(texts, masking, options)
        for _ in range(options.warm_up):
            self._simulation.round()
        self._before = self._simulation.decoder.counters()
        self._num_tokens = self._simulation.num_tokens
        self._times: list[int] = []

    def run(self, rounds: int) -> None:
        """Run and time rounds."""
        for _ in range(rounds):
            start = self._simulation.step_ns
            self._simulation.round()
            self._times.append(self._simulation.step_ns - start)

    def result(self) -> Result:
        """Return the figures of all rounds."""
        after = self._simulation.decoder.counters()
        added = {name: after[name] - self._before[name] for name in after}
        if added["desyncs"] or added["errors"]:
            raise GraftError(
                f"{self._masking}: the grammar rejected a token of an instance: {added}"
            )
        total = len(self._times) * self._options.slots
        return Result(
            self._masking,
            self._options.replaced if self._masking == "optimistic" else 0.0,
            len(self._times),
            (self._simulation.num_tokens - self._num_tokens) / total,
            added["fills"] / total,
            statistics.median(self._times) / 1e3,
        )


def measure(texts: Sequence[Text], options: argparse.Namespace) -> list[Result]:
    """Run the rounds of all decoders in turn and return their figures, those of "fill" first."""
    measurements = [Measurement(texts, "fill", options)]
    for replaced in options.replaced:
        chosen = argparse.Namespace(**vars(options) | {"replaced": replaced})
        measurements.append(Measurement(texts, "optimistic", chosen))
    for start in range(0, options.rounds, TURN):
        for measurement in measurements:
            measurement.run(min(TURN, options.rounds - start))
    return [measurement.result() for measurement in measurements]


def report(results: Sequence[Result], num_rows: int) -> str:
    """Return the results as a table.

    Parameters
    ----------
    results
        Results, beginning with that of "fill".
    num_rows
        Number of mask rows of a request, K+1.
    """
    rows: list[Sequence[object]] = [
        ("masking", "replaced", "tokens", "fills", "grammar us", "of fill", "of K+1 fills")
    ]
    fill_us = results[0].grammar_us
    all_rows_us = fill_us * num_rows / results[0].fills
    for result in results:
        rows.append(
            (
                result.masking,
                f"{result.replaced:.1%}" if result.masking == "optimistic" else "-",
                f"{result.tokens:.2f}",
                f"{result.fills:.3f}",
                f"{result.grammar_us:.0f}",
                f"{result.grammar_us / fill_us:.4f}",
                f"{result.grammar_us / all_rows_us:.4f}",
            )
        )
    return table(rows)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m graft.tools.bench.grammar_steps",
        description=(__doc__ or "").splitlines()[0],
    )
    add_arguments(parser)
    parser.add_argument("--every", type=int, default=10, help="use every N-th schema")
    parser.add_argument("--texts", type=int, default=100, help="maximum number of schemas")
    parser.add_argument("--slots", type=int, default=64, help="requests per round")
    parser.add_argument("--drafts", type=int, default=3, help="drafts per request")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=20, help="rounds that are not measured")
    parser.add_argument(
        "--replaced",
        type=float,
        nargs="+",
        default=[0.0, 0.01, 0.05],
        help="shares of the target's tokens that are replaced by random ids",
    )
    parser.add_argument("--wrong-drafts", type=float, default=0.2, help="share of wrong drafts")
    parser.add_argument(
        "--budget-us",
        type=float,
        help="processor time per slot and step, as the engine's option grammar_budget_us; the "
        "work of grammars that are not trusted then runs on other threads and is not measured",
    )
    parser.add_argument("--automata", action="store_true", help="run regular schemas as automata")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args(arguments)


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    options = parse_options(arguments)
    texts = read_texts(options)
    if not texts:
        raise GraftError(f"no usable schema in {options.folder}")
    print(f"{len(texts)} schemas, {options.slots} requests, {options.drafts} drafts")
    results = measure(texts, options)
    print(report(results, options.drafts + 1))
    if options.out is not None:
        document = [asdict(result) for result in results]
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
