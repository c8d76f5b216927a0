"""Drafts of a user's own Python function, which a round's graph asks and waits for."""

from __future__ import annotations

import logging
import operator
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from numpy.typing import NDArray

from graft.cudagraph.cstruct import read_numbers
from graft.cudagraph.errors import OptionError
from graft.cudagraph.hostwork import PythonWork
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray, PinnedArray
from graft.models.drafters.base import Drafter, DrafterContext, MakeDrafter, TreeShape
from graft.models.drafters.feed import Feed
from graft.models.errors import DrafterError
from graft.models.llm.rows import Rows

__all__ = ["UserDrafter"]

LOG = logging.getLogger("graft")
_KERNELS = Path(__file__).resolve().parent / "kernels" / "user.cu"
_FAILED = read_numbers(_KERNELS)["FAILED"]
_THREADS = 128
_LONGEST_DEADLINE_S = 60.0


@dataclass
class _Asked:
    """A round's questions, and the answers as they come: ids and parents, or an error."""

    texts: list[list[int]]
    answers: list[tuple[list[int], list[int]] | DrafterError] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    dropped: bool = False  # nobody waits any more


class UserDrafter(Drafter):
    """Drafts what a Python function proposes.

    The function is called on a thread of the drafter's own, for one request after another, while
    the round's graph waits at a host step between the commit and the target's next forward. So it
    must not call the device's driver, nor wait for who does. A request for which it raises, or
    returns what are no drafts, ends with the reason "error" and a `DrafterError` that names
    function and value; others go on. Where it has not answered in time, rounds go on without its
    drafts until it does, and the logger "graft" says so.

    Parameters
    ----------
    propose : takes a list of the tokens of a request so far, prompt and output; returns the ids
        that may follow, at most as many as a round drafts, or none. For a tree, ids and parents:
        of each id 0 for the request's last token, or the number, from 1, of an id before it.
    deadline_s : seconds that a round waits for the answers for all its requests, at most 60.
    tree : whether trees are proposed.

    Raises
    ------
    OptionError
        Naming what is no function to be called, or the deadline.
    """

    lookahead = 1

    def __init__(
        self,
        room: DrafterContext,
        *,
        propose: Callable[[list[int]], Any],
        deadline_s: float = 1.0,
        tree: bool = False,
    ):
        name = self._name = PythonWork(propose).title
        if not isinstance(deadline_s, int | float) or not 0 < deadline_s <= _LONGEST_DEADLINE_S:
            raise OptionError(
                f"drafter {name}: deadline_s is {deadline_s!r}, must be above 0 and "
                f"at most {_LONGEST_DEADLINE_S:g}"
            )
        self.shape = TreeShape(room.drafts, branch=room.drafts if tree else 1)
        self._deadline_s = deadline_s
        self._kernels = room.device.load(_KERNELS)
        self._prompt = room.device.pinned((room.max_rows, 4), "int32")
        self._texts: dict[int, list[int]] = {}  # by slot
        self._failed: dict[int, tuple[int, DrafterError]] = {}  # by slot: epoch and why
        self._asked: _Asked | None = None  # the last questions
        self._questions: SimpleQueue[_Asked | None] = SimpleQueue()

        def ask(text: list[int], vocab: int = room.target.config.vocab_size) -> Any:
            return _read(propose(text), vocab, room.drafts, tree)

        args = (self._questions, name, ask)
        threading.Thread(target=_serve, args=args, name=f"drafter {name}", daemon=True).start()
        weakref.finalize(self, self._questions.put, None)

    @classmethod
    def of(cls, propose: Callable[[list[int]], Any], **options: Any) -> MakeDrafter:
        """The drafter of a function, as an engine takes it."""
        return partial(cls, propose=propose, **options)

    def prefill(self, lane: Lane, own: Rows, following: Rows, features: DeviceArray | None) -> None:
        self.resume(lane, own)

    def resume(self, lane: Lane, own: Rows) -> None:
        self._tell(lane, own, None, self._prompt)
        lane.host(PythonWork(self._note, self._prompt.array[: own.count]), name="note prompt")

    def start(self, lane: Lane, feed: Feed) -> None:
        rows = feed.committed(lane, shift=1)
        told = feed.device.pinned((rows.count, 4), "int32")
        self._tell(lane, rows, feed.state.array, told)
        if feed.width == 1:
            lane.host(PythonWork(self._note, told.array), name="note tokens")
            return
        to = [array for array in (feed.proposal, feed.parents) if array is not None]
        drafts = [feed.device.pinned(array.shape, "int32") for array in to]
        first = feed.device.pinned(feed.first.shape, "int32")
        lane.copy(first, feed.first, name="first rows")
        work = PythonWork(self._draft, told.array, first.array, *(d.array for d in drafts))
        lane.host(work, name=f"drafter {self._name}")
        for array, pinned in zip(to, drafts, strict=True):
            lane.copy(array, pinned, name="drafts")
        args = [feed.row_slot, feed.batch, feed.proposal, self.shape.nodes, feed.state.array]
        lane.kernel(self._kernels["end_failed"], 1, _THREADS, args, name="end failed requests")

    def failure(self, slot: int, epoch: int) -> DrafterError | None:
        known, error = self._failed.get(slot, (epoch, None))
        return error if known == epoch else None

    def _tell(self, lane: Lane, rows: Rows, slots: DeviceArray | None, told: PinnedArray) -> None:
        args = [rows.token, rows.slot, rows.pos, rows.count, slots, told]
        lane.kernel(self._kernels["tell_rows"], 1, _THREADS, args, name="tell the host")

    # Host steps: in the order of the stream, and never two at once.

    def _note(self, told: NDArray) -> None:
        """Write tokens down where they stand; whatever stood from there on is another request's."""
        for slot, _, position, token in told.tolist():
            if slot >= 0:
                self._texts.setdefault(slot, [])[position:] = [token]

    def _draft(self, told: NDArray, first: NDArray, *drafts: NDArray) -> None:
        """Ask for the drafts of every request that has committed something and goes on."""
        self._note(told)
        for array in drafts:
            array.fill(-1)
        rows = [
            (row, slot, epoch)
            for row, (slot, epoch) in enumerate(told[first, :2].tolist())
            if slot >= 0
        ]
        if not rows or (self._asked is not None and not self._asked.over.is_set()):
            return
        asked = self._asked = _Asked([self._texts[slot].copy() for _, slot, _ in rows])
        self._questions.put(asked)
        if not asked.over.wait(self._deadline_s):
            asked.dropped = True
            LOG.warning(
                "drafter %s has not answered within %g s: rounds go on without its drafts "
                "until it does",
                self._name,
                self._deadline_s,
            )
        for (row, slot, epoch), answer in zip(rows, asked.answers.copy(), strict=False):
            if isinstance(answer, DrafterError):
                drafts[0][row, 0] = _FAILED
                self._failed[slot] = epoch, answer
            else:
                for array, numbers in zip(drafts, answer, strict=False):  # a chain has no parents
                    array[row, : len(numbers)] = numbers


