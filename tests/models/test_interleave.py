"""Two rounds in flight: whatever the order of host and device, outputs are the sequential ones."""

import inspect
import textwrap

import pytest
from interleave import Interleaving
from interleave_device import TickingDecoder, TickingRing

from graft.cudagraph.pinned import Ring
from graft.grammar.decoder import GuidedDecoder
from graft.models.cache.kv import PagedKV
from graft.models.cache.prefix import PrefixCache
from graft.models.engine import migrate as handover
from graft.models.engine.replay import Replays, RowAssignment
from graft.models.engine.scheduler import Scheduler
from graft.models.engine.slots import RequestState, SlotManager


def caught(device, seeds):
    """Return the error of the first seed that fails, naming the seed, or None."""
    for seed in seeds:
        try:
            Interleaving(device, seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            return error
    return None


@pytest.mark.parametrize(
    "seeds", [range(120), pytest.param(range(10_000, 22_000), marks=pytest.mark.full)]
)
def test_every_interleaving_gives_the_sequential_output(device, seeds):
    """Schedules with joins, endings, cancels, preemptions, stalls and Ctrl-C."""
    error = caught(device, seeds)
    if error is not None:
        raise error


def test_a_seed_is_one_schedule(device):
    """The same seed gives the same rounds, so a failure can be repeated."""

    def rounds(seed):
        one = Interleaving(device, seed)
        one.run()
        return [one.scheduler.stats.as_dict(), one.tokens]

    assert rounds(5) == rounds(5) != rounds(6)


#: What is broken on purpose: (owner, method, text of its source, text instead).
MUTANTS = {
    "slot reused one replay too early": (
        SlotManager,
        "reclaim",
        "replay <= retired",
        "replay <= retired + 1",
    ),
    "pages given back while a replay writes them": (
        SlotManager,
        "leave",
        "del self.seated[slot]",
        "del self.seated[slot]; [cache.release(slot) for cache in self._caches]",
    ),
    "rows written to the entry of another replay": (
        Replays,
        "launch",
        'row("slot", replay)',
        'row("slot", replay + 1)',
    ),
    "snapshot read from another entry": (
        GuidedDecoder,
        "publish",
        "for r in snapshot",
        "for r in self._live.get(replay - 1, ())",
    ),
    "stale epoch applied by the grammar": (GuidedDecoder, "publish", "r.epoch", "1"),
    "stale row applied by the host": (RowAssignment, "stale", "return ", "return False and "),
    "results read before they are published": (Replays, "_await", "not over(POLL_S)", "False"),
    "newest replay read first": (Replays, "row", "self.unread[0]", "self.unread[-1]"),
    "snapshot retired while its replay runs": (
        Replays,
        "wait",
        "self._retire(flight.replay - 1, stats)",
        "self._retire(flight.replay - 1, stats); self._parts.decoder.retire(flight.replay)",
    ),
    "launched without saying who sits where": (
        Replays,
        "launch",
        "parts.inputs.publish(replay)",
        "pass",
    ),
    "preempted request forgets its output": (
        RequestState,
        "tokens",
        "[*self.prompt, *self.output.tokens]",
        "list(self.prompt)",
    ),
    "preempted request's grammar starts anew": (
        RequestState,
        "make_matcher",
        "self.output.tokens",
        "self.output.tokens[:0]",
    ),
    "preempted request gets a new budget": (
        SlotManager,
        "_seat",
        "limit=running.limit",
        "limit=running.limit + len(running.before)",
    ),
    "pages for no launch in flight": (
        SlotManager,
        "_needed",
        "running.length + self._reach",
        "running.length + self._reach // 3",
    ),
    "nobody asks for more pages": (Scheduler, "_short_of_pages", "self.seating.grow", "bool"),
    "a preempted request is forgotten": (
        Scheduler,
        "preempt",
        "self._wait(running, first)",
        "pass",
    ),
    "tokens after the stop string are kept": (
        RequestState,
        "push",
        "return self._tell(), True",
        "self.output.tokens.append(token); return self._tell(), True",
    ),
    "prompts prefilled in turns": (
        SlotManager,
        "prefill",
        "next(iter(self._joining.values()))",
        "list(self._joining.values())[-1]",
    ),
    "prompts prefilled as a whole": (SlotManager, "_most_rows", "self._rows_left if", "99 if"),
    "pieces without end": (SlotManager, "prefill", "_left -= self", "_left - self"),
    "seated before its prompt is enqueued": (
        SlotManager,
        "prefill",
        "if chunk is None:",
        "if chunk is None or not chunk.over():",
    ),
    "a page is free while somebody holds it": (PagedKV, "drop", "== 0", "<= 1"),
    "the page of the last token is shared": (
        PrefixCache,
        "keys",
        "- max(self._lookahead, 1) + 1",
        "+ 1",
    ),
    "pages that are found make room for themselves": (
        PrefixCache,
        "make_room",
        " or held in staying",
        "",
    ),
    "pages of a prompt that was not prefilled to its end": (
        SlotManager,
        "leave",
        "self._leaving[slot] = launched",
        "self._leaving[slot] = launched; self._prefixes.keep(slot, running.tokens)",
    ),
    "what is handed over lacks its last token": (
        handover,
        "described",
        "list(output.tokens)",
        "output.tokens[:-1]",
    ),
    "the grammar of what was handed over lacks a token": (
        RequestState,
        "make_matcher",
        "self.output.tokens",
        "self.output.tokens[:self._streamed - 1]",
    ),
    "what was handed over tells its text again": (RequestState, "flush", '== "moved"', '== ""'),
    "a request that ended on the device stays": (
        Scheduler,
        "_collect",
        "elif row.reason:",
        "elif row.reason == 1:",
    ),
}


def mutate(monkeypatch, mutant):
    """Replace a method by its own source with one text changed."""
    owner, name, old, new = mutant
    found = inspect.getattr_static(owner, name)
    function = found.fget if isinstance(found, property) else found
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{owner.__name__}.{name} has no {old!r} any more"
    scope = {}
    exec(source.replace(old, new), function.__globals__, scope)
    monkeypatch.setattr(owner, name, scope[name])


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_the_harness_catches(device, monkeypatch, mutant):
    """Host code with one fault in it does not survive a few hundred schedules."""
    mutate(monkeypatch, mutant)
    monkeypatch.setattr(TickingDecoder, "kept", [])
    assert caught(device, range(400))


def test_the_harness_catches_an_overwritten_entry(device, monkeypatch):
    """Rings with one entry too few and nobody who minds: results are overwritten unread."""
    plain = TickingRing.__init__

    def smaller(self, device, entries, fields):
        plain(self, device, max(entries - 2, 1), fields)

    monkeypatch.setattr(TickingRing, "__init__", smaller)
    assert "would overwrite" in str(caught(device, range(400))), "the ring itself refuses"
    monkeypatch.setattr(Ring, "reserve", lambda self, replay: replay % self.entries)
    monkeypatch.setattr(Ring, "release", lambda self, replay: None)
    assert caught(device, range(400))
