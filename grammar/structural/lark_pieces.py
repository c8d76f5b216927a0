"""Pieces of Lark grammars, from which `graft.grammar.structural.lark` builds grammars of formats.

LLGuidance reads text with a greedy lexer: a terminal matches as much text as it can, and the lexer
never backtracks. A grammar therefore allows exactly the intended texts only if the lexer can see
where each terminal ends, and which of several alternatives the text begins with. `Joiner` checks
both. It joins adjacent terminals into one, because matching within a terminal is not greedy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from graft.grammar.schema.llguidance_options import literal
from graft.grammar.structural.formats import LoweringError

__all__ = ["Joiner", "Piece", "check_boundary", "constant", "overlap"]

_UNSEEN = "LLGuidance cannot see where"
_NUMBER_CHARACTERS = frozenset("0123456789.eE+-")
#: Length up to which `Joiner.named` does not replace an expression with the name of a terminal or
#: rule.
_MAX_COPIED = 20


@dataclass(frozen=True)
class Piece:
    """A part of a grammar.

    Attributes
    ----------
    text
        Expression in the Lark dialect.
    name
        Type of the format that the piece comes from, for error messages.
    terminal
        Whether the expression is regular, so that it can be a part of a terminal. Other pieces are
        expressions for rules.
    closed
        Whether it is known how the greedy lexer could extend a match to a longer match: only with a
        text that begins with one of the texts in `more` or, if the piece is `numeric`, with digits.
    starts
        Texts with which the matches start: each match that is not empty starts with one of them.
        None if they are not known.
    exact
        Whether the texts in `starts` are the matches themselves, not only their beginnings.
    absent
        If the piece is or ends with free text: texts that do not occur in the free text.
    not_first
        If the piece is free text: texts with which it does not begin.
    numeric
        Whether a match may end with a JSON number, which further digits would continue.
    special
        Whether the piece is a special token, which has no text.
    empty
        Whether the piece is known to match the empty text. `starts` then contains the starts of the
        other matches.
    more
        If the piece is a rule: beginnings of the texts that may continue a match; None if they are
        not known.
    repeated
        If the piece is a repetition or ends with one: piece that matches the same texts with a rule
        instead of one terminal. None if the lexer might then split a text at a wrong place.
    """

    text: str
    name: str
    terminal: bool = True
    closed: bool = False
    starts: frozenset[str] | None = None
    exact: bool = False
    absent: tuple[str, ...] = ()
    not_first: tuple[str, ...] = ()
    numeric: bool = False
    special: bool = False
    empty: bool = False
    more: frozenset[str] | None = frozenset()
    repeated: Piece | None = None


def constant(text: str) -> Piece:
    """Return the piece that matches exactly one text."""
    starts = frozenset([text]) if text else None
    return Piece(literal(text), "const_string", closed=True, starts=starts, exact=bool(text))


def overlap(texts: Iterable[str]) -> tuple[str, str] | None:
    """Return two of `texts` of which one contains the other, or begins with the other's end.

    Both may be the same text. If no texts overlap, return None. Their occurrences in a longer text
    then do not overlap either, so that the one that begins first also ends first.
    """
    for a, b in itertools.product(dict.fromkeys(texts), repeat=2):
        if a != b and b in a:
            return a, b
        if any(b.startswith(a[-length:]) for length in range(1, min(len(a), len(b)))):
            return a, b
    return None


def _may_begin_alike(a: frozenset[str] | None, b: frozenset[str] | None) -> bool:
    """Return whether a text of one piece can begin like a text of another piece.

    `a` and `b` are the beginnings of the pieces' texts; None if they are unknown. An unknown
    beginning can be like any other.
    """
    if a is None or b is None:
        return a != frozenset() and b != frozenset()
    return any(x.startswith(y) or y.startswith(x) for x in a for y in b)


def _are_distinct(a: Piece, b: Piece) -> bool:
    """Return whether the start of a text always shows which of two pieces it belongs to."""
    for free, other in ((a, b), (b, a)):
        if free.not_first and other.starts is not None:
            return all(start.startswith(free.not_first) for start in other.starts)
    return not _may_begin_alike(a.starts, b.starts)


def _union(sets: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    """Return the union of sets; None if one of the sets is None, that is, not known."""
    union: frozenset[str] = frozenset()
    for found in sets:
        if found is None:
            return None
        union |= found
    return union


class Joiner:
    """Joins pieces, and collects the definitions of terminals and rules."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[tuple[str, bool], str] = {}

    def define(self, text: str, *, terminal: bool) -> str:
        """Define a terminal or a rule and return its name. Equal texts have one definition."""
        key = (text, terminal)
        if key not in self._names:
            self._names[key] = f"{'T' if terminal else 'r'}{len(self.lines)}"
            self.lines.append(f"{self._names[key]}: {text}")
        return self._names[key]

    def reference(self, piece: Piece) -> str:
        """Return the expression for a piece in a rule; define a terminal if the piece needs one."""
        return self.define(piece.text, terminal=True) if piece.terminal else piece.text

    def named(self, piece: Piece) -> Piece:
        """Return the same piece; if its expression is long, define it and use its name instead.

        Call this for a piece that is used several times. Nested formats would otherwise double the
        size of the grammar at each level.
        """
        if len(piece.text) <= _MAX_COPIED:
            return piece
        return replace(piece, text=self.define(piece.text, terminal=piece.terminal))

    def sequence(self, pieces: Sequence[Piece]) -> Piece:
        """Return the piece that matches several pieces one after the other.

        Raise `LoweringError` if the lexer could not see where one of the pieces ends.
        """
        pieces = [piece for piece in pieces if piece.text != '""'] or [constant("")]
        groups = self._groups(pieces)
        if len(groups) > 1:
            return self._rule(groups)
        [piece] = groups
        if piece.closed or not piece.terminal or len(pieces) == 1:
            return piece
        split = _split_repetitions(pieces)
        try:
            rule = self._rule(split) if len(split) > 1 else None
        except LoweringError:
            return piece
        return replace(piece, repeated=rule) if rule and rule.closed else piece

    def _rule(self, groups: Sequence[Piece]) -> Piece:
        """Define a rule that matches pieces one after the other, and return it as a piece."""
        for index, piece in enumerate(groups):
            for following in groups[index + 1 :]:
                check_boundary(piece, following)
                if not following.empty:
                    break
        text = " ".join(map(self.reference, groups))
        return Piece(
            self.define(text, terminal=False),
            "sequence",
            terminal=False,
            closed=groups[-1].closed,
            starts=_starts(groups),
            numeric=any(piece.numeric for piece in _last_pieces(groups)),
            empty=all(piece.empty for piece in groups),
            more=_union(piece.more for piece in _last_pieces(groups)),
        )

    def _groups(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Join adjacent terminals into one.

        If the lexer could not see where the joined terminal ends, those of its parts that are
        repetitions become rules (`Piece.repeated`), and only the parts between them are joined.
        """
        groups: list[Piece] = []
        for terminal, run in itertools.groupby(pieces, lambda piece: piece.terminal):
            parts = list(run)
            if not terminal:
                groups += parts
                continue
            joined = _join_terminals(parts)
            is_last = parts[-1] is pieces[-1]
            if is_last and len(parts) < len(pieces):
                groups += _split_repetitions(parts)
                continue
            if is_last or joined.closed:
                groups.append(joined)
                continue
            for rule, some in itertools.groupby(parts, lambda part: part.repeated):
                groups.append(rule or _join_terminals(list(some)))
        return groups

    def alternatives(self, pieces: Sequence[Piece], name: str, *, check: bool = True) -> Piece:
        """Return the piece that matches one of several pieces.

        `name` is the type of the format, for error messages. With `check`, raise `LoweringError` if
        the lexer could not see which piece a text begins with.
        """
        if len(pieces) == 1:
            return pieces[0]
        terminal = all(piece.terminal for piece in pieces)
        if not terminal:
            pieces = [piece.repeated or piece for piece in pieces]
        distinct = all(_are_distinct(a, b) for a, b in itertools.combinations(pieces, 2))
        if check and not terminal and not distinct:
            raise LoweringError(
                f"LLGuidance cannot tell the alternatives of {name} apart by their first characters"
            )
        texts = [piece.text if terminal else self.reference(piece) for piece in pieces]
        return Piece(
            f"({' | '.join(texts)})",
            name,
            terminal=terminal,
            closed=all(piece.closed for piece in pieces) and (distinct or not terminal),
            starts=_union(piece.starts for piece in pieces),
            numeric=any(piece.numeric for piece in pieces),
            empty=any(piece.empty for piece in pieces),
            more=_union(piece.more for piece in pieces),
        )

    def repeat(self, piece: Piece, low: int, high: int | None, name: str) -> Piece:
        """Return the piece that matches `low` to `high` repetitions of a piece.

        `high` is None if there is no maximum. `name` is the type of the format, for error messages.
        """
        count = f"{{{low},{'' if high is None else high}}}"
        piece = self.named(piece)
        rule = None
        if not piece.terminal or (piece.closed and piece.starts is not None):
            if high != 1:
                check_boundary(piece, piece)
            text = f"({self.reference(piece)}){count}"
            text = self.define(text, terminal=False)
            rule = Piece(
                text,
                name,
                terminal=False,
                closed=piece.closed,
                starts=piece.starts,
                numeric=piece.numeric,
                empty=low == 0 or piece.empty,
                more=_union([piece.starts, piece.more]),
            )
            rule = replace(rule, repeated=rule)
        if not piece.terminal:
            assert rule is not None
            return rule
        closed = piece.closed and low == high
        return Piece(
            f"({piece.text}){count}",
            name,
            closed=closed,
            starts=None if rule is None else rule.starts,
            empty=rule is not None and rule.empty,
            repeated=rule,
        )


def _split_repetitions(parts: Sequence[Piece]) -> list[Piece]:
    """Join terminals into one terminal, followed by rules for the repetitions at the end.

    A repetition is better a rule (`Piece.repeated`) than a part of the terminal, because the field
    `more` of a rule says which texts may continue a match. If the lexer would not see where the
    terminal before the rules ends, all parts are joined into one terminal.
    """
    front = list(parts)
    rules: list[Piece] = []
    while front and (rule := front[-1].repeated) is not None:
        rules.insert(0, rule)
        front.pop()
    joined = [_join_terminals(front)] if front else []
    if all(piece.closed for piece in joined):
        return [*joined, *rules]
    return [_join_terminals(parts)]


def _starts(pieces: Sequence[Piece]) -> frozenset[str] | None:
    """Return texts with which the matches of a sequence start (`Piece.starts`); None if unknown.

    Several tags can begin with the same token or text, so the returned texts include the start of
    the next piece, which distinguishes the tags. If the first piece is a text, only one character
    of the next piece is included. Later characters cannot distinguish the tags: if a longer
    terminal matches the text and this character, the greedy lexer continues with that terminal.
    """
    first = pieces[0]
    if len(pieces) == 1:
        return None if first.empty else first.starts
    following = _starts(pieces[1:])
    if first.empty:
        return _union([first.starts, following])
    if following is None or first.starts is None or not (first.exact or first.special):
        return first.starts
    if first.exact:
        following = frozenset(text[:1] for text in following)
    return frozenset(a + b for a in first.starts for b in following)


def _last_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces with which a match of the sequence can end, the last one first.

    These are the last piece and, if all pieces after a piece can match the empty text, this piece.
    The lexer sees where all other pieces end, so only the returned pieces determine how a match can
    be extended.
    """
    found = []
    for piece in reversed(pieces):
        found.append(piece)
        if not piece.empty:
            break
    return found


def _join_terminals(parts: Sequence[Piece]) -> Piece:
    if len(parts) == 1:
        return parts[0]
    closed = parts[-1].closed
    starts = parts[-1].starts
    empty = parts[-1].empty
    for part, following in reversed(list(itertools.pairwise(parts))):
        goes_on = part.repeated is None or empty or _may_begin_alike(part.repeated.more, starts)
        if not (part.closed or _ends_before(part, following) or not goes_on):
            closed = False
        if part.empty:
            starts = _union([part.starts, starts])
        elif part.exact and part.starts is not None and starts is not None and not empty:
            starts = frozenset(a + b for a in part.starts for b in starts)
        else:
            starts = part.starts
        empty = empty and part.empty
    return Piece(
        " ".join(part.text for part in parts),
        "sequence",
        closed=closed,
        starts=starts,
        exact=all(part.exact for part in parts),
        absent=parts[-1].absent,
        empty=empty,
    )


def _ends_before(free: Piece, following: Piece) -> bool:
    """Return whether the free text cannot contain any start of the next piece.

    The free text contains none of the texts `free.absent`, so it must end before the next piece if
    each start of this piece begins with one of them.
    """
    if following.empty or following.starts is None:
        return False
    return all(start.startswith(free.absent) for start in following.starts)


def check_boundary(piece: Piece, following: Piece) -> None:
    """Raise `LoweringError` unless the lexer sees where `piece` ends when `following` is next."""
    if following.special:
        return
    starts = following.starts
    if piece.numeric and (starts is None or any(s[0] in _NUMBER_CHARACTERS for s in starts)):
        raise LoweringError(f"{_UNSEEN} a number ends before {following.name}")
    if not piece.closed:
        raise LoweringError(f"{_UNSEEN} {piece.name} ends before {following.name}")
    if _may_begin_alike(piece.more, starts):
        raise LoweringError(
            f"LLGuidance cannot see whether {piece.name} goes on before {following.name}"
        )
