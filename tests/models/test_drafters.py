"""The drafter protocol: a drafter is one file, and what does not keep to it is refused by name."""

import inspect
import itertools
import json
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from engine_util import DRAFTER, TARGET

from graft.cudagraph import OptionError
from graft.cudagraph.lanes import StreamLane
from graft.grammar import GrammarSpec
from graft.models import Drafter, DrafterError, DraftVocab, Engine, Request, TreeShape
from graft.models.drafters import Ahead, NGram
from graft.models.rows import Rows
from graft.sampling.state import SLOT
from graft.tools.demo_prompts import demo_prompts
from graft.tools.examples import own_drafter


def requests() -> list[Request]:
    """The demo's requests, greedy and sampled, and one whose text the toy drafter can guess."""
    greedy = [Request(prompt=p.text, grammar=p.grammar, max_tokens=60) for p in demo_prompts()]
    sampled = [Request(prompt=p.text, grammar=p.grammar, max_tokens=60, temperature=0.8, seed=i,
                       verify="coupled") for i, p in enumerate(demo_prompts())]  # fmt: skip
    sevens = Request(prompt="code: 7777777\nGive only the code.",
                     grammar=GrammarSpec.regex("7{9,12}"))  # fmt: skip
    return [*greedy, *sampled, sevens]


def test_a_drafter_is_one_file_and_changes_no_output(device):
    """Sixty lines at most, found by its name; what it proposes speeds up and changes nothing."""
    assert len(inspect.getsource(own_drafter).splitlines()) <= 60
    texts = []
    for drafter in ("graft.tools.examples.own_drafter:LastToken", None):
        with Engine(TARGET, drafter, draft_length=3) as engine:
            outputs = engine.generate(requests())
            texts.append([output.text for output in outputs])
            assert (outputs[-1].accepted > 4) == (drafter is not None)
    assert texts[0] == texts[1]


class Wrong(Drafter):
    """Proposes nothing; a test sets what is wrong with it."""

    shape = TreeShape(2)

    def start(self, lane, feed):
        return None


def wrong(**attributes):
    """A drafter with other attributes, as an engine asks for it."""
    return lambda room: type("Wrong", (Wrong,), attributes)()


class NoIds(Wrong):
    """Proposes what is no id, or nothing that could follow."""

    def start(self, lane, feed):
        lane.fill(feed.proposal, 0x7F)


