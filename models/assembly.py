"""Puts an engine together: checkpoints, caches, slots, rings and the parts of its rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graft.cudagraph.device import Device, Stream
from graft.cudagraph.errors import OptionError
from graft.cudagraph.slots import PinnedSlots, Ring
from graft.cudagraph.transports import TRANSPORTS
from graft.grammar.backend import BACKENDS, GrammarBackend
from graft.grammar.decoder import CANDIDATES, LEGALITIES, GuidedDecoder, default_threads
from graft.grammar.forced import ForcedText
from graft.grammar.service import GrammarService
from graft.grammar.vocabulary import Vocabulary
from graft.models.checkpoint import Checkpoint
from graft.models.config import Eagle3Config, LlamaConfig
from graft.models.eagle3 import Eagle3Drafter
from graft.models.kv import PagedKV
from graft.models.llama import LlamaModel
from graft.models.prefill import Prefill
from graft.models.round import RoundParts
from graft.models.timing import RoundTiming
from graft.models.tokenizer import Tokenizer
from graft.sampling.sampler import Sampler
from graft.sampling.state import SlotState

#: Entries of the rings: two replays unread, one whose tail still runs, and one to spare.
RING_ENTRIES = 4
PREFILL_ROWS = 256
#: Processor time that a grammar step waits for one request: more than any usual mask row takes.
BUDGET_US = 5000.0
#: Positions per request unless the user asks for more: caches are reserved for every slot.
DEFAULT_LENGTH = 4096


@dataclass(frozen=True)
class Options:
    """An engine's shape, checked by `Engine`."""

    max_batch_size: int
    draft_length: int
    max_length: int
    page_size: int
    pages: int
    mask_drafts: bool
    draft_legality: str
    forced_drafts: bool
    grammar_threads: int | None
    grammar_budget_us: float | str | None
    grammar_backend: str | Callable[[Vocabulary], GrammarBackend]
    grammar_transport: str
    compile_threads: int
    compile_timeout_s: float
    grammar_cache_bytes: int
    grammar_cache_dir: str | Path | None
    overlap: bool

    @property
    def slots(self) -> int:
        """Two per row: a row is taken over while a replay still names its last owner's slot."""
        return 2 * self.max_batch_size


@dataclass(frozen=True)
class Assembly:
    """The built engine, before its first graph."""

    device: Device
    stream: Stream
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    parts: RoundParts
    prefill: Prefill
    caches: tuple[PagedKV, ...]
    compiler: GrammarService


def read_configs(model: Path, drafter: Path | None) -> tuple[LlamaConfig, Eagle3Config | None]:
    """Both configurations, and whether the drafter was made for this target."""
    config = LlamaConfig.from_dir(model)
    return config, None if drafter is None else Eagle3Config.from_dir(drafter)


