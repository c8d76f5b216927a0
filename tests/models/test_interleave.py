"""Overlapped rounds: the relative timing of host and device does not affect outputs.

Each test seed is one interleaving of the real host code with a simulated device. The expected
output of each request is computed token by token, without an engine (`simulators/interleaving.py`).
"""

import inspect
import textwrap

import pytest
from interleaving import Interleaving
from stepping_device import SteppingDecoder, SteppingRing

from graft.cudagraph.driver.pinned import Ring
from graft.grammar import decoder
from graft.grammar.decoder import GuidedDecoder
from graft.models.cache import prefix
from graft.models.cache.kv import PagedKV
from graft.models.engine import migrate
from graft.models.engine.loop_replays import LoopReplays
from graft.models.engine.promotion import Promotion
from graft.models.engine.replay import Replays, RowAssignment
from graft.models.engine.request_state import RequestState
from graft.models.engine.scheduler import Scheduler
from graft.models.engine.selection import GraphSelector
from graft.models.engine.slots import SlotManager
from graft.models.round.loop import LoopControl


def first_failure(device, seeds, **options):
    """Run the interleavings of the seeds, and return the first error with its seed as a note.

    Return None if all pass. The options are those of `Interleaving`.
    """
    for seed in seeds:
        try:
            Interleaving(device, seed, **options).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            return error
    return None


def more_seeds(first, count):
    """Return ranges of `count` seeds in total, for tests that run with --full only."""
    ranges = [range(start, start + 500) for start in range(first, first + count, 500)]
    return [pytest.param(seeds, marks=pytest.mark.full) for seeds in ranges]


@pytest.mark.parametrize("loops", [False, True], ids=["rounds", "loops"])
@pytest.mark.parametrize("seeds", [range(20), *more_seeds(10_000, 12_000)], ids=str)
def test_scheduler_interleavings_give_sequential_outputs(device, seeds, loops):
    """Outputs equal those of sequential decoding, whatever the order of host and device steps.

    Requests are cancelled, preempted, migrated and interrupted by Ctrl-C at random times.
    """
    error = first_failure(device, seeds, loops=loops)
    if error is not None:
        raise error


@pytest.mark.parametrize("loops", [False, True], ids=["rounds", "loops"])
@pytest.mark.parametrize("seeds", [range(8), *more_seeds(30_000, 6000)], ids=str)
def test_device_automata_keep_outputs_sequential(device, seeds, loops):
    """Outputs do not change if the grammar steps of some requests run on the device."""
    error = first_failure(device, seeds, loops=loops, automata=True)
    if error is not None:
        raise error


def test_interleaving_is_reproducible_from_its_seed(device):
    def run(seed):
        interleaving = Interleaving(device, seed)
        interleaving.run()
        return [interleaving.scheduler.stats.as_dict(), interleaving.tokens]

    assert run(5) == run(5) != run(6)


#: Faults to inject: (owner, function, text in the source of the function, replacement).
MUTANTS = {
    "slot reused one replay too early": (
        SlotManager,
        "reclaim",
        "replay <= retired",
        "replay <= retired + 1",
    ),
    "pages released while a replay writes them": (
        SlotManager,
        "leave",
        "del self.running[slot]",
        "del self.running[slot]; [cache.release(slot) for cache in self._caches]",
    ),
    "slots written to the entry of another replay": (
        Replays,
        "launch",
        'row("slot", number)',
        'row("slot", number + 1)',
    ),
    "snapshot read from another entry": (
        GuidedDecoder,
        "publish",
        "for request in snapshot",
        "for request in self._in_flight.get(replay - 1, ())",
    ),
    "stale epoch applied by the grammar": (decoder, "_native_request", "request.epoch", "1"),
    "stale row applied by the host": (RowAssignment, "stale", "return ", "return False and "),
    "results read before they are published": (
        Replays,
        "_wait_until_published",
        "not wait(POLL_S)",
        "False",
    ),
    "newest replay read first": (Replays, "row", "self.unread[0]", "self.unread[-1]"),
    "snapshot retired while its replay runs": (
        Replays,
        "wait",
        "self._retire(flight.number - 1, stats)",
        "self._retire(flight.number - 1, stats); self._resources.decoder.retire(flight.number)",
    ),
    "launch without published slots": (
        Replays,
        "launch",
        "resources.inputs.publish(number)",
        "pass",
    ),
    "preempted request loses its output": (
        RequestState,
        "tokens",
        "[*self.prompt, *self.output.tokens]",
        "list(self.prompt)",
    ),
    "matcher of a preempted request restarts": (
        RequestState,
        "make_matcher",
        "self.output.tokens",
        "self.output.tokens[:0]",
    ),
    "preempted request gets more positions": (
        SlotManager,
        "_start",
        "limit=state.position_limit",
        "limit=state.position_limit + len(state.start_output)",
    ),
    "pages for too few positions": (
        SlotManager,
        "_required_positions",
        "state.num_tokens + self._positions_ahead",
        "state.num_tokens + self._positions_ahead // 3",
    ),
    "pages not allocated before a launch": (
        Scheduler,
        "_allocate_pages",
        "self.slots.grow",
        "bool",
    ),
    "preempted request not queued": (
        Scheduler,
        "preempt",
        "self._enqueue(state, to_front)",
        "pass",
    ),
    "tokens after the stop string kept": (
        RequestState,
        "append_tokens",
        "return self._emit(), True",
        "self.output.tokens.append(token); return self._emit(), True",
    ),
    "prompts prefilled out of order": (
        SlotManager,
        "prefill",
        "next(iter(self._prefilling.values()))",
        "list(self._prefilling.values())[-1]",
    ),
    "prompts prefilled in one chunk": (
        SlotManager,
        "_max_chunk_rows",
        "self._rows_left if",
        "99 if",
    ),
    "prefill without a limit": (SlotManager, "prefill", "_left -= charged", "_left - charged"),
    "request started before its prefill is enqueued": (
        SlotManager,
        "prefill",
        "if chunk is None:",
        "if chunk is None or not chunk.is_done():",
    ),
    "page freed while a slot uses it": (
        PagedKV,
        "_update_idle_or_free",
        "if self._num_slots[page]",
        "if False",
    ),
    "retained page freed": (PagedKV, "_update_idle_or_free", "if self._retained[page]", "if False"),
    "page of the last token shared": (
        prefix,
        "page_keys",
        "len(array) - max(lookahead, 1)",
        "len(array)",
    ),
    "pages cached before their prefill is complete": (
        SlotManager,
        "leave",
        "self._leaving[slot] = last_replay",
        "self._leaving[slot] = last_replay; self._prefix_cache.insert(slot, state.tokens)",
    ),
    "migrated output lacks its last token": (
        migrate,
        "describe_request",
        "list(output.tokens)",
        "output.tokens[:-1]",
    ),
    "matcher of a migrated request lacks a token": (
        RequestState,
        "make_matcher",
        "self.output.tokens",
        "self.output.tokens[:self._emitted_tokens - 1]",
    ),
    "migrated request repeats its text": (
        migrate,
        "restore_output",
        "state.take_new_tokens()",
        "state.take_new_tokens(); state._pending_text += state._emitted_text[-1]",
    ),
    "request that ended on the device continues": (
        Scheduler,
        "_process_row",
        "elif row.reason:",
        "elif row.reason == 1:",
    ),
}


