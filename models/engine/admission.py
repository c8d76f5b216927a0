"""Admission control: checks and tokenizes requests and starts compiling their grammars."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection
from concurrent.futures import Future

from graft.cudagraph.errors import GraftError
from graft.grammar.compile.service import GrammarService
from graft.grammar.matcher import CompiledGrammar
from graft.models.engine.options import Options
from graft.models.engine.request_state import RequestState
from graft.models.errors import QueueFullError, RequestError, TokenizerError
from graft.models.request import Output, Request, check_request, check_token_ids
from graft.models.tokenizer import Tokenizer
from graft.sampling.params import MAX_STOP_IDS

__all__ = ["Admission"]

LOG = logging.getLogger("graft")


class Admission:
    """Checks and tokenizes requests, and creates a `RequestState` for each valid request.

    Parameters
    ----------
    options
        Engine options, with the number of positions of a request and the request limits.
    tokenizer
        Tokenizer of the model.
    vocab_size
        Number of token ids of the target.
    compiler
        Compiles grammars in the background.

    Raises
    ------
    TokenizerError
        If the model has more stop ids than the device state of a slot can hold.
    """

    def __init__(
        self, options: Options, tokenizer: Tokenizer, vocab_size: int, compiler: GrammarService
    ):
        if len(tokenizer.stop_ids) > MAX_STOP_IDS:
            raise TokenizerError(
                f"{tokenizer.path}: the model has {len(tokenizer.stop_ids)} stop ids, at most "
                f"{MAX_STOP_IDS} are supported"
            )
        self._num_positions = options.positions
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler = compiler
        self._limits = options.limits

    def admit(
        self, request: Request, output: Output, waiting: Collection[RequestState]
    ) -> RequestState:
        """Check a request and start compiling its grammar.

        Parameters
        ----------
        request
            Request to admit.
        output
            Output under construction. This method sets its prompt length, seed and sample number.
        waiting
            Requests that are waiting for a slot.

        Raises
        ------
        QueueFullError
            If the limits on waiting requests are reached.
        RequestError, TokenizerError, GrammarError
            If a field of the request is invalid. The message contains its name and value.
        """
        try:
            return self._admit(request, output, waiting)
        except GraftError:
            raise
        except Exception as error:  # methods of objects in the request may raise any exception
            LOG.warning("request %s cannot be read", output.id, exc_info=True)
            raise RequestError(
                f"the request cannot be read: {type(error).__name__}: {error}"
            ) from error

    def _admit(
        self, request: Request, output: Output, waiting: Collection[RequestState]
    ) -> RequestState:
        limit = self._limits.waiting
        if limit is not None and len(waiting) >= limit:
            raise QueueFullError(
                f"{limit} requests are already waiting (Limits.waiting); submit the request later"
            )
        check_request(request, self._vocab_size, self._limits)
        try:
            prompt = self._prompt_tokens(request)
        except TokenizerError as error:
            error.param = "prompt" if request.messages is None else "messages"
            raise
        self._check_waiting_tokens(len(prompt), waiting)
        max_tokens = self._max_tokens(len(prompt), request.max_tokens)
        requested_stop_ids = request.stop_ids or ()
        unique = dict.fromkeys((*self._tokenizer.stop_ids, *requested_stop_ids))
        stop_ids = tuple(unique)
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"the request and the model have {len(stop_ids)} different stop ids, at most "
                f"{MAX_STOP_IDS} are supported",
                param="stop_ids",
            )
        output.prompt_tokens = len(prompt)
        output.seed = secrets.randbits(64) if request.seed is None else request.seed
        output.sample = request.sample
        output.logprobs = None if request.logprobs is None else []
        grammar: Future[CompiledGrammar] | None = None
        if request.grammar is not None:
            # A child process checks and compiles the grammar. If the grammar is invalid, this
            # future fails, and the scheduler finishes the request with reason "refused".
            grammar = self._compiler.submit(request.grammar)
        return RequestState(
            request=request,
            output=output,
            prompt=prompt,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            decoder=self._tokenizer.incremental(
                special=not request.skip_special_tokens, shown=request.shown_tokens
            ),
            grammar=grammar,
        )

    def _check_waiting_tokens(self, prompt: int, waiting: Collection[RequestState]) -> None:
        """Raise QueueFullError if a prompt of `prompt` tokens would exceed the queue's token limit.

        If no other request is waiting, any prompt may be queued.
        """
        limit = self._limits.waiting_tokens
        if limit is None or not waiting:
            return
        num_waiting = sum(state.num_tokens for state in waiting)
        if num_waiting + prompt > limit:
            raise QueueFullError(
                f"the queue has {num_waiting} tokens, and this prompt of {prompt} tokens would "
                f"exceed the maximum of {limit} (Limits.waiting_tokens); submit the request later"
            )

    def _max_tokens(self, prompt: int, max_tokens: int | None) -> int:
        """Return the maximum number of output tokens of a request with `prompt` prompt tokens.

        `max_tokens` is the number for which the request asks; None asks for all remaining
        positions. If the prompt is empty, or prompt and output exceed the positions of a request,
        raise RequestError.
        """
        positions = self._num_positions
        remaining = positions - prompt
        if prompt < 1 or remaining < 1:
            raise RequestError(
                f"the prompt has {prompt} tokens, must have from 1 to {positions - 1} (the "
                "engine's options max_length and pages determine the maximum)",
                param="prompt",
            )
        if max_tokens is None:
            return remaining
        if max_tokens > remaining:
            raise RequestError(
                f"a prompt of {prompt} tokens and max_tokens {max_tokens} exceed the "
                f"{positions} positions of the KV cache by {max_tokens - remaining}; reduce "
                "max_tokens, or increase the engine's max_length or pages",
                param="max_tokens",
            )
        return max_tokens

    def _prompt_tokens(self, request: Request) -> list[int]:
        """Return the prompt's token ids, from the field that is set: tokens, messages or prompt."""
        if request.tokens is not None:
            # The number of ids is checked first, so that not more ids than allowed are checked.
            self._max_tokens(len(request.tokens), request.max_tokens)
            check_token_ids("tokens", request.tokens, self._vocab_size)
            return list(request.tokens)
        messages = request.messages
        if messages is None and self._tokenizer.has_chat_template:
            messages = [{"role": "user", "content": request.prompt or ""}]
        if messages is None:
            return self._tokenizer.encode(
                request.prompt or "", parse_special=request.special_tokens
            )
        schema = request.schema
        if schema is None and request.grammar is not None:
            schema = request.grammar.schema
        return self._tokenizer.chat(
            messages,
            schema=schema,
            parse_special=request.special_tokens,
            max_bytes=self._limits.prompt_bytes,
        )
