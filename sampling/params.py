"""Sampling parameters of a request: names, defaults, ranges and meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graft.cudagraph.driver.cstruct import read_numbers
from graft.cudagraph.errors import OptionError
from graft.native.errors import short_repr
from graft.sampling.checks import check_ids, check_integer, check_real
from graft.sampling.kernels.loader import KERNELS

__all__ = ["MAX_LOGPROBS", "MAX_STOP_IDS", "Relaxed", "SamplingParams", "VERIFY_MODES"]

_NUMBERS = read_numbers(KERNELS / "slot.cuh")
MAX_STOP_IDS = _NUMBERS["MAX_STOP_IDS"]
MAX_LOGPROBS = _NUMBERS["MAX_LOGPROBS"]

#: Verification modes. The index of a mode is its value of ``VERIFY_*`` in kernels/slot.cuh.
VERIFY_MODES = ("rejection", "coupled", "per_token", "relaxed")

#: Inclusive ranges of the integer parameters.
_INTEGERS = {"top_k": (0, 2**31 - 1), "sample": (0, 2**24 - 1), "min_tokens": (0, 2**31 - 1)}
#: Lower and upper bounds of the real parameters, and whether the lower bound itself is excluded.
_REALS = {
    "temperature": (0.0, 1e4, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.0, 100.0, True),
}
_MAX_BIAS = 1e6


@dataclass(frozen=True)
class Relaxed:
    """Parameters of ``verify="relaxed"``, which accepts drafts that the target did not sample.

    Outputs are then not exact. The probabilities below are taken from the target's masked and
    filtered distribution; for greedy requests, from its masked distribution at temperature 1.
    Tokens that a grammar forbids are never accepted.

    Parameters
    ----------
    top_k
        A draft is accepted only if it is among this many most likely tokens.
    delta
        A draft is accepted only if its probability is at most this much below the highest one.
    until
        Token id after which verification is exact, such as the end of a reasoning section; None if
        there is none.
    """

    top_k: int = 10
    delta: float = 0.6
    until: int | None = None


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are sampled and verified.

    `SlotState.join` writes these parameters to ``struct Slot`` of sampling/kernels/slot.cuh.

    Before mask, temperature and filters are applied, the logit ``x`` of a token is changed in this
    order, which is vLLM's order (https://docs.vllm.ai/en/latest/api/vllm/v1/sample/sampler/)::

        -inf                                         not in allowed_ids, or in banned_ids
        x + logit_bias
        x / repetition if x > 0 else x * repetition  token occurs in the prompt or the output
        x - frequency * count - presence             token occurs `count` > 0 times in the output

    The repetition penalty is defined as in CTRL (arXiv 1909.05858), Hugging Face and vLLM. Presence
    and frequency penalty are defined as in OpenAI's API
    (https://platform.openai.com/docs/api-reference). Computation is in float32, and each operation
    is rounded. For the row of a draft, "the output" consists of the committed tokens and the drafts
    on the path to this row, so speculation does not change the distribution. The logits of a
    drafter are changed in the same way, so that its drafts are accepted as often as without
    adjustments.

    Parameters
    ----------
    temperature
        Softmax temperature. Values below 1e-5 select greedy decoding.
    top_k
        Number of most likely tokens to sample from; 0 disables the filter.
    top_p
        Cumulative probability of the most likely tokens to sample from; 1 disables the filter.
    min_p
        Minimum probability relative to that of the most likely token; 0 disables the filter. The
        filters are applied in the order top_k, top_p, min_p.
    seed
        64-bit key of the random numbers. None: the engine chooses one; `SlotState.join` uses 0.
    sample
        Index of this completion among those sampled with the same seed.
    verify
        Verification mode, one of `VERIFY_MODES`. None: the engine's mode; `SlotState.join` uses
        "rejection".
    relaxed
        Acceptance criterion of ``verify="relaxed"``.
    stop_ids
        Ids that end the output, at most `MAX_STOP_IDS`.
    logit_bias
        Bias per token id, added to the logit.
    allowed_ids
        The only ids that may be generated; None allows all.
    banned_ids
        Ids that are never generated.
    presence_penalty, frequency_penalty
        Penalties on tokens of the output; 0 disables them.
    repetition_penalty
        Penalty on tokens of prompt and output; 1 disables it.
    min_tokens
        Minimum number of tokens before a stop id. Before that, a stop id is generated only if no
        other token is legal.
    logprobs
        Number of most likely tokens to report with each token, with their log probabilities; 0
        reports only the token's own. None reports nothing.
    logprobs_masked
        Whether log probabilities are computed from the adjusted and masked logits instead of the
        model's logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    sample: int = 0
    verify: str | None = None
    relaxed: Relaxed = field(default_factory=Relaxed)
    stop_ids: Sequence[int] | None = ()
    logit_bias: Mapping[int, float] | None = None
    allowed_ids: Sequence[int] | None = None
    banned_ids: Sequence[int] | None = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logprobs: int | None = None
    logprobs_masked: bool = False

    @classmethod
    def from_fields(cls, source: object, **changes: Any) -> SamplingParams:
        """Return parameters with the values in `changes`.

        Parameters that are not in `changes` are copied from the attributes of `source` with the
        same names.
        """
        names = [f.name for f in fields(SamplingParams)]
        values = {name: getattr(source, name) for name in names}
        return SamplingParams(**(values | changes))

    @property
    def has_bias(self) -> bool:
        """Whether a logit bias, an allow-list or a deny-list is set."""
        return bool(self.logit_bias or self.banned_ids) or self.allowed_ids is not None

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty is enabled."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    def check(self, vocab_size: int) -> None:
        """Check all parameters for a target with `vocab_size` token ids.

        A parameter of the wrong type or out of range raises OptionError with its name and value.
        """
        for name, (low, high) in _INTEGERS.items():
            check_integer(name, getattr(self, name), low, high)
        for name, (lowest, highest, open_low) in _REALS.items():
            check_real(name, getattr(self, name), lowest, highest, open_low=open_low)
        if self.seed is not None:
            check_integer("seed", self.seed, 0, 2**64 - 1)
        is_known = isinstance(self.verify, str) and self.verify in VERIFY_MODES
        if self.verify is not None and not is_known:
            raise OptionError(
                f"verify must be one of {VERIFY_MODES}, got {short_repr(self.verify)}",
                param="verify",
            )
        if not isinstance(self.relaxed, Relaxed):
            raise OptionError(
                f"relaxed must be a Relaxed, got {short_repr(self.relaxed)}", param="relaxed"
            )
        check_integer("relaxed.top_k", self.relaxed.top_k, 1, 2**31 - 1)
        check_real("relaxed.delta", self.relaxed.delta, 0.0, 1.0)
        num_stop_ids = len(self.stop_ids or ())
        if num_stop_ids > MAX_STOP_IDS:
            raise OptionError(
                f"at most {MAX_STOP_IDS} stop ids, got {num_stop_ids}", param="stop_ids"
            )
        self._check_logprobs(vocab_size)
        # Lists of ids come last: checking them takes the most time.
        if self.relaxed.until is not None:
            check_ids("relaxed.until", [self.relaxed.until], vocab_size)
        check_ids("stop_ids", self.stop_ids or (), vocab_size)
        self._check_bias(vocab_size)

    def _check_logprobs(self, vocab_size: int) -> None:
        if type(self.logprobs_masked) is not bool:
            raise OptionError(
                f"logprobs_masked must be True or False, got {short_repr(self.logprobs_masked)}",
                param="logprobs_masked",
            )
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        elif self.logprobs_masked:
            raise OptionError(
                "logprobs_masked requires logprobs, which is None", param="logprobs_masked"
            )

    def _check_bias(self, vocab_size: int) -> None:
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise OptionError(
                f"logit_bias must map ids to numbers, got {short_repr(bias)}", param="logit_bias"
            )
        check_ids("logit_bias", bias, vocab_size)
        for value in bias.values():
            check_real("each value of logit_bias", value, -_MAX_BIAS, _MAX_BIAS, param="logit_bias")
        for name in ("banned_ids", "allowed_ids"):
            ids = getattr(self, name) or ()
            if len(ids) > vocab_size:
                raise OptionError(
                    f"{name} has {len(ids)} ids; at most {vocab_size} (the vocabulary) are allowed",
                    param=name,
                )
            check_ids(name, ids, vocab_size)
        banned = set(self.banned_ids or ())
        if self.allowed_ids is None:
            num_left = vocab_size - len(banned)
        else:
            num_left = len(set(self.allowed_ids) - banned)
        if num_left == 0:
            raise OptionError(
                "allowed_ids and banned_ids exclude every token id", param="allowed_ids"
            )

    def write_logit_table(
        self, table: NDArray[np.int32], prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """Write bias and token counts in the layout of kernels/adjust.cuh.

        `table` int32 [2, V] is overwritten. Row 0 has the bits of each token's float32 bias. Row 1
        has twice the token's count in `output`, plus 1 if it occurs in `prompt`. `prompt` and
        `output` are token ids.
        """
        bias = table[0].view(np.float32)
        counts = table[1]
        if self.allowed_ids is None:
            bias[:] = 0.0
        else:
            bias[:] = -np.inf
            bias[list(self.allowed_ids)] = 0.0
        if self.logit_bias:
            for token, value in self.logit_bias.items():
                bias[token] += np.float32(value)
        if self.banned_ids:
            bias[list(self.banned_ids)] = -np.inf
        output_ids = np.asarray(output, np.int64)
        counts[:] = 2 * np.bincount(output_ids, minlength=counts.size)
        counts[list(prompt)] += 1
