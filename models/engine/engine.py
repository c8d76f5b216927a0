"""Engine: LLM inference with speculative decoding and structured output.

A decoding round is one launch of a CUDA graph, called a *replay*. Before the launch, the host
writes the request slot of each batch row into pinned memory. The verification kernel writes the
committed tokens into a ring of buffers in pinned memory. The host reads these tokens while the
graph generates the next drafts. With the option `InternalOptions.overlap`, which is the default,
the host launches the next round before it reads the tokens, so the device never waits for the host.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from graft.cudagraph.device import Device, open_device
from graft.cudagraph.driver.driver import is_forked, prepare_driver_call
from graft.cudagraph.errors import DeviceError, GraftError, HostWorkError, OptionError
from graft.cudagraph.host.transports import choose_transport
from graft.cudagraph.ranks.ranks import RankGroup
from graft.models.drafters import DrafterChoice
from graft.models.drafters.load import is_block_drafter, runs_on_host
from graft.models.engine.admission import Admission
from graft.models.engine.assembly import assemble
from graft.models.engine.construction import (
    build_graphs,
    make_migrator,
    make_replays,
    make_scheduler,
)
from graft.models.engine.interrupt import CallGuard, Shield, exclusive
from graft.models.engine.migrate import MigratedRequest, read_request, restore_output
from graft.models.engine.options import EngineOptions, Options
from graft.models.engine.selection import GraphKey
from graft.models.engine.stats import EngineStats
from graft.models.errors import EngineError, EngineUseError, RequestError
from graft.models.llm.config import LlamaConfig
from graft.models.request import Event, Output, Request
from graft.models.round.round import RoundGraph
from graft.models.tokenizer import Tokenizer
from graft.native.errors import short_repr
from graft.native.heap import return_free_memory

__all__ = ["Engine"]

LOG = logging.getLogger("graft")
LOG.addHandler(logging.NullHandler())

#: `Engine.close` stops waiting when no device resource has been freed for this many seconds.
RELEASE_POLL_S = 0.25


class _Submission(NamedTuple):
    """Identifies a submitted request: its id, and a submission number that the engine never reuses.

    An id alone is ambiguous, because it may be used again after its request has finished.
    """

    id: str
    number: int


class Engine:
    """Generates text for batches of requests.

    `submit` and `step` are the two primitives; `generate` and `stream` are built on them. An engine
    handles one call at a time: a call from a second thread raises `EngineUseError`, except for
    `cancel` and `wake`, which are thread-safe. The logger "graft" reports engine failures, and
    requests that are refused, fail or time out.

    Parameters
    ----------
    model
        Folder of a Llama, Mistral, Qwen2, Qwen3 or SmolLM3 checkpoint with config.json, safetensors
        and tokenizer.json.
    drafter
        The folder of a drafter checkpoint, a drafter class or another `MakeDrafter` callable, or
        the name of such a class or callable in the form ``module:name``. None disables speculation,
        except for the drafts of `Options.forced_drafts`.
    ranks
        Group of tensor-parallel processes. This process is rank 0; the others run
        `graft.models.llm.worker_rank.run_worker`. The outputs equal the outputs of a single process
        up to rounding. They do not depend on the batch, the order of requests or timing.
    **options
        Keyword arguments of `Options`.

    Attributes
    ----------
    options : Options
        Options with all defaults resolved.
    device : Device
        Device of the engine.
    transport_reason : str
        Why the engine uses the transport in ``options.grammar_transport``.
    tokenizer : Tokenizer
        Tokenizer of the model.
    stats : EngineStats
        Counters since the start or the last `reset_stats`.
    graphs : dict
        Graphs by `GraphKey`; empty after `close`.
    failure : str or None
        Message of the error that stopped the engine permanently; None while the engine works.

    Raises
    ------
    ConfigError, CheckpointError, TokenizerError, OptionError, DeviceError
        If a checkpoint file, an option or the device is unsuitable.
    KeyboardInterrupt
        On Ctrl-C. It is deferred to the end of the current phase, which may be the compilation of
        several kernels. All resources of the engine are then released.
    """

    def __init__(
        self,
        model: str | Path,
        drafter: DrafterChoice | None = None,
        *,
        ranks: RankGroup | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        requested = _check_arguments(model, drafter, ranks, options)
        folder = Path(model)
        config = LlamaConfig.from_dir(folder)
        self.tokenizer = Tokenizer(folder, vocab_size=config.vocab_size)
        # Only the target limits the number of positions. The max_position_embeddings of a draft
        # head is the length of the sequences it was trained on, and is ignored.
        requested = requested.sized(config.max_length, feeds_blocks=is_block_drafter(drafter))
        config = config.for_length(requested.sizes[0], folder)
        self._ids = itertools.count()
        self._guard = CallGuard()
        self._submissions = itertools.count()
        # Work for `_end_abandoned`. `cancel` and each stream that ends append a pair: the requests
        # whose events the stream no longer fetches, and the requests to cancel.
        self._abandoned: deque[tuple[Iterable[_Submission], Iterable[_Submission]]] = deque()
        self.failure: str | None = None
        self._device_failed = False
        with Shield() as shield:
            self.device = open_device()
            transport, self.transport_reason = choose_transport(
                requested.grammar_transport, self.device
            )
            self.options = replace(requested, grammar_transport=transport)
            self._built = assemble(
                self.device, self.options, folder, drafter, config, self.tokenizer, ranks, shield
            )
            self._start(folder, drafter, config.vocab_size, shield)

    def _start(
        self, model: Path, drafter: DrafterChoice | None, vocab_size: int, shield: Shield
    ) -> None:
        """Create admission, migrator and scheduler, and build the graphs.

        If this fails, the graphs and everything that `assemble` created are closed.
        """
        built = self._built
        self._resources = built.resources
        self._replays = make_replays(built)
        self.graphs: dict[GraphKey, RoundGraph] = {}
        self.stats = EngineStats(draft_length=built.resources.depth)
        self._forced_tokens_at_reset = 0
        try:
            self._admission = Admission(self.options, self.tokenizer, vocab_size, built.compiler)
            self._migrator = make_migrator(built, self.device, self.options, model, drafter)
            self._scheduler = make_scheduler(
                built, self.options, self._replays, self.graphs, self.stats
            )
            build_graphs(built, self.options, self._scheduler, self.graphs, shield)
        except BaseException:
            self._close_parts()
            raise
        self._closed = False

    # Requests ---------------------------------------------------------------------------------

    @exclusive
    def submit(self, request: Request) -> str:
        """Submit a request and return its id.

        The request's grammar is compiled in the background. If the request cannot be served, this
        method does not raise an error. Instead, the request finishes at once with reason "refused"
        and an error message. Other requests are not affected.

        Raises
        ------
        RequestError
            If an unfinished request has the same id.
        """
        self._begin_call()
        if _has_id(request) and request.id in self._scheduler.unfinished:
            raise RequestError(f"a request with id {request.id!r} is already running")
        return self._submit(request, ()).id

    @exclusive
    def migrate_out(self, request_id: str) -> MigratedRequest:
        """Remove an unfinished request so that another engine can continue it (`migrate_in`).

        The request may be waiting, prefilling or running. On this engine it finishes with reason
        "moved", and its output contains the tokens reported so far.

        The migrated request contains copies of the full KV-cache pages that this engine's prefix
        cache has for its tokens. These are all its full pages if the request is running, and none
        if the prefix cache is disabled.

        Raises
        ------
        RequestError
            If no unfinished request has this id.
        """
        self._begin_call()
        state = self._scheduler.unfinished.get(request_id)
        if state is None:
            raise RequestError(f"this engine has no unfinished request {request_id!r}")
        if state.slot in self._scheduler.slots.running:
            self._built.prefixes.insert(state.slot, state.tokens)
        # `pack` waits for the device, so a running generation loop has to end first.
        self._replays.leave_loop()
        migrated = self._migrator.pack(state, self.options.verify)
        self._scheduler.end(state, "moved")
        return migrated

    @exclusive
    def migrate_in(self, migrated: MigratedRequest) -> str:
        """Continue a request of another engine and return its id.

        Events report only the tokens that this engine generates. The final output contains the
        tokens of both engines. Tokens whose pages do not fit into the prefix cache are prefilled
        again. The request may be refused for the same reasons as a submitted one.

        Raises
        ------
        MigrationError
            If the engines differ in model, drafter, page size, number formats or device, if the
            description or the pages of `migrated` are malformed, or if the prefix cache cannot hold
            the pages. The engine's state is unchanged in this case.
        RequestError
            If an unfinished request has the same id.
        """
        self._begin_call()
        self._migrator.check(migrated)
        request = read_request(migrated.description)
        if _has_id(request) and request.id in self._scheduler.unfinished:
            raise RequestError(f"a request with id {request.id!r} is already running")
        return self._submit(request, (), migrated).id

    def _submit(
        self,
        request: Request,
        reserved_ids: Container[str],
        migrated: MigratedRequest | None = None,
    ) -> _Submission:
        """Submit a request.

        A request without an id gets one that no unfinished request has and that is not in
        `reserved_ids`. If the request comes from another engine, `migrated` has its output so far
        and its KV-cache pages.
        """
        scheduler = self._scheduler
        request_id = str(request.id) if _has_id(request) else self._unused_id(reserved_ids)
        submission = _Submission(request_id, next(self._submissions))
        output = Output(id=request_id)
        try:
            state = self._admission.admit(request, output, scheduler.waiting.values())
            state.submission = submission.number
            if migrated is not None:
                restore_output(state, migrated.description)
                self._migrator.insert_pages(migrated)
            scheduler.submit(state)
        except GraftError as error:
            output.reason = "refused"
            scheduler.deliver(submission.number, output, error)
        return submission

    def _unused_id(self, reserved_ids: Container[str]) -> str:
        while True:
            request_id = f"request-{next(self._ids)}"
            if request_id not in reserved_ids and request_id not in self._scheduler.unfinished:
                return request_id

    def cancel(self, request_id: str) -> bool:
        """End a request with the output it has so far. Thread-safe.

        If another call of the engine is running, the request ends at the beginning of the next
        step.

        Returns
        -------
        bool
            False if no unfinished request has this id.
        """
        if self._closed:
            return False
        state = self._scheduler.unfinished.get(request_id)
        if state is None:
            return False
        self._abandoned.append(((), [_Submission(request_id, state.submission)]))
        self._try_end_abandoned()
        return True

    def wake(self) -> None:
        """Wake a `step` that is blocked on grammar compilation. Thread-safe."""
        if not self._closed:
            self._scheduler.wake()

    @exclusive
    def preempt(self, request_id: str) -> bool:
        """Preempt a request: take its slot and KV-cache pages, and put it back into the queue.

        The request keeps its output and resumes by prefilling prompt and output. Greedy and coupled
        outputs are the same with and without preemption. The request goes to the end of the queue
        of its priority. A request that the engine itself preempts, because pages have run out, goes
        to the front of that queue instead.

        Returns
        -------
        bool
            False if the request is unknown or has no slot.
        """
        self._begin_call()
        state = self._scheduler.unfinished.get(request_id)
        if state is None or state.slot < 0:
            return False
        self._scheduler.preempt(state)
        return True

    # Rounds -----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished or has an event that `step` would return."""
        return not self._closed and self._scheduler.busy

    def step(self) -> list[Event]:
        """Run one scheduling step and return its events.

        A step gives slots to waiting requests whose grammar is compiled, launches up to two rounds
        and reads the results of the oldest one. Events of requests that belong to an active
        `stream` or `generate` are not returned here, but by that call.

        Raises
        ------
        DeviceError, HostWorkError
            If the device or a round failed. All later calls raise `EngineError`.
        KeyboardInterrupt
            On Ctrl-C while the host waits for the device. No result is lost: the next step reads
            the same round.
        """
        self._advance()
        return self._scheduler.outbox.fetch_rest()

    def _advance(self) -> None:
        with Shield() as shield:
            self._run_step(shield)

    @exclusive
    def _run_step(self, shield: Shield) -> None:
        self._require_working()
        try:
            self._end_abandoned()
            self._scheduler.step(shield)
        except Exception as failure:
            # Only the text is stored. A stored exception would refer to its traceback, and
            # thereby keep alive the resources that close() frees.
            self.failure = str(failure)
            self._device_failed = isinstance(failure, DeviceError)
            LOG.error("the engine has failed: %s", self.failure)
            raise

    def _require_working(self) -> None:
        if self._closed:
            raise OptionError("the engine is closed")
        if self.failure is not None:
            raise EngineError(
                f"the engine has failed: {self.failure}; close it and create a new engine"
            )

    def _begin_call(self) -> None:
        """Raise EngineError if the engine has failed or is closed; then end the cancelled requests.

        They are ended here because their ids would otherwise stay in use until the next step.
        """
        self._require_working()
        self._end_abandoned()

    # Generation -------------------------------------------------------------------------------

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Run requests together and yield their events after each round.

        Several streams of one engine can be interleaved, nested, and combined with `submit`. If the
        caller closes the iterator early, or presses Ctrl-C, the unfinished requests are cancelled.

        Raises
        ------
        RequestError
            If two requests have the same id. In this case no request is submitted.
        """
        return self._stream(_expand_samples(requests), [])

    def _stream(self, requests: list[Request], ids: list[str]) -> Iterator[Event]:
        """Implement `stream`, and append the id of each submitted request to `ids`."""
        claimed: list[_Submission] = []
        unfinished: dict[int, _Submission] = {}
        try:
            self._submit_claimed(requests, ids, claimed, unfinished)
            outbox = self._scheduler.outbox
            while unfinished:
                events = outbox.fetch(unfinished)
                if not events:
                    self._require_scheduled(unfinished.values())
                    self._advance()
                for number, event in events:
                    if event.finished:
                        del unfinished[number]
                    yield event
        finally:
            self._abandoned.append((claimed, unfinished.values()))
            self._try_end_abandoned()

    @exclusive
    def _submit_claimed(
        self,
        requests: list[Request],
        ids: list[str],
        claimed: list[_Submission],
        unfinished: dict[int, _Submission],
    ) -> None:
        """Submit the requests of a stream, and reserve the events of these requests for the stream.

        Each submitted request is added to the caller's lists `ids` and `claimed`, and to
        `unfinished` by submission number. The caller can therefore cancel the requests submitted so
        far if Ctrl-C interrupts this method.
        """
        self._begin_call()
        explicit_ids = _explicit_ids(requests, self._scheduler.unfinished)
        for request in requests:
            submission = self._submit(request, explicit_ids)
            ids.append(submission.id)
            claimed.append(submission)
            unfinished[submission.number] = submission
            self._scheduler.outbox.claim(submission.number)

    def _require_scheduled(self, submissions: Iterable[_Submission]) -> None:
        """Raise an error if the scheduler knows none of the unfinished `submissions` of a stream.

        The caller has found no events of these requests. Without this check, the stream would wait
        forever for events of requests that the scheduler has lost.
        """
        if self._closed:
            return  # the next step raises the error
        for submission in submissions:
            state = self._scheduler.unfinished.get(submission.id)
            if state is not None and state.submission == submission.number:
                return
        names = ", ".join(submission.id for submission in submissions)
        raise EngineError(f"requests {names} have ended without a final event")

    def _try_end_abandoned(self) -> None:
        """End the requests in `_abandoned`: those that were cancelled or whose stream has ended.

        If another call of the engine is running, the next step ends them instead.
        """
        with suppress(EngineUseError):
            self._end_abandoned_alone()

    @partial(exclusive, brief=True)
    def _end_abandoned_alone(self) -> None:
        self._end_abandoned()

    def _end_abandoned(self) -> None:
        while self._abandoned:
            claimed, to_cancel = self._abandoned.popleft()
            if self._closed:
                continue
            for submission in to_cancel:
                state = self._scheduler.unfinished.get(submission.id)
                if state is not None and state.submission == submission.number:
                    device_unusable = self.failure is not None
                    self._scheduler.end(state, "cancelled", ended_on_device=device_unusable)
            self._scheduler.outbox.release(submission.number for submission in claimed)

    def generate(self, requests: Iterable[Request], progress: bool = False) -> list[Output]:
        """Run requests together and return their outputs in the same order.

        Parameters
        ----------
        requests
            Requests. A request with ``n > 1`` has `n` outputs, in the order of sample numbers.
        progress
            Whether to show a progress bar.

        Raises
        ------
        RequestError
            If two requests have the same id. In this case no request is submitted.
        KeyboardInterrupt
            On Ctrl-C, after all unfinished requests have been cancelled.
        """
        samples = _expand_samples(requests)
        ids: list[str] = []
        outputs: dict[str, Output] = {}
        with _progress_bar(len(samples)) if progress else nullcontext() as bar:
            for event in self._stream(samples, ids):
                if event.output is not None:
                    outputs[event.id] = event.output
                    if bar is not None:
                        bar.update()
        self._update_forced_tokens()
        return [outputs[request_id] for request_id in ids]

    def warm(self, request: Request) -> None:
        """Prefill a prompt, such as a common prefix of many requests, into the prefix cache.

        Without a prefix cache (`Options.prefix_cache_bytes`), or with a drafter whose KV-cache
        entries cannot be shared (`Drafter.lookahead`), no pages are kept.

        Raises
        ------
        RequestError
            If the request is refused or fails.
        """
        if not isinstance(request, Request):
            raise RequestError(f"request must be a Request, got {short_repr(request)}")
        prefill_only = replace(request, max_tokens=1, min_tokens=0, n=1, closing="off")
        [output] = self.generate([prefill_only])
        if output.error is not None:
            raise RequestError(output.error)

    # Counters ---------------------------------------------------------------------------------

    def _update_forced_tokens(self) -> dict[str, int]:
        """Update `stats.forced_tokens`, and return the guided decoder's counters."""
        counters = self._resources.decoder.counters()
        total = self._count_forced_tokens(counters)
        self.stats.forced_tokens = total - self._forced_tokens_at_reset
        return counters

    def _count_forced_tokens(self, counters: dict[str, int]) -> int:
        """Return the number of accepted forced drafts, given the counters of the guided decoder."""
        count = counters["forced_tokens"]
        if self.options.forced_drafts:
            count += self._automata_counters().get("forced_tokens", 0)
        return count

    def _automata_counters(self) -> dict[str, int]:
        """Return the counters of the automata; wait until the device is idle if there are any."""
        automata = self._resources.automata
        if automata is None:
            return {}
        self._replays.leave_loop()
        return automata.counters()

    def counters(self) -> dict[str, Any]:
        """Return the counters of engine, grammar, compiler, device and prefix cache.

        If grammar steps can run on the device, this method waits until the device is idle.

        The entry "closing" counts the mask rows (token bitmasks) from which the limit `max_tokens`
        has excluded a token that the grammar allows, and the requests with such rows, on host and
        device. A preempted request can be counted again after it has got another slot. The rows of
        matchers in Python are not counted.

        The entry "held" contains the numbers of slots, pages and replays that are in use at the
        time of the call.
        """
        if self._closed:
            raise OptionError("the engine is closed")
        grammar = self._update_forced_tokens()
        automata = self._automata_counters()
        slots = self._scheduler.slots
        replays = self._replays
        caches = self._built.caches
        prefix_cache = self._built.prefixes
        used_pages = sum(
            cache.scratch_page - len(cache.free) - prefix_cache.num_unused for cache in caches
        )
        return {
            "engine": self.stats.as_dict(),
            "grammar": grammar,
            "automata": automata,
            "closing": {
                "requests": grammar["closed"] + automata.get("closed", 0),
                "rows": grammar["narrowed_rows"] + automata.get("narrowed_rows", 0),
            },
            "compile": self._built.compiler.counters(),
            "device": self.device.stats(),
            "prefixes": {
                "pages": len(prefix_cache),
                "bytes": len(prefix_cache) * sum(cache.page_bytes for cache in caches),
                "hit_tokens": prefix_cache.hit_tokens,
                "evictions": prefix_cache.evictions,
            },
            "held": {
                "slots": slots.num_assigned,
                "leaving_slots": slots.num_leaving,
                "pages": used_pages,
                "unread_replays": len(replays.unread),
                "unretired_replays": replays.launched - replays.retired,
            },
        }

    def reset_stats(self) -> None:
        """Set all counters in `stats` to zero, by replacing `stats` with a new object."""
        self._require_working()
        counters = self._resources.decoder.counters()
        self._forced_tokens_at_reset = self._count_forced_tokens(counters)
        self.stats = EngineStats(draft_length=self._resources.depth)
        self._scheduler.stats = self.stats

    def synchronize(self) -> None:
        """Wait until the device is idle, and reclaim the resources of finished requests.

        The results of rounds in flight are read first. Running requests keep their slots.
        Applications do not need this method. It is meant for measurements and tests.
        """
        with Shield() as shield:
            self._wait_idle(shield)

    @exclusive
    def _wait_idle(self, shield: Shield) -> None:
        self._require_working()
        self._scheduler.wait_idle(shield)

    # Close ------------------------------------------------------------------------------------

    @exclusive
    def close(self) -> None:
        """Cancel unfinished requests, drain the device and free all resources.

        Raises
        ------
        DeviceError, HostWorkError
            If the device or a round in flight has failed and no step has raised the error yet. The
            engine is closed in this case too.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._drain()
        except (DeviceError, HostWorkError):
            if self.failure is None:
                raise
        finally:
            # The frames of a traceback may keep the scheduler alive after this call. Drop the
            # scheduler's references to device objects, so that they are freed nevertheless.
            self._scheduler.close()
            del self._built, self._resources, self._admission, self._replays, self._scheduler
            del self._migrator
            # Free the device memory of objects in reference cycles now.
            gc.collect()
            # The work of a failed device never completes, so its resources are never freed.
            if not self._device_failed:
                _wait_for_release(self.device)
            return_free_memory()

    def _drain(self) -> None:
        """End all requests, wait for the device, and close all parts of the engine.

        If one part cannot be closed, the others are closed nevertheless. `ExitStack` calls the
        registered functions in reverse order, so the requests end first.
        """
        with ExitStack() as stack:
            stack.callback(self._close_parts)
            stack.callback(self._scheduler.slots.reclaim_all)
            stack.callback(self._replays.drain)
            for state in list(self._scheduler.unfinished.values()):
                stack.callback(self._scheduler.end, state, "cancelled", ended_on_device=True)

    def _close_parts(self) -> None:
        """Wait for the device, then close the round graphs and what `assemble` has created."""
        with ExitStack() as stack:
            stack.callback(self.graphs.clear)
            stack.callback(self._built.close)
            for graph in self.graphs.values():
                stack.callback(graph.close)
            stack.callback(self._replays.drain)

    def __del__(self) -> None:
        # Close the engine if the caller did not, so that its threads and graphs end with it.
        if getattr(self, "_closed", True) or sys.is_finalizing():
            return
        try:
            prepare_driver_call("Engine.close")
        except DeviceError:
            return  # inside a host function or a forked child, where driver calls are not allowed
        self.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        # A forked child can leave the ``with`` block too, for example by sys.exit. The child does
        # not own the engine.
        if not is_forked():
            self.close()


def _check_arguments(
    model: object, drafter: DrafterChoice | None, ranks: object, options: EngineOptions
) -> Options:
    """Return the options of an engine; raise OptionError if an argument of `Engine` is invalid."""
    known = {field.name for field in fields(Options)}
    for name in options:
        if name not in known:
            names = ", ".join(sorted(known - {"internal"}))
            raise OptionError(f"unknown option {name}; the options are {names}")
    if not isinstance(model, (str, os.PathLike)):
        raise OptionError(f"model must be the path of a checkpoint folder, got {short_repr(model)}")
    if not (drafter is None or callable(drafter) or isinstance(drafter, (str, os.PathLike))):
        raise OptionError(
            "drafter must be a checkpoint folder, a drafter class or another callable, a name "
            f"module:attribute or None, got {short_repr(drafter)}"
        )
    if ranks is not None and not isinstance(ranks, RankGroup):
        raise OptionError(f"ranks must be a RankGroup or None, got {short_repr(ranks)}")
    requested = Options(**options)
    if ranks is not None and requested.generation == "graph":
        raise OptionError("generation='graph' cannot be combined with tensor parallelism")
    if requested.generation == "graph" and runs_on_host(drafter):
        raise OptionError(
            "generation='graph' requires a drafter that runs on the device, but this drafter runs "
            "on the host"
        )
    if drafter is None:
        if requested.draft_tree is not None:
            raise OptionError(f"draft_tree {requested.draft_tree} requires a drafter")
    elif requested.forced_drafts and requested.draft_masking == "none":
        raise OptionError(
            "forced_drafts cannot be combined with draft_masking='none': no mask rows are filled "
            "while drafting"
        )
    return requested


def _wait_for_release(device: Device) -> None:
    """Release unused device resources until the number of live resources stops decreasing.

    The number need not reach zero, because other engines may use the same device.
    """
    previous = math.inf
    while not device.release_unused(RELEASE_POLL_S):
        live = device.stats()["live"]
        count = sum(live.values()) if isinstance(live, dict) else live
        if count >= previous:
            return
        previous = count


def _has_id(request: Request) -> bool:
    """Return whether a request has an id that is a string.

    The caller may have passed an object that is not a `Request`; `Admission.admit` refuses it.
    """
    return isinstance(getattr(request, "id", None), str)


def _progress_bar(total: int) -> AbstractContextManager[Any]:
    """Return a progress bar of `total` requests."""
    from tqdm import tqdm  # its import takes as long as that of the CUDA bindings

    return tqdm(total=total, unit="request")


def _expand_samples(requests: Iterable[Request]) -> list[Request]:
    """Return the requests, each request with ``n > 1`` as n requests with one sample each.

    Objects that are not a `Request` are returned as they are, and `Admission.admit` refuses them.
    """
    if isinstance(requests, (str, bytes, Mapping)) or not isinstance(requests, Iterable):
        raise RequestError(f"requests must be a list of Request, got {short_repr(requests)}")
    samples: list[Request] = []
    for request in requests:
        if isinstance(request, Request):
            samples.extend(request.samples())
        else:
            samples.append(request)
    return samples


def _explicit_ids(requests: Sequence[Request], unfinished: Container[str]) -> set[str]:
    """Return the ids that the caller has given to requests.

    If two requests have the same id, or an unfinished request already has one of the ids, raise
    RequestError.
    """
    ids: set[str] = set()
    for request in requests:
        if not _has_id(request):
            continue
        request_id = str(request.id)
        if request_id in ids:
            raise RequestError(f"two requests have id {request_id!r}")
        if request_id in unfinished:
            raise RequestError(f"a request with id {request_id!r} is already running")
        ids.add(request_id)
    return ids
