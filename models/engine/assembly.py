"""Loads an engine's models, and allocates its caches, slots, rings and other round resources."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from graft.cudagraph.device import Device, Stream
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.driver.pinned import Ring
from graft.cudagraph.errors import OptionError
from graft.cudagraph.graph.graph import supports_programmatic_edges
from graft.cudagraph.ranks.ranks import RankGroup
from graft.grammar.automaton.device import DeviceAutomata
from graft.grammar.compile.service import GrammarService
from graft.grammar.decoder import CANDIDATES, GuidedDecoder, default_threads
from graft.grammar.forced import ForcedTokens
from graft.grammar.vocabulary import Vocabulary
from graft.models.cache.kv import PagedKV
from graft.models.cache.prefix import PrefixCache
from graft.models.drafters import DrafterChoice, Forced
from graft.models.drafters.base import Drafter, DrafterContext, TreeShape
from graft.models.drafters.load import make_drafter
from graft.models.engine.interrupt import Shield
from graft.models.engine.options import Options
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.llama import LlamaModel
from graft.models.llm.sharding import TensorParallelLeader
from graft.models.round.budget import DraftBudget, draft_lengths
from graft.models.round.loop import LOOP_ENTRIES, LoopControl
from graft.models.round.masking import MASKING_CLASSES
from graft.models.round.prefill import CHUNK, Prefill
from graft.models.round.round import RoundGraph, RoundResources
from graft.models.round.split import SplitRound
from graft.models.round.timing import make_timeline
from graft.models.tokenizer import Tokenizer
from graft.sampling.arrays import SamplingArrays
from graft.sampling.exchange import Exchange
from graft.sampling.mode import MAX_CANDIDATES, TREE_CANDIDATES, DraftMode
from graft.sampling.results import output_ring
from graft.sampling.sampler import Sampler
from graft.sampling.state import SlotState
from graft.sampling.tree import TreeSampler

__all__ = ["Assembly", "assemble"]

LOG = logging.getLogger("graft")

#: Number of entries of the input ring and, without generation loops, of the output ring: two for
#: replays whose results the host has not read, one for a replay that is still drafting, one spare.
RING_ENTRIES = 4


@dataclass(frozen=True)
class Assembly:
    """Parts from which an engine builds its graphs.

    Attributes
    ----------
    stream
        Stream of the rounds and of prefill.
    resources
        Resources that all graphs share.
    loop_control
        State that the host shares with generation loops; None without loops.
    round_class
        Class of the graphs: `RoundGraph`, or `SplitRound` for ``composition="two"``.
    budget
        Chooses the draft length of each round.
    prefill
        Runs the forward passes of prefill.
    caches
        KV caches of target and drafter.
    prefixes
        Prefix cache, whose pages are pages of `caches`.
    compiler
        Compiles grammars.
    exit_stack
        Closes the parts in reverse order of their creation.
    """

    stream: Stream
    resources: RoundResources
    loop_control: LoopControl | None
    round_class: type[RoundGraph]
    budget: DraftBudget
    prefill: Prefill
    caches: tuple[PagedKV, ...]
    prefixes: PrefixCache
    compiler: GrammarService
    exit_stack: ExitStack

    def close(self) -> None:
        """Close all parts, even if closing one of them raises an error."""
        self.exit_stack.close()


def assemble(
    device: Device,
    options: Options,
    model: Path,
    drafter_choice: DrafterChoice | None,
    config: LlamaConfig,
    tokenizer: Tokenizer,
    ranks: RankGroup | None,
    shield: Shield,
) -> Assembly:
    """Load the models and allocate everything that rounds need.

    If this function raises an error, it closes the parts that it has created.

    Parameters
    ----------
    device
        Device of the engine.
    options
        Options with numbers for `max_length` and `pages`, and a transport other than "auto".
    model
        Folder of the target.
    drafter_choice
        Drafter; None decodes without speculation.
    config
        Config of the target.
    tokenizer
        Tokenizer of the target.
    ranks
        Tensor-parallel group; None for a single process.
    shield
        Shield that defers Ctrl-C. It raises KeyboardInterrupt between the phases of this function.

    Raises
    ------
    CheckpointError, ConfigError, OptionError, TokenizerError
        If a file, tensor, config field or option is invalid. The message contains its name.
    """
    with ExitStack() as exit_stack:
        target = _load_target(device, options, model, config, ranks)
        exit_stack.callback(target.release_workers)
        shield.check()
        vocabulary = Vocabulary.from_tokenizer(
            tokenizer.backend, config.vocab_size, tokenizer.stop_ids
        )
        compiler = _make_compiler(options, vocabulary)
        exit_stack.callback(compiler.close)
        shield.check()
        drafter = _load_drafter(device, options, drafter_choice, target, tokenizer)
        shield.check()
        mode = _draft_mode(options, drafter)
        _check_forced_drafts(options, drafter, mode)
        stream = device.stream("rounds")
        exit_stack.callback(stream.close)
        resources = _make_round_resources(
            device, options, target, drafter, mode, tokenizer, vocabulary
        )
        for part in (
            resources.inputs,
            resources.outputs,
            resources.timeline,
            resources.exchange,
            resources.decoder,
        ):
            exit_stack.callback(part.close)
        loop_control = None
        if options.generation == "graph":
            loop_control = LoopControl(device, options.max_batch_size, options.slack, LOOP_ENTRIES)
            exit_stack.callback(loop_control.close)
        shield.check()
        prefill = Prefill(
            device,
            target,
            drafter,
            slots=options.slots,
            max_length=options.sizes[0],
            programmatic=resources.programmatic,
        )
        exit_stack.callback(prefill.close)
        caches = (target.kv, *(drafter.caches if drafter else ()))
        return Assembly(
            stream,
            resources,
            loop_control,
            SplitRound if options.internal.composition == "two" else RoundGraph,
            _draft_budget(options, mode),
            prefill,
            caches,
            _prefix_cache(options, drafter, caches),
            compiler,
            exit_stack.pop_all(),
        )


def _make_compiler(options: Options, vocabulary: Vocabulary) -> GrammarService:
    return GrammarService(
        vocabulary,
        options.grammar_backend,
        threads=options.internal.compile_threads,
        timeout_s=options.limits.compile_s,
        cache_bytes=options.internal.grammar_cache_bytes,
    )


# Models -------------------------------------------------------------------------------------------


def _load_target(
    device: Device, options: Options, model: Path, config: LlamaConfig, ranks: RankGroup | None
) -> LlamaModel:
    """Load the target.

    Rank 0 of a tensor-parallel group also makes the other ranks load their shards.
    """
    max_rows = _max_rows(options)
    leader = None
    kv_heads = config.num_key_value_heads
    if ranks is not None:
        leader = TensorParallelLeader(device, ranks, config, max_rows)
        kv_heads = leader.shard.local_config.num_key_value_heads
    layers = config.num_hidden_layers
    cache = _make_cache(device, options, layers, kv_heads, config.head_dim, config.dtype)
    precision = {"activations": options.internal.activations, "weights": options.weights}
    if leader is not None:
        leader.load_workers(model, cache, max_length=options.sizes[0], **precision)
    target = LlamaModel(
        device, config, Checkpoint(model), cache, max_rows=max_rows, leader=leader, **precision
    )
    if leader is not None:
        leader.wait_for_workers()
    return target


def _load_drafter(
    device: Device,
    options: Options,
    choice: DrafterChoice | None,
    target: LlamaModel,
    tokenizer: Tokenizer,
) -> Drafter | None:
    """Load and check the drafter; return None if the engine decodes without speculation.

    Drafters such as EAGLE-3 read hidden states of the target. This function selects the target
    layers that provide them.
    """
    if choice is None:
        return Forced(options.max_drafts) if options.forced_drafts else None
    context = DrafterContext(
        device,
        target,
        tokenizer,
        options.max_drafts,
        options.tree,
        options.slots,
        options.sizes[0],
        _max_rows(options),
        partial(_make_cache, device, options),
    )
    drafter = make_drafter(choice, context)
    _check_drafter(options, str(choice), drafter)
    if drafter.feature_layers:
        target.set_feature_layers(drafter.feature_layers)
    return drafter


def _check_drafter(options: Options, name: str, drafter: Drafter) -> None:
    """Raise OptionError if the drafter's attributes are missing or do not match the options."""
    shape = getattr(drafter, "shape", None)
    if not isinstance(shape, TreeShape):
        raise OptionError(f"drafter {name} does not define `shape`")
    shape.check(options.max_drafts)
    wants_tree = options.draft_tree is not None
    is_tree = shape.branch > 1
    if is_tree != wants_tree and (wants_tree or shape.levels):
        raise OptionError(
            f"drafter {name} generates drafts of the shape {shape}, but draft_tree is "
            f"{options.draft_tree}; set draft_tree for a drafter of trees, and None for chains"
        )
    if shape.levels and drafter.vocab is None:
        raise OptionError(f"drafter {name} drafts level by level and does not define `vocab`")


