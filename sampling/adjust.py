"""What a request has done to its target's logits before mask and filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["NOTHING", "Adjust"]


@dataclass(frozen=True)
class Adjust:
    """Bias, hard bounds and penalties of one request, and what it is told of its logits.

    The logit x of an id becomes, line by line (the order is that of vLLM, see
    https://docs.vllm.ai/en/latest/api/vllm/v1/sample/sampler/)::

        -inf                                         not allowed, or banned
        x + bias
        x / repetition if x > 0 else x * repetition  an id of prompt or output
        x - frequency * count - presence             an id that the output has `count` > 0 times

    The third is CTRL's (arXiv 1909.05858) as Hugging Face and vLLM have it, on prompt and output;
    the last is OpenAI's, on the output alone (https://platform.openai.com/docs/api-reference).
    Below `earliest` stop ids become -inf, unless nothing else is legal. All in float32, each
    operation rounded.

    The output of a row is what was committed and the drafts before the row, so that verification
    tests drafts against this law, whatever it was that they were drawn from.

    Parameters
    ----------
    bias : by id. allowed, banned : ids; None allows all.
    presence, frequency, repetition : off at 0, 0 and 1.
    earliest : lowest position of a stop id.
    logprobs : best ids whose log probabilities are told with every token's; None tells none.
    masked : they are those of the logits once adjusted and masked, not of what the model gave.
    prompt, output : ids known when the request joins its slot.
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Sequence[int] | None = None
    banned: Sequence[int] = ()
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    earliest: int = 0
    logprobs: int | None = None
    masked: bool = False
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()

    @property
    def biased(self) -> bool:
        return bool(self.bias or self.banned) or self.allowed is not None

    @property
    def counted(self) -> bool:
        return (self.presence, self.frequency, self.repetition) != (0.0, 0.0, 1.0)

    def write(self, table: NDArray[np.int32]) -> None:
        """Lay out a slot's table, int32 [2, V], as kernels/adjust.cu has it."""
        bias = table[0].view(np.float32)
        counts = table[1]
        bias[:] = 0.0 if self.allowed is None else -np.inf
        bias[list(self.allowed or ())] = 0.0
        for token, value in self.bias.items():
            bias[token] += np.float32(value)
        bias[list(self.banned)] = -np.inf
        counts[:] = 2 * np.bincount(np.asarray(self.output, np.int64), minlength=counts.size)
        counts[list(self.prompt)] += 1


#: Of a request that asks for nothing.
NOTHING = Adjust()