def mutate(monkeypatch, mutant):
    """Inject a fault: replace a text in the source code of a function or method."""
    owner, name, old, new = mutant
    found = inspect.getattr_static(owner, name)
    function = found.fget if isinstance(found, property) else found
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{owner.__name__}.{name} no longer contains {old!r}"
    scope = {}
    exec(source.replace(old, new), function.__globals__, scope)
    monkeypatch.setattr(owner, name, scope[name])


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
@pytest.mark.full("before their prefill is complete", "too few positions")
def test_interleaving_detects_injected_fault(device, monkeypatch, mutant):
    """With each injected fault, at least one of 400 interleavings fails."""
    mutate(monkeypatch, mutant)
    monkeypatch.setattr(SteppingDecoder, "kept", [])
    assert first_failure(device, range(400))


#: Faults in the handling of generation loops.
LOOP_MUTANTS = {
    "unread result overwritten": (
        LoopControl,
        "release",
        "replay_word(replay)",
        "replay_word(replay + 4)",
    ),
    "slot reused while a loop runs": (LoopReplays, "_retire", "if self.looping", "if False"),
    "loop writes to pages that it does not have": (
        Replays,
        "launch",
        "state.reserved_positions",
        "state.reserved_positions + 8",
    ),
    "round launched during a loop": (Scheduler, "launch", "if self.replays.looping:", "if False:"),
    "end of a loop not noticed": (
        LoopControl,
        "is_last",
        "return bool(",
        "return replay % 3 == 0 and bool(",
    ),
    "pages of a loop not in the page table": (
        SlotManager,
        "reserve_ahead",
        "cache.set_table(self._lane, state.slot)",
        "pass",
    ),
}


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=name, marks=pytest.mark.full if "pages" in name else ())
        for name, mutant in LOOP_MUTANTS.items()
    ],
)
def test_interleaving_detects_fault_of_generation_loops(device, monkeypatch, mutant):
    """With each injected fault, at least one of 400 interleavings fails."""
    mutate(monkeypatch, mutant)
    monkeypatch.setattr(SteppingDecoder, "kept", [])
    assert first_failure(device, range(400), loops=True)


#: Faults in the promotion of requests.
PROMOTION_MUTANTS = {
    "wrong epoch": (Promotion, "start", "state.epoch,", "state.epoch - 1,"),
    "promoted request served by the host": (
        GraphSelector,
        "is_served",
        "return ",
        "return state.matcher is not None or ",
    ),
    "host steps expected in device rounds": (
        Replays,
        "launch",
        "resources.decoder.skip(number)",
        "resources.decoder.publish(number, [])",
    ),
}


@pytest.mark.parametrize("mutant", PROMOTION_MUTANTS.values(), ids=PROMOTION_MUTANTS)
def test_interleaving_detects_fault_of_promotion(device, monkeypatch, mutant):
    """With each injected fault, at least one of 400 interleavings fails."""
    mutate(monkeypatch, mutant)
    monkeypatch.setattr(SteppingDecoder, "kept", [])
    assert first_failure(device, range(400), automata=True)


def test_interleaving_detects_overwritten_ring_entry(device, monkeypatch):
    """A ring that is too small raises an error before it overwrites an unread entry.

    Without this check of `Ring`, unread results are overwritten and outputs differ.
    """
    original = SteppingRing.__init__

    def init_smaller(self, device, entries, fields):
        original(self, device, max(entries - 2, 1), fields)

    monkeypatch.setattr(SteppingRing, "__init__", init_smaller)
    assert "would overwrite" in str(first_failure(device, range(400)))
    monkeypatch.setattr(Ring, "reserve", lambda self, replay: replay % self.entries)
    monkeypatch.setattr(Ring, "release", lambda self, replay: None)
    assert first_failure(device, range(400))
