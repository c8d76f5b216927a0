"""Drafter that calls a user's Python function.

The function is called from a host node of the round's CUDA graph.
"""

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

from graft.cudagraph.driver.cstruct import read_numbers
from graft.cudagraph.driver.memory import DeviceArray, PinnedArray
from graft.cudagraph.errors import OptionError
from graft.cudagraph.host.hostwork import PythonWork
from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import Drafter, DrafterContext, MakeDrafter, TreeShape
from graft.models.drafters.feed import Feed
from graft.models.errors import DrafterError
from graft.models.llm.rows import Rows

__all__ = ["UserDrafter"]

LOG = logging.getLogger("graft")
_KERNELS = Path(__file__).resolve().parent / "kernels" / "user.cu"
_FAILED = read_numbers(_KERNELS)["FAILED"]
_THREADS = 128
_MAX_DEADLINE_S = 60.0

#: Proposed token ids, and the parent of each of them.
_Proposal = tuple[list[int], list[int]]


@dataclass
class _Query:
    """Calls of the user's function for one round: one per request, on the drafter's thread.

    `histories` are the arguments of the calls: the tokens of each request. The drafter's thread
    appends the result of each call to `proposals`, and sets `done` after the last call. The round
    sets `is_abandoned` if its deadline passes; no round then waits for the results any more.
    """

    histories: list[list[int]]
    proposals: list[_Proposal | DrafterError] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    is_abandoned: bool = False


class UserDrafter(Drafter):
    """Drafter that proposes the tokens that a Python function returns.

    The function runs on a thread of the drafter and is called for one request after another. While
    the function runs, the graph of the round waits in a host node between the commit and the next
    forward pass of the target. The function must not call the device driver, and must not wait for
    a thread that does.

    If the function raises for a request or returns an invalid proposal, that request finishes with
    the reason "error" and a `DrafterError`, whose message contains the name of the function and the
    exception or value. Other requests continue. If the function does not return in time, the logger
    "graft" logs a warning, and rounds continue without drafts until the function has returned.

    Parameters
    ----------
    propose
        Function that takes the list of all tokens of a request, prompt and output. It returns the
        ids of the proposed tokens, at most as many as a round drafts. With `tree` it returns ids
        and parents. The parent of an id is 0 for the last token of the request, or the number of
        an earlier id, from 1.
    deadline_s
        Time limit in seconds for all calls of one round; at most 60.
    tree
        Whether `propose` returns trees.

    Raises
    ------
    OptionError
        If `propose` is not callable or the deadline is out of range.
    """

    runs_on_host = True
    lookahead = 1

    def __init__(
        self,
        context: DrafterContext,
        *,
        propose: Callable[[list[int]], Any],
        deadline_s: float = 1.0,
        tree: bool = False,
    ):
        self._name = name = PythonWork(propose).title
        if not isinstance(deadline_s, int | float) or not 0 < deadline_s <= _MAX_DEADLINE_S:
            raise OptionError(
                f"drafter {name}: deadline_s is {deadline_s!r}, must be above 0 and "
                f"at most {_MAX_DEADLINE_S:g}"
            )
        self.shape = TreeShape(context.max_drafts, branch=context.max_drafts if tree else 1)
        self._deadline_s = deadline_s
        self._kernels = context.device.load(_KERNELS)
        self._prompt = context.device.pinned((context.max_rows, 4), "int32")
        self._histories: dict[int, list[int]] = {}  # tokens by slot
        self._failures: dict[int, tuple[int, DrafterError]] = {}  # epoch and error by slot
        self._query: _Query | None = None  # the latest query
        self._queries: SimpleQueue[_Query | None] = SimpleQueue()
        vocab = context.target.config.vocab_size
        max_drafts = context.max_drafts

        def propose_checked(history: list[int]) -> _Proposal:
            return _read_proposal(propose(history), vocab, max_drafts, tree)

        # The thread must not hold a reference to the drafter, because the drafter's finalizer,
        # which stops the thread, would then never run.
        threading.Thread(
            target=_serve,
            args=(self._queries, name, propose_checked),
            name=f"drafter {name}",
            daemon=True,
        ).start()
        weakref.finalize(self, self._queries.put, None)

    @classmethod
    def of(cls, propose: Callable[[list[int]], Any], **options: Any) -> MakeDrafter:
        """Return a value for the argument `drafter` of `Engine`, which creates a `UserDrafter`.

        `propose` and `options` are parameters of `UserDrafter`.
        """
        return partial(cls, propose=propose, **options)

    def prefill(
        self, lane: Lane, rows: Rows, next_rows: Rows, features: DeviceArray | None
    ) -> None:
        self.resume(lane, rows)

    def resume(self, lane: Lane, rows: Rows) -> None:
        self._copy_rows(lane, rows, None, self._prompt)
        work = PythonWork(self._record, self._prompt.array[: rows.count])
        lane.host(work, name="record prompt")

    def start(self, lane: Lane, feed: Feed) -> None:
        rows = feed.committed(lane, shift=1)
        committed = feed.device.pinned((rows.count, 4), "int32")
        self._copy_rows(lane, rows, feed.state.array, committed)
        if feed.width == 1:
            lane.host(PythonWork(self._record, committed.array), name="record tokens")
            return
        outputs = [array for array in (feed.proposal, feed.parents) if array is not None]
        staging = [feed.device.pinned(array.shape, "int32") for array in outputs]
        first = feed.device.pinned(feed.first.shape, "int32")
        lane.copy(first, feed.first, name="first rows")
        host_arrays = [pinned.array for pinned in staging]
        work = PythonWork(self._draft, committed.array, first.array, *host_arrays)
        lane.host(work, name=f"drafter {self._name}")
        for array, pinned in zip(outputs, staging, strict=True):
            lane.copy(array, pinned, name="drafts")
        args = [feed.row_slot, feed.batch, feed.proposal, self.shape.nodes, feed.state.array]
        lane.kernel(self._kernels["end_failed"], 1, _THREADS, args, name="end failed requests")

    def failure(self, slot: int, epoch: int) -> DrafterError | None:
        failed_epoch, error = self._failures.get(slot, (epoch, None))
        return error if failed_epoch == epoch else None

    def _copy_rows(
        self, lane: Lane, rows: Rows, slots: DeviceArray | None, host_rows: PinnedArray
    ) -> None:
        """Add the kernel that writes slot, epoch, position and token of each row to `host_rows`."""
        args = [rows.token, rows.slot, rows.pos, rows.count, slots, host_rows]
        kernel = self._kernels["copy_rows_to_host"]
        lane.kernel(kernel, 1, _THREADS, args, name="rows to host")

    # The methods `_record` and `_draft` run in host nodes. Host nodes run in stream order, so
    # the two methods never run at the same time.

    def _record(self, rows: NDArray) -> None:
        """Store the tokens of rows in the histories of their slots.

        A history ends with the token that was stored last: tokens at later positions, which belong
        to an earlier request of the slot, are removed. `rows` is int32[R, 4]: slot (-1 for
        padding), epoch, position and token.
        """
        for slot, _, position, token in rows.tolist():
            if slot >= 0:
                self._histories.setdefault(slot, [])[position:] = [token]

    def _draft(self, rows: NDArray, first: NDArray, *outputs: NDArray) -> None:
        """Let the drafter's thread call the user's function, and write its proposals to `outputs`.

        The function is called for every active request with committed tokens. This method waits for
        the results until the deadline.

        `rows` has the committed tokens of all requests, in the format of `_record`. `first`
        int32[B] is the index of each request's first row. `outputs` are arrays int32[B,
        max_drafts]: the proposed ids and, in a tree, their parents.
        """
        self._record(rows)
        for array in outputs:
            array.fill(-1)
        requests = []
        for row, (slot, epoch) in enumerate(rows[first, :2].tolist()):
            if slot >= 0:
                requests.append((row, slot, epoch))
        is_busy = self._query is not None and not self._query.done.is_set()
        if not requests or is_busy:
            return
        query = _Query([self._histories[slot].copy() for _, slot, _ in requests])
        self._query = query
        self._queries.put(query)
        if not query.done.wait(self._deadline_s):
            query.is_abandoned = True
            LOG.warning(
                "drafter %s did not return within %g s: rounds go on without its drafts until it "
                "does",
                self._name,
                self._deadline_s,
            )
        # After a missed deadline, there may be fewer proposals than requests. The requests
        # without a proposal get no drafts.
        for (row, slot, epoch), proposal in zip(requests, query.proposals.copy(), strict=False):
            if isinstance(proposal, DrafterError):
                outputs[0][row, 0] = _FAILED
                self._failures[slot] = (epoch, proposal)
            else:
                # A chain has no output array for parents.
                for array, numbers in zip(outputs, proposal, strict=False):
                    array[row, : len(numbers)] = numbers


