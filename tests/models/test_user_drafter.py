"""Drafters that call a user's Python function: drafts, errors and the deadline."""

import itertools
import threading
from dataclasses import replace
from functools import partial

import pytest
from engine_cases import answers, answers_and_drafts, settled
from engine_util import TARGET, mixed_requests
from test_drafters import look_up

from graft.cudagraph import OptionError
from graft.models import Engine, Request
from graft.models.drafters import NGram, UserDrafter

K = 3
LOOK_UP = {"longest": 4, "shortest": 1}


def generate(drafter, requests, **options):
    options = {"max_batch_size": 3, "draft_length": K} | options
    with settled(Engine(TARGET, drafter, **options)) as engine:
        return engine.generate(requests)


def free(first, **options):
    """Return a request without a grammar whose first token is `first`."""
    return Request(tokens=[first, 301, 302], max_tokens=30, **options)


def test_user_drafter_equals_device_prompt_lookup(device):
    """A Python function that implements prompt lookup gives the same rounds and drafts as `NGram`.

    The prompts include a prompt of one token and a prompt that takes several prefill chunks.
    """
    seen = []

    def propose(tokens):
        seen.append(tuple(tokens))
        found = [token for token, _ in look_up({0: tokens}, 0, K, **LOOK_UP)]
        tokens.clear()  # the list belongs to the function
        return found

    sampled = {"temperature": 0.8, "verify": "coupled", "seed": 5}
    requests = [
        *mixed_requests(2),
        *(replace(r, **sampled) for r in mixed_requests(4)[2:]),
        Request(tokens=[41], max_tokens=20),
        Request(tokens=[50 + i % 40 for i in range(280)], max_tokens=9),
    ]
    rounds = []
    outputs = []
    for drafter in (UserDrafter.of(propose, deadline_s=10), partial(NGram, **LOOK_UP)):
        outputs = generate(drafter, requests)
        rounds.append(answers_and_drafts(outputs))
    assert rounds[0] == rounds[1]
    assert sum(output.accepted for output in outputs) > 10
    for request, output in zip(requests[-2:], outputs[-2:], strict=True):
        whole = (*request.tokens, *output.tokens)
        mine = [text for text in seen if text == whole[: len(text)]]
        assert len(mine) == output.rounds - 1  # no call in the last round


FAULTS = {
    60: (lambda: 1 // 0, "raised ZeroDivisionError: integer division"),
    61: (lambda: exit(3), "raised SystemExit: 3"),
    62: (lambda: [5, 99999], "proposed id 99999, expected ids from 0 to 2047"),
    63: (lambda: [-1], "proposed id -1, expected ids from 0 to "),
    64: (lambda: [2**70], f"proposed id {2**70}, expected"),
    65: (lambda: [5, 6.0], "returned [5, 6.0], expected a sequence of ids"),
    66: (lambda: None, "returned None, expected a sequence of ids"),
    67: (lambda: "ab", "returned 'ab', expected a sequence of ids"),
    68: (lambda: [5] * (K + 1), "proposed more than 3 ids: [5, 5, 5, 5]"),
    69: (lambda: itertools.count(), "proposed more than 3 ids: [0, 1, 2, 3]"),
}
TREE_FAULTS = {
    60: (lambda: [5, 6, 7], "returned [5, 6, 7], expected ids and parents"),
    61: (lambda: ([5, 6], [0]), "proposed 2 ids and 1 parents"),
    62: (lambda: ([5, 6], [0, 2]), "proposed parent 2 of id 2, expected 0 to 1"),
    63: (lambda: ([5], [-1]), "proposed parent -1 of id 1, expected"),
    64: (lambda: ([5], [None]), "returned ([5], [None]), expected ids"),
}


@pytest.mark.parametrize("tree", [False, True])
def test_user_drafter_error_fails_only_its_request(device, tree):
    """If the function raises or returns an invalid result, the request finishes with an error.

    The error names the function and the exception or value. The other requests use their drafts
    and therefore take fewer rounds.
    """
    faults = TREE_FAULTS if tree else FAULTS
    requests = [free(first) for first in (*faults, 70, 71)] + mixed_requests(2)
    expected = generate(None, requests)
    known = []
    for request, output in zip(requests, expected, strict=True):
        if request.tokens:
            known.append([*request.tokens, *output.tokens])

    def faulty(tokens):
        if tokens[0] in faults:
            return faults[tokens[0]][0]()
        text = tokens
        for candidate in known:
            if candidate[: len(tokens)] == tokens:
                text = candidate
                break
        ids = text[len(tokens) :][:2]
        if not tree:
            return ids
        return [9, *ids], [0, 0, 2][: len(ids) + 1]

    outputs = generate(UserDrafter.of(faulty, tree=tree, deadline_s=10), requests)
    for output, correct, (_, message) in zip(outputs, expected, faults.values(), strict=False):
        assert (output.reason, output.error_type) == ("error", "DrafterError")
        assert ".faulty " in output.error and message in output.error, output.error
        assert output.tokens == correct.tokens[:1]
    good = slice(len(faults), None)
    assert answers(outputs[good]) == answers(expected[good])
    # The first round commits one token and every other round three tokens.
    for output in outputs[good][:2]:
        assert output.rounds == -(-(len(output.tokens) + 2) // 3)


def test_user_drafter_deadline_continues_without_drafts(device, caplog):
    """If the function exceeds the deadline, the engine logs one warning and makes no drafts.

    The engine uses drafts again after the function has returned.
    """
    resume = threading.Event()
    calls = []

    def stuck(tokens):
        calls.append(tokens[0])
        if tokens[0] == 60:
            resume.wait()
        return [tokens[-1]]

    requests = [free(60), free(61), *mixed_requests(1)]
    expected = generate(None, [*requests, free(62)])
    drafter = UserDrafter.of(stuck, deadline_s=1.0)
    with settled(Engine(TARGET, drafter, max_batch_size=3)) as engine:
        outputs = engine.generate(requests)
        assert len(calls) <= 3 and caplog.text.count("stuck did not return within 1 s") == 1
        resume.set()
        outputs += engine.generate([free(62)])
        assert calls.count(62) > 3
    assert answers(outputs) == answers(expected)


def test_user_drafter_that_hangs_does_not_block_engine_close(device):
    """An engine can be closed while the function hangs; its thread exits when it returns."""
    forever = threading.Event()
    outputs = generate(UserDrafter.of(lambda tokens: forever.wait(), deadline_s=0.02), [free(60)])
    assert outputs[0].reason in ("stop", "length")
    forever.set()
    for thread in threading.enumerate():
        if thread.name.startswith("drafter "):
            thread.join(10)
            assert not thread.is_alive(), thread.name


async def coroutine(tokens):
    """A coroutine function, which a thread cannot call."""


@pytest.mark.parametrize(
    "drafter, words",
    [
        (UserDrafter.of(7), "must be callable, not int"),
        (UserDrafter.of(coroutine), "would never run"),
        (UserDrafter.of(list, deadline_s=0), "drafter list: deadline_s is 0, must be above 0"),
        (UserDrafter.of(list, deadline_s=float("nan")), "deadline_s is nan"),
        (UserDrafter.of(list, deadline_s="1"), "deadline_s is '1'"),
    ],
)
def test_user_drafter_rejects_invalid_arguments(device, drafter, words):
    with pytest.raises(OptionError, match=words):
        Engine(TARGET, drafter, max_batch_size=1)
