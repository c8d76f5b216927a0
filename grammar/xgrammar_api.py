"""Matchers and compilers with the method names of XGrammar, for engines written against its API.

An engine that calls XGrammar's `GrammarCompiler`, `GrammarMatcher` and `BatchGrammarMatcher` can
call the classes of this module instead. The grammars are those of `graft.grammar`: a JSON schema is
either enforced exactly or refused, and compilation runs in a child process with limits of time and
memory.

The module does not import torch. A bitmask is any array in CPU memory that supports DLPack or the
buffer protocol, such as a NumPy array or a torch tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from graft.grammar.compile.service import GrammarService
from graft.grammar.errors import GrammarError
from graft.grammar.grammar_spec import GrammarSpec, StructuralTag
from graft.grammar.matcher import CompiledGrammar
from graft.grammar.spec import Spec, parse_json
from graft.grammar.vocabulary import Vocabulary

__all__ = [
    "BatchGrammarMatcher",
    "GrammarCompiler",
    "GrammarMatcher",
    "allocate_token_bitmask",
    "get_bitmask_shape",
    "structural_tag_spec",
]

#: Mask word in which every token is legal.
ALL_LEGAL = -1

#: Length in bytes from which a jump-forward string is not extended any more.
MAX_JUMP_BYTES = 4096


def get_bitmask_shape(batch_size: int, vocab_size: int) -> tuple[int, int]:
    """Return the shape of a token bitmask: ``(batch_size, ceil(vocab_size / 32))``."""
    return batch_size, (vocab_size + 31) // 32


def allocate_token_bitmask(batch_size: int, vocab_size: int) -> np.ndarray:
    """Return an int32 token bitmask ``[batch_size, words]`` in which every token is legal."""
    return np.full(get_bitmask_shape(batch_size, vocab_size), ALL_LEGAL, np.int32)


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Thread-safe.

    Parameters
    ----------
    vocabulary
        Vocabulary of the model. `Vocabulary.from_tokenizer` reads it from a tokenizer.
    backend
        Library that enforces the grammars: ``"auto"``, ``"llguidance"`` or ``"xgrammar"``.
    max_threads
        Maximum number of concurrent compilations.
    timeout_s
        Time limit of one compilation, in seconds.

    Raises
    ------
    OptionError
        The backend is unknown or not installed, or a limit is not positive.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        backend: str = "auto",
        max_threads: int = 1,
        timeout_s: float = 30.0,
    ):
        self.vocabulary = vocabulary
        self._service = GrammarService(
            vocabulary, backend, threads=max_threads, timeout_s=timeout_s
        )

    def compile(self, spec: Spec) -> CompiledGrammar:
        """Compile a grammar and wait for the result.

        Raises
        ------
        GrammarError
            The grammar is invalid, cannot be enforced exactly, or exceeds a limit.
        """
        return self._service.submit(spec).result()

    def compile_json_schema(
        self,
        schema: Any,
        *,
        any_whitespace: bool = True,
        max_whitespace_cnt: int | None = None,
        strict_mode: bool = True,
    ) -> CompiledGrammar:
        """Compile a JSON schema, given as JSON text, as the parsed schema or as a pydantic model.

        Parameters
        ----------
        schema
            The JSON schema.
        any_whitespace
            Whether any white space is legal between JSON tokens. If False, JSON is written on one
            line, separated by ``", "`` and ``": "``.
        max_whitespace_cnt
            Maximum number of consecutive white-space characters, if `any_whitespace` is True. None
            means no limit.
        strict_mode
            Whether objects with ``properties`` forbid properties that the schema does not mention.
        """
        whitespace: Any = "line"
        if any_whitespace:
            whitespace = "any" if max_whitespace_cnt is None else max_whitespace_cnt
        return self.compile(
            GrammarSpec.json_schema(schema, strict=strict_mode, whitespace=whitespace)
        )

    def compile_builtin_json_grammar(self) -> CompiledGrammar:
        """Compile the grammar of any JSON value."""
        return self.compile(GrammarSpec.json_schema({}, whitespace="any"))

    def compile_regex(self, regex: str) -> CompiledGrammar:
        """Compile the grammar of the texts that match a regular expression from start to end."""
        return self.compile(GrammarSpec.regex(regex))

    def compile_grammar(self, grammar: str, *, root_rule_name: str = "root") -> CompiledGrammar:
        """Compile a grammar in XGrammar's EBNF notation."""
        return self.compile(GrammarSpec.ebnf(grammar, root_rule_name))

    def compile_structural_tag(self, tag: str | dict[str, Any]) -> CompiledGrammar:
        """Compile a structural tag; `structural_tag_spec` describes the format."""
        return self.compile(structural_tag_spec(tag))

    def close(self) -> None:
        """End the child processes. Compiled grammars and their matchers stay valid."""
        self._service.close()