def _serve(
    questions: SimpleQueue[_Asked | None], name: str, ask: Callable[[list[int]], Any]
) -> None:
    """Answer questions until there are no more; the thread knows nothing of the drafter."""
    while (asked := questions.get()) is not None:
        for text in asked.texts:
            if asked.dropped:
                break
            try:
                answer = ask(text)
            except DrafterError as error:
                answer = DrafterError(f"drafter {name} {error}")
            except BaseException as error:
                LOG.warning("drafter %s raised", name, exc_info=error)
                answer = DrafterError(f"drafter {name} raised {type(error).__name__}: {error}")
            asked.answers.append(answer)
        asked.over.set()
        del asked  # not kept until the next question


def _read(answer: Any, vocab_size: int, most: int, tree: bool) -> tuple[list[int], list[int]]:
    """Ids and parents that were proposed. Raises DrafterError."""
    try:
        parts = answer if tree else (answer, range(most + 1))
        ids, parents = ([operator.index(n) for n in islice(part, most + 1)] for part in parts)
    except (TypeError, ValueError):
        wanted = "ids and parents" if tree else "ids"
        raise DrafterError(f"proposed {answer!r:.80}, which are no {wanted}") from None
    if len(ids) > most:
        raise DrafterError(f"proposed more than {most} ids: {ids}")
    if tree and len(parents) != len(ids):
        raise DrafterError(f"proposed {len(ids)} ids and {len(parents)} parents")
    for i, (token, parent) in enumerate(zip(ids, parents, strict=False)):
        if not 0 <= token < vocab_size:
            raise DrafterError(f"proposed id {token}, of the 0 to {vocab_size - 1} there are")
        if not 0 <= parent <= i:
            raise DrafterError(f"proposed parent {parent} of id {i + 1}, which may have 0 to {i}")
    return ids, parents[: len(ids)]
