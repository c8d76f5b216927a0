"""Requests and their outputs: `Request`, `Limits`, `Output`, `Event`."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from graft.cudagraph.errors import OptionError
from graft.grammar.grammar_spec import GrammarSpec
from graft.models.errors import RequestError
from graft.native.errors import short_repr
from graft.sampling.checks import check_ids, check_integer, check_real
from graft.sampling.exchange import NUMBERS
from graft.sampling.params import VERIFY_MODES, Relaxed, SamplingParams

__all__ = [
    "CLOSINGS",
    "DEVICE_REASONS",
    "Event",
    "Limits",
    "Logprob",
    "MAX_SAMPLES",
    "Output",
    "Relaxed",
    "Request",
    "VERIFY_MODES",
    "check_request",
    "check_size",
    "check_timeout",
    "check_token_ids",
]

#: Finish reasons by their REASON_* code of native/records/exchange.h.
DEVICE_REASONS = {
    code: name.removeprefix("REASON_").lower()
    for name, code in NUMBERS.items()
    if name.startswith("REASON_")
}

#: Values of `Request.closing`.
CLOSINGS = ("auto", "require", "off")

#: Maximum of `Request.n`.
MAX_SAMPLES = 128


@dataclass(frozen=True)
class Limits:
    """Limits on the size of requests, on the queue and on the time of compiling a grammar.

    The engine checks these sizes and the queue's limits before it does any other work for a
    request.

    Parameters
    ----------
    prompt_bytes
        Maximum size in UTF-8 bytes of the prompt, of all messages together, and of the text that
        the chat template renders from the messages.
    stop_strings
        Maximum number of stop strings.
    stop_characters
        Maximum total number of characters of the stop strings.
    grammar_bytes
        Maximum size of a grammar in UTF-8 bytes.
    logit_biases
        Maximum number of ids with a logit bias.
    waiting
        Maximum number of requests in the queue; None for no limit. Further requests are refused
        with `QueueFullError`.
    waiting_tokens
        Maximum total number of tokens of the requests in the queue; None for no limit. The limit
        does not apply to a request if no other request is waiting.
    compile_s
        Maximum time in seconds for compiling a grammar.

    Raises
    ------
    OptionError
        If `compile_s` is not a positive number, or another limit is not a non-negative integer.
    """

    prompt_bytes: int = 1 << 20
    stop_strings: int = 64
    stop_characters: int = 1 << 14
    grammar_bytes: int = 1 << 20
    logit_biases: int = 1024
    waiting: int | None = None
    waiting_tokens: int | None = None
    compile_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "compile_s" or (value is None and name in ("waiting", "waiting_tokens")):
                continue
            if type(value) is not int or value < 0:
                raise OptionError(
                    f"Limits.{name} must be a non-negative integer, got {short_repr(value)}"
                )
        if type(self.compile_s) not in (int, float) or not 0 < self.compile_s < math.inf:
            raise OptionError(
                f"Limits.compile_s must be a positive number, got {short_repr(self.compile_s)}"
            )


@dataclass(frozen=True)
class Request(SamplingParams):
    """A prompt, and the parameters with which the engine continues it.

    Exactly one of `prompt`, `messages` and `tokens` must be set. The fields of
    `graft.sampling.params.SamplingParams` are further keyword arguments: temperature and filters,
    seed, verification mode, logit bias and penalties, stop ids and log probabilities. If `seed` is
    None, the engine draws a seed and reports it in `Output.seed`.

    Parameters
    ----------
    prompt
        Text of the prompt. If the tokenizer has a chat template, this text becomes one user
        message.
    messages
        Chat messages, rendered with the tokenizer's chat template.
    tokens
        Token ids of the prompt, used unchanged.
    grammar
        Grammar of the output; None for unconstrained text. A grammar with `GrammarSpec.partial`
        enforces only a part of its schema; check the finished text with
        `graft.grammar.check_output`.
    closing
        Whether `max_tokens` limits the mask rows of the grammar so that the output is complete
        within `max_tokens`; one of `CLOSINGS`. Requests whose `max_tokens` is too small for any
        complete output are refused.

        * ``"auto"``: yes, if the grammar's matcher knows how many tokens complete its text, unless
          the grammar allows free text outside tags, which may end anywhere.
        * ``"require"``: as ``"auto"``, but the request is refused if completeness cannot be
          guaranteed.
        * ``"off"``: no. The output may end in the middle of a value.
    max_reasoning_tokens
        Number of tokens within which the reasoning section is complete, with its end marker. Only
        for grammars after a marker (`GrammarSpec.after`). Tokens that would make this impossible
        are illegal. None for no limit of its own; with `closing`, the section ends in time for a
        complete answer in any case.
    schema
        Schema that is passed to the chat template as ``schema``, so that the template can show it
        to the model. By default, it is the schema of a JSON-schema grammar.
    max_tokens
        Maximum number of tokens to generate, including the stop id. None: as many as the engine's
        `max_length` and `pages` allow after the prompt.
    n
        Number of completions. `samples` returns one request for each of them.
    stop
        The first of these strings in the output ends the output and is removed from it. An output
        with a grammar is then incomplete, as with the finish reason "length", and may violate the
        grammar.
    stop_after
        A stop string that ends within the first `stop_after` output tokens is ordinary text and
        does not end the output. None: the value of `min_tokens`.
    special_tokens
        Whether names of special tokens in the prompt or messages are encoded as special ids. If
        not, they are plain text. Names in the chat template itself always become special ids.
    skip_special_tokens
        Whether the text of the output omits special tokens. Stop ids produce no text in any case.
    shown_tokens
        Names of special tokens, such as ``[TOOL_CALLS]``, that the text of the output contains even
        if `skip_special_tokens` is true. Names that the tokenizer does not have are ignored.
    priority
        Waiting requests with the highest priority get slots first. Running requests with the lowest
        priority are preempted first when KV-cache pages run out.
    timeout_s
        Time in seconds, from submission, after which the request ends with its output so far; None
        for no timeout.
    id
        Id of outputs and events. If None, the engine assigns one.
    """

    prompt: str | None = None
    messages: Sequence[dict[str, str]] | None = None
    tokens: Sequence[int] | None = None
    grammar: GrammarSpec | None = None
    closing: str = "auto"
    max_reasoning_tokens: int | None = None
    schema: object | None = None
    max_tokens: int | None = 256
    n: int = 1
    stop: Sequence[str] | None = ()
    stop_after: int | None = None
    special_tokens: bool = True
    skip_special_tokens: bool = True
    shown_tokens: Sequence[str] = ()
    priority: int = 0
    timeout_s: float | None = None
    id: str | None = None

    def samples(self) -> list[Request]:
        """Return one request for each of the `n` completions.

        The requests differ in `sample` and in their ids, which become "id/sample". They have the
        same seed, so each completion can be reproduced separately from seed and sample number.
        `Engine.generate` and `Engine.stream` call this method. Callers of `Engine.submit` have to
        call it themselves.
        """
        valid = type(self.n) is int and type(self.sample) is int
        if not valid or not 1 < self.n <= MAX_SAMPLES:
            return [self]  # an invalid value is refused at submission
        seed = secrets.randbits(64) if self.seed is None else self.seed
        requests = []
        for sample in range(self.sample, self.sample + self.n):
            request_id = self.id
            if isinstance(request_id, str):
                request_id = f"{request_id}/{sample}"
            requests.append(replace(self, n=1, sample=sample, seed=seed, id=request_id))
        return requests


class Logprob(NamedTuple):
    """Log probabilities of a token and of the most likely ids at its position.

    The log probabilities are the log-softmax of the model's logits over the vocabulary. By default,
    they are computed before bias, penalties, mask, temperature and filters. With
    `Request.logprobs_masked`, they are computed after bias, penalties and mask.

    Attributes
    ----------
    value
        Log probability of the token.
    top
        Pairs of id and log probability, most likely first.
    rank
        Rank of the token among all ids: 1 for the most likely id. Of ids with equal logits, the
        lower id comes first. 0 if the rank is unknown.
    """

    value: float
    top: tuple[tuple[int, float], ...]
    rank: int = 0


@dataclass
class Output:
    """Result of a finished, failed or cancelled request.

    Attributes
    ----------
    id
        Id of the request.
    prompt_tokens
        Number of tokens of the prompt.
    tokens
        Generated ids, including a final stop id.
    text
        Text of the output, without the stop id or stop string that ended it. If the output ends
        inside a UTF-8 character, this character is omitted. The text is set when the request
        finishes.
    reason
        Why the request finished. "stop": a stop id was generated. "stop_string": a stop string was
        generated. "length": `max_tokens` was reached. "timeout": `timeout_s` has passed.
        "dead_end": the grammar allows no further token. "cancelled": the request was cancelled, see
        `Engine.cancel`. "refused": the request is invalid or the queue is full. "error": the
        request failed. "moved": another engine continues the request, see `Engine.migrate_out`.
    error
        Error message, for "refused", "error" and "timeout"; None otherwise.
    error_type
        Name of the error's class, such as "GrammarError" or "QueueFullError".
    error_param
        Name of the request's field that is at fault; None if no single field is.
    seed, sample
        Seed and sample number with which the request can be reproduced.
    logprobs
        Log probabilities of the tokens in order; None unless requested.
    satisfies_grammar
        False if a stop id that has text ended the output before the text satisfied the grammar.
        The field has no meaning for an output that did not end with a stop id.
    closing
        Whether the output was bound to be complete within `max_tokens` (`Request.closing`).

        * ``"guaranteed"``: yes. Only a stop string, a timeout, a cancellation or an error can end
          the output before its text satisfies the grammar.
        * ``"not guaranteed"``: no, because the grammar's matcher does not know how many tokens
          complete its text, or because `allowed_ids`, `banned_ids` or a stop id with text may
          prevent it.
        * ``"off"``: no, because the request has no grammar, was refused or sets
          ``closing="off"``, or because its grammar allows free text (``closing="auto"``).
    exact
        Whether exact verification would have accepted the same drafts. False only if
        ``verify="relaxed"`` has accepted a draft that the target did not sample.
    rounds
        Number of rounds in which at least one token was committed.
    drafted, accepted
        Number of drafts verified and accepted.
    cached_tokens
        Number of tokens that were not prefilled because the prefix cache had their pages. If the
        request was preempted, this is the sum over all times it was prefilled.
    preempted
        Number of times the request was preempted.
    queue_s
        Seconds from submission until the request got its first slot; None if it never did.
    first_token_s
        Seconds from submission until the host read the first token (TTFT); None if there is none.
    total_s
        Seconds from submission until the request finished; None until then.
    """

    id: str
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    error: str | None = None
    error_type: str | None = None
    error_param: str | None = None
    seed: int = 0
    sample: int = 0
    logprobs: list[Logprob] | None = None
    satisfies_grammar: bool = True
    closing: str = "off"
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
        """Whether the output is complete: it ended with a stop id and satisfies its grammar."""
        return self.reason == "stop" and self.satisfies_grammar


@dataclass(frozen=True)
class Event:
    """Progress of a request: the tokens that a round committed.

    Attributes
    ----------
    id
        Id of the request.
    tokens
        Committed tokens.
    text
        Text that has become final since the last event. An incomplete character, and text that may
        be the beginning of a stop string, are held back until a later event.
    output
        Output of the request if this is its last event; otherwise None.
    logprobs
        Log probabilities of the tokens; None unless requested.
    """

    id: str
    tokens: tuple[int, ...]
    text: str
    output: Output | None = None
    logprobs: tuple[Logprob, ...] | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last event of the request."""
        return self.output is not None