def _serve(
    queries: SimpleQueue[_Query | None], name: str, propose: Callable[[list[int]], _Proposal]
) -> None:
    """Call `propose` for the requests of each query until None arrives, on the drafter's thread."""
    while True:
        query = queries.get()
        if query is None:
            return
        for history in query.histories:
            if query.is_abandoned:
                break
            try:
                query.proposals.append(propose(history))
            except DrafterError as error:
                query.proposals.append(DrafterError(f"drafter {name} {error}"))
            except BaseException as error:
                LOG.warning("drafter %s raised", name, exc_info=error)
                message = f"drafter {name} raised {type(error).__name__}: {error}"
                query.proposals.append(DrafterError(message))
        query.done.set()
        del query  # do not keep this query alive while waiting for the next query


def _read_proposal(proposal: Any, vocab_size: int, max_drafts: int, tree: bool) -> _Proposal:
    """Return the ids and parents that the user's function has proposed, after checking them.

    An invalid proposal raises DrafterError. The caller puts "drafter NAME" before the message.
    """
    try:
        if tree:
            proposed_ids, proposed_parents = proposal
        else:
            proposed_ids = proposal
            proposed_parents = range(max_drafts + 1)
        ids = _read_integers(proposed_ids, max_drafts + 1)
        parents = _read_integers(proposed_parents, max_drafts + 1)
    except (TypeError, ValueError):
        expected = "ids and parents" if tree else "a sequence of ids"
        raise DrafterError(f"returned {proposal!r:.80}, expected {expected}") from None
    if len(ids) > max_drafts:
        raise DrafterError(f"proposed more than {max_drafts} ids: {ids}")
    if tree and len(parents) != len(ids):
        raise DrafterError(f"proposed {len(ids)} ids and {len(parents)} parents")
    for i, (token, parent) in enumerate(zip(ids, parents, strict=False)):
        if not 0 <= token < vocab_size:
            raise DrafterError(f"proposed id {token}, expected ids from 0 to {vocab_size - 1}")
        if not 0 <= parent <= i:
            raise DrafterError(f"proposed parent {parent} of id {i + 1}, expected 0 to {i}")
    return ids, parents[: len(ids)]


def _read_integers(values: Any, limit: int) -> list[int]:
    """Return at most `limit` integers of an iterable, which may be infinite."""
    return [operator.index(value) for value in islice(values, limit)]
