"""What the engine has to tell its users, by request, until somebody fetches it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from graft.models.request import Event


class Outbox:
    """Events that nobody has fetched.

    Who drives requests of its own claims them, and alone gets their events; everybody else's are
    fetched together. So users of one engine may take turns, or one begin within another's turn.

    Attributes
    ----------
    posted : events so far.
    """

    def __init__(self) -> None:
        self._events: dict[str, list[Event]] = {}
        self._claimed: set[str] = set()
        self.posted = 0

    @property
    def pending(self) -> bool:
        """Whether there are events that nobody has claimed."""
        return not self._claimed.issuperset(self._events)

    def post(self, event: Event) -> None:
        self._events.setdefault(event.id, []).append(event)
        self.posted += 1

    def claim(self, request_id: str) -> None:
        self._claimed.add(request_id)

    def release(self, ids: Iterable[str]) -> None:
        """End claims; what has not been fetched is forgotten."""
        for request_id in ids:
            self._claimed.discard(request_id)
            self._events.pop(request_id, None)

    def fetch(self, claimed: Collection[str]) -> list[Event]:
        """The events of requests that the caller has claimed."""
        return self._take([i for i in self._events if i in claimed])

    def fetch_rest(self) -> list[Event]:
        """The events of requests that nobody has claimed."""
        return self._take([i for i in self._events if i not in self._claimed])

    def _take(self, ids: list[str]) -> list[Event]:
        return [event for request_id in ids for event in self._events.pop(request_id)]
