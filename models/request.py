"""What a user asks of the engine and what comes back."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from graft.cudagraph.errors import OptionError
from graft.grammar.grammar_spec import GrammarSpec
from graft.models.errors import RequestError
from graft.sampling.exchange import NUMBERS
from graft.sampling.state import MAX_LOGPROBS, MAX_STOP_IDS, Relaxed

#: Finish reasons by the device's codes for them.
DEVICE_REASONS = {
    code: name.removeprefix("REASON_").lower()
    for name, code in NUMBERS.items()
    if name.startswith("REASON_")
}
#: By their numbers, VERIFY_* of sampling/kernels/slot.cuh.
VERIFY_MODES = ("rejection", "coupled", "per_token", "relaxed")
MAX_SAMPLES = 128


@dataclass(frozen=True)
class Limits:
    """What one request may cost the host, checked before anything is done for it.

    Parameters
    ----------
    prompt_bytes : UTF-8 bytes of a prompt, of the messages, and of what a chat template makes.
    stop_strings, stop_characters : stop strings, and their characters in all.
    grammar_bytes : UTF-8 bytes of a grammar's text.
    logit_biases : ids with a bias.
    waiting, waiting_tokens : requests without a slot, and their tokens in all; one more is refused
        with `QueueFullError`, but not for its tokens where nobody waits. None: no limit.
    """

    prompt_bytes: int = 1 << 20
    stop_strings: int = 64
    stop_characters: int = 1 << 14
    grammar_bytes: int = 1 << 20
    logit_biases: int = 1024
    waiting: int | None = None
    waiting_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.startswith("waiting") and value is None:
                continue
            if type(value) is not int or value < 0:
                raise OptionError(f"Limits.{name} must be an integer from 0 on, got {value!r}")


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Exactly one of `prompt`, `messages` and `tokens` is given.

    Parameters
    ----------
    prompt : text, wrapped as one user message when the tokenizer has a chat template.
    messages : chat messages, rendered through the tokenizer's chat template.
    tokens : token ids, taken as they are.
    grammar : what the output must match; None leaves it free. Where `GrammarSpec.partial` allowed
        that a part of a schema is not enforced, `graft.grammar.check_output` tells of a finished
        text whether it satisfies the whole.
    schema : handed to the chat template as `schema`; by default the schema of a JSON-schema
        grammar, so that a template which shows the schema to the model can do so.
    max_tokens : most tokens to generate, stop id included; None uses all the room there is.
    temperature : 0 (below 1e-5) decodes greedily.
    top_k, top_p, min_p : filters, applied in this order after mask and temperature; 0, 1 and 0
        switch them off.
    seed : 64-bit key of the request's random numbers; None draws one and reports it.
    sample : which of the completions drawn with that seed.
    n : completions; `samples` makes a request of each.
    logit_bias, allowed_ids, banned_ids : a number by id, added to its logit; the only ids there
        are; and ids there are not. A grammar that needs what they take away ends in "dead_end".
    presence_penalty, frequency_penalty, repetition_penalty : on what was generated, as OpenAI has
        them, and on prompt and output, as Hugging Face and vLLM do; off at 0, 0 and 1. Formulas
        and order stand in `graft.sampling.Adjust`.
    min_tokens : tokens before a stop id may come; a grammar that allows nothing but to end wins
        over it, and stop strings do not know of it.
    logprobs : up to 20: have the log probability of every token, and of so many best ids.
    logprobs_masked : of what bias, penalties and the grammar leave, before temperature and filters;
        else of the model's own distribution.
    verify : one of `Options.verify`; None takes the engine's.
    relaxed : when verification by "relaxed" accepts a draft.
    stop : strings that end the output (and are cut from it); not with a grammar, whose output a
        cut would break.
    stop_ids : ids that end the output beside the model's own.
    special_tokens : whether names of special tokens in the text of a prompt or message become
        special ids, as everywhere; False takes them for plain text. A template's own always do.
    priority : of those who wait the highest get slots first, of those who run the lowest lose them
        first when pages run out.
    timeout_s : seconds from its submission after which it ends with what it has; None: never.
    id : the name under which outputs and events come back; None gives it a number.
    """

    prompt: str | None = None
    messages: Sequence[dict[str, str]] | None = None
    tokens: Sequence[int] | None = None
    grammar: GrammarSpec | None = None
    schema: object | None = None
    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    sample: int = 0
    n: int = 1
    logit_bias: Mapping[int, float] | None = None
    allowed_ids: Sequence[int] | None = None
    banned_ids: Sequence[int] | None = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logprobs: int | None = None
    logprobs_masked: bool = False
    verify: str | None = None
    relaxed: Relaxed = field(default_factory=Relaxed)
    stop: Sequence[str] | None = ()
    stop_ids: Sequence[int] | None = ()
    special_tokens: bool = True
    priority: int = 0
    timeout_s: float | None = None
    id: str | None = None

    def samples(self) -> list[Request]:
        """A request for each of the `n` completions: the same but for `sample`, and for the id,
        which becomes "id/sample". They share the seed, so each can be had again by itself.

        `generate` and `stream` do this; who submits requests does it first.
        """
        known = type(self.n) is int and type(self.sample) is int
        if not known or not 1 < self.n <= MAX_SAMPLES:
            return [self]  # refused by name, if it makes no sense
        seed = secrets.randbits(64) if self.seed is None else self.seed
        return [
            replace(
                self,
                n=1,
                sample=sample,
                seed=seed,
                id=f"{self.id}/{sample}" if isinstance(self.id, str) else self.id,
            )
            for sample in range(self.sample, self.sample + self.n)
        ]


