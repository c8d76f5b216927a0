"""Draft modes: how a round generates its drafts and applies the grammar to them."""

from __future__ import annotations

from dataclasses import dataclass

from graft.cudagraph.driver.cstruct import read_numbers
from graft.cudagraph.errors import OptionError
from graft.cudagraph.kernels.compiler import INCLUDE_ROOT
from graft.sampling.checks import check_range

__all__ = ["MASKINGS", "MAX_BRANCH", "MAX_CANDIDATES", "TREE_CANDIDATES", "DraftMode"]

#: Header of ``DRAFT_MODE_*`` and of the records that kernels, grammar worker and host exchange.
RECORDS_HEADER = INCLUDE_ROOT / "native" / "records" / "exchange.h"
_NUMBERS = read_numbers(RECORDS_HEADER)

#: Number of candidates per node if the grammar tests a tree level by level: one per bit of a word.
TREE_CANDIDATES = 32
#: Maximum number of candidates per draft or level.
MAX_CANDIDATES = 64
#: Maximum number of children per node.
MAX_BRANCH = 32
#: Maximum number of drafts, and of nodes fed to the drafter. Kernels store a set of them as the
#: bits of a 64-bit integer.
_MAX_NODES = 64

#: Strategies that apply the grammar to drafts, see `graft.models.round.masking`.
MASKINGS = ("none", "fill", "probe", "lattice-probe")

#: All modes: the values of ``DRAFT_MODE_*`` by kind of draft and masking.
_MODES = {
    ("proposed", "none"): _NUMBERS["DRAFT_MODE_PROPOSED"],
    ("chain", "none"): _NUMBERS["DRAFT_MODE_CHAIN"],
    ("chain", "fill"): _NUMBERS["DRAFT_MODE_CHAIN_FILL"],
    ("chain", "probe"): _NUMBERS["DRAFT_MODE_CHAIN_PROBE"],
    ("chain", "lattice-probe"): _NUMBERS["DRAFT_MODE_CHAIN_LATTICE"],
    ("tree", "none"): _NUMBERS["DRAFT_MODE_TREE"],
    ("tree", "probe"): _NUMBERS["DRAFT_MODE_TREE_PROBE"],
    ("tree", "lattice-probe"): _NUMBERS["DRAFT_MODE_TREE_LATTICE"],
}


