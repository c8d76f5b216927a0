"""Calls as OpenAI's clients write them, made into the engine's requests.

Two steps, for they take time of different kinds: `grammar_of` asks processes that may be slow,
`Front.read` renders the chat and makes tokens. What a call says must be known, by name: a field
that is not is refused.
"""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.grammar.statement import GrammarSpec
from graft.grammar.vocabulary import Vocabulary
from graft.models.request import MAX_SAMPLES, Limits, Request, check_size, shown
from graft.models.tokenizer import Tokenizer
from graft.tools.grammar_options import make_grammar
from graft.tools.serve import calls
from graft.tools.serve.errors import WireError

#: Fields that go into the request, by its own names.
_PASSED = {name: name for name in (
    "temperature", "top_p", "min_p", "n", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "max_tokens", "timeout_s")} | {
    "stop_token_ids": "stop_ids", "allowed_token_ids": "allowed_ids"}  # fmt: skip
_READ = {"model", "stream", "stream_options", "logprobs", "seed", "stop", "logit_bias", "top_k",
         "response_format", "structured_outputs"}
#: What vLLM before 0.12 calls the keys of structured_outputs.
_GUIDED = {f"guided_{key}": key for key in ("json", "regex", "choice", "grammar", "json_object")}
_OF_CHAT = {"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice",
            "parallel_tool_calls", "chat_template_kwargs"}
_OF_COMPLETIONS = {"prompt"}
#: Fields that change no answer, and those that may say only this.
_IGNORED = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
_ONLY: dict[str, Any] = {"store": False, "echo": False, "best_of": 1, "modalities": ["text"]}
#: Keys of structured_outputs, and those of the grammars of ``graft generate``.
_STRUCTURED = {"json": "schema", "regex": "regex", "choice": "choice", "grammar": "grammar",
               "json_object": "json_object", "structural_tag": "structural_tag"}
_SEEDS = 1 << 64


@dataclass(frozen=True)
class Call:
    """What one call asks for: requests, prompt by prompt, and how to say their answers.

    Attributes
    ----------
    choice : of its tools, "auto" or "required"; "" without.
    most_calls : of functions, in one answer.
    usage : a stream ends with what was used.
    """

    id: str
    chat: bool
    requests: list[Request]
    stream: bool = False
    usage: bool = False
    choice: str = ""
    most_calls: int = 1
    created: int = field(default_factory=lambda: int(time.time()))


def check_fields(fields: Mapping[str, Any], chat: bool, name: str) -> dict[str, Any]:
    """The fields that say something; null says nothing.

    Raises
    ------
    WireError
        Naming one that is unknown or not supported; 404 where the model is not this one.
    """
    given = {key: value for key, value in fields.items() if value is not None}
    own = _OF_CHAT if chat else _OF_COMPLETIONS
    known = {*_PASSED, *_READ, *_GUIDED, *_IGNORED, *_ONLY, *own}
    for key, value in given.items():
        if key not in known:
            raise WireError(f"the field {shown(key)} is unknown, or not supported", param=key)
        if key in _ONLY and value != _ONLY[key]:
            raise WireError(f"{key} can only be {_ONLY[key]!r}, got {shown(value)}", param=key)
    if given.get("model", name) != name:
        raise WireError(f"there is no model {shown(given['model'])}, only {name!r}", 404,
                        param="model", code="model_not_found")
    return given


def grammar_of(fields: Mapping[str, Any], limits: Limits) -> GrammarSpec | None:
    """The grammar that a call states, by response_format, structured_outputs or tools.

    Raises
    ------
    WireError, GraftError
        If it states several, or one that is none, or one that is too large.
    """
    stated = [*_of_format(fields), *_of_structured(fields)]
    functions, choice = calls.chosen(dict(fields))
    if functions:
        stated.append(("tools", *calls.grammar(functions, choice)))
    stated = [(name, *_meant(key, value)) for name, key, value in stated]
    if len(stated) > 1:
        raise WireError(f"give at most one grammar, got {' and '.join(s[0] for s in stated)}",
                        param=stated[1][0])
    if not stated:
        return None
    [(name, key, value)] = stated
    check_size(name, value, "grammar_bytes", limits)
    return _made(key, json.dumps(value))