class Logprob(NamedTuple):
    """The log probability of a token, and the best ids with theirs, best first.

    Of the model itself: the log-softmax of its logits over the whole vocabulary, before bias,
    penalties, mask, temperature and filters.
    """

    value: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Output:
    """The finished (or failed) answer to one request.

    Attributes
    ----------
    tokens : generated ids, a final stop id included.
    text : decoded output without the stop id, cut at a stop string, or before a character that
        was not finished; set at the end.
    reason : "stop", "stop_string", "length", "timeout", "dead_end", "cancelled", "refused",
        "error", or "moved": it goes on elsewhere (`Engine.hand_over`).
    error : the sentence that says why, for "refused", "error" and "timeout".
    error_type : the name of the error's class, such as "GrammarError" or "QueueFullError".
    finished : ended by itself: a stop id, and for a guided request a terminated grammar.
    seed, sample : what a request must say to get the same again.
    logprobs : of every token, in order; None unless asked for.
    exact : False where drafts were accepted that were not the target's own tokens ("relaxed").
    rounds : rounds in which this request committed at least one token.
    drafted, accepted : drafts tested for it, and drafts accepted.
    cached_tokens : tokens that needed no forward when it joined, for their keys and values were
        there; summed over the times that it joined.
    preempted : times it lost its slot and went on later.
    queue_s, first_token_s, total_s : seconds from its submission until it got a slot, until the
        host read its first token, and until it ended; None where that never was.
    """

    id: str
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    error: str | None = None
    error_type: str | None = None
    seed: int = 0
    sample: int = 0
    logprobs: list[Logprob] | None = None
    exact: bool = True
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0
    preempted: int = 0
    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None

    @property
    def finished(self) -> bool:
        return self.reason == "stop"


@dataclass(frozen=True)
class Event:
    """One step of a streaming request: the tokens that a round committed.

    `text` is the newly readable text: bytes of an unfinished character are held back, and so is
    what may be the beginning of a stop string. `logprobs` are the tokens', where they are asked
    for.
    """

    id: str
    tokens: tuple[int, ...]
    text: str
    output: Output | None = None
    logprobs: tuple[Logprob, ...] | None = None

    @property
    def finished(self) -> bool:
        """Whether the request has ended; `output` is then its whole answer."""
        return self.output is not None