def structural_tag_spec(tag: str | dict[str, Any]) -> GrammarSpec:
    """Convert a structural tag, as OpenAI-compatible servers receive it, to a `GrammarSpec`.

    Parameters
    ----------
    tag
        ``{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`` or
        ``{"format": {...}}``, as JSON text or parsed. A missing schema allows any JSON.

    Raises
    ------
    GrammarError
        The tag has another format.
    """
    document = parse_json("structural tag", tag) if isinstance(tag, str) else tag
    if isinstance(document, dict) and set(document) - {"type"} == {"format"}:
        return GrammarSpec.structural_format(document["format"])
    if not isinstance(document, dict) or set(document) - {"type", "structures", "triggers"}:
        shown = sorted(document) if isinstance(document, dict) else type(document).__name__
        raise GrammarError(
            f"structural tag: must have the keys 'structures' and 'triggers', got {shown}"
        )
    tags = []
    for index, structure in enumerate(document.get("structures") or ()):
        if not isinstance(structure, dict) or not {"begin", "end"} <= structure.keys():
            raise GrammarError(f"structural tag: structure {index} needs 'begin' and 'end'")
        schema = structure.get("schema")
        schema = {} if schema is None else schema
        tags.append(StructuralTag.of(structure["begin"], schema, structure["end"]))
    return GrammarSpec.structural_tag(tags, list(document.get("triggers") or ()))


