"""Drafter protocol: the interface between a decoding round and the code that proposes tokens.

A draft is a proposed token. Every decoding round proposes drafts for every request, verifies all
drafts in one forward pass of the target, and commits the accepted drafts. The drafts of a request
form a tree. Node 0, the root, is the last committed token of the request; the drafts are nodes 1,
2, and so on. The parent of draft j is node ``parent[j] < j``; in a chain, ``parent[j] = j - 1``. A
draft model makes the drafts level by level, where a level is the set of drafts of equal depth. A
lookup, such as `NGram`, makes all drafts at once.

A drafter does not launch kernels itself. It adds them to a `Lane`, an in-order sequence of work
that becomes a part of a CUDA graph or runs on a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.models.cache.kv import PagedKV
from graft.models.drafters.feed import Feed
from graft.models.errors import ConfigError, DrafterError
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows
from graft.models.tokenizer import Tokenizer
from graft.sampling.rows import DraftVocab
from graft.sampling.state import MAX_DRAFTS
from graft.sampling.tree import TreePlan

__all__ = ["Drafter", "DrafterContext", "MakeDrafter", "TreeShape"]


@dataclass(frozen=True)
class TreeShape:
    """Shape of the drafts of a round.

    Attributes
    ----------
    nodes
        Number of drafts per request and round. The target's forward pass has ``nodes + 1`` rows
        per request.
    levels
        Number of input rows per request for each call of `Drafter.step`, in the order of the calls.
        Empty if the drafter makes all drafts at once.
    branch
        Maximum number of children of a node; 1 for a chain.
    paths
        Paths from the root that make up a tree of fixed shape, in the form of `TreePlan`. Empty
        for a chain, and for a tree whose nodes are chosen by their scores.
    """

    nodes: int
    levels: tuple[int, ...] = ()
    branch: int = 1
    paths: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def by_level(drafts: int, tree: TreePlan | None = None) -> TreeShape:
        """Return the shape for a drafter that makes its drafts level by level.

        `drafts` is the number of drafts of a chain (`tree` is None), or of a tree whose nodes are
        chosen by their scores. It is not used for a tree of fixed shape, whose paths determine the
        number of drafts.
        """
        plan = tree or TreePlan(1, drafts)
        if plan.paths:
            paths = [path for path in plan.paths if len(path) <= plan.levels]
            plan = TreePlan.of(paths)
        nodes = len(plan.paths) or drafts
        levels = (1, *(plan.branch,) * (plan.levels - 1))
        return TreeShape(nodes, levels, plan.branch, plan.paths)

    def check(self, max_drafts: int) -> None:
        """Raise OptionError unless a round can be built for this shape.

        A shape is refused if it has more than `max_drafts` drafts, or is neither a chain nor a tree
        that a round can verify.
        """
        if not 1 <= self.nodes <= max_drafts:
            raise OptionError(f"{self.nodes} drafts per round, expected 1 to {max_drafts}")
        steps = len(self.levels)
        is_chain = self.branch == 1 and self.levels in ((), (1,) * self.nodes)
        tree_levels = (1, *(self.branch,) * (steps - 1))
        is_tree = self.branch > 1 and self.levels in ((), tree_levels)
        matches_paths = True
        if self.paths:
            matches_paths = self == TreeShape.by_level(0, TreePlan.of(self.paths))
        if not (is_chain or is_tree) or not matches_paths:
            raise OptionError(
                f"drafts of the shape {self} cannot be verified in a round; use a chain, or create "
                "the shape with TreeShape.by_level"
            )
        if is_tree and (steps > self.nodes or (steps - 1) * self.branch > MAX_DRAFTS):
            raise OptionError(
                f"a tree of {steps} levels with {self.branch} nodes does not fit in {self.nodes} "
                f"drafts per round, or in the limit of {MAX_DRAFTS}; use fewer levels or branches"
            )


class Drafter:
    """Base class of all drafters.

    A subclass sets `shape`, implements `start`, and overrides the other methods and attributes
    whose defaults do not fit.

    Attributes
    ----------
    feature_layers
        Ids of the target layers, ascending, whose output residual streams the drafter reads.
    vocab
        Vocabulary of the logits; None for a drafter that makes all drafts at once.
    num_candidates
        Number of ids per position that the drafter scores; None if its logits rank all ids. If it
        is a number, the drafts are probed even with ``draft_masking="auto"``: the grammar tests the
        scored ids first, and then the most likely other ids, until it has tested 16.
    caches
        KV caches of the drafter. The engine allocates pages for every slot in each of these caches.
    reads_mask_rows
        Whether `start` reads the mask rows that the grammar fills after this round has committed
        its tokens. The round then runs `start` after these rows have been filled.
    logits_at_once
        Whether `start` produces the logits of all levels, because they do not depend on the drafts
        chosen at earlier levels.
    feeds_blocks
        Whether the drafter processes rows at positions after the last draft that can be accepted.
        The engine reserves these positions if the object that is passed as its argument `drafter`
        has this attribute: a drafter class inherits it, and a function needs the line
        ``function.feeds_blocks = True``.
    runs_on_host
        Whether the drafter adds host work to the round. Such a drafter cannot be combined with
        ``generation="graph"``.
    lookahead
        Number of tokens after a position on which the entries of this position in `caches` depend,
        in addition to the tokens up to the position. None means that the entries depend on other
        state, so that the prefix cache cannot share them. A drafter that sets `lookahead` and keeps
        state of a request outside `caches` must override `resume`.
    """

    shape: TreeShape
    feature_layers: tuple[int, ...] = ()
    vocab: DraftVocab | None = None
    num_candidates: int | None = None
    caches: tuple[PagedKV, ...] = ()
    reads_mask_rows: bool = False
    logits_at_once: bool = False
    feeds_blocks: bool = False
    runs_on_host: bool = False
    lookahead: int | None = None

    @property
    def proposes(self) -> bool:
        """Whether `start` writes drafts to ``feed.proposal``."""
        return not self.shape.levels

    def prefill(
        self, lane: Lane, rows: Rows, next_rows: Rows, features: DeviceArray | None
    ) -> None:
        """Process a chunk of a prompt.

        Each chunk is processed in one graph launch and may contain padding rows.

        Parameters
        ----------
        rows
            Tokens of the chunk at their positions. The last chunk includes the last prompt token.
        next_rows
            Rows that pair each position with the token AFTER that position. They cover all
            positions of the prompt except the last.
        features
            float32[R, layers * hidden], features of the target at the positions of `next_rows`.
            None if `feature_layers` is empty.
        """

    def resume(self, lane: Lane, rows: Rows) -> None:
        """Update the drafter's state for prompt tokens whose pages are in the prefix cache.

        The pages contain the entries of `caches`, so only other state has to be updated.
        """

    def start(self, lane: Lane, feed: Feed) -> DeviceArray | None:
        """Process the tokens that this round committed and make the first drafts.

        Return the logits of level 0, float32[B, Vd], where Vd is the size of the draft vocabulary.
        The sampler may change these logits in place (logit bias, penalties). A drafter that writes
        all drafts to ``feed.proposal`` returns None.

        If ``feed.width`` is 1, the next round verifies no drafts. The engine then ignores the
        result.
        """
        raise DrafterError(f"{type(self).__name__} does not define start")

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        """Process the drafts at depth `level`, from 1, and return the logits of their children.

        The engine calls this method only for a drafter that drafts level by level. The logits are
        float32[B * branch, Vd]; the sampler may change them in place.
        """
        raise DrafterError(f"{type(self).__name__} drafts level by level but does not define step")

    def all_levels(self, feed: Feed) -> DeviceArray:
        """Return the logits of all levels, float32[levels * B, Vd], ordered by level.

        The engine calls this method after `start`, and only if `logits_at_once` is set.
        """
        raise DrafterError(
            f"{type(self).__name__} sets logits_at_once but does not define all_levels"
        )

    def failure(self, slot: int, epoch: int) -> DrafterError | None:
        """Return the error with which the drafter terminated a request, or None if it did not.

        `epoch` is the number of the slot assignment (`RequestState.epoch`). It distinguishes the
        request from earlier requests of the same slot.
        """
        return None


@dataclass(frozen=True)
class DrafterContext:
    """Arguments that the engine passes to every drafter that it creates.

    Attributes
    ----------
    max_drafts
        Maximum number of drafts per round.
    tree
        Tree to draft; None for a chain.
    slots
        Number of request slots, which is twice the maximum batch size.
    max_length
        Maximum number of positions per slot.
    max_rows
        Maximum number of rows that one call processes: the rows of a prefill chunk, or the rows of
        all requests of a round.
    make_cache
        Function that creates a KV cache with as many positions as the KV cache of the target. Its
        arguments are layers, kv_heads, head_dim and dtype.
    """

    device: Device
    target: LlamaModel
    tokenizer: Tokenizer
    max_drafts: int
    tree: TreePlan | None
    slots: int
    max_length: int
    max_rows: int
    make_cache: Callable[[int, int, int, str], PagedKV] = field(repr=False)


def check_target(target: LlamaModel, **expected: int) -> None:
    """Raise ConfigError unless the fields of the target's config have the `expected` values."""
    for name, value in expected.items():
        actual = getattr(target.config, name)
        if actual != value:
            raise ConfigError(
                f"the drafter was made for a target with {name} {value}, but this target has "
                f"{name} {actual}"
            )


#: A drafter class or another callable that creates a drafter. An engine calls it once.
MakeDrafter = Callable[[DrafterContext], Drafter]
#: A checkpoint folder, the name ``module:attribute`` of a `MakeDrafter`, or a `MakeDrafter`.
DrafterChoice = str | Path | MakeDrafter
