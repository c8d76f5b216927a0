"""Engine options: types, ranges and invalid combinations."""

from dataclasses import fields

import pytest
from engine_util import TARGET

from graft.cudagraph import OptionError
from graft.models import Engine, Limits, Options
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
)
#: Values in `WRONG` that are valid for an option.
RIGHT = {
    "mask_drafts": (True,),
    "forced_drafts": (True,),
    "overlap": (True,),
    "programmatic": (True,),
    "timeline": (True,),
    "grammar_budget_us": (2.5, 2**70),
    "compile_timeout_s": (2.5, 2**70, 0),
    "grammar_cache_bytes": (0,),
    "prefix_cache_bytes": (0,),
    "ordinal": (0,),
}
#: Options for which None is invalid.
NEEDED = {"max_batch_size", "page_size", "draft_length", "overlap"}


@pytest.mark.parametrize("name", [field.name for field in fields(Options)])
def test_options_reject_invalid_values(name):
    """Values are not converted: "no" is no boolean, and 2.0, "2" and True are no integers."""
    values = list(WRONG)
    if name in NEEDED:
        values.append(None)
    for value in values:
        valid = RIGHT.get(name, ())
        if any(type(value) is type(other) and value == other for other in valid):
            continue
        with pytest.raises(OptionError, match=f"^{name} must be"):
            Options(**{name: value})


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
    """The paths of a fixed draft tree must be distinct and include the parent of each path.

    No level may have more than 16 nodes with the same parent or with children.
    """
    with pytest.raises(OptionError, match=r"^draft_tree must be"):
        Options(draft_tree=tree, draft_length=40)


def test_tree_plan_sorts_paths():
    """The plan of a fixed tree sorts the paths by level and rank.

    Its branch is the maximum number of children per node or of nodes fed to the drafter per
    level.
    """
    paths = [(1,), [0, 2], (0,), (1, 0, 1), (1, 0)]
    plan = Options(draft_tree=paths, draft_length=5).tree
    assert plan == (3, 3, ((0,), (1,), (0, 2), (1, 0), (1, 0, 1)))
    assert plan.table().tolist() == [0, 1, -1, -1, -1, 3, 0, *[-1] * 5, -1, 3, *[-1] * 7]
    assert TreePlan.of([(n, 0)[:k] for n in range(5) for k in (1, 2)])[:2] == (5, 2)
    with pytest.raises(OptionError, match="at most draft_length 4"):
        Options(draft_tree=paths, draft_length=4)


def test_engine_rejects_unknown_and_invalid_options(device):
    """Unknown names and invalid values are rejected before the model is read."""
    with pytest.raises(OptionError, match="unknown option batch; the options are activations"):
        Engine("no such folder", batch=3)
    with pytest.raises(OptionError, match="max_batch_size must be an integer from 1 to 4096"):
        Engine("no such folder", max_batch_size="2")
    with pytest.raises(OptionError, match="model must be the path of a checkpoint folder, got 5"):
        Engine(5)
    with pytest.raises(OptionError, match="ranks must be a RankGroup or None, got 5"):
        Engine("no such folder", ranks=5)
    with pytest.raises(OptionError, match=r"draft_tree .2, 2. requires a drafter"):
        Engine("no such folder", draft_tree=(2, 2), draft_length=4)
    with pytest.raises(OptionError, match=r"draft_masking=.probe. requires mask_drafts"):
        Options(draft_masking="probe", mask_drafts=False)
    with Engine(TARGET, max_batch_size=2, limits=Limits(waiting=1)) as engine:
        assert engine.options.max_batch_size == 2 and engine.options.positions == 1024


def test_options_sized_for_target():
    """By default, there are pages for a full-length request in every batch row."""
    with pytest.raises(OptionError, match=r"call Options\.sized first"):
        _ = Options().positions
    assert Options(max_batch_size=3, page_size=16).sized(100).sizes == (100, 21)
    assert Options().sized(1 << 17).sizes[0] == 4096
    assert Options(pages=2, page_size=8).sized(100).positions == 16
    with pytest.raises(OptionError, match=r"max_length 200 is greater than the model"):
        Options(max_length=200).sized(100)
