"""Benchmark of speculative decoding by drafter, draft length, tree, masking and temperature.

    python -m graft.tools.bench.speculation [--drafters forced ngram eagle] [--lengths 2 6]
        [--trees 2x4] [--masking auto none] [--temperatures 0] [--batches 1 8]
        [--json FILE] [--chart FILE]

A drafter is given by one of these names:

``forced``
    Drafts the tokens that the grammar forces.
``ngram``, ``suffix``
    Prompt-lookup drafters.
``eagle``, ``dflash``
    Drafters of the demo model.
FOLDER, MODULE:NAME
    Drafter checkpoint, or drafter class of a Python module.
``ngram+X``, ``suffix+X``, ``forced+X``
    Drafts of the first drafter, extended by drafts of drafter X.

A round verifies the drafts of the requests in a batch with one forward pass of the target model.
Drafts are masked if the drafter samples them only from tokens that the grammar allows. The
acceptance length is the mean number of tokens, including the bonus token, that a round with drafts
commits.

Runs of each configuration alternate with runs of the same requests without speculation. The speedup
is the ratio of their throughputs. Intervals are 95 % confidence intervals that treat prompts as
independent samples.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
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
from graft.tools.bench.harness import add_chart_option, finish, make_parser, number_from
from graft.tools.bench.speculation_metrics import (
    CONFIGURATION_KEYS,
    RequestRound,
    acceptance_by_depth,
    differences,
    length_estimates,
    throughput_by_length,
)
from graft.tools.console import program
from graft.tools.demo.prompts import demo_prompts, llm_prompts
from graft.tools.demo.smollm import smollm
from graft.tools.demo.tasks import held_out_tasks
from graft.tools.demo_model import demo_model
from graft.tools.prompt_rows import PromptRow, read_requests

LOOKUP_DRAFTERS = {"ngram": NGram, "suffix": Suffix}
#: Checkpoint folders of the demo model's drafters, by their names on the command line.
DEMO_DRAFTERS = {"eagle": "eagle3", "dflash": "dflash"}
#: Requests with a temperature below this value are decoded greedily.
GREEDY_TEMPERATURE = 1e-5


class Prompt(NamedTuple):
    """A prompt of the benchmark. Results are also reported for each kind of prompt."""

    kind: str
    row: PromptRow  #: the request, and how its prompt is tokenized


class EngineSetup(NamedTuple):
    """Values of the command line options with which an engine is created."""

    drafter: str
    length: int | str  #: drafts per round, or "auto"
    tree: tuple[Any, ...] | None  #: value of the option `draft_tree`; None for a chain
    masking: str  #: value of the engine option `draft_masking`


@dataclass
class Measurement:
    """Outputs and rounds of one or several runs of the same requests."""

    outputs: list[Output] = field(default_factory=list)
    #: Rounds of each request, in the order of the outputs.
    rounds: list[list[RequestRound]] = field(default_factory=list)
    #: Device time in nanoseconds of each round in which the batch was full.
    round_ns: list[int] = field(default_factory=list)
    #: Total duration of the runs on the host's clock.
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all requests together, in output tokens per second."""
        tokens = sum(len(output.tokens) for output in self.outputs)
        return tokens / self.seconds

    def run(self, engine: Engine, requests: Sequence[Request], batch: int) -> None:
        """Run requests, at most `batch` of them concurrently.

        Add the outputs and rounds to this measurement. If a request is refused or fails, raise
        OptionError and add nothing.
        """
        rounds: dict[str, list[RequestRound]] = {str(request.id): [] for request in requests}
        outputs: dict[str, Output] = {}
        waiting = deque(requests)

        def add_round(assignment: RowAssignment, result: RowResult) -> None:
            if not assignment.stale:
                # A request whose mask rows are not ready stalls: it takes part in the round but
                # commits no token.
                tested = result.tested if result.tokens else 0
                one = RequestRound(len(result.tokens), tested, result.accepted)
                rounds[assignment.state.id].append(one)

        def add_round_time(flight: ReplayInFlight, stamps: list[int]) -> None:
            if len(flight.rows) == batch and stamps[0] > 0:
                self.round_ns.append(max(stamps) - stamps[0])

        replays = engine._replays
        replays.on_row = add_round
        replays.on_parts = add_round_time
        start = time.perf_counter()
        while len(outputs) < len(requests):
            while waiting:
                running = len(requests) - len(waiting) - len(outputs)
                if running >= batch:
                    break
                engine.submit(waiting.popleft())
            for event in engine.step():
                if event.output:
                    outputs[event.id] = event.output
        self.seconds += time.perf_counter() - start
        engine.synchronize()
        replays.on_row = None
        replays.on_parts = None
        for output in outputs.values():
            if output.error:
                raise OptionError(f"request {output.id} {output.reason}: {output.error}")
        self.outputs += [outputs[name] for name in rounds]
        self.rounds += rounds.values()


