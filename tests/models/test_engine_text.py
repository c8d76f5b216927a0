"""The text of an output depends on its tokens only, not on the rounds that committed them."""

import random
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace

import pytest
from bigram_model import Script, make_bigram_model
from engine_cases import settled
from engine_util import with_internal

from graft.grammar import GrammarSpec
from graft.models import Engine, Request
from graft.models.drafters import NGram, Suffix
from graft.models.engine.migrate import MigratedRequest
from graft.models.engine.slots import SlotManager

TEXT = (
    "日本語のテスト、한국어 🙂🙃 👩🏿‍🚀 👨‍👩‍👧‍👦 🏳️‍🌈 🇯🇵🇺🇦 Привет, мир! "
    "مرحبا नमस्ते größe \ufffd 👍🏽終"
)
SCRIPT = Script.cut(TEXT, seed=3)
#: Drafters (a name of `models`, or a class) and engine options.
MODES = {
    "no drafter": (None, {}),
    "ngram": (NGram, {"draft_length": 7}),
    "model": ("target", {"draft_length": 7}),
    "eagle3": ("eagle3", {}),
    "tree": ("target", {"draft_length": 6, "draft_tree": (2, 3)}),
    "one round at a time": ("target", {"overlap": False}),
    "two graphs": ("target", {"composition": "two"}),
    "loops": ("target", {"generation": "graph"}),
    "forced": (None, {"forced_drafts": True}),
    "suffix": (Suffix, {"draft_length": 16}),
    "ngram, tree": (NGram, {"draft_length": 6, "draft_tree": (2, 3)}),
    "eagle3, tree": ("eagle3", {"draft_length": 6, "draft_tree": (2, 3)}),
    "loops, ngram": (NGram, {"generation": "graph"}),
    "loops, tree": ("target", {"generation": "graph", "draft_length": 6, "draft_tree": (2, 3)}),
    "automata": ("target", {"device_automata": True}),
    "unmasked": ("target", {"draft_masking": "none", "draft_length": "auto"}),
    "few pages": ("target", {"pages": 40}),
}
QUICK = ("ngram", "tree", "loops", "few pages")
MIGRATION_QUICK = ("ngram",)


