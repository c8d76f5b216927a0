"""The drafter protocol: a drafter is one file, and what does not keep to it is refused by name."""

import inspect

import pytest
from engine_util import DRAFTER, TARGET

from graft.cudagraph import OptionError
from graft.grammar import GrammarSpec
from graft.models import Drafter, DrafterError, DraftVocab, Engine, Request, TreeShape
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
        (wrong(shape=TreeShape(2, branch=2)), OptionError, "rounds verify chains"),
        (wrong(shape=TreeShape(2, (1, 2))), OptionError, "rounds verify chains"),
        (wrong(shape=TreeShape(0)), OptionError, "0 drafts a round, of the 1 to 2 asked for"),
        (wrong(shape=TreeShape(3)), OptionError, "3 drafts a round, of the 1 to 2 asked for"),
        (wrong(shape=None), OptionError, "says nothing of its shape"),
        (wrong(start=Drafter.start), DrafterError, "Wrong has no method start"),
        (wrong(shape=TreeShape.chain(2)), OptionError, "says nothing of its vocab"),
        (wrong(shape=TreeShape.chain(2), vocab=DraftVocab(8)), DrafterError, "level 0 has no"),
        (wrong(taps=(1, 0)), OptionError, "feature layers"),
        (lambda room: object(), OptionError, "is no Drafter"),
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
