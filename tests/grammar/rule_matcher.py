"""Slow matcher of grammar rules, written independently of the native automata.

`RuleMatcher` takes the derivative of an expression by each byte of a text: the expression of the
rest of all texts that begin with this byte. A call is expanded to the rule that it calls, so the
expression after some bytes grows with the nesting of the text. Expressions are nodes, which are
tuples; equal nodes are the same object, so that the results of all functions can be cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Node = tuple[Any, ...]

EMPTY: Node = ("empty",)
NOTHING: Node = ("union", ())
_SURROGATES = (0xD800, 0xDFFF)


class RuleMatcher:
    """Matches bytes with a list of rules, as `graft.grammar.automaton.lower.lower` returns it."""

    def __init__(self, rules: list[tuple[int, int, list[int]]]):
        self._nodes: dict[Any, Node] = {}
        self._steps: dict[int, dict[int, Node]] = {}
        self._nullable: dict[int, bool] = {}
        self._matches: dict[int, bool] = {}
        self._rules = [(opening, closing, self._parse(body)) for opening, closing, body in rules]
        self._productive: set[int] = set()
        self._find_productive_rules()
        self.start = self._rules[0][2]

    def after(self, text: bytes, node: Node | None = None) -> Node:
        """Return the node of the rest after some bytes; `NOTHING` if no text begins with them."""
        node = self.start if node is None else node
        for byte in text:
            node = self.next_nodes(node).get(byte, NOTHING)
        return node

    def accepts(self, text: bytes) -> bool:
        """Return whether the rules match a text."""
        return self._is_nullable(self.after(text))

    def legal(self, node: Node) -> tuple[set[int], bool]:
        """Return the bytes that may follow, and whether the text may end."""
        return set(self.next_nodes(node)), self._is_nullable(node)

    def is_prefix(self, text: bytes, node: Node) -> bool:
        """Return whether a text may follow a node."""
        return self.after(text, node) is not self._make(NOTHING)

    # Nodes ----------------------------------------------------------------------------------------

    def _make(self, node: Node) -> Node:
        """Return the node that equals `node`, whose parts this method has returned before."""
        return self._nodes.setdefault(_key(node), node)

    def _concat(self, parts: Iterable[Node]) -> Node:
        flat: list[Node] = []
        for part in parts:
            if part == NOTHING:
                return self._make(NOTHING)
            if part[0] == "concat":
                flat += part[1]
            elif part != EMPTY:
                flat.append(part)
        if len(flat) == 1:
            return flat[0]
        return self._make(("concat", tuple(flat)) if flat else EMPTY)

    def _union(self, options: Iterable[Node]) -> Node:
        found: dict[int, Node] = {}
        for option in options:
            for part in option[1] if option[0] == "union" else (option,):
                found[id(part)] = part
        parts = sorted(found.values(), key=id)
        return parts[0] if len(parts) == 1 else self._make(("union", tuple(parts)))

    def _parse(self, program: list[int]) -> Node:
        stack: list[Node] = []
        at = 0

        def pop(count: int) -> list[Node]:
            parts = stack[len(stack) - count :]
            del stack[len(stack) - count :]
            return parts

        while at < len(program):
            operation = program[at]
            at += 1
            if operation == 0:
                node = self._make(EMPTY)
            elif operation == 1:
                codes = program[at + 1 : at + 1 + 2 * program[at]]
                at += 1 + 2 * program[at]
                node = self._make(("set", tuple(zip(codes[::2], codes[1::2], strict=True)), b""))
            elif operation == 2:
                node = self._concat(pop(program[at]))
                at += 1
            elif operation == 3:
                node = self._union(pop(program[at]))
                at += 1
            elif operation == 4:
                node = self._make(("repeat", *pop(1), program[at], program[at + 1]))
                at += 2
            elif operation == 5:
                node = self._make(("call", program[at]))
                at += 1
            elif operation == 6:
                count = program[at]
                separator, *items = pop(count + 1)
                bounds = program[at + 1 : at + 1 + 2 * count]
                at += 1 + 2 * count
                members = tuple(zip(items, bounds[::2], bounds[1::2], (0,) * count, strict=True))
                node = self._make(("members", separator, members, 0, 0, False, True))
            elif operation == 10:
                count = program[at]
                separator, *items = pop(count + 1)
                numbers = program[at + 1 : at + 1 + 3 * count]
                at += 1 + 3 * count
                members = tuple(zip(items, numbers[::3], numbers[1::3], numbers[2::3], strict=True))
                # The last field says whether an item with a flag has been read.
                node = self._make(("members", separator, members, 0, 0, False, False))
            elif operation in (7, 8):
                node = self._make(("both" if operation == 7 else "minus", *pop(2)))
            elif operation == 9:
                # divisor, digits after the point, remainder; digits after the point that have been
                # read, -1 before the point, and -2 before the first digit
                node = self._make(("multiple", program[at], program[at + 1], 0, -2))
                at += 2
            else:
                raise AssertionError(f"unknown operation {operation}")
            stack.append(node)
        [node] = stack
        return node

    # Properties of nodes --------------------------------------------------------------------------

    def _is_nullable(self, node: Node) -> bool:
        key = id(node)
        if key not in self._nullable:
            self._nullable[key] = self._compute_nullable(node)
        return self._nullable[key]

    def _compute_nullable(self, node: Node) -> bool:
        kind = node[0]
        if kind == "concat":
            return all(map(self._is_nullable, node[1]))
        if kind == "union":
            return any(map(self._is_nullable, node[1]))
        if kind == "repeat":
            return node[2] == 0 or self._is_nullable(node[1])
        if kind == "members":
            _, _, items, index, count, _, is_met = node
            return is_met and all(
                low <= (count if at == index else 0)
                for at, (_, low, _, _) in enumerate(items)
                if at >= index
            )
        if kind == "both":
            return self._is_nullable(node[1]) and self._is_nullable(node[2])
        if kind == "minus":
            return self._is_nullable(node[1]) and not self._is_nullable(node[2])
        if kind == "multiple":
            _, _, places, remainder, read = node
            return remainder == 0 and read == (places or -1)
        return kind == "empty"

    def _find_productive_rules(self) -> None:
        found = True
        while found:
            found = False
            for index, (_, _, body) in enumerate(self._rules):
                if index not in self._productive:
                    self._matches.clear()
                    if self._has_text(body):
                        self._productive.add(index)
                        found = True
        self._matches.clear()
        self._steps.clear()

    def _has_text(self, node: Node) -> bool:
        """Return whether a node matches any text."""
        key = id(node)
        if key not in self._matches:
            self._matches[key] = self._compute_has_text(node)
        return self._matches[key]

    def _compute_has_text(self, node: Node) -> bool:
        kind = node[0]
        if kind == "concat":
            return all(map(self._has_text, node[1]))
        if kind == "union":
            return any(map(self._has_text, node[1]))
        if kind == "repeat":
            return node[2] == 0 or self._has_text(node[1])
        if kind == "call":
            return node[1] in self._productive
        if kind == "members":
            _, _, items, index, count, _, is_met = node
            rest = [
                (item, low, high, flag, count if at == index else 0)
                for at, (item, low, high, flag) in enumerate(items)
                if at >= index
            ]
            if not is_met and not any(
                flag and (high < 0 or so_far < high) and self._has_text(item)
                for item, _, high, flag, so_far in rest
            ):
                return False
            return all(low <= so_far or self._has_text(item) for item, low, _, _, so_far in rest)
        if kind == "set":
            return bool(_first_bytes(node[1], node[2]))
        if kind in ("both", "minus"):
            seen = {id(node)}
            queue = [node]
            while queue:
                part = queue.pop()
                if part[0] != kind:
                    if self._has_text(part):
                        return True
                    continue
                if self._is_nullable(part):
                    return True
                for following in self._product_steps(part).values():
                    if id(following) not in seen:
                        seen.add(id(following))
                        queue.append(following)
            return False
        return True

    # Derivatives ----------------------------------------------------------------------------------

    def next_nodes(self, node: Node) -> dict[int, Node]:
        """Return the node after each byte that may come next."""
        key = id(node)
        if key not in self._steps:
            found = self._compute_steps(node)
            self._steps[key] = {byte: part for byte, part in found.items() if self._has_text(part)}
        return self._steps[key]

    def _compute_steps(self, node: Node) -> dict[int, Node]:
        kind = node[0]
        if kind == "set":
            _, ranges, begun = node
            steps = {}
            for byte in _first_bytes(ranges, begun):
                more = begun + bytes([byte])
                done = len(more) == _length(more[0])
                steps[byte] = self._make(EMPTY if done else ("set", ranges, more))
            return steps
        if kind == "concat":
            return self._concat_steps(node[1])
        if kind == "union":
            return self._merge(list(map(self.next_nodes, node[1])))
        if kind == "repeat":
            _, part, low, high = node
            if high == 0:
                return {}
            rest = self._make(("repeat", part, max(low - 1, 0), high - 1 if high > 0 else -1))
            return {
                byte: self._concat([after, rest]) for byte, after in self.next_nodes(part).items()
            }
        if kind == "call":
            opening, closing, body = self._rules[node[1]]
            end = self._make(("set", ((closing, closing),), b""))
            return {opening: self._concat([body, end])}
        if kind == "members":
            return self._member_steps(node)
        if kind in ("both", "minus"):
            return self._product_steps(node)
        if kind == "multiple":
            _, divisor, places, remainder, read = node
            steps = {}
            if read < places:
                following = max(read, -1) + (read >= 0)
                for digit in range(10):
                    number = (10 * remainder + digit) % divisor
                    steps[0x30 + digit] = self._make((*node[:3], number, following))
            if places and read == -1:
                steps[0x2E] = self._make((*node[:4], 0))
            return steps
        return {}

    def _concat_steps(self, parts: tuple[Node, ...]) -> dict[int, Node]:
        found = []
        for index, part in enumerate(parts):
            rest = parts[index + 1 :]
            found.append(
                {
                    byte: self._concat([after, *rest])
                    for byte, after in self.next_nodes(part).items()
                }
            )
            if not self._is_nullable(part):
                break
        return self._merge(found)

    def _member_steps(self, node: Node) -> dict[int, Node]:
        _, separator, items, index, count, written, is_met = node
        found = []
        for at in range(index, len(items)):
            item, low, high, flag = items[at]
            so_far = count if at == index else 0
            if high < 0 or so_far < high:
                met = is_met or flag == 1
                rest = self._make(("members", separator, items, at, so_far + 1, True, met))
                front = (separator, item) if written else (item,)
                found.append(self._concat_steps((*front, rest)))
            if so_far < low:
                break
        return self._merge(found)

    def _product_steps(self, node: Node) -> dict[int, Node]:
        kind, one, other = node
        steps = {}
        others = self.next_nodes(other)
        for byte, after in self.next_nodes(one).items():
            if byte in others:
                steps[byte] = self._make((kind, after, others[byte]))
            elif kind == "minus":
                steps[byte] = after
        return steps

    def _merge(self, parts: list[dict[int, Node]]) -> dict[int, Node]:
        if len(parts) == 1:
            return parts[0]
        merged: dict[int, list[Node]] = {}
        for part in parts:
            for byte, node in part.items():
                merged.setdefault(byte, []).append(node)
        return {byte: self._union(nodes) for byte, nodes in merged.items()}


def _key(node: Node) -> tuple[Any, ...]:
    """Return the identity of a node: its fields, with the ids of its parts.

    Hashing the node itself would hash all nodes below it.
    """
    kind = node[0]
    if kind in ("concat", "union"):
        return (kind, *map(id, node[1]))
    if kind == "repeat":
        return (kind, id(node[1]), *node[2:])
    if kind in ("both", "minus"):
        return (kind, id(node[1]), id(node[2]))
    if kind == "members":
        _, separator, items, *place = node
        return (kind, id(separator), *((id(item), *bounds) for item, *bounds in items), *place)
    return node


def _length(lead: int) -> int:
    """Return the number of bytes of a character in UTF-8, from its first byte."""
    return 1 if lead < 0x80 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4


def _first_bytes(ranges: tuple[tuple[int, int], ...], begun: bytes) -> list[int]:
    """Return the bytes that continue the UTF-8 text of one character of some ranges."""
    candidates = range(0x80, 0xC0) if begun else (*range(0x80), *range(0xC2, 0xF5))
    found = []
    for byte in candidates:
        first, last = _codes(begun + bytes([byte]))
        for low, high in ranges:
            low, high = max(low, first), min(high, last)
            if low <= high and not (low >= _SURROGATES[0] and high <= _SURROGATES[1]):
                found.append(byte)
                break
    return found


def _codes(begun: bytes) -> tuple[int, int]:
    """Return the first and the last character whose UTF-8 text begins with some bytes."""
    length = _length(begun[0])
    if length == 1:
        return begun[0], begun[0]
    code = begun[0] & (0x7F >> length)
    for byte in begun[1:]:
        code = code << 6 | byte & 0x3F
    missing = length - len(begun)
    first = code << 6 * missing
    return max(first, (0, 0, 0x80, 0x800, 0x10000)[length]), first | (1 << 6 * missing) - 1