def _max_rows(options: Options) -> int:
    """Return the maximum number of rows of a forward pass of target or drafter."""
    branch = options.tree.branch if options.tree else 1
    rows_per_request = max(options.max_drafts + 1, branch)
    return max(options.max_batch_size * rows_per_request, CHUNK)


# Caches -------------------------------------------------------------------------------------------


def _make_cache(
    device: Device, options: Options, layers: int, kv_heads: int, head_dim: int, dtype: str
) -> PagedKV:
    """Allocate a paged KV cache with the engine's number of slots and pages."""
    length, pages = options.sizes
    positions = length + options.slack
    return PagedKV(
        device,
        layers=layers,
        pages=pages,
        page_size=options.internal.page_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        slots=options.slots,
        max_pages_per_slot=-(-positions // options.internal.page_size),
    )


def _prefix_cache(
    options: Options, drafter: Drafter | None, caches: tuple[PagedKV, ...]
) -> PrefixCache:
    """Create the prefix cache.

    It is disabled if requests cannot share the entries of the drafter's KV cache.
    """
    lookahead = drafter.lookahead if drafter else 0
    if lookahead is None:
        return PrefixCache(caches, 0, 0)
    max_pages = caches[0].scratch_page
    if options.prefix_cache_bytes is not None:
        bytes_per_page = sum(cache.page_bytes for cache in caches)
        max_pages = min(max_pages, options.prefix_cache_bytes // bytes_per_page)
    return PrefixCache(caches, lookahead, max_pages)


# Rounds -------------------------------------------------------------------------------------------


def _draft_mode(options: Options, drafter: Drafter | None) -> DraftMode:
    """Return the draft mode: the shape of the drafter's drafts, and how they are masked."""
    if drafter is None:
        return DraftMode(drafts=0)
    shape = drafter.shape
    if not shape.levels:
        return DraftMode(drafts=shape.nodes, branch=shape.branch)
    masking = _masking(drafter, options.draft_masking)
    return DraftMode(
        drafts=shape.nodes,
        levels=len(shape.levels),
        branch=shape.branch,
        masking=masking,
        candidates=_num_candidates(masking, drafter),
        paths=shape.paths,
    )


def _masking(drafter: Drafter, draft_masking: str) -> str:
    """Return how the grammar masks drafts of a drafter that computes logits: one of `MASKINGS`."""
    if draft_masking == "none":
        return "none"
    may_fill = drafter.shape.branch == 1 and drafter.num_candidates is None
    if draft_masking == "auto" and may_fill:
        return "fill"
    if drafter.logits_at_once and not drafter.shape.paths:
        return "lattice-probe"
    return "probe"


def _num_candidates(masking: str, drafter: Drafter) -> int:
    """Return how many of the drafter's best ids the grammar tests; 0 if it tests none.

    `masking` is the option ``draft_masking``. With "probe", the number applies to each draft of a
    chain or each node of a tree; with "lattice-probe", to each draft level.
    """
    if masking not in ("probe", "lattice-probe") or drafter.vocab is None:
        return 0
    if masking == "probe" and drafter.shape.branch > 1:
        return TREE_CANDIDATES
    candidates = max(CANDIDATES, drafter.num_candidates or 0)
    return min(candidates, MAX_CANDIDATES, drafter.vocab.size)


def _check_forced_drafts(options: Options, drafter: Drafter | None, mode: DraftMode) -> None:
    """Raise OptionError if `forced_drafts` is set and the drafter cannot draft forced tokens."""
    if options.forced_drafts and not isinstance(drafter, Forced) and not mode.masked:
        raise OptionError(
            "forced_drafts cannot be combined with a drafter that proposes token ids without "
            "logits: no mask rows are filled while drafting"
        )


def _draft_budget(options: Options, mode: DraftMode) -> DraftBudget:
    lengths = draft_lengths(mode.drafts) if options.draft_length == "auto" else [mode.drafts]
    return DraftBudget(lengths, mode.levels or mode.drafts, is_tree=mode.branch > 1)


def _make_round_resources(
    device: Device,
    options: Options,
    target: LlamaModel,
    drafter: Drafter | None,
    mode: DraftMode,
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
) -> RoundResources:
    """Allocate the resources that all graphs share."""
    batch = options.max_batch_size
    vocab_size = target.config.vocab_size
    exchange = Exchange(device, options.slots, vocab_size, mode)
    state = SlotState(device, options.slots, vocab_size)
    replay = device.zeros((1,), "int32")
    arrays = SamplingArrays(
        state,
        exchange,
        replay,
        token_limit=min(tokenizer.vocab_size, vocab_size),
        max_batch=batch,
        draft_vocab=drafter.vocab if drafter else None,
    )
    sampler = Sampler(arrays)
    max_depth = mode.levels or mode.drafts
    if options.tree and not mode.levels:
        max_depth = options.tree.levels
    programmatic = options.internal.programmatic
    if programmatic is None:
        programmatic = supports_programmatic_edges(device)
    entries = RING_ENTRIES if options.generation == "rounds" else LOOP_ENTRIES
    inputs = {name: ("int32", (batch,)) for name in ("slot", "reserved")}
    return RoundResources(
        device=device,
        target=target,
        drafter=drafter,
        mode=mode,
        masking=MASKING_CLASSES[mode.masking],
        sampler=sampler,
        tree=TreeSampler(arrays) if mode.grows_tree else None,
        state=state,
        decoder=_make_decoder(options, exchange, drafter, vocabulary),
        automata=_make_automata(options, state, exchange, sampler, replay, vocabulary),
        exchange=exchange,
        inputs=Ring(device, RING_ENTRIES, {**inputs, "max_rounds": ("int32", (1,))}),
        outputs=output_ring(device, entries, batch, mode.drafts),
        timeline=make_timeline(device, entries, mode.drafts),
        replay=replay,
        depth=max_depth,
        programmatic=programmatic,
        every_part=options.timeline,
    )


def _make_automata(
    options: Options,
    state: SlotState,
    exchange: Exchange,
    sampler: Sampler,
    replay: DeviceArray,
    vocabulary: Vocabulary,
) -> DeviceAutomata | None:
    """Create the automata with which kernels evaluate grammars on the device (grammar steps).

    Return None if the options do not use automata. Also return None, with a warning, in two cases
    in which only the host can evaluate grammars: if the grammar tests the drafter's candidates
    (``draft_masking="probe"``), or if forced tokens are drafted without a drafter.
    """
    if not options.uses_automata:
        return None
    reason = ""
    if exchange.mode.probes:
        reason = f"drafts are probed (draft_masking={options.draft_masking!r})"
    elif options.forced_drafts and exchange.mode.masking != "fill":
        reason = "tokens are forced without a drafter"
    if reason:
        LOG.warning("the grammar steps of all requests run on the host: %s", reason)
        return None
    return DeviceAutomata(
        state,
        exchange,
        sampler,
        replay,
        vocabulary,
        table_bytes=options.internal.automaton_bytes,
        row_bytes=options.internal.mask_row_bytes,
        finds_forced=options.forced_drafts,
    )


def _make_decoder(
    options: Options, exchange: Exchange, drafter: Drafter | None, vocabulary: Vocabulary
) -> GuidedDecoder:
    """Create the grammar decoder, which also finds forced tokens if `forced_drafts` is set.

    With a drafter, a token is forced only if it is the only legal id, and the drafter proposes all
    other tokens. Without a drafter, the forced draft is the longest legal token if all other legal
    tokens are prefixes of it.
    """
    forced = None
    if options.forced_drafts:
        forced = ForcedTokens(vocabulary, unique_only=not isinstance(drafter, Forced))
    return GuidedDecoder(
        exchange,
        forced=forced,
        threads=options.grammar_threads or default_threads(options.max_batch_size),
        budget_us=options.grammar_budget_us,
        transport=options.grammar_transport,
        max_in_flight=2 * RING_ENTRIES,
    )