# Prompts and drafters -----------------------------------------------------------------------------


def read_prompts(options: argparse.Namespace) -> list[Prompt]:
    """Return the prompts that the command line selects."""
    if options.prompts is not None:
        return _read_prompt_file(options.prompts)
    prompts = []
    if options.tasks:
        for task in held_out_tasks(options.tasks):
            request = Request(prompt=task.text, grammar=task_grammar(task))
            prompts.append(Prompt(task.kind, PromptRow(request)))
        return prompts
    for example in demo_prompts() if options.model is None else llm_prompts():
        request = Request(prompt=example.text, grammar=example.grammar)
        prompts.append(Prompt(example.shows, PromptRow(request)))
    return prompts


def _read_prompt_file(path: Path) -> list[Prompt]:
    """Read a file of prompts in the format of ``graft generate``.

    The kind of a prompt is the part of its id before the last slash, or "all" without a slash.
    """
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    prompts = []
    for row in read_requests(parser.parse_args(["--prompts", str(path)])):
        if row.refusal is not None:
            raise OptionError(f"--prompts {path}, {row.refusal}")
        kind = str(row.request.id).rpartition("/")[0]
        prompts.append(Prompt(kind or "all", row))
    return prompts


def choose_drafter(name: str, demo_head: Path | None) -> DrafterChoice | None:
    """Return the value of `Engine`'s argument `drafter` for a drafter named on the command line.

    Forced drafts are an engine option, so the result for ``forced`` is None. `demo_head` is the
    folder of one of the demo model's drafters. It is None if the target is another model; the demo
    model's drafters are then refused.
    """
    first, plus, then = name.partition("+")
    if plus and first in LOOKUP_DRAFTERS:
        second = choose_drafter(then, demo_head) or then
        return partial(CascadeDrafter, first=LOOKUP_DRAFTERS[first], then=second)
    if plus and first == "forced":
        return choose_drafter(then, demo_head)
    if name == "forced":
        return None
    if name in LOOKUP_DRAFTERS:
        return LOOKUP_DRAFTERS[name]
    if name in DEMO_DRAFTERS:
        if demo_head is None:
            raise OptionError(
                f"drafter {name} belongs to the demo model; specify the drafter's folder instead"
            )
        return demo_model(DEMO_DRAFTERS[name])[1]
    return name


# Measurement --------------------------------------------------------------------------------------


def summarize(
    measurement: Measurement, baseline: Measurement, kinds: Sequence[str], depth: int
) -> dict[str, Any]:
    """Summarize the measurement of a configuration: acceptance lengths, rates and speedup.

    `baseline` is the measurement of the same requests without speculation. `kinds` has the kind of
    each prompt. The request with id i has the prompt with index i modulo the number of prompts. A
    round accepts at most `depth` drafts.
    """
    rounds_by_prompt: dict[int, list[RequestRound]] = {i: [] for i in range(len(kinds))}
    for output, rounds in zip(measurement.outputs, measurement.rounds, strict=True):
        rounds_by_prompt[int(output.id) % len(kinds)] += rounds
    every = list(itertools.chain(*rounds_by_prompt.values()))
    tested, accepted = acceptance_by_depth(every, depth)
    rate = sum(accepted) / sum(tested) if any(tested) else 0.0
    same_outputs = 0
    for output, plain in zip(measurement.outputs, baseline.outputs, strict=True):
        same_outputs += output.tokens == plain.tokens
    estimates_by_kind = {}
    for kind in dict.fromkeys(kinds):
        rounds_of_kind = {i: r for i, r in rounds_by_prompt.items() if kinds[i] == kind}
        estimates_by_kind[kind] = length_estimates(rounds_of_kind)
    tokens_per_round = []
    for rounds in rounds_by_prompt.values():
        tokens_per_round.append(sum(one.tokens for one in rounds) / len(rounds))
    round_ns = measurement.round_ns
    return {
        "tokens": sum(one.tokens for one in every),
        "rounds": len(every),
        "seconds": measurement.seconds,
        "tokens_per_second": measurement.tokens_per_second,
        "speedup": measurement.tokens_per_second / baseline.tokens_per_second,
        "request_tokens_per_second": _request_tokens_per_second(measurement.outputs),
        "round_us": statistics.median(round_ns) / 1e3 if round_ns else None,
        "drafts_per_round": statistics.mean(one.tested for one in every),
        "outputs": len(measurement.outputs),
        "same_outputs": same_outputs,
        **length_estimates(rounds_by_prompt),
        "tested": tested,
        "accepted": accepted,
        "acceptance_rate": rate,
        "kinds": estimates_by_kind,
        "by_prompt": tokens_per_round,
    }


