"""Conversion of requests in OpenAI's format to requests of the engine.

A request with an unknown or unsupported field is refused with an error that names the field. Only
a few fields that cannot affect the output, such as ``user``, are ignored.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from graft.grammar.grammar_spec import GrammarSpec
from graft.grammar.vocabulary import Vocabulary
from graft.models.errors import TemplateUnavailableError, TokenizerError
from graft.models.request import (
    MAX_SAMPLES,
    Limits,
    Request,
    check_size,
    check_timeout,
    check_token_ids,
)
from graft.models.tokenizer import RESERVED_VARIABLES, Tokenizer
from graft.sampling.checks import short_repr
from graft.sampling.params import MAX_LOGPROBS
from graft.tools.serve import reasoning
from graft.tools.serve.errors import ApiError
from graft.tools.serve.fields import PLAIN_FIELDS, read_bool, read_integer
from graft.tools.serve.grammars import requires_answer
from graft.tools.serve.messages import read_messages
from graft.tools.serve.tool_calls import ToolChoice, read_tool_choice, shown_schema, template_tools
from graft.tools.serve.tool_formats import TOOL_FORMATS, find_tool_format

_MAX_PRIORITY = 2**31 - 1
_STREAM_OPTIONS = {"include_usage", "continuous_usage_stats", "include_obfuscation"}
#: Maximum number of bad_words, and of their characters in total. The single thread of the parser
#: encodes them.
_MAX_BAD_WORDS = 1024
_MAX_BAD_WORD_CHARACTERS = 1 << 14


class _BadWords(NamedTuple):
    """The words of bad_words.

    Attributes
    ----------
    ids
        Tokens that spell a word or a word after a space.
    texts
        Words of several tokens.
    """

    ids: set[int]
    texts: list[str]


@dataclass(frozen=True)
class ApiRequest:
    """An API request for generated text, converted to requests of the engine.

    Attributes
    ----------
    id
        Id of the response.
    chat
        Whether this is a chat completion.
    requests
        Requests of the engine, one per choice of the response: first all samples of the first
        prompt, then all samples of the second prompt, and so on.
    prompts
        Token ids of each prompt.
    stream
        Whether the response is streamed.
    include_usage
        Whether the last chunk of a stream reports the token usage.
    continuous_usage
        Whether every chunk of a stream reports the token usage so far.
    role
        Role of the generated message.
    echo
        For each prompt, the text that precedes the generated text in the response; None if the
        response has only the generated text.
    prompt_logprobs
        Number of most likely tokens to report for each position of the prompts; None for none.
    include_stop
        Whether the text of an output includes the stop string that ended it.
    return_token_ids
        Whether to report the token ids of prompts and outputs.
    ids_as_names
        Whether log probabilities name tokens by their ids, in the form ``token_id:5``.
    prompt_only
        Whether the response has the echoed prompt and no generated text (``max_tokens: 0``).
    tools
        Functions that the model may call.
    reasoning
        For each prompt, whether the output starts within a reasoning section; None if the output
        has no such section.
    include_reasoning
        Whether the response has the text of the reasoning section.
    separate_reasoning
        Whether the reasoning section is a separate field. If not, it is part of the content.
    fields
        Fields of the request that a response of ``/v1/responses`` repeats.
    created
        Unix time of the request.
    """

    id: str
    chat: bool
    requests: list[Request]
    prompts: list[list[int]]
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    role: str = "assistant"
    echo: Sequence[str] | None = None
    prompt_logprobs: int | None = None
    include_stop: bool = False
    return_token_ids: bool = False
    ids_as_names: bool = False
    prompt_only: bool = False
    tools: ToolChoice = field(default_factory=lambda: ToolChoice([]))
    reasoning: Sequence[bool | None] = ()
    include_reasoning: bool = True
    separate_reasoning: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def prompt_index(self, index: int) -> int:
        """Return the index of the prompt of a choice."""
        return index * len(self.prompts) // len(self.requests)


class RequestParser:
    """A converter of API requests to requests of the engine. It is not thread-safe.

    Parameters
    ----------
    tokenizer
        Tokenizer of the model.
    limits
        Maximum sizes of requests.
    name
        Name of the model that is served.
    max_length
        Maximum number of tokens of prompt and output together.
    reasoning_parser
        One of `graft.tools.serve.reasoning.REASONING_PARSERS`; None if the model does not reason.
    tool_call_parser
        Name of the notation in which the model writes calls; None for the notation that the chat
        template describes.

    Attributes
    ----------
    tool_format
        The notation of calls.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        name: str,
        max_length: int,
        reasoning_parser: str | None = None,
        tool_call_parser: str | None = None,
    ):
        self.tokenizer = tokenizer
        self.limits = limits
        self.name = name
        self.max_length = max_length
        self._reasoning_parser = reasoning_parser
        if tool_call_parser is None:
            self.tool_format = find_tool_format(tokenizer.tool_template)
        else:
            self.tool_format = TOOL_FORMATS[tool_call_parser]
        vocabulary = Vocabulary.from_tokenizer(
            tokenizer.backend, tokenizer.vocab_size, tokenizer.stop_ids
        )
        self._token_bytes = vocabulary.tokens
        added = tokenizer.backend.get_added_tokens_decoder()
        self._added_tokens = {i: token.content.encode() for i, token in added.items()}

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token. For a special token, return its name in UTF-8."""
        found = self._token_bytes[token] if token < len(self._token_bytes) else b""
        return found or self._added_tokens.get(token, b"")

    def token_text(self, token: int) -> str:
        """Return the text of a token. Incomplete characters are replaced by U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def parse(
        self, fields: Mapping[str, Any], chat: bool, grammar: GrammarSpec | None, schema: Any = None
    ) -> ApiRequest:
        """Convert an API request to requests of the engine.

        Most sampling parameters are not checked here. The engine checks them on submission.

        Parameters
        ----------
        fields
            Result of `check_fields`.
        chat
            Whether this is a chat completion.
        grammar
            Grammar of the output; None for free text.
        schema
            JSON schema of the output for the chat template; None if there is none.

        Raises
        ------
        ApiError, GraftError
            If a field is invalid.
        """
        _check_best_of(fields)
        whole_prompts = [self.chat_prompt(fields, schema)] if chat else self._prompts(fields)
        bad_words = self._read_bad_words(fields)
        options = self._options(fields, chat, grammar, bad_words.ids)
        prompts = self._truncate(fields, whole_prompts, options["max_tokens"])
        self._check_lengths(fields, prompts, options["max_tokens"])
        reasoning_starts: list[bool | None] = [None] * len(prompts)
        if chat:
            reasoning_starts = [self._reasoning_start(fields, prompt) for prompt in prompts]
        prefix = "chatcmpl" if chat else "cmpl"
        suffix = secrets.token_hex(12)
        output_grammar = _without_bad_words(bad_words.texts, grammar)
        request = Request(grammar=output_grammar, **options)
        requests: list[Request] = []
        for i, tokens in enumerate(prompts):
            one = replace(request, tokens=tokens, id=f"{prefix}-{suffix}/{i}")
            start = reasoning_starts[i]
            if start is not None:
                one = self._with_reasoning(one, start, required=requires_answer(fields))
            requests += one.samples()
        stream_options = _read_stream_options(fields)
        return ApiRequest(
            id=f"{prefix}-{_read_request_id(fields) or suffix}",
            chat=chat,
            requests=requests,
            prompts=prompts,
            stream=read_bool(fields, "stream"),
            include_usage=read_bool(stream_options, "include_usage"),
            continuous_usage=read_bool(stream_options, "continuous_usage_stats"),
            role=_response_role(fields) if chat else "assistant",
            echo=self._echo(fields, chat, prompts, whole_prompts),
            prompt_logprobs=_read_prompt_logprobs(fields, chat),
            include_stop=read_bool(fields, "include_stop_str_in_output"),
            return_token_ids=read_bool(fields, "return_token_ids"),
            ids_as_names=read_bool(fields, "return_tokens_as_token_ids"),
            prompt_only=_is_prompt_only(fields, chat),
            tools=read_tool_choice(fields),
            reasoning=reasoning_starts,
            include_reasoning=read_bool(fields, "include_reasoning", True),
            separate_reasoning=read_bool(fields, "separate_reasoning", True),
        )

    def _truncate(
        self, fields: Mapping[str, Any], prompts: list[list[int]], max_tokens: Any
    ) -> list[list[int]]:
        """Truncate prompts to ``truncate_prompt_tokens``.

        The value -1 means the context length minus the maximum length of the output.
        """
        side = fields.get("truncation_side", "left")
        if side not in ("left", "right"):
            raise ApiError(
                f"truncation_side must be left or right, got {short_repr(side)}",
                param="truncation_side",
            )
        length = read_integer(fields, "truncate_prompt_tokens", -1, 2**63 - 1)
        if length is None:
            return prompts
        if length == 0:
            raise ApiError(
                "truncate_prompt_tokens must be -1 or positive, got 0",
                param="truncate_prompt_tokens",
            )
        if length < 0:
            output_length = max_tokens if type(max_tokens) is int else 1
            length = max(1, self.max_length - output_length)
        if side == "right":
            return [tokens[:length] for tokens in prompts]
        return [tokens[-length:] for tokens in prompts]

    def _check_lengths(
        self, fields: Mapping[str, Any], prompts: Sequence[list[int]], max_tokens: Any
    ) -> None:
        """Check that prompt and output fit into the context, with the messages of vLLM and SGLang.

        The engine checks the lengths too, but its messages name options of the engine.
        """
        length = max((len(tokens) for tokens in prompts), default=0)
        limit = f"the model's maximum context length is {self.max_length} tokens"
        if length >= self.max_length:
            raise ApiError(
                f"the prompt has {length} tokens and is longer than the model's context length: "
                f"{limit}, including the output",
                param="messages" if "messages" in fields else "prompt",
            )
        if type(max_tokens) is int and length + max_tokens > self.max_length:
            name = "max_tokens"
            if "max_completion_tokens" in fields:
                name = "max_completion_tokens"
            raise ApiError(
                "Requested token count exceeds the model's maximum context length: "
                f"{length} tokens of the prompt and {name} {max_tokens}, but {limit}",
                param=name,
            )

    def chat_prompt(self, fields: Mapping[str, Any], schema: Any = None) -> list[int]:
        """Apply the chat template to the messages and return the tokens of the prompt.

        `schema` is the JSON schema of the output, which the template may show.

        Raises
        ------
        ApiError, RequestError
            If a field is invalid, or the template rejects the messages.
        TemplateUnavailableError
            If no child process could render the template.
        """
        if not self.tokenizer.has_chat_template:
            raise ApiError("the model has no chat template: use /v1/completions")
        messages = read_messages(fields.get("messages"), self.tokenizer.tool_template)
        check_size("the prompt", messages, "prompt_bytes", self.limits)
        options = self._template_variables(fields)
        continues = read_bool(fields, "continue_final_message")
        adds_prompt = read_bool(fields, "add_generation_prompt", not continues)
        if continues and adds_prompt:
            raise ApiError(
                "continue_final_message requires add_generation_prompt: false",
                param="continue_final_message",
            )
        options = {"add_generation_prompt": adds_prompt} | options
        tools = read_tool_choice(fields)
        if tools.required:
            schema = shown_schema(tools)
        try:
            tokens = self.tokenizer.chat(
                messages,
                continue_final_message=continues,
                parse_special=False,
                max_bytes=self.limits.prompt_bytes,
                schema=schema,
                **options,
            )
        except TokenizerError as error:
            # Clients must not learn the path of the model.
            message = str(error).replace(str(self.tokenizer.path), self.name)
            if isinstance(error, TemplateUnavailableError):
                raise type(error)(message) from error
            raise ApiError(message, param="messages") from error
        if read_bool(fields, "add_special_tokens"):
            tokens = self.tokenizer.encode("", special=True) + tokens
        return tokens

    def _template_variables(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of the chat template that the request defines."""
        variables = fields.get("chat_template_kwargs", {})
        reserved = RESERVED_VARIABLES | {"schema", "tools"}
        if not isinstance(variables, dict) or reserved & set(variables):
            raise ApiError(
                f"chat_template_kwargs must be an object, without {', '.join(sorted(reserved))}",
                param="chat_template_kwargs",
            )
        documents = fields.get("documents")
        if documents is not None:
            if not isinstance(documents, list) or not all(isinstance(d, dict) for d in documents):
                raise ApiError(
                    f"documents must be a list of objects, got {short_repr(documents)}",
                    param="documents",
                )
            check_size("documents", documents, "prompt_bytes", self.limits)
            variables = {"documents": documents} | variables
        effort = fields.get("reasoning_effort")
        if effort is not None:
            if not isinstance(effort, str):
                raise ApiError(
                    f"reasoning_effort must be a string, got {short_repr(effort)}",
                    param="reasoning_effort",
                )
            variables = {"reasoning_effort": effort} | variables
        if fields.get("tools") and fields.get("tool_choice") != "none":
            variables = variables | {"tools": template_tools(fields["tools"])}
        return variables

    def _prompts(self, fields: Mapping[str, Any]) -> list[list[int]]:
        """Return the token ids of each prompt of a completion request."""
        prompt: Any = fields.get("prompt")
        check_size("the prompt", prompt, "prompt_bytes", self.limits)
        has_several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts: list[Any] = prompt if has_several else [prompt]
        if len(prompts) > MAX_SAMPLES:
            raise ApiError(f"at most {MAX_SAMPLES} prompts, got {len(prompts)}", param="prompt")
        _check_num_choices(fields, len(prompts))
        for one in prompts:
            if not isinstance(one, (str, list)):
                raise ApiError(
                    f"a prompt must be text or token ids, got {short_repr(one)}", param="prompt"
                )
        special = read_bool(fields, "add_special_tokens", True)
        tokens = []
        for one in prompts:
            if isinstance(one, str):
                one = self.tokenizer.encode(one, special=special)
            tokens.append(one)
        return tokens

    def _reasoning_start(self, fields: Mapping[str, Any], prompt: Sequence[int]) -> bool | None:
        """Return whether the output starts within a reasoning section; None if it has none."""
        if self._reasoning_parser is None:
            return None
        text = self.tokenizer.decode(prompt[-64:], special=True)
        continued = ""
        if read_bool(fields, "continue_final_message"):
            continued = read_messages(fields["messages"], self.tokenizer.tool_template)[-1][
                "content"
            ]
        if not reasoning.has_reasoning(text, continued):
            return None
        return reasoning.starts_in_reasoning(self._reasoning_parser, text, continued)

    def _with_reasoning(self, request: Request, start: bool, *, required: bool) -> Request:
        """Return a request whose output can have a reasoning section; see `answer_grammar`."""
        shown = (*request.shown_tokens, reasoning.BEGIN, reasoning.END)
        request = replace(request, shown_tokens=shown)
        if request.grammar is None:
            return request
        grammar = reasoning.answer_grammar(request.grammar, start, required=required)
        return replace(request, grammar=grammar)

    def _echo(
        self,
        fields: Mapping[str, Any],
        chat: bool,
        prompts: Sequence[list[int]],
        whole_prompts: Sequence[list[int]],
    ) -> list[str] | None:
        """Return the value of `ApiRequest.echo`.

        For a completion, this is the text of the truncated prompt. For a chat, it is the content of
        the last message, if this message has the same role as the response.
        """
        if not read_bool(fields, "echo"):
            return None
        if chat:
            last = read_messages(fields["messages"], self.tokenizer.tool_template)[-1]
            return [last["content"] if last["role"] == _response_role(fields) else ""]
        given = fields["prompt"]
        texts = []
        for i, tokens in enumerate(prompts):
            text = given[i] if isinstance(given, list) and len(given) == len(prompts) else given
            if not isinstance(text, str) or len(tokens) < len(whole_prompts[i]):
                check_token_ids("prompt", tokens, self.tokenizer.vocab_size)
                text = self.tokenizer.decode(tokens)
            texts.append(text)
        return texts

    def _options(
        self,
        fields: Mapping[str, Any],
        chat: bool,
        grammar: GrammarSpec | None,
        bad_word_ids: set[int],
    ) -> dict[str, Any]:
        """Return the fields of `Request` except for prompt, grammar and id."""
        options: dict[str, Any] = {"temperature": 1.0, "max_tokens": None if chat else 16}
        for name, request_field in PLAIN_FIELDS.items():
            if name in fields:
                options[request_field] = fields[name]
        # Replicas subtract the elapsed time from timeout_s before an engine checks it.
        check_timeout(fields.get("timeout_s"))
        # In the API, as in vLLM, requests with a lower value run first. In the engine, requests
        # with a higher value run first.
        priority = read_integer(fields, "priority", -_MAX_PRIORITY, _MAX_PRIORITY)
        options["priority"] = -(priority or 0)
        if "seed" in fields:
            # In mode "coupled", the output depends only on the request and its seed, and not on
            # the other requests in the batch or on the draft length.
            seed = read_integer(fields, "seed", -(2**63), 2**63 - 1)
            options["seed"] = None if seed is None else seed % 2**64
            options["verify"] = "coupled"
        if "top_k" in fields:
            options["top_k"] = 0 if fields["top_k"] == -1 else fields["top_k"]
        if "max_completion_tokens" in fields:
            options["max_tokens"] = fields["max_completion_tokens"]
        if _is_prompt_only(fields, chat):
            options["max_tokens"] = 1  # the generated token is not a part of the response
        if "stop" in fields:
            stop = fields["stop"]
            options["stop"] = [stop] if isinstance(stop, str) else stop
        if "logit_bias" in fields:
            options["logit_bias"] = _read_logit_bias(fields["logit_bias"])
        options["logprobs"] = _read_logprobs(fields, chat)
        if read_tool_choice(fields).functions:
            options["shown_tokens"] = self.tool_format.markers
        if read_bool(fields, "ignore_eos"):
            options |= self._ignore_stop_ids(fields, grammar, options["max_tokens"])
        banned = {*options.get("banned_ids", ()), *bad_word_ids}
        if banned:
            options["banned_ids"] = sorted(banned)
        return options

    def _read_bad_words(self, fields: Mapping[str, Any]) -> _BadWords:
        """Return bad_words, without white space at their beginning, by their number of tokens."""
        words = fields.get("bad_words", [])
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ApiError(
                f"bad_words must be a list of strings, got {short_repr(words)}", param="bad_words"
            )
        num_characters = sum(map(len, words))
        if len(words) > _MAX_BAD_WORDS or num_characters > _MAX_BAD_WORD_CHARACTERS:
            raise ApiError(
                f"bad_words has {len(words)} words with {num_characters} characters, at most "
                f"{_MAX_BAD_WORDS} words with {_MAX_BAD_WORD_CHARACTERS} characters are allowed",
                param="bad_words",
            )
        stripped = [word.lstrip() for word in words]
        if not all(stripped):
            raise ApiError(
                f"bad_words must not contain an empty word, got {short_repr(words)}",
                param="bad_words",
            )
        bad_words = _BadWords(set(), [])
        for word in stripped:
            tokens = self._word_ids(word)
            if len(tokens) > 1:
                bad_words.texts.append(word)
            for ids in (tokens, self._word_ids(f" {word}")):
                if len(ids) == 1:
                    bad_words.ids.add(ids[0])
        return bad_words

    def _word_ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=False, parse_special=False)

    def _ignore_stop_ids(
        self, fields: Mapping[str, Any], grammar: GrammarSpec | None, max_tokens: Any
    ) -> dict[str, Any]:
        """Return the fields of `Request` that prevent stop ids of the model.

        With a grammar, a stop id is still generated where the grammar allows nothing else.
        """
        if grammar is not None:
            # This `min_tokens` is for stop ids. Stop strings are delayed as the request says.
            stop_after = read_integer(fields, "min_tokens", 0, 2**31 - 1) or 0
            return {"min_tokens": max_tokens or 2**31 - 1, "stop_after": stop_after}
        stop_ids = fields.get("stop_token_ids", [])
        if not isinstance(stop_ids, list):
            raise ApiError(
                f"stop_token_ids must be a list, got {short_repr(stop_ids)}", param="stop_token_ids"
            )
        return {"banned_ids": [token for token in self.tokenizer.stop_ids if token not in stop_ids]}


def _without_bad_words(texts: list[str], grammar: GrammarSpec | None) -> GrammarSpec | None:
    """Return the grammar of a request, or of text without the bad words of several tokens."""
    if not texts:
        return grammar
    if grammar is not None:
        raise ApiError(
            f"bad_words of several tokens, such as {short_repr(texts[0])}, cannot be combined "
            "with a grammar or tools",
            param="bad_words",
        )
    return GrammarSpec.structural_format({"type": "any_text", "excludes": texts})


def _is_prompt_only(fields: Mapping[str, Any], chat: bool) -> bool:
    """Return whether the response has the echoed prompt and no generated text, as in vLLM."""
    max_tokens = fields.get("max_tokens")
    return not chat and type(max_tokens) is int and max_tokens == 0 and read_bool(fields, "echo")


def _check_best_of(fields: Mapping[str, Any]) -> None:
    n = fields.get("n", 1)
    best_of = fields.get("best_of", n)
    if best_of != n or isinstance(best_of, bool):
        raise ApiError(
            f"best_of must be equal to n, which is {short_repr(n)}, got {short_repr(best_of)}",
            param="best_of",
        )


def _check_num_choices(fields: Mapping[str, Any], num_prompts: int) -> None:
    """Limit the number of choices. If `n` itself is invalid, the engine reports the error."""
    n = fields.get("n", 1)
    num_choices = n * num_prompts if type(n) is int and n <= MAX_SAMPLES else 0
    if num_choices > MAX_SAMPLES:
        raise ApiError(f"at most {MAX_SAMPLES} choices, got {num_choices}", param="n")


def _read_request_id(fields: Mapping[str, Any]) -> str | None:
    request_id = fields.get("request_id")
    if request_id is not None and not isinstance(request_id, str):
        raise ApiError(
            f"request_id must be a string, got {short_repr(request_id)}", param="request_id"
        )
    return request_id


def _read_stream_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of stream_options that are not null."""
    options = fields.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - _STREAM_OPTIONS:
        raise ApiError(
            f"stream_options must be an object with {' or '.join(sorted(_STREAM_OPTIONS))}, "
            f"got {short_repr(options)}",
            param="stream_options",
        )
    return {name: value for name, value in options.items() if value is not None}


def _response_role(fields: Mapping[str, Any]) -> str:
    """Return the role of the generated message, as vLLM defines it.

    It is the role of the last message if the prompt does not begin a new message.
    """
    continues = read_bool(fields, "continue_final_message")
    if read_bool(fields, "add_generation_prompt", not continues):
        return "assistant"
    return str(fields["messages"][-1]["role"])


def _read_logprobs(fields: Mapping[str, Any], chat: bool) -> Any:
    """Return the value of `Request.logprobs`."""
    if not chat:
        return fields.get("logprobs")
    if read_bool(fields, "logprobs"):
        return fields.get("top_logprobs", 0)
    if fields.get("top_logprobs"):
        raise ApiError("top_logprobs requires logprobs", param="top_logprobs")
    return None


def _read_prompt_logprobs(fields: Mapping[str, Any], chat: bool) -> int | None:
    """Return the value of `ApiRequest.prompt_logprobs`."""
    count = read_integer(fields, "prompt_logprobs", 0, MAX_LOGPROBS)
    stream = read_bool(fields, "stream")
    if count is not None and stream:
        raise ApiError("prompt_logprobs requires stream: false", param="prompt_logprobs")
    if count is None and not chat and read_bool(fields, "echo") and "logprobs" in fields:
        count = read_integer(fields, "logprobs", 0, MAX_LOGPROBS)
    return count


def _read_logit_bias(bias: Any) -> dict[int, Any]:
    """Return a logit bias by token id. Keys of JSON objects are strings and are converted."""
    if not isinstance(bias, dict):
        raise ApiError(
            f"logit_bias must map token ids to numbers, got {short_repr(bias)}", param="logit_bias"
        )
    converted = {}
    invalid = []
    for key, value in bias.items():
        try:
            converted[int(key)] = value
        except ValueError:
            invalid.append(key)
    if invalid:
        raise ApiError(
            f"logit_bias must map token ids to numbers, got the keys {short_repr(invalid)}",
            param="logit_bias",
        )
    return converted
