"""Compute acceptance lengths, paired comparisons and throughput predictions of speculation.

A configuration is the dict of results that `speculation.summarize` returns, with the values of
`CONFIGURATION_KEYS`. A round is one verification of a request's drafts by the target model. Drafts
form a chain, or a tree with several candidates per position.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from operator import itemgetter
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

#: Keys whose values identify a configuration.
CONFIGURATION_KEYS = ("drafter", "masking", "length", "tree", "verify", "temperature", "batch")


class RequestRound(NamedTuple):
    """Result of one decoding round for one request.

    Attributes
    ----------
    tokens
        Number of committed tokens, that is accepted drafts and the bonus token.
    tested
        Number of verified drafts.
    accepted
        Number of accepted drafts.
    """

    tokens: int
    tested: int
    accepted: int


def expected_length(rate: float, drafts: int) -> float:
    """Return the expected tokens per round if all drafts have the same acceptance rate.

    For K drafts with the acceptance rate a, the expected number of tokens is
    (1 - a^(K+1)) / (1 - a). It includes the bonus token.

    Parameters
    ----------
    rate
        Probability that a draft is accepted if the draft before it was accepted.
    drafts
        Number of drafts per round.
    """
    return sum(rate**j for j in range(drafts + 1))


def length_estimates(rounds_by_prompt: Mapping[int, Sequence[RequestRound]]) -> dict[str, Any]:
    """Estimate acceptance length and tokens per round, with prompts as independent samples.

    Parameters
    ----------
    rounds_by_prompt
        Rounds of all requests with the same prompt, by number of the prompt.

    Returns
    -------
    dict
        ``acceptance_length``
            Estimate of the tokens per round, for rounds that verified drafts. The entry
            ``variance`` is the variance of the tokens per round.
        ``tokens_per_round``
            Estimate of the tokens per round for all rounds.

        Estimates have the keys of `estimate.estimate_ratio`.
    """
    acceptance_samples = []
    token_samples = []
    accepted_tokens: list[int] = []
    for rounds in rounds_by_prompt.values():
        tokens = [one.tokens for one in rounds if one.tested]
        accepted_tokens += tokens
        acceptance_samples.append((sum(tokens), len(tokens)))
        all_tokens = sum(one.tokens for one in rounds)
        token_samples.append((all_tokens, len(rounds)))
    variance = None
    if len(accepted_tokens) > 1:
        variance = statistics.variance(accepted_tokens)
    return {
        "acceptance_length": estimate_ratio(acceptance_samples) | {"variance": variance},
        "tokens_per_round": estimate_ratio(token_samples),
    }


def acceptance_by_depth(rounds: Sequence[RequestRound], depth: int) -> tuple[list[int], list[int]]:
    """Count verified and accepted drafts at each depth.

    Verification of a round stops at the first rejected draft. Deeper drafts of the round are not
    counted as verified.

    Returns
    -------
    tested : list of int
        Number of rounds that verified a draft at depths 1 to `depth`.
    accepted : list of int
        Number of rounds that accepted a draft at depths 1 to `depth`.
    """
    tested = [0] * depth
    accepted = [0] * depth
    for one in rounds:
        reached = min(one.tested, one.accepted + 1, depth)
        for j in range(reached):
            tested[j] += 1
            if j < one.accepted:
                accepted[j] += 1
    return tested, accepted


def differences(configurations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the tokens per round of configurations that differ in one key, prompt by prompt.

    These pairs of configurations are compared:

    * masked drafts minus unmasked drafts
    * a tree minus the chain with the same number of drafts, so that the target verifies the same
      number of rows
    * one verification mode minus another one
    * a drafter minus the first drafter

    Trees and drafters are compared even if their drafts are masked by different strategies.
    Configurations with automatic draft length are left out because their lengths depend on timing.

    Returns
    -------
    list of dict
        One entry per pair: the name of the ``comparison``, the keys of the first configuration,
        and the estimated mean of the difference (`estimate.estimate_mean`).
    """
    fixed = [one for one in configurations if one["length"] != "auto"]
    first_drafter = next((one["drafter"] for one in configurations if one["length"]), None)
    found = []
    for one, other in itertools.permutations(fixed, 2):
        key = _compared_key(one, other, first_drafter)
        if key is None:
            continue
        pairs = zip(one["by_prompt"], other["by_prompt"], strict=True)
        estimate = estimate_mean([a - b for a, b in pairs])
        name = f"{one[key]} - {other[key] or 'chain'}"
        if key != "masking" and other["masking"] not in (None, one["masking"]):
            name += f", {other['masking']}"
        found.append(
            {"comparison": name} | {name: one[name] for name in CONFIGURATION_KEYS} | estimate
        )
    return found


def _compared_key(
    one: Mapping[str, Any], other: Mapping[str, Any], first_drafter: str | None
) -> str | None:
    """Return the only key in which two configurations differ.

    The result is None if `differences` does not compare the configurations.
    """
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
    if compared.get(key, False):
        return key
    return None


def throughput_by_length(configurations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predict the throughput of draft chains by their length.

    The prediction is the tokens per round divided by the measured device time of a round with a
    full batch. The tokens per round of a length are computed from the rounds of the longest chain:
    draft k is committed in the rounds that accept at least k drafts, so draft k adds the share of
    these rounds to the tokens per round. Prefill and host time are not included. Length 0 is
    decoding without speculation.

    Returns
    -------
    list of dict
        One entry per combination of the keys other than the length. ``best`` is the length with the
        highest predicted throughput. ``lengths`` has the predicted and the measured throughput of
        each length.
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
    """Predict the throughput of chains that differ only in length. Length 0 means none."""
    longest = max(group, key=itemgetter("length"))
    same_run = itemgetter("temperature", "batch")
    baseline = [one for one in baselines if same_run(one) == same_run(longest)]
    lengths = []
    for one in sorted([*baseline, *group], key=itemgetter("length")):
        length = one["length"]
        batch = one["batch"]
        round_us = one["round_us"]
        tokens = 1 + sum(longest["accepted"][:length]) / longest["rounds"]
        predicted = None
        if round_us:
            predicted = batch * tokens / round_us * 1e6
        lengths.append(
            {
                "length": length,
                "rows": batch * (length + 1),
                "round_us": round_us,
                "tokens_per_round": tokens,
                "predicted_tokens_per_second": predicted,
                "measured_tokens_per_second": one["tokens_per_second"],
            }
        )
    timed = [one for one in lengths if one["predicted_tokens_per_second"]]
    best = max(timed, key=itemgetter("predicted_tokens_per_second"), default=None)
    return {
        **{name: longest[name] for name in CONFIGURATION_KEYS if name != "length"},
        "best": best["length"] if best else None,
        "lengths": lengths,
    }
