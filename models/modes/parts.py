"""Parts of an engine's modes, as the options select them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import GraftError, OptionError
from graft.cudagraph.ranks.ranks import RankGroup
from graft.grammar.automaton.device import DeviceAutomata
from graft.grammar.decoder import GuidedDecoder
from graft.grammar.vocabulary import Vocabulary
from graft.models.engine.options import Options
from graft.models.modes.automaton_steps import (
    GRAMMAR_STEPS,
    AutomatonSteps,
    MixedSteps,
    NoGrammarSteps,
)
from graft.models.modes.loop.control import LOOP_ENTRIES, LoopControl
from graft.models.round.grammar_steps import GrammarSteps
from graft.models.round.round import RoundParts
from graft.sampling.exchange import Exchange

__all__ = ["ModeParts", "make_mode_parts", "num_output_entries"]

LOG = logging.getLogger("graft")


@dataclass(frozen=True)
class ModeParts:
    """Parts of the graphs of all modes.

    Attributes
    ----------
    round
        Parts of all graphs.
    automata
        Runs grammar steps on the device; None if all steps run on the host.
    control
        Words that the host shares with generation loops; None without loops.
    """

    round: RoundParts
    automata: DeviceAutomata | None
    control: LoopControl | None

    def close(self) -> None:
        """Release the pinned memory."""
        if self.control is not None:
            self.control.close()


def num_output_entries(options: Options, entries: int) -> int:
    """Return the number of entries of the output ring, given that of an engine without loops."""
    return entries if options.generation == "rounds" else LOOP_ENTRIES


def make_mode_parts(
    device: Device,
    options: Options,
    ranks: RankGroup | None,
    parts: RoundParts,
    vocabulary: Vocabulary,
) -> ModeParts:
    """Return the parts of all modes.

    Parameters
    ----------
    device
        Device of the engine.
    options
        Options of the engine.
    ranks
        Tensor-parallel group; None for a single process.
    parts
        Parts of a round whose grammar steps run on the host.
    vocabulary
        Vocabulary of the grammars.

    Raises
    ------
    OptionError
        If options of modes cannot be combined.
    """
    automata = _make_automata(options, parts, vocabulary)
    control = _make_control(device, options, ranks)
    make_grammar_steps = partial(_make_grammar_steps, parts.decoder, parts.exchange, automata)
    return ModeParts(replace(parts, make_grammar_steps=make_grammar_steps), automata, control)


def _make_grammar_steps(
    decoder: GuidedDecoder,
    exchange: Exchange,
    automata: DeviceAutomata | None,
    place: str,
    row_slot: DeviceArray,
) -> GrammarSteps:
    """Return the object that adds the grammar steps of a graph, see `GraphKey.grammar`."""
    if place == "none":
        return NoGrammarSteps(decoder, exchange)
    if place == "host":
        return GrammarSteps(decoder, exchange)
    if automata is None or place not in GRAMMAR_STEPS:
        raise GraftError(f"grammar steps cannot run at the place {place!r}")
    if place == "device":
        return AutomatonSteps(decoder, exchange, automata, row_slot)
    return MixedSteps(decoder, exchange, automata, row_slot)


def _make_automata(
    options: Options, parts: RoundParts, vocabulary: Vocabulary
) -> DeviceAutomata | None:
    """Return the device's automata if the option asks for them and drafts are not probed."""
    if not options.device_automata:
        return None
    if parts.mode.probes:
        LOG.warning(
            "device_automata has no effect: drafts are probed (draft_masking=%r), so the grammar "
            "steps of all requests run on the host",
            options.draft_masking,
        )
        return None
    if options.forced_drafts and parts.mode.masking != "fill":
        raise OptionError("device_automata and forced_drafts can be combined only with a drafter")
    return DeviceAutomata(
        parts.state,
        parts.exchange,
        parts.sampler,
        parts.replay,
        vocabulary,
        table_bytes=options.automaton_bytes,
        row_bytes=options.mask_row_bytes,
        finds_forced=options.forced_drafts,
    )


def _make_control(device: Device, options: Options, ranks: RankGroup | None) -> LoopControl | None:
    """Create the words of generation loops, if the option asks for them."""
    if options.generation == "rounds":
        return None
    if ranks is not None:
        raise OptionError("generation='graph' cannot be combined with tensor parallelism")
    return LoopControl(device, options.max_batch_size, options.slack, LOOP_ENTRIES)
