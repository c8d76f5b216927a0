"""Conversion of requests in OpenAI's format to requests of the engine.

A request with an unknown or unsupported field is refused with an error that names the field. Only
a few fields that cannot affect the output, such as ``user``, are ignored.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from graft.grammar.grammar_spec import GrammarSpec
from graft.grammar.vocabulary import Vocabulary
from graft.models.errors import TemplateUnavailableError, TokenizerError
from graft.models.request import MAX_SAMPLES, Limits, Request, check_size, check_token_ids
from graft.models.tokenizer import Tokenizer
from graft.native.errors import short_repr
from graft.tools.serve import reasoning
from graft.tools.serve.errors import ApiError
from graft.tools.serve.grammars import requires_answer
from graft.tools.serve.messages import read_messages
from graft.tools.serve.requests import ENGINE_FIELDS, ChatRequest, CompletionRequest, PromptFields
from graft.tools.serve.tool_calls import shown_schema, template_tools
from graft.tools.serve.tool_formats import TOOL_FORMATS, find_tool_format

#: Maximum number of bad_words, and of their characters in total. They are limited because other
#: requests wait while the parser's only thread encodes them.
_MAX_BAD_WORDS = 1024
_MAX_BAD_WORD_CHARACTERS = 1 << 14

#: Answer of a request without a grammar whose reasoning section has a limit.
_ANY_TEXT = GrammarSpec.structural_format({"type": "any_text"})


class _BadWords(NamedTuple):
    """The words of the field ``bad_words``: words of one token as ids, longer words as texts."""

    #: Ids of the tokens that spell a whole bad word, with or without a space before it.
    ids: set[int]
    #: Bad words that consist of several tokens.
    texts: list[str]


@dataclass(frozen=True)
class ApiRequest:
    """An API request for generated text, and the requests of the engine that answer it."""

    #: Id of the response.
    id: str
    body: ChatRequest | CompletionRequest
    #: One request per choice of the response: first all samples of the first prompt, then all
    #: samples of the second prompt, and so on.
    requests: list[Request]
    #: Token ids of each prompt.
    prompts: list[list[int]]
    #: Role of the generated message.
    role: str = "assistant"

    #: For each prompt, the text that precedes the generated text in the response; None if the
    #: response has only the generated text.
    echo: Sequence[str] | None = None
    #: Number of most likely tokens to report for each position of the prompts; None for none.
    prompt_logprobs: int | None = None
    #: For each prompt, whether the output starts within a reasoning section; None if the output has
    #: no such section.
    reasoning: Sequence[bool | None] = ()
    #: Fields of the request that a response of ``/v1/responses`` repeats.
    fields: Mapping[str, Any] = field(default_factory=dict)
    #: Unix time of the request.
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        """Whether this is a chat completion."""
        return isinstance(self.body, ChatRequest)

    def prompt_index(self, index: int) -> int:
        """Return the index of the prompt to which the choice with index `index` belongs."""
        return index * len(self.prompts) // len(self.requests)


class RequestParser:
    """A converter of API requests to requests of the engine. It is not thread-safe.

    `name` is the name of the model in the API, and `max_length` the maximum number of tokens of
    prompt and output together. The reasoning parser and the tool format are those that
    `graft.tools.serve.app.Settings` selects.
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
        if reasoning_parser is None and reasoning.END in (tokenizer.tool_template or ""):
            logging.getLogger("graft").warning(
                "the chat template contains %s, so the model may reason before its answers: "
                "--reasoning-parser (%s) reports the reasoning separately, and applies grammars to "
                "the answer only",
                reasoning.END,
                " or ".join(reasoning.REASONING_PARSERS),
            )
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
        """Return the text of a token. Incomplete characters are replaced with U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def parse(
        self, body: ChatRequest | CompletionRequest, grammar: GrammarSpec | None, schema: Any = None
    ) -> ApiRequest:
        """Convert an API request to requests of the engine.

        `grammar` is the grammar of the output. `schema` is the JSON schema of the output, which is
        passed to the chat template. Raise ApiError or another GraftError if a field is invalid.
        The engine checks most sampling parameters on submission.
        """
        reasoning_starts: list[bool | None]
        role = "assistant"
        echo: list[str] | None = None
        prompt_logprobs = body.prompt_logprobs
        may_reason = self._reasoning_parser is not None and isinstance(body, ChatRequest)
        if body.thinking_token_budget >= 0 and not may_reason:
            raise ApiError(
                f"thinking_token_budget is {body.thinking_token_budget}, which requires a chat "
                "completion and a server with --reasoning-parser",
                param="thinking_token_budget",
            )
        bad_words = self._read_bad_words(body.bad_words)
        options = self._options(body, grammar, bad_words.ids)
        if isinstance(body, ChatRequest):
            messages = self._read_messages(body)
            last = messages[-1]
            prompts = self._fit(body, [self._render(body, messages, schema)])
            continued = last["content"] if body.continue_final_message else ""
            reasoning_starts = [self._reasoning_start(prompts[0], continued)]
            if not body.adds_generation_prompt:  # as in vLLM
                role = str(body.messages[-1]["role"])
            if body.echo:
                echo = [last["content"] if last["role"] == role else ""]
        else:
            whole_prompts = self._prompts(body)
            prompts = self._fit(body, whole_prompts)
            reasoning_starts = [None] * len(prompts)
            if body.echo:
                echo = self._echo(body.prompt, prompts, whole_prompts)
                prompt_logprobs = body.logprobs if prompt_logprobs is None else prompt_logprobs
        prefix = "chatcmpl" if isinstance(body, ChatRequest) else "cmpl"
        suffix = secrets.token_hex(12)
        output_grammar = _without_bad_words(bad_words.texts, grammar)
        request = Request(grammar=output_grammar, **options)
        requests: list[Request] = []
        for i, (tokens, start) in enumerate(zip(prompts, reasoning_starts, strict=True)):
            one = replace(request, tokens=tokens, id=f"{prefix}-{suffix}/{i}")
            if start is not None:
                one = self._with_reasoning(one, body, start)
            requests += one.samples()
        return ApiRequest(
            id=f"{prefix}-{body.request_id or suffix}",
            body=body,
            requests=requests,
            prompts=prompts,
            role=role,
            echo=echo,
            prompt_logprobs=prompt_logprobs,
            reasoning=reasoning_starts,
        )

    def _fit(
        self, body: ChatRequest | CompletionRequest, prompts: list[list[int]]
    ) -> list[list[int]]:
        """Truncate prompts to ``truncate_prompt_tokens``, and check that prompt and output fit.

        If ``truncate_prompt_tokens`` is -1, a prompt is truncated to the context length minus the
        maximum length of the output. The engine checks the lengths too, but its errors name options
        of the engine. The errors of this method name fields of the API, in the wording of vLLM and
        SGLang.
        """
        max_tokens = 1 if body.prompt_only else body.token_limit
        size = body.truncate_prompt_tokens
        if size is not None:
            if size < 0:
                size = max(1, self.max_length - (1 if max_tokens is None else max_tokens))
            part = slice(size) if body.truncation_side == "right" else slice(-size, None)
            prompts = [tokens[part] for tokens in prompts]
        length = max((len(tokens) for tokens in prompts), default=0)
        limit = f"the model's maximum context length is {self.max_length} tokens"
        if length >= self.max_length:
            raise ApiError(
                f"the prompt has {length} tokens and is longer than the model's context length: "
                f"{limit}, including the output",
                param="messages" if isinstance(body, ChatRequest) else "prompt",
            )
        if max_tokens is not None and length + max_tokens > self.max_length:
            name = "max_tokens"
            if "max_completion_tokens" in body.model_fields_set:
                name = "max_completion_tokens"
            raise ApiError(
                "Requested token count exceeds the model's maximum context length: "
                f"{length} tokens of the prompt and {name} {max_tokens}, but {limit}",
                param=name,
            )
        return prompts

    def encode(self, field: str, text: str, **options: bool) -> list[int]:
        """Return the tokens of a text. Error messages name the request's field that contains it.

        `options` are those of `Tokenizer.encode`.
        """
        try:
            return self.tokenizer.encode(text, **options)
        except TokenizerError as error:
            raise ApiError(str(error), param=field) from error

    def chat_prompt(self, body: PromptFields) -> list[int]:
        """Apply the chat template to the messages of a request, and return the prompt's tokens.

        Raise ApiError or RequestError if a field is invalid or the template rejects the messages.
        Raise TemplateUnavailableError if no child process could render the template.
        """
        return self._render(body, self._read_messages(body), None)

    def _read_messages(self, body: PromptFields) -> list[dict[str, Any]]:
        if not self.tokenizer.has_chat_template:
            raise ApiError("the model has no chat template: use /v1/completions")
        messages = read_messages(body.messages, self.tokenizer.tool_template)
        check_size("prompt", messages, "prompt_bytes", self.limits)
        return messages

    def _render(self, body: PromptFields, messages: list[dict[str, Any]], schema: Any) -> list[int]:
        """Apply the chat template to messages and return the tokens of the prompt.

        `schema` is the JSON schema of the output, or None. The template may show it to the model.
        """
        continues = body.continue_final_message
        adds_prompt = body.adds_generation_prompt
        if continues and adds_prompt:
            raise ApiError(
                "continue_final_message requires add_generation_prompt: false",
                param="continue_final_message",
            )
        options = {"add_generation_prompt": adds_prompt} | self._template_variables(body)
        if body.chosen_tools.required:
            schema = shown_schema(body.chosen_tools)
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
        if body.add_special_tokens:
            tokens = self.tokenizer.encode("", special=True) + tokens
        return tokens

    def _template_variables(self, body: PromptFields) -> dict[str, Any]:
        """Return the variables of the chat template that the request defines."""
        variables = body.chat_template_kwargs
        if body.documents is not None:
            check_size("documents", body.documents, "prompt_bytes", self.limits)
            variables = {"documents": body.documents} | variables
        if body.reasoning_effort is not None:
            variables = {"reasoning_effort": body.reasoning_effort} | variables
        if body.tools and body.tool_choice != "none":
            variables = variables | {"tools": template_tools(body.functions_of_tools)}
        return variables

    def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        """Return the token ids of each prompt of a completion request."""
        prompt = body.prompt
        check_size("prompt", prompt, "prompt_bytes", self.limits)
        has_several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts: list[Any] = prompt if has_several else [prompt]
        if len(prompts) > MAX_SAMPLES:
            raise ApiError(f"at most {MAX_SAMPLES} prompts, got {len(prompts)}", param="prompt")
        num_choices = body.n * len(prompts)
        if num_choices > MAX_SAMPLES:
            raise ApiError(f"at most {MAX_SAMPLES} choices, got {num_choices}", param="n")
        for one in prompts:
            if not isinstance(one, (str, list)):
                raise ApiError(
                    f"a prompt must be text or token ids, got {short_repr(one)}", param="prompt"
                )
        tokens = []
        for one in prompts:
            if isinstance(one, str):
                one = self.encode("prompt", one, special=body.add_special_tokens)
            tokens.append(one)
        return tokens

    def _reasoning_start(self, prompt: Sequence[int], continued: str) -> bool | None:
        """Return whether the output starts inside a reasoning section.

        Return None if the output cannot have a reasoning section (`reasoning.has_reasoning`).
        """
        if self._reasoning_parser is None:
            return None
        text = self.tokenizer.decode(prompt[-64:], special=True)
        if not reasoning.has_reasoning(text, continued):
            return None
        return reasoning.starts_in_reasoning(self._reasoning_parser, text, continued)

    def _with_reasoning(
        self, request: Request, body: ChatRequest | CompletionRequest, start: bool
    ) -> Request:
        """Return a request whose output can have a reasoning section.

        `start` says whether the output starts within the section.
        """
        shown = (*request.shown_tokens, reasoning.BEGIN, reasoning.END)
        request = replace(request, shown_tokens=shown)
        answer = request.grammar
        if body.thinking_token_budget >= 0:
            answer = answer or _ANY_TEXT
            request = replace(request, max_reasoning_tokens=body.thinking_token_budget)
        if answer is None:
            return request
        grammar = reasoning.answer_grammar(answer, start, required=requires_answer(body))
        return replace(request, grammar=grammar)

    def _echo(
        self, given: Any, prompts: Sequence[list[int]], whole_prompts: Sequence[list[int]]
    ) -> list[str]:
        """Return the text of each prompt, which the response repeats before the generated text.

        `given` is the value of the field ``prompt``. `prompts` are the token ids of the truncated
        prompts, and `whole_prompts` those before truncation.
        """
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
        body: ChatRequest | CompletionRequest,
        grammar: GrammarSpec | None,
        bad_word_ids: set[int],
    ) -> dict[str, Any]:
        """Return the values of all fields of `Request` except for prompt, grammar and id.

        `bad_word_ids` are tokens that must not be generated.
        """
        options: dict[str, Any] = {
            "temperature": 1.0,
            # The engine generates at least one token. If the request asks for none, the token is
            # left out of the response.
            "max_tokens": 1 if body.prompt_only else body.token_limit,
            "logprobs": body.num_logprobs,
            "logit_bias": body.logit_bias,
            "priority": -body.priority,
        }
        if body.prompt_only:
            options["closing"] = "off"
        if body.closing is not None:
            options["closing"] = body.closing
        for name, request_field in ENGINE_FIELDS.items():
            if name in body.model_fields_set:
                options[request_field] = getattr(body, name)
        if body.seed is not None:
            # In mode "coupled", the output depends only on the request and its seed, and not on
            # the other requests in the batch or on the draft length.
            options["seed"] = body.seed % 2**64
            options["verify"] = "coupled"
        if body.top_k is not None:
            options["top_k"] = 0 if body.top_k == -1 else body.top_k
        if body.stop is not None:
            options["stop"] = body.stop
        if body.chosen_tools.functions:
            options["shown_tokens"] = self.tool_format.markers
        if body.ignore_eos:
            options |= self._ignore_stop_ids(options, has_grammar=grammar is not None)
        banned = {*options.get("banned_ids", ()), *bad_word_ids}
        if banned:
            options["banned_ids"] = sorted(banned)
        return options

    def _read_bad_words(self, words: list[str]) -> _BadWords:
        """Split the field bad_words into words of one token and words of several tokens.

        White space at the beginning of a word is removed.
        """
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
        return self.encode("bad_words", text, special=False, parse_special=False)

    def _ignore_stop_ids(self, options: Mapping[str, Any], has_grammar: bool) -> dict[str, Any]:
        """Return fields of `Request` that keep the model's stop ids from being generated.

        `options` are the request's other fields. With a grammar, a stop id is still generated where
        the grammar allows nothing else.
        """
        if has_grammar:
            # A stop id does not end the output before `min_tokens` tokens, here the maximum. Stop
            # strings are not affected: they end the output after the request's own `min_tokens`,
            # which is passed as `stop_after`.
            return {
                "min_tokens": options["max_tokens"] or 2**31 - 1,
                "stop_after": options.get("min_tokens", 0),
            }
        stop_ids = options.get("stop_ids", [])
        if not isinstance(stop_ids, list):
            return {}  # the engine reports that stop_ids is not a list
        return {"banned_ids": [token for token in self.tokenizer.stop_ids if token not in stop_ids]}


def _without_bad_words(texts: list[str], grammar: GrammarSpec | None) -> GrammarSpec | None:
    """Return a grammar that excludes the bad words `texts`; if there are none, return `grammar`.

    Raise ApiError if there are bad words and a grammar, because they cannot be combined.
    """
    if not texts:
        return grammar
    if grammar is not None:
        raise ApiError(
            f"bad_words of several tokens, such as {short_repr(texts[0])}, cannot be combined "
            "with a grammar or tools",
            param="bad_words",
        )
    return GrammarSpec.structural_format({"type": "any_text", "excludes": texts})
