"""Who runs when: pieces of prompts between rounds, the order of those who wait, pages on demand."""

from dataclasses import replace

import pytest
from engine_util import demo_engine, mixed_requests
from test_engine_equality import BLOCK, GROWN, LOOKUP_AHEAD, TARGET, Meaningless, answer, settled

from graft.models.drafters import NGram
from graft.models.engine.slots import SlotManager
from graft.models.request import Request
from graft.models.round.prefill import CHUNK, MOST, SIZES, PrefillScheduler, size_of

RUNS = Request(tokens=[300, 301, 302], max_tokens=120, min_tokens=120, id="runs")


def test_a_prompt_comes_in_pieces_between_rounds():
    """While a long prompt is read, who runs is in every round, and no more rows of the prompt lie
    between two of them than asked; alone, it is read as a whole."""
    launched = []
    with settled(demo_engine(max_batch_size=2, prefill_rows=16)) as engine:
        prompts = engine._built.prefill
        replays = engine._replays
        run = prompts.run
        launch = replays.launch

        def pieces_of(*args):
            for piece in run(*args):
                launched.append(piece.rows)
                yield piece

        def round_of(graph, rows):
            launched.append({running.id for running in rows})
            launch(graph, rows)

        prompts.run = pieces_of
        replays.launch = round_of
        engine.submit(RUNS)
        engine.step()
        engine.submit(Request(tokens=[7 + i % 90 for i in range(280)], max_tokens=3, id="long"))
        while "long" in engine._scheduler.unfinished:
            engine.step()
        pieces = [0]
        rounds = [one for one in launched if isinstance(one, set)]
        for one in launched[launched.index({"runs"}) :]:
            if isinstance(one, set):
                pieces.append(0)
            else:
                pieces[-1] += one
        assert max(pieces) == 16 and sum(pieces) == 280 and pieces.count(16) == 17
        assert all("runs" in one for one in rounds) and {"runs", "long"} in rounds
        engine.cancel("runs")
        launched.clear()
        engine.generate([Request(tokens=[9 + i % 80 for i in range(300)], max_tokens=1)])
        assert [one for one in launched if isinstance(one, int)] == [256, 44]


@pytest.mark.parametrize("fixed, each", [(0.0, 1e-4), (2e-3, 1e-5), (9e-3, 1e-6), (1e-3, 0.0)])
@pytest.mark.parametrize("round_s", [1e-3, 4e-3, 1e-2])
@pytest.mark.parametrize("warmed", [False, True])
def test_a_piece_takes_as_long_as_a_round(fixed, each, round_s, warmed):
    """Whatever a forward and each row of it take: the most rows that take no more than 0.8 of a
    round, or four, and next to never more than 1.5; fewer where nobody measured and twice as many
    might take twice as long; also after some that were slow for no reason."""

    def cost(rows):
        return fixed * -(-rows // CHUNK) + each * max(rows, 4)

    pieces = PrefillScheduler(None)
    made = []
    slow = [100, 300]
    for size in SIZES if warmed else (CHUNK, 64):
        pieces.took(size, cost(size))
    for number in range(2000):
        made.append(pieces.rows(round_s))
        forward = min(made[-1], CHUNK)
        pieces.took(forward, cost(forward) * (10 if number in slow else 1))
        pieces.took(1, cost(4))  # the rest of a prompt
    sizes = [*SIZES, *range(2 * CHUNK, MOST + 1, CHUNK)]
    fits = [rows for rows in sizes if cost(rows) <= 0.8 * round_s] or [4]
    late = [rows for rows in made if rows > 4 and cost(rows) > 1.5 * round_s]
    assert set(made) <= {*sizes} and len(late) <= 3
    halves = [rows for rows in fits if 2 * cost(rows // 2) <= 0.8 * round_s] or [4]
    assert made[-1] == fits[-1] if warmed else halves[-1] <= made[-1] <= fits[-1]
    assert PrefillScheduler(77).rows(round_s) == 77 and PrefillScheduler(77).used(5, 77) == 5
    pieces = PrefillScheduler(None)
    for size in SIZES:
        pieces.took(size, cost(size))
    for rows, room in ((5, 64), (8, 16), (200, 256), (9, 256), (60, 512)):
        used = pieces.used(rows, room)
        whole = min(room, CHUNK)
        assert rows <= used <= whole
        assert used == rows or abs(used / whole - cost(size_of(rows)) / cost(whole)) < 1 / whole


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.full)
            for options in (
                {"draft_length": 6, "draft_tree": (2, 3)},
                {"drafter": NGram},
                {"drafter": TARGET},
                {"drafter": BLOCK},
                {"speculation": False},
            )
        ),
    ],
    ids=str,
)
def test_the_size_of_pieces_changes_nothing(options):
    """However prompts are cut between the rounds of others, outputs are the same, and of greedy and
    coupled ones drafts and acceptance too."""
    asked = [replace(r, prompt=r.prompt * 3) for r in mixed_requests(3, seed=5, max_tokens=12)]
    asked += [
        Request(
            tokens=[3 + i % 250 for i in range(290)],
            max_tokens=9,
            seed=4,
            temperature=0.9,
            verify="coupled",
        )
    ]
    seen = []
    for rows in (512, 16, 100):
        with settled(demo_engine(max_batch_size=2, prefill_rows=rows, **options)) as engine:
            outputs = engine.generate(asked)
            seen.append([(answer(o), o.rounds, o.drafted, o.accepted) for o in outputs])
    assert seen[0] == seen[1] == seen[2]


