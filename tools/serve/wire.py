"""Calls as OpenAI's clients write them, made into the engine's requests.

What a call says must be known, by name: a field that is not is refused.
"""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.grammar.spec import parsed
from graft.grammar.statement import GrammarSpec
from graft.grammar.vocabulary import Vocabulary
from graft.models.request import MAX_SAMPLES, Limits, Request, check_size, shown
from graft.models.tokenizer import TAKEN, Tokenizer
from graft.tools.grammar_options import make_grammar
from graft.tools.serve import calls
from graft.tools.serve.errors import WireError

#: Fields that go into the request, by its own names.
_PASSED = {
    name: name
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "n",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "min_tokens",
        "max_tokens",
        "timeout_s",
    )
} | {"stop_token_ids": "stop_ids", "allowed_token_ids": "allowed_ids"}
_READ = {
    "model",
    "stream",
    "stream_options",
    "logprobs",
    "seed",
    "stop",
    "logit_bias",
    "top_k",
    "priority",
    "response_format",
    "structured_outputs",
}
#: What vLLM before 0.12 calls the keys of structured_outputs.
_GUIDED = {f"guided_{key}": key for key in ("json", "json_object", "regex", "choice", "grammar")}
_OF_CHAT = {
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
}
_OF_COMPLETIONS = {"prompt"}
#: Fields that change no answer, and those that may say only this.
_IGNORED = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"}
_ONLY: dict[str, Any] = {"store": False, "echo": False, "best_of": 1, "modalities": ["text"]}
_STRUCTURED = {"json", "json_object", "regex", "choice", "grammar", "structural_tag"}


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
        raise WireError(
            f"there is no model {shown(given['model'])}, only {name!r}",
            404,
            param="model",
            code="model_not_found",
        )
    return given


def stated(fields: Mapping[str, Any], limits: Limits) -> tuple[str, str] | None:
    """The grammar of response_format, structured_outputs or tools, as `grammar_of` takes it.

    Raises
    ------
    WireError, RequestError
        If a call states several, or one that is too large.
    """
    found = []
    form = fields.get("response_format", {"type": "text"})
    kind = form.get("type") if isinstance(form, dict) else None
    named = form.get("json_schema") if kind == "json_schema" else None
    if kind in ("json_object", "structural_tag"):
        found.append(("response_format", kind, form))
    elif isinstance(named, dict) and "schema" in named:
        found.append(("response_format", "json", named["schema"]))
    elif kind != "text":
        raise WireError(
            "response_format must be text, json_object, json_schema with a schema, or "
            f"structural_tag, got {shown(form)}",
            param="response_format",
        )
    given = fields.get("structured_outputs")
    if given is None:
        given = {}
    elif (
        not isinstance(given, dict)
        or not _STRUCTURED.issuperset(given)
        or all(value is None for value in given.values())
    ):
        raise WireError(
            f"structured_outputs must have one of {', '.join(sorted(_STRUCTURED))}, "
            f"got {shown(given)}",
            param="structured_outputs",
        )
    given = {key: key for key in given} | {k: v for k, v in _GUIDED.items() if k in fields}
    for name, key in given.items():
        value = fields[name] if name in _GUIDED else fields["structured_outputs"][name]
        if value is not None and (key, value) != ("json_object", False):
            found.append((name, key, value))
    functions, choice = calls.chosen(fields)
    if functions:
        check_size("tools", functions, "grammar_bytes", limits)
        found.append(("tools", *calls.grammar(functions, choice)))
    if len(found) > 1:
        raise WireError(
            f"give at most one grammar, got {' and '.join(one[0] for one in found)}",
            param=found[1][0],
        )
    if not found:
        return None
    [(name, key, value)] = found
    check_size(name, value, "grammar_bytes", limits)
    return key, json.dumps(value)


@functools.lru_cache(64)
def grammar_of(key: str, text: str) -> GrammarSpec | None:
    """The grammar that a key of vLLM's structured_outputs states with a value, as JSON.

    It asks processes that may be slow. Most calls state what another has stated before.

    Raises
    ------
    GrammarError, OptionError
        If it is none.
    """
    value = json.loads(text)
    if key == "structural_tag":
        value = parsed("structural tag", value) if isinstance(value, str) else value
        if isinstance(value, dict) and value.get("type", key) == key:
            value = {"tags" if k == "structures" else k: v for k, v in value.items() if k != "type"}
    elif key == "json":
        key = "schema"
    elif key == "json_object":
        value = True
    elif key == "grammar":  # rules have this sign in EBNF and another in Lark
        key = "ebnf" if "::=" in str(value) else "lark"
    return make_grammar({key: value}, partial=False)


