"""Metrics of speculative decoding: acceptance lengths, comparisons, throughput by draft length."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graft.tools.bench.estimate import estimate_mean, estimate_ratio

__all__ = [
    "CONFIGURATION_KEYS",
    "RequestRound",
    "acceptance_by_depth",
    "differences",
    "expected_length",
    "length_estimates",
    "throughput_by_length",
]

#: Keys that identify a configuration.
CONFIGURATION_KEYS = (
    "drafter",
    "masking",
    "length",
    "tree",
    "verify",
    "temperature",
    "batch",
)


class RequestRound(NamedTuple):
    """Result of one decoding round for one request.

    Attributes
    ----------
    tokens
        Number of committed tokens: accepted drafts and the bonus token.
    tested
        Number of drafts verified.
    accepted
        Number of drafts accepted.
    """

    tokens: int
    tested: int
    accepted: int


def expected_length(rate: float, drafts: int) -> float:
    """Return the expected tokens per round if each draft is accepted with the same probability.

    This is (1 - a^(K+1)) / (1 - a) for the acceptance rate a and K drafts, including the bonus
    token.
    """
    return sum(rate**j for j in range(drafts + 1))


def length_estimates(rounds_by_prompt: Mapping[int, Sequence[RequestRound]]) -> dict[str, Any]:
    """Estimate acceptance length and tokens per round, with prompts as independent samples.

    Returns
    -------
    dict
        ``acceptance_length``, over rounds that verified drafts, with its ``variance``;
        ``tokens_per_round``, over all rounds. See `estimate.estimate_ratio`.
    """
    acceptance_samples = []
    token_samples = []
    accepted_tokens: list[int] = []
    for rounds in rounds_by_prompt.values():
        tokens = [one.tokens for one in rounds if one.tested]
        accepted_tokens += tokens
        acceptance_samples.append((sum(tokens), len(tokens)))
        token_samples.append((sum(one.tokens for one in rounds), len(rounds)))
    variance = statistics.variance(accepted_tokens) if len(accepted_tokens) > 1 else None
    return {
        "acceptance_length": estimate_ratio(acceptance_samples) | {"variance": variance},
        "tokens_per_round": estimate_ratio(token_samples),
    }


def acceptance_by_depth(rounds: Sequence[RequestRound], depth: int) -> tuple[list[int], list[int]]:
    """Count by depth the rounds that verified a draft and those that accepted one.

    Verification stops at the first rejected draft, so deeper drafts are not counted as verified.

    Returns
    -------
    tested, accepted : list of int
        Number of rounds at depths 1 to `depth`.
    """
    tested = [0] * depth
    accepted = [0] * depth
    for one in rounds:
        for j in range(min(one.tested, one.accepted + 1, depth)):
            tested[j] += 1
            accepted[j] += j < one.accepted
    return tested, accepted


def differences(configurations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare tokens per round of configurations that differ in one key, prompt by prompt.

    The comparisons are: masked minus unmasked drafts; a tree minus the chain with as many drafts,
    and therefore as many verified rows; one verification mode minus another; a drafter minus the
    first drafter. Trees and drafters are compared with each other even if their drafts are masked
    by different strategies. Automatic draft lengths are left out because they depend on timing.

    Returns
    -------
    list of dict
        ``comparison``, the keys of the first configuration, and the estimated mean difference.
    """
    fixed = [one for one in configurations if one["length"] != "auto"]
    first_drafter = next((one["drafter"] for one in configurations if one["length"]), None)
    found = []
    for one, other in itertools.permutations(fixed, 2):
        key = _compared_key(one, other, first_drafter)
        if key is None:
            continue
        pairs = zip(one["by_prompt"], other["by_prompt"], strict=True)
        name = f"{one[key]} - {other[key] or 'chain'}"
        if key != "masking" and other["masking"] not in (None, one["masking"]):
            name += f", {other['masking']}"
        found.append(
            {"comparison": name}
            | {name: one[name] for name in CONFIGURATION_KEYS}
            | estimate_mean([a - b for a, b in pairs])
        )
    return found


def _compared_key(
    one: Mapping[str, Any], other: Mapping[str, Any], first_drafter: str | None
) -> str | None:
    """Return the only key in which two configurations differ, if `differences` compares them."""
    changed = {key for key in CONFIGURATION_KEYS if one[key] != other[key]}
    if one["masking"] != "none" and other["masking"] != "none":
        changed.discard("masking")
    if len(changed) != 1:
        return None
    key = changed.pop()
    compared = {
        "masking": one["masking"] != "none",
        "tree": other["tree"] is None,
        "drafter": other["drafter"] == first_drafter,
        "verify": str(one["verify"]) < str(other["verify"]),
    }
    return key if compared.get(key, False) else None


def throughput_by_length(configurations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predict the throughput of chains of several lengths.

    Tokens per round follow from the survival of the drafts of the longest chain, that is the
    share of rounds that accept at least so many drafts. They are divided by the measured device
    time of a full round. Prefill and host time are not included. Length 0 is decoding without
    speculation.

    Returns
    -------
    list of dict
        One entry per combination of the other keys: the ``best`` length, and ``lengths`` with the
        prediction and the measured throughput of each length.
    """
    chains = [one for one in configurations if one["tree"] is None and one["length"] != "auto"]
    baselines = [one for one in chains if not one["length"]]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in chains:
        if one["length"]:
            key = tuple(one[name] for name in CONFIGURATION_KEYS if name != "length")
            groups.setdefault(key, []).append(one)
    return [_predict_group(baselines, group) for group in groups.values()]


def _predict_group(
    baselines: Sequence[dict[str, Any]], group: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Predict the throughput of chains that differ only in length, and of their baseline."""
    longest = max(group, key=lambda one: one["length"])
    baseline = [
        one
        for one in baselines
        if one["temperature"] == longest["temperature"] and one["batch"] == longest["batch"]
    ]
    lengths = []
    for one in sorted([*baseline, *group], key=lambda one: one["length"]):
        tokens = 1 + sum(longest["accepted"][: one["length"]]) / longest["rounds"]
        round_us = one["round_us"]
        predicted = one["batch"] * tokens / round_us * 1e6 if round_us else None
        lengths.append(
            {
                "length": one["length"],
                "rows": one["batch"] * (one["length"] + 1),
                "round_us": round_us,
                "tokens_per_round": tokens,
                "predicted_tokens_per_second": predicted,
                "measured_tokens_per_second": one["tokens_per_second"],
            }
        )
    timed = [one for one in lengths if one["predicted_tokens_per_second"]]
    best = max(timed, key=lambda one: one["predicted_tokens_per_second"], default=None)
    return {
        **{name: longest[name] for name in CONFIGURATION_KEYS if name != "length"},
        "best": best["length"] if best else None,
        "lengths": lengths,
    }