@pytest.mark.parametrize(
    "drafter, error, words",
    [
        (wrong(shape=TreeShape(2, (1, 2, 2), 2)), OptionError, "has no place in 2 drafts"),
        (wrong(shape=TreeShape(2, (1, 2))), OptionError, "no round verifies drafts of the shape"),
        (wrong(shape=TreeShape(0)), OptionError, "0 drafts a round, of the 1 to 2 asked for"),
        (wrong(shape=TreeShape(3)), OptionError, "3 drafts a round, of the 1 to 2 asked for"),
        (wrong(shape=None), OptionError, "says nothing of its shape"),
        (wrong(start=Drafter.start), DrafterError, "Wrong has no method start"),
        (wrong(shape=TreeShape.by_level(2)), OptionError, "says nothing of its vocab"),
        (wrong(shape=TreeShape.by_level(2), vocab=DraftVocab(8)), DrafterError, "level 0 has no"),
        (wrong(taps=(1, 0)), OptionError, "feature layers"),
        (lambda room: object(), OptionError, "is no Drafter"),
        (partial(Ahead, first=NGram, then=NGram), OptionError, "of the second level by level"),
        (partial(Ahead, first=TARGET, then=TARGET), OptionError, "must come all at once"),
        (partial(Ahead, first=wrong(shape=TreeShape(1)), then=TARGET), OptionError, "1 drafts of"),
        (partial(Ahead, first=wrong(reads_rows=True), then=TARGET), OptionError, "mask rows"),
        ("graft.tools.examples.own_drafter:Missing", OptionError, "Missing"),
        ("graft.no_such_module:LastToken", OptionError, "no_such_module"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused(device, drafter, error, words):
    """Shape, vocabulary, taps and name are checked before a round is built."""
    with pytest.raises(error, match=words):
        Engine(TARGET, drafter, draft_length=2, max_batch_size=1)


def test_proposals_that_are_no_ids_are_no_drafts(device):
    """Numbers beyond the vocabulary end the chain before it begins; the text stays."""
    request = Request(prompt="serial: AAAA-1111\nGive only the serial.", max_tokens=20)
    with Engine(TARGET, lambda room: NoIds(), draft_length=2, max_batch_size=1) as engine:
        (output,) = engine.generate([request])
    assert (output.drafted, output.reason) == (0, "stop")


def test_forced_drafts_need_rows_while_drafting(device):
    """Beside a drafter that fills no mask rows they could never be found."""
    for drafter, options in ((wrong(), {}), (DRAFTER, {"mask_drafts": False})):
        with pytest.raises(OptionError, match="forced_drafts needs mask_drafts"):
            Engine(TARGET, drafter, forced_drafts=True, max_batch_size=1, **options)


def lookup(tokens, drafts, longest, shortest, oldest):
    """What prompt lookup drafts behind these tokens, said plainly."""
    n = len(tokens) - 1
    places = [(fit, -p if oldest else p) for p in range(n) for fit in range(1, longest + 1)
              if p >= fit - 1 and tokens[p - fit + 1 : p + 1] == tokens[n - fit + 1 :]]
    if not places or max(places)[0] < shortest:
        return []
    at = abs(max(places)[1])
    known = list(tokens)
    for j in range(drafts):
        known.append(known[at + 1 + j])
    return known[n + 1 :]


@pytest.mark.parametrize("longest, shortest, oldest", [(4, 1, False), (2, 1, True), (3, 2, False)])
def test_ngrams_are_looked_up_in_what_was_said(device, stream, longest, shortest, oldest):
    """The longest suffix that stood before, its place and what followed, also past the end."""
    slots, length, drafts = 4, 40, 5
    rng = np.random.default_rng(longest)
    room = SimpleNamespace(device=device, slots=slots, length=length, drafts=drafts)
    drafter = NGram(room, longest=longest, shortest=shortest, oldest=oldest)
    lane = StreamLane(stream)
    for size in range(1, length - 1):
        said = rng.integers(0, 3, (slots, size)).astype(np.int32)
        rows = [device.from_host(np.ascontiguousarray(part.ravel(), np.int32)) for part in
                (said, np.repeat(np.arange(slots), size), np.tile(np.arange(size), slots))]
        state = np.zeros(slots, SLOT)
        state["n"], state["active"] = size - 1, [1, 1, 1, 0]
        row_slot = device.from_host(np.array([2, 0, -1, 3, 1], np.int32))
        proposal = device.zeros((5, drafts), "int32")
        nothing = Rows(*(device.from_host(np.full(1, -1, np.int32)) for _ in range(3)))
        feed = SimpleNamespace(
            committed=lambda lane, shift, nothing=nothing: nothing, row_slot=row_slot, batch=5,
            state=SimpleNamespace(array=device.from_host(state.view(np.int32))), proposal=proposal)
        drafter.prefill(lane, Rows(*rows), None, None)
        drafter.start(lane, feed)
        stream.synchronize()
        found = [[int(t) for t in itertools.takewhile(lambda t: t >= 0, row)]
                 for row in proposal.to_host()]
        wanted = [lookup(said[s].tolist(), drafts, longest, shortest, oldest) if s >= 0 else []
                  for s in (2, 0, -1, -1, 1)]
        assert found == wanted, size


def test_ngrams_of_no_length_are_refused(device):
    """Bounds that leave nothing to look up."""
    for longest, shortest in ((0, 0), (2, 3)):
        with pytest.raises(OptionError, match="shortest <= longest"):
            Engine(TARGET, partial(NGram, longest=longest, shortest=shortest), max_batch_size=1)


def test_a_model_drafts_for_itself_without_a_miss(device):
    """Its drafts are its own next tokens, in every request, prompts of one token too."""
    with Engine(TARGET, TARGET, draft_length=3, max_batch_size=3) as engine:
        outputs = engine.generate([*requests()[:6], Request(tokens=[41], max_tokens=20)])
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
    with pytest.raises(OptionError, match="must have one tokenizer") as caught:
        Engine(TARGET, tmp_path / "other", max_batch_size=1)
    assert repr(first) in str(caught.value) or repr(second) in str(caught.value)
