"""A user's own Python function as a drafter: what it sees, and what its faults cost."""

import itertools
import threading
from dataclasses import replace
from functools import partial

import pytest
from engine_util import TARGET, mixed_requests
from test_drafters import look_up
from test_engine_equality import answer, settled

from graft.cudagraph import OptionError
from graft.models import Engine, Request
from graft.models.drafters import NGram, UserDrafter

K = 3
LOOK_UP = {"longest": 4, "shortest": 1}


def run(drafter, asked, **options):
    options = {"max_batch_size": 3, "draft_length": K} | options
    with settled(Engine(TARGET, drafter, **options)) as engine:
        return engine.generate(asked)


def free(first, **options):
    """A request without a grammar that begins with an id."""
    return Request(tokens=[first, 301, 302], max_tokens=30, **options)


def test_it_sees_every_token_and_its_drafts_count(device):
    """Prompt lookup in Python gives rounds, drafts and tokens of the same on the device, also for
    prompts of one token and of several chunks."""
    seen = []

    def propose(tokens):
        seen.append(tuple(tokens))
        found = [token for token, _ in look_up({0: tokens}, 0, K, **LOOK_UP)]
        tokens.clear()  # its own list
        return found

    sampled = {"temperature": 0.8, "verify": "coupled", "seed": 5}
    asked = [
        *mixed_requests(2),
        *(replace(r, **sampled) for r in mixed_requests(4)[2:]),
        Request(tokens=[41], max_tokens=20),
        Request(tokens=[50 + i % 40 for i in range(280)], max_tokens=9),
    ]
    rounds = []
    outputs = []
    for drafter in (UserDrafter.of(propose, deadline_s=10), partial(NGram, **LOOK_UP)):
        outputs = run(drafter, asked)
        rounds.append([(answer(o), o.rounds, o.drafted, o.accepted) for o in outputs])
    assert rounds[0] == rounds[1] and sum(o.accepted for o in outputs) > 10
    for request, output in zip(asked[-2:], outputs[-2:], strict=True):
        whole = (*request.tokens, *output.tokens)
        mine = [text for text in seen if text == whole[: len(text)]]
        assert len(mine) == output.rounds - 1  # the last one ended it


FAULTS = {
    60: (lambda: 1 // 0, "raised ZeroDivisionError: integer division"),
    61: (lambda: exit(3), "raised SystemExit: 3"),
    62: (lambda: [5, 99999], "proposed id 99999, of the 0 to 2047"),
    63: (lambda: [-1], "proposed id -1, of the 0 to "),
    64: (lambda: [2**70], f"proposed id {2**70}, of"),
    65: (lambda: [5, 6.0], "proposed [5, 6.0], which are no ids"),
    66: (lambda: None, "proposed None, which are no ids"),
    67: (lambda: "ab", "proposed 'ab', which are no ids"),
    68: (lambda: [5] * (K + 1), "proposed more than 3 ids: [5, 5, 5, 5]"),
    69: (lambda: itertools.count(), "proposed more than 3 ids: [0, 1, 2, 3]"),
}
TREE_FAULTS = {
    60: (lambda: [5, 6, 7], "proposed [5, 6, 7], which are no ids and parents"),
    61: (lambda: ([5, 6], [0]), "proposed 2 ids and 1 parents"),
    62: (lambda: ([5, 6], [0, 2]), "proposed parent 2 of id 2, which may have 0 to 1"),
    63: (lambda: ([5], [-1]), "proposed parent -1 of id 1, which"),
    64: (lambda: ([5], [None]), "proposed ([5], [None]), which are no ids"),
}


@pytest.mark.parametrize("tree", [False, True])
def test_who_lies_fails_its_own_row(device, tree):
    """A function that raises, or returns what are no drafts, ends the request it was asked for by
    name and value; the others get what they get without it, faster."""
    faults = TREE_FAULTS if tree else FAULTS
    asked = [free(first) for first in (*faults, 70, 71)] + mixed_requests(2)
    truth = run(None, asked)
    known = [[*r.tokens, *o.tokens] for r, o in zip(asked, truth, strict=True) if r.tokens]

    def liar(tokens):
        if tokens[0] in faults:
            return faults[tokens[0]][0]()
        text = next((text for text in known if text[: len(tokens)] == tokens), tokens)
        ids = text[len(tokens) :][:2]
        return ([9, *ids], [0, 0, 2][: len(ids) + 1]) if tree else ids

    outputs = run(UserDrafter.of(liar, tree=tree, deadline_s=10), asked)
    for output, expected, (_, said) in zip(outputs, truth, faults.values(), strict=False):
        assert (output.reason, output.error_type) == ("error", "DrafterError")
        assert ".liar " in output.error and said in output.error, output.error
        assert output.tokens == expected.tokens[:1]
    good = slice(len(faults), None)
    assert [answer(o) for o in outputs[good]] == [answer(o) for o in truth[good]]
    for output in outputs[good][:2]:  # one token in the first round, three in the others
        assert output.rounds == -(-(len(output.tokens) + 2) // 3)


def test_who_never_answers_is_not_waited_for(device, caplog):
    """Rounds go on without drafts, the engine says so, and takes drafts again once they come."""
    free_again = threading.Event()
    calls = []

    def stuck(tokens):
        calls.append(tokens[0])
        if tokens[0] == 60:
            free_again.wait()
        return [tokens[-1]]

    asked = [free(60), free(61), *mixed_requests(1)]
    truth = run(None, [*asked, free(62)])
    drafter = UserDrafter.of(stuck, deadline_s=0.05)
    with settled(Engine(TARGET, drafter, max_batch_size=3)) as engine:
        outputs = engine.generate(asked)
        assert len(calls) <= 3 and caplog.text.count("stuck has not answered within 0.05 s") == 1
        free_again.set()
        outputs += engine.generate([free(62)])
        assert calls.count(62) > 3
    assert [answer(o) for o in outputs] == [answer(o) for o in truth]


def test_it_may_never_come_back(device):
    """An engine whose drafter is stuck is closed all the same; the thread ends if it ever can."""
    forever = threading.Event()
    outputs = run(UserDrafter.of(lambda tokens: forever.wait(), deadline_s=0.02), [free(60)])
    assert outputs[0].reason in ("stop", "length")
    forever.set()
    for thread in threading.enumerate():
        if thread.name.startswith("drafter "):
            thread.join(10)
            assert not thread.is_alive(), thread.name


async def later(tokens):
    """No function that could be called from a thread."""


@pytest.mark.parametrize(
    "drafter, words",
    [
        (UserDrafter.of(7), "must be callable, not int"),
        (UserDrafter.of(later), "would never run"),
        (UserDrafter.of(list, deadline_s=0), "drafter list: deadline_s is 0, must be above 0"),
        (UserDrafter.of(list, deadline_s=float("nan")), "deadline_s is nan"),
        (UserDrafter.of(list, deadline_s="1"), "deadline_s is '1'"),
    ],
)
def test_what_could_never_draft_is_refused(device, drafter, words):
    """Before a round is built."""
    with pytest.raises(OptionError, match=words):
        Engine(TARGET, drafter, max_batch_size=1)
