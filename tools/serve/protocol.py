"""Conversion of requests in OpenAI's format to requests of the engine.

A request with an unknown or unsupported field is refused with an error that names the field. Only
a few fields that cannot affect the output, such as ``user``, are ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.grammar.grammar_spec import GrammarSpec
from graft.grammar.spec import parse_json
from graft.grammar.vocabulary import Vocabulary
from graft.models.request import MAX_SAMPLES, Limits, Request, check_size
from graft.models.tokenizer import RESERVED_VARIABLES, Tokenizer
from graft.sampling.checks import short_repr
from graft.sampling.params import SamplingParams
from graft.tools.grammar_options import make_grammar
from graft.tools.serve.errors import ApiError
from graft.tools.serve.tool_calls import read_tools, tool_grammar

#: Sampling parameters that an API request cannot set.
_UNSUPPORTED_PARAMS = {"sample", "verify", "relaxed", "banned_ids", "logprobs_masked"}
#: Sampling parameters whose API form differs from their form in `Request`, so that `RequestParser`
#: has to convert them.
_CONVERTED_PARAMS = {"seed", "top_k", "logit_bias", "logprobs"}
#: API names of the sampling parameters that have another name in the API.
_API_NAMES = {
    "stop_ids": "stop_token_ids",
    "allowed_ids": "allowed_token_ids",
}


def _plain_fields() -> dict[str, str]:
    """Map the API fields that are copied without conversion to the fields of `Request`."""
    names = {param.name for param in dataclasses.fields(SamplingParams)}
    names -= _UNSUPPORTED_PARAMS | _CONVERTED_PARAMS
    names |= {"n", "max_tokens", "timeout_s"}
    return {_API_NAMES.get(name, name): name for name in names}


_PLAIN_FIELDS = _plain_fields()
_OTHER_FIELDS = {
    "model",
    "stream",
    "stream_options",
    "stop",
    "priority",
    "response_format",
    "structured_outputs",
    *_CONVERTED_PARAMS,
}
#: Fields that vLLM had before version 0.12 in place of structured_outputs, with the keys of
#: structured_outputs that replace them.
_GUIDED_FIELDS = {
    f"guided_{key}": key for key in ("json", "json_object", "regex", "choice", "grammar")
}
_CHAT_FIELDS = {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
}
_COMPLETION_FIELDS = {"prompt"}
#: Fields that are accepted and ignored, because they do not affect the output.
_IGNORED_FIELDS = {
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
}
#: Fields of which only one value is supported, with this value.
_CONSTANT_FIELDS: dict[str, Any] = {
    "store": False,
    "echo": False,
    "best_of": 1,
    "modalities": ["text"],
}
_STRUCTURED_KEYS = {
    "json",
    "json_object",
    "regex",
    "choice",
    "grammar",
    "structural_tag",
}
#: Maximum number of tool calls in one response choice, if parallel calls are allowed.
_MAX_TOOL_CALLS = 128


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
    stream
        Whether the response is streamed.
    include_usage
        Whether the last chunk of a stream reports the token usage.
    tool_choice
        ``"auto"`` or ``"required"``; empty if the model must not call tools.
    max_tool_calls
        Maximum number of tool calls in one choice of the response.
    created
        Unix time of the request.
    """

    id: str
    chat: bool
    requests: list[Request]
    stream: bool = False
    include_usage: bool = False
    tool_choice: str = ""
    max_tool_calls: int = 1
    created: int = field(default_factory=lambda: int(time.time()))


def check_fields(fields: Mapping[str, Any], chat: bool, model: str) -> dict[str, Any]:
    """Check the field names of a request and return the fields whose value is not null.

    Parameters
    ----------
    fields
        Fields of the request.
    chat
        Whether this is a chat completion.
    model
        Name of the model that is served.

    Raises
    ------
    ApiError
        If a field is unknown or not supported. If the request asks for another model, the error
        has status 404.
    """
    present = {key: value for key, value in fields.items() if value is not None}
    known = {
        *_PLAIN_FIELDS,
        *_OTHER_FIELDS,
        *_GUIDED_FIELDS,
        *_IGNORED_FIELDS,
        *_CONSTANT_FIELDS,
    }
    known |= _CHAT_FIELDS if chat else _COMPLETION_FIELDS
    for key, value in present.items():
        if key not in known:
            raise ApiError(f"the field {short_repr(key)} is unknown, or not supported", param=key)
        if key in _CONSTANT_FIELDS and value != _CONSTANT_FIELDS[key]:
            raise ApiError(
                f"{key} can only be {_CONSTANT_FIELDS[key]!r}, got {short_repr(value)}", param=key
            )
    if present.get("model", model) != model:
        raise ApiError(
            f"there is no model {short_repr(present['model'])}, only {model!r}",
            404,
            param="model",
            code="model_not_found",
        )
    return present


