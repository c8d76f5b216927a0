"""The endpoints ``/tokenize`` and ``/detokenize``, with the fields of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graft.models.request import check_size, check_token_ids
from graft.native.errors import short_repr
from graft.tools.serve.errors import ApiError
from graft.tools.serve.fields import read_fields
from graft.tools.serve.request_parser import RequestParser
from graft.tools.serve.requests import DetokenizeRequest, TokenizeRequest


def tokenize(parser: RequestParser, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens of a prompt, or of messages to which the chat template is applied."""
    body = read_fields(TokenizeRequest, fields, parser.name)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("the request must have either prompt or messages", param="prompt")
    if body.prompt is None:
        tokens = parser.chat_prompt(body)
    else:
        check_size("prompt", body.prompt, "prompt_bytes", parser.limits)
        special = body.add_special_tokens is not False
        tokens = parser.encode("prompt", body.prompt, special=special)
    names = None
    if body.return_token_strs:
        names = [parser.tokenizer.backend.id_to_token(token) for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": parser.max_length,
        "tokens": tokens,
        "token_strs": names,
    }


def detokenize(parser: RequestParser, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text of tokens, including special tokens."""
    tokens = read_fields(DetokenizeRequest, fields, parser.name).tokens
    if not isinstance(tokens, list):
        raise ApiError(f"tokens must be a list of ids, got {short_repr(tokens)}", param="tokens")
    check_token_ids("tokens", tokens, parser.tokenizer.vocab_size)
    return {"prompt": parser.tokenizer.decode(tokens, special=True)}
