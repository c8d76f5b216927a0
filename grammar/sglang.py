"""graft as the structured-output backend of an SGLang server.

SGLang loads `register` through the entry point group ``sglang.srt.plugins``, so that the backend is
available where both packages are installed::

    python -m sglang.launch_server --model-path MODEL --grammar-backend graft

This module imports SGLang, and thereby torch, only when `register` or `create_backend` is called.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

from graft.grammar.errors import GrammarError
from graft.grammar.grammar_spec import GrammarSpec
from graft.grammar.matcher import CompiledGrammar
from graft.grammar.spec import Spec
from graft.grammar.vocabulary import Vocabulary
from graft.grammar.xgrammar_api import (
    ALL_LEGAL,
    GrammarCompiler,
    GrammarMatcher,
    common_length,
    get_bitmask_shape,
    structural_tag_spec,
)

__all__ = ["BACKEND_NAME", "create_backend", "register", "request_spec"]

#: Value of SGLang's option ``--grammar-backend`` that selects this backend.
BACKEND_NAME = "graft"

#: Text that SGLang passes instead of a schema if a request asks for any JSON value.
ANY_JSON = "$$ANY$$"


def register() -> None:
    """Register the backend with SGLang under the name ``graft``.

    Raises
    ------
    ImportError
        SGLang is not installed.
    """
    from sglang.srt.constrained.base_grammar_backend import register_grammar_backend
    from sglang.srt.server_args import GRAMMAR_BACKEND_CHOICES, add_grammar_backend_choices

    register_grammar_backend(BACKEND_NAME, create_backend)
    if BACKEND_NAME not in GRAMMAR_BACKEND_CHOICES:
        add_grammar_backend_choices([BACKEND_NAME])


def create_backend(
    server_args: Any, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int] | None = None
) -> Any:
    """Return the backend for a server, as an SGLang ``BaseGrammarBackend``.

    The environment variable ``GRAFT_GRAMMAR_BACKEND`` selects the library that enforces grammars:
    ``auto`` (default), ``llguidance`` or ``xgrammar``.

    Parameters
    ----------
    server_args
        Ignored; SGLang passes it to every backend.
    tokenizer
        Fast tokenizer of transformers, or a `tokenizers.Tokenizer`.
    vocab_size
        Number of logit columns of the model.
    eos_token_ids
        Ids that end an output; None for the end-of-sequence id of the tokenizer.

    Raises
    ------
    GrammarError
        The tokenizer is not a byte-level or byte-fallback tokenizer.
    OptionError
        The library is not installed.
    """
    ids = [tokenizer.eos_token_id] if eos_token_ids is None else list(eos_token_ids)
    source = getattr(tokenizer, "backend_tokenizer", tokenizer)
    vocabulary = Vocabulary.from_tokenizer(source, vocab_size, ids)
    library = os.environ.get("GRAFT_GRAMMAR_BACKEND", "auto")
    return _classes().backend(GrammarCompiler(vocabulary, backend=library))


def request_spec(kind: str, text: str) -> GrammarSpec:
    """Return the grammar of a request.

    Parameters
    ----------
    kind
        ``"json"``, ``"regex"``, ``"ebnf"`` or ``"structural_tag"``.
    text
        Grammar as SGLang's request contains it.

    Raises
    ------
    GrammarError
        The text is not a grammar of this kind.
    """
    if kind == "json":
        schema = "{}" if text == ANY_JSON else text
        return GrammarSpec.json_schema(schema)
    if kind == "regex":
        return GrammarSpec.regex(text)
    if kind == "ebnf":
        return GrammarSpec.ebnf(text)
    if kind == "structural_tag":
        return structural_tag_spec(text)
    raise GrammarError(f"grammar kind {kind!r} must be json, regex, ebnf or structural_tag")


class _Classes:
    """graft's subclasses of SGLang's base classes.

    Attributes
    ----------
    grammar
        Subclass of ``BaseGrammarObject``: the matcher of one request.
    backend
        Subclass of ``BaseGrammarBackend``.
    """

    def __init__(self, grammar: type, backend: Callable[[GrammarCompiler], Any]):
        self.grammar = grammar
        self.backend = backend


@functools.cache
def _classes() -> _Classes:
    """Import SGLang, and define the subclasses of its base classes."""
    from sglang.srt.constrained import base_grammar_backend as base

    torch = base.torch

    class GraftGrammar(base.BaseGrammarObject):
        def __init__(self, compiled: CompiledGrammar):
            super().__init__()
            self.compiled = compiled
            self.matcher = GrammarMatcher(compiled)

        def accept_token(self, token: int) -> None:
            if self.is_terminated():
                return
            self.current_token = token
            if not self.matcher.accept_token(token):
                raise ValueError(f"token {token} is illegal in the {self.compiled.spec.kind}")

        def rollback(self, k: int) -> None:
            self.matcher.rollback(k)

        def is_terminated(self) -> bool:
            return self.matcher.is_terminated()

        def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> Any:
            return torch.full(
                get_bitmask_shape(batch_size, vocab_size),
                ALL_LEGAL,
                dtype=torch.int32,
                pin_memory=torch.cuda.is_available(),
            )

        def fill_vocab_mask(self, vocab_mask: Any, idx: int) -> None:
            self.matcher.fill_next_token_bitmask(vocab_mask, idx)

        @staticmethod
        def reset_vocab_mask(vocab_mask: Any) -> None:
            vocab_mask.fill_(ALL_LEGAL)

        @staticmethod
        def move_vocab_mask(vocab_mask: Any, device: Any) -> Any:
            return vocab_mask.to(device, non_blocking=True)

        @staticmethod
        def apply_vocab_mask(logits: Any, vocab_mask: Any) -> None:
            _apply_bitmask(torch, logits, vocab_mask)

        def copy(self) -> GraftGrammar:
            return GraftGrammar(self.compiled)

        def try_jump_forward(self, tokenizer: Any) -> tuple[list[int], str] | None:
            text = self.matcher.find_jump_forward_string()
            return ([], text) if text else None

        def jump_forward_str_state(self, helper: tuple[list[int], str]) -> tuple[str, int]:
            return helper[1], -1

        def jump_and_retokenize(
            self, old_output_ids: list[int], new_output_ids: list[int], next_state: int
        ) -> None:
            common = common_length(old_output_ids, new_output_ids)
            self.matcher.rollback(len(old_output_ids) - common)
            for token in new_output_ids[common:]:
                self.accept_token(token)

    class GraftBackend(base.BaseGrammarBackend):
        def __init__(self, compiler: GrammarCompiler):
            super().__init__()
            self.compiler = compiler

        def _compile(self, kind: str, text: str) -> Any:
            try:
                spec: Spec = request_spec(kind, text)
                return GraftGrammar(self.compiler.compile(spec))
            except GrammarError as error:
                return base.InvalidGrammarObject(str(error))

        def dispatch_json(self, key_string: str) -> Any:
            return self._compile("json", key_string)

        def dispatch_regex(self, key_string: str) -> Any:
            return self._compile("regex", key_string)

        def dispatch_ebnf(self, key_string: str) -> Any:
            return self._compile("ebnf", key_string)

        def dispatch_structural_tag(self, key_string: str) -> Any:
            return self._compile("structural_tag", key_string)

    return _Classes(GraftGrammar, GraftBackend)


def _apply_bitmask(torch: Any, logits: Any, bitmask: Any) -> None:
    """Set the logits ``[rows, columns]`` of illegal tokens to minus infinity.

    Columns outside the bitmask are illegal.
    """
    if logits.device.type == "cuda":
        # Unlike the code below, SGLang's kernel needs no temporary tensor of the size of the
        # logits.
        from sglang.kernels.ops.grammar.bitmask_ops import apply_token_bitmask_inplace_triton

        apply_token_bitmask_inplace_triton(logits, bitmask)
        return
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    illegal = (bitmask.unsqueeze(-1) >> shifts) & 1 == 0
    columns = illegal.flatten(-2)[:, : logits.shape[-1]]
    logits[:, : columns.shape[-1]].masked_fill_(columns, float("-inf"))
    logits[:, columns.shape[-1] :] = float("-inf")
