"""Puts an engine together: checkpoints, caches, slots, rings and the parts of its rounds."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from graft.cudagraph.device import Device, Stream
from graft.cudagraph.errors import OptionError
from graft.cudagraph.pinned import Ring
from graft.cudagraph.ranks import RankGroup
from graft.grammar.compile.service import GrammarService
from graft.grammar.decoder import CANDIDATES, GuidedDecoder, default_threads
from graft.grammar.forced import ForcedTokens
from graft.grammar.vocabulary import Vocabulary
from graft.models.cache.kv import PagedKV
from graft.models.cache.prefix import PrefixCache
from graft.models.drafters import DrafterChoice, Forced
from graft.models.drafters.base import Drafter, DrafterContext, TreeShape
from graft.models.drafters.load import make_drafter
from graft.models.engine.options import Options
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.llama import LlamaModel
from graft.models.llm.sharding import TensorParallelLeader
from graft.models.round.budget import DraftBudget, ladder
from graft.models.round.masking import (
    DraftMasking,
    FillMasking,
    LatticeProbeMasking,
    NoMasking,
    ProbeMasking,
)
from graft.models.round.prefill import CHUNK, Prefill
from graft.models.round.round import RoundParts
from graft.models.round.timing import make_timeline
from graft.models.tokenizer import Tokenizer
from graft.sampling.exchange import Exchange
from graft.sampling.sampler import Sampler, output_ring
from graft.sampling.state import SlotState
from graft.sampling.tree import TREE_CANDIDATES, TreeSampler

#: Entries of the rings: two replays unread, one whose tail still runs, and one to spare.
RING_ENTRIES = 4


@dataclass(frozen=True)
class Assembly:
    """The built engine, before its first graph."""

    stream: Stream
    parts: RoundParts
    budget: DraftBudget
    prefill: Prefill
    caches: tuple[PagedKV, ...]
    prefixes: PrefixCache
    compiler: GrammarService


def assemble(
    device: Device,
    options: Options,
    model: Path,
    drafter: DrafterChoice | None,
    config: LlamaConfig,
    tokenizer: Tokenizer,
    ranks: RankGroup | None = None,
) -> Assembly:
    """Load the models and lay out everything a round needs.

    Parameters
    ----------
    options : sized for the target, and its transport chosen.

    Raises
    ------
    CheckpointError, ConfigError, OptionError, TokenizerError
        Naming the file, tensor, field or option that does not fit.
    """
    # First: a config that lies costs nothing.
    target = _target(device, options, model, config, ranks)
    vocabulary = Vocabulary.from_tokenizer(tokenizer.backend, config.vocab_size, tokenizer.stop_ids)
    with ExitStack() as undo:
        compiler = GrammarService(
            vocabulary,
            options.grammar_backend,
            threads=options.compile_threads,
            timeout_s=options.compile_timeout_s,
            cache_bytes=options.grammar_cache_bytes,
        )
        undo.callback(compiler.close)
        made = _drafter(device, options, drafter, target, tokenizer)
        parts = _parts(device, options, target, made, tokenizer, vocabulary)
        prefill = Prefill(
            device,
            target,
            made,
            slots=options.slots,
            max_length=options.sizes[0],
        )
        stream = device.stream("rounds")
        undo.pop_all()
    caches = (target.kv, *(made.caches if made else ()))
    shape = made.shape if made else TreeShape(0)
    lengths = ladder(shape.nodes) if options.draft_length == "auto" else [shape.nodes]
    budget = DraftBudget(lengths, len(shape.levels) or shape.nodes, branches=shape.branch > 1)
    prefixes = _prefixes(options, made, caches)
    return Assembly(stream, parts, budget, prefill, caches, prefixes, compiler)


def _prefixes(
    options: Options, drafter: Drafter | None, caches: tuple[PagedKV, ...]
) -> PrefixCache:
    """What is kept of requests that are over: nothing, where a drafter's entries are no use."""
    lookahead = drafter.lookahead if drafter else 0
    pages = caches[0].scratch_page
    most = options.prefix_cache_bytes
    if most is not None:
        pages = min(pages, most // sum(cache.page_bytes for cache in caches))
    return PrefixCache(caches, lookahead or 0, 0 if lookahead is None else pages)


def _cache(device: Device, options: Options, layers: int, heads: int, dim: int, dtype: str):
    length, pages = options.sizes
    return PagedKV(
        device,
        layers=layers,
        pages=pages,
        page_size=options.page_size,
        kv_heads=heads,
        head_dim=dim,
        dtype=dtype,
        slots=options.slots,
        max_pages_per_slot=-(-(length + options.slack) // options.page_size),
    )


def _max_rows(options: Options) -> int:
    branch = options.tree.branch if options.tree else 1
    return max(options.max_batch_size * max(options.most_drafts + 1, branch), CHUNK)


def _target(
    device: Device, options: Options, model: Path, config: LlamaConfig, ranks: RankGroup | None
) -> LlamaModel:
    leader = None
    heads = config.num_key_value_heads
    known = {"activations": options.activations, "weights": options.weights}
    if ranks is not None:
        leader = TensorParallelLeader(device, ranks, config, _max_rows(options))
        heads = leader.shard.local_config.num_key_value_heads
    cache = _cache(device, options, config.num_hidden_layers, heads, config.head_dim, config.dtype)
    if leader is not None:
        leader.load_workers(model, cache, **known)
    made = LlamaModel(
        device,
        config,
        Checkpoint(model),
        cache,
        max_rows=_max_rows(options),
        leader=leader,
        **known,
    )
    if leader is not None:
        leader.wait_for_workers()
    return made


def _drafter(
    device: Device,
    options: Options,
    choice: DrafterChoice | None,
    target: LlamaModel,
    tokenizer: Tokenizer,
) -> Drafter | None:
    """What drafts, told to the target; None decodes without speculation."""
    if choice is None:
        return Forced(options.most_drafts) if options.forced_drafts else None
    room = DrafterContext(
        device,
        target,
        tokenizer,
        options.most_drafts,
        options.tree,
        options.slots,
        options.sizes[0],
        _max_rows(options),
        lambda *shape: _cache(device, options, *shape),
    )
    name = str(choice)
    drafter = make_drafter(choice, room)
    if not isinstance(getattr(drafter, "shape", None), TreeShape):
        raise OptionError(f"drafter {name}: says nothing of its shape")
    drafter.shape.check(options.most_drafts)
    shape = drafter.shape
    asked = options.draft_tree is not None
    if (shape.branch > 1) != asked and (asked or shape.levels):
        raise OptionError(
            f"drafter {name}: drafts of the shape {shape}, and draft_tree is {options.draft_tree}"
        )
    if drafter.shape.levels and drafter.vocab is None:
        raise OptionError(f"drafter {name}: drafts level by level, and says nothing of its vocab")
    if drafter.taps:
        target.set_feature_layers(drafter.taps)
    return drafter


def _legality(options: Options, drafter: Drafter | None) -> type[DraftMasking]:
    """How this drafter's drafts come to be legal."""
    if drafter is None or not drafter.shape.levels or not options.mask_drafts:
        return NoMasking
    probes = options.draft_masking == "probe" or drafter.shape.branch > 1
    if not probes:
        return FillMasking
    return LatticeProbeMasking if drafter.at_once and not drafter.shape.paths else ProbeMasking


def _parts(
    device: Device,
    options: Options,
    target: LlamaModel,
    drafter: Drafter | None,
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
) -> RoundParts:
    slots = options.slots
    batch = options.max_batch_size
    shape = drafter.shape if drafter else TreeShape(0)
    drafts = shape.nodes
    branch = shape.branch
    levels = len(shape.levels)
    vocab_size = target.config.vocab_size
    masking = _legality(options, drafter)
    walks = masking is LatticeProbeMasking
    grows = branch > 1 and levels > 0 and not walks
    vocab = drafter.vocab if drafter else None
    alone = isinstance(drafter, Forced)
    if options.forced_drafts and not (alone or masking.masked):
        raise OptionError(
            "forced_drafts needs mask_drafts, and a drafter whose drafts come level by level: "
            "others fill no mask rows while they draft"
        )
    candidates = (
        min(CANDIDATES, vocab.size)
        if masking in (ProbeMasking, LatticeProbeMasking) and vocab
        else 0
    )
    if grows:
        fed = (levels - 1) * branch
        asked = TREE_CANDIDATES if masking is ProbeMasking else 0
        exchange = Exchange(device, slots, drafts, vocab_size, asked, branch, fed)
    else:
        branch, levels = (branch, levels) if walks else (1, 0)
        exchange = Exchange(device, slots, drafts, vocab_size, candidates, branch, 0, levels)
    state = SlotState(device, slots, vocab_size)
    replay = device.zeros((1,), "int32")
    sampler = Sampler(
        device,
        state,
        exchange,
        replay,
        token_limit=min(tokenizer.vocab_size, vocab_size),
        max_batch=batch,
        draft_vocab=vocab.size if vocab else 0,
        d2t=vocab.d2t if vocab else None,
        t2d=vocab.t2d if vocab else None,
    )
    decoder = GuidedDecoder(
        exchange,
        masked_drafts=masking.masked or drafter is None,
        forced=ForcedTokens(vocabulary, unique_only=not alone) if options.forced_drafts else None,
        threads=options.grammar_threads or default_threads(batch),
        budget_us=options.grammar_budget_us,
        transport=options.grammar_transport,
        max_in_flight=2 * RING_ENTRIES,
    )
    return RoundParts(
        device=device,
        target=target,
        drafter=drafter,
        masking=masking,
        sampler=sampler,
        tree=TreeSampler(sampler, branch, levels, shape.paths) if grows else None,
        state=state,
        decoder=decoder,
        exchange=exchange,
        inputs=Ring(device, RING_ENTRIES, {"slot": ("int32", (batch,))}),
        outputs=output_ring(device, RING_ENTRIES, batch, drafts),
        timeline=make_timeline(device, RING_ENTRIES, drafts),
        replay=replay,
        draft_length=drafts,
        depth=levels or (options.tree.levels if options.tree else drafts),
        composition=options.composition,
        programmatic=options.programmatic,
        every_part=options.timeline,
    )
