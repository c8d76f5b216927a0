"""``make demo``: ten requests with ten grammars in one batch, checked and measured.

``make demo-llm`` is the same with a language model that people know (`smollm`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graft.cudagraph.device import open_device
from graft.cudagraph.errors import OptionError
from graft.models.drafters import DrafterChoice
from graft.models.engine.engine import Engine
from graft.models.engine.stats import EngineStats
from graft.models.request import Output, Request
from graft.tools.demo_model import DRAFTERS, demo_model
from graft.tools.demo_prompts import DemoPrompt, demo_prompts, llm_prompts
from graft.tools.report import table
from graft.tools.smollm import HEAD, smollm
from graft.tools.validity import is_valid

DRAFT_LENGTH = 3
MAX_TOKENS = 128
MAX_LENGTH = 1024
JUDGES = {"json_schema": "jsonschema", "regex": "re", "choice": "comparison"}


@dataclass(frozen=True)
class Arm:
    """One way to run the batch, with its outputs and figures."""

    name: str
    outputs: list[Output]
    stats: EngineStats
    seconds: float


def run_arm(
    name: str,
    prompts: Sequence[DemoPrompt],
    target: Path,
    drafter: DrafterChoice | None = None,
    *,
    masked: bool = True,
) -> Arm:
    """Run all prompts together at temperature 0 on a fresh engine."""
    with Engine(
        target,
        drafter,
        max_batch_size=len(prompts),
        max_length=MAX_LENGTH,
        draft_length=DRAFT_LENGTH,
        mask_drafts=masked,
        timeline=True,
    ) as engine:
        begun = time.perf_counter()
        outputs = engine.generate(
            [Request(prompt=p.text, grammar=p.grammar, max_tokens=MAX_TOKENS) for p in prompts]
        )
        return Arm(name, outputs, engine.stats, time.perf_counter() - begun)


def verdict(prompt: DemoPrompt, output: Output) -> tuple[bool, str]:
    """Whether an output obeys its grammar, and the words that say so.

    What was cut by the token limit is no valid document, and is said to be cut.
    """
    if output.error:
        return False, f"{output.reason}: {output.error}"
    if not output.finished:
        return False, f"ended by {output.reason}"
    right = "" if prompt.answer is None else "; right answer"
    if prompt.answer not in (None, output.text):
        right = f"; expected {prompt.answer}"
    if prompt.grammar is None:
        return True, f"no grammar{right}"
    valid = bool(is_valid(prompt.grammar, output.text))
    judge = JUDGES[prompt.grammar.kind]
    return valid, f"{'valid' if valid else 'INVALID'} by {judge}{right}"


def print_table(arms: Sequence[Arm], on_soft_device: bool) -> None:
    """Print rounds, tokens per round and acceptance of every arm; then where a round's time goes.

    A token per round of its request is what decoding without speculation does.
    """
    rows: list[tuple[object, ...]] = [
        (
            "",
            "launches",
            "rounds",
            "tokens",
            "tokens/round",
            "acceptance",
            "per draft position",
            "seconds",
        )
    ]
    for arm in arms:
        s = arm.stats
        rows.append(
            (
                arm.name,
                s.rounds,
                s.row_rounds,
                s.tokens,
                f"{s.tokens_per_round:.2f}",
                f"{s.acceptance_length:.2f}" if s.speculated_rounds else "-",
                " ".join(f"{a:.0%}" for a in s.acceptance) or "-",
                f"{arm.seconds:.2f}",
            )
        )
    print(f"\n{table(rows)}")
    print(
        "launches: of the round's graph, for all requests at once; rounds: summed over requests;"
        "\nacceptance: mean tokens of a round that tested drafts"
    )
    print(f"\nwhere a round of '{arms[0].name}' spends its time")
    print(
        table(
            [("", name, f"{share:.1%}") for name, share in arms[0].stats.part_share.items()], left=2
        )
    )
    if on_soft_device:
        print(f"\n{SOFT_NOTE}")


SOFT_NOTE = """\
The soft device's forward pass is bound by compute, not by memory: each row it verifies costs time
of its own. What speculation saves here is rounds and not time: where seconds differ, that is
launches saved with a tiny model. None of these times is a GPU's."""


def main(llm: bool = False, drafter_name: str | None = None) -> int:
    """Run a demo; returns 1 when an output does not obey its grammar.

    Raises
    ------
    OptionError
        The drafter is one of the other demo's.
    """
    if llm and drafter_name is not None:
        raise OptionError(f"--drafter {drafter_name} is the demo model's, and --llm has a head")
    prompts = llm_prompts() if llm else demo_prompts()
    device = open_device()
    target, drafter = (smollm(), HEAD) if llm else demo_model(drafter_name or DRAFTERS[0])
    print(f"device: {device.describe()}")
    print(f"{len(prompts)} requests in one batch, temperature 0, {DRAFT_LENGTH} drafts a round\n")
    arms = [run_arm("drafts masked", prompts, target, drafter)]
    passed = True
    for number, (prompt, output) in enumerate(zip(prompts, arms[0].outputs, strict=True), 1):
        good, words = verdict(prompt, output)
        passed &= good
        print(f"{number:>2}. {prompt.shows}\n    {output.text}\n    {words}")
    if not llm:
        arms.append(run_arm("drafts unmasked", prompts, target, drafter, masked=False))
    arms.append(run_arm("no speculation", prompts, target))
    print_table(arms, device.kind == "soft")
    texts = [[output.text for output in arm.outputs] for arm in arms]
    same = all(other == texts[0] for other in texts)
    print(f"\nThe {len(arms)} ways gave {'the same' if same else 'DIFFERENT'} text.")
    if not (passed and same):
        print("graft: the demo's checks failed", file=sys.stderr)
    return 0 if passed and same else 1
