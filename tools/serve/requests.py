"""Requests of the endpoints that generate or tokenize text, as pydantic models."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from graft.models.request import MAX_SAMPLES
from graft.models.tokenizer import RESERVED_VARIABLES
from graft.native.errors import short_repr
from graft.sampling.params import MAX_LOGPROBS
from graft.tools.serve.errors import ApiError
from graft.tools.serve.fields import Fields, only, rule_error
from graft.tools.serve.tool_calls import ToolChoice, choose_tools

_MAX_INT32 = 2**31 - 1
_MAX_INT64 = 2**63 - 1
_RESERVED_VARIABLES = RESERVED_VARIABLES | {"schema", "tools"}
#: API fields that the engine's `Request` receives, with their names there. The engine checks their
#: values.
ENGINE_FIELDS = {
    name: name
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "min_tokens",
        "timeout_s",
        "skip_special_tokens",
        "n",
    )
} | {"stop_token_ids": "stop_ids", "allowed_token_ids": "allowed_ids"}
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
#: Maps each field of `Request` to the API fields that can set it. The first one takes precedence.
_API_FIELDS: dict[str, tuple[str, ...]] = {
    **{engine_name: (name,) for name, engine_name in ENGINE_FIELDS.items()},
    "prompt": ("prompt", "messages"),
    "tokens": ("prompt", "messages", "tokens"),
    "messages": ("messages", "prompt"),
    "max_tokens": ("max_completion_tokens", "max_tokens"),
    "logprobs": ("top_logprobs", "logprobs"),
    "banned_ids": ("bad_words",),
    "stop_after": ("min_tokens",),
    "max_reasoning_tokens": ("thinking_token_budget",),
    "grammar": ("response_format", "structured_outputs", *GRAMMAR_FIELDS, "tools", "bad_words"),
}
#: Fields of `Request` whose names in error messages are replaced with the names of API fields.
_RENAMED_FIELDS = ("stop_ids", "allowed_ids", "max_tokens", "stop_after", "max_reasoning_tokens")


def _read_logit_bias(bias: Any) -> Any:
    """Return a logit bias by token id. Keys of JSON objects are strings and are converted."""
    if not isinstance(bias, dict):
        raise rule_error("must map token ids to numbers")
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


def _read_stop(stop: Any) -> Any:
    """Return the stop strings as a list."""
    strings = [stop] if isinstance(stop, str) else stop
    is_list = isinstance(strings, list)
    if not is_list or not all(isinstance(string, str) and string for string in strings):
        raise rule_error("must be a non-empty string or a list of non-empty strings")
    return strings


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    if _RESERVED_VARIABLES & set(variables):
        raise rule_error(f"must be an object, without {', '.join(sorted(_RESERVED_VARIABLES))}")
    return variables


def _belongs_to_template(_value: Any) -> None:
    raise rule_error("must be a key of chat_template_kwargs")


def _check_not_zero(value: int) -> int:
    if value == 0:
        raise rule_error("must be -1 or positive")
    return value


class StreamOptions(Fields):
    """The field ``stream_options``."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_obfuscation: StrictBool = False  # has no effect


class Function(Fields):
    """The definition of a function. Other keys are ignored."""

    model_config = ConfigDict(extra="ignore")

    name: StrictStr = Field(min_length=1)
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None  # JSON schema
    strict: StrictBool | None = None