@dataclass(frozen=True, kw_only=True)
class DraftMode:
    """How the drafts of a round are generated and masked, with the sizes that follow from it.

    =========  ==================================  ======================================
    kind       drafts                              masking
    =========  ==================================  ======================================
    proposed   token ids, all at once              "none"
    chain      sampled from logits, one per level  "none", "fill", "probe", "lattice-probe"
    tree       best nodes by logits, per level     "none", "probe", "lattice-probe"
    =========  ==================================  ======================================

    A drafter that generates a chain or a tree from logits may also propose token ids. The proposed
    ids are then the first drafts, and the drafts from logits follow them.

    With "none", the grammar does not constrain the drafts. With "fill", each draft is sampled under
    a mask row. With "probe", the grammar tests the drafter's candidates for one draft or level.
    With "lattice-probe", it tests the candidates of all levels in one step; this requires a drafter
    that computes the logits of all levels at once.

    Parameters
    ----------
    drafts
        Maximum number of drafts that a round verifies per request, at most 64.
    levels
        Number of levels whose logits the drafter computes; 0 if it only proposes token ids.
    branch
        Maximum number of children per node, and of nodes that are fed to the drafter per level; 1
        for a chain.
    masking
        One of `MASKINGS`.
    candidates
        Number of token ids per draft, node or level that the grammar tests; 0 if `masking` is
        "none" or "fill".
    paths
        Shape of a fixed tree: for each draft, the ranks of the nodes on its path. Empty: the most
        likely nodes become drafts.

    Raises
    ------
    OptionError
        If the combination of kind and masking does not exist, or a size is out of range.
    """

    drafts: int
    levels: int = 0
    branch: int = 1
    masking: str = "none"
    candidates: int = 0
    paths: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check_range("drafts", self.drafts, 0, _MAX_NODES)
        check_range("levels", self.levels, 0, self.drafts)
        check_range("branch", self.branch, 1, MAX_BRANCH)
        if (self.kind, self.masking) not in _MODES:
            allowed = ", ".join(repr(m) for kind, m in _MODES if kind == self.kind)
            raise OptionError(
                f"masking of {self.kind} drafts must be one of {allowed}, got {self.masking!r}"
            )
        check_range("nodes fed to the drafter", self.fed_nodes, 0, _MAX_NODES)
        if not self.probes:
            low, high = 0, 0
        elif self.kind == "tree" and not self.is_lattice:
            low, high = TREE_CANDIDATES, TREE_CANDIDATES
        else:
            low, high = 1, MAX_CANDIDATES
        check_range("candidates", self.candidates, low, high)

    @classmethod
    def chain(cls, drafts: int, masking: str = "fill", candidates: int = 0) -> DraftMode:
        """Return the mode of a chain with one draft per level.

        If `drafts` is 0, return the mode of a round without drafts. Its `kind` is "proposed",
        because no drafts are sampled.
        """
        if drafts == 0:
            return cls(drafts=0)
        return cls(drafts=drafts, levels=drafts, masking=masking, candidates=candidates)

    @property
    def value(self) -> int:
        """Value of ``DRAFT_MODE_*`` in native/records/exchange.h."""
        return _MODES[self.kind, self.masking]

    @property
    def kind(self) -> str:
        """Kind of draft: "proposed", "chain" or "tree"."""
        if self.levels == 0:
            return "proposed"
        return "tree" if self.branch > 1 else "chain"

    @property
    def masked(self) -> bool:
        """Whether drafts are restricted to tokens that the grammar accepts."""
        return self.masking != "none"

    @property
    def probes(self) -> bool:
        """Whether the grammar tests candidates of the drafter."""
        return self.masking in ("probe", "lattice-probe")

    @property
    def is_lattice(self) -> bool:
        """Whether one grammar step tests the candidates of all levels."""
        return self.masking == "lattice-probe"

    @property
    def is_lattice_tree(self) -> bool:
        """Whether the grammar chooses each draft tree from the candidates of all levels at once."""
        return self.is_lattice and self.branch > 1

    @property
    def grows_tree(self) -> bool:
        """Whether drafts are a tree that grows level by level, see `TreeSampler`."""
        return self.kind == "tree" and not self.is_lattice

    @property
    def fed_nodes(self) -> int:
        """Number of nodes fed to the drafter per request and round, over all levels of a tree.

        It is 0 unless drafts are a tree that grows level by level.
        """
        return (self.levels - 1) * self.branch if self.grows_tree else 0

    @property
    def recorded_drafts(self) -> int:
        """Maximum number of ids in a ``Drafted`` record.

        The record has the ids of the drafts. While a tree grows level by level, its drafts have not
        been chosen yet, and the record has the ids of the nodes that are fed to the drafter.
        """
        return max(self.drafts, self.fed_nodes)

    @property
    def candidate_words(self) -> int:
        """Number of 32-bit words that follow a ``Candidates`` record.

        They are the ids of the candidates and, with masking "lattice-probe", their probabilities.
        """
        if self.is_lattice:
            return 2 * self.levels * self.candidates
        return self.branch * self.candidates

    @property
    def answer_words(self) -> int:
        """Number of 32-bit words that follow an ``Answer`` record.

        With masking "lattice-probe", they are the ids and the parents of the drafts. For a tree
        that grows level by level, they are the bits of the legal candidates of each node.
        """
        if self.is_lattice:
            return 2 * self.drafts
        return self.branch if self.grows_tree else 0

    @property
    def tables(self) -> int:
        """Number of tables of draft probabilities per slot, at least 1."""
        return 1 if self.kind == "proposed" or self.grows_tree else self.levels

    @property
    def rows_per_request(self) -> int:
        """Maximum number of rows of logits per request that one launch processes.

        The target has one row per draft and one more. The drafter has `branch` rows per level.
        """
        return max(self.drafts + 1, self.branch)