def _cache(device: Device, options: Options, *, layers: int, heads: int, dim: int, dtype: str):
    return PagedKV(
        device,
        layers=layers,
        pages=options.pages,
        page_size=options.page_size,
        kv_heads=heads,
        head_dim=dim,
        dtype=dtype,
        slots=options.slots,
        max_pages_per_slot=-(-options.max_length // options.page_size),
    )


def assemble(
    device: Device,
    options: Options,
    model: Path,
    drafter_path: Path | None,
    config: LlamaConfig,
    drafter_config: Eagle3Config | None,
    tokenizer: Tokenizer,
) -> Assembly:
    """Load both models and lay out everything a round needs.

    Raises
    ------
    CheckpointError, ConfigError, TokenizerError
        Naming the file, tensor or field that does not fit.
    """
    vocabulary = Vocabulary.from_tokenizer(tokenizer.backend, config.vocab_size, tokenizer.stop_ids)
    compiler = GrammarService(
        vocabulary,
        options.grammar_backend,
        threads=options.compile_threads,
        timeout_s=options.compile_timeout_s,
        cache_bytes=options.grammar_cache_bytes,
        cache_dir=options.grammar_cache_dir,
    )
    try:
        return _assemble(
            device, options, model, drafter_path, config, drafter_config, tokenizer,
            vocabulary, compiler,
        )  # fmt: skip
    except BaseException:
        compiler.close()
        raise


def _assemble(
    device: Device,
    options: Options,
    model: Path,
    drafter_path: Path | None,
    config: LlamaConfig,
    drafter_config: Eagle3Config | None,
    tokenizer: Tokenizer,
    vocabulary: Vocabulary,
    compiler: GrammarService,
) -> Assembly:
    width, slots, batch = options.draft_length + 1, options.slots, options.max_batch_size
    max_rows = max(batch * width, PREFILL_ROWS)
    checkpoint = Checkpoint(model)
    caches = [
        _cache(
            device, options, layers=config.num_hidden_layers, heads=config.num_key_value_heads,
            dim=config.head_dim, dtype=config.dtype,
        )
    ]  # fmt: skip
    target = LlamaModel(device, config, checkpoint, caches[0], max_rows=max_rows)
    drafter = None
    if drafter_path is not None and drafter_config is not None:
        caches.append(
            _cache(
                device, options, layers=1, heads=drafter_config.num_key_value_heads,
                dim=drafter_config.head_dim, dtype=drafter_config.dtype,
            )
        )  # fmt: skip
        draft_checkpoint = Checkpoint(drafter_path)
        drafter = Eagle3Drafter(
            device, drafter_config, draft_checkpoint, target, caches[1], max_rows=max_rows
        )

    words = -(-config.vocab_size // 32)
    draft_vocab = 1 if drafter is None else drafter.draft_vocab
    masked = options.mask_drafts and not (options.forced_drafts and drafter is None)
    candidates = 0
    if options.draft_legality == "probe" and drafter is not None:
        candidates = min(CANDIDATES, draft_vocab)
    exchange = PinnedSlots(
        device,
        slots,
        {
            "mask": ("int32", (width, words)),
            "row_state": ("int32", (width, 4)),
            "committed": ("int32", (width + 2,)),
            "drafted": ("int32", (width + 1,)),
            "candidates": ("int32", (3 + candidates,)),
            "answers": ("int32", (4,)),
        },
    )
    state = SlotState(device, slots, options.draft_length, draft_vocab)
    sampler = Sampler(
        device,
        state,
        exchange,
        vocab_size=config.vocab_size,
        token_limit=min(tokenizer.vocab_size, config.vocab_size),
        draft_length=options.draft_length,
        draft_vocab=draft_vocab,
        candidates=candidates,
        d2t=None if drafter is None else drafter.d2t,
        t2d=None if drafter is None else drafter.t2d,
        max_batch=batch,
    )
    decoder = GuidedDecoder(
        exchange,
        slots=slots,
        draft_length=options.draft_length,
        vocab_size=config.vocab_size,
        masked_drafts=masked,
        draft_legality="probe" if candidates else "fill",
        forced=None if not options.forced_drafts
        else ForcedText(vocabulary, certain=drafter is not None),
        threads=options.grammar_threads or default_threads(batch),
        budget_us=BUDGET_US if options.grammar_budget_us == "auto" else options.grammar_budget_us,  # type: ignore[arg-type]  # checked
        transport=options.grammar_transport,
        ring=2 * RING_ENTRIES,
    )
    inputs = Ring(device, RING_ENTRIES, {"slot": ("int32", (batch,))})
    outputs = Ring(
        device,
        RING_ENTRIES,
        {name: ("int32", (batch,)) for name in ("slot", "count", "reason", "accepted", "draft_len")}
        | {"tokens": ("int32", (batch, width))},
    )
    columns = len(RoundTiming(options.draft_length, masked).columns)
    stream = device.stream("rounds")
    parts = RoundParts(
        device=device,
        target=target,
        drafter=drafter,
        sampler=sampler,
        state=state,
        decoder=decoder,
        exchange=exchange,
        inputs=inputs,
        outputs=outputs,
        timeline=PinnedSlots(device, RING_ENTRIES, {"ns": ("int64", (columns,))}),
        replay=device.zeros((1,), "int32"),
        draft_length=options.draft_length,
        masked_drafts=masked,
    )
    return Assembly(
        device=device,
        stream=stream,
        tokenizer=tokenizer,
        vocabulary=vocabulary,
        parts=parts,
        prefill=Prefill(
            device, target, drafter,
            slots=slots, chunk=PREFILL_ROWS, max_length=options.max_length,
        ),
        caches=tuple(caches),
        compiler=compiler,
    )  # fmt: skip


def check_options(options: Options, drafter: Path | None) -> None:
    """Refuse a shape that cannot work.

    Raises
    ------
    OptionError
        Naming the option and its value.
    """
    for name in ("max_batch_size", "page_size", "max_length", "pages", "compile_threads"):
        if getattr(options, name) < 1:
            raise OptionError(f"{name} must be at least 1, got {getattr(options, name)}")
    if drafter is not None and not 1 <= options.draft_length <= 16:
        raise OptionError(
            f"draft_length must be from 1 to 16 with a drafter, got {options.draft_length}; "
            "to decode without speculation give no drafter"
        )
    if options.forced_drafts and not 1 <= options.draft_length <= 16:
        raise OptionError(
            f"draft_length must be from 1 to 16 with forced_drafts, got {options.draft_length}"
        )
    if options.forced_drafts and drafter is not None and not options.mask_drafts:
        raise OptionError("forced_drafts needs mask_drafts: blind drafting fills no rows")
    names = ("auto", *BACKENDS)
    if not callable(options.grammar_backend) and options.grammar_backend not in names:
        raise OptionError(
            f"grammar_backend must be one of {names} or make a GrammarBackend, "
            f"got {options.grammar_backend!r}"
        )
    if options.draft_legality not in LEGALITIES:
        raise OptionError(
            f"draft_legality must be one of {', '.join(LEGALITIES)}, "
            f"got {options.draft_legality!r}"
        )
    if options.draft_legality == "probe" and not options.mask_drafts:
        raise OptionError("draft_legality 'probe' needs mask_drafts: blind drafts are not probed")
    if options.grammar_threads is not None and options.grammar_threads < 1:
        raise OptionError(f"grammar_threads must be at least 1, got {options.grammar_threads}")
    budget = options.grammar_budget_us
    if budget not in (None, "auto") and (isinstance(budget, str) or not budget >= 1):
        raise OptionError(f"grammar_budget_us must be auto, None or at least 1, got {budget!r}")
    if options.grammar_transport not in TRANSPORTS:
        raise OptionError(
            f"grammar_transport must be one of {', '.join(TRANSPORTS)}, "
            f"got {options.grammar_transport!r}"
        )
