"""Drafter protocol: the interface between a decoding round and the code that proposes tokens.

The drafts of a round form a tree whose row 0 is the last token of the slot: the parent of draft j
(from 1) is row ``parent[j] < j``. In a chain ``parent[j] = j - 1``. Drafts are made level by level,
as by a draft model, or all at once, as by a lookup.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from graft.cudagraph.device import Device
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.cache.kv import PagedKV
from graft.models.drafters.feed import Feed
from graft.models.errors import ConfigError, DrafterError
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows
from graft.models.tokenizer import Tokenizer
from graft.sampling.state import MAX_DRAFTS
from graft.sampling.tree import TreePlan

__all__ = ["DraftVocab", "Drafter", "DrafterContext", "MakeDrafter", "TreeShape"]


@dataclass(frozen=True)
class TreeShape:
    """Shape of the drafts of a round.

    Attributes
    ----------
    nodes
        Number of drafts per round; the target's forward pass has one more row per request.
    levels
        Rows per request that each drafter step is fed, one entry per step; empty if all drafts are
        made at once.
    branch
        Maximum number of children of a row; 1 for a chain.
    paths
        Paths of a tree of fixed shape, see `TreePlan`; empty if the tree grows by score.
    """

    nodes: int
    levels: tuple[int, ...] = ()
    branch: int = 1
    paths: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def by_level(drafts: int, tree: TreePlan | None = None) -> TreeShape:
        """Return the shape of drafts that are made level by level.

        Parameters
        ----------
        drafts
            Number of drafts of a chain or of a growing tree.
        tree
            Tree to grow; None for a chain.
        """
        plan = tree or TreePlan(1, drafts)
        if plan.paths:
            paths = [path for path in plan.paths if len(path) <= plan.levels]
            plan = TreePlan.of(paths)
        nodes = len(plan.paths) or drafts
        levels = (1, *(plan.branch,) * (plan.levels - 1))
        return TreeShape(nodes, levels, plan.branch, plan.paths)

    def check(self, max_drafts: int) -> None:
        """Check that a round can be built for this shape.

        Parameters
        ----------
        max_drafts
            Maximum number of drafts per round.

        Raises
        ------
        OptionError
            If the shape has too many drafts or is neither a chain nor a tree that graft verifies.
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
            raise OptionError(f"drafts of the shape {self} cannot be verified in a round")
        if is_tree and (steps > self.nodes or (steps - 1) * self.branch > MAX_DRAFTS):
            raise OptionError(
                f"a tree of {steps} levels with {self.branch} nodes does not fit in {self.nodes} "
                f"drafts per round, or in the limit of {MAX_DRAFTS}"
            )


@dataclass(frozen=True)
class DraftVocab:
    """Vocabulary of a drafter's logits.

    Attributes
    ----------
    size
        Number of columns.
    d2t
        int32[size], target id of each column; None if the column is the id.
    t2d
        int32[V], column of each target id, or -1; given exactly if `d2t` is.
    """

    size: int
    d2t: DeviceArray | None = None
    t2d: DeviceArray | None = None


class Drafter:
    """Base class of all drafters. A subclass sets `shape` and overrides what differs.

    Attributes
    ----------
    shape
        Shape of the drafts.
    feature_layers
        Ids of the target layers whose output residual streams the drafter reads, ascending.
    vocab
        Vocabulary of the logits, for a drafter that drafts level by level; else None.
    caches
        KV caches of the drafter; slots get pages in all of them.
    reads_mask_rows
        Whether `start` reads the mask rows of this round, which are filled after the commit. The
        drafter then waits for them.
    logits_at_once
        Whether `start` produces the logits of all levels, independent of the drafts chosen.
    lookahead
        Number of tokens after a position that its entries in `caches` depend on. None means that
        the entries depend on other state, so that they cannot be shared as prefixes. A drafter
        that sets it and keeps other state of a request overrides `resume`.
    """

    shape: TreeShape
    feature_layers: tuple[int, ...] = ()
    vocab: DraftVocab | None = None
    caches: tuple[PagedKV, ...] = ()
    reads_mask_rows: bool = False
    logits_at_once: bool = False
    lookahead: int | None = None

    @property
    def proposes(self) -> bool:
        """Whether `start` writes drafts to ``feed.proposal``."""
        return not self.shape.levels

    def prefill(
        self, lane: Lane, rows: Rows, next_rows: Rows, features: DeviceArray | None
    ) -> None:
        """Process a chunk of a prompt. A chunk is one graph launch and may contain padding rows.

        Parameters
        ----------
        lane
            Lane that the work is added to.
        rows
            Tokens at their positions; the last chunk includes the last token of the prompt.
        next_rows
            The token that FOLLOWS each position, for all positions but the last.
        features
            float32[R, layers * hidden], features of the target at the positions of `next_rows`.
        """

    def resume(self, lane: Lane, rows: Rows) -> None:
        """Process the tokens of a cached prefix, whose entries in `caches` already exist."""

    def start(self, lane: Lane, feed: Feed) -> DeviceArray | None:
        """Process the tokens that this round committed and start to draft.

        If ``feed.width`` is 1 no drafts are needed; results are then not read.

        Returns
        -------
        DeviceArray or None
            Logits of level 0, float32[B, Vd]; None from a drafter that writes all drafts to
            ``feed.proposal``.
        """
        raise DrafterError(f"{type(self).__name__} does not define start")

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        """Process the drafts of `level` (from 1) and return their logits, float32[B * branch, Vd].

        Called only for a drafter that drafts level by level.
        """
        raise DrafterError(f"{type(self).__name__} drafts level by level but does not define step")

    def all_levels(self, feed: Feed) -> DeviceArray:
        """Return the logits of all levels after `start`, float32[levels * B, Vd], level by level.

        Called only if `logits_at_once` is set.
        """
        raise DrafterError(
            f"{type(self).__name__} sets logits_at_once but does not define all_levels"
        )

    def failure(self, slot: int, epoch: int) -> DrafterError | None:
        """Return the error with which the drafter ended the request of a slot, if it did."""
        return None


@dataclass(frozen=True)
class DrafterContext:
    """Arguments of every drafter.

    Attributes
    ----------
    device, target, tokenizer
        Those of the engine.
    max_drafts
        Maximum number of drafts per round.
    tree
        Tree to draft; None for a chain.
    slots
        Number of request slots.
    max_length
        Maximum number of positions per slot.
    max_rows
        Maximum number of rows of a call: of a prefill chunk, or of all requests in a round.
    make_cache
        Creates a KV cache of the engine's size from layers, kv_heads, head_dim and dtype.
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
    """Check that the target has the config that a drafter was trained for.

    Raises
    ------
    ConfigError
        If a field of the target's config has another value.
    """
    for name, value in expected.items():
        actual = getattr(target.config, name)
        if actual != value:
            raise ConfigError(
                f"the drafter was made for a target with {name} {value}, but this target has "
                f"{actual}"
            )


#: A drafter class or another callable; an engine calls it once.
MakeDrafter = Callable[[DrafterContext], Drafter]
#: A checkpoint folder, the name ``module:attribute`` of a `MakeDrafter`, or a `MakeDrafter`.
DrafterChoice = str | Path | MakeDrafter
