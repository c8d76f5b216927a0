"""What one replay is told about its slots, and what is known of its steps afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from .matcher import Matcher

__all__ = ["GuidedRequest", "Span"]


@dataclass(frozen=True)
class GuidedRequest:
    """What one replay is told about one slot.

    Attributes
    ----------
    slot
        Slot of the request, ``0 <= slot < slots``.
    epoch
        Number of this occupation of the slot; another number means another request.
    matcher
        The request's matcher, at the end of ``before`` when it joins; ``None``: unconstrained.
    position
        Position of the last prompt token: the value of ``n`` when the request joined. It stays the
        same in all snapshots of an epoch.
    before
        Tokens that ``matcher`` had accepted already when the request joined: those of an earlier
        stay, from which it was preempted.
    """

    slot: int
    epoch: int
    matcher: Matcher | None
    position: int
    before: tuple[int, ...] = ()


@dataclass(frozen=True)
class Span:
    """When one step of one replay ran, in nanoseconds of ``time.monotonic_ns``."""

    replay: int
    step: str
    start_ns: int
    end_ns: int
