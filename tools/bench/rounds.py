"""A round's grammar work: graft's worker in a replayed graph beside the stock Python APIs.

Slots in the middle of real documents, drafts that are partly wrong: rows for the tested drafts,
commit, rows for the new drafts. Tokens and acceptance are drawn once and replayed for both, round
by round in turns, one thread each; then again beside a Python thread that is busy in bytecode. The
stock APIs are used the usual way: rows 0 .. K-1 while drafting, then rows 0 .. K anew to verify.
graft is timed by its worker's own clock, the stock calls from the first to the last. Usage::

    python -m graft.tools.bench.rounds ../shared/data/maskbench \\
        --tokenizer ../shared/data/tokenizers/deepseek-128k.json.gz

Any machine will do (``GRAFT_DEVICE=soft``): it is work of a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from graft.cudagraph.device import Device, open_device
from graft.cudagraph.errors import GraftError, OptionError
from graft.cudagraph.exchange import Exchange
from graft.cudagraph.graph import Graph, GraphLane
from graft.cudagraph.memory import DeviceArray
from graft.grammar import GrammarSpec, GuidedDecoder, GuidedRequest, make_backend
from graft.tools.bench.data import add_arguments, load_tokenizer, rows_of
from graft.tools.bench.grammar_child import LLGuidance, Refused, XGrammar
from graft.tools.report import busy_python, program

KERNELS = Path(__file__).parent / "kernels" / "place.cu"
BACKENDS = ("xgrammar", "llguidance")
Staged = tuple[np.ndarray, DeviceArray]


class Move(NamedTuple):
    """What a round does to one slot: drafts it tests, tokens it commits, drafts it makes."""

    tested: list[int]
    tokens: list[int]
    drafts: list[int]


class Document(NamedTuple):
    """A schema, its longest valid instance as tokens, and the grammar compiled by either side."""

    tokens: list[int]
    compiled: Any
    stock: Any


def documents(folder: Path, backend: Any, stock: Any, name: str, tokenizer: Any, count: int,
              least: int, rng: np.random.Generator) -> list[Document]:  # fmt: skip
    """Instances of at least ``least`` tokens that both sides accept, each of another schema."""
    rows, found = list(rows_of(folder)), []
    for index in tqdm(rng.permutation(len(rows)), desc=name, unit="schema", disable=None):
        row = rows[index]
        texts = [json.dumps(value, ensure_ascii=False) for value in row["valid"]]
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        tokens: list[int] = max(ids, key=len, default=[])
        if len(tokens) < least or len(json.dumps(row["schema"])) > 6000:
            continue
        try:
            spec = GrammarSpec.json_schema(row["schema"], backend=name)
            compiled, made = backend.compile(spec), stock.compile(json.loads(spec.text))
        except (GraftError, Refused):
            continue
        ours, theirs = compiled.matcher(), made()
        if all(ours.accept(t) and stock.accept(theirs, t) for t in tokens):
            found.append(Document(tokens, compiled, made))
        if len(found) == count:
            break
    if not found:
        raise OptionError(f"{name} takes no instance of {least} tokens in {folder}")
    return found


def play_document(document: Document, start: int, backend: Any, rounds: int, length: int,
                  wrong: float, rng: np.random.Generator) -> list[Move]:  # fmt: skip
    """Rounds of one slot from token ``start`` on; each draft is wrong, and legal, by chance."""
    tokens, at, drafts, moves = document.tokens, start, list[int](), []
    matcher = document.compiled.matcher()
    row = np.zeros(backend.vocabulary.words, np.int32)
    for token in tokens[:at]:
        matcher.accept(token)
    for _ in range(rounds):
        good = next((j for j, d in enumerate(drafts) if d != tokens[at + j]), len(drafts))
        tested, committed = drafts, tokens[at : at + good + 1]
        at += len(committed)
        for token in committed:
            matcher.accept(token)
        drafts = []
        for likely in tokens[at : at + length]:
            matcher.fill(row)
            legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            legal = legal[~np.isin(legal, backend.vocabulary.stop_ids)]
            if not len(legal):
                break
            drafts.append(likely if likely in legal and rng.random() >= wrong
                          else int(rng.choice(legal)))
            matcher.accept(drafts[-1])
        matcher.rollback(len(drafts))
        moves.append(Move(tested, committed, drafts))
    return moves


class Stock:
    """The Python API of a library, its calls for a whole batch, on one thread."""

    def __init__(self, name: str, words: int, slots: int, length: int):
        self.name, self._length, self._matchers = f"{name}, batch calls", length, list[Any]()
        width, rows = length + 1, np.zeros((slots * (length + 1), words), np.int32)
        address, size = rows.ctypes.data, words * 4
        if name == "xgrammar":
            import tvm_ffi

            register = tvm_ffi.register_object("xgrammar.tvm_ffi_binding.BatchGrammarMatcher")
            calls: Any = register(type("BatchGrammarMatcher", (tvm_ffi.Object,), {"__slots__": ()}))
            one = calls(1)
            self._fill = lambda pairs: one.batch_fill_next_token_bitmask(
                self._of(pairs), rows, [s * width + j for s, j in pairs], False)
            self._accept = lambda pairs: calls.batch_accept_token(
                self._of(pairs), [t for _, t in pairs], False)
            self._rollback = lambda pairs: calls.batch_rollback(
                self._of(pairs), [n for _, n in pairs])
            self._verify = lambda pairs: self._draft([(s, [*drafts, -1]) for s, drafts in pairs])
        else:
            import llguidance

            threads: Any = llguidance.LLExecutor(num_threads=1)
            self._fill = lambda pairs: threads.unsafe_compute_mask_ptr(
                [(self._matchers[s], s * width + j) for s, j in pairs], address, size, len(rows))
            self._accept = lambda pairs: threads.consume_token_par(
                [(self._matchers[s], t) for s, t in pairs])
            self._rollback = lambda pairs: [self._matchers[s].rollback(n) for s, n in pairs]
            self._verify = lambda pairs: threads.unsafe_compute_mask_ptr_with_draft_token(
                [(self._matchers[s], s * width, drafts) for s, drafts in pairs], address, size,
                len(rows))

    def _of(self, pairs: Sequence[tuple[int, Any]]) -> list[Any]:
        return [self._matchers[slot] for slot, _ in pairs]

    def _draft(self, drafted: Sequence[tuple[int, list[int]]]) -> None:
        """A row before each draft of each slot; the matchers end where they began."""
        for j in range(self._length + 1):
            reached = [(slot, drafts) for slot, drafts in drafted if len(drafts) > j]
            if j and reached:
                self._accept([(slot, drafts[j - 1]) for slot, drafts in reached])
            if reached:
                self._fill([(slot, j) for slot, _ in reached])
        if undone := [(s, len(drafts) - 1) for s, drafts in drafted if len(drafts) > 1]:
            self._rollback(undone)

    def begin(self, documents: Sequence[Document], starts: Sequence[int]) -> None:
        """Matchers at the places where the slots begin."""
        self._matchers = [document.stock() for document in documents]
        for slot, document in enumerate(documents):
            for token in document.tokens[: starts[slot]]:
                self._accept([(slot, token)])

    def play(self, moves: Sequence[Move]) -> int:
        """Play one round; nanoseconds."""
        start = time.perf_counter_ns()
        if tested := [(slot, move.tested) for slot, move in enumerate(moves) if move.tested]:
            self._verify(tested)
        for j in range(self._length + 1):
            if more := [(s, m.tokens[j]) for s, m in enumerate(moves) if len(m.tokens) > j]:
                self._accept(more)
        self._draft([(slot, move.drafts) for slot, move in enumerate(moves) if move.drafts])
        return time.perf_counter_ns() - start


def placing(device: Device, lane: GraphLane, exchange: Exchange, part: str) -> Staged:
    """Add the kernel that writes a part of every slot: what the host has, and where it is read."""
    host = np.zeros(getattr(exchange, part).shape, np.int32)
    staged = host, device.zeros(host.shape, "int32")
    lane.kernel(device.load(KERNELS)["place"], exchange.slots, 32, (
        exchange.memory, int(exchange.layout["stride"]), int(exchange.layout[part]), staged[1],
        host.shape[1]), name=part)  # fmt: skip
    return staged


class Graft:
    """graft's steps as host nodes of a replayed graph; kernels write the recorded tokens between.

    Nothing in it waits for Python.
    """

    name = "graft"

    def __init__(self, device: Device, backend: Any, slots: int, length: int):
        self._backend, self._length, self._replay = backend, length, 0
        self._requests = list[GuidedRequest]()
        exchange = Exchange(device, slots, length, backend.vocabulary.size)
        decoder = self._decoder = GuidedDecoder(exchange, masked_drafts=True, threads=1)
        self._stream, graph = device.stream("rounds"), Graph(device, "round")
        lane = graph.lane("grammar")
        self._staged: list[Staged] = []

        def placed(part: str) -> None:
            self._staged.append(placing(device, lane, exchange, part))
            if part == "drafted":  # chains
                self._staged[-1][0][:, 2 + length :] = range(length)

        decoder.add(lane, decoder.open_work(), name="open")
        placed("committed")
        placed("drafted")
        decoder.add(lane, decoder.commit_work(), name="commit")
        for j in range(1, length):
            placed("drafted")
            decoder.add(lane, decoder.draft_work(j), name=f"draft {j}")
        placed("drafted")  # what the next round tests
        self._run = graph.instantiate()

    def begin(self, documents: Sequence[Document], starts: Sequence[int]) -> None:
        """Matchers at the places where the slots begin."""
        epoch, self._requests = self._replay + 1, []
        for slot, (document, start) in enumerate(zip(documents, starts, strict=True)):
            matcher = document.compiled.matcher()
            for token in document.tokens[:start]:
                matcher.accept(token)
            self._requests.append(GuidedRequest(slot, epoch, matcher, start))

    def play(self, moves: Sequence[Move]) -> int:
        """Play one round; nanoseconds of the worker's own clock."""
        self._replay += 1
        for slot, move in enumerate(moves):
            rows = [move.tokens, *(move.drafts[:j] for j in range(self._length + 1))]
            for (host, _), tokens in zip(self._staged, rows, strict=True):
                host[slot, : 2 + len(tokens)] = (self._replay, len(tokens), *tokens)
        for host, memory in self._staged:
            memory.copy_from(host)
        before = self._decoder.counters()
        self._decoder.publish(self._replay, self._requests)
        self._run.launch(self._stream)
        self._run.synchronize(120.0)
        self._decoder.retire(self._replay)
        after = self._decoder.counters()
        if after["desyncs"] or after["errors"] or after["refused_drafts"]:
            said = next(filter(None, map(self._decoder.error, range(self._decoder.slots))), "")
            raise GraftError(f"the worker failed: {said} {after}")
        return sum(after[f"{s}_ns"] - before[f"{s}_ns"] for s in ("open", "commit", "draft"))


