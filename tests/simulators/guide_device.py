"""A simulated device for the guided decoder's tests, which checks every mask row.

`Device` runs rounds with `RoundSimulator`. Tokens are chosen with a random generator among the
legal tokens of the decoder's mask rows. The oracle of a mask row is a new matcher that accepts the
whole text of the request (`oracle_row`); the matcher may be one of `reference_matchers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import reference_round as ref
from guide_util import MATCHER_KINDS, OTHER_STOP, STOP, oracle_row
from reference_round import DEAD_END, ERROR, FREE, NOT_READY, READY, bits
from round_simulator import Decision, RoundSimulator, exchange_for, mix, read_mask_stamp, run_work

from graft.grammar import CompiledGrammar, GrammarBackend, Matcher
from graft.grammar.decoder import GuidedDecoder, GuidedRequest
from graft.grammar.forced import ForcedTokens
from graft.sampling.mode import DraftMode

MARKER_TOKENS = [*b'a":', 261, 265]


@dataclass
class SlotTruth(ref.Slot):
    """Expected state of one slot of the simulated device."""

    index: int = 0  # slot number
    start: Callable[[], Matcher] | None = None  # creates a reference matcher; None: no grammar
    position: int = 0  # position of the last token when the request joined
    history: list[int] = field(default_factory=list)  # tokens committed since the request joined
    reason: int = 0  # why the request has ended; 0 if it is running
    confused: bool = False  # an illegal token was committed on purpose: the request must fail
    left: bool = False  # whether the host has seen that the request has ended


def wanted_token(truth: SlotTruth, position: int, legal: np.ndarray) -> int:
    """Return a legal id as the choice of the simulated target model.

    The choice depends only on the request, the position and the legal ids. In free text, the chosen
    id is often the next token of a marker, so that complete markers occur.
    """
    likely = np.intersect1d(MARKER_TOKENS, legal)
    is_free_text = len(legal) > 200
    if len(likely) and is_free_text and mix(truth.epoch, position) % 10 < 8:
        legal = likely
    return max(legal.tolist(), key=lambda token: mix(truth.epoch, position, token))


class RandomDecision(Decision):
    """Chooses the wanted token of each request, and sometimes a random or illegal token."""

    def __init__(self, device: Device):
        self.device = device
        self.rng = device.rng
        self.all_ids = np.arange(device.size)

    def legal_ids(self, mask: np.ndarray | None) -> np.ndarray:
        return self.all_ids if mask is None else bits(mask)

    def is_late(self, slot: SlotTruth, node: int, state: int) -> bool:
        return node == 0 and self.rng.random() < 0.05

    def target(self, slot: SlotTruth, node: int, position: int, legal: np.ndarray) -> int:
        if slot.start and self.rng.random() < self.device.wrong:
            slot.confused = True
            illegal = np.setdiff1d(np.arange(self.device.size + 3), legal)
            return int(self.rng.choice(illegal))
        return wanted_token(slot, position, legal)

    def draft(self, slot: SlotTruth, j: int, legal: np.ndarray | None) -> int | None:
        device = self.device
        row = read_mask_stamp(device.exchanges[0], slot.index, j - 1)
        forced = row.forced(slot, slot.n + j - 1)
        if forced >= 0:
            return forced
        if device.forced is not None and not device.masked:
            return None
        # Even without mask rows for drafts, the drafter proposes legal tokens most of the time.
        choices = device.known_ids(slot) if legal is None else legal
        token = wanted_token(slot, slot.n + j, choices)
        if self.rng.random() < 0.25:
            token = int(self.rng.choice(choices))
        if self.rng.random() < 0.1:
            token = int(self.rng.choice([-1, device.size, 2**31 - 1, *range(device.size)]))
        return token


class Device:
    """Runs rounds with one decoder per kind of matcher, and checks every mask row.

    All decoders receive the same tokens and must write the same mask rows.

    Parameters
    ----------
    backend
        Backend of the grammars.
    oracle
        Backend of the reference matchers; None to use `backend`.
    slots, draft_length
        Number of slots, and number of drafts per round.
    masked
        Whether the graph has draft steps.
    seed
        Seed of the random generator.
    kinds
        Kinds of matchers; see `MATCHER_KINDS`.
    wrong
        Probability with which verification commits an illegal token.
    probe
        Whether draft steps probe candidates instead of filling mask rows.
    forced, options
        Forced tokens (None for none), and further arguments of `GuidedDecoder`.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        *,
        oracle: GrammarBackend | None = None,
        slots: int,
        draft_length: int,
        masked: bool,
        seed: int,
        kinds: Sequence[str] = ("native", "python"),
        wrong: float = 0.0,
        probe: bool = False,
        forced: ForcedTokens | None = None,
        options: dict[str, Any] | None = None,
    ):
        self.forced = forced
        self.backend = backend
        self.k = draft_length
        self.masked = masked
        self.probe = probe
        self.oracle = functools.cache((oracle or backend).compile)
        self.rng = np.random.default_rng(seed)
        self.size = backend.vocabulary.size
        self.wrong = wrong
        self.kinds = kinds
        if probe:
            mode = DraftMode.chain(draft_length, "probe", 4)
        else:
            mode = DraftMode.chain(draft_length, "fill" if masked else "none")
        self.exchanges = [exchange_for(slots, self.size, mode) for _ in kinds]
        options = {"forced": forced, "max_in_flight": 4, **(options or {})}
        self.decoders = [GuidedDecoder(exchange, **options) for exchange in self.exchanges]
        self.slots: list[Any] = [None] * slots
        self.simulator = RoundSimulator(self.exchanges, self.slots, RandomDecision(self))
        self.matchers: list[list[Matcher | None]] = [[None] * slots for _ in kinds]
        self.epoch = 0
        self.published = 0
        self.snapshots: dict[int, list[int]] = {}
        self.ended: list[SlotTruth] = []
        self.works = [[d.open_work() for d in self.decoders]]
        if draft_length:
            self.works.append([d.commit_work() for d in self.decoders])
        for j in range(1, draft_length + probe if masked else 0):
            self.works.append([d.draft_work(j) for d in self.decoders])

    @property
    def replay(self) -> int:
        """Number of the running replay, or of the last replay if none is running."""
        return self.simulator.replay

    # Methods that do the work of the host.

    def join(self, slot: int, compiled: CompiledGrammar | None, *, limit: int) -> None:
        """Put a new request into a slot. All replays published from now on contain the request."""
        self.epoch += 1
        position = mix(self.epoch) % 50
        self.slots[slot] = SlotTruth(
            n=position,
            tree=ref.chain(-1),
            limit=position + limit,
            epoch=self.epoch,
            stop_ids=(STOP, OTHER_STOP),
            index=slot,
            position=position,
            start=None if compiled is None else self.oracle(compiled.spec).matcher,
        )
        for kind, matchers in zip(self.kinds, self.matchers, strict=True):
            matchers[slot] = compiled and MATCHER_KINDS[kind](compiled.matcher())

    def is_idle(self, slot: int) -> bool:
        """Return whether a slot can be used by a new request.

        The host must know that the slot's previous request has ended, and no replay in flight may
        contain the slot.
        """
        truth = self.slots[slot]
        in_flight = any(slot in rows for rows in self.snapshots.values())
        return truth is None or (truth.left and not in_flight)

    def publish(self, leave_out: Sequence[int] = ()) -> None:
        """Publish the next replay.

        The replay contains the requests of all slots except the slots in `leave_out`. Requests that
        the host knows to have ended are not included.
        """
        self.published += 1
        rows = []
        for slot, truth in enumerate(self.slots):
            if truth and not truth.left and slot not in leave_out:
                rows.append(slot)
        self.rng.shuffle(rows)
        self.snapshots[self.published] = rows
        for decoder, matchers in zip(self.decoders, self.matchers, strict=True):
            requests = []
            for slot in rows:
                truth = self.slots[slot]
                requests.append(GuidedRequest(slot, truth.epoch, matchers[slot], truth.position))
            decoder.publish(self.published, requests)
            requests.clear()  # must not affect the replay

    # Methods that do the work of the device.

    def run(self) -> None:
        """Run the steps of one replay, check all mask rows, and retire the replay."""
        self.simulator.replay += 1
        truths = [self.slots[s] for s in self.snapshots.pop(self.replay)]
        self._step(0)
        for truth in truths:
            made = len(truth.drafts) + 1 if truth.active else 0
            for j in range(made):
                self._check_row(truth, j)
            if made and truth.start and not truth.confused:
                # A mask row may remain from an earlier round that had more drafts. This row must
                # not count as ready.
                unused = range(made, self.k + 1)
                assert {self._state(truth, j) for j in unused} <= {NOT_READY}
        drafting = [truth for truth in truths if self._verify(truth)]
        if self.k:
            self._step(1)
            for truth in drafting:
                if not self.probe:
                    self._check_row(truth, 0)
        for j in range(1, self.k + 1):
            if self.probe:
                self._probe(j, drafting)
                continue
            for truth in drafting:
                self.simulator.draft(truth.index, j, masked=self.masked)
            if self.masked and j < self.k:
                self._step(1 + j)
                for truth in drafting:
                    if len(truth.drafts) == j:
                        self._check_row(truth, j)
        for decoder in self.decoders:
            decoder.retire(self.replay)

    def clear_ended(self) -> None:
        """Let the host see which requests have ended. Later replays omit these requests."""
        for truth in self.slots:
            if truth and not truth.active and not truth.left:
                truth.left = True
                self.ended.append(truth)

    def _step(self, index: int) -> None:
        for work in self.works[index]:
            run_work(work)
        first = self.exchanges[0]
        for other in self.exchanges[1:]:
            for name in ("stamps", "masks", "answer"):
                np.testing.assert_array_equal(getattr(first, name), getattr(other, name))

    def _state(self, truth: SlotTruth, j: int) -> int:
        """Return the state of mask row `j` as a kernel reads it."""
        return self.simulator.row_state(truth.index, j, truth.n + j)

    def _oracle_row(self, truth: SlotTruth, drafts: Sequence[int]) -> np.ndarray | None:
        return oracle_row(truth.start, [*truth.history, *drafts])

    def known_ids(self, truth: SlotTruth) -> np.ndarray:
        """Return the ids that the reference matcher allows after the current drafts.

        Return all ids if the request is unconstrained or no id is legal.
        """
        row = self._oracle_row(truth, truth.drafts) if truth.start else None
        if row is None or not row.any():
            return np.arange(self.size)
        ids = bits(row)
        return ids[ids < self.size]

    def _check_row(self, truth: SlotTruth, j: int) -> None:
        """Check mask row `j` and its state against the reference matcher after `j` drafts."""
        state = self._state(truth, j)
        where = (truth.index, j)
        if truth.start is None:
            assert state == FREE
            return
        if truth.confused:
            assert j > 0 or state == ERROR
            return
        row = self._oracle_row(truth, truth.drafts[:j])
        if row is None:
            # The row has no legal token. At row 0, the text has ended. At other rows, an earlier
            # draft is illegal.
            assert state == (DEAD_END if j == 0 else NOT_READY), where
        elif (row == -1).all():
            assert state == FREE, where
        else:
            assert state == (READY if row.any() else DEAD_END), where
            if self.forced is not None and state == READY:
                detail = self.exchanges[0].stamps["detail"][where]
                assert detail == 1 + self.forced.token(row)
            np.testing.assert_array_equal(self.exchanges[0].masks[where], row)

    def _verify(self, truth: SlotTruth) -> bool:
        """Verify the drafts of a slot and commit tokens; return whether the slot continues."""
        outcome = self.simulator.verify(truth.index)
        if not truth.confused:
            truth.history += outcome.tokens
        truth.reason = truth.reason or outcome.reason
        return truth.active and bool(outcome.tokens)

    def _probe(self, j: int, truths: Sequence[SlotTruth]) -> None:
        """Offer candidates for draft `j`, and check that the probe finds the first legal one."""
        offers = [(truth, self._offer(truth, j)) for truth in truths if ref.is_drafting(truth, j)]
        self._step(1 + j)
        for truth, offer in offers:
            legal = np.arange(self.size)
            token = -1
            if truth.start is not None:
                row = self._oracle_row(truth, truth.drafts)
                answer = self.exchanges[0].answer[truth.index].tolist()
                if truth.confused or row is None:
                    assert answer[:2] != (self.replay, j)
                    continue
                legal = bits(row)
                if not len(legal):  # the decoder detects the dead end when it fills the row
                    self._check_row(truth, j - 1)
                    continue
                legal = legal[legal < self.size]
                token = next((id for id in offer if id in legal), -1)
                assert answer == (self.replay, j, token)
                if token < 0:
                    self._check_row(truth, j - 1)
            if token < 0:
                token = wanted_token(truth, truth.n + j, legal)
            self.simulator.add_draft(truth.index, token)

    def _offer(self, truth: SlotTruth, j: int) -> list[int]:
        """Write random candidates for draft `j` to the exchange memory and return them."""
        knows = self.rng.random() < 0.8
        likely = self.known_ids(truth) if knows else np.arange(self.size)
        count = int(self.rng.integers(0, 5))
        offer = self.rng.choice([-1, self.size, 2**31 - 1, *likely], count).tolist()
        if count and knows:
            offer[-1] = wanted_token(truth, truth.n + j, likely)
        for exchange in self.exchanges:
            exchange.candidates[truth.index, : 3 + count] = [self.replay, j, count, *offer]
        return offer
