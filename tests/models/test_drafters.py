"""Tests of the drafter protocol, prompt lookup, suffix decoding, cascades and small models."""

import json
import shutil
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from engine_util import DEMO, DRAFTER, TARGET
from model_util import make_rows

from graft.cudagraph import OptionError
from graft.cudagraph.lanes import StreamLane
from graft.grammar import GrammarSpec
from graft.models import Drafter, DrafterError, DraftVocab, Engine, Request, TreeShape
from graft.models.drafters import CascadeDrafter, DFlash, NGram, Suffix
from graft.sampling.state import SLOT
from graft.sampling.tree import TreePlan
from graft.tools.demo.prompts import demo_prompts


def test_engine_loads_drafter_by_import_name(device):
    sevens = Request(
        prompt="code: 7777777\nGive only the code.", grammar=GrammarSpec.regex("7{9,12}")
    )
    with Engine(TARGET, "graft.tools.examples.own_drafter:LastToken", draft_length=3) as engine:
        assert engine.generate([sevens])[0].accepted > 4


def declared_block_drafter(context):
    return DFlash(DEMO / "dflash", context)


declared_block_drafter.feeds_blocks = True
BLOCK_DRAFTERS = [
    DEMO / "dflash",
    partial(DFlash, DEMO / "dflash"),
    partial(CascadeDrafter, first=NGram, then=DEMO / "dflash"),
    declared_block_drafter,
]


@pytest.mark.parametrize("drafter", BLOCK_DRAFTERS)
@pytest.mark.full("drafter0", "drafter1")
def test_engine_reserves_positions_for_whole_blocks(drafter):
    """Requests of a block drafter get pages for a block that begins with their last token."""
    with Engine(TARGET, drafter, draft_length=3, max_batch_size=1) as engine:
        assert engine.options.slack == 3
        length, pages = engine.options.sizes
        assert pages == -(-(length + 3) // 16)
        request = Request(prompt="a", max_tokens=40)
        assert engine.generate([request])[0].reason in ("stop", "length")


def test_engine_reserves_no_positions_for_other_drafters(caplog):
    with Engine(TARGET, DRAFTER, draft_length=3, max_batch_size=1) as engine:
        assert engine.options.slack == 0 and not caplog.records
    undeclared = lambda context: declared_block_drafter(context)  # noqa: E731
    with Engine(TARGET, undeclared, draft_length=3, max_batch_size=1) as engine:
        assert engine.options.slack == 0
    assert "feeds_blocks" in caplog.text


def test_callable_block_drafter_has_drafts_of_folder():
    """Drafts near `max_tokens` do not depend on how the drafter is passed."""
    requests = []
    for max_tokens in range(5, 16, 2):
        for prompt in ("number:", '{"x":'):
            request = Request(prompt=prompt, max_tokens=max_tokens, temperature=0)
            requests.append(request)
    found = []
    for drafter in BLOCK_DRAFTERS[:2]:
        with Engine(TARGET, drafter, draft_length=4, max_batch_size=4) as engine:
            outputs = engine.generate(requests)
            found.append([(output.tokens, output.accepted, output.rounds) for output in outputs])
    assert found[0] == found[1]


class InvalidDrafter(Drafter):
    """Drafter that makes no drafts; the tests set its attributes to invalid values."""

    shape = TreeShape(2)

    def start(self, lane, feed):
        return None


def invalid_drafter(**attributes):
    """Return a factory of `InvalidDrafter` with other attributes."""
    return lambda context: type("InvalidDrafter", (InvalidDrafter,), attributes)()


@pytest.mark.parametrize(
    "drafter, error, words",
    [
        (
            invalid_drafter(shape=TreeShape(2, (1, 2, 2), 2)),
            OptionError,
            "does not fit in 2 drafts",
        ),
        (invalid_drafter(shape=TreeShape(2, (1, 2))), OptionError, "cannot be verified in a round"),
        (invalid_drafter(shape=TreeShape(0)), OptionError, "0 drafts per round, expected 1 to 2"),
        (invalid_drafter(shape=TreeShape(3)), OptionError, "3 drafts per round, expected 1 to 2"),
        (invalid_drafter(shape=None), OptionError, "does not define `shape`"),
        (
            invalid_drafter(start=Drafter.start),
            DrafterError,
            "InvalidDrafter does not define start",
        ),
        (invalid_drafter(shape=TreeShape.by_level(2)), OptionError, "does not define `vocab`"),
        (
            invalid_drafter(shape=TreeShape.by_level(2), vocab=DraftVocab(8)),
            DrafterError,
            "no logits for level 0",
        ),
        (invalid_drafter(feature_layers=(1, 0)), OptionError, "feature layers"),
        (lambda context: object(), OptionError, r"returned object, not a Drafter.*UserDrafter\.of"),
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
            partial(CascadeDrafter, first=invalid_drafter(shape=TreeShape(1)), then=TARGET),
            OptionError,
            "`first` makes 1 drafts",
        ),
        (
            partial(
                CascadeDrafter, first=invalid_drafter(shape=TreeShape(2, branch=2)), then=TARGET
            ),
            OptionError,
            "must draft chains, not trees",
        ),
        (
            partial(
                CascadeDrafter, first=NGram, then=invalid_drafter(shape=TreeShape(2, (1, 2), 2))
            ),
            OptionError,
            "must draft chains, not trees",
        ),
        (
            partial(CascadeDrafter, first=invalid_drafter(reads_mask_rows=True), then=TARGET),
            OptionError,
            "mask rows",
        ),
        ("graft.tools.examples.own_drafter:Missing", OptionError, "Missing"),
        ("graft.no_such_module:LastToken", OptionError, "no_such_module"),
    ],
)
def test_drafter_protocol_violations_are_rejected(device, drafter, error, words):
    """An engine raises an error at creation if the drafter breaks a rule of the protocol."""
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
        (invalid_drafter(), {"forced_drafts": True}, "forced_drafts cannot be combined"),
        (
            DRAFTER,
            {"forced_drafts": True, "draft_masking": "none"},
            "cannot be combined with draft_masking='none'",
        ),
    ],
)
def test_drafter_rejects_unsupported_options(device, drafter, options, words):
    """Options that a drafter does not support raise an error.

    The cases are a lookup with a tree of fixed shape, a cascade with a tree, and `Forced` with
    unmasked drafts.
    """
    with pytest.raises(OptionError, match=words):
        Engine(TARGET, drafter, max_batch_size=1, **options)
    with pytest.raises(OptionError, match="cannot be verified in a round"):
        TreeShape(2, (1, 2), 2, ((0,), (0, 0), (1,))).check(8)


