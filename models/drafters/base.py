"""What drafts: the protocol between a round and whatever proposes tokens to it.

A round's drafts are a tree whose row 0 is the slot's last token: draft j (from 1) hangs on row
``parent[j] < j``. A chain is ``parent[j] = j - 1``. Drafts come level by level, as a model makes
them, or all at once.
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
    """Shape of a round's drafts.

    Parameters
    ----------
    nodes : drafts per round; the target's forward has one row more.
    levels : rows that each step feeds per request, one entry a step; empty: drafts come at once.
    branch : most children of a row; 1 is a chain.
    paths : of a tree whose shape is given, see `TreePlan`.
    """

    nodes: int
    levels: tuple[int, ...] = ()
    branch: int = 1
    paths: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def by_level(drafts: int, tree: TreePlan | None = None) -> TreeShape:
        """A chain whose drafts come one by one, or a tree that grows."""
        plan = tree or TreePlan(1, drafts)
        if plan.paths:
            plan = TreePlan.of([path for path in plan.paths if len(path) <= plan.levels])
        nodes = len(plan.paths) or drafts
        levels = (1, *(plan.branch,) * (plan.levels - 1))
        return TreeShape(nodes, levels, plan.branch, plan.paths)

    def check(self, most: int) -> None:
        """Refuse what no round can be built for, or what has more than `most` drafts.

        Raises
        ------
        OptionError
            Naming the shape.
        """
        if not 1 <= self.nodes <= most:
            raise OptionError(f"{self.nodes} drafts a round, of the 1 to {most} asked for")
        steps = len(self.levels)
        chain = self.branch == 1 and self.levels in ((), (1,) * self.nodes)
        tree = self.branch > 1 and self.levels in ((), (1, *(self.branch,) * (steps - 1)))
        planned = not self.paths or self == TreeShape.by_level(0, TreePlan.of(self.paths))
        if not (chain or tree) or not planned:
            raise OptionError(f"no round verifies drafts of the shape {self}")
        if tree and (steps > self.nodes or (steps - 1) * self.branch > MAX_DRAFTS):
            raise OptionError(
                f"a tree of {steps} levels of {self.branch} has no place in {self.nodes} drafts "
                f"a round, or in {MAX_DRAFTS}"
            )


@dataclass(frozen=True)
class DraftVocab:
    """Columns of a drafter's logits.

    Attributes
    ----------
    size : how many.
    d2t : int32 [size], target id of each; None: the column is the id.
    t2d : int32 [V], column of each target id or -1; given exactly when ``d2t`` is.
    """

    size: int
    d2t: DeviceArray | None = None
    t2d: DeviceArray | None = None


class Drafter:
    """Base of all drafters; a subclass sets `shape` and what of the rest is not as here.

    Attributes
    ----------
    shape : the drafts it makes.
    taps : OUTPUT ids of the target's layers whose residual streams it reads, ascending.
    vocab : of its logits, for a drafter that comes level by level; else None.
    caches : paged keys and values of its own; slots get pages in all of them.
    reads_rows : whether `start` reads the mask rows made after the commit, and waits for them.
    at_once : whether the logits of all levels are there after `start`, whatever is drafted.
    lookahead : tokens behind a position that its entries in `caches` depend on; None: entries are
        of use only to whoever was fed what is before them, so prefixes are not shared. Who sets it
        and keeps anything else of a text has a method `resume`.
    """

    shape: TreeShape
    taps: tuple[int, ...] = ()
    vocab: DraftVocab | None = None
    caches: tuple[PagedKV, ...] = ()
    reads_rows: bool = False
    at_once: bool = False
    lookahead: int | None = None

    @property
    def proposes(self) -> bool:
        """Whether `start` writes drafts to ``feed.proposal``."""
        return not self.shape.levels

    def prefill(self, lane: Lane, own: Rows, following: Rows, features: DeviceArray | None) -> None:
        """Absorb a part of a prompt. A part is a graph's launch: rows may be padding.

        Parameters
        ----------
        own : tokens at their positions; the prompt's last token too, in its last part.
        following : the token BEHIND each position but the last.
        features : of the target at the positions of `following`, float32 [R, taps * hidden].
        """

    def resume(self, lane: Lane, own: Rows) -> None:
        """Learn of the tokens of a prefix whose entries in `caches` are there already."""

    def start(self, lane: Lane, feed: Feed) -> DeviceArray | None:
        """Absorb what this round committed; return the logits of level 0, float32 [B, Vd].

        A drafter whose drafts come all at once writes them to ``feed.proposal`` and returns None.
        With a ``feed.width`` of 1 no drafts are wanted: what it writes or returns is not read.
        """
        raise DrafterError(f"{type(self).__name__} has no method start")

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        """Feed the drafts of `level`, from 1 on; return their logits, float32 [B * branch, Vd]."""
        raise DrafterError(f"{type(self).__name__} drafts level by level and has no method step")

    def all_levels(self, feed: Feed) -> DeviceArray:
        """Logits of all levels after `start`, float32 [levels * B, Vd], a level's rows together."""
        raise DrafterError(f"{type(self).__name__} is at_once and has no method all_levels")

    def failure(self, slot: int, epoch: int) -> DrafterError | None:
        """Why it has ended a request on the device, if it has."""
        return None


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is made from.

    Attributes
    ----------
    device, target, tokenizer : of the engine.
    drafts : most drafts per round: what the engine was asked for.
    tree : the tree to draft, where one was asked for.
    slots, length : requests that have a place, and positions that each may use.
    max_rows : most rows of one call: a prefill chunk, or every request's tokens of a round.
    cache : makes a paged cache of the engine's shape: layers, kv_heads, head_dim, dtype.
    """

    device: Device
    target: LlamaModel
    tokenizer: Tokenizer
    drafts: int
    tree: TreePlan | None
    slots: int
    length: int
    max_rows: int
    cache: Callable[[int, int, int, str], PagedKV] = field(repr=False)


def check_target(target: LlamaModel, **made_for: int) -> None:
    """Raise ConfigError when a drafter was made for a target whose config says otherwise."""
    for name, wanted in made_for.items():
        if (given := getattr(target.config, name)) != wanted:
            raise ConfigError(
                f"the drafter is for a target of {name} {wanted}; this target's is {given}"
            )


#: A drafter's class, or any callable; an engine calls it once.
MakeDrafter = Callable[[DrafterContext], Drafter]
#: A folder with a checkpoint, ``module:name`` of a `MakeDrafter`, or one itself.
DrafterChoice = str | Path | MakeDrafter
