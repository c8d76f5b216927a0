"""Engine configuration: names, defaults, checks and meaning of all options.

The docstring of `Options` is the only place that says what an option means. The help of the command
line tools and the table in models/README.md quote the first sentence of each option (`meaning`).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from graft.cudagraph.errors import OptionError
from graft.cudagraph.host.transports import TRANSPORTS
from graft.grammar.automaton.device import ROW_BYTES, TABLE_BYTES
from graft.grammar.backends.registry import BACKENDS
from graft.grammar.compile.cache import CACHE_BYTES
from graft.grammar.matcher import GrammarBackend
from graft.grammar.vocabulary import Vocabulary
from graft.models.llm.kernels.products import ACTIVATIONS
from graft.models.llm.weights import WEIGHTS
from graft.models.request import VERIFY_MODES, Limits
from graft.native.errors import short_repr
from graft.sampling.state import MAX_DRAFTS
from graft.sampling.tree import TreePlan

__all__ = ["DRAFT_MASKINGS", "MAX_DRAFT_LENGTH", "Options", "meaning"]

DRAFT_MASKINGS = ("auto", "probe", "none")
MAX_DRAFT_LENGTH = 63
#: Default of `max_length` for targets that allow at least this many positions. By default, the KV
#: caches have pages for `max_length` positions in every batch row, so this number bounds their
#: default size.
DEFAULT_LENGTH = 4096

#: Maximum number of drafts with ``draft_length="auto"``, for a chain and for a tree.
_AUTO_CHAIN = 7
_AUTO_TREE = 31

#: Integer options: lowest value, highest value, and other allowed values.
_INTEGERS: dict[str, tuple[int, int, *tuple[str | None, ...]]] = {
    "max_batch_size": (1, 4096),
    "draft_length": (1, MAX_DRAFT_LENGTH, "auto"),
    "max_length": (2, 2**31 - 2, None),
    "pages": (1, 2**31 - 2, None),
    "prefix_cache_bytes": (0, 2**62, None),
    "prefill_rows": (1, 1 << 20, "auto"),
    "grammar_threads": (1, 1024, None),
    "page_size": (1, 1 << 16),
    "grammar_cache_bytes": (1, 2**62),
    "automaton_bytes": (1, 2**40),
    "mask_row_bytes": (0, 2**40),
    "compile_threads": (1, 256),
}
_CHOICES: dict[str, tuple[object, ...]] = {
    "draft_masking": DRAFT_MASKINGS,
    "forced_drafts": (False, True),
    "verify": VERIFY_MODES,
    "composition": ("one", "two"),
    "generation": ("rounds", "graph"),
    "grammar_transport": TRANSPORTS,
    "activations": ACTIVATIONS,
    "weights": WEIGHTS,
    "overlap": (False, True),
    "timeline": (False, True),
    "device_automata": (None, False, True),
    "programmatic": (None, False, True),
}


@dataclass(frozen=True)
class InternalOptions:
    """Options for tests and measurements. They are not part of the interface of graft.

    Of these options, only `activations` can change outputs.

    Parameters
    ----------
    page_size
        Number of positions per page of the KV caches.
    device_automata
        Whether kernels fill the mask rows of requests whose grammar has an automaton, see
        `DeviceAutomata`; None: only with ``generation="graph"``.
    automaton_bytes
        Size in bytes of the device memory for automata. The grammar steps of requests whose
        automaton does not fit run on the host.
    mask_row_bytes
        Size in bytes of the device memory that caches mask rows of automaton states. Rows that are
        not cached are computed each time. 0 caches none.
    overlap
        Whether a round is launched before the host has read the previous one.
    composition
        "one": a round is one graph. "two": the graph ends after verification. The drafter runs in
        further graphs. The host launches each of these graphs after the grammar step on which the
        graph depends has completed, so rounds do not overlap. This measures the benefit of a single
        graph.
    activations
        Precision of the activations that are multiplied with 16-bit weights on GPUs. "rounded":
        rounded to the type of the weights, as in training and serving; sums and everything else are
        float32. "float32": at least 16 bits of mantissa, with up to twice the arithmetic.
    programmatic
        Whether a kernel may start while the previous one is running (programmatic dependent
        launch), see `Graph`. None: if the device supports it (compute capability 9.0).
    compile_threads
        Number of grammars that are compiled concurrently.
    grammar_cache_bytes
        Maximum size of the cache of compiled grammars.

    Raises
    ------
    OptionError
        If an option is invalid, with its name and value.
    """

    page_size: int = 16
    device_automata: bool | None = None
    automaton_bytes: int = TABLE_BYTES
    mask_row_bytes: int = ROW_BYTES
    overlap: bool = True
    composition: str = "one"
    activations: str = "rounded"
    programmatic: bool | None = None
    compile_threads: int = 2
    grammar_cache_bytes: int = CACHE_BYTES

    def __post_init__(self) -> None:
        _check_values(self)


@dataclass(frozen=True)
class Options:
    """Engine configuration.

    Apart from limits on length, time and memory, only these options can change the outputs of
    greedy and coupled requests: `weights` changes the model's arithmetic, `max_length` determines
    the RoPE scaling of some models, `grammar_backend` selects the backend, which may enforce a
    grammar in its own way, and ``verify="relaxed"`` accepts drafts that the target did not sample.

    Parameters
    ----------
    max_batch_size
        Maximum number of requests that run concurrently.
    max_length
        Maximum number of positions per request, prompt and output together. Default: the maximum
        of the target, at most 4096.
    pages
        Number of pages of the KV caches, of 16 positions each. By default, there are enough pages
        for a request of `max_length` in every batch row. With fewer pages, requests may wait or be
        preempted when pages run out, because pages are allocated as requests grow.
    prefix_cache_bytes
        Maximum size in bytes of the prefix cache. The prefix cache keeps pages of finished requests
        and shares them with requests that begin with the same tokens. Unused pages are evicted when
        pages are needed. None sets no limit; 0 disables the cache.
    prefill_rows
        Maximum number of prompt tokens that are prefilled between two rounds while a request is
        generating. "auto" chooses the largest number whose measured time is at most 0.8 of the time
        of a round (`PrefillScheduler`).
    draft_length
        Number of drafts per round and request with a drafter, from 1 to 63, or "auto". With "auto",
        the engine chooses the number before each round so that the expected tokens per second are
        highest, up to 7 for a chain and 31 for a tree. Requests with a higher acceptance rate get
        more of these drafts (`DraftBudget`). Outputs of rejection sampling are not reproducible
        with "auto", because they depend on the draft lengths.
    draft_tree
        Shape of the drafts: None for a chain, (branch, levels), or paths. (branch, levels) selects
        a tree with at most `levels` levels, in which each node has at most `branch` children, from
        2 to 16. The `draft_length` most likely nodes are verified. A sequence of paths selects a
        tree of fixed shape. Each path lists the ranks of the nodes from the root: (0,) is the most
        likely first draft, (2,) the third most likely one, and (0, 1) the second most likely
        continuation of (0,).
    draft_masking
        How the grammar restricts the drafts of a drafter that computes logits: "auto", "probe" or
        "none". With "auto", a mask row is filled for each draft of a chain, and the draft is
        sampled under this mask. Trees, and drafters that offer a few candidates per position, as
        DFlash2 does, are probed. With "probe", all drafts are probed: the grammar tests only the
        drafter's best candidates, which takes less time. The mask rows that verification needs are
        then filled during the next target forward pass. Probed drafts are verified as with
        ``verify="coupled"``. If a drafter computes the logits of all levels at once, as DFlash
        does, one grammar step tests the candidates of all levels. With "none", drafts are not
        masked, and verification rejects illegal ones. Token ids that a drafter proposes without
        logits are never masked.
    forced_drafts
        Whether tokens that the grammar forces are drafted. With a drafter, a token is forced if it
        is the only legal one. It replaces the drafter's draft; if drafts are probed, it does so
        only where no candidate of the drafter is legal. Without a drafter, the longest legal token
        is forced if all other legal tokens are prefixes of it. Forced drafts are verified like
        others, so the distribution of outputs does not change.
    verify
        Verification mode of sampled requests that do not specify one. With "coupled", the target
        samples a token at each position with the random numbers that it would use without drafts,
        and a draft is accepted if it equals this token. Drafts therefore change no token.
        "rejection" is rejection sampling of all drafts of a chain together (block verification). It
        accepts more drafts and preserves the distribution of outputs. It applies only to drafts
        that were sampled from the drafter's distribution; other drafts are verified as with
        "coupled". "per_token" is rejection sampling of each draft separately. "relaxed" is like
        "coupled", but also accepts drafts that are sufficiently likely (`Request.relaxed`).
        `Output.exact` tells whether such a draft was accepted.
    grammar_backend
        Backend of grammars that do not name one. It is "auto", "xgrammar", "llguidance", a function
        that takes a `Vocabulary` and returns a `GrammarBackend`, or the import name
        "module:attribute" of such a function. "auto" chooses a backend that enforces every keyword
        of a JSON schema, possibly after rewriting the schema. If no backend does, the schema is
        rejected.
    grammar_transport
        How the graph runs grammar steps on the CPU: "native", "mailbox", "spinkernel" or "auto".
        With "native", each step is a host node of the graph. With "mailbox" and "spinkernel", a
        host thread waits for the device to request the step. "auto" selects the first of mailbox,
        spinkernel and native that works if at least 4 cores are usable, and native otherwise.
    grammar_threads
        Number of threads that serve the requests of a grammar step. The default depends on the
        batch size and the number of cores.
    grammar_budget_us
        Processor time in microseconds that the grammar of one request may use per grammar step.
        A request that exceeds this time is late. It is left out of rounds until its mask rows are
        complete, so that the other requests need not wait. Its output stays the same, except that
        outputs of rejection sampling are reproducible only if no request is late
        (``counters()["grammar"]["late_rows"]``). A request whose grammar exceeds limits that are
        far above the budget, or needs more than 256 MiB, fails with an error; `GuidedDecoder` has
        the limits. With None, a step waits for all requests.
    generation
        Whether a launch runs one round ("rounds"), or many rounds where possible ("graph"). With
        "graph", a batch whose requests have no grammar, or a grammar with an automaton, runs in a
        generation loop: kernels do the grammar steps, and one launch runs many rounds. The loop
        ends when its requests have ended, a request joins or is removed by the host, a request
        needs pages, or the host has not read the last 63 rounds. With ``draft_length="auto"``, a
        launch runs at most 32 rounds. While a prompt is being prefilled, rounds are launched one by
        one. Two other options need the grammar on the host: probed drafts (`draft_masking`), and
        tokens that are forced without a drafter. With one of them, a launch of a batch in which a
        request has a grammar runs one round, and a warning is logged. With probed trees of a
        drafter that computes the logits of all levels at once, every launch runs one round. "graph"
        requires a drafter that runs on the device.
    weights
        Format of the weights of the target's decoder layers: "checkpoint" or "fp8". "checkpoint":
        as stored. "fp8": rounded to E4M3 per row while loading, which halves the bytes that are
        read per token and changes the model slightly. Embeddings, the output head and drafters are
        not affected.
    limits
        Limits on the size of requests, on the queue and on the time of compiling a grammar.
    timeline
        Whether the device records a time stamp after every part of a round. The times are in
        `EngineStats.part_ns` and traces. Each time stamp costs one small kernel. Otherwise, only
        the beginning and the end of a round are recorded.
    internal
        Options for tests and measurements.

    Raises
    ------
    OptionError
        If an option is invalid, with its name and value.
    """

    max_batch_size: int = 8
    max_length: int | None = None
    pages: int | None = None
    prefix_cache_bytes: int | None = None
    prefill_rows: int | str = "auto"
    draft_length: int | str = 3
    draft_tree: tuple[int, int] | Sequence[tuple[int, ...]] | None = None
    draft_masking: str = "auto"
    forced_drafts: bool = False
    verify: str = "rejection"
    grammar_backend: str | Callable[[Vocabulary], GrammarBackend] = "auto"
    grammar_transport: str = "auto"
    grammar_threads: int | None = None
    grammar_budget_us: float | None = 5000.0
    generation: str = "rounds"
    weights: str = "checkpoint"
    limits: Limits = field(default_factory=Limits)
    timeline: bool = False
    internal: InternalOptions = field(default_factory=InternalOptions)

    def __post_init__(self) -> None:
        _check_values(self)
        if self.tree is not None:
            self._check_tree(self.tree)
        budget = self.grammar_budget_us
        # Comparing an int with a float is exact, so this also rejects ints too large for a float.
        is_number = type(budget) in (int, float)
        if budget is not None and not (is_number and 1 <= budget <= sys.float_info.max):
            raise _error("grammar_budget_us", "None or a finite number of at least 1", budget)
        if not isinstance(self.limits, Limits):
            raise _error("limits", "a Limits", self.limits)
        if not isinstance(self.internal, InternalOptions):
            raise _error("internal", "an InternalOptions", self.internal)
        backends = ("auto", *BACKENDS)
        backend = self.grammar_backend
        is_name = isinstance(backend, str) and (backend in backends or ":" in backend)
        if not (is_name or callable(backend)):
            expected = (
                f"one of {', '.join(backends)}, a function that returns a GrammarBackend, or the "
                "import name 'module:attribute' of such a function"
            )
            raise _error("grammar_backend", expected, self.grammar_backend)
        if self.generation == "graph" and self.internal.composition != "one":
            raise OptionError("generation='graph' requires composition='one'")

    def _check_tree(self, tree: TreePlan) -> None:
        """Check the size of a draft tree, and that the other options can be combined with it."""
        required = max(tree.levels, len(tree.paths))
        fed_nodes = (tree.levels - 1) * tree.branch
        if required > self.max_drafts:
            raise OptionError(
                f"draft_tree {self.draft_tree} has {required} levels or paths; at most "
                f"draft_length {self.max_drafts} are possible"
            )
        if fed_nodes > MAX_DRAFTS:
            raise OptionError(
                f"draft_tree {self.draft_tree} feeds (levels - 1) * branch = {fed_nodes} nodes to "
                f"the drafter; at most {MAX_DRAFTS} are possible"
            )
        if tree.paths and self.draft_length == "auto":
            raise OptionError("draft_length='auto' cannot be combined with an explicit draft_tree")
        if self.forced_drafts:
            raise OptionError(
                "forced_drafts cannot be combined with draft_tree: no mask rows are filled while "
                "a tree grows"
            )

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts of a round."""
        if isinstance(self.draft_length, int):
            return self.draft_length
        return _AUTO_TREE if self.draft_tree else _AUTO_CHAIN

    @property
    def tree(self) -> TreePlan | None:
        """Plan of the draft tree that the option `draft_tree` describes; None for a chain."""
        return None if self.draft_tree is None else TreePlan.of(self.draft_tree)

    @property
    def slack(self) -> int:
        """Number of positions, after a request's last possible position, to which drafts may write.

        The request needs pages for these positions too.
        """
        plan = self.tree
        if plan is None:
            return 0
        return max(self.max_drafts, (plan.levels - 1) * plan.branch)

    @property
    def uses_automata(self) -> bool:
        """Whether kernels do the grammar steps of requests whose grammar has an automaton."""
        if self.internal.device_automata is None:
            return self.generation == "graph"
        return self.internal.device_automata

    @property
    def slots(self) -> int:
        """Number of slots: two per row.

        When a request leaves a batch row, the next request can take this row at once with the
        second slot, although a replay in flight still refers to the first slot.
        """
        return 2 * self.max_batch_size

    @property
    def positions(self) -> int:
        """Maximum number of positions of a request. The options must be a result of `sized`."""
        length, pages = self.sizes
        return min(length, self.internal.page_size * pages - self.slack)

    @property
    def sizes(self) -> tuple[int, int]:
        """`max_length` and `pages`. The options must be a result of `sized`, so neither is None."""
        if self.max_length is None or self.pages is None:
            raise OptionError("max_length and pages are not set: call Options.sized first")
        return self.max_length, self.pages

    def sized(self, model_length: int, *, feeds_blocks: bool = False) -> Options:
        """Return a copy of these options in which `max_length` and `pages` are numbers, not None.

        The default of `max_length` is that of the model, but at most `DEFAULT_LENGTH`. By default,
        the pages suffice for `max_batch_size` requests of this length.

        Parameters
        ----------
        model_length
            Maximum number of positions of the target.
        feeds_blocks
            Whether the drafter is a block drafter, see `_BlockOptions`.

        Raises
        ------
        OptionError
            If `max_length` is greater than `model_length`.
        """
        length = self.max_length
        if length is None:
            length = min(model_length, DEFAULT_LENGTH)
        if length > model_length:
            raise OptionError(
                f"max_length {length} is greater than the model's {model_length} positions"
            )
        sized = _BlockOptions(**vars(self)) if feeds_blocks else self
        sized = replace(sized, max_length=length)
        pages = sized._all_pages(length) if self.pages is None else self.pages
        return replace(sized, pages=pages)

    def _all_pages(self, length: int) -> int:
        return self.max_batch_size * -(-(length + self.slack) // self.internal.page_size)


class EngineOptions(TypedDict, total=False):
    """The fields of `Options`, for checks of the keyword arguments of `Engine` by type checkers."""

    max_batch_size: int
    max_length: int | None
    pages: int | None
    prefix_cache_bytes: int | None
    prefill_rows: int | str
    draft_length: int | str
    draft_tree: tuple[int, int] | Sequence[tuple[int, ...]] | None
    draft_masking: str
    forced_drafts: bool
    verify: str
    grammar_backend: str | Callable[[Vocabulary], GrammarBackend]
    grammar_transport: str
    grammar_threads: int | None
    grammar_budget_us: float | None
    generation: str
    weights: str
    limits: Limits
    timeline: bool
    internal: InternalOptions


class _BlockOptions(Options):
    """Options of an engine with a block drafter.

    The drafter processes whole blocks, also near the maximum length of a request, where only the
    first drafts of a block can be accepted. The other rows of the block need pages, too (`slack`).
    """

    @property
    def slack(self) -> int:
        return max(super().slack, self.max_drafts)


def meaning(name: str) -> str:
    """Return the first sentence of the description of an option."""
    text = inspect.cleandoc(Options.__doc__ or "")
    found = re.search(rf"^{name}\n((?: {{4}}.*\n)+)", text, flags=re.M)
    if found is None:  # Python has removed the docstrings
        return ""
    return re.split(r"(?<=\.) ", " ".join(found[1].split()))[0]


def _check_values(options: Options | InternalOptions) -> None:
    """Check the options that are listed in `_INTEGERS` and `_CHOICES`."""
    for name, value in vars(options).items():
        if name in _INTEGERS:
            low, high, *others = _INTEGERS[name]
            if isinstance(value, str | None) and value in others:
                continue
            if type(value) is not int or not low <= value <= high:
                expected = [f"an integer from {low} to {high}", *map(repr, others)]
                raise _error(name, " or ".join(expected), value)
        elif name in _CHOICES:
            choices = _CHOICES[name]
            if not any(type(value) is type(choice) and value == choice for choice in choices):
                raise _error(name, f"one of {', '.join(map(str, choices))}", value)


def _error(name: str, expected: str, value: Any) -> OptionError:
    return OptionError(f"{name} must be {expected}, got {short_repr(value)}")