def order_of(engine, requests):
    """Ids in the order in which requests that are submitted at once get their slots."""
    return [event.id for event in engine.stream(requests) if event.finished]


def test_who_waits_is_served_by_priority_then_by_what_is_cached():
    """The highest priority first; of one priority who has most pages in the prefix cache, and of
    those the first; but who is first in line is passed over sixteen times only."""
    short = {"max_tokens": 1, "grammar": None}
    shared = list(range(50, 70))
    with settled(demo_engine(max_batch_size=1, page_size=4)) as engine:
        engine.warm(Request(tokens=shared))
        asked = {
            "cold": (90, 0, 0),
            "half": (91, 8, 0),
            "most": (92, 19, 0),
            "late": (93, 0, 0),
            "low": (94, 19, -1),
            "urgent": (95, 0, 2),
            "same": (96, 19, 0),
        }
        requests = [
            Request(tokens=[*shared[:n], *[own] * 6], priority=priority, id=name, **short)
            for name, (own, n, priority) in asked.items()
        ]
        assert order_of(engine, requests) == [
            "urgent",
            "most",
            "same",
            "half",
            "cold",
            "late",
            "low",
        ]
        cold = Request(tokens=[97] * 9, id="cold", **short)
        warm = [Request(tokens=[*shared, 100 + i], id=str(i), **short) for i in range(20)]
        order = order_of(engine, [cold, *warm])
        assert order == [*map(str, range(16)), "cold", *map(str, range(16, 20))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_length": 6, "draft_tree": (2, 3)},
        {"speculation": False, "overlap": False},
        *(
            pytest.param(options, marks=pytest.mark.full)
            for options in (
                {"drafter": NGram},
                {"drafter": TARGET},
                {"drafter": BLOCK},
                {"prefix_cache_bytes": 0},
                {"draft_length": "auto"},
                {"drafter": BLOCK, "draft_length": 6, "draft_tree": (2, 3)},
                {"composition": "two"},
                {"draft_masking": "probe"},
            )
        ),
    ],
    ids=str,
)
def test_pages_that_run_out_change_nothing(options):
    """Requests take pages as they grow. Where there are enough for one of them only, those of the
    lowest priority and then the youngest lose theirs, and all get what they get elsewhere; one that
    would need more is refused."""
    free = Request(tokens=range(300, 309), max_tokens=48, min_tokens=48)
    asked = [*mixed_requests(3, seed=5, max_tokens=40), free, replace(free, tokens=range(60, 80))]
    asked += [replace(r, temperature=0.9, verify="coupled", seed=i) for i, r in enumerate(asked)]
    asked = [replace(r, id=str(i), priority=int(i == 4)) for i, r in enumerate(asked)]
    with settled(demo_engine(speculation=False, max_batch_size=4)) as engine:
        expected = engine.generate(asked)
    most = max(
        output.prompt_tokens + r.max_tokens for output, r in zip(expected, asked, strict=True)
    )
    slack = options.get("draft_tree") is not None and 6
    pages = -(-(most + slack) // 4)
    sizes = {"max_batch_size": 4, "page_size": 4, "pages": pages}
    with settled(demo_engine(**sizes, prefill_rows=512, **options)) as engine:  # all join at once
        *outputs, refused = engine.generate([*asked, replace(free, max_tokens=4 * pages - slack)])
        assert [answer(o) for o in outputs] == [answer(o) for o in expected]
        assert sum(o.preempted for o in outputs) == engine.stats.preemptions > 0
        assert outputs[4].preempted == 0 and refused.error_type == "RequestError"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_length": 6, "draft_tree": (2, 3)},
        *(
            pytest.param(options, marks=pytest.mark.full)
            for options in (
                {"drafter": TARGET},
                {"drafter": BLOCK},
                {"drafter": BLOCK, **GROWN},
                {"drafter": Meaningless(1)},
                {"drafter": LOOKUP_AHEAD},
            )
        ),
    ],
    ids=str,
)
def test_drafts_have_pages_too(options, monkeypatch):
    """Of pages of one position, taken as a request grows, none is missed by a round in flight or by
    its drafts: they are what they are with pages for the whole request."""
    asked = [*mixed_requests(2, seed=5, max_tokens=50), RUNS]
    seen = []
    for _ in range(2):
        with settled(demo_engine(max_batch_size=2, page_size=1, **options)) as engine:
            outputs = engine.generate(asked)
            seen.append([(o.tokens, o.rounds, o.drafted, o.accepted) for o in outputs])
        monkeypatch.setattr(SlotManager, "_needed", lambda self, one: one.limit + self._slack)
    assert seen[0] == seen[1]