def check_token_ids(name: str, ids: Iterable[object], vocab_size: int) -> None:
    """Check that all `ids` are token ids of the model.

    Raises
    ------
    RequestError
        If an id is invalid. The message contains `name` and the first invalid id.
    """
    try:
        check_ids(name, ids, vocab_size)
    except OptionError as error:
        raise RequestError(str(error), param=error.param) from error


def check_size(
    name: str, value: object, limit: str, limits: Limits, *, param: str | None = None
) -> None:
    """Check the size of a text, or of all texts in nested lists and mappings.

    Parameters
    ----------
    name
        Name of the value for the error message.
    value
        Text, or nested lists and mappings. An object that contains itself does not cause an endless
        loop.
    limit
        Name of the field of `limits` that has the maximum number of UTF-8 bytes.
    limits
        Limits of the engine.
    param
        Name of the request field that is at fault, for `RequestError.param`; None: `name`.

    Raises
    ------
    RequestError
        If the size exceeds the limit. The message contains the name of the limit.
    """
    max_size: int = getattr(limits, limit)
    size = 0
    pending = [value]
    # Each item counts at least one byte. The loop therefore exceeds the limit, and ends, even for a
    # cyclic object.
    while pending and size <= max_size:
        item = pending.pop()
        if isinstance(item, str):
            size += len(item.encode("utf-8", "surrogatepass"))
            continue
        size += 1
        if isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            pending += item
    if size > max_size:
        raise RequestError(
            f"{name} is longer than {max_size} bytes (Limits.{limit})", param=param or name
        )


