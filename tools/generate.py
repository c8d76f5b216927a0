"""``graft generate``: one prompt or a file of prompts, each guided by at most one grammar."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from graft.cudagraph.errors import OptionError
from graft.grammar.errors import GrammarError
from graft.models.engine import Engine
from graft.models.request import VERIFY_MODES, Output, Request
from graft.tools.demo_model import demo_model
from graft.tools.grammar_options import (
    GRAMMAR_KEYS,
    GRAMMARS,
    add_grammar_arguments,
    given_grammar,
    make_grammar,
    read_text,
)
from graft.tools.trace.rounds import trace_rounds
from graft.tools.trace.timeline import check_trace_path, write_trace
from graft.tools.validity import is_valid

#: Fields of a row of --prompts that go into the request as they are.
PASSED = ("prompt", "messages", "tokens", "max_tokens", "temperature", "top_k", "top_p", "min_p",
          "seed", "verify", "stop", "stop_ids", "id")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``graft generate``."""
    models = parser.add_argument_group("models")
    models.add_argument("--model", type=Path, help="target folder (default: the demo model)")
    models.add_argument("--draft", type=Path, help="EAGLE-3 folder (default: the demo model's)")
    models.add_argument("--draft-length", type=int, default=3, help="drafts per round (default 3)")
    models.add_argument("--no-speculation", action="store_true", help="decode without a drafter")
    models.add_argument("--no-draft-mask", action="store_true", help="draft without the grammar")
    models.add_argument("--draft-legality", choices=("fill", "probe"), default="fill",
                        help="draw drafts under filled mask rows, or have the grammar test the "
                             "drafter's candidates (default fill)")
    models.add_argument("--forced-drafts", action="store_true",
                        help="draft what the grammar forces; outputs stay the same")
    models.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True,
                        help="launch a round before the last one was read (default: yes)")
    models.add_argument("--max-batch-size", type=int, default=8, help="slots (default 8)")

    prompts = parser.add_argument_group("prompts").add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", help="the text to answer")
    prompts.add_argument("--prompts", type=Path, metavar="FILE.jsonl",
                         help="one request per line: prompt or messages, and optionally id, "
                              "what the grammar and sampling flags say, by name, for example "
                              "json_object or max_tokens; schemas and tags may be objects")

    add_grammar_arguments(parser)

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=256)
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    sampling.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    sampling.add_argument("--min-p", type=float, default=0.0, help="0 is off (default)")
    sampling.add_argument("--seed", type=int, help="of the first prompt; the next has seed + 1")
    sampling.add_argument("--stop", action="append", default=[], help="stop string; may repeat")
    sampling.add_argument("--verify", choices=VERIFY_MODES, default="rejection")

    output = parser.add_argument_group("output")
    output.add_argument("--trace", type=Path, metavar="FILE.json",
                        help="write the rounds' timeline for Perfetto, and one round as FILE.svg")
    output.add_argument("--json", action="store_true", help="outputs and figures as JSON")
    output.add_argument("--stream", action="store_true", help="print text as rounds bring it")
    parser.set_defaults(run=run)