class Tool(Fields):
    """An element of the field ``tools``. Other keys are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"] = "function"
    function: Function


class GenerationFields(Fields):
    """Fields that all endpoints that generate text have in common."""

    model: Any = None
    stream: StrictBool = False
    request_id: StrictStr | None = None
    # The engine checks the values of the following fields of type `Any`.
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_tokens: Any = None
    stop: Annotated[Any, AfterValidator(_read_stop)] = None
    stop_token_ids: Any = None
    allowed_token_ids: Any = None
    timeout_s: Any = None
    skip_special_tokens: Any = None
    logit_bias: Annotated[dict[int, Any] | None, BeforeValidator(_read_logit_bias)] = None
    seed: StrictInt | None = Field(None, ge=-_MAX_INT64 - 1, le=_MAX_INT64)
    ignore_eos: StrictBool = False
    bad_words: Annotated[list[StrictStr], FailFast()] = Field(default_factory=list)
    closing: Any = None  # the engine checks it
    thinking_token_budget: StrictInt = Field(-1, ge=-1, le=_MAX_INT32)
    # Requests with a lower value run first, as in vLLM.
    priority: StrictInt = Field(0, ge=-_MAX_INT32, le=_MAX_INT32)
    truncate_prompt_tokens: Annotated[StrictInt | None, AfterValidator(_check_not_zero)] = Field(
        None, ge=-1, le=_MAX_INT64
    )
    truncation_side: Literal["left", "right"] = "left"
    # The module `grammars` checks the values of the following fields.
    structured_outputs: Any = None
    guided_json: Any = None
    guided_json_object: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    # The following fields have no effect.
    user: StrictStr | None = None
    metadata: dict[str, Any] | None = None
    service_tier: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: StrictStr | None = None


class TemplateFields(Fields):
    """Chat fields that have the same form in chat completions and in ``/v1/responses``."""

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_variables)] = Field(
        default_factory=dict
    )
    documents: Annotated[list[dict[str, Any]] | None, FailFast()] = None
    parallel_tool_calls: StrictBool = True


class PromptFields(TemplateFields):
    """Fields that determine the prompt of a chat."""

    messages: Any = None  # see `graft.tools.serve.messages`
    tools: Annotated[
        list[Tool], FailFast(), BeforeValidator(lambda t: t if isinstance(t, list) else [t])
    ] = Field(default_factory=list)
    tool_choice: Any = None
    reasoning_effort: StrictStr | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    add_special_tokens: StrictBool | None = None

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the prompt ends with the beginning of a new message of the assistant."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @cached_property
    def functions_of_tools(self) -> list[dict[str, Any]]:
        """The function definitions of ``tools``, without the keys whose value is null."""
        definitions = []
        for tool in self.tools:
            definitions.append({key: value for key, value in tool.function if value is not None})
        return definitions

    @cached_property
    def chosen_tools(self) -> ToolChoice:
        """The functions that the model may call."""
        return choose_tools(self.functions_of_tools, self.tool_choice, self.parallel_tool_calls)


class TokenizeRequest(PromptFields):
    """A request of ``/tokenize``. It has either a prompt or messages."""

    model: Any = None
    prompt: StrictStr | None = None
    return_token_strs: StrictBool = False


class DetokenizeRequest(Fields):
    """A request of ``/detokenize``."""

    model: Any = None
    tokens: Any = None


class CompletionFields(GenerationFields):
    """Fields that chat completions and completions have."""

    n: StrictInt = Field(1, ge=1, le=MAX_SAMPLES)
    best_of: Any = None
    stream_options: StreamOptions = StreamOptions()
    response_format: Any = None  # the module `grammars` checks it
    echo: StrictBool = False
    prompt_logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include_reasoning: StrictBool = True
    separate_reasoning: StrictBool = True
    include_stop_str_in_output: StrictBool = False
    return_token_ids: StrictBool = False
    return_tokens_as_token_ids: StrictBool = False
    # The following fields have no effect. Fast tokenizers have no option for spaces between special
    # tokens, and all grammar backends enforce the same grammar.
    spaces_between_special_tokens: StrictBool = True
    guided_decoding_backend: StrictStr | None = None
    store: StrictBool = False
    rid: StrictStr | None = None
    # The following fields support only one value: the default of OpenAI, vLLM or SGLang.
    detokenize: Annotated[Any, only(True)] = True
    modalities: Annotated[Any, only(["text"])] = None
    use_beam_search: Annotated[Any, only(False)] = False
    length_penalty: Annotated[Any, only(1.0)] = 1.0
    no_stop_trim: Annotated[Any, only(False)] = False
    stream_reasoning: Annotated[Any, only(True)] = True
    return_hidden_states: Annotated[Any, only(False)] = False

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionFields:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ApiError("stream_options requires stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError("prompt_logprobs requires stream: false", param="prompt_logprobs")
        best_of = self.n if self.best_of is None else self.best_of
        if best_of != self.n or isinstance(best_of, bool):
            raise ApiError(
                f"best_of must be equal to n, which is {self.n}, got {short_repr(best_of)}",
                param="best_of",
            )
        return self


class CompletionRequest(CompletionFields):
    """A request of ``/v1/completions``."""

    max_tokens: StrictInt | None = Field(None, ge=0, le=_MAX_INT32)
    prompt: Any = None  # see `RequestParser`
    add_special_tokens: StrictBool = True
    logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def chosen_tools(self) -> ToolChoice:
        """No functions: a completion has no tools."""
        return ToolChoice([])

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens to generate; 16 by default, as in OpenAI's API."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to report for each token; None for no log probabilities."""
        return self.logprobs

    @property
    def prompt_only(self) -> bool:
        """Whether the response has the echoed prompt and no generated text, as in vLLM."""
        return self.max_tokens == 0 and self.echo

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ApiError("max_tokens 0 requires echo: true", param="max_tokens")
        return self


class ChatRequest(PromptFields, CompletionFields):
    """A request of ``/v1/chat/completions``."""

    max_tokens: StrictInt | None = Field(None, ge=1, le=_MAX_INT32)
    max_completion_tokens: StrictInt | None = Field(None, ge=1, le=_MAX_INT32)
    logprobs: StrictBool = False
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    # The following two fields have no effect. The prediction would only speed up the output.
    verbosity: Literal["low", "medium", "high"] = "medium"
    prediction: dict[str, Any] | None = None
    # Other services have the following field; vLLM and SGLang have it in `chat_template_kwargs`.
    enable_thinking: Annotated[Any, BeforeValidator(_belongs_to_template)] = None
    # This older field must be empty: functions are given in the field `tools`.
    functions: Annotated[Any, only([], "use tools")] = None
    function_call: Annotated[Any, only("none", "use tool_choice")] = "none"

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens to generate; None for all remaining positions."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to report for each token; None for no log probabilities."""
        if not self.logprobs:
            return None
        return 0 if self.top_logprobs is None else self.top_logprobs

    @property
    def prompt_only(self) -> bool:
        """Whether the response has no generated text: never for a chat completion."""
        return False

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs requires logprobs", param="top_logprobs")
        return self


def use_api_fields(error: ApiError, given: Collection[str]) -> ApiError:
    """Convert an error about a field of the engine's `Request` to one about a field of the API.

    Several fields of the API may set the same engine field, so `given` has the names of the fields
    that the API request contains. An error without ``engine_param``, or with a status of 500 or
    more, is returned unchanged.
    """
    field = error.engine_param
    if field is None or error.status >= 500:
        return error
    names = _API_FIELDS.get(field, (field,))
    param = next((name for name in names if name in given), names[0])
    message = str(error)
    if field in _RENAMED_FIELDS:
        message = message.replace(field, param)
    return ApiError(message, error.status, param=param, code=error.code)