class GrammarMatcher:
    """State of one output in its grammar, with the interface of XGrammar's `GrammarMatcher`.

    A matcher is not thread-safe.

    Parameters
    ----------
    compiled_grammar
        Grammar that `GrammarCompiler` compiled.
    override_stop_tokens
        Ids that end the output, instead of the stop ids of the vocabulary.
    terminate_without_stop_token
        Whether the matcher terminates as soon as the output is complete, without a stop token.
    max_rollback_tokens
        Ignored. Every accepted token can be rolled back.

    Raises
    ------
    GrammarError
        `compiled_grammar` is not a compiled grammar, or a stop id is invalid.
    """

    def __init__(
        self,
        compiled_grammar: CompiledGrammar,
        *,
        override_stop_tokens: int | Iterable[int] | None = None,
        terminate_without_stop_token: bool = False,
        max_rollback_tokens: int = -1,
    ):
        if not isinstance(compiled_grammar, CompiledGrammar):
            raise GrammarError(
                f"compiled_grammar: must be the result of GrammarCompiler, got {compiled_grammar!r}"
            )
        if isinstance(override_stop_tokens, int):
            override_stop_tokens = [override_stop_tokens]
        self._stop_ids = None if override_stop_tokens is None else tuple(override_stop_tokens)
        self._compiled = compiled_grammar
        self._terminate_when_complete = terminate_without_stop_token
        self._matcher = compiled_grammar.matcher(self._stop_ids)
        self._row = np.zeros(self._matcher.words, np.int32)
        # The tokens of each step that `rollback` undoes: one token for `accept_token`, and all
        # tokens of the text for `accept_string`.
        self._steps: list[tuple[int, ...]] = []

    @property
    def max_rollback_tokens(self) -> int:
        """Always -1, which means that every accepted token can be rolled back."""
        return -1

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end the output."""
        return list(self._matcher.stop_ids)

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token.

        Returns
        -------
        bool
            Whether the token was accepted. It is False, and the state is unchanged, if the token is
            illegal or outside the vocabulary, or if the matcher has terminated.
        """
        if self.is_terminated() or not self._matcher.accept(token_id):
            return False
        self._steps.append((token_id,))
        return True

    def accept_string(self, text: str | bytes) -> bool:
        """Advance by a text, which `rollback` undoes as one step.

        At each position of the text, the method accepts the longest legal token.

        Returns
        -------
        bool
            Whether the text was accepted. It is False, and the state is unchanged, if the grammar
            does not allow the text or the vocabulary cannot spell it.
        """
        rest = text.encode() if isinstance(text, str) else bytes(text)
        tokens: list[int] = []
        while rest and not self.is_terminated():
            token = self._longest_legal_prefix(rest)
            if token is None:
                break
            self._matcher.accept(token)
            tokens.append(token)
            rest = rest[len(self._text(token)) :]
        if rest:
            self._matcher.rollback(len(tokens))
            return False
        self._steps.append(tuple(tokens))
        return True

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write the token bitmask of the legal next tokens to one row.

        Parameters
        ----------
        bitmask
            int32 array ``[rows, words]`` or ``[words]`` in CPU memory.
        index
            Row of the bitmask.

        Returns
        -------
        bool
            Whether the row has to be applied to the logits. It is False if every token is legal;
            the row is then filled with ones.

        Raises
        ------
        GrammarError
            The bitmask has another dtype or shape or is not in CPU memory, or the matcher has
            terminated.
        """
        row = _bitmask_row(bitmask, index, self._matcher.words)
        if self.is_terminated():
            raise GrammarError("matcher: cannot fill a bitmask after the grammar has terminated")
        if self._matcher.fill(row):
            return True
        row.fill(ALL_LEGAL)
        return False

    def find_jump_forward_string(self) -> str:
        """Return the text that the grammar forces next; empty if the next character is not forced.

        The state does not change. The result is the longest common prefix of all legal
        continuations that the vocabulary can spell. The prefix ends after a complete character and
        is not extended once it has 4,096 bytes.
        """
        forced = b""
        accepted = 0
        while len(forced) < MAX_JUMP_BYTES and not self.is_terminated():
            texts = self._legal_texts()
            if not texts:
                break
            prefix = min(texts)[: common_length(min(texts), max(texts))]
            forced += prefix
            token = texts.get(prefix)
            if token is None:  # the common prefix is empty, or several continuations are legal
                break
            self._matcher.accept(token)
            accepted += 1
        self._matcher.rollback(accepted)
        try:
            return forced.decode()
        except UnicodeDecodeError as error:
            # The forced bytes start (error.start is 0) or end within a UTF-8 character.
            return forced[: error.start].decode()

    def rollback(self, num_tokens: int = 1) -> None:
        """Undo the last `num_tokens` steps, that is, calls that accepted a token or a text.

        Raises
        ------
        GrammarError
            `num_tokens` is negative or larger than the number of these steps.
        """
        if not 0 <= num_tokens <= len(self._steps):
            raise GrammarError(
                f"rollback: num_tokens is {num_tokens}, must be in [0, {len(self._steps)}], "
                "the number of accepted tokens"
            )
        undone = self._steps[len(self._steps) - num_tokens :]
        del self._steps[len(self._steps) - num_tokens :]
        self._matcher.rollback(sum(map(len, undone)))

    def is_completed(self) -> bool:
        """Return whether the output may end here or has ended."""
        if self._matcher.is_terminated():
            return True
        if not self._matcher.fill(self._row):
            return True
        return any(self._row[stop // 32] >> (stop % 32) & 1 for stop in self._matcher.stop_ids)

    def is_terminated(self) -> bool:
        """Return whether the output has ended.

        The output ends with a stop token, or with the completion of the grammar if
        `terminate_without_stop_token` is True.
        """
        if self._terminate_when_complete:
            return self.is_completed()
        return self._matcher.is_terminated()

    def reset(self) -> None:
        """Return to the start of the grammar."""
        self.rollback(len(self._steps))

    def fork(self) -> GrammarMatcher:
        """Return an independent matcher in the same state."""
        other = GrammarMatcher(
            self._compiled,
            override_stop_tokens=self._stop_ids,
            terminate_without_stop_token=self._terminate_when_complete,
        )
        other._steps = list(self._steps)
        for step in self._steps:
            for token in step:
                other._matcher.accept(token)
        return other

    def _text(self, token: int) -> bytes:
        tokens = self._compiled.backend.vocabulary.tokens
        return tokens[token] if token < len(tokens) else b""

    def _legal_texts(self) -> dict[bytes, int]:
        """Return the legal token ids by their text.

        The result is empty if a legal token, such as a stop id, has no text.
        """
        texts = {}
        for token in self._matcher.legal().tolist():
            text = self._text(token)
            if not text:
                return {}
            texts[text] = token
        return texts

    def _longest_legal_prefix(self, text: bytes) -> int | None:
        """Return the legal token with the longest text that `text` starts with, or None."""
        found = None
        length = 0
        for token in self._matcher.legal().tolist():
            piece = self._text(token)
            if len(piece) > length and text.startswith(piece):
                found = token
                length = len(piece)
        return found


class BatchGrammarMatcher:
    """Calls the methods of several matchers. Several threads fill the bitmask rows.

    Parameters
    ----------
    max_threads
        Number of threads that fill bitmask rows, or ``"auto"`` for half the number of processors.
        The threads run in parallel, because the grammar libraries fill rows without holding the
        GIL.
    """

    def __init__(self, max_threads: int | str = "auto"):
        if max_threads == "auto":
            max_threads = max(1, (os.cpu_count() or 2) // 2)
        if not isinstance(max_threads, int) or max_threads < 1:
            raise GrammarError(f"max_threads: must be positive or 'auto', got {max_threads!r}")
        self._executor = ThreadPoolExecutor(max_threads) if max_threads > 1 else None

    def batch_fill_next_token_bitmask(
        self, matchers: Sequence[GrammarMatcher], bitmask: Any, indices: Sequence[int] | None = None
    ) -> None:
        """Fill row ``indices[i]`` of the bitmask for matcher ``i``; row ``i`` if `indices` is None.

        Raises
        ------
        GrammarError
            The number of indices differs from the number of matchers, an index occurs twice, or a
            row cannot be filled.
        """
        rows = list(range(len(matchers)) if indices is None else indices)
        if len(rows) != len(matchers) or len(set(rows)) != len(rows):
            raise GrammarError(
                f"indices: needs {len(matchers)} different rows, one per matcher, got {rows}"
            )
        run: Callable[..., Iterable[bool]] = self._executor.map if self._executor else map
        fills = run(
            lambda matcher, row: matcher.fill_next_token_bitmask(bitmask, row), matchers, rows
        )
        for _ in fills:  # the iteration raises the first exception of a thread
            pass

    @staticmethod
    def batch_accept_token(matchers: Sequence[GrammarMatcher], tokens: Sequence[int]) -> list[bool]:
        """Advance matcher ``i`` by token ``i`` and return which tokens were accepted."""
        pairs = zip(matchers, tokens, strict=True)
        return [matcher.accept_token(token) for matcher, token in pairs]

    @staticmethod
    def batch_accept_string(
        matchers: Sequence[GrammarMatcher], texts: Sequence[str | bytes]
    ) -> list[bool]:
        """Advance matcher ``i`` by text ``i`` and return which texts were accepted."""
        pairs = zip(matchers, texts, strict=True)
        return [matcher.accept_string(text) for matcher, text in pairs]

    @staticmethod
    def batch_rollback(matchers: Sequence[GrammarMatcher], num_tokens: Sequence[int]) -> None:
        """Undo the last ``num_tokens[i]`` steps of matcher ``i``."""
        for matcher, count in zip(matchers, num_tokens, strict=True):
            matcher.rollback(count)


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences.

    To find the common prefix of several texts, compare the smallest text with the largest.
    """
    length = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        length += 1
    return length


