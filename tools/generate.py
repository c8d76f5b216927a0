"""``graft generate``: generate outputs for a prompt or for a file of prompts.

The engine works in rounds. A round is one launch of a CUDA graph, in which the target model
verifies the drafts of each running request, and the drafter generates the next drafts.
"""

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
from graft.grammar.backends import llguidance
from graft.grammar.resolve import resolve_spec
from graft.models.engine.engine import Engine
from graft.models.engine.options import DRAFT_MASKINGS, Options, meaning
from graft.models.llm.weights import WEIGHTS
from graft.models.request import CLOSINGS, Output, Request
from graft.sampling.params import VERIFY_MODES, SamplingParams
from graft.tools.demo_model import DRAFTERS, demo_model
from graft.tools.grammar_options import BACKEND_CHOICES, add_grammar_arguments
from graft.tools.prompt_rows import PromptRow, read_requests
from graft.tools.trace.rounds import trace_rounds
from graft.tools.trace.timeline import check_trace_path, write_trace

#: Help texts of the sampling parameters whose options have a single value. The types and defaults
#: of these options are taken from `SamplingParams`.
_SAMPLING_HELP = {
    "temperature": "softmax temperature; 0: greedy decoding",
    "top_k": "sample from this number of most likely tokens; 0: from all tokens",
    "top_p": "sample from the most likely tokens with this total probability; 1: from all tokens",
    "min_p": "minimum probability of a token, relative to the most likely token; 0: none",
    "presence_penalty": "penalty on tokens that occur in the output; 0: none",
    "frequency_penalty": "penalty per occurrence in the output; 0: none",
    "repetition_penalty": "penalty on tokens of prompt and output; 1: none",
    "min_tokens": "minimum number of tokens before a stop id",
}

#: Engine options that ``--json`` reports.
_REPORTED_OPTIONS = (
    "draft_length",
    "draft_tree",
    "draft_masking",
    "verify",
    "generation",
    "grammar_backend",
)


def parse_draft_length(text: str) -> int | str:
    """Parse the value of ``--draft-length``: a number, or "auto"."""
    if text == "auto":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto")
    return int(text)


def parse_draft_tree(text: str) -> tuple[Any, ...]:
    """Parse the value of ``--draft-tree``.

    The value has one of two forms. ``4x5`` is a tree with branching factor 4 and 5 levels.
    ``0,1,0.0`` is a list with one path for each node: here (0,), (1,) and (0, 0). Each number of a
    path is the index of a child, starting at the root.
    """
    try:
        if "x" in text:
            branch, levels = map(int, text.split("x"))
            return branch, levels
        paths = [path.split(".") for path in text.split(",")]
        return tuple(tuple(map(int, path)) for path in paths)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a tree, such as 4x5 or 0,1,0.0"
        ) from None


def parse_logit_bias(text: str) -> tuple[int, float]:
    """Parse the value of ``--logit-bias``, which has the form ID=V."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a bias, such as 5=-2.5") from None


def option_help(name: str) -> str:
    """Return the help text of an engine option: its meaning, and its default if it has one."""
    text = meaning(name).rstrip(".")
    text = text[:1].lower() + text[1:]
    default = getattr(Options, name)
    if default is None or isinstance(default, bool):
        return text
    return f"{text} (default {default})"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `open_engine` reads, except --backend and --verify."""
    models = parser.add_argument_group("models")
    models.add_argument("--model", type=Path, help="target model folder (default: the demo model)")
    models.add_argument(
        "--weights", choices=WEIGHTS, default=WEIGHTS[0], help=option_help("weights")
    )
    models.add_argument(
        "--parallel",
        action="store_true",
        help="tensor parallelism over the processes of mpiexec (requires the extra parallel)",
    )
    models.set_defaults(ranks=None)
    models.add_argument("--max-batch-size", type=int, default=8, help=option_help("max_batch_size"))
    models.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help=f"{option_help('max_length')} (default: the model's maximum, at most 4096)",
    )
    _add_drafting_arguments(parser.add_argument_group("speculative decoding"))