def _request_tokens_per_second(outputs: Sequence[Output]) -> float | None:
    """Return the mean decoding speed of a request, in tokens per second after its first token.

    Return None if no request has decoding times.
    """
    tokens = 0
    seconds = 0.0
    for output in outputs:
        if output.total_s is not None and output.first_token_s is not None:
            tokens += len(output.tokens) - 1
            seconds += output.total_s - output.first_token_s
    return tokens / seconds if seconds else None


def masking_of(engine: Engine) -> str | None:
    """Return the name of the engine's masking strategy.

    The result is None if the engine has no drafter that samples from logits.
    """
    resources = engine._resources
    if resources.drafter is None or not resources.drafter.shape.levels:
        return None
    return str(resources.mode.masking)


def _verify_modes(
    options: argparse.Namespace, temperature: float, tree: str | None
) -> dict[str | None, str]:
    """Return the values of ``--verify`` to measure, by the verification mode that each selects.

    The value "relaxed" selects the mode "relaxed". With all other values, greedy requests are
    verified in the mode "greedy", and trees in the mode "coupled". Values that select the same mode
    are measured only once.
    """
    effective = None
    if temperature < GREEDY_TEMPERATURE:
        effective = "greedy"
    elif tree:
        effective = "coupled"
    modes: dict[str | None, str] = {}
    for mode in options.verify:
        if mode == "relaxed" or effective is None:
            modes[mode] = mode
        else:
            modes[effective] = mode
    return modes


