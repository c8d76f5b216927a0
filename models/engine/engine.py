"""The engine: requests in, rounds replayed, outputs out.

One round is one graph launch. The host publishes who sits in which row, launches, and reads a
round's tokens from a ring as soon as verification has written them. With `overlap`, the next round
was launched before that, so the device goes from round to round without the host.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from graft.cudagraph.device import Device, open_device
from graft.cudagraph.driver import prepare_driver_call
from graft.cudagraph.errors import DeviceError, GraftError, HostWorkError, OptionError
from graft.cudagraph.lanes import StreamLane
from graft.cudagraph.ranks import RankGroup
from graft.cudagraph.transports import choose_transport
from graft.models.drafters import DrafterChoice
from graft.models.engine.admission import Admission
from graft.models.engine.assembly import assemble
from graft.models.engine.interrupt import ReentrancyGuard, Shield
from graft.models.engine.migrate import MigratedRequest, Migrator, facts, requested, restore
from graft.models.engine.options import Options
from graft.models.engine.replay import Replays
from graft.models.engine.scheduler import Scheduler
from graft.models.engine.slots import SlotManager
from graft.models.engine.stats import EngineStats
from graft.models.errors import EngineError, EngineUseError, RequestError
from graft.models.llm.config import LlamaConfig
from graft.models.request import Event, Output, Request, shown
from graft.models.round.prefill import PrefillScheduler
from graft.models.round.round import RoundGraph
from graft.models.tokenizer import Tokenizer

LOG = logging.getLogger("graft")
LOG.addHandler(logging.NullHandler())
#: Seconds within which something of what was dropped must have been freed, or close() goes on.
REST_S = 0.25


def buckets(max_batch_size: int) -> list[int]:
    """Batch sizes that have a graph of their own: powers of two, and the largest batch."""
    sizes = [1 << i for i in range(max_batch_size.bit_length()) if 1 << i < max_batch_size]
    return [*sizes, max_batch_size]


class Engine:
    """Guided speculative decoding of a Llama target.

    Parameters
    ----------
    model : directory of the target: config.json, safetensors, tokenizer.json.
    drafter : directory of an EAGLE-3 checkpoint; or a `MakeDrafter`, such as the class of a
        drafter of one's own, or its name as ``module:name``. None decodes without speculation, but
        for forced drafts.
    ranks
        Tensor-parallel processes. This process is rank 0; the others run
        `graft.models.llm.worker_rank.follow`. Outputs equal those of one process up to rounding
        and do not depend on batch, order or time.
    options : fields of `Options`.

    Raises
    ------
    ConfigError, CheckpointError, TokenizerError, OptionError, DeviceError
        Before any request is taken, each naming what does not fit.

    Notes
    -----
    `submit` and `step` are its two primitives; `generate` and `stream` drive them. One thread uses
    an engine at a time; of two, the second gets an `EngineUseError`. The logger "graft" tells of
    refused, failed and late requests and of an engine's end.

    Attributes
    ----------
    options : as they were resolved.
    failure : why it has failed for good, or None while it works.
    """

    def __init__(
        self,
        model: str | Path,
        drafter: DrafterChoice | None = None,
        *,
        ranks: RankGroup | None = None,
        **options: Any,
    ):
        known = {field.name for field in fields(Options)}
        for name in options:
            if name not in known:
                raise OptionError(f"no option {name}; there are {', '.join(sorted(known))}")
        if not isinstance(model, (str, os.PathLike)):
            raise OptionError(f"model must be a checkpoint's folder, got {shown(model)}")
        if ranks is not None and not isinstance(ranks, RankGroup):
            raise OptionError(f"ranks must be RankGroup, got {shown(ranks)}")
        asked = Options(**options)
        folder = Path(model)
        if asked.draft_tree is not None and drafter is None:
            raise OptionError(f"draft_tree {asked.draft_tree} needs a drafter")
        config = LlamaConfig.from_dir(folder)
        tokenizer = Tokenizer(folder, vocab_size=config.vocab_size)
        # A draft head's own max_position_embeddings is its training length and binds nobody.
        asked = asked.sized(config.max_position_embeddings)
        self.device = open_device(asked.device, asked.ordinal)
        transport, self.transport_reason = choose_transport(asked.grammar_transport, self.device)
        self.options = replace(asked, grammar_transport=transport)
        built = assemble(self.device, self.options, folder, drafter, config, tokenizer, ranks)
        self._built = built
        self._parts = built.parts
        self.tokenizer = tokenizer
        self._admission = Admission(self.options, tokenizer, config.vocab_size, built.compiler)
        self._replays = Replays(built.parts, built.stream, built.budget)
        self._handing = Migrator(
            self.device,
            StreamLane(built.stream),
            built.caches,
            built.prefixes,
            facts(self.device, asked, folder, drafter, built.parts.drafter),
        )
        self.rounds: dict[tuple[int, int], RoundGraph] = {}
        self.stats = EngineStats(draft_length=built.parts.depth)
        self._forced_before = 0
        depth = 2 if self.options.overlap and self.options.composition == "one" else 1
        self._scheduler = Scheduler(
            self._replays,
            SlotManager(
                self.options.slots,
                self.options.max_batch_size,
                built.caches,
                built.prefixes,
                built.prefill,
                built.parts.state,
                StreamLane(built.stream),
                PrefillScheduler(None if asked.prefill_rows == "auto" else int(asked.prefill_rows)),
                (depth + 1) * built.parts.width,
                self.options.slack,
            ),
            self.rounds,
            self.stats,
            built.budget,
            depth=depth,
            verify=self.options.verify,
        )
        self._ids = itertools.count()
        self._use = ReentrancyGuard()
        self._left: deque[tuple[Sequence[str], set[str]]] = deque()  # claims, and what to cancel
        self.failure: str | None = None
        self._faulted = False
        try:
            self._build_rounds()
        except BaseException:
            built.compiler.close()
            raise
        self._closed = False

    def _build_rounds(self) -> None:
        """One graph per bucket and number of rows, and idle replays of each: what loads lazily is
        loaded by the first, and the others tell the budget how long it takes; and idle prompts."""
        scratch = self._parts.scratch(self.options.max_batch_size)
        idle = EngineStats()
        budget = self._built.budget
        for key in itertools.product(buckets(self.options.max_batch_size), budget.lengths):
            self.rounds[key] = RoundGraph(self._parts, scratch, *key, budget.made(*key))
            for _ in range(1 if len(budget.lengths) == 1 else 3):
                self._replays.launch(self.rounds[key], [])
                self._replays.wait(idle, Shield())
                self._replays.finish()
        warmed = self._built.prefill.warm(StreamLane(self._built.stream))
        self._replays.settle(idle)
        for piece in warmed:
            self._scheduler.seating.pieces.took(piece.rows, piece.took_s())

    # Requests ---------------------------------------------------------------------------------

    def submit(self, request: Request) -> str:
        """Take a request and begin compiling its grammar; returns its id.

        A request that cannot be served does not raise: it ends at once with the reason "refused"
        and a sentence, and the others go on.

        Raises
        ------
        RequestError
            When a running request has the same id: its events could not be told apart.
        """
        with self._use:
            self._require_working()
            if _has_name(request) and request.id in self._scheduler.unfinished:
                raise RequestError(f"a request with id {request.id!r} is running already")
            return self._submit(request, ())

    def migrate_out(self, request_id: str) -> MigratedRequest:
        """Take an unfinished request away, for another engine to go on with it (`take_over`).

        It may wait, or have been prefilled and have an output. Here it ends, with the reason
        "moved" and what was told of it. Its pages come with it as far as the prefix cache keeps
        them (all that are full once it generates, or none without that cache); it keeps them too.

        Raises
        ------
        RequestError
            No such request is unfinished.
        """
        with self._use:
            self._require_working()
            running = self._scheduler.unfinished.get(request_id)
            if running is None:
                raise RequestError(f"no request {request_id!r} is unfinished here")
            if running.slot in self._scheduler.seating.seated:
                self._built.prefixes.keep(running.slot, running.tokens)
            over = self._handing.pack(running, self.options.verify)
            self._scheduler.end(running, "moved")
            return over

    def migrate_in(self, over: MigratedRequest) -> str:
        """Go on with a request of another engine; returns its id, which it brings along.

        Events tell of what follows, the output at the end of all. What the caches have no room for
        is prefilled here. It may be refused as `submit` refuses.

        Raises
        ------
        HandOverError
            The engines differ: in model, drafter's kind or folder, page size, number formats or
            device; or the prefix cache here could not keep the pages. Nothing was touched then.
        RequestError
            A request with this id is running.
        """
        with self._use:
            self._require_working()
            self._handing.check(over)
            request = requested(over.about)
            if request.id in self._scheduler.unfinished:
                raise RequestError(f"a request with id {request.id!r} is running already")
            return self._submit(request, (), over)

    def _submit(
        self, request: Request, names: Container[str], over: MigratedRequest | None = None
    ) -> str:
        """Take a request; one without a name gets one that is nobody's, and not of `names`."""
        scheduler = self._scheduler
        if _has_name(request):
            name = str(request.id)
        else:
            free = (f"request-{number}" for number in self._ids)
            name = next(n for n in free if n not in names and n not in scheduler.unfinished)
        output = Output(id=name)
        try:
            running = self._admission.take(request, output, scheduler.waiting.values())
            if over is not None:
                restore(running, over.about)
                self._handing.adopt(over)
            scheduler.submit(running)
        except GraftError as error:
            output.reason = "refused"
            scheduler.deliver(output, error)
        return name

    def cancel(self, request_id: str) -> bool:
        """End a request with what it has so far; False when no such request is running.

        Any thread may call it, also within another call: it is done before the next round then.
        """
        if self._closed or request_id not in self._scheduler.unfinished:
            return False
        self._left.append(((), {request_id}))
        self._forget_left()
        return True

    def wake(self) -> None:
        """Let a `step` that rests until a grammar is compiled return at once; any thread may."""
        if not self._closed:
            self._scheduler.wake()

    def preempt(self, request_id: str) -> bool:
        """Take a running request's slot and pages away; it goes on later, behind those waiting.

        What it generated is kept, and it resumes by prefilling prompt and output; greedy and
        coupled outputs are token for token what they would have been. The engine itself does so
        when pages run out, but puts the request in front of those waiting.

        Returns
        -------
        bool
            False when no such request has a slot.
        """
        with self._use:
            self._require_working()
            running = self._scheduler.unfinished.get(request_id)
            if running is None or running.slot < 0:
                return False
            self._scheduler.preempt(running)
            return True

    # Rounds -----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished, or has an event that `step` would return."""
        return not self._closed and self._scheduler.busy

    def step(self) -> list[Event]:
        """Let ready requests join, launch what may be in flight, and return what a round brought.

        Events of requests that a `stream` or `generate` under way has submitted are left to it.

        Raises
        ------
        DeviceError, HostWorkError
            When the device or a round failed; every later call says so by an `EngineError`.
        KeyboardInterrupt
            While the device works; nothing is lost, and the next step goes on from there.
        """
        self._advance()
        return self._scheduler.outbox.fetch_rest()

    def _advance(self) -> None:
        with Shield() as shield, self._use:
            self._require_working()
            try:
                self._end_left()
                self._scheduler.step(shield)
            except Exception as failure:
                self.failure = str(failure)  # no traceback: it would hold what close() gives back
                self._faulted = isinstance(failure, DeviceError)
                LOG.error("the engine has failed: %s", self.failure)  # a record may be kept too
                raise

    def _require_working(self) -> None:
        if self._closed:
            raise OptionError("the engine is closed")
        if self.failure is not None:
            raise EngineError(f"the engine has failed: {self.failure}")

    # Driving ----------------------------------------------------------------------------------

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Run requests together and yield their events as rounds bring them.

        Several streams of one engine may be used in turns, and within each other. Leaving the
        iterator early, or Ctrl-C, cancels what is unfinished.

        Raises
        ------
        RequestError
            When two requests have the same id, before any of them is taken.
        """
        return self._stream(_samples(requests), [])

    def _stream(self, requests: list[Request], names: list[str]) -> Iterator[Event]:
        """The same; puts the requests' ids into `names`."""
        left: set[str] = set()
        try:
            with self._use:
                self._require_working()
                outbox = self._scheduler.outbox
                given = _names(requests, self._scheduler.unfinished)
                for request in requests:
                    names.append(self._submit(request, given))
                    left.add(names[-1])
                    outbox.claim(names[-1])
            while left:
                events = outbox.fetch(left)
                if not events:
                    self._advance()
                for event in events:
                    if event.finished:
                        left.discard(event.id)
                    yield event
        finally:
            self._left.append((names, left))
            self._forget_left()

    def _forget_left(self) -> None:
        """End what was cancelled or left; the next round begins with that if this is no time."""
        with suppress(EngineUseError), self._use:
            self._end_left()

    def _end_left(self) -> None:
        while self._left:
            names, unfinished = self._left.popleft()
            if not self._closed:
                for name in unfinished & self._scheduler.unfinished.keys():
                    running = self._scheduler.unfinished[name]
                    self._scheduler.end(running, "cancelled", told=self.failure is not None)
                self._scheduler.outbox.release(names)

    def generate(self, requests: Iterable[Request], progress: bool = False) -> list[Output]:
        """Run requests together and return their outputs in the same order, samples by number.

        Raises
        ------
        RequestError
            When two requests have the same id, before any of them is taken.
        KeyboardInterrupt
            After every unfinished request was cancelled.
        """
        asked = _samples(requests)
        names = list[str]()
        done: dict[str, Output] = {}
        with tqdm(total=len(asked), disable=not progress, unit="request") as bar:
            for event in self._stream(asked, names):
                if event.output is not None:
                    done[event.id] = event.output
                    bar.update()
        self._count_forced()
        return [done[name] for name in names]

    def warm(self, request: Request) -> None:
        """Prefill a request's prompt, such as a beginning that many will share, for those to come.

        Nothing is kept of it without a prefix cache (`Options.prefix_cache_bytes`), or where the
        drafter's entries are of use to nobody else (`Drafter.lookahead`).

        Raises
        ------
        RequestError
            It is refused as a request, or fails.
        """
        if not isinstance(request, Request):
            raise RequestError(f"request must be a Request, got {shown(request)}")
        output = self.generate([replace(request, max_tokens=1, n=1)])[0]
        if output.error is not None:
            raise RequestError(output.error)

    def _count_forced(self) -> dict[str, int]:
        counters = self._parts.decoder.counters()
        self.stats.forced_tokens = counters["forced_tokens"] - self._forced_before
        return counters

    def counters(self) -> dict[str, Any]:
        """Engine, grammar and device counters in one dictionary, and what is held right now."""
        if self._closed:
            raise OptionError("the engine is closed")
        grammar = self._count_forced()
        seating = self._scheduler.seating
        replays = self._replays
        caches = self._built.caches
        prefixes = self._built.prefixes
        used = sum(c.scratch_page - len(c.free) - prefixes.unused for c in caches)
        return {
            "engine": self.stats.as_dict(),
            "grammar": grammar,
            "compile": self._built.compiler.counters(),
            "device": self.device.stats(),
            "prefixes": {
                "pages": len(prefixes),
                "bytes": len(prefixes) * sum(cache.page_bytes for cache in caches),
                "hit_tokens": prefixes.hits,
                "evictions": prefixes.evictions,
            },
            "held": {
                "slots": seating.taken,
                "leaving_slots": seating.leaving,
                "pages": used,
                "unread_replays": len(replays.unread),
                "unretired_replays": replays.number - replays.retired,
            },
        }

    def reset_stats(self) -> None:
        """Begin counting anew."""
        self._require_working()
        self._forced_before = self._parts.decoder.counters()["forced_tokens"]
        self.stats = self._scheduler.stats = EngineStats(draft_length=self._parts.depth)

    def settle(self) -> None:
        """Wait until the device is idle and take back what finished requests held.

        For measurements and tests; generation does this by itself. Requests that run are kept:
        what rounds in flight bring for them is read first.
        """
        with Shield() as shield, self._use:
            self._require_working()
            self._scheduler.settle(shield)

    def close(self) -> None:
        """Cancel what runs, drain the device and give everything back.

        Raises
        ------
        DeviceError, HostWorkError
            The device or a round in flight failed, and no step has told so yet; everything was
            given back all the same.
        """
        with self._use:
            if self._closed:
                return
            self._closed = True
            try:
                self._drain()
            except (DeviceError, HostWorkError):
                if self.failure is None:
                    raise
            finally:
                self._scheduler.close()  # frames of a traceback may still hold it
                del self._built, self._parts, self._admission, self._replays, self._scheduler
                del self._handing
                gc.collect()  # cycles must not keep device memory until some later collection
                # What a faulted device was doing when it stopped never ends, nor is given back.
                if not self._faulted:
                    _rest(self.device)

    def _drain(self) -> None:
        with ExitStack() as stack:  # every one of them, last first, whatever another raises
            parts = self._parts
            built = self._built
            stack.callback(parts.target.end)
            stack.callback(built.stream.close)
            for held in (parts.inputs, parts.outputs, parts.timeline, parts.exchange):
                stack.callback(held.close)
            stack.callback(parts.decoder.close)
            stack.callback(built.compiler.close)
            stack.callback(built.prefill.close)
            for graph in self.rounds.values():
                stack.callback(graph.close)
            stack.callback(self._scheduler.seating.reclaim_idle)
            stack.callback(self._replays.drain)
            for running in list(self._scheduler.unfinished.values()):
                stack.callback(self._scheduler.end, running, "cancelled", told=True)
        self.rounds.clear()

    def __del__(self) -> None:  # its threads and graphs would stay
        if getattr(self, "_closed", True) or sys.is_finalizing():
            return
        try:
            prepare_driver_call("Engine.close")
        except DeviceError:
            return  # collected in a host function or a fork, neither of which may call the driver
        self.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rest(device: Device) -> None:
    """Wait while what was dropped gets less; another engine's things stay."""
    left = math.inf
    while not device.release_unused(REST_S):
        live = device.stats()["live"]
        now = sum(live.values()) if isinstance(live, dict) else live
        if now >= left:
            return
        left = now


def _has_name(request: Request) -> bool:
    return isinstance(getattr(request, "id", None), str)


def _samples(requests: Iterable[Request]) -> list[Request]:
    """The requests, each sample on its own; what is no request is refused later."""
    if not isinstance(requests, Iterable):
        raise RequestError(f"requests must be a list of Request, got {shown(requests)}")
    return [
        sample
        for request in requests
        for sample in (request.samples() if isinstance(request, Request) else [request])
    ]


def _names(requests: Sequence[Request], unfinished: Container[str]) -> set[str]:
    """The ids that requests have been given. Raises RequestError where one is taken."""
    names: set[str] = set()
    for name in (str(request.id) for request in requests if _has_name(request)):
        if name in names:
            raise RequestError(f"two requests have id {name!r}")
        if name in unfinished:
            raise RequestError(f"a request with id {name!r} is running already")
        names.add(name)
    return names
