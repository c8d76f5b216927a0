"""The drafter protocol: a drafter is one file, and what does not keep to it is refused by name."""

import inspect
import json
import shutil
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from engine_util import DRAFTER, TARGET

from graft.cudagraph import OptionError
from graft.cudagraph.lanes import StreamLane
from graft.grammar import GrammarSpec
from graft.models import Drafter, DrafterError, DraftVocab, Engine, Request, TreeShape
from graft.models.drafters import CascadeDrafter, NGram, Suffix
from graft.models.llm.rows import Rows
from graft.sampling.state import SLOT
from graft.sampling.tree import TreePlan
from graft.tools.demo_prompts import demo_prompts
from graft.tools.examples import own_drafter


def test_a_drafter_is_one_file(device):
    """Sixty lines at most, found by its name; that it changes no output is in test_examples."""
    assert len(inspect.getsource(own_drafter).splitlines()) <= 60
    sevens = Request(
        prompt="code: 7777777\nGive only the code.", grammar=GrammarSpec.regex("7{9,12}")
    )
    with Engine(TARGET, "graft.tools.examples.own_drafter:LastToken", draft_length=3) as engine:
        assert engine.generate([sevens])[0].accepted > 4


class Wrong(Drafter):
    """Proposes nothing; a test sets what is wrong with it."""

    shape = TreeShape(2)

    def start(self, lane, feed):
        return None


def wrong(**attributes):
    """A drafter with other attributes, as an engine asks for it."""
    return lambda context: type("Wrong", (Wrong,), attributes)()


