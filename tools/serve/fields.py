"""Fields of API requests: names, supported values, and conversion of simple values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from graft.sampling.checks import short_repr
from graft.sampling.params import SamplingParams
from graft.tools.serve.errors import ApiError

#: Sampling parameters that an API request cannot set.
_UNSUPPORTED_PARAMS = {"sample", "verify", "relaxed", "banned_ids", "logprobs_masked"}
#: Sampling parameters whose API form differs from their form in `Request`, so that `RequestParser`
#: has to convert them.
_CONVERTED_PARAMS = {"seed", "top_k", "logit_bias", "logprobs"}
#: API names of the sampling parameters that have another name in the API.
_API_NAMES = {"stop_ids": "stop_token_ids", "allowed_ids": "allowed_token_ids"}


def _plain_fields() -> dict[str, str]:
    """Map the API fields that are copied without conversion to the fields of `Request`."""
    names = {param.name for param in dataclasses.fields(SamplingParams)}
    names -= _UNSUPPORTED_PARAMS | _CONVERTED_PARAMS
    names |= {"n", "max_tokens", "timeout_s", "skip_special_tokens"}
    return {_API_NAMES.get(name, name): name for name in names}


#: API fields that are copied to a `Request` without conversion, with their names in `Request`.
PLAIN_FIELDS = _plain_fields()
#: Fields that define a grammar, with the keys of vLLM's structured_outputs that have the same
#: meaning. vLLM had the fields guided_* before version 0.12. SGLang has the last three fields.
GRAMMAR_FIELDS = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "ebnf",
    "json_schema": "json",
}
_OTHER_FIELDS = {
    "model",
    "stream",
    "stream_options",
    "stop",
    "ignore_eos",
    "priority",
    "response_format",
    "structured_outputs",
    "echo",
    "prompt_logprobs",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "include_reasoning",
    "separate_reasoning",
    "include_stop_str_in_output",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "request_id",
    "best_of",
    "bad_words",
    *_CONVERTED_PARAMS,
}
_CHAT_FIELDS = {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "reasoning_effort",
    "verbosity",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
}
_COMPLETION_FIELDS = {"prompt"}
#: Fields that are checked and ignored, because they do not affect the output, with the types of
#: their values. Fast tokenizers have no option for spaces between special tokens, and all grammar
#: backends enforce the same grammar.
_IGNORED_FIELDS: dict[str, type] = {
    "spaces_between_special_tokens": bool,
    "guided_decoding_backend": str,
    "user": str,
    "metadata": dict,
    "service_tier": str,
    "safety_identifier": str,
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "store": bool,
    "rid": str,
}
_TYPE_NAMES = {bool: "true or false", str: "a string", dict: "an object"}
_VERBOSITIES = ("low", "medium", "high")
#: Fields that define grammars, and the beginning of an error message about a grammar.
_GRAMMAR_PARAMS = ("response_format", "structured_outputs", *GRAMMAR_FIELDS, "tools")
_GRAMMAR_ERROR = re.compile(
    r"(JSON schema|tag schema|structural[ _](?:tag|format)|regex|ebnf|lark|choice)\b"
)
#: API fields by the name that error messages of the engine use for them.
_PARAMS: dict[str, tuple[str, ...]] = {
    **{request_field: (name,) for name, request_field in PLAIN_FIELDS.items()},
    **{name: (name,) for name in (*_GRAMMAR_PARAMS, "logit_bias", "stop", "top_k")},
    "max_tokens": ("max_completion_tokens", "max_tokens"),
    "logprobs": ("top_logprobs", "logprobs"),
    "stop ids": ("stop_token_ids",),
}
#: The same for words that also occur in messages about other fields.
_PROMPT_PARAMS = {"prompt": ("prompt", "messages"), "tokens": ("prompt", "messages")}
_WORD = re.compile(r"stop ids|\w+")
#: Fields of which only one value is supported, with this value. It is the default of OpenAI, vLLM
#: and SGLang.
_CONSTANT_FIELDS: dict[str, Any] = {
    "detokenize": True,
    "modalities": ["text"],
    "use_beam_search": False,
    "length_penalty": 1.0,
    "no_stop_trim": False,
    "stream_reasoning": True,
    "thinking_token_budget": -1,
    "return_hidden_states": False,
}
#: As `_CONSTANT_FIELDS`, for chat completions. Functions are given in the field tools.
_CONSTANT_CHAT_FIELDS: dict[str, Any] = {"functions": [], "function_call": "none"}


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
    known = {*PLAIN_FIELDS, *GRAMMAR_FIELDS, *_OTHER_FIELDS, *_IGNORED_FIELDS, *_CONSTANT_FIELDS}
    known |= _CHAT_FIELDS | set(_CONSTANT_CHAT_FIELDS) if chat else _COMPLETION_FIELDS
    present = select_fields(fields, known, model)
    for key, expected in (_CONSTANT_FIELDS | _CONSTANT_CHAT_FIELDS).items():
        value = present.get(key, expected)
        if value != expected or isinstance(value, bool) != isinstance(expected, bool):
            raise ApiError(f"{key} can only be {expected!r}, got {short_repr(value)}", param=key)
    for key, kind in _IGNORED_FIELDS.items():
        if key in present and not isinstance(present[key], kind):
            raise ApiError(
                f"{key} must be {_TYPE_NAMES[kind]}, got {short_repr(present[key])}", param=key
            )
    if present.get("verbosity", "medium") not in _VERBOSITIES:
        raise ApiError(
            f"verbosity must be {', '.join(_VERBOSITIES)}, got {short_repr(present['verbosity'])}",
            param="verbosity",
        )
    if "stream_options" in present and not read_bool(present, "stream"):
        raise ApiError("stream_options requires stream: true", param="stream_options")
    return present


def select_fields(fields: Mapping[str, Any], known: set[str], model: str) -> dict[str, Any]:
    """Return the fields whose value is not null.

    Parameters
    ----------
    fields
        Fields of the request.
    known
        Names of the fields that the endpoint supports.
    model
        Name of the model that is served.

    Raises
    ------
    ApiError
        If a field is not in `known`. If the request asks for another model, the error has status
        404.
    """
    present = {key: value for key, value in fields.items() if value is not None}
    for key in present:
        if key not in known:
            raise ApiError(f"the field {short_repr(key)} is unknown, or not supported", param=key)
    if present.get("model", model) != model:
        raise ApiError(
            f"there is no model {short_repr(present['model'])}, only {model!r}",
            404,
            param="model",
            code="model_not_found",
        )
    return present


def read_bool(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return the value of a boolean field.

    Raises
    ------
    ApiError
        If the value is not a boolean.
    """
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false, got {short_repr(value)}", param=name)
    return value


def read_integer(fields: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """Return the value of an integer field from `low` to `high`; None if the field is absent.

    Raises
    ------
    ApiError
        If the value is not an integer, or is out of range.
    """
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise ApiError(
            f"{name} must be an integer from {low} to {high}, got {short_repr(value)}", param=name
        )
    return value


def find_param(message: str, fields: Mapping[str, Any]) -> str | None:
    """Return the name of the field that an error message of the engine is about.

    Messages of the engine contain names of `Request` fields, and messages about grammars begin with
    the kind of grammar.

    Parameters
    ----------
    message
        Error message.
    fields
        Fields of the request.
    """
    if _GRAMMAR_ERROR.match(message):
        names: tuple[str, ...] = _GRAMMAR_PARAMS
    else:
        words = _WORD.findall(message)
        names = ()
        for table in (_PARAMS, _PROMPT_PARAMS):
            for word in words:
                names += table.get(word, ())
    for name in names:
        if fields.get(name) is not None:
            return name
    return None


def use_api_names(message: str) -> str:
    """Replace names of `Request` fields in an error message of the engine by the API's names."""
    return re.sub(r"\b(stop_ids|allowed_ids)\b", lambda match: _API_NAMES[match[0]], message)
