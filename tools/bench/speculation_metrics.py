"""Acceptance lengths, paired comparisons, throughput predictions and confidence intervals.

A configuration is represented by a dict that contains its options (`CONFIGURATION_KEYS`) and the
results that `speculation.summarize` returned for it. A round is one verification of a request's
drafts by the target model. Drafts form a chain, or a tree with several candidates per position.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

#: Names of the options that identify a configuration.
CONFIGURATION_KEYS = ("drafter", "masking", "length", "tree", "verify", "temperature", "batch")
#: Two-sided 95 % quantile of the normal distribution.
Z95 = 1.959964
#: Smallest number of samples for which an interval is computed.
MIN_SAMPLES = 4


class RequestRound(NamedTuple):
    """Result of one decoding round for one request."""

    tokens: int  #: committed tokens: the accepted drafts and the bonus token
    tested: int  #: verified drafts
    accepted: int  #: accepted drafts


# Confidence intervals -----------------------------------------------------------------------------


def student_t_95(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution.

    The quantile is computed with expansion 26.7.5 of Abramowitz and Stegun, "Handbook of
    Mathematical Functions". Its error is below 0.2 % for three or more degrees of freedom.
    """
    z = Z95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def estimate_ratio(samples: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Estimate the ratio of two sums over independent samples, with a 95 % confidence interval.

    The variance is that of the ratio estimator (Cochran, "Sampling Techniques", 1977, 6.3).

    Parameters
    ----------
    samples
        Pairs (numerator, denominator), one per independent sample. If a sample is a prompt, for
        example, the numerator is the sum of the values measured for the prompt, and the
        denominator is their number. Samples whose denominator is 0 are ignored.

    Returns
    -------
    dict
        ``mean``, the limits ``low`` and ``high`` of the interval, and the number ``n`` of samples.
        ``mean`` is None if there are no samples. The limits are None if there are fewer than
        `MIN_SAMPLES` samples.
    """
    samples = [sample for sample in samples if sample[1]]
    n = len(samples)
    if not n:
        return {"mean": None, "low": None, "high": None, "n": 0}
    denominator = sum(b for _, b in samples)
    mean = sum(a for a, _ in samples) / denominator
    if n < MIN_SAMPLES:
        return {"mean": mean, "low": None, "high": None, "n": n}
    squares = sum((a - mean * b) ** 2 for a, b in samples)
    half = student_t_95(n - 1) * math.sqrt(n / (n - 1) * squares) / denominator
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": n}


def estimate_mean(values: Sequence[float]) -> dict[str, Any]:
    """Estimate the mean of independent values, such as paired differences."""
    return estimate_ratio([(value, 1) for value in values])


# Acceptance ---------------------------------------------------------------------------------------


def length_estimates(rounds_by_prompt: Mapping[int, Sequence[RequestRound]]) -> dict[str, Any]:
    """Estimate acceptance length and tokens per round, with prompts as independent samples.

    Both are mean numbers of committed tokens per round. The acceptance length counts only rounds
    that verified drafts; the tokens per round count all rounds.
    """
    acceptance_samples = []
    token_samples = []
    for rounds in rounds_by_prompt.values():
        verified = [one.tokens for one in rounds if one.tested]
        acceptance_samples.append((sum(verified), len(verified)))
        token_samples.append((sum(one.tokens for one in rounds), len(rounds)))
    return {
        "acceptance_length": estimate_ratio(acceptance_samples),
        "tokens_per_round": estimate_ratio(token_samples),
    }


def acceptance_by_depth(rounds: Sequence[RequestRound], depth: int) -> tuple[list[int], list[int]]:
    """Return the number of rounds that verified a draft, and that accepted it, by depth.

    The two lists have one entry for each depth from 1 to `depth`. Verification stops at the first
    rejected draft of a round. Deeper drafts of the round are not counted as verified.
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


# Comparisons --------------------------------------------------------------------------------------


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
        and the estimated mean of the difference (`estimate_mean`).
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
        found.append({"comparison": name} | {k: one[k] for k in CONFIGURATION_KEYS} | estimate)
    return found


def _compared_key(
    one: Mapping[str, Any], other: Mapping[str, Any], first_drafter: str | None
) -> str | None:
    """Return the key in which two configurations differ, if `differences` compares them.

    Return None if they differ in several keys, or if `differences` compares them in the other order
    or not at all. Drafters are compared with `first_drafter` only.
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
    return key if compared.get(key, False) else None


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
        One entry per group of chains that differ only in length. ``best`` is the length with the
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
    """Predict the throughput of the configurations in `group`, which differ only in draft length.

    Their drafts are chains. `baselines` are the configurations without speculation; the one with
    the same temperature and batch size joins the group as draft length 0.
    """
    longest = max(group, key=itemgetter("length"))
    same_run = itemgetter("temperature", "batch")
    baseline = [one for one in baselines if same_run(one) == same_run(longest)]
    lengths = []
    for one in sorted([*baseline, *group], key=itemgetter("length")):
        tokens = 1 + sum(longest["accepted"][: one["length"]]) / longest["rounds"]
        predicted = None
        if one["round_us"]:
            predicted = one["batch"] * tokens / one["round_us"] * 1e6
        lengths.append(
            {
                "length": one["length"],
                "rows": one["batch"] * (one["length"] + 1),
                "round_us": one["round_us"],
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