def check_timeout(timeout_s: object) -> None:
    """Check the value of `Request.timeout_s`.

    Raises
    ------
    OptionError
        If the value is neither None nor a number of seconds in the allowed range.
    """
    if timeout_s is not None:
        check_real("timeout_s", timeout_s, 0.0, 1e9, open_low=True)


def check_request(request: Request, vocab_size: int, limits: Limits) -> None:
    """Check the types and values of all fields of a request, and that it is within the limits.

    Parameters
    ----------
    request
        Request to check.
    vocab_size
        Number of token ids of the target.
    limits
        Limits of the engine.

    Raises
    ------
    RequestError
        If a field is invalid. The message contains its name and value.
    """
    if not isinstance(request, Request):
        raise RequestError(f"a request must be a Request, got {short_repr(request)}")
    try:
        _check_prompt(request, limits)
        _check_types(request, limits)
        _check_ranges(request)
        _check_stop_strings(request, limits)
        _check_num_biases(request, limits)  # first, because `check` is slow for many ids
        request.check(vocab_size)
    except OptionError as error:
        raise RequestError(str(error), param=error.param) from error


def _field_error(name: str, allowed: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {allowed}, got {short_repr(value)}", param=name)


def _check_prompt(request: Request, limits: Limits) -> None:
    """Check `id`, `prompt` and `messages`, and that the request has exactly one prompt."""
    if request.id is not None and not isinstance(request.id, str):
        raise _field_error("id", "a string", request.id)
    given = []
    for name in ("prompt", "messages", "tokens"):
        if getattr(request, name) is not None:
            given.append(name)
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise RequestError(
            f"exactly one of prompt, messages and tokens must be set, got {got}",
            param=given[-1] if given else "prompt",
        )
    if request.prompt is not None and not isinstance(request.prompt, str):
        raise _field_error("prompt", "a string", request.prompt)
    messages = request.messages
    if messages is not None:
        is_list = isinstance(messages, (list, tuple))
        if not is_list or not all(isinstance(message, Mapping) for message in messages):
            raise _field_error("messages", "a list of mappings", messages)
    check_size(
        "prompt" if messages is None else "messages",
        request.prompt or messages,
        "prompt_bytes",
        limits,
    )


def _check_types(request: Request, limits: Limits) -> None:
    """Check the types of the list and boolean fields, and type and size of the grammar."""
    for name in ("stop", "stop_ids", "tokens", "allowed_ids", "banned_ids"):
        value = getattr(request, name)
        if value is not None and not isinstance(value, Sequence):
            raise _field_error(name, "a list", value)
    shown = request.shown_tokens
    if not isinstance(shown, (list, tuple)) or not all(isinstance(name, str) for name in shown):
        raise _field_error("shown_tokens", "a list of names", shown)
    if request.grammar is not None:
        if not isinstance(request.grammar, GrammarSpec):
            raise _field_error("grammar", "a GrammarSpec or None", request.grammar)
        check_size("grammar", request.grammar.text, "grammar_bytes", limits)
    if request.closing not in CLOSINGS:
        raise _field_error("closing", f"one of {CLOSINGS}", request.closing)
    if request.closing == "require" and request.grammar is None:
        raise RequestError("closing is 'require', which needs a grammar", param="closing")
    for name in ("special_tokens", "skip_special_tokens"):
        value = getattr(request, name)
        if not isinstance(value, bool):
            raise _field_error(name, "True or False", value)


def _check_ranges(request: Request) -> None:
    """Check the integer fields and the timeout of a request."""
    if request.max_tokens is not None:
        check_integer("max_tokens", request.max_tokens, 1, 2**31 - 1)
    max_min_tokens = request.max_tokens or 2**31 - 1
    check_integer("min_tokens", request.min_tokens, 0, max_min_tokens)
    if request.max_reasoning_tokens is not None:
        check_integer("max_reasoning_tokens", request.max_reasoning_tokens, 1, 2**31 - 1)
        if request.grammar is None or request.grammar.marker is None:
            raise RequestError(
                f"max_reasoning_tokens is {request.max_reasoning_tokens}, but the request has no "
                "grammar after a marker (GrammarSpec.after)",
                param="max_reasoning_tokens",
            )
    if request.stop_after is not None:
        check_integer("stop_after", request.stop_after, 0, 2**31 - 1)
    check_integer("priority", request.priority, -(2**31), 2**31 - 1)
    check_timeout(request.timeout_s)
    check_integer("n", request.n, 1, MAX_SAMPLES)
    if request.n > 1:
        raise RequestError(
            f"n is {request.n}, must be 1; submit the requests of Request.samples() instead",
            param="n",
        )


def _check_stop_strings(request: Request, limits: Limits) -> None:
    stops = request.stop or ()
    if isinstance(stops, str):
        raise _field_error("stop", "a list of non-empty strings", stops)
    if len(stops) > limits.stop_strings:
        raise RequestError(
            f"stop has {len(stops)} strings, more than {limits.stop_strings} (Limits.stop_strings)",
            param="stop",
        )
    if not all(isinstance(string, str) and string for string in stops):
        raise _field_error("stop", "a list of non-empty strings", stops)
    num_characters = sum(map(len, stops))
    if num_characters > limits.stop_characters:
        raise RequestError(
            f"stop has {num_characters} characters, more than {limits.stop_characters} "
            "(Limits.stop_characters)",
            param="stop",
        )


def _check_num_biases(request: Request, limits: Limits) -> None:
    bias = request.logit_bias
    if isinstance(bias, Mapping) and len(bias) > limits.logit_biases:
        raise RequestError(
            f"logit_bias has {len(bias)} ids, more than {limits.logit_biases} "
            "(Limits.logit_biases)",
            param="logit_bias",
        )