def occurrences(histories, own, pattern, drafts):
    """Yield every occurrence of a pattern in the histories, and the token after it.

    An occurrence is a tuple of a flag, which says whether the history belongs to the request
    itself, the position of the last token of the pattern, and the index of the history. The drafts
    count as the continuation of the request's own history.
    """
    for s, history in histories.items():
        tokens = history + drafts if s == own else history
        for i in range(len(tokens) - len(pattern)):
            if tokens[i : i + len(pattern)] == pattern:
                yield (s == own, i + len(pattern) - 1, s), tokens[i + len(pattern)]


def look_up(
    histories,
    own,
    max_drafts,
    *,
    longest,
    shortest,
    oldest=False,
    vote=None,
    factor=1e6,
    threshold=0.0,
    tree=None,
):
    """Return (id, parent) of the drafts for history `own`, computed by a simple prompt lookup.

    The continuations are ranked by the votes of the occurrences. If `vote` is None, each
    continuation is ranked by its best occurrence.
    """
    branch, levels = tree or (1, max_drafts)
    history = histories[own]
    lengths = range(shortest, min(longest, len(history)) + 1)
    suffixes = [history[-length:] for length in lengths]
    suffixes = [suffix for suffix in suffixes if any(occurrences(histories, own, suffix, []))]
    if not suffixes:
        return []
    max_drafts = min(max_drafts, int(np.float32(factor) * len(suffixes[-1])))
    suffixes = suffixes[-1:] if vote == "longest" else suffixes
    drafts = []
    candidates = []
    path = []
    score = np.float32(1)
    only = None
    while True:
        votes = Counter()
        best = {}
        for suffix in suffixes if len(path) < levels else ():
            for (is_own, p, s), token in occurrences(histories, own, suffix + path, path):
                occurrence = (is_own, len(path) - p if oldest else p - len(path), s)
                if only in (None, occurrence):
                    votes[token] += 1
                    rank = (0 if vote else len(suffix), occurrence)
                    best[token] = max(best.get(token, rank), rank)
        if vote:
            best = {token: (votes[token], occurrence) for token, (_, occurrence) in best.items()}
        for token in sorted(votes, key=best.get)[-branch:]:
            share = np.float32(votes[token]) / np.float32(votes.total() if vote else votes[token])
            if score * share >= np.float32(threshold):
                candidates.append((score * share, best[token], len(drafts), [*path, token]))
        if not candidates or len(drafts) == max_drafts:
            return drafts
        candidates.sort()
        score, (_, occurrence), parent, path = candidates.pop()
        only = occurrence if not vote and branch == 1 else None
        drafts.append((path[-1], parent))


