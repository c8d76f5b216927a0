"""The engine: requests in, rounds replayed, outputs out.

One round is one graph launch. The host publishes who sits in which row, launches, and reads the
round's tokens from a ring as soon as verification has written them, while the device is still
drafting; so its own bookkeeping runs beside the rest of the round.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from graft.cudagraph.device import open_device
from graft.cudagraph.errors import GraftError, OptionError
from graft.cudagraph.lanes import StreamLane
from graft.cudagraph.transports import Transport, choose_transport
from graft.grammar.backend import GrammarBackend
from graft.grammar.vocabulary import Vocabulary
from graft.models.admission import Admission
from graft.models.assembly import (
    DEFAULT_LENGTH,
    Options,
    assemble,
    check_options,
    read_configs,
)
from graft.models.errors import RequestError
from graft.models.interrupt import Shield
from graft.models.replay import Replays
from graft.models.request import (
    DEVICE_REASONS,
    VERIFY_MODES,
    Event,
    Output,
    Request,
)
from graft.models.round import RoundGraph, RoundScratch
from graft.models.running import Running
from graft.models.stats import EngineStats
from graft.models.tokenizer import Tokenizer

#: A slot that commits nothing for so many rounds on end is stuck, not late.
MAX_STALLS = 256
REFUSED_TOKEN = "the grammar refused a token that verification had accepted"


def buckets(max_batch_size: int) -> list[int]:
    """Batch sizes that have a graph of their own: powers of two, and the largest batch."""
    sizes = [1 << i for i in range(max_batch_size.bit_length()) if 1 << i < max_batch_size]
    return [*sizes, max_batch_size]


class Engine:
    """Guided speculative decoding of a Llama target with an EAGLE-3 drafter, or of a target alone.

    Parameters
    ----------
    model : directory of the target: config.json, safetensors, tokenizer.json.
    drafter : directory of the EAGLE-3 checkpoint; None decodes without speculation.
    max_batch_size : slots, hence most requests in one round.
    draft_length : drafts per round, 1 to 16; without a drafter it is 0 whatever is given.
    max_length : positions per request, prompt and output; default what the target allows, at
        most 4096.
    page_size, pages : shape of the paged caches; by default every slot can be full at once.
    mask_drafts : draft under the grammar's masks; False drafts blindly and verifies all the same.
    verify : "rejection" or "coupled", for requests that do not say.
    grammar_backend : "xgrammar", "llguidance", or a callable that makes a `GrammarBackend` for a
        `Vocabulary`; for grammars that do not name their backend themselves.
    grammar_transport : how the grammar's steps are part of the graph: "native" (host nodes),
        "mailbox", "spinkernel", "python" (the slow path and oracle), or "auto": the first of
        mailbox, spinkernel and native that works, given 4 usable cores; else native.
    compile_threads, compile_timeout_s : the pool that compiles grammars off the critical path.
    device : "cuda", "soft" or None for the environment's choice.

    Raises
    ------
    ConfigError, CheckpointError, TokenizerError, OptionError, DeviceError
        Before any request is taken, each naming what does not fit.

    Notes
    -----
    An engine is used from one thread. `submit` and `step` are its two primitives; `generate` and
    `stream` drive them.
    """

    def __init__(
        self,
        model: str | Path,
        drafter: str | Path | None = None,
        *,
        max_batch_size: int = 8,
        draft_length: int = 3,
        max_length: int | None = None,
        page_size: int = 16,
        pages: int | None = None,
        mask_drafts: bool = True,
        verify: str = "rejection",
        grammar_backend: str | Callable[[Vocabulary], GrammarBackend] = "xgrammar",
        grammar_transport: Transport = "auto",
        compile_threads: int = 1,
        compile_timeout_s: float = 30.0,
        device: str | None = None,
        ordinal: int | None = None,
    ):
        if verify not in VERIFY_MODES:
            raise OptionError(f"verify must be one of {VERIFY_MODES}, got {verify!r}")
        model_dir = Path(model)
        drafter_dir = None if drafter is None else Path(drafter)
        config, drafter_config = read_configs(model_dir, drafter_dir)
        tokenizer = Tokenizer(model_dir, vocab_size=config.vocab_size)
        # An EAGLE-3 head's own max_position_embeddings is its training length and binds nobody.
        longest = config.max_position_embeddings
        length = min(longest, DEFAULT_LENGTH) if max_length is None else max_length
        if length > longest:
            raise OptionError(f"max_length {length} is above the model's {longest} positions")
        options = Options(
            max_batch_size=max_batch_size,
            draft_length=0 if drafter_dir is None else draft_length,
            max_length=length,
            page_size=page_size,
            pages=max_batch_size * -(-length // max(page_size, 1)) if pages is None else pages,
            mask_drafts=mask_drafts,
            grammar_backend=grammar_backend,
            grammar_transport=grammar_transport,
            compile_threads=compile_threads,
            compile_timeout_s=compile_timeout_s,
        )
        check_options(options, drafter_dir)
        self.verify = verify
        self.device = open_device(device, ordinal)
        transport, self.transport_reason = choose_transport(grammar_transport, self.device)
        options = replace(options, grammar_transport=transport)
        self.options = options
        built = assemble(
            self.device, options, model_dir, drafter_dir, config, drafter_config, tokenizer
        )
        self._built, self._parts, self.tokenizer = built, built.parts, tokenizer
        self._lane = StreamLane(built.stream)
        self._admission = Admission(options, tokenizer, config.vocab_size, built.compiler)
        self.stats = EngineStats(draft_length=options.draft_length)
        self._replays = Replays(built.parts, built.stream)
        self._bucket = 0
        self._ids = itertools.count()
        self._epochs = itertools.count(1)
        self._waiting: list[Running] = []
        self._active: dict[int, Running] = {}
        self._free = list(range(max_batch_size))
        self._events: list[Event] = []
        self._closed = False
        self.rounds: dict[int, RoundGraph] = {}
        try:
            self._build_rounds()
            # The first request should not pay for the start of the compiling children.
            built.compiler.wait_ready(options.compile_timeout_s)
        except BaseException:
            built.compiler.close()
            raise

    def _build_rounds(self) -> None:
        """One graph per bucket, and one idle replay each: what loads lazily is loaded now."""
        scratch = RoundScratch(self._parts, self.options.max_batch_size)
        for size in buckets(self.options.max_batch_size):
            self.rounds[size] = RoundGraph(self._parts, scratch, size)
            self._replays.launch(self.rounds[size], [])
            self._replays.wait(self.stats, Shield())
            self._replays.finish()
            self.stats.idle_launches += 1

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
        if self._closed:
            raise OptionError("the engine is closed")
        output = Output(id=f"request-{next(self._ids)}" if request.id is None else request.id)
        if any(r.id == output.id for r in (*self._waiting, *self._active.values())):
            raise RequestError(f"a request with id {output.id!r} is running already")
        try:
            self._waiting.append(self._admission.take(request, output))
        except GraftError as error:
            self._refuse(output, error)
        return output.id

    def cancel(self, request_id: str) -> bool:
        """End a request with what it has so far; False when no such request is running."""
        for running in [*self._waiting, *self._active.values()]:
            if running.id == request_id:
                self._end(running, "cancelled")
                return True
        return False

    # Rounds -----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished or has an event to deliver."""
        return bool(self._waiting or self._active or self._events)

    def step(self) -> list[Event]:
        """Let ready requests join, run one round, and return what it brought.

        Raises
        ------
        DeviceError, HostWorkError
            When the device or the round itself failed; nothing can run on this engine then.
        KeyboardInterrupt
            While the device works; nothing is lost, and the next step goes on from there.
        """
        with Shield() as shield:
            self._admit()
            if self._active or self._replays.pending is not None:
                self._events[:0] = self._round(shield)
            else:
                pending = [r.grammar for r in self._waiting if r.grammar is not None]
                if pending and not self._events:
                    wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
        events, self._events = self._events, []
        return events

    def _admit(self) -> None:
        """Give slots to requests whose grammar is ready, in order; nobody waits for another."""
        for running in [r for r in self._waiting if r.ready]:
            if not self._free:
                return
            try:
                if not self._join(running):
                    return
            except GraftError as error:
                self._waiting.remove(running)
                self._refuse(running.output, error)

    def _join(self, running: Running) -> bool:
        """Give a request a slot and pages and prefill it; False while there are no pages."""
        request, output = running.request, running.output
        if running.grammar is not None and running.matcher is None:
            compiled = running.grammar.result()
            running.matcher = compiled.backend.matcher(compiled, running.stop_ids)
        slot, length = self._free[0], len(running.prompt)
        for i, cache in enumerate(self._built.caches):
            if not cache.allocate(slot, length + running.max_tokens):
                for earlier in self._built.caches[:i]:
                    earlier.release(slot)
                return False
        self._free.pop(0)
        self._waiting.remove(running)
        running.slot, running.epoch = slot, next(self._epochs)
        for cache in self._built.caches:
            cache.set_table(self._lane, slot)
        self._built.prefill.run(self._lane, slot, running.prompt)
        mode = self.verify if request.verify is None else request.verify
        self._parts.state.join(
            self._lane,
            slot,
            position=length - 1,
            last=running.prompt[-1],
            epoch=running.epoch,
            limit=length + running.max_tokens,
            stop_ids=running.stop_ids,
            seed=output.seed,
            temperature=float(request.temperature),
            top_k=request.top_k,
            top_p=float(request.top_p),
            min_p=float(request.min_p),
            verify=VERIFY_MODES.index(mode),
        )
        self._active[slot] = running
        self.stats.joins += 1
        self.stats.prefills += 1
        self.stats.prefill_tokens += length - 1
        return True

    def _round(self, shield: Shield) -> list[Event]:
        """Launch a round and read it; after an interrupt, read the one that was launched."""
        replays = self._replays
        if replays.pending is None:
            rows = list(self._active.values())
            size = next(s for s in self.rounds if s >= len(rows))
            self.stats.bucket_changes += size != self._bucket
            self._bucket = size
            before = replays.launched
            replays.launch(self.rounds[size], rows)
            self.stats.rounds += 1
            self.stats.launches += replays.launched - before
        replays.wait(self.stats, shield)
        events = [
            event
            for b, running in enumerate(replays.pending or [])
            if running.slot >= 0 and (event := self._collect(b, running)) is not None
        ]
        replays.finish()
        return events

    def _collect(self, b: int, running: Running) -> Event | None:
        """Take row `b`'s results; ends the request when device or stop strings say so."""
        row = self._replays.row(b)
        if row.slot != running.slot:
            raise GraftError(
                f"row {b} of replay {self._replays.number} answered for slot {row.slot}, "
                f"not {running.slot}"
            )
        tokens, output = row.tokens, running.output
        self.stats.count_row(len(tokens), row.tested, row.accepted)
        running.stalls = 0 if tokens or row.reason else running.stalls + 1
        if tokens:
            output.rounds += 1
            output.drafted += row.tested
            output.accepted += row.accepted
        text, stopped = running.push(tokens)
        if stopped:
            self._end(running, "stop_string", text=text, tokens=tokens)
        elif row.reason:
            reason = DEVICE_REASONS[row.reason]
            error = REFUSED_TOKEN if reason == "error" else None
            self._end(running, reason, error, text=text, tokens=tokens)
        elif running.stalls > MAX_STALLS:
            self._end(running, "error", f"no mask row came for {MAX_STALLS} rounds")
        elif tokens:
            return Event(running.id, tuple(tokens), text)
        return None

    # Endings ----------------------------------------------------------------------------------

    def _refuse(self, output: Output, error: GraftError) -> None:
        output.reason, output.error = "refused", str(error)
        self._events.append(Event(output.id, (), "", output))

    def _end(
        self,
        running: Running,
        reason: str,
        error: str | None = None,
        *,
        text: str = "",
        tokens: Iterable[int] = (),
    ) -> None:
        """Take a request out of the batch; its slot is free for the next replay.

        The replay whose tail may still run drafts into the slot's pages and advances its matcher:
        the pages are written again only by work that the stream orders behind it, and the replay's
        snapshot holds the matcher until it has retired.
        """
        running.output.reason, running.output.error = reason, error
        text += running.flush()
        if running.slot >= 0:
            if reason not in DEVICE_REASONS:
                self._parts.state.leave(self._lane, running.slot)
            for cache in self._built.caches:
                cache.release(running.slot)
            del self._active[running.slot]
            self._free.append(running.slot)
            running.slot, running.matcher = -1, None
        else:
            self._waiting.remove(running)
        self._events.append(Event(running.id, tuple(tokens), text, running.output))

    # Driving ----------------------------------------------------------------------------------

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Run requests together and yield their events as rounds bring them.

        Leaving the iterator early, or Ctrl-C, cancels what is unfinished.
        """
        mine = {self.submit(request) for request in requests}
        left = set(mine)
        try:
            while left:
                for event in self.step():
                    if event.id in left:
                        left -= {event.id} if event.finished else set()
                        yield event
        finally:
            for request_id in left:
                self.cancel(request_id)
            self._events = [event for event in self._events if event.id not in mine]

    def generate(self, requests: Iterable[Request], progress: bool = False) -> list[Output]:
        """Run requests together and return their outputs in the same order.

        Raises
        ------
        KeyboardInterrupt
            After every unfinished request was cancelled.
        """
        numbered = [
            r if r.id is not None else replace(r, id=f"request-{next(self._ids)}") for r in requests
        ]
        done: dict[str, Output] = {}
        begun = time.perf_counter()
        with tqdm(total=len(numbered), disable=not progress, unit="request") as bar:
            for event in self.stream(numbered):
                if event.output is not None:
                    done[event.id] = event.output
                    bar.update()
        self.stats.generate_seconds += time.perf_counter() - begun
        return [done[r.id] for r in numbered if r.id is not None]

    def counters(self) -> dict[str, Any]:
        """Engine, grammar and device counters in one dictionary."""
        return {
            "engine": self.stats.as_dict(),
            "grammar": self._parts.decoder.counters(),
            "device": self.device.stats(),
        }

    def reset_stats(self) -> None:
        """Begin counting anew."""
        self.stats = EngineStats(draft_length=self.options.draft_length)

    def close(self) -> None:
        """Cancel what runs, drain the device and give everything back."""
        if self._closed:
            return
        self._closed = True
        for running in [*self._waiting, *self._active.values()]:
            self._end(running, "cancelled")
        self._drain()
        del self._built, self._parts, self._lane, self._admission, self._replays
        gc.collect()  # reference cycles must not keep device memory until some later collection
        self.device.rest()

    def _drain(self) -> None:
        self._replays.drain()
        for graph in self.rounds.values():
            graph.close()
        self.rounds.clear()
        self._built.compiler.close()
        parts = self._parts
        parts.decoder.close()
        for held in (parts.inputs, parts.outputs, parts.timeline, parts.exchange):
            held.close()
        self._built.stream.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