def shown(value: object, most: int = 80) -> str:
    """A value as an error names it, in a few characters; not every value can be spelled out."""
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or any class's own repr
        return f"a {type(value).__name__} that has no text"
    return text if len(text) <= most else f"{text[:most]}..."


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Refuse what is no token id, or none of the model's. Raises RequestError."""
    for token in ids:
        _integer(f"each of {name}", token, 0, vocab_size - 1)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}, got {shown(value)}")
    return value


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or math.isnan(value if isinstance(value, float) else 0.0)
        or not low <= value <= high
    ):
        raise RequestError(f"{name} must be a number from {low} to {high}, got {shown(value)}")
    if open_low and value == low:
        raise RequestError(f"{name} must be above {low}, got {value!r}")


def check_size(what: str, value: object, limit: str, limits: Limits) -> None:
    """Refuse more UTF-8 bytes of text than `limits` allows, in a text or in objects of any shape.

    Raises
    ------
    RequestError
        Naming the limit.
    """
    most: int = getattr(limits, limit)
    size = 0
    left = [value]
    while left and size <= most:  # an object may hold itself
        one = left.pop()
        size += 1 if not isinstance(one, str) else len(one.encode("utf-8", "surrogatepass"))
        if isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple)):
            left += one
    if size > most:
        raise RequestError(f"{what} is longer than {most} bytes (Limits.{limit})")


def check_request(request: Request, vocab_size: int, limits: Limits) -> None:
    """Refuse a request whose options make no sense or cost too much, before anything runs for it.

    Raises
    ------
    RequestError
        Naming the option and its value.
    """
    if not isinstance(request, Request):
        raise RequestError(f"a request must be a Request, got {shown(request)}")
    if request.id is not None and not isinstance(request.id, str):
        raise RequestError(f"id must be text, got {shown(request.id)}")
    given = [
        name for name in ("prompt", "messages", "tokens") if getattr(request, name) is not None
    ]
    if len(given) != 1:
        raise RequestError(
            f"give exactly one of prompt, messages and tokens, got {' and '.join(given) or 'none'}"
        )
    if request.prompt is not None and not isinstance(request.prompt, str):
        raise RequestError(f"prompt must be text, got {type(request.prompt).__name__}")
    if request.messages is not None and not (
        isinstance(request.messages, (list, tuple))
        and all(isinstance(message, Mapping) for message in request.messages)
    ):
        raise RequestError(f"messages must be a list of objects, got {shown(request.messages)}")
    check_size("the prompt", request.prompt or request.messages, "prompt_bytes", limits)
    for name in ("stop", "stop_ids", "tokens", "allowed_ids", "banned_ids"):
        if not isinstance(getattr(request, name), (Sequence, type(None))):
            raise RequestError(f"{name} must be a list, got {shown(getattr(request, name))}")
    if request.grammar is not None and not isinstance(request.grammar, GrammarSpec):
        raise RequestError(
            f"grammar must be a GrammarSpec or None, got {type(request.grammar).__name__}"
        )
    if request.grammar is not None:
        check_size("the grammar", request.grammar.text, "grammar_bytes", limits)
    if request.max_tokens is not None:
        _integer("max_tokens", request.max_tokens, 1, 2**31 - 1)
    _real("temperature", request.temperature, 0.0, 1e4)
    _integer("top_k", request.top_k, 0, 2**31 - 1)
    _real("top_p", request.top_p, 0.0, 1.0, open_low=True)
    _real("min_p", request.min_p, 0.0, 1.0)
    if request.seed is not None:
        _integer("seed", request.seed, 0, 2**64 - 1)
    if request.verify is not None and request.verify not in VERIFY_MODES:
        raise RequestError(f"verify must be one of {VERIFY_MODES}, got {shown(request.verify)}")
    relaxed = request.relaxed
    if not isinstance(relaxed, Relaxed):
        raise RequestError(f"relaxed must be a Relaxed, got {shown(relaxed)}")
    _integer("relaxed.top_k", relaxed.top_k, 1, 2**31 - 1)
    _real("relaxed.delta", relaxed.delta, 0.0, 1.0)
    check_ids("relaxed.until", () if relaxed.until is None else (relaxed.until,), vocab_size)
    if not isinstance(request.special_tokens, bool):
        raise RequestError(
            f"special_tokens must be True or False, got {shown(request.special_tokens)}"
        )
    _integer("priority", request.priority, -(2**31), 2**31 - 1)
    if request.timeout_s is not None:
        _real("timeout_s", request.timeout_s, 0.0, 1e9, open_low=True)
    stops = request.stop or ()
    stop_ids = request.stop_ids or ()
    if len(stops) > limits.stop_strings and not isinstance(stops, str):
        raise RequestError(
            f"stop has {len(stops)} strings, more than {limits.stop_strings} (Limits.stop_strings)"
        )
    if isinstance(stops, str) or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(f"stop must be a list of non-empty strings, got {shown(stops)}")
    if (characters := sum(map(len, stops))) > limits.stop_characters:
        raise RequestError(
            f"stop has {characters} characters, more than {limits.stop_characters} "
            "(Limits.stop_characters)"
        )
    if stops and request.grammar is not None:
        raise RequestError("a stop string would cut a guided output in two; use one or the other")
    if len(stop_ids) > MAX_STOP_IDS:
        raise RequestError(f"at most {MAX_STOP_IDS} stop ids, got {len(stop_ids)}")
    check_ids("stop_ids", stop_ids, vocab_size)
    _check_adjust(request, vocab_size, limits)


