"""The endpoints ``/tokenize`` and ``/detokenize``, with the fields of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graft.models.errors import RequestError
from graft.models.request import check_size, check_token_ids
from graft.sampling.checks import short_repr
from graft.tools.serve.errors import ApiError
from graft.tools.serve.fields import read_bool, select_fields
from graft.tools.serve.protocol import RequestParser

_TOKENIZE_FIELDS = {
    "model",
    "prompt",
    "messages",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "return_token_strs",
}
_DETOKENIZE_FIELDS = {"model", "tokens"}


def tokenize(parser: RequestParser, fields: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """Return the tokens of a prompt, or of messages to which the chat template is applied.

    Parameters
    ----------
    parser
        Request parser of the server.
    fields
        Fields of the request: ``prompt`` or ``messages``, and options.
    max_length
        Maximum number of tokens of prompt and output, which is a part of the response.

    Raises
    ------
    ApiError, GraftError
        If a field is invalid.
    """
    fields = select_fields(fields, _TOKENIZE_FIELDS, parser.name)
    if ("prompt" in fields) == ("messages" in fields):
        raise ApiError("the request must have either prompt or messages", param="prompt")
    if "messages" in fields:
        tokens = parser.chat_prompt(fields)
    else:
        prompt = fields["prompt"]
        if not isinstance(prompt, str):
            raise ApiError(f"prompt must be a string, got {short_repr(prompt)}", param="prompt")
        check_size("the prompt", prompt, "prompt_bytes", parser.limits)
        special = read_bool(fields, "add_special_tokens", True)
        tokens = parser.tokenizer.encode(prompt, special=special)
    names = None
    if read_bool(fields, "return_token_strs"):
        names = [parser.tokenizer.backend.id_to_token(token) for token in tokens]
    return {
        "count": len(tokens),
        "max_model_len": max_length,
        "tokens": tokens,
        "token_strs": names,
    }


def detokenize(parser: RequestParser, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text of tokens, including special tokens.

    Raises
    ------
    ApiError
        If a field is invalid.
    """
    fields = select_fields(fields, _DETOKENIZE_FIELDS, parser.name)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list):
        raise ApiError(f"tokens must be a list of ids, got {short_repr(tokens)}", param="tokens")
    try:
        check_token_ids("tokens", tokens, parser.tokenizer.vocab_size)
    except RequestError as error:
        raise ApiError(str(error), param="tokens") from error
    return {"prompt": parser.tokenizer.decode(tokens, special=True)}