def _add_drafting_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--draft",
        metavar="FOLDER|MODULE:NAME",
        help="folder of the drafter, or drafter class; for the demo model "
        f"{' or '.join(DRAFTERS)} (default {DRAFTERS[0]})",
    )
    group.add_argument(
        "--draft-length",
        type=parse_draft_length,
        default=3,
        metavar="N|auto",
        help=option_help("draft_length"),
    )
    group.add_argument("--no-speculation", action="store_true", help="decode without a drafter")
    group.add_argument(
        "--draft-tree",
        type=parse_draft_tree,
        metavar="BRANCHxLEVELS|PATHS",
        help="draft a tree instead of a chain: branching factor and number of levels, such as 4x5, "
        "or the path of each node from the root, such as 0,1,0.0",
    )
    group.add_argument(
        "--draft-masking", choices=DRAFT_MASKINGS, default="auto", help=option_help("draft_masking")
    )
    group.add_argument(
        "--forced-drafts", action="store_true", help="draft the tokens that the grammar forces"
    )
    group.add_argument(
        "--generation",
        choices=("rounds", "graph"),
        default="rounds",
        help=option_help("generation"),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``graft generate``."""
    add_model_arguments(parser)
    # The group is not declared as required: argparse would then report that an option is missing
    # even if the option is only misspelled.
    prompts = parser.add_argument_group("prompts").add_mutually_exclusive_group()
    prompts.add_argument("--prompt", help="prompt text")
    prompts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help="file with one request per line (-: standard input); a request is a JSON object with "
        "the key prompt, messages or tokens; optional keys are id, raw, tools, variables (for the "
        "chat template) and the names of grammar and sampling options, for example json_object or "
        "max_tokens; schemas and structural tags may be JSON objects",
    )
    parser.add_argument(
        "--raw", action="store_true", help="do not apply the chat template to prompts"
    )
    add_grammar_arguments(parser)
    _add_sampling_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="write a timeline of the decoding rounds for Perfetto, and a picture of one round to "
        "FILE.svg",
    )
    output.add_argument("--json", action="store_true", help="print outputs and statistics as JSON")
    output.add_argument("--stream", action="store_true", help="print text as it is generated")
    parser.set_defaults(run=run)


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens",
        type=int,
        default=256,
        help="maximum number of tokens to generate (default 256)",
    )
    sampling.add_argument(
        "--closing",
        choices=CLOSINGS,
        default=CLOSINGS[0],
        help="whether outputs with a grammar are complete within --max-tokens: auto: if the "
        "grammar's matcher can guarantee it; require: refuse other grammars; off: no (default "
        "auto)",
    )
    sampling.add_argument(
        "--max-reasoning-tokens",
        type=int,
        metavar="N",
        help="with --after, number of tokens within which the marker is complete",
    )
    defaults = SamplingParams()
    for name, text in _SAMPLING_HELP.items():
        default = getattr(defaults, name)
        sampling.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            help=f"{text} (default {default:g})",
        )
    sampling.add_argument(
        "--seed", type=int, help="seed of the first prompt; prompt i, counted from 0, uses seed + i"
    )
    sampling.add_argument(
        "--n", type=int, default=1, help="number of outputs per prompt (default 1)"
    )
    _add_logit_arguments(sampling)
    sampling.add_argument(
        "--stop", action="append", default=[], help="stop string; can be repeated"
    )
    sampling.add_argument(
        "--verify", choices=VERIFY_MODES, default="rejection", help=option_help("verify")
    )


def _add_logit_arguments(sampling: argparse._ArgumentGroup) -> None:
    sampling.add_argument(
        "--logit-bias",
        type=parse_logit_bias,
        action="append",
        default=[],
        metavar="ID=V",
        help="add V to the logit of a token id; can be repeated",
    )
    sampling.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json, report log probabilities of each token and of the N most likely tokens",
    )
    sampling.add_argument(
        "--logprobs-masked",
        action="store_true",
        help="report log probabilities after bias, penalties and grammar mask",
    )


def open_engine(options: argparse.Namespace, batch_size: int, **engine_options: Any) -> Engine:
    """Create the engine that the options of the command line describe.

    The engine has at most `batch_size` request slots; `batch_size` is the number of requests that
    will be submitted. `engine_options` are further arguments of `Engine`. Raise OptionError if
    options contradict each other.
    """
    target = options.model
    drafter = options.draft
    if target is None:
        if drafter not in (None, *DRAFTERS):
            raise OptionError("--draft requires the --model that the drafter was trained for")
        target, drafter = demo_model(drafter or DRAFTERS[0])
    if options.no_speculation:
        if options.draft or options.draft_tree:
            raise OptionError("--no-speculation cannot be combined with --draft or --draft-tree")
        drafter = None
    return Engine(
        target,
        drafter,
        ranks=options.ranks,
        draft_length=options.draft_length,
        max_batch_size=min(options.max_batch_size, max(batch_size, 1)),
        draft_tree=options.draft_tree,
        grammar_backend=options.backend,
        draft_masking=options.draft_masking,
        forced_drafts=options.forced_drafts,
        verify=options.verify,
        generation=options.generation,
        max_length=options.max_length,
        weights=options.weights,
        **engine_options,
    )


def run_requests(engine: Engine, requests: Sequence[Request], stream: bool) -> list[Output]:
    """Run requests and return their outputs in the same order.

    With `stream`, the text is printed as it is generated.
    """
    if not stream:
        return engine.generate(requests, progress=sys.stderr.isatty())
    outputs: dict[str, Output] = {}
    for event in engine.stream(requests):
        label = "" if len(requests) == 1 else f"[{event.id}] "
        if label and event.text:
            print(f"{label}{event.text!r}", flush=True)
        elif event.text:
            print(event.text, end="", flush=True)
        if event.output is not None:
            outputs[event.id] = event.output
    if len(requests) == 1:
        print()
    return [outputs[str(request.id)] for request in requests]


def make_report(
    engine: Engine, rows: Sequence[PromptRow], outputs: Sequence[Output], seconds: float
) -> dict[str, Any]:
    """Return the report that ``--json`` prints: outputs and statistics.

    `seconds` is the duration of the run.
    """
    stats = engine.stats
    tokens = sum(len(output.tokens) for output in outputs)
    reports = []
    for row, output in zip(rows, outputs, strict=True):
        derived = {"finished": output.finished, "valid": row.is_valid(output.text)}
        reports.append(dataclasses.asdict(output) | derived)
    return {
        "device": engine.device.describe(),
        "outputs": reports,
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
        "options": {name: getattr(engine.options, name) for name in _REPORTED_OPTIONS},
    }


def run(options: argparse.Namespace) -> int:
    """Generate and print the outputs, and return the exit status.

    The status is 2 if a request was refused; otherwise 1 if a request failed, a structured output
    was truncated, or the trace could not be written; otherwise 0.
    """
    if options.prompt is None and options.prompts is None:
        raise OptionError("one of the options --prompt and --prompts is required")
    if options.json and options.stream:
        raise OptionError("--json cannot be combined with --stream")
    if options.logprobs is not None and not options.json:
        raise OptionError("--logprobs requires --json")
    if options.trace is not None:
        check_trace_path(options.trace)
    rows = read_requests(options)
    batch_size = 0
    for row in rows:
        if row.refusal is None:
            batch_size += len(row.request.samples())
    timeline = options.json or options.trace is not None
    with open_engine(options, batch_size, timeline=timeline) as engine:
        rows, requests = prepare_requests(rows, engine)
        started = time.perf_counter()
        with nullcontext() if options.trace is None else trace_rounds(engine) as trace:
            served = iter(run_requests(engine, requests, options.stream))
        outputs = []
        for row in rows:
            if row.refusal is None:
                output = next(served)
            else:
                request_id = str(row.request.id)
                output = Output(
                    id=request_id, reason="refused", error=row.refusal, error_type=row.refusal_type
                )
            outputs.append(output)
        report = make_report(engine, rows, outputs, time.perf_counter() - started)
    if options.json:
        is_utf8 = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
        print(json.dumps(report, indent=1, ensure_ascii=not is_utf8), flush=True)
    else:
        print_outputs(rows, outputs, report, options.stream)
    status = exit_status(rows, outputs)
    if trace is not None:
        try:
            write_trace(trace, options.trace)
        except OSError as error:
            print(f"graft: --trace {options.trace}: {error}", file=sys.stderr)
            status = status or 1
    return status


def prepare_requests(
    rows: Sequence[PromptRow], engine: Engine
) -> tuple[list[PromptRow], list[Request]]:
    """Apply the chat template to the prompts, and create one request for each output of a row.

    Return the rows, repeated once per output, and the requests of all rows without a refusal. If
    the prompt of a row cannot be processed, this function adds a refusal to the row.
    """
    expanded = []
    accepted: list[Request] = []
    for row in rows:
        requests = [row.request]
        if row.refusal is None:
            try:
                requests = row.for_engine(engine).samples()
                accepted += requests
            except GraftError as error:
                row = dataclasses.replace(
                    row, refusal=str(error), refusal_type=type(error).__name__
                )
        expanded += [dataclasses.replace(row, request=request) for request in requests]
    return expanded, accepted


def print_outputs(
    rows: Sequence[PromptRow], outputs: Sequence[Output], report: dict[str, Any], streamed: bool
) -> None:
    """Print the texts of the outputs to stdout, and errors and statistics to stderr.

    If `streamed`, the texts are omitted, because they have already been printed.
    """
    for row, output, entry in zip(rows, outputs, report["outputs"], strict=True):
        if not streamed and not output.error:
            label = "" if len(outputs) == 1 else f"[{output.id}] "
            print(f"{label}{output.text}", flush=True)
        if output.error:
            print(f"graft: request {output.id} {output.reason}: {output.error}", file=sys.stderr)
        elif output.reason not in ("stop", "stop_string"):
            print(f"graft: request {output.id} ended by {output.reason}", file=sys.stderr)
        if not output.error and _is_partial(row, report["options"]["grammar_backend"]):
            verdict = "satisfies" if entry["valid"] else "DOES NOT satisfy"
            print(
                f"graft: request {output.id}: its schema is not enforced in full; the output "
                f"{verdict} it",
                file=sys.stderr,
            )
    if report["tokens"]:
        print(
            f"graft: {report['device']}; {report['tokens']} tokens in {report['rounds']} rounds, "
            f"{report['tokens_per_round']:.2f} tokens per round and request",
            file=sys.stderr,
        )


def _is_partial(row: PromptRow, backend: str) -> bool:
    """Return whether the backend may enforce only a part of a row's schema."""
    grammar = row.request.grammar
    if grammar is None or not grammar.partial:
        return False
    if not grammar.backend and backend not in BACKEND_CHOICES:
        return True  # graft does not know which keywords a user-defined backend enforces
    resolved = resolve_spec(grammar, backend)
    if not resolved.partial or resolved.backend != "llguidance":
        return resolved.partial
    # graft can enforce a schema that LLGuidance enforces only in part.
    return llguidance.is_partial(grammar)


def exit_status(rows: Sequence[PromptRow], outputs: Sequence[Output]) -> int:
    """Return the exit status of ``graft generate``, as `run` describes."""
    reasons = {output.reason for output in outputs}
    if "refused" in reasons:
        return 2
    if reasons & {"error", "dead_end"}:
        return 1
    for row, output in zip(rows, outputs, strict=True):
        if row.request.grammar is not None and output.reason != "stop":
            return 1  # truncated
    return 0