def _check_adjust(request: Request, vocab_size: int, limits: Limits) -> None:
    """Refuse what makes no sense among `n`, bias, bounds, penalties and log probabilities."""
    _integer("sample", request.sample, 0, 2**24 - 1)
    _integer("n", request.n, 1, MAX_SAMPLES)
    if request.n > 1:
        raise RequestError(f"n is {request.n}: submit each of Request.samples() by itself")
    _real("presence_penalty", request.presence_penalty, -2.0, 2.0)
    _real("frequency_penalty", request.frequency_penalty, -2.0, 2.0)
    _real("repetition_penalty", request.repetition_penalty, 0.0, 100.0, open_low=True)
    _integer("min_tokens", request.min_tokens, 0, request.max_tokens or 2**31 - 1)
    if type(request.logprobs_masked) is not bool:
        raise RequestError(
            f"logprobs_masked must be True or False, got {shown(request.logprobs_masked)}"
        )
    if request.logprobs_masked and request.logprobs is None:
        raise RequestError("logprobs_masked says which logprobs are meant, and none are asked for")
    if request.logprobs is not None:
        _integer("logprobs", request.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
    bias = {} if request.logit_bias is None else request.logit_bias
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must be numbers by id, got {shown(bias)}")
    if len(bias) > limits.logit_biases:
        raise RequestError(
            f"logit_bias has {len(bias)} ids, more than {limits.logit_biases} (Limits.logit_biases)"
        )
    check_ids("logit_bias", bias, vocab_size)
    for value in bias.values():
        _real("each value of logit_bias", value, -1e6, 1e6)
    allowed = request.allowed_ids
    banned = request.banned_ids or ()
    for name, ids in (("allowed_ids", allowed or ()), ("banned_ids", banned)):
        if len(ids) > vocab_size:
            raise RequestError(f"{name} has {len(ids)} ids, the vocabulary {vocab_size}")
        check_ids(name, ids, vocab_size)
    if set(banned).issuperset(allowed) if allowed is not None else len(set(banned)) == vocab_size:
        raise RequestError("allowed_ids and banned_ids leave no id")
