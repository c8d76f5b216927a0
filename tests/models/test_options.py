"""Engine options: types, ranges and invalid combinations."""

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
from engine_util import TARGET

from graft.cudagraph import OptionError
from graft.cudagraph.ranks.ranks import RankGroup
from graft.models import Engine, Limits, Options
from graft.models.drafters import CascadeDrafter, NGram, UserDrafter
from graft.models.engine.options import EngineOptions, InternalOptions, meaning
from graft.sampling.tree import TreePlan

WRONG = (
    object(),
    b"x",
    [],
    (),
    {},
    1j,
    float("nan"),
    float("inf"),
    -1,
    0,
    2**70,
    "no",
    "2",
    True,
    2.5,
    10**400,
    10**5000,
    np.arange(2),
)
#: Values in `WRONG` that are valid for an option.
RIGHT = {
    "forced_drafts": (True,),
    "device_automata": (True,),
    "overlap": (True,),
    "programmatic": (True,),
    "timeline": (True,),
    "grammar_budget_us": (2.5, 2**70),
    "mask_row_bytes": (0,),
    "prefix_cache_bytes": (0,),
}
#: A draft tree of five nodes, in no particular order.
TREE_PATHS = [(1,), [0, 2], (0,), (1, 0, 1), (1, 0)]
#: Options for which None is invalid.
NEEDED = {"max_batch_size", "page_size", "draft_length", "overlap", "timeline"}


def test_engine_options_have_the_types_of_options():
    assert get_type_hints(EngineOptions) == get_type_hints(Options)


@pytest.mark.parametrize("kind", [Options, InternalOptions])
def test_options_reject_invalid_values(kind):
    for field in fields(kind):
        check_rejects_invalid_values(kind, field.name)


def check_rejects_invalid_values(kind, name):
    """Values are not converted. For example, "no" is not accepted as a boolean, nor 2.0 as 2."""
    values = list(WRONG)
    if name in NEEDED:
        values.append(None)
    for value in values:
        valid = RIGHT.get(name, ())
        if any(type(value) is type(other) and value == other for other in valid):
            continue
        with pytest.raises(OptionError, match=f"^{name} must be"):
            kind(**{name: value})


@pytest.mark.parametrize(
    "tree",
    [
        (1, 2),
        (17, 2),
        (2, 0),
        (2, True),
        (2, 2, 2),
        [(0,), (0,)],
        [(0, 0)],
        [(0,), ()],
        [(0,), (-1,)],
        [(0,), (1.0,)],
        [(16,)],
        [(0,), 1],
        [(n, 0)[:k] for n in range(16) for k in (1, 2)] + [(16,)],
    ],
)
def test_options_reject_invalid_draft_tree(tree):
    """A tree needs valid sizes, or distinct paths that include the parent of each path.

    A node may have at most 16 children, and at most 16 nodes of a level may have children.
    """
    with pytest.raises(OptionError, match=r"^draft_tree must be"):
        Options(draft_tree=tree, draft_length=40)


def test_tree_plan_sorts_paths():
    """The plan of a tree that is given as paths sorts them by level, then by rank.

    Its branch is the maximum of two numbers: the children of a node, and the nodes of a level that
    have children. The drafter processes the latter together.
    """
    plan = Options(draft_tree=TREE_PATHS, draft_length=5).tree
    assert plan == (3, 3, ((0,), (1,), (0, 2), (1, 0), (1, 0, 1)))
    assert plan.table().tolist() == [0, 1, -1, -1, -1, 3, 0, *[-1] * 5, -1, 3, *[-1] * 7]
    assert TreePlan.of([(n, 0)[:k] for n in range(5) for k in (1, 2)])[:2] == (5, 2)


