"""``graft generate``: one prompt or a file of prompts, each guided by at most one grammar."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from graft.cudagraph.errors import GraftError, OptionError
from graft.grammar.resolve import resolve_spec
from graft.models.engine.engine import Engine
from graft.models.llm.weights import WEIGHTS
from graft.models.request import VERIFY_MODES, Output, Request
from graft.tools.demo_model import DRAFTERS, demo_model
from graft.tools.grammar_options import add_grammar_arguments
from graft.tools.prompt_rows import Asked, read_requests
from graft.tools.trace.rounds import trace_rounds
from graft.tools.trace.timeline import check_trace_path, write_trace


def read_length(text: str) -> int | str:
    """How many drafts."""
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number and not auto")
    return text if text == "auto" else int(text)


def read_tree(text: str) -> tuple[Any, ...]:
    """Branch and levels of BRANCHxLEVELS, or a tree's paths: 0,1,0.0 are (0,), (1,) and (0, 0)."""
    try:
        if "x" in text:
            branch, levels = map(int, text.split("x"))
            return branch, levels
        return tuple(tuple(map(int, path.split("."))) for path in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no tree, such as 4x5 or 0,1,0.0") from None


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `open_engine` reads, but for --backend and --verify."""
    models = parser.add_argument_group("models")
    models.add_argument("--model", type=Path, help="target folder (default: the demo model)")
    models.add_argument(
        "--draft",
        metavar="FOLDER|MODULE:NAME",
        help="drafter's folder, or one of your own; of the demo model "
        f"{' or '.join(DRAFTERS)} (default {DRAFTERS[0]})",
    )
    models.add_argument(
        "--draft-length",
        type=read_length,
        default=3,
        metavar="N|auto",
        help="drafts per round, or as many as pay (default 3)",
    )
    models.add_argument("--no-speculation", action="store_true", help="decode without a drafter")
    models.add_argument("--no-draft-mask", action="store_true", help="draft without the grammar")
    models.add_argument(
        "--draft-tree",
        type=read_tree,
        metavar="BRANCHxLEVELS|PATHS",
        help="let drafts branch, e.g. 4x5 or 0,1,0.0 (default: a chain)",
    )
    models.add_argument(
        "--draft-masking",
        choices=("fill", "probe"),
        default="fill",
        help="draw drafts under filled mask rows, or have the grammar test the "
        "drafter's candidates (default fill)",
    )
    models.add_argument(
        "--forced-drafts",
        action="store_true",
        help="draft what the grammar forces; outputs stay the same",
    )
    models.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="launch a round before the last one was read (default: yes)",
    )
    models.add_argument(
        "--composition",
        choices=("one", "two"),
        default="one",
        help="graphs of a round; two: the drafter has its own, to compare",
    )
    models.add_argument(
        "--weights",
        choices=WEIGHTS,
        default=WEIGHTS[0],
        help="of the target's layers; fp8: rounded to 8 bits, row by row",
    )
    models.add_argument(
        "--parallel",
        action="store_true",
        help="hold the target together with the other processes of mpiexec (needs "
        "the extra parallel)",
    )
    models.set_defaults(ranks=None)
    models.add_argument("--max-batch-size", type=int, default=8, help="slots (default 8)")
    models.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="positions of a request, prompt and output (default: the model's, at most 4096)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``graft generate``."""
    add_model_arguments(parser)
    prompts = parser.add_argument_group("prompts").add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", help="the text to answer")
    prompts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help="one request per line (-: of standard input): prompt or messages, "
        "and optionally id, raw, tools and variables of the chat template, "
        "and what the grammar and sampling flags say, by name, for example "
        "json_object or max_tokens; schemas and tags may be objects",
    )
    parser.add_argument(
        "--raw", action="store_true", help="prompts stand as they are, without the chat template"
    )

    add_grammar_arguments(parser)

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=256)
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    sampling.add_argument("--top-k", type=int, default=0, help="0 is off (default)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="1 is off (default)")
    sampling.add_argument("--min-p", type=float, default=0.0, help="0 is off (default)")
    sampling.add_argument("--seed", type=int, help="of the first prompt; the next has seed + 1")
    sampling.add_argument("--n", type=int, default=1, help="completions of each prompt (default 1)")
    sampling.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=V",
        help="add to the logit of a token id; may repeat",
    )
    for name, off in (("presence", 0), ("frequency", 0), ("repetition", 1)):
        sampling.add_argument(
            f"--{name}-penalty", type=float, default=float(off), help=f"{off} is off (default)"
        )
    sampling.add_argument("--min-tokens", type=int, default=0, help="tokens before a stop id")
    sampling.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json, log probabilities of tokens and of the N best",
    )
    sampling.add_argument(
        "--logprobs-masked",
        action="store_true",
        help="of what bias, penalties and the grammar leave",
    )
    sampling.add_argument("--stop", action="append", default=[], help="stop string; may repeat")
    sampling.add_argument("--verify", choices=VERIFY_MODES, default="rejection")

    output = parser.add_argument_group("output")
    output.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="write the rounds' timeline for Perfetto, and one round as FILE.svg",
    )
    output.add_argument("--json", action="store_true", help="outputs and figures as JSON")
    output.add_argument("--stream", action="store_true", help="print text as rounds bring it")
    parser.set_defaults(run=run)


