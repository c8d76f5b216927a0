"""Options of an engine: stated, explained and checked here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graft.cudagraph.errors import OptionError
from graft.cudagraph.transports import TRANSPORTS
from graft.grammar.backends.registry import BACKENDS
from graft.grammar.compile.cache import CACHE_BYTES
from graft.grammar.matcher import GrammarBackend
from graft.grammar.vocabulary import Vocabulary
from graft.models.llm.layers import ACTIVATIONS
from graft.models.llm.weights import WEIGHTS
from graft.models.request import VERIFY_MODES, Limits
from graft.sampling.state import MAX_DRAFTS
from graft.sampling.tree import TreePlan

__all__ = ["DRAFT_MASKINGS", "MAX_DRAFT_LENGTH", "Options"]

DRAFT_MASKINGS = ("fill", "probe")
MAX_DRAFT_LENGTH = 63
#: Positions per request unless the user asks for more: caches are reserved for every slot.
DEFAULT_LENGTH = 4096

#: Most drafts of a chain and of a tree where nobody says how many.
_AUTO_CHAIN = 7
_AUTO_TREE = 31

#: Whole numbers: lowest and highest value, and what else there is.
_WHOLE: dict[str, tuple[int, int, *tuple[str | None, ...]]] = {
    "max_batch_size": (1, 4096),
    "draft_length": (1, MAX_DRAFT_LENGTH, "auto"),
    "max_length": (2, 2**31 - 2, None),
    "page_size": (1, 1 << 16),
    "pages": (1, 2**31 - 2, None),
    "prefix_cache_bytes": (0, 2**62, None),
    "prefill_rows": (1, 1 << 20, "auto"),
    "grammar_threads": (1, 1024, None),
    "grammar_cache_bytes": (0, 2**62),
    "compile_threads": (1, 256),
    "ordinal": (0, 1023, None),
}
_SWITCHES = ("mask_drafts", "forced_drafts", "overlap", "programmatic", "timeline")
_CHOICES: dict[str, tuple[object, ...]] = {
    "draft_masking": DRAFT_MASKINGS,
    "verify": VERIFY_MODES,
    "composition": ("one", "two"),
    "grammar_transport": TRANSPORTS,
    "activations": ACTIVATIONS,
    "weights": WEIGHTS,
    "device": (None, "auto", "cuda", "soft"),
}


@dataclass(frozen=True)
class Options:
    """What an engine may be told besides its models.

    Parameters
    ----------
    max_batch_size : rows of a round, hence most requests that run at once.
    draft_length : drafts per round, 1 to 63, where anything drafts. "auto": none to 7, or to 31
        where they branch, in each round as many as promise most tokens per second, see
        `DraftBudget`, and more for requests whose drafts are accepted more often. Greedy and
        coupled outputs are the same whatever it is; rejection sampling is reproducible only with
        equal lengths, hence not with "auto".
    draft_tree : (branch, levels) lets drafts branch: a drafter keeps up to `branch` under a token,
        2 to 16, and `levels` of them, and the likeliest `draft_length` of all are verified. Those
        that come level by level are then probed, whatever `draft_masking` says. Or the paths of a
        tree whose shape is given: (0,) and (2,) are the likeliest draft and the third, (0, 1) what
        is second behind the first. None: a chain.
    max_length : positions per request, prompt and output; default what the target allows, at
        most 4096.
    page_size, pages : shape of the paged caches; by default every row's request can be full-length.
        Pages are taken as requests grow; with fewer, some wait or are preempted when they run out.
    prefix_cache_bytes : most bytes of pages that are kept when their request is over, and shared by
        requests that begin with the same tokens; those that nobody uses make room whenever
        somebody needs pages. Outputs are the same. None: all pages; 0: none.
    prefill_rows : most tokens of prompts that are prefilled between two rounds while any request is
        generating, so how late a round is for others' prompts. "auto": as many as take about as
        long as a round, see `Pieces`. Outputs are the same.
    mask_drafts : draft under the grammar's masks; False drafts blindly and verifies all the same.
    draft_masking : how masked drafts are: "fill" draws each under its mask row; "probe" has the
        grammar test the drafter's best candidates, which is cheaper, and fills all rows beside the
        next target forward. Probed drafts are verified as coupled. Where a drafter's logits are all
        there at once, as those of DFlash are, one step tests the candidates of all levels.
    forced_drafts : draft what the grammar forces. Without a drafter, where the text that follows is
        forced, its longest token; with one, whatever it thinks and whether its vocabulary has it,
        the token that is the one legal id (with "probe", where no candidate is). Such drafts are
        verified like others, so the distribution of outputs stays what it is; where one id is legal
        they are always accepted.
    verify : how the drafts of sampled requests that do not say are tested. "coupled": against the
        token that the target would draw with the same noise, so that drafts change no token.
        "rejection": where the drafter's distribution is at hand against that, all drafts of a round
        together ("block verification"), which accepts more and keeps the distribution; elsewhere as
        coupled. "per_token": the same, but one draft after the other, as it was first published.
        "relaxed": as coupled, but drafts that are likely enough pass (`Request.relaxed`), so that
        outputs are those of no model (`Output.exact`).
    grammar_backend : "auto", "xgrammar", "llguidance", or a callable that makes a `GrammarBackend`
        for a `Vocabulary`; for grammars that do not name their backend themselves. "auto" gives
        every JSON schema to a backend that enforces all of it, rewritten if need be, or refuses it.
    grammar_transport : how the grammar's steps are part of the graph: "native" (host nodes),
        "mailbox", "spinkernel", or "auto": the first of mailbox, spinkernel and native that works,
        given 4 usable cores; else native.
    grammar_threads : threads that serve the requests of a grammar step; default by batch and cores.
    grammar_budget_us : microseconds of processor time that a grammar step waits for one request,
        see `GuidedDecoder`; one that is late sits rounds out and resumes exactly. Greedy and
        coupled outputs are the same whatever it is; rejection sampling is reproducible where nobody
        was late (`counters()["grammar"]["late_rows"]`). None: a step waits for all.
    overlap : two rounds in flight; False launches a round when the last one was read. Outputs of
        greedy and coupled requests are the same either way.
    composition : "one": a round is one graph. "two": the drafter has graphs of its own, which the
        host launches behind verification and behind each grammar step that they wait for, with no
        overlap; slower, to measure what one graph gains. Outputs are the same.
    activations : what matrices of 16-bit weights are multiplied with on GPUs. "rounded": inputs
        rounded to the weights' type, as models are trained and served; sums, and all between the
        matrices, are float32. "float32": inputs kept to 16 bits of mantissa or more, at up to twice
        the arithmetic and the same traffic of weights.
    weights : of the target's decoder layers. "checkpoint": as stored. "fp8": rounded to E4M3 row by
        row while they are loaded, so that half as many bytes are read for every token; the model is
        then another one, a little. Embeddings, the output head and drafters stay as stored.
    programmatic : a model's kernel comes up while the one before it runs, see `Graph`. Outputs are
        the same.
    timeline : have the device stamp the border of every part of a round, which costs a kernel each
        (`EngineStats.part_ns`, traces); False: only where a round begins and ends.
    limits : what one request may cost the host, and how many may wait.
    compile_threads, compile_timeout_s : grammars compiled at once off the critical path, and the
        seconds that one may take in its process, whatever its backend.
    grammar_cache_bytes : bound of compiled grammars kept in memory.
    device, ordinal : "cuda", "soft" or None for the environment's choice, and which one.

    Raises
    ------
    OptionError
        Naming the option and its value.
    """

    max_batch_size: int = 8
    draft_length: int | str = 3
    draft_tree: tuple[int, int] | Sequence[tuple[int, ...]] | None = None
    max_length: int | None = None
    page_size: int = 16
    pages: int | None = None
    prefix_cache_bytes: int | None = None
    prefill_rows: int | str = "auto"
    mask_drafts: bool = True
    draft_masking: str = "fill"
    forced_drafts: bool = False
    verify: str = "rejection"
    grammar_backend: str | Callable[[Vocabulary], GrammarBackend] = "auto"
    grammar_transport: str = "auto"
    grammar_threads: int | None = None
    grammar_budget_us: float | None = 5000.0
    overlap: bool = True
    composition: str = "one"
    activations: str = "rounded"
    weights: str = "checkpoint"
    programmatic: bool = False
    timeline: bool = False
    limits: Limits = field(default_factory=Limits)
    compile_threads: int = 2
    compile_timeout_s: float = 30.0
    grammar_cache_bytes: int = CACHE_BYTES
    device: str | None = None
    ordinal: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high, *others) in _WHOLE.items():
            value = getattr(self, name)
            if value in others:
                continue
            if type(value) is not int or not low <= value <= high:
                numbers = f"a whole number from {low} to {high}"
                raise _bad(name, " or ".join([numbers, *map(repr, others)]), value)
        for name in _SWITCHES:
            if type(getattr(self, name)) is not bool:
                raise _bad(name, "True or False", getattr(self, name))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not (value is None or isinstance(value, str)) or value not in choices:
                raise _bad(name, "one of " + ", ".join(map(str, choices)), value)
        if self.tree is not None:
            self._check_tree(self.tree)
        _require_number("compile_timeout_s", self.compile_timeout_s, 0)
        if self.grammar_budget_us is not None:
            _require_number("grammar_budget_us", self.grammar_budget_us, 1)
        if not isinstance(self.limits, Limits):
            raise _bad("limits", "a Limits", self.limits)
        backends = ("auto", *BACKENDS)
        if not callable(self.grammar_backend) and self.grammar_backend not in backends:
            wanted = f"one of {', '.join(backends)} or make a GrammarBackend"
            raise _bad("grammar_backend", wanted, self.grammar_backend)
        if self.draft_masking == "probe" and not self.mask_drafts:
            raise OptionError("draft_masking 'probe' needs mask_drafts: blind ones are not probed")

    def _check_tree(self, tree: TreePlan) -> None:
        most = max(tree.levels, len(tree.paths))
        if most > self.most_drafts or (tree.levels - 1) * tree.branch > MAX_DRAFTS:
            raise OptionError(
                f"draft_tree {self.draft_tree} has no place: levels and paths are to be at most "
                f"draft_length {self.most_drafts}, and nodes before the last level, of which each "
                f"has room for {tree.branch}, {MAX_DRAFTS}"
            )
        if tree.paths and self.draft_length == "auto":
            raise OptionError("draft_length 'auto' has no say in a draft_tree whose shape is given")
        if self.forced_drafts:
            raise OptionError("forced_drafts needs mask rows while drafting, which a tree lacks")

    @property
    def most_drafts(self) -> int:
        """Most drafts of a round."""
        if isinstance(self.draft_length, int):
            return self.draft_length
        return _AUTO_TREE if self.draft_tree else _AUTO_CHAIN

    @property
    def tree(self) -> TreePlan | None:
        """What `draft_tree` asks for."""
        return None if self.draft_tree is None else TreePlan.of(self.draft_tree)

    @property
    def slack(self) -> int:
        """Positions beyond its last that a request's drafts use where they branch."""
        plan = self.tree
        return 0 if plan is None else max(self.most_drafts, (plan.levels - 1) * plan.branch)

    @property
    def slots(self) -> int:
        """Two per row: a row is taken over while a replay still names its last owner's slot."""
        return 2 * self.max_batch_size

    @property
    def positions(self) -> int:
        """Positions that one request may use, once the options are sized."""
        length, pages = self.sizes
        return min(length, self.page_size * pages - self.slack)

    @property
    def sizes(self) -> tuple[int, int]:
        """`max_length` and `pages` as numbers, once the options are sized."""
        if self.max_length is None or self.pages is None:
            raise OptionError("options must be sized for a target first (Options.sized)")
        return self.max_length, self.pages

    def sized(self, longest: int) -> Options:
        """The same with `max_length` and `pages` as numbers, for a target of `longest` positions.

        Raises
        ------
        OptionError
            When `max_length` is above it.
        """
        length = min(longest, DEFAULT_LENGTH) if self.max_length is None else self.max_length
        if length > longest:
            raise OptionError(f"max_length {length} is above the model's {longest} positions")
        every = self.max_batch_size * -(-(length + self.slack) // self.page_size)
        return replace(self, max_length=length, pages=every if self.pages is None else self.pages)


def _bad(name: str, wanted: str, value: Any) -> OptionError:
    return OptionError(f"{name} must be {wanted}, got {value!r}")


def _require_number(name: str, value: Any, low: float) -> None:
    if type(value) not in (int, float) or not low <= value < math.inf:
        raise _bad(name, f"a number from {low} on", value)