LOOKUP_CASES = [
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
        for number, case in enumerate(LOOKUP_CASES)
        for turn, block in enumerate((1, 64))
    ],
)
def test_prompt_lookup_equals_reference(device, stream, make, options, block):
    """The drafts equal the reference `look_up` while requests start, grow and leave their slots."""
    slots = 4
    length = 40
    tree = options.get("tree")
    max_drafts = 9 if tree else 5
    rng = np.random.default_rng(len(str(options)))
    context = SimpleNamespace(
        device=device,
        slots=slots,
        max_length=length,
        max_drafts=max_drafts,
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
    next_kept = 0
    histories = {}

    def rows(tokens, slot, begin):
        count = len(tokens)
        positions = range(begin, begin + count)
        return make_rows(device, tokens, slot, positions)

    for step in range(50):
        slot = int(rng.integers(slots - 1))  # the last slot stays empty
        history = histories.get(slot, [])
        new = not history or len(history) > length - 6 or rng.random() < 0.1
        vocab = int(rng.integers(1, 5))
        count = rng.integers(1, 20 if new else 5)
        tokens = rng.integers(0, vocab, count).tolist()
        if new and history and kept and options.get("public"):
            histories[slots + next_kept % kept] = history
            next_kept += 1
        first = 0 if new else len(history)
        histories[slot] = [*history[:first], *tokens]
        state = np.zeros(slots, SLOT)
        half = len(tokens) // 2 if new else 0
        for s in histories.keys() & set(range(slots)):
            state[s]["n"] = len(histories[s]) - 1
            state[s]["active"] = s != slot or step % 7 != 0
        row_slot = [2, 0, -1, 3, 1]
        now = rows(tokens[half:], slot, first + half)
        feed = SimpleNamespace(
            committed=lambda lane, shift, now=now: now,
            row_slot=device.from_host(np.array(row_slot, np.int32)),
            batch=5,
            width=max_drafts + 1,
            state=SimpleNamespace(array=device.from_host(state.view(np.int32))),
            proposal=device.zeros((5, max_drafts), "int32"),
            parents=device.zeros((5, max_drafts), "int32") if tree else None,
        )
        if half:
            drafter.resume(lane, rows(tokens[:half], slot, 0))
        drafter.start(lane, feed)
        stream.synchronize()
        ids = feed.proposal.to_host()
        parents = feed.parents.to_host() if tree else np.tile(np.arange(max_drafts), (5, 1))
        found = [
            [pair for pair in zip(*row, strict=True) if pair[0] >= 0]
            for row in zip(ids.tolist(), parents.tolist(), strict=True)
        ]
        shown = histories if options.get("public") else None
        wanted = [
            look_up(shown or {s: histories[s]}, s, options.get("drafts", max_drafts), **plain)
            if s >= 0 and state[s]["active"]
            else []
            for s in row_slot
        ]
        assert found == wanted, (step, histories)


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
def test_prompt_lookup_rejects_invalid_options(device, make, options, words):
    with pytest.raises(OptionError, match=words):
        Engine(TARGET, partial(make, **options), max_batch_size=1)


def test_small_model_drafter_equal_to_target_has_full_acceptance(device):
    """If the draft model equals the target, every draft is accepted, even for one-token prompts."""
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


def test_small_model_drafter_rejects_different_tokenizer(device, tmp_path):
    """The error names the first token that has different ids in the two tokenizers."""
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