def _bias(text: str) -> tuple[int, float]:
    """ID=V of --logit-bias."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no bias, such as 5=-2.5") from None


def open_engine(options: argparse.Namespace, batch: int, **more: Any) -> Engine:
    """The engine that the options describe, with no more slots than there are requests; `more` are
    its own."""
    target = options.model
    drafter = options.draft
    if target is None:
        if drafter not in (None, *DRAFTERS):
            raise OptionError("--draft needs the --model that it was trained for")
        target, drafter = demo_model(drafter or DRAFTERS[0])
    if options.no_speculation:
        if options.draft or options.draft_tree:
            raise OptionError("--no-speculation leaves --draft and --draft-tree nothing to do")
        drafter = None
    return Engine(
        target,
        drafter,
        ranks=options.ranks,
        draft_length=options.draft_length,
        max_batch_size=min(options.max_batch_size, max(batch, 1)),
        draft_tree=options.draft_tree,
        mask_drafts=not options.no_draft_mask,
        grammar_backend=options.backend,
        draft_masking=options.draft_masking,
        forced_drafts=options.forced_drafts,
        verify=options.verify,
        overlap=options.overlap,
        composition=options.composition,
        max_length=options.max_length,
        weights=options.weights,
        **more,
    )


def run_requests(engine: Engine, requests: Sequence[Request], stream: bool) -> list[Output]:
    """Outputs in the order of the requests; with `stream`, text is printed as it comes."""
    if not stream:
        return engine.generate(requests, progress=sys.stderr.isatty())
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


def report(
    engine: Engine, asked: Sequence[Asked], outputs: Sequence[Output], seconds: float
) -> dict[str, Any]:
    """Everything ``--json`` prints."""
    stats = engine.stats
    tokens = sum(len(output.tokens) for output in outputs)
    rows = [
        dataclasses.asdict(output)
        | {"finished": output.finished, "valid": one.is_valid(output.text)}
        for one, output in zip(asked, outputs, strict=True)
    ]
    return {
        "device": engine.device.describe(),
        "outputs": rows,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "rounds": stats.rounds,
        "rounds_by_length": stats.rounds_by_length,
        "tokens_per_round": stats.tokens_per_round,
        "acceptance_length": stats.acceptance_length,
        "acceptance": stats.acceptance,
        "part_share": stats.part_share,
        "exposed_share": stats.exposed_share,
        "options": {
            "draft_length": engine.options.draft_length,
            "draft_tree": engine.options.draft_tree,
            "mask_drafts": engine.options.mask_drafts,
            "draft_masking": engine.options.draft_masking,
            "verify": engine.options.verify,
            "overlap": engine.options.overlap,
            "composition": engine.options.composition,
            "grammar_backend": engine.options.grammar_backend,
        },
    }


def run(options: argparse.Namespace) -> int:
    """Generate and print.

    Returns
    -------
    int
        2 when a request was refused; else 1 when one failed, a guided output was cut, or the trace
        could not be written; else 0.
    """
    if options.json and options.stream:
        raise OptionError("--json prints once at the end; --stream prints on the way; use one")
    if options.logprobs is not None and not options.json:
        raise OptionError("--logprobs goes with --json")
    if options.trace is not None:
        check_trace_path(options.trace)
    asked = read_requests(options)
    rows = sum(len(one.request.samples()) for one in asked if one.refusal is None)
    timeline = options.json or options.trace is not None
    with open_engine(options, rows, timeline=timeline) as engine:
        asked, requests = make_prompts(asked, engine)
        begun = time.perf_counter()
        with nullcontext() if options.trace is None else trace_rounds(engine) as trace:
            served = iter(run_requests(engine, requests, options.stream))
        outputs = [
            next(served)
            if one.refusal is None
            else Output(id=str(one.request.id), reason="refused", error=one.refusal)
            for one in asked
        ]
        figures = report(engine, asked, outputs, time.perf_counter() - begun)
    if options.json:
        escaped = (sys.stdout.encoding or "").lower() not in ("utf-8", "utf8")
        print(json.dumps(figures, indent=1, ensure_ascii=escaped), flush=True)
    else:
        show(asked, outputs, figures, options.stream)
    status = exit_status(asked, outputs)
    if trace is not None:
        try:
            write_trace(trace, options.trace)
        except OSError as error:
            print(f"graft: --trace {options.trace}: {error}", file=sys.stderr)
            status = status or 1
    return status


def make_prompts(asked: Sequence[Asked], engine: Engine) -> tuple[list[Asked], list[Request]]:
    """Requests as the engine takes them; a row whose prompt cannot be made is refused alone."""
    kept = []
    requests = []
    for one in asked:
        made = [one.request]
        if one.refusal is None:
            try:
                made = one.for_engine(engine).samples()
                requests += made
            except GraftError as error:
                one = dataclasses.replace(one, refusal=str(error))
        kept += [dataclasses.replace(one, request=request) for request in made]
    return kept, requests


def show(
    asked: Sequence[Asked], outputs: Sequence[Output], figures: dict[str, Any], streamed: bool
) -> None:
    """Print the texts, and on stderr what there is to say of each."""
    for one, output, row in zip(asked, outputs, figures["outputs"], strict=True):
        if not streamed and not output.error:
            text = output.text if len(outputs) == 1 else f"[{output.id}] {output.text}"
            print(text, flush=True)
        if output.error:
            print(f"graft: request {output.id} {output.reason}: {output.error}", file=sys.stderr)
        elif output.reason not in ("stop", "stop_string"):
            print(f"graft: request {output.id} ended by {output.reason}", file=sys.stderr)
        grammar = one.request.grammar
        if (
            grammar is not None
            and grammar.partial
            and not output.error
            and resolve_spec(grammar, figures["options"]["grammar_backend"]).partial
        ):
            said = "satisfies" if row["valid"] else "DOES NOT satisfy"
            print(
                f"graft: request {output.id}, not enforced in full, {said} its schema",
                file=sys.stderr,
            )
    if figures["tokens"]:
        print(
            f"graft: {figures['device']}; {figures['tokens']} tokens in "
            f"{figures['rounds']} rounds, {figures['tokens_per_round']:.2f} tokens per round "
            "and request",
            file=sys.stderr,
        )


def exit_status(asked: Sequence[Asked], outputs: Sequence[Output]) -> int:
    """The worst of what the requests came to."""
    reasons = {output.reason for output in outputs}
    cut = any(
        one.request.grammar is not None and output.reason not in ("stop", "refused")
        for one, output in zip(asked, outputs, strict=True)
    )
    return 2 if "refused" in reasons else 1 if cut or reasons & {"error", "dead_end"} else 0