def _bitmask_row(bitmask: Any, index: int, words: int) -> np.ndarray:
    """Return one row of a bitmask as a writable view.

    Raises
    ------
    GrammarError
        The bitmask is not a writable int32 array in CPU memory with `words` words per row, or has
        no row `index`.
    """
    try:
        if isinstance(bitmask, np.ndarray):
            array = bitmask
        elif hasattr(bitmask, "__dlpack__"):
            array = np.from_dlpack(bitmask)
        else:
            array = np.asarray(memoryview(bitmask))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise GrammarError(
            "bitmask: must be an array in CPU memory that supports DLPack or the buffer protocol, "
            f"got {type(bitmask).__name__}: {error}"
        ) from error
    if array.dtype != np.int32 or array.ndim not in (1, 2) or array.shape[-1] != words:
        raise GrammarError(
            f"bitmask: is {array.dtype} {list(array.shape)}, expected int32 [rows, {words}]"
        )
    rows = array if array.ndim == 2 else array.reshape(1, words)
    if not 0 <= index < len(rows):
        raise GrammarError(f"bitmask: row {index} is outside [0, {len(rows)})")
    row = rows[index]
    if not row.flags.writeable or not row.flags.c_contiguous:
        raise GrammarError("bitmask: its rows must be writable and contiguous")
    return row
