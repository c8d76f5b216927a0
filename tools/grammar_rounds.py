"""A round's whole grammar work, graft's worker beside the stock Python APIs of the same backend.

64 slots in the middle of real documents, draft length 3: commit, masks for drafting, masks for
verification. Tokens and acceptance are recorded once and replayed for every subject, subjects take
turns round by round in one process, as many threads each; the mask rows of some episodes are
compared first. Then again while a Python thread is busy in bytecode. Usage::

    python -m graft.tools.grammar_rounds ../shared/data/maskbench \\
        --tokenizer ../shared/data/tokenizers/deepseek-128k.json.gz \\
        --json tools/results/grammar_rounds.json

graft's steps are timed by the worker's own clock from entry to exit: called directly, by the thread
that calls the stock APIs too, and as host nodes of a replayed graph (``GRAFT_DEVICE=soft`` will do:
they are work of a CPU). The stock calls are timed from the first to the last, the way back into
Python between them included. The bar for time compares calls of one thread, that beside a busy
thread what a round's graph waits for.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import platform
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tqdm import tqdm

from graft.cudagraph.errors import GraftError, OptionError
from graft.grammar import GrammarBackend, Vocabulary, make_backend
from graft.tools.rounds_graft import Graft, GraftInGraph
from graft.tools.rounds_streams import Episode, Move, documents, record
from graft.tools.rounds_subjects import (
    LLGuidanceLoop,
    LLGuidancePar,
    Subject,
    XGrammarBatch,
    XGrammarLoop,
)
from graft.tools.stock_llguidance import StockLLGuidance

STOCK: dict[str, tuple[Any, Any]] = {
    "xgrammar": (XGrammarLoop, XGrammarBatch),
    "llguidance": (LLGuidanceLoop, LLGuidancePar),
}
#: What must hold: graft's fills, its time, and its p99 beside a busy thread, each over theirs.
BARS = {"fills": 4 / 7, "time": 0.7, "busy_p99": 0.1}


class Busy:
    """A Python thread that does nothing but bytecode, as long as the context lasts."""

    def __enter__(self) -> Busy:
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        count = 0
        while not self._stop:
            count += 1

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


class Match:
    """Compares the mask rows of all subjects with graft's.

    Where two differ, a matcher that has only ever moved forward says which is wrong.
    """

    def __init__(self, subjects: Sequence[Subject], backend: GrammarBackend, name: str):
        self._subjects, self._name = subjects, name
        vocabulary = self._vocabulary = backend.vocabulary
        known = np.zeros(vocabulary.words * 32, bool)
        known[: len(vocabulary.tokens)] = [bool(text) for text in vocabulary.tokens]
        known[list(vocabulary.stop_ids)] = True
        # XGrammar also sets the bits of ids that are no text, which graft clears
        self._known = np.packbits(known, bitorder="little").view(np.int32)
        self._stop = vocabulary.stop_ids[0]
        self._oracle: GrammarBackend | None = None
        self.rows = 0
        self.wrong = {subject.name: 0 for subject in subjects}

    def begin(self, episode: Episode) -> None:
        """Follow another episode."""
        self._documents = episode.documents
        self._done = [list(prefix) for prefix in episode.prefixes]

    def check(self, moves: Sequence[Move], subjects: Sequence[Subject]) -> None:
        """Compare the rows that the subjects have made in a round."""
        first = self._subjects[0]
        others = [subject for subject in subjects if subject is not first]
        for move in moves:
            before = list(self._done[move.slot])
            self._done[move.slot] += move.tokens
            tested = [draft for draft in move.tested if draft != self._stop]
            for subject in others:
                self._compare(move.slot, before, tested, subject, "verify", len(tested) + 1)
                after = self._done[move.slot]
                self._compare(move.slot, after, move.drafts, subject, "draft", len(move.drafts))

    def _compare(self, slot: int, tokens: list[int], drafts: Sequence[int], subject: Subject,
                 stage: str, rows: int) -> None:  # fmt: skip
        self.rows += rows
        ours = getattr(self._subjects[0], stage)[slot]
        theirs = getattr(subject, stage)[slot]
        same = (theirs[:rows] & self._known == ours[:rows]).all(axis=1)
        for j in np.flatnonzero(~same).tolist():
            right = self._right(slot, [*tokens, *drafts[:j]])
            self.wrong[self._subjects[0].name] += int((ours[j] != right).any())
            self.wrong[subject.name] += int((theirs[j] & self._known != right).any())

    def _right(self, slot: int, tokens: list[int]) -> np.ndarray:
        if self._oracle is None:
            self._oracle = (
                StockLLGuidance(self._vocabulary) if self._name == "llguidance"
                else make_backend(self._name, self._vocabulary)
            )
        matcher = self._oracle.matcher(self._oracle.compile(self._documents[slot].compiled.spec))
        for token in tokens:
            matcher.accept(token)
        row = np.zeros(self._vocabulary.words, np.int32)
        matcher.fill(row)
        return row


def measure(subjects: Sequence[Subject], episodes: Sequence[Episode], match: Match | None,
            most_s: float, bar: Any, beside: Any = nullcontext,
            ) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Play episodes with every subject in turn; nanoseconds per round and fills, by subject.

    A subject whose rounds have taken more than `most_s` seconds sits out what follows. Rows are
    compared where there is a `match`; times are then not to be used. Rounds, and not the making of
    matchers before them, are played within the context that ``beside`` gives.
    """
    for subject in subjects:
        subject.keep = match is not None
    spent: dict[str, list[int]] = {subject.name: [] for subject in subjects}
    fills = dict.fromkeys(spent, 0)
    playing = list(subjects)
    for number, episode in enumerate(episodes):
        for subject in playing:
            subject.begin(episode)
        if match is not None:
            match.begin(episode)
        with beside():
            for index, moves in enumerate(episode.rounds):
                if not moves or not playing:
                    break
                turn = (number + index) % len(playing)
                for subject in (*playing[turn:], *playing[:turn]):
                    before = subject.fills
                    nanoseconds = subject.play(moves)
                    if index:  # the first round has nothing to verify yet
                        spent[subject.name].append(nanoseconds)
                        fills[subject.name] += subject.fills - before
                playing = [s for s in playing if sum(spent[s.name]) <= most_s * 1e9]
                if match is not None:
                    match.check(moves, playing)
                bar.update()
    return {name: {"ns": spent[name], "fills": fills[name]} for name in spent}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Rounds, fills, and milliseconds of one subject."""
    ms = np.asarray(found["ns"], float) / 1e6
    return {
        "rounds": len(ms), "fills": found["fills"], "sum_ms": round(float(ms.sum()), 3),
        **{f"p{q}_ms": round(float(np.quantile(ms, q / 100)), 4) for q in (50, 99)},
        "max_ms": round(float(ms.max()), 4),
    }  # fmt: skip


def ratios(idle: dict[str, Any], busy: dict[str, Any]) -> dict[str, float]:
    """graft over the faster stock subject, the faster one chosen for each figure.

    ``busy_p99_plain`` is against the plain loop, whatever the other way takes.
    """
    ours, in_graph = idle[Graft.name], idle[GraftInGraph.name]
    theirs = [idle[name] for name in idle if not name.startswith("graft")]
    stalls = {name: busy[name]["p99_ms"] for name in busy if not name.startswith("graft")}
    plain = next(stalls[name] for name in stalls if name.endswith("plain loop"))
    late = busy[GraftInGraph.name]["p99_ms"]
    fastest = min(t["sum_ms"] for t in theirs)
    return {
        "fills": ours["fills"] / min(t["fills"] for t in theirs),
        "time": ours["sum_ms"] / fastest,
        "busy_p99": late / min(stalls.values()),
        "busy_p99_plain": late / plain,
        "time_in_graph": in_graph["sum_ms"] / fastest,
    }


def run(name: str, backend: GrammarBackend, tokenizer: tokenizers.Tokenizer,
        options: argparse.Namespace) -> dict[str, Any]:  # fmt: skip
    """One backend's report."""
    found = list(tqdm(
        documents(options.folder, backend, tokenizer, count=options.documents,
                  shortest=options.shortest, seed=options.seed),
        total=options.documents, unit="document", desc=name, disable=not sys.stderr.isatty(),
    ))  # fmt: skip
    if not found:
        raise GraftError(f"grammar rounds: {name} takes none of the instances in {options.folder}")
    rng = np.random.default_rng(options.seed)
    episodes = [
        record(found, slots=options.slots, rounds=options.rounds + 1, wrong=options.wrong,
               draft_length=options.draft_length, rng=rng)
        for _ in tqdm(range(options.episodes + options.busy_episodes), unit="episode", desc=name,
                      disable=not sys.stderr.isatty())
    ]  # fmt: skip
    shape = (backend, options.slots, options.draft_length)
    loop, batch = STOCK[name]
    threads = options.threads
    subjects: list[Subject] = [
        Graft(*shape, threads=threads), GraftInGraph(*shape, threads=threads),
        loop(*shape), batch(*shape, threads=threads),
    ]  # fmt: skip
    match = Match(subjects, backend, name)
    quiet, hogged = episodes[: options.episodes], episodes[options.episodes :]
    checked = quiet[: options.check_episodes]
    with tqdm(total=len([*checked, *episodes]) * (options.rounds + 1), unit="round", desc=name,
              disable=not sys.stderr.isatty()) as bar:  # fmt: skip
        measure(subjects, checked, match, math.inf, bar)
        idle = measure(subjects, quiet, None, math.inf, bar)
        busy = measure(subjects[1:], hogged, None, options.busy_s, bar, Busy)
    for subject in subjects:
        subject.close()
    moves = [move for e in episodes for moves in e.rounds[1:] for move in moves]
    idle_summary = {subject: summary(figures) for subject, figures in idle.items()}
    busy_summary = {subject: summary(figures) for subject, figures in busy.items()}
    figures = ratios(idle_summary, busy_summary)
    return {
        "documents": len(found),
        "tokens_per_document": round(float(np.mean([len(d.tokens) for d in found])), 1),
        "moves": len(moves),
        "slots_running": round(len(moves) / sum(len(e.rounds) - 1 for e in episodes), 2),
        "acceptance_length": round(float(np.mean([len(move.tokens) for move in moves])), 3),
        "threads": threads, "idle": idle_summary, "busy": busy_summary,
        "ratios": {key: round(value, 4) for key, value in figures.items()},
        "bars": {key: round(value, 4) for key, value in BARS.items()},
        "holds": {key: bool(figures[key] <= BARS[key] + 1e-9) for key in BARS},
        "rows_compared": match.rows, "rows_wrong": match.wrong,
    }  # fmt: skip