def find_grammar(fields: Mapping[str, Any], limits: Limits) -> tuple[str, str] | None:
    """Return the grammar that response_format, structured_outputs or tools define.

    Parameters
    ----------
    fields
        Fields of the request without nulls.
    limits
        Size limits that requests must observe.

    Returns
    -------
    (str, str) or None
        Arguments for `make_grammar_spec`; None if the request has no grammar.

    Raises
    ------
    ApiError, RequestError
        If the request has more than one grammar, or the grammar is too large.
    """
    found = [*_response_format(fields), *_structured_outputs(fields)]
    functions, choice = read_tools(fields)
    if functions:
        check_size("tools", functions, "grammar_bytes", limits)
        found.append(("tools", *tool_grammar(functions, choice)))
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise ApiError(f"give at most one grammar, got {names}", param=found[1][0])
    if not found:
        return None
    [(name, key, value)] = found
    check_size(name, value, "grammar_bytes", limits)
    return key, json.dumps(value)


def _response_format(fields: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Return the grammar of response_format as a list of at most one grammar.

    A grammar is a tuple of the name of the request field, a key of structured_outputs, and the
    value of that key.
    """
    response_format = fields.get("response_format", {"type": "text"})
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return []
    if kind in ("json_object", "structural_tag"):
        return [("response_format", kind, response_format)]
    if kind == "json_schema":
        definition = response_format.get("json_schema")
        if isinstance(definition, dict) and "schema" in definition:
            return [("response_format", "json", definition["schema"])]
    raise ApiError(
        "response_format must be text, json_object, json_schema with a schema, or "
        f"structural_tag, got {short_repr(response_format)}",
        param="response_format",
    )


def _structured_outputs(fields: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    """Return the grammars of structured_outputs and of the older guided fields.

    Each grammar is a tuple of the name of the request field, a key of structured_outputs, and the
    value of that key. Guided fields, such as ``guided_json``, are vLLM's former request fields.
    """
    structured = fields.get("structured_outputs")
    if structured is None:
        structured = {}
    elif (
        not isinstance(structured, dict)
        or not _STRUCTURED_KEYS.issuperset(structured)
        or all(value is None for value in structured.values())
    ):
        raise ApiError(
            f"structured_outputs must have one of {', '.join(sorted(_STRUCTURED_KEYS))}, "
            f"got {short_repr(structured)}",
            param="structured_outputs",
        )
    # Error messages name the key (such as "regex"), not the field structured_outputs.
    entries = [(key, key, value) for key, value in structured.items()]
    for name, key in _GUIDED_FIELDS.items():
        if name in fields:
            entries.append((name, key, fields[name]))
    return [
        (name, key, value)
        for name, key, value in entries
        if value is not None and (key, value) != ("json_object", False)
    ]


@functools.lru_cache(64)
def make_grammar_spec(key: str, text: str) -> GrammarSpec | None:
    """Return the grammar that a key of vLLM's structured_outputs defines.

    Results are cached, because the check of a grammar can be slow, and clients often send the same
    grammar in many requests.

    Parameters
    ----------
    key
        Key of structured_outputs, for example ``"regex"``.
    text
        Value of the key, as JSON text.

    Raises
    ------
    GrammarError, OptionError
        If the grammar is invalid.
    """
    value = json.loads(text)
    if key == "structural_tag":
        value = _structural_tag(value)
    elif key == "json":
        key = "schema"
    elif key == "json_object":
        value = True
    elif key == "grammar":  # only EBNF rules contain "::=", Lark rules do not
        key = "ebnf" if "::=" in str(value) else "lark"
    return make_grammar({key: value}, partial=False)


def _structural_tag(value: Any) -> Any:
    """Convert a structural tag from OpenAI's format to the format of `make_grammar`."""
    if isinstance(value, str):
        value = parse_json("structural tag", value)
    if not isinstance(value, dict) or value.get("type", "structural_tag") != "structural_tag":
        return value
    converted = {}
    for key, entry in value.items():
        if key == "structures":
            converted["tags"] = entry
        elif key != "type":
            converted[key] = entry
    return converted


class RequestParser:
    """A converter of API requests to requests of the engine. It is not thread-safe.

    Parameters
    ----------
    tokenizer
        Tokenizer of the model.
    limits
        Size limits that requests must observe.
    name
        Name of the model that is served.
    """

    def __init__(self, tokenizer: Tokenizer, limits: Limits, name: str):
        self._tokenizer = tokenizer
        self.limits = limits
        self.name = name
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

    def parse(
        self, fields: Mapping[str, Any], chat: bool, grammar: GrammarSpec | None
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

        Raises
        ------
        ApiError, GraftError
            If a field is invalid.
        """
        options: dict[str, Any] = {"temperature": 1.0, "max_tokens": None if chat else 16}
        for name, request_field in _PLAIN_FIELDS.items():
            if name in fields:
                options[request_field] = fields[name]
        options |= self._converted_options(fields, chat)
        prompts = [self._chat(fields, grammar)] if chat else self._prompts(fields.get("prompt"))
        n = fields.get("n", 1)
        # Limit the number of choices, which is `n` times the number of prompts. If `n` itself is
        # invalid, the engine reports the error.
        if type(n) is int and n <= MAX_SAMPLES:
            num_choices = n * len(prompts)
            if num_choices > MAX_SAMPLES:
                raise ApiError(f"at most {MAX_SAMPLES} choices, got {num_choices}", param="n")
        prefix = "chatcmpl" if chat else "cmpl"
        request_id = f"{prefix}-{secrets.token_hex(12)}"
        requests: list[Request] = []
        for i, tokens in enumerate(prompts):
            request = Request(
                tokens=tokens,
                id=f"{request_id}/{i}",
                grammar=grammar,
                **options,
            )
            requests += request.samples()
        stream_options = fields.get("stream_options", {})
        known = {"include_usage", "include_obfuscation"}
        if not isinstance(stream_options, dict) or set(stream_options) - known:
            raise ApiError(
                "stream_options must be an object with include_usage, "
                f"got {short_repr(stream_options)}",
                param="stream_options",
            )
        functions, choice = read_tools(fields)
        parallel = _read_bool(fields, "parallel_tool_calls", True) and choice == "auto"
        return ApiRequest(
            id=request_id,
            chat=chat,
            requests=requests,
            stream=_read_bool(fields, "stream"),
            include_usage=bool(stream_options.get("include_usage")),
            tool_choice=choice if functions else "",
            max_tool_calls=_MAX_TOOL_CALLS if parallel else 1,
        )

    def _converted_options(self, fields: Mapping[str, Any], chat: bool) -> dict[str, Any]:
        """Convert the API fields whose format differs from that of the fields of `Request`."""
        options: dict[str, Any] = {}
        seed = fields.get("seed")
        if type(seed) is int:
            # In mode "coupled", the output depends only on the request and its seed, and not on
            # the other requests in the batch or on the draft length.
            options["seed"] = seed % (1 << 64)
            options["verify"] = "coupled"
        elif seed is not None:
            raise ApiError(f"seed must be an integer, got {short_repr(seed)}", param="seed")
        priority = fields.get("priority", 0)
        if type(priority) is not int:
            raise ApiError(
                f"priority must be an integer, got {short_repr(priority)}", param="priority"
            )
        # In the API, as in vLLM, requests with a lower value run first. In the engine, requests
        # with a higher value run first.
        options["priority"] = -priority
        if "top_k" in fields:
            options["top_k"] = 0 if fields["top_k"] == -1 else fields["top_k"]
        if "max_completion_tokens" in fields:
            options["max_tokens"] = fields["max_completion_tokens"]
        if "stop" in fields:
            stop = fields["stop"]
            options["stop"] = [stop] if isinstance(stop, str) else stop
        if "logit_bias" in fields:
            options["logit_bias"] = _read_logit_bias(fields["logit_bias"])
        if not chat:
            options["logprobs"] = fields.get("logprobs")
        elif _read_bool(fields, "logprobs"):
            options["logprobs"] = fields.get("top_logprobs", 0)
        elif "top_logprobs" in fields:
            raise ApiError("top_logprobs requires logprobs", param="top_logprobs")
        return options

    def _chat(self, fields: Mapping[str, Any], grammar: GrammarSpec | None) -> list[int]:
        """Apply the chat template to the messages and return the tokens of the prompt."""
        if not self._tokenizer.has_chat_template:
            raise ApiError("the model has no chat template: use /v1/completions")
        messages = fields.get("messages")
        variables = fields.get("chat_template_kwargs", {})
        if not isinstance(messages, list) or not messages:
            raise ApiError("messages must be a list of at least one message", param="messages")
        check_size("the prompt", messages, "prompt_bytes", self.limits)
        reserved = RESERVED_VARIABLES | {"schema", "tools"}
        if not isinstance(variables, dict) or reserved & set(variables):
            raise ApiError(
                f"chat_template_kwargs must be an object, without {', '.join(sorted(reserved))}",
                param="chat_template_kwargs",
            )
        if fields.get("tools") and fields.get("tool_choice") != "none":
            variables = variables | {"tools": fields["tools"]}
        return self._tokenizer.chat(
            [_read_message(message) for message in messages],
            parse_special=False,
            max_bytes=self.limits.prompt_bytes,
            schema=None if grammar is None else grammar.schema,
            **variables,
        )

    def _prompts(self, prompt: Any) -> list[list[int]]:
        """Return the token ids of each prompt of a completion request."""
        check_size("the prompt", prompt, "prompt_bytes", self.limits)
        has_several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts = prompt if has_several else [prompt]
        if len(prompts) > MAX_SAMPLES:
            raise ApiError(f"at most {MAX_SAMPLES} prompts, got {len(prompts)}", param="prompt")
        for one in prompts:
            if not isinstance(one, (str, list)):
                raise ApiError(
                    f"a prompt must be text or token ids, got {short_repr(one)}", param="prompt"
                )
        tokens = []
        for one in prompts:
            if isinstance(one, str):
                one = self._tokenizer.encode(one)
            tokens.append(one)
        return tokens


def _read_bool(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false, got {short_repr(value)}", param=name)
    return value


def _read_logit_bias(bias: Any) -> dict[int, Any]:
    """Return a logit bias by token id. In JSON, the token ids are object keys and hence strings."""
    try:
        return {int(token): value for token, value in bias.items()}
    except (AttributeError, ValueError) as error:
        raise ApiError(
            f"logit_bias must map token ids to numbers: {error}", param="logit_bias"
        ) from error


def _read_message(message: Any) -> dict[str, Any]:
    """Convert a message to the form that chat templates expect.

    The content parts of the message are joined into one text, the arguments of its tool calls are
    parsed from JSON, and the role "developer" is replaced by "system".
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(
            f"a message must be an object with a role, got {short_repr(message)}", param="messages"
        )
    converted = dict(message)
    converted["content"] = _read_content(message.get("content") or "")
    if message["role"] == "developer":
        converted["role"] = "system"
    if message.get("tool_calls"):
        try:
            converted["tool_calls"] = [_read_tool_call(call) for call in message["tool_calls"]]
        except (TypeError, KeyError, ValueError) as error:
            raise ApiError(f"tool_calls cannot be read: {error}", param="messages") from error
    return converted


def _read_content(content: Any) -> str:
    """Return the content of a message, which may be a list of parts, as one text."""
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise ApiError(f"content must be text, got {short_repr(part)}", param="messages")
            texts.append(part["text"])
        return "".join(texts)
    if not isinstance(content, str):
        raise ApiError(f"content must be text, got {short_repr(content)}", param="messages")
    return content


def _read_tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call of an earlier message, with its arguments parsed from JSON."""
    function = call["function"]
    arguments = json.loads(function["arguments"])
    return call | {"function": function | {"arguments": arguments}}