def parameters(quick):
    """Return the modes as test parameters. Modes outside `quick` run only in the full run."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.full) for name in MODES]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_bigram_model(tmp_path_factory.mktemp("bigram"), SCRIPT)


def make_engine(models, mode):
    drafter, options = MODES[mode]
    options = {"max_batch_size": 3, "page_size": 4, **options}
    return Engine(models["target"], models.get(drafter, drafter), **with_internal(options))


def cases():
    """Return requests by id, each with its finish reason, tokens and text."""
    found = {}
    # Some outputs begin inside a character. With a grammar, this is not possible.
    starts = [k for k in range(1, 12) if SCRIPT.starts_character(k)]
    assert 2 < len(starts) < 10
    grammars = [GrammarSpec.regex("[^#]{1,300}"), GrammarSpec.regex("(?s:.){1,200}#?")]

    def add(start, grammar=None, **options):
        request = Request(
            tokens=SCRIPT.prompt(start),
            grammar=grammar,
            id=str(len(found)),
            closing="off",
            **{"temperature": 0, "max_tokens": 100, **options},
        )
        expected = SCRIPT.output(start, request.max_tokens, tuple(request.stop))
        found[request.id] = request, expected

    for start in range(1, 6):
        add(start)
    for cut in range(1, 20, 2):
        add(starts[cut % len(starts)], grammars[cut % 2] if cut % 3 else None, max_tokens=cut)
    for index, start in enumerate(starts[:4]):
        add(start, grammars[index % 2])
        text = SCRIPT.output(start)[2]
        add(start, GrammarSpec.choice([text, f"{text}x"]))  # most tokens are forced
    # The text is held back for many rounds, because it may be the beginning of a stop string.
    add(1, stop=[f"{TEXT[6:60]}x"])
    for stop in (["👧"], ["мир!", "\u200d👦"], ["🇺🇦 "], ["\ufffd"], ["終x", "नमस्"]):
        add(1, stop=stop)
        add(starts[1], grammars[0], stop=stop, logprobs=0)
    return found


class Recorder:
    """Collects the events of requests and checks the outputs."""

    def __init__(self):
        self.tokens = defaultdict(list)
        self.pieces = defaultdict(list)
        self.outputs = {}

    def record(self, events):
        for event in events:
            self.tokens[event.id] += event.tokens
            self.pieces[event.id].append(event.text)
            if event.output is not None and event.output.reason != "moved":
                self.outputs[event.id] = event.output

    def check(self, expected, tokenizer, seed):
        assert self.outputs.keys() == expected.keys()
        for request_id, (request, answer) in expected.items():
            output = self.outputs[request_id]
            where = f"seed {seed}, request {request}"
            assert (output.reason, output.tokens, output.text) == answer, where
            assert "".join(self.pieces[request_id]) == output.text, where
            assert self.tokens[request_id] == output.tokens, where
            assert output.logprobs is None or len(output.logprobs) == len(output.tokens), where
            if output.reason == "stop":
                assert tokenizer.decode(output.tokens) == output.text, where


def copy(migrated):
    """Serialize a migrated request and return the deserialized copy."""
    return MigratedRequest.from_bytes(migrated.to_bytes())


def disturb(engines, rng):
    """Preempt a request or migrate it to the next engine. Running requests are preferred."""
    index = rng.randrange(len(engines))
    scheduler = engines[index]._scheduler
    unfinished = list(scheduler.unfinished)
    if rng.random() < 0.8:
        unfinished = [state.id for state in scheduler.slots.running.values()]
    if not unfinished:
        return
    request_id = rng.choice(unfinished)
    if len(engines) == 1 or rng.random() < 0.3:
        engines[index].preempt(request_id)
        return
    migrated = copy(engines[index].migrate_out(request_id))
    engines[(index + 1) % len(engines)].migrate_in(migrated)


def run(engines, requests, seed, disturbance=0.4):
    """Run requests on engines between which they migrate, and return the recorded events."""
    rng = random.Random(seed)
    recorder = Recorder()
    for request in requests:
        rng.choice(engines).submit(request)
    while any(engine.busy for engine in engines):
        for engine in engines:
            if engine.busy:
                recorder.record(engine.step())
        if rng.random() < disturbance:
            disturb(engines, rng)
    return recorder


@pytest.mark.parametrize("mode", parameters(QUICK))
@pytest.mark.full("tree", "few pages")
def test_output_text_is_text_of_tokens(models, mode):
    """Undisturbed and preempted requests have the texts of the script in every mode."""
    expected = cases()
    requests = [request for request, _ in expected.values()]
    with settled(make_engine(models, mode)) as engine:
        for seed, disturbance in enumerate((0.0, 0.5)):
            recorder = run([engine], requests, seed, disturbance)
            recorder.check(expected, engine.tokenizer, seed)
            if mode == "few pages":
                assert engine.stats.preemptions > seed
        if mode not in ("no drafter", "few pages"):
            assert sum(engine.stats.accepted) > 150


@pytest.mark.parametrize("mode", parameters(MIGRATION_QUICK))
@pytest.mark.full
def test_output_text_survives_migration(models, mode):
    """Requests that migrate at random times have the texts of the script."""
    expected = cases()
    requests = [request for request, _ in expected.values()]
    with ExitStack() as stack:
        engines = [stack.enter_context(settled(make_engine(models, mode))) for _ in range(2)]
        for seed in range(2):
            recorder = run(engines, requests, seed)
            recorder.check(expected, engines[0].tokenizer, seed)


def test_undrafted_tokens_are_tokens_of_output_after_stop_string(models, monkeypatch):
    """If a stop string cuts the last round, only tokens of the output count as undrafted."""
    seen = []
    original_leave = SlotManager.leave

    def leave(self, state, *args, **options):
        seen.append((state.undrafted_tokens, state.output.reason))
        original_leave(self, state, *args, **options)

    monkeypatch.setattr(SlotManager, "leave", leave)
    with make_engine(models, "model") as engine:
        for max_tokens in range(4, 14):
            request = Request(
                tokens=SCRIPT.prompt(1), temperature=0, max_tokens=max_tokens, stop=["한", "🙂"]
            )
            *_, last = engine.stream([request])
            undrafted, reason = seen.pop()
            assert undrafted <= len(last.tokens), (max_tokens, reason)
            if reason != "stop_string":
                assert undrafted == len(last.tokens)


def test_output_text_omits_incomplete_character_before_stop_id(models):
    """If a stop id follows an incomplete character, the character is omitted."""
    inside = (k for k in range(6, 40) if not SCRIPT.starts_character(k))
    end = next(inside)
    begin = next(k for k in range(1, 6) if SCRIPT.starts_character(k))
    request = Request(
        tokens=SCRIPT.prompt(begin), stop_ids=[SCRIPT.ids[end]], temperature=0, max_tokens=100
    )
    with make_engine(models, "ngram") as engine:
        by_id, by_length = engine.generate(
            [request, replace(request, stop_ids=(), max_tokens=end - begin)]
        )
        assert (by_id.reason, by_length.reason) == ("stop", "length")
        assert by_id.text == by_length.text == SCRIPT.output(begin, end - begin)[2]
        assert "\ufffd" not in by_id.text
        prefix = b"".join(SCRIPT.pieces[begin:end])
        assert prefix.startswith(by_id.text.encode()) and prefix != by_id.text.encode()