def table(name: str, report: dict[str, Any]) -> str:
    """One backend's report as text."""
    head = ["subject", "GIL", "rounds", "fills", "sum ms", "p50 ms", "p99 ms", "max ms"]
    lines = [head]
    for state in ("idle", "busy"):
        for subject, s in report[state].items():
            lines.append([subject, state, str(s["rounds"]), str(s["fills"]),
                          *(f"{s[key]:.3f}" for key in ("sum_ms", "p50_ms", "p99_ms", "max_ms"))])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rows = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    most = max(s["rounds"] for s in report["busy"].values())
    bars = "; ".join(
        f"{key} {report['ratios'][key]:.3f} (bar {report['bars'][key]:.3f}"
        f"{'' if report['holds'][key] else ', MISSED'})"
        for key in BARS
    )
    return "\n".join((
        f"{name}: {report['slots_running']} slots running, acceptance length "
        f"{report['acceptance_length']}, threads {report['threads']}, "
        f"{report['rows_compared']} mask rows compared, wrong: {report['rows_wrong']}",
        *rows, f"graft over the faster stock way: {bars}; time in a graph "
        f"{report['ratios']['time_in_graph']:.3f}; busy_p99 over the plain loop's "
        f"{report['ratios']['busy_p99_plain']:.3f}",
        *(f"{subject} sat out what followed after {s['rounds']} rounds beside the busy thread"
          for subject, s in report["busy"].items() if s["rounds"] < most),
    ))  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m graft.tools.grammar_rounds",
                                   description=(__doc__ or "").split("\n\n")[0])  # fmt: skip
    made.add_argument("folder", type=Path, help="folder of .jsonl(.gz) files of schemas")
    made.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json, or its .gz")
    made.add_argument("--backends", nargs="+", choices=list(STOCK), default=list(STOCK))
    made.add_argument("--slots", type=int, default=64)
    made.add_argument("--draft-length", type=int, default=3)
    made.add_argument("--threads", type=int, default=1, help="of every subject but plain loops")
    made.add_argument("--rounds", type=int, default=10, help="measured rounds of an episode")
    made.add_argument("--episodes", type=int, default=30, help="episodes with an idle GIL")
    made.add_argument("--check-episodes", type=int, default=4,
                      help="episodes played before, to compare all mask rows")  # fmt: skip
    made.add_argument("--busy-episodes", type=int, default=10, help="episodes with a busy one")
    made.add_argument("--busy-s", type=float, default=30,
                      help="seconds of rounds beside a busy GIL after which a subject sits out the "
                      "rest: a plain loop takes seconds a round")  # fmt: skip
    made.add_argument("--documents", type=int, default=150)
    made.add_argument("--shortest", type=int, default=64, help="tokens of the shortest document")
    made.add_argument("--wrong", type=float, default=0.3, help="share of wrong drafts")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, help="write the results here")
    return made