@pytest.mark.parametrize(
    "drafter, error, words",
    [
        (wrong(shape=TreeShape(2, (1, 2, 2), 2)), OptionError, "does not fit in 2 drafts"),
        (wrong(shape=TreeShape(2, (1, 2))), OptionError, "cannot be verified in a round"),
        (wrong(shape=TreeShape(0)), OptionError, "0 drafts per round, expected 1 to 2"),
        (wrong(shape=TreeShape(3)), OptionError, "3 drafts per round, expected 1 to 2"),
        (wrong(shape=None), OptionError, "says nothing of its shape"),
        (wrong(start=Drafter.start), DrafterError, "Wrong does not define start"),
        (wrong(shape=TreeShape.by_level(2)), OptionError, "says nothing of its vocab"),
        (wrong(shape=TreeShape.by_level(2), vocab=DraftVocab(8)), DrafterError, "level 0 has no"),
        (wrong(feature_layers=(1, 0)), OptionError, "feature layers"),
        (lambda context: object(), OptionError, "expected a Drafter"),
        (
            partial(CascadeDrafter, first=NGram, then=NGram),
            OptionError,
            "`then` must draft level by",
        ),
        (
            partial(CascadeDrafter, first=TARGET, then=TARGET),
            OptionError,
            "must make all drafts at once",
        ),
        (
            partial(CascadeDrafter, first=wrong(shape=TreeShape(1)), then=TARGET),
            OptionError,
            "`first` makes 1 drafts",
        ),
        (
            partial(CascadeDrafter, first=wrong(shape=TreeShape(2, branch=2)), then=TARGET),
            OptionError,
            "must draft chains, not trees",
        ),
        (
            partial(CascadeDrafter, first=NGram, then=wrong(shape=TreeShape(2, (1, 2), 2))),
            OptionError,
            "must draft chains, not trees",
        ),
        (
            partial(CascadeDrafter, first=wrong(reads_mask_rows=True), then=TARGET),
            OptionError,
            "mask rows",
        ),
        ("graft.tools.examples.own_drafter:Missing", OptionError, "Missing"),
        ("graft.no_such_module:LastToken", OptionError, "no_such_module"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused(device, drafter, error, words):
    """Shape, vocabulary, taps and name are checked before a round is built."""
    with pytest.raises(error, match=words):
        Engine(TARGET, drafter, draft_length=2, max_batch_size=1)


@pytest.mark.parametrize(
    "drafter, options, words",
    [
        (Suffix, {"draft_tree": [(0,), (1,)]}, r"Suffix: draft_tree must be \(branch, levels\)"),
        (
            partial(CascadeDrafter, first=NGram, then=TARGET),
            {"draft_tree": (2, 2)},
            "must draft chains, not trees",
        ),
        (wrong(), {"forced_drafts": True}, "forced_drafts needs mask_drafts"),
        (DRAFTER, {"forced_drafts": True, "mask_drafts": False}, "forced_drafts needs mask_drafts"),
    ],
)
def test_what_a_drafter_cannot_be_asked_for_is_refused(device, drafter, options, words):
    """Ranks of what was looked up, drafts behind the ends of a tree, and forced ones where no mask
    rows are filled while drafting; ranks of a shape are those of its levels."""
    with pytest.raises(OptionError, match=words):
        Engine(TARGET, drafter, max_batch_size=1, **options)
    with pytest.raises(OptionError, match="cannot be verified in a round"):
        TreeShape(2, (1, 2), 2, ((0,), (0, 0), (1,))).check(8)


def places(texts, own, pattern, drafts):
    """(own text?, place, text) of a pattern's last token, and the token behind it, wherever there
    is one; the request's drafts count as text."""
    for s, text in texts.items():
        said = text + drafts if s == own else text
        for i in range(len(said) - len(pattern)):
            if said[i : i + len(pattern)] == pattern:
                yield (s == own, i + len(pattern) - 1, s), said[i + len(pattern)]


def look_up(
    texts,
    own,
    most,
    *,
    longest,
    shortest,
    oldest=False,
    vote=None,
    factor=1e6,
    threshold=0.0,
    tree=None,
):
    """(id, parent) of what is drafted behind text `own`, said plainly: what followed the suffixes,
    by votes of all places or of the best places themselves (`vote` None), the best first."""
    branch, levels = tree or (1, most)
    suffixes = [texts[own][-k:] for k in range(shortest, min(longest, len(texts[own])) + 1)]
    suffixes = [suffix for suffix in suffixes if any(places(texts, own, suffix, []))]
    if not suffixes:
        return []
    most = min(most, int(np.float32(factor) * len(suffixes[-1])))
    suffixes = suffixes[-1:] if vote == "longest" else suffixes
    drafts = []
    coming = []
    path = []
    score = np.float32(1)
    only = None
    while True:
        votes = Counter()
        best = {}
        for suffix in suffixes if len(path) < levels else ():
            for (mine, p, s), token in places(texts, own, suffix + path, path):
                place = (mine, len(path) - p if oldest else p - len(path), s)
                if only in (None, place):
                    votes[token] += 1
                    rank = (0 if vote else len(suffix), place)
                    best[token] = max(best.get(token, rank), rank)
        if vote:
            best = {token: (votes[token], place) for token, (_, place) in best.items()}
        for token in sorted(votes, key=best.get)[-branch:]:
            share = np.float32(votes[token]) / np.float32(votes.total() if vote else votes[token])
            if score * share >= np.float32(threshold):
                coming.append((score * share, best[token], len(drafts), [*path, token]))
        if not coming or len(drafts) == most:
            return drafts
        coming.sort()
        score, (_, place), parent, path = coming.pop()
        only = place if not vote and branch == 1 else None
        drafts.append((path[-1], parent))


LOOKED_UP = [
    (NGram, {"longest": 4, "shortest": 1}),
    (NGram, {"longest": 2, "shortest": 1, "oldest": True, "drafts": 3}),
    (NGram, {"longest": 3, "shortest": 2, "public": True, "kept": 3}),
    (NGram, {"longest": 3, "shortest": 1, "public": True, "kept": 0, "oldest": True}),
    (NGram, {"longest": 4, "shortest": 2, "match": "all"}),
    (NGram, {"longest": 3, "shortest": 1, "match": "all", "oldest": True, "public": True}),
    (Suffix, {"longest": 64, "shortest": 1, "factor": 0.75, "threshold": 0.4}),
    (Suffix, {"longest": 5, "shortest": 2, "threshold": 0.0, "public": True, "kept": 2}),
    (Suffix, {"longest": 64, "shortest": 1, "factor": 2.0, "public": True, "kept": 4}),
    (NGram, {"longest": 4, "shortest": 1, "tree": (2, 3)}),
    (NGram, {"longest": 3, "shortest": 1, "public": True, "kept": 3, "tree": (4, 7)}),
    (NGram, {"longest": 3, "shortest": 2, "match": "all", "oldest": True, "tree": (3, 2)}),
    (Suffix, {"longest": 64, "shortest": 1, "threshold": 0.0, "tree": (2, 4)}),
    (
        Suffix,
        {"longest": 4, "shortest": 1, "factor": 3.0, "public": True, "kept": 2, "tree": (3, 9)},
    ),
]


@pytest.mark.parametrize(
    "make, options, block",
    [
        pytest.param(*case, block, marks=[] if turn == number % 2 else pytest.mark.full)
        for number, case in enumerate(LOOKED_UP)
        for turn, block in enumerate((1, 64))
    ],
)
def test_what_was_said_is_looked_up(device, stream, make, options, block):
    """Slots begin, go on and are taken by others: drafts are those of a search in plain lists."""
    slots = 4
    length = 40
    tree = options.get("tree")
    most = 9 if tree else 5
    rng = np.random.default_rng(len(str(options)))
    context = SimpleNamespace(
        device=device,
        slots=slots,
        max_length=length,
        max_drafts=most,
        tree=tree and TreePlan(*tree),
        target=SimpleNamespace(config=SimpleNamespace(vocab_size=4)),
    )
    drafter = make(context, **{k: v for k, v in options.items() if k != "tree"})
    lane = StreamLane(stream)
    drafter._block = block
    plain = {"threshold": 0.1, "factor": 1.0} if make is Suffix else {}
    plain |= {k: v for k, v in options.items() if k not in ("drafts", "public", "kept", "match")}
    plain["vote"] = "longest" if make is Suffix else {"all": "all"}.get(options.get("match"))
    kept = options.get("kept", 16)
    begun = 0
    texts = {}

    def rows(said, slot, begin):
        return Rows(
            *(
                device.from_host(np.asarray(part, np.int32))
                for part in (said, [slot] * len(said), range(begin, begin + len(said)))
            )
        )

    for step in range(120):
        slot = int(rng.integers(slots - 1))  # the last slot stays empty
        text = texts.get(slot, [])
        new = not text or len(text) > length - 6 or rng.random() < 0.1
        said = rng.integers(0, int(rng.integers(1, 5)), rng.integers(1, 20 if new else 5)).tolist()
        if new and text and kept and options.get("public"):
            texts[slots + begun % kept] = text
            begun += 1
        first = 0 if new else len(text)
        texts[slot] = [*text[:first], *said]
        state = np.zeros(slots, SLOT)
        half = len(said) // 2 if new else 0
        for s in texts.keys() & set(range(slots)):
            state[s]["n"] = len(texts[s]) - 1
            state[s]["active"] = s != slot or step % 7 != 0
        row_slot = [2, 0, -1, 3, 1]
        now = rows(said[half:], slot, first + half)
        feed = SimpleNamespace(
            committed=lambda lane, shift, now=now: now,
            row_slot=device.from_host(np.array(row_slot, np.int32)),
            batch=5,
            width=most + 1,
            state=SimpleNamespace(array=device.from_host(state.view(np.int32))),
            proposal=device.zeros((5, most), "int32"),
            parents=device.zeros((5, most), "int32") if tree else None,
        )
        if half:
            drafter.resume(lane, rows(said[:half], slot, 0))
        drafter.start(lane, feed)
        stream.synchronize()
        ids = feed.proposal.to_host()
        parents = feed.parents.to_host() if tree else np.tile(np.arange(most), (5, 1))
        found = [
            [pair for pair in zip(*row, strict=True) if pair[0] >= 0]
            for row in zip(ids.tolist(), parents.tolist(), strict=True)
        ]
        shown = texts if options.get("public") else None
        wanted = [
            look_up(shown or {s: texts[s]}, s, options.get("drafts", most), **plain)
            if s >= 0 and state[s]["active"]
            else []
            for s in row_slot
        ]
        assert found == wanted, (step, texts)


@pytest.mark.parametrize(
    "make, options, words",
    [
        (NGram, {"longest": 0, "shortest": 0}, "NGram: longest is 0, must be from 1 to"),
        (NGram, {"longest": "4"}, "longest is '4'"),
        (Suffix, {"longest": 2, "shortest": 3}, "Suffix: shortest is 3, must be from 1 to 2"),
        (NGram, {"drafts": 9}, "drafts is 9, must be from 1 to 3"),
        (NGram, {"match": "best"}, "match must be one of longest, all, got 'best'"),
        (NGram, {"kept": -1}, "kept is -1"),
        (Suffix, {"factor": float("nan")}, "factor is nan"),
        (Suffix, {"threshold": 1.5}, "threshold is 1.5, must be from 0 to 1"),
    ],
)
def test_options_of_looking_up_are_checked(device, make, options, words):
    """By name and value, before a round is built."""
    with pytest.raises(OptionError, match=words):
        Engine(TARGET, partial(make, **options), max_batch_size=1)


def test_a_model_drafts_for_itself_without_a_miss(device):
    """Its drafts are its own next tokens, in every request, prompts of one token too."""
    with Engine(TARGET, TARGET, draft_length=3, max_batch_size=3) as engine:
        asked = [
            Request(
                prompt=p.text,
                grammar=p.grammar,
                max_tokens=60,
                temperature=0.8 * (i % 2),
                seed=i,
                verify="coupled",
            )
            for i, p in enumerate(demo_prompts()[:6])
        ]
        outputs = engine.generate([*asked, Request(tokens=[41], max_tokens=20)])
        assert all(rate == 1.0 for rate in engine.stats.acceptance)
        assert sum(output.accepted for output in outputs) > 60


def test_a_model_of_other_tokens_is_no_drafter(device, tmp_path):
    """The first id that means something else is named."""
    shutil.copytree(TARGET, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    data = json.loads(file.read_text())
    vocab = data["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[10:12]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(data))
    with pytest.raises(OptionError, match="must use the same tokenizer") as caught:
        Engine(TARGET, tmp_path / "other", max_batch_size=1)
    assert repr(first) in str(caught.value) or repr(second) in str(caught.value)
