"""The LLGuidance backend for constrained decoding.

The guided decoder's native worker calls LLGuidance's C interface without holding the GIL."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from graft.grammar.automaton.lower import compile_automaton
from graft.grammar.automaton.unique_items import NoUniqueItems, UniqueShapes, unique_shapes
from graft.grammar.backends.base import ending_ids, require_release
from graft.grammar.backends.llguidance_ebnf import lark_grammar
from graft.grammar.errors import GrammarError, clean_message
from graft.grammar.matcher import CompiledGrammar, Matcher, NativeBackedMatcher
from graft.grammar.resolve import ResolvedGrammar, resolve_for_automaton, resolve_for_backend
from graft.grammar.schema.llguidance_check import explain_assertion, schema_grammar, validate
from graft.grammar.schema.llguidance_options import literal
from graft.grammar.schema.name_spelling import with_one_spelling
from graft.grammar.spec import Spec, check_spec
from graft.grammar.structural.lark import NO_TOKENS, lark_pattern, lark_text, split_names
from graft.grammar.vocabulary import Vocabulary
from graft.native import _native
from graft.native.children.process import Call
from graft.native.errors import OptionError

__all__ = ["LLGuidanceBackend", "Prepared", "check_syntax", "is_partial", "load_native", "prepare"]

# Memory of a compiled grammar, in bytes. LLGuidance does not report it. The value was measured as
# the growth of the process per JSON schema, after a request had used the schema.
_MATCHER_BYTES = 180_000

#: Maximum number of tokenizers that a backend keeps, see `LLGuidanceBackend`.
_MAX_TOKENIZERS = 4

#: Id of a structural format of the type ``token``.
_TOKEN_ID = re.compile(r'"token"\s*:\s*(\d{1,9})\b')
#: Matches a string, comment, regular expression or special token of a Lark grammar. The group
#: captures only special tokens.
_LARK_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(<\[[^\]]*\]>|<[^<>\s]+>)'
)
#: Memory for the mask rows of automaton states, in bytes. The grammars of a vocabulary share it.
_ROW_BYTES = 64 << 20


class Prepared(NamedTuple):
    """A grammar that a child process has checked.

    Attributes
    ----------
    text
        The grammar in LLGuidance's JSON format; empty for a JSON schema that has an automaton.
    references
        Special tokens to which the grammar refers in the Lark dialect, such as ``<name>`` and
        ``<[7]>``.
    automaton
        Serialized automaton that allows the same texts; None if the grammar has none.
    unique
        Shapes with which matchers enforce ``uniqueItems``; None if the grammar does not need them.
    """

    text: str
    references: tuple[str, ...]
    automaton: bytes | None
    unique: UniqueShapes | None = None


def prepare(spec: Spec, special: Mapping[str, int], automata: bool) -> Prepared:
    """Build the automaton of a grammar, convert the grammar to LLGuidance's form, and check it.

    The function runs in a child process. A JSON schema whose automaton can be built is not
    converted, because automata enforce more keywords than LLGuidance, and because LLGuidance's
    check takes as long as building the automaton.

    `special` contains ids of special tokens by name. Where the begin, end or trigger text of a tag
    contains such a name, the grammar allows either the text of the name or the special token. If
    `automata` is False, no automaton is built. Raise `GrammarError` if LLGuidance refuses the
    grammar, or if LLGuidance warns that it cannot enforce a part of the grammar and the
    specification is not `partial`.
    """
    unique_items = functools.partial(unique_shapes, any_order=spec.key_order == "any")
    form = resolve_for_automaton(spec) if automata and spec.kind == "json_schema" else None
    if form is not None:
        with contextlib.suppress(NoUniqueItems):
            unique = unique_items(form.content)
            automaton = compile_automaton(form)
            if automaton is not None:
                return Prepared("", (), automaton, unique)
    grammar = resolve_for_backend(spec, "llguidance", unique_items=unique_items)
    if spec.kind == "json_schema" and not grammar.rules:
        # Give LLGuidance the schema itself. If the schema were part of a Lark grammar, as below,
        # parsing the Lark grammar would take about 1 ms.
        rules = ""
        text = schema_grammar(grammar.text)
    else:
        rules = lark_rules(grammar, special)
        text = _lark_grammar(rules)
    if spec.kind != "json_schema":  # the router has already checked JSON schemas
        _check_text(spec, text)
    references = tuple({name for name in _LARK_TOKEN.findall(rules) if name})
    has_been_tried = form is not None and with_one_spelling(form.content).schema == grammar.content
    automaton = None
    if automata and not has_been_tried:
        automaton = compile_automaton(grammar, special)
    return Prepared(text, references, automaton, grammar.unique)


def is_partial(spec: Spec) -> bool:
    """Return whether the grammar that `prepare` returns enforces only a part of a JSON schema."""
    unique_items = functools.partial(unique_shapes, any_order=spec.key_order == "any")
    form = resolve_for_automaton(spec)
    if form is not None:
        with contextlib.suppress(NoUniqueItems):
            unique_items(form.content)
            if compile_automaton(form) is not None:
                return False
    return resolve_for_backend(spec, "llguidance", unique_items=unique_items).partial


@functools.cache
def load_native() -> str:
    """Load LLGuidance's C functions into the native worker and return LLGuidance's version.

    Raise `OptionError` if LLGuidance is not installed, or if the native worker does not support
    this release.
    """
    require_release("LLGuidance", "llguidance", ("1.9.x",), "llguidance==1.9.1")
    try:
        import llguidance

        return str(_native.guide.load_llguidance(llguidance._lib.__file__))
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise OptionError(
            f"grammar_backend: graft cannot call the installed LLGuidance: {error}"
        ) from error


def check_syntax(grammar: ResolvedGrammar) -> None:
    """Parse a grammar with LLGuidance; raise `GrammarError` if LLGuidance refuses it."""
    if grammar.spec.kind != "json_schema":  # the router has already checked JSON schemas
        _check_text(grammar.spec, _lark_grammar(lark_rules(grammar)))


def _lark_grammar(rules: str) -> str:
    """Return a Lark grammar, given by its rules, in LLGuidance's JSON format.

    The option ``no_forcing`` makes LLGuidance allow every sequence of tokens that spells a legal
    text.
    """
    header = '%llguidance {"no_forcing": true}'
    return json.dumps({"grammars": [{"lark_grammar": f"{header}\n{rules}"}]})


def _check_text(spec: Spec, text: str) -> None:
    """Raise `GrammarError` if LLGuidance refuses `text`, a grammar in LLGuidance's JSON format.

    Also raise the error if LLGuidance warns that it ignores a part of the grammar, unless `spec` is
    `partial`.
    """
    refused, lines = validate(text)
    # Without the vocabulary, LLGuidance cannot look up the special tokens that a grammar names, and
    # prints a warning. `load` has the vocabulary and refuses unknown special tokens.
    lines = [line for line in lines if not line.startswith("no tokenizer")]
    message = _error_message("\n".join(lines), spec.kind)
    if refused:
        raise GrammarError(f"{spec.kind}: {message or 'is refused'}")
    if message and not spec.partial:
        raise GrammarError(f"{spec.kind}: cannot be enforced as a whole: {message}")


def lark_rules(grammar: ResolvedGrammar, special: Mapping[str, int] = NO_TOKENS) -> str:
    """Return a grammar in LLGuidance's Lark dialect.

    `special` contains ids of special tokens by name; see `prepare`.
    """
    if grammar.rules and not special:
        return grammar.rules
    spec = grammar.spec
    content = grammar.content
    if spec.kind == "regex":
        return f"start: {lark_pattern(content)}"
    if spec.kind == "choice":
        # All options form one lexeme (terminal). A rule with one alternative per option would be
        # slow and could exceed the parser's limit of items.
        return "start: CHOICE\nCHOICE: " + " | ".join(map(literal, content))
    if spec.kind == "structural_tag":
        return _structural_tag(content, special)
    if spec.kind == "structural_format":
        return lark_text(content, spec.whitespace, special)
    if spec.kind == "ebnf":
        return lark_grammar(content, spec.root)
    return str(content)


def _structural_tag(document: dict[str, Any], special: Mapping[str, int]) -> str:
    """Return a structural tag as a grammar in the Lark dialect.

    Free text is a lazy lexeme (terminal) that ends with a trigger. The trigger is followed by the
    rest of the tag's begin text, by the content of the tag, and by the tag's end text. If the
    trigger begins with the name of a special token, this token can end the free text, too.
    """
    tags = document["tags"]
    indices = range(len(tags))
    free_tag = " | ".join(f"free_{i}" for i in indices)
    first_tag = " | ".join(f"tag_{i}" for i in indices)
    if document["at_once"]:
        body = f"({first_tag}) ({free_tag})*"
    elif document["at_least_one"]:
        body = f"({free_tag})+"
    else:
        body = f"({free_tag})*"
    rules = [f"start: {body} FREE", r"FREE: /(.|\n)*/"]
    for i, tag in enumerate(tags):
        begin = tag["begin"]
        trigger = next(t for t in document["triggers"] if begin.startswith(t))
        rules.append(f"open_{i}[lazy]: FREE {literal(trigger)}")
        rules.append(f"body_{i}: %json {tag['text']} {_spelled(tag['end'], special)}")
        rules.append(f"free_{i}: open_{i} {_spelled(begin[len(trigger) :], special)} body_{i}")
        name = next((part for part, is_name in split_names(trigger, special) if is_name), "")
        if name and trigger.startswith(name):
            rest = _spelled(begin[len(name) :], special)
            rules[-1] += f" | FREE <[{special[name]}]> {rest} body_{i}"
        if document["at_once"]:
            rules.append(f"tag_{i}: {_spelled(begin, special)} body_{i}")
    return "\n".join(rules)


def _spelled(text: str, special: Mapping[str, int]) -> str:
    """Return a Lark expression for a text in which special tokens may replace their names."""
    parts = []
    for part, is_name in split_names(text, special):
        parts.append(f"({literal(part)} | <[{special[part]}]>)" if is_name else literal(part))
    return " ".join(parts)


def _error_message(message: str, kind: str) -> str:
    """Return LLGuidance's error as one sentence.

    The line and column are kept only for Lark grammars, where they refer to the user's text.
    """
    prefix = "error: "
    lines = message.strip().split("\n")
    reasons = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    text = explain_assertion(re.split(r"\s\d+ \| ", clean_message(message))[0])
    if reasons:
        # LLGuidance prints an excerpt of a regular expression before the reason of its error.
        subject = re.split(r" \(in regex\)|: regex parse error", text)[0]
        text = f"{subject}: {reasons[0]}"
    position = re.match(r"(?:at )?(\d+)\((\d+)\): ", text)
    if position is None:
        return text
    text = text[position.end() :]
    if kind != "lark":
        if kind == "regex" and text == "lexer error":
            return "the pattern ends with an incomplete escape sequence"
        return text
    line = int(position[1]) - 1  # the first line is the header that graft adds
    column = position[2]
    return f"line {line}, column {column}: {text}"


class LLGuidanceBackend:
    """Compiles grammars with LLGuidance and creates matchers.

    The constructor sorts the vocabulary, which takes about 0.6 s for 128k tokens. Creating a
    matcher takes microseconds, because it is a deep copy of a matcher at the start of the grammar.
    Matchers share neither state nor locks. They allow every tokenization of a legal text.

    If a grammar names a token that has text, the token must be legal exactly where the grammar
    names it. LLGuidance therefore compiles this grammar with a separate tokenizer, in which the
    token is a special token without text. The backend keeps one tokenizer for each of the last few
    sets of named tokens.

    Parameters
    ----------
    vocabulary
        Vocabulary of the grammars and matchers.
    automata
        Whether grammars with automata (see `graft.grammar.automaton.lower`) run as automata instead
        of LLGuidance's matchers. Both allow the same tokens.
    """

    name = "LLGuidance"

    def __init__(self, vocabulary: Vocabulary, *, automata: bool = True):
        self.vocabulary = vocabulary
        self._automata = automata
        load_native()
        # Ids of the tokens in `vocabulary.names` that have text, by name.
        self._named_text = {
            name: token for name, token in vocabulary.names.items() if vocabulary.is_text(token)
        }
        self._lock = threading.Lock()
        self._tokenizers: dict[frozenset[int], Any] = {}
        self._tokenizer(frozenset())
        self._row_memory = _native.guide.RowMemory(_ROW_BYTES)

    def _tokenizer(self, named: frozenset[int]) -> Any:
        """Return the LLGuidance tokenizer in which the tokens `named` are special tokens."""
        vocabulary = self.vocabulary
        with self._lock:
            if named in self._tokenizers:
                return self._tokenizers[named]
            tokens = list(vocabulary.tokens)
            tokens += [b""] * (vocabulary.size - len(tokens))
            for name, token in vocabulary.names.items():
                if token in named or not vocabulary.is_text(token):
                    # LLGuidance recognizes a special token by the byte 0xff before its name.
                    tokens[token] = b"\xff" + name.encode("utf-8")
            lengths = [len(token) for token in tokens]
            try:
                made = _native.guide.LLGuidanceTokenizer(
                    lengths, b"".join(tokens), vocabulary.stop_ids
                )
            except RuntimeError as error:
                raise GrammarError(f"LLGuidance refuses the vocabulary: {error}") from error
            if len(self._tokenizers) == _MAX_TOKENIZERS:
                del self._tokenizers[next(key for key in self._tokenizers if key)]
            self._tokenizers[named] = made
            return made

    def _named_tokens(self, references: Iterable[str]) -> frozenset[int]:
        """Return the ids of those tokens that a Lark grammar names although they have text.

        `references` are the names in the grammar, such as ``<name>`` and ``<[7]>``.
        """
        named = {self._named_text[name] for name in references if name in self._named_text}
        for reference in references:
            if not reference.startswith("<[") or reference.startswith("<[^"):
                continue
            for low, high in re.findall(r"(\d+)(?:-(\d+))?", reference):
                ids = range(int(low), int(high or low) + 1)
                named.update(token for token in self._named_text.values() if token in ids)
        return frozenset(named)

    @functools.cached_property
    def _trie(self) -> Any:
        """Trie of the tokens' bytes, from which automata compute mask rows."""
        tokens = self.vocabulary.automaton_tokens
        lengths = [len(token) for token in tokens]
        return _native.guide.TokenTrie(lengths, b"".join(tokens), self.vocabulary.size)

    @functools.cached_property
    def _token_kinds(self) -> Any:
        """Sets of tokens with which mask rows are checked for repeated items."""
        return _native.guide.TokenKinds(self._trie)

    def compile(self, spec: Spec) -> CompiledGrammar:
        """Compile a grammar on the calling thread.

        There is no limit of time, but LLGuidance limits the size of the grammar and of its lexer.
        """
        check_spec(spec)
        return self.load(spec, prepare(spec, self._special_tokens(spec), self._automata))

    def compile_call(self, spec: Spec) -> Call:
        """Return the call that prepares a grammar in a child process; see `BoundedBackend`."""
        return Call(f"{__name__}:prepare", (spec, self._special_tokens(spec), self._automata))

    @functools.cached_property
    def _special_spellings(self) -> list[tuple[str, str, int]]:
        """Each special token: its name with the escapes of a JSON string, its name, and its id."""
        vocabulary = self.vocabulary
        found = []
        for name, token in vocabulary.names.items():
            if name and not vocabulary.is_text(token) and token not in vocabulary.stop_ids:
                found.append((json.dumps(name, ensure_ascii=False)[1:-1], name, token))
        return found

    def _special_tokens(self, spec: Spec) -> dict[str, int]:
        """Return the special tokens that a structural tag or format contains: ids by name.

        They are the tokens whose names occur in its texts, and those that it lists by id. The
        result is empty for grammars of other kinds.
        """
        if spec.kind not in ("structural_tag", "structural_format"):
            return {}
        ids = set(map(int, _TOKEN_ID.findall(spec.text)))
        return {
            name: token
            for spelling, name, token in self._special_spellings
            if spelling in spec.text or token in ids
        }

    def load(self, spec: Spec, result: Prepared) -> CompiledGrammar:
        """Create the compiled grammar from the result of `prepare`.

        A grammar with an automaton is not compiled with LLGuidance, which has already checked the
        grammar (`prepare`) and whose matchers are not needed. The native code releases the GIL
        while LLGuidance compiles a grammar.
        """
        if result.automaton is not None:
            automaton = _native.guide.AutomatonGrammar(
                result.automaton, self._trie, self._row_memory
            )
            compiled = CompiledGrammar(self, spec, None, len(result.text) + automaton.nbytes)
            compiled.automaton = automaton
            return self._with_unique_items(compiled, result.unique)
        try:
            tokenizer = self._tokenizer(self._named_tokens(result.references))
            native = _native.guide.LLGuidanceGrammar(tokenizer, result.text)
        except RuntimeError as error:
            message = _error_message(str(error), spec.kind)
            if "removal index" in message:  # an unknown special token causes this panic
                message = "names a special token that the vocabulary does not have"
            raise GrammarError(f"{spec.kind}: {message}") from None
        compiled = CompiledGrammar(self, spec, native, _MATCHER_BYTES + len(result.text))
        return self._with_unique_items(compiled, result.unique)

    def _with_unique_items(
        self, compiled: CompiledGrammar, shapes: UniqueShapes | None
    ) -> CompiledGrammar:
        """Add the shapes with which the grammar's matchers enforce ``uniqueItems``."""
        if shapes is not None:
            compiled.unique = _native.guide.Shapes(*shapes)
            compiled.nbytes += compiled.unique.nbytes
        return compiled

    def matcher(self, compiled: CompiledGrammar, stop_ids: Iterable[int] | None = None) -> Matcher:
        """Return a new matcher at the start of a grammar.

        If the grammar has an automaton, the matcher runs the automaton, which allows the same
        tokens. The stop ids without text terminate the matcher; see `ending_ids`.
        """
        ending = ending_ids(self, compiled, stop_ids)
        automaton = compiled.automaton
        handle: _native.guide.NativeMatcher
        if automaton is not None:
            handle = _native.guide.AutomatonMatcher(automaton, ending)
        else:
            handle = _native.guide.LLGuidanceMatcher(compiled.native, ending)
        if compiled.unique is not None:
            handle = _native.guide.UniqueMatcher(handle, compiled.unique, self._token_kinds)
        return NativeBackedMatcher(compiled, ending, handle)