def measure(subjects: Sequence[Any], found: Sequence[Document], backend: Any, episodes: int,
            options: argparse.Namespace, rng: np.random.Generator) -> dict[str, list[int]]:
    """Nanoseconds of every round but each episode's first, by subject, in turns."""
    spent: dict[str, list[int]] = {subject.name: [] for subject in subjects}
    reach = (options.rounds + 1) * (options.draft_length + 1)
    for _ in tqdm(range(episodes), unit="episode", disable=None):
        chosen = [found[i] for i in rng.integers(len(found), size=options.slots)]
        starts = [int(rng.integers(1, len(d.tokens) - reach + 1)) for d in chosen]
        played = [play_document(d, start, backend, options.rounds + 1, options.draft_length,
                                options.wrong, rng)
                  for d, start in zip(chosen, starts, strict=True)]  # fmt: skip
        for subject in subjects:
            subject.begin(chosen, starts)
        for number, moves in enumerate(zip(*played, strict=True)):
            for subject in subjects[::-1] if number % 2 else subjects:
                took = subject.play(moves)
                if number:
                    spent[subject.name].append(took)
    return spent


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One backend's figures: milliseconds a round, and graft's over the stock API's."""
    tokenizer, vocabulary = load_tokenizer(options.tokenizer, options.stop_token)
    backend, rng = make_backend(name, vocabulary), np.random.default_rng(0)
    adapter = (XGrammar if name == "xgrammar" else LLGuidance)(vocabulary, tokenizer)
    least = (options.rounds + 1) * (options.draft_length + 1) + 1
    found = documents(options.folder, backend, adapter, name, tokenizer, options.documents, least,
                      rng)
    subjects = [Graft(open_device(), backend, options.slots, options.draft_length),
                Stock(name, vocabulary.words, options.slots, options.draft_length)]
    times = [measure(subjects, found, backend, options.episodes, options, rng)]
    with busy_python(lambda: sum(range(200))):
        times.append(measure(subjects, found, backend, options.busy_episodes, options, rng))
    figures = {f"{q}, {state}": {one: float(np.quantile(ns, point)) / 1e6
                                 for one, ns in taken.items()}
               for state, taken in zip(("idle", "busy"), times, strict=True)
               for q, point in (("p50", 0.5), ("p99", 0.99))}
    figures["sum, idle"] = {one: sum(ns) / 1e6 for one, ns in times[0].items()}
    return {"documents": len(found), "ms": figures,
            "graft_over_stock": {key: ours / theirs for key, (ours, theirs) in
                                 ((key, row.values()) for key, row in figures.items())}}


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every backend; refusals are one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m graft.tools.bench.rounds",
                                     description=(__doc__ or "").split("\n\n")[0])
    add_arguments(parser)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    for flag, default in (("slots", 64), ("draft-length", 3), ("rounds", 10), ("episodes", 30),
                          ("busy-episodes", 10), ("documents", 150)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--wrong", type=float, default=0.3, help="share of wrong drafts")
    options = parser.parse_args(arguments)
    if min(value for value in vars(options).values() if isinstance(value, int)) < 1:
        raise OptionError("sizes and counts must be at least 1")
    for name in options.backends:
        print(json.dumps({"backend": name} | run(name, options), indent=1), flush=True)


if __name__ == "__main__":
    sys.exit(main())