def measure(
    engine: Engine,
    plain: Engine,
    drafter: str,
    prompts: Sequence[Prompt],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Measure an engine at all temperatures, batch sizes and verification modes of the options.

    Runs alternate with runs of `plain`, the engine without speculation. `drafter` is the name of
    the drafter in the results.
    """
    resources = engine._resources
    tree = f"{resources.branch}x{resources.depth}" if resources.branch > 1 else None
    length = "auto" if engine.options.draft_length == "auto" else resources.draft_length
    base_requests = [prompt.row.for_engine(engine) for prompt in prompts]
    # Compile the grammars before anything is timed.
    warm_up: dict[str, Any] = {"id": None, "max_tokens": 1, "closing": "off"}
    engine.generate([replace(request, **warm_up) for request in base_requests])
    results = []
    for temperature, batch in itertools.product(options.temperatures, options.batches):
        # The token limit cuts outputs off, and refuses none for which it is too small.
        sampling = {"temperature": temperature, "max_tokens": options.max_tokens, "closing": "off"}
        modes: dict[str | None, str] = {None: options.verify[0]}
        if resources.drafter:
            modes = _verify_modes(options, temperature, tree)
        for effective, mode in modes.items():
            requests = []
            for i in range(max(batch, len(base_requests) * options.samples)):
                base = base_requests[i % len(base_requests)]
                requests.append(replace(base, id=str(i), seed=i, **sampling, verify=mode))
            measurement = Measurement()
            baseline = Measurement()
            for _ in range(options.repeats):
                baseline.run(plain, requests, batch)
                measurement.run(engine, requests, batch)
            key = (drafter, masking_of(engine), length, tree, effective, temperature, batch)
            kinds = [prompt.kind for prompt in prompts]
            results.append(
                dict(zip(CONFIGURATION_KEYS, key, strict=True))
                | summarize(measurement, baseline, kinds, resources.depth)
            )
    return results


def _setups(options: argparse.Namespace) -> Iterator[EngineSetup]:
    """Yield the options of each engine to measure, and show a progress bar."""
    combinations = itertools.product(
        options.drafters, options.lengths, (None, *options.trees), options.masking
    )
    setups = [EngineSetup(*values) for values in combinations]
    yield from tqdm(setups, unit="engine", disable=None)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all configurations and return the content of the file that ``--json`` names.

    Combinations of options that an engine refuses are listed under the key ``refused`` with the
    engine's error message.
    """
    model = options.model
    demo_head = None
    if model is None:
        model, demo_head = demo_model()
    prompts = read_prompts(options)
    sizes = {"max_batch_size": max(options.batches), "max_length": options.max_length}
    refused: dict[str, str] = {}
    measured: set[tuple[Any, ...]] = set()
    with Engine(model, **sizes) as plain:
        configurations = measure(plain, plain, "none", prompts, options)
        for setup in _setups(options):
            if (*setup[:3], None) in measured:
                continue  # already measured: masking has no effect on this drafter
            try:
                engine = Engine(
                    model,
                    choose_drafter(setup.drafter, demo_head),
                    draft_length=setup.length,
                    draft_tree=setup.tree,
                    draft_masking=setup.masking,
                    forced_drafts=setup.drafter.startswith("forced"),
                    **sizes,
                )
            except (OptionError, ConfigError, CheckpointError, TokenizerError) as error:
                values = [str(value) for value in setup if value is not None]
                refused[", ".join(values)] = str(error)
                continue
            with engine:
                key = (*setup[:3], masking_of(engine))
                if key not in measured:
                    configurations += measure(engine, plain, setup.drafter, prompts, options)
                measured.add(key)
        device = plain.device
    return {
        "device": device.describe(),
        "gpu_times": device.kind != "soft",
        "model": str(model),
        "prompts": Counter(prompt.kind for prompt in prompts),
        "max_tokens": options.max_tokens,
        "configurations": configurations,
        "refused": refused,
        "differences": differences(configurations),
        "throughput_by_length": throughput_by_length(configurations),
    }


# Command line -------------------------------------------------------------------------------------


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser("graft.tools.bench.speculation", __doc__)
    add_chart_option(parser)
    _add_model_options(parser)
    _add_draft_options(parser)
    _add_run_options(parser)
    options = parser.parse_args(arguments)
    if options.llm:
        options.model = smollm()
    if options.drafters is None:
        options.drafters = ["forced", "ngram", "eagle" if options.model is None else "suffix"]
    return options


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="target folder (default: the demo model)")
    model.add_argument("--llm", action="store_true", help="SmolLM2-135M-Instruct, downloaded once")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.jsonl",
        help="prompts in the format of graft generate; an id KIND/NAME sets the prompt's kind "
        "(default: the prompts of the demo)",
    )
    prompts.add_argument(
        "--tasks",
        type=number_from(1),
        default=0,
        help="number of held-out tasks of the demo model to run",
    )


def _add_draft_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drafters", nargs="+")
    parser.add_argument(
        "--lengths",
        type=generate.parse_draft_length,
        nargs="+",
        default=[2, 6],
        metavar="N|auto",
        help="drafts per round",
    )
    parser.add_argument(
        "--trees",
        type=generate.parse_draft_tree,
        nargs="*",
        default=[(2, 4)],
        metavar="BRANCHxLEVELS",
        help="draft trees, each combined with each length",
    )
    parser.add_argument("--masking", nargs="+", choices=DRAFT_MASKINGS, default=["auto", "none"])
    parser.add_argument("--verify", nargs="+", default=["rejection"], choices=VERIFY_MODES)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    count = number_from(1)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--batches", type=count, nargs="+", default=[1, 8], help="batch sizes")
    parser.add_argument("--samples", type=count, default=1, help="requests per prompt")
    parser.add_argument("--repeats", type=count, default=1, help="runs per configuration")
    parser.add_argument("--max-tokens", type=count, default=64)
    parser.add_argument("--max-length", type=count, default=1024)


@program
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark. It fails if a drafter could not be measured in any configuration."""
    options = parse_options(arguments)
    results = run(options)
    finish(options, results, report.tables(results), report.charts(results), results["device"])
    measured = {one["drafter"] for one in results["configurations"]}
    missing = [name for name in options.drafters if name not in measured]
    if missing:
        raise OptionError(
            f"no engine could be created for drafter {', '.join(missing)}; "
            "the reasons are the lines above that begin with 'refused:'"
        )


if __name__ == "__main__":
    sys.exit(main())