class Front:
    """Makes requests, with a tokenizer of its own; one thread uses it at a time.

    Parameters
    ----------
    tokenizer : the model's.
    name : under which it is served.
    """

    def __init__(self, tokenizer: Tokenizer, limits: Limits, name: str):
        self._tokenizer = tokenizer
        self.limits = limits
        self.name = name
        vocabulary = Vocabulary.from_tokenizer(
            tokenizer.backend, tokenizer.vocab_size, tokenizer.stop_ids
        )
        self._bytes = vocabulary.tokens
        self._names = {
            i: t.content.encode() for i, t in tokenizer.backend.get_added_tokens_decoder().items()
        }

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
        said: dict[str, Any] = {
            own: fields[name] for name, own in _PASSED.items() if name in fields
        }
        said = {"temperature": 1.0, "max_tokens": None if chat else 16} | said
        said |= self._named(fields, chat) | {"grammar": grammar}
        call_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        prompts = [self._chat(fields, grammar)] if chat else self._prompts(fields.get("prompt"))
        count = fields.get("n", 1)
        if type(count) is int and count <= MAX_SAMPLES < count * len(prompts):
            raise WireError(f"at most {MAX_SAMPLES} answers, got {count * len(prompts)}", param="n")
        requests = [
            sample
            for i, tokens in enumerate(prompts)
            for sample in Request(tokens=tokens, id=f"{call_id}/{i}", **said).samples()
        ]
        options = fields.get("stream_options", {})
        if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
            raise WireError(f"stream_options cannot be {shown(options)}", param="stream_options")
        functions, choice = calls.chosen(fields)
        several = _switch(fields, "parallel_tool_calls", True) and choice == "auto"
        return Call(
            call_id,
            chat,
            requests,
            _switch(fields, "stream"),
            bool(options.get("include_usage")),
            choice if functions else "",
            128 if several else 1,
        )

    def _named(self, fields: Mapping[str, Any], chat: bool) -> dict[str, Any]:
        """Fields that the request has in another form."""
        said: dict[str, Any] = {}
        if type(seed := fields.get("seed")) is int:
            # The same again whoever runs beside it, and however many drafts.
            said |= {"seed": seed % (1 << 64), "verify": "coupled"}
        elif seed is not None:
            raise WireError(f"seed must be an integer, got {shown(seed)}", param="seed")
        if type(priority := fields.get("priority", 0)) is not int:
            raise WireError(f"priority must be an integer, got {shown(priority)}", param="priority")
        said["priority"] = -priority  # as vLLM has it: the lowest first
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
                raise WireError(
                    f"logit_bias must be numbers by token id: {error}", param="logit_bias"
                ) from error
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
        messages = fields.get("messages")
        variables = fields.get("chat_template_kwargs", {})
        if not isinstance(messages, list) or not messages:
            raise WireError("messages must be a list of at least one", param="messages")
        check_size("the prompt", messages, "prompt_bytes", self.limits)
        taken = TAKEN | {"schema", "tools"}
        if not isinstance(variables, dict) or taken & set(variables):
            raise WireError(
                f"chat_template_kwargs must be an object, without {', '.join(sorted(taken))}",
                param="chat_template_kwargs",
            )
        if fields.get("tools") and fields.get("tool_choice") != "none":
            variables = variables | {"tools": fields["tools"]}
        return self._tokenizer.chat(
            [_message(one) for one in messages],
            names=False,
            most_bytes=self.limits.prompt_bytes,
            schema=None if grammar is None else grammar.schema,
            **variables,
        )

    def _prompts(self, prompt: Any) -> list[list[int]]:
        check_size("the prompt", prompt, "prompt_bytes", self.limits)
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        prompts = prompt if several else [prompt]
        if len(prompts) > MAX_SAMPLES:
            raise WireError(f"at most {MAX_SAMPLES} prompts, got {len(prompts)}", param="prompt")
        for one in prompts:
            if not isinstance(one, (str, list)):
                raise WireError(
                    f"a prompt must be text or token ids, got {shown(one)}", param="prompt"
                )
        return [self._tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]


def _switch(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise WireError(f"{name} must be true or false, got {shown(value)}", param=name)
    return value


def _message(message: Any) -> dict[str, Any]:
    """A message as chat templates know them: text in one piece, arguments of calls as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise WireError(
            f"a message must be an object with a role, got {shown(message)}", param="messages"
        )
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
                one
                | {
                    "function": one["function"]
                    | {"arguments": json.loads(one["function"]["arguments"])}
                }
                for one in made["tool_calls"]
            ]
        except (TypeError, KeyError, ValueError) as error:
            raise WireError(f"tool_calls cannot be read: {error}", param="messages") from error
    return made