class Asked(NamedTuple):
    """A request with the choices it was given, which its grammar no longer shows."""

    request: Request
    choices: list[str] | None
    refusal: str | None = None

    def is_valid(self, text: str) -> bool | None:
        """Whether an output obeys the grammar; None when nothing independent can tell."""
        grammar = self.request.grammar
        if grammar is not None and grammar.marker is not None:
            _, marker, text = text.partition(grammar.marker.text or "\0")
            if not marker:  # it is a token that is no text, or it never came
                return None
        if self.choices is not None:
            return text in self.choices
        return is_valid(grammar, text)


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Sampling options of the command line, as fields of a row of --prompts."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "verify")
    sampling = {name: getattr(options, name) for name in names}
    return sampling | {"stop": tuple(options.stop)}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file, blank lines left out; names the line of what is no row."""
    rows = []
    for number, line in enumerate(read_text(path, "--prompts").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise OptionError(f"--prompts {path}, line {number}: {error}") from error
        if not isinstance(row, dict):
            raise OptionError(f"--prompts {path}, line {number}: a row must be an object")
        unknown = sorted(set(row) - {*PASSED, *GRAMMAR_KEYS})
        if unknown:
            raise OptionError(f"--prompts {path}, line {number}: unknown {', '.join(unknown)}")
        rows.append(row)
    if not rows:
        raise OptionError(f"--prompts {path} holds no prompt")
    return rows


def _with_defaults(own: dict[str, Any], grammar: dict[str, Any]) -> dict[str, Any]:
    """A row's grammar in place of the options'; what goes with a grammar each by itself."""
    if any(name in own for name in GRAMMARS):
        order = {"key_order": grammar["key_order"]} if "schema" in own else {}
        return {"after": grammar["after"]} | order | own
    stated = any(grammar[name] is not None for name in GRAMMARS)
    return (grammar if stated else {}) | own


def read_requests(options: argparse.Namespace) -> list[Asked]:
    """Requests of the command line; what a row of --prompts says wins over the options."""
    sampling, grammar = _sampling(options), given_grammar(options)
    rows = [{"prompt": options.prompt}] if options.prompts is None else read_rows(options.prompts)
    asked = []
    for index, row in enumerate(rows):
        fields = sampling | {name: row[name] for name in PASSED if name in row}
        if options.seed is not None:
            fields.setdefault("seed", options.seed + index)
        fields.setdefault("id", str(index))
        own = {name: row[name] for name in GRAMMAR_KEYS if row.get(name) is not None}
        try:
            spec, choices = make_grammar(_with_defaults(own, grammar), options.partial)
        except GrammarError as error:
            asked.append(Asked(Request(**fields), None, str(error)))  # the other rows go on
            continue
        asked.append(Asked(Request(**fields, grammar=spec), choices))
    return asked


def open_engine(options: argparse.Namespace, batch: int) -> Engine:
    """The engine that the options describe, with no more slots than there are requests."""
    target, drafter = options.model, options.draft
    if target is None:
        if drafter is not None:
            raise OptionError("--draft needs the --model that it was trained for")
        target, drafter = demo_model()
    if options.no_speculation:
        drafter = None
    return Engine(target, drafter, max_batch_size=min(options.max_batch_size, max(batch, 1)),
                  draft_length=options.draft_length, mask_drafts=not options.no_draft_mask,
                  grammar_backend=options.backend,
                  draft_legality=options.draft_legality, forced_drafts=options.forced_drafts,
                  verify=options.verify, overlap=options.overlap)


def run_requests(engine: Engine, requests: Sequence[Request], stream: bool) -> list[Output]:
    """Outputs in the order of the requests; with `stream`, text is printed as it comes."""
    if not stream:
        return engine.generate(requests)
    done: dict[str, Output] = {}
    for event in engine.stream(requests):
        label = "" if len(requests) == 1 else f"[{event.id}] "
        if label and event.text:
            print(f"{label}{event.text!r}", flush=True)
        elif event.text:
            print(event.text, end="", flush=True)
        if event.output is not None:
            done[event.id] = event.output
    if len(requests) == 1:
        print()
    return [done[str(request.id)] for request in requests]


@contextmanager
def tracing(engine: Engine, path: Path | None) -> Iterator[None]:
    """Trace what runs inside, and write it when a path is given."""
    if path is None:
        yield
        return
    with trace_rounds(engine) as trace:
        yield
    write_trace(trace, path)


def report(engine: Engine, asked: Sequence[Asked], outputs: Sequence[Output],
           seconds: float) -> dict[str, Any]:
    """Everything ``--json`` prints."""
    stats = engine.stats
    tokens = sum(len(output.tokens) for output in outputs)
    rows = [dataclasses.asdict(output) | {"finished": output.finished,
                                          "valid": one.is_valid(output.text)}
            for one, output in zip(asked, outputs, strict=True)]
    return {
        "device": engine.device.describe(),
        "outputs": rows,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "rounds": stats.rounds,
        "tokens_per_round": stats.tokens_per_round,
        "acceptance_length": stats.acceptance_length,
        "acceptance": stats.acceptance,
        "part_share": stats.part_share,
        "exposed_share": stats.exposed_share,
        "options": {"draft_length": engine.options.draft_length,
                    "mask_drafts": engine.options.mask_drafts,
                    "draft_legality": engine.options.draft_legality, "verify": engine.options.verify,
                    "overlap": engine.options.overlap},
    }


def run(options: argparse.Namespace) -> int:
    """Generate and print; returns 2 when a request was refused, 1 when one failed otherwise."""
    if options.json and options.stream:
        raise OptionError("--json prints once at the end; --stream prints on the way; use one")
    if options.trace is not None:
        check_trace_path(options.trace)
    asked = read_requests(options)
    requests = [one.request for one in asked if one.refusal is None]
    with open_engine(options, len(requests)) as engine:
        begun = time.perf_counter()
        with tracing(engine, options.trace):
            served = iter(run_requests(engine, requests, options.stream))
        outputs = [
            next(served) if one.refusal is None
            else Output(id=str(one.request.id), reason="refused", error=one.refusal)
            for one in asked
        ]  # fmt: skip
        figures = report(engine, asked, outputs, time.perf_counter() - begun)
    if options.json:
        print(json.dumps(figures, indent=1, ensure_ascii=False))
    else:
        for one, output, row in zip(asked, outputs, figures["outputs"], strict=True):
            if not options.stream and not output.error:
                print(output.text if len(outputs) == 1 else f"[{output.id}] {output.text}")
            if output.error:
                print(f"graft: request {output.id} {output.reason}: {output.error}",
                      file=sys.stderr)
            elif output.reason not in ("stop", "stop_string"):
                print(f"graft: request {output.id} ended by {output.reason}", file=sys.stderr)
            if one.request.grammar is not None and one.request.grammar.partial:
                said = "satisfies" if row["valid"] else "DOES NOT satisfy"
                print(f"graft: request {output.id}, not enforced in full, {said} its schema",
                      file=sys.stderr)
        if figures["tokens"]:
            print(f"graft: {figures['device']}; {figures['tokens']} tokens in "
                  f"{figures['rounds']} rounds, {figures['tokens_per_round']:.2f} tokens per round",
                  file=sys.stderr)
    reasons = {output.reason for output in outputs}
    return 2 if "refused" in reasons else 1 if reasons & {"error", "dead_end"} else 0
