"""Reasons why a part of a schema is not enforced as written."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["NoExactForm", "Reason"]


class Reason(NamedTuple):
    """The reason why a part of a schema is not enforced as written.

    Attributes
    ----------
    pointer
        JSON pointer of the subschema as a URI fragment, such as ``#/properties/a``.
    keyword
        Keyword of the subschema.
    why
        Explanation, in one clause.
    """

    pointer: str
    keyword: str
    why: str

    def __str__(self) -> str:
        return f"{self.pointer}: {self.keyword}: {self.why}"


class NoExactForm(Exception):
    """Raised for a keyword without a form that a backend enforces exactly.

    The caller catches it and reports it to the user as a `Reason`. The error only affects values
    that satisfy the schema `values`.
    """

    def __init__(self, keyword: str, why: str, values: Any = True):
        super().__init__(f"{keyword}: {why}")
        self.keyword = keyword
        self.why = why
        self.values = values
