"""Admission: a request is checked, tokenized and its grammar sent to the compiler."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from concurrent.futures import Future

from graft.grammar.compile.service import GrammarService
from graft.grammar.matcher import CompiledGrammar
from graft.models.engine.options import Options
from graft.models.engine.slots import RequestState
from graft.models.errors import QueueFullError, RequestError, TokenizerError
from graft.models.request import (
    Output,
    Request,
    check_ids,
    check_request,
)
from graft.models.tokenizer import Tokenizer
from graft.sampling.adjust import Adjust
from graft.sampling.state import MAX_STOP_IDS


class Admission:
    """Turns requests into `Running` ones, or says by name why not.

    Parameters
    ----------
    options : the engine's shape; a request must fit its positions and pages.
    vocab_size : ids the target knows.
    compiler : compiles grammars while the request waits outside the batch.

    Raises
    ------
    TokenizerError
        When the model has more stop ids than a slot can hold.
    """

    def __init__(
        self,
        options: Options,
        tokenizer: Tokenizer,
        vocab_size: int,
        compiler: GrammarService,
    ):
        if len(tokenizer.stop_ids) > MAX_STOP_IDS:
            raise TokenizerError(
                f"{tokenizer.path}: {len(tokenizer.stop_ids)} stop ids, at most {MAX_STOP_IDS}"
            )
        self._length = options.positions
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler = compiler
        self._limits = options.limits

    def take(
        self, request: Request, output: Output, waiting: Collection[RequestState]
    ) -> RequestState:
        """Check `request`, which would join those `waiting`, and begin compiling its grammar.

        Raises
        ------
        QueueFullError, RequestError, TokenizerError, GrammarError
            Naming the option and its value, before anything runs for the request.
        """
        limits = self._limits
        if limits.waiting is not None and len(waiting) >= limits.waiting:
            raise QueueFullError(f"{limits.waiting} requests are waiting already (Limits.waiting)")
        check_request(request, self._vocab_size, limits)
        prompt = self._tokens(request)
        if limits.waiting_tokens is not None:
            before = sum(running.length for running in waiting)
            if waiting and before + len(prompt) > limits.waiting_tokens:
                raise QueueFullError(
                    f"{before} tokens are waiting already, {len(prompt)} more are above "
                    f"{limits.waiting_tokens} (Limits.waiting_tokens)"
                )
        max_tokens = self._room(len(prompt), request.max_tokens)
        stop_ids = tuple(dict.fromkeys((*self._tokenizer.stop_ids, *(request.stop_ids or ()))))
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(f"at most {MAX_STOP_IDS} stop ids, got {len(stop_ids)}")
        output.prompt_tokens = len(prompt)
        output.seed = secrets.randbits(64) if request.seed is None else request.seed
        output.sample = request.sample
        output.logprobs = None if request.logprobs is None else []
        grammar: Future[CompiledGrammar] | None = None
        if request.grammar is not None:
            grammar = self._compiler.submit(request.grammar)
        return RequestState(
            request=request,
            output=output,
            prompt=prompt,
            max_tokens=max_tokens,
            stop_ids=stop_ids,
            decoder=self._tokenizer.incremental(),
            grammar=grammar,
            adjust=Adjust(
                bias=dict(request.logit_bias or {}),
                allowed=None if request.allowed_ids is None else tuple(request.allowed_ids),
                banned=tuple(request.banned_ids or ()),
                presence=float(request.presence_penalty),
                frequency=float(request.frequency_penalty),
                repetition=float(request.repetition_penalty),
                earliest=request.min_tokens and len(prompt) + min(request.min_tokens, max_tokens),
                logprobs=request.logprobs,
                masked=request.logprobs_masked,
                prompt=prompt,
            ),
        )

    def _room(self, prompt: int, asked: int | None) -> int:
        """Tokens the request may generate; positions and pages for all of them exist."""
        length = self._length
        room = length - prompt
        if prompt < 1 or room < 1:
            raise RequestError(f"the prompt has {prompt} tokens; from 1 to {length - 1} fit")
        if asked is not None and asked > room:
            raise RequestError(
                f"a prompt of {prompt} tokens and max_tokens {asked} exceed the cache's "
                f"{length} positions by {asked - room}"
            )
        return room if asked is None else asked

    def _tokens(self, request: Request) -> list[int]:
        if request.tokens is not None:
            self._room(len(request.tokens), request.max_tokens)  # before each of them is looked at
            check_ids("tokens", request.tokens, self._vocab_size)
            return list(request.tokens)
        schema = request.schema
        if schema is None and request.grammar is not None:
            schema = request.grammar.schema
        messages = request.messages
        if messages is None and self._tokenizer.has_chat_template:
            messages = [{"role": "user", "content": request.prompt or ""}]
        if messages is None:
            return self._tokenizer.encode(request.prompt or "", names=request.special_tokens)
        return self._tokenizer.chat(
            messages,
            schema=schema,
            names=request.special_tokens,
            most_bytes=self._limits.prompt_bytes,
        )