@functools.lru_cache(64)
def _made(key: str, text: str) -> GrammarSpec | None:
    """Most calls state what another has stated before."""
    return make_grammar({key: json.loads(text)}, partial=False)[0]


def _of_format(fields: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    form = fields.get("response_format", {"type": "text"})
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return []
    if kind == "json_object":
        return [("response_format", "json_object", True)]
    if kind == "structural_tag":
        return [("response_format", "structural_tag", form)]
    named = form.get("json_schema") if kind == "json_schema" else None
    if not isinstance(named, dict) or "schema" not in named:
        raise WireError("response_format must be text, json_object, json_schema with a schema, or "
                        f"structural_tag, got {shown(form)}", param="response_format")
    return [("response_format", "schema", named["schema"])]


def _of_structured(fields: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    given = fields.get("structured_outputs", {})
    if not isinstance(given, dict):
        raise WireError("structured_outputs must be an object", param="structured_outputs")
    for key in given:
        if key not in _STRUCTURED:
            raise WireError(f"structured_outputs: {shown(key)} is unknown, or not supported",
                            param="structured_outputs")
    found = [(f"structured_outputs.{key}", key, value) for key, value in given.items()]
    found += [(name, key, fields[name]) for name, key in _GUIDED.items() if name in fields]
    return [(name, _STRUCTURED[key], value) for name, key, value in found
            if value is not None and (key, value) != ("json_object", False)]


def _meant(key: str, value: Any) -> tuple[str, Any]:
    """Key and value of a grammar as rows of ``graft generate`` have them."""
    if key == "grammar":  # rules have this sign in EBNF and another in Lark
        return "ebnf" if "::=" in str(value) else "lark", value
    if key == "structural_tag":
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise WireError(f"structural_tag: the text is not JSON: {error}") from error
        if isinstance(value, dict) and value.get("type", key) == key:
            named = {"structures": "tags"}
            value = {named.get(k, k): part for k, part in value.items() if k != "type"}
    return key, value


class Front:
    """Makes requests, with a tokenizer of its own; one thread uses it at a time.

    Parameters
    ----------
    tokenizer : the model's.
    name : under which it is served.
    """

    def __init__(self, tokenizer: Tokenizer, limits: Limits, name: str):
        self._tokenizer, self.limits, self.name = tokenizer, limits, name
        vocabulary = Vocabulary.from_tokenizer(
            tokenizer.backend, tokenizer.vocab_size, tokenizer.stop_ids)
        self._bytes = vocabulary.tokens
        self._names = {i: t.content.encode() for i, t in
                       tokenizer.backend.get_added_tokens_decoder().items()}

    def bytes_of(self, token: int) -> bytes:
        """A token's bytes, or its name where it is no text."""
        found = self._bytes[token] if token < len(self._bytes) else b""
        return found or self._names.get(token, b"")

    def read(self, fields: Mapping[str, Any], chat: bool, grammar: GrammarSpec | None) -> Call:
        """The call of `check_fields`' fields.

        Raises
        ------
        WireError, GraftError
            Naming what does not fit; the engine checks the rest when it gets the requests.
        """
        said: dict[str, Any] = {own: fields[name] for name, own in _PASSED.items()
                                if name in fields}
        said = {"temperature": 1.0, "max_tokens": None if chat else 16} | said
        said |= self._named(fields, chat) | {"grammar": grammar}
        call_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        prompts = [self._chat(fields, grammar)] if chat else self._prompts(fields.get("prompt"))
        requests = [sample for i, tokens in enumerate(prompts) for sample in Request(
            tokens=tokens, id=f"{call_id}/{i}", **said).samples()]  # fmt: skip
        options = fields.get("stream_options", {})
        if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
            raise WireError(f"stream_options cannot be {shown(options)}", param="stream_options")
        functions, choice = calls.chosen(dict(fields))
        several = choice == "auto" and fields.get("parallel_tool_calls", True)
        return Call(call_id, chat, requests, _switch(fields, "stream"),
                    bool(options.get("include_usage")), choice if functions else "",
                    128 if several else 1)

    def _named(self, fields: Mapping[str, Any], chat: bool) -> dict[str, Any]:
        """Fields that the request has in another form."""
        said: dict[str, Any] = {}
        if isinstance(seed := fields.get("seed"), int):
            # The same again whoever runs beside it, and however many drafts.
            said |= {"seed": seed % _SEEDS, "verify": "coupled"}
        elif seed is not None:
            raise WireError(f"seed must be an integer, got {shown(seed)}", param="seed")
        if "top_k" in fields:
            said["top_k"] = 0 if fields["top_k"] == -1 else fields["top_k"]
        if "max_completion_tokens" in fields:
            said["max_tokens"] = fields["max_completion_tokens"]
        if "stop" in fields:
            said["stop"] = [stop] if isinstance(stop := fields["stop"], str) else stop
        if "logit_bias" in fields:
            try:
                said["logit_bias"] = {int(i): value for i, value in fields["logit_bias"].items()}
            except (AttributeError, ValueError) as error:
                raise WireError(f"logit_bias must be numbers by token id: {error}",
                                param="logit_bias") from error
        if not chat:
            said["logprobs"] = fields.get("logprobs")
        elif _switch(fields, "logprobs"):
            said["logprobs"] = fields.get("top_logprobs", 0)
        elif "top_logprobs" in fields:
            raise WireError("top_logprobs goes with logprobs", param="top_logprobs")
        return said

    def _chat(self, fields: Mapping[str, Any], grammar: GrammarSpec | None) -> list[int]:
        if not self._tokenizer.has_chat_template:
            raise WireError("the model has no chat template: use /v1/completions")
        messages, variables = fields.get("messages"), fields.get("chat_template_kwargs", {})
        if not isinstance(messages, list) or not messages:
            raise WireError("messages must be a list of at least one", param="messages")
        check_size("the prompt", messages, "prompt_bytes", self.limits)
        taken = {"messages", "schema", "tools", "names", "most_bytes"}
        if not isinstance(variables, dict) or taken & set(variables):
            raise WireError("chat_template_kwargs must be an object, without "
                            f"{', '.join(sorted(taken))}", param="chat_template_kwargs")
        if fields.get("tools") and fields.get("tool_choice") != "none":
            variables = variables | {"tools": fields["tools"]}
        return self._tokenizer.chat(
            [_message(one) for one in messages], names=False, most_bytes=self.limits.prompt_bytes,
            schema=None if grammar is None else grammar.schema, **variables)

    def _prompts(self, prompt: Any) -> list[list[int]]:
        check_size("the prompt", prompt, "prompt_bytes", self.limits)
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts = prompt if several else [prompt]
        if len(prompts) > MAX_SAMPLES:
            raise WireError(f"at most {MAX_SAMPLES} prompts, got {len(prompts)}", param="prompt")
        for one in prompts:
            if not isinstance(one, (str, list)):
                raise WireError(f"a prompt must be text or token ids, got {shown(one)}",
                                param="prompt")
        return [self._tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]


def _switch(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise WireError(f"{name} must be true or false, got {shown(value)}", param=name)
    return value


def _message(message: Any) -> dict[str, Any]:
    """A message as chat templates know them: text in one piece, arguments of calls as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise WireError(f"a message must be an object with a role, got {shown(message)}",
                        param="messages")
    made = dict(message)
    parts = made.get("content") or ""
    if isinstance(parts, list):
        for part in parts:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise WireError(f"content must be text, got {shown(part)}", param="messages")
        parts = "".join(part["text"] for part in parts)
    if not isinstance(parts, str):
        raise WireError(f"content must be text, got {shown(parts)}", param="messages")
    made["content"] = parts
    made["role"] = "system" if made["role"] == "developer" else made["role"]
    if made.get("tool_calls"):
        try:
            made["tool_calls"] = [
                one | {"function": one["function"] | {
                    "arguments": json.loads(one["function"]["arguments"])}}
                for one in made["tool_calls"]]
        except (TypeError, KeyError, ValueError) as error:
            raise WireError(f"tool_calls cannot be read: {error}", param="messages") from error
    return made