def load(path: Path) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """A tokenizer and its vocabulary, ended by its end-of-text token."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    tokenizer = tokenizers.Tokenizer.from_str(text)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    ends = [i for text, i in added.items() if "end" in text and "think" not in text]
    if not ends:
        raise OptionError(f"grammar rounds: {path.name} has no end-of-text token")
    return tokenizer, Vocabulary.from_tokenizer(tokenizer, size, ends[:1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all backends; refusals are one line on stderr and exit status 2."""
    options = parser().parse_args(arguments)
    load_before = [round(value, 2) for value in os.getloadavg()]
    try:
        if min(options.slots, options.draft_length, options.threads, options.rounds,
               options.episodes, options.busy_episodes, options.documents) < 1:  # fmt: skip
            raise OptionError("grammar rounds: sizes and counts must be at least 1")
        tokenizer, vocabulary = load(options.tokenizer)
        reports = {}
        for name in options.backends:
            reports[name] = run(name, make_backend(name, vocabulary), tokenizer, options)
            print(table(name, reports[name]), flush=True)
    except (GraftError, OSError) as error:
        print(f"graft: {error}", file=sys.stderr)
        return 2
    if options.json:
        plain = {key: value for key, value in vars(options).items() if key not in ("json",)}
        plain |= {"folder": options.folder.name, "tokenizer": options.tokenizer.name}
        report = {
            "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}, no GPU involved",
            "vocabulary": vocabulary.size, "switch_interval_s": sys.getswitchinterval(),
            "load_before": load_before, "options": plain, "backends": reports,
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    ours = (Graft.name, GraftInGraph.name)
    return int(any(report["rows_wrong"][name] for report in reports.values() for name in ours))


if __name__ == "__main__":
    sys.exit(main())