#: Calls that raise an OptionError before a model is read, with words of the error.
INVALID_CALLS = {
    "unknown option": (
        lambda: Engine("no such folder", batch=3),
        "unknown option batch; the options are draft_length",
    ),
    "type of an option": (
        lambda: Engine("no such folder", max_batch_size="2"),
        "max_batch_size must be an integer from 1 to 4096",
    ),
    "model": (lambda: Engine(5), "model must be the path of a checkpoint folder, got 5"),
    "drafter": (lambda: Engine("no such folder", drafter=2.0), "drafter must be .* got 2.0"),
    "drafter callable": (
        lambda: Engine(TARGET, drafter=int),
        "drafter int raised TypeError: int.. argument must be.*UserDrafter",
    ),
    "drafter callable without drafter": (
        lambda: Engine(TARGET, drafter=type),
        "returned type, not a Drafter",
    ),
    "grammar backend callable": (
        lambda: Engine(TARGET, grammar_backend=int),
        "grammar_backend <class 'int'>: TypeError: int.. argument must be",
    ),
    "ranks": (
        lambda: Engine("no such folder", ranks=5),
        "ranks must be a RankGroup or None, got 5",
    ),
    "loops with ranks": (
        lambda: Engine("no such folder", ranks=object.__new__(RankGroup), generation="graph"),
        "generation='graph' cannot be combined with tensor parallelism",
    ),
    "loops with host drafter": (
        lambda: Engine("no such folder", UserDrafter.of(list), generation="graph"),
        "generation='graph' requires a drafter that runs on the device",
    ),
    "loops with cascade of host drafter": (
        lambda: Engine(
            "no such folder",
            partial(CascadeDrafter, first=UserDrafter.of(list), then="folder"),
            generation="graph",
        ),
        "generation='graph' requires a drafter that runs on the device",
    ),
    "forced drafts that are not masked": (
        lambda: Engine("no such folder", NGram, forced_drafts=True, draft_masking="none"),
        "forced_drafts cannot be combined with draft_masking='none'",
    ),
    "forced drafts with lookup": (
        lambda: Engine(TARGET, NGram, forced_drafts=True),
        "forced_drafts cannot be combined with a drafter that proposes token ids",
    ),
    "tree without drafter": (
        lambda: Engine("no such folder", draft_tree=(2, 2), draft_length=4),
        r"draft_tree \(2, 2\) requires a drafter",
    ),
    "tree larger than draft_length": (
        lambda: Options(draft_tree=TREE_PATHS, draft_length=4),
        "at most draft_length 4",
    ),
    "limits": (lambda: Limits(waiting="3"), "Limits.waiting"),
    "negative limit": (lambda: Limits(waiting_tokens=-1), "Limits.waiting_tokens"),
    "negative size limit": (lambda: Limits(prompt_bytes=-1), "Limits.prompt_bytes"),
    "time limit": (lambda: Limits(compile_s=0), "Limits.compile_s must be a positive number"),
    "size limit None": (lambda: Limits(stop_strings=None), "Limits.stop_strings"),
    "positions before sized": (lambda: Options().positions, r"call Options\.sized first"),
    "max_length": (
        lambda: Options(max_length=200).sized(100),
        "max_length 200 is greater than the model",
    ),
}


@pytest.mark.parametrize(("call", "words"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_engine_and_options_reject_invalid_arguments(device, call, words):
    with pytest.raises(OptionError, match=words):
        call()


def test_engine_accepts_options(device):
    with Engine(TARGET, max_batch_size=2, limits=Limits(waiting=1)) as engine:
        assert engine.options.max_batch_size == 2 and engine.options.positions == 1024


def test_options_sized_for_target():
    """By default, there are pages for a full-length request in every batch row."""
    assert Options(max_batch_size=3).sized(100).sizes == (100, 21)
    assert Options().sized(1 << 17).sizes[0] == 4096
    assert Options(pages=2, internal=InternalOptions(page_size=8)).sized(100).positions == 16


def test_page_lists_options_with_their_meaning():
    """The table of the page has each option with its default and its meaning, in this order."""
    page = (Path(__file__).parents[2] / "models" / "README.md").read_text(encoding="utf-8")
    section = page.split("\n## Options\n")[1].split("\n## ")[0]
    rows = []
    for field in fields(Options):
        if field.name == "internal":
            continue
        default = "`Limits()`" if field.name == "limits" else f"`{field.default!r}`"
        assert meaning(field.name)
        rows.append(f"| `{field.name}` | {default} | {meaning(field.name)} |")
    assert len(rows) <= 18
    assert [line for line in section.splitlines() if line.startswith("| `")] == rows
