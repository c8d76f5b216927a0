"""The prefix cache: which pages it finds, which it gives up, and that no output knows of it."""

import json
import random

import pytest
from engine_util import TARGET, demo_engine, mixed_requests
from test_engine_equality import LOOKUP_AHEAD, repeat
from tiny_models import make_tiny_mtp

from graft.models.cache.kv import PagedKV
from graft.models.cache.prefix import PrefixCache
from graft.models.drafters import NGram, UserDrafter
from graft.models.errors import RequestError
from graft.models.request import Request

SIZE = 4  # positions of a page


def pool(device, pages=12, **changes):
    return PagedKV(
        device,
        layers=1,
        pages=pages,
        page_size=SIZE,
        kv_heads=1,
        head_dim=4,
        dtype="bfloat16",
        slots=3,
        max_pages_per_slot=8,
    )


def texts_of(rng, count):
    """Texts of two tokens that often begin alike."""
    return [[rng.randrange(2) for _ in range(rng.randrange(2, 26))] for _ in range(count)]


def put(prefixes, caches, slot, tokens):
    """Let a slot have a text's pages, found ones first; what was found, None without room."""
    found = prefixes.match(prefixes.keys(tokens))
    prefixes.make_room(-(-len(tokens) // SIZE) - len(found), found)
    for i, cache in enumerate(caches):
        if not cache.allocate(slot, len(tokens), [pages[i] for pages in found]):
            return None
    return found


@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_is_found_is_the_longest_prefix_that_was_kept(device, lookahead):
    """Of random texts: whole pages that begin alike, the token behind them too where entries depend
    on it, and never the last token; each page is the one that was written for it."""
    rng = random.Random(lookahead)
    caches = [pool(device, 400), pool(device, 401)]
    prefixes = PrefixCache(caches, lookahead, 400)
    kept = {}
    found_at_all = 0
    for tokens in texts_of(rng, 60):
        ends = [
            end
            for end in range(SIZE, len(tokens), SIZE)
            if tuple(tokens[: end + lookahead]) in kept
        ]
        found = put(prefixes, caches, 0, tokens)
        assert found == [kept[tuple(tokens[: end + lookahead])] for end in ends]
        found_at_all += len(found)
        prefixes.keep(0, tokens)
        pages = list(zip(*(cache.pages_of(0) for cache in caches), strict=True))
        for page, end in zip(pages, range(SIZE, len(tokens), SIZE), strict=False):
            kept.setdefault(tuple(tokens[: end + lookahead]), page)
        for cache in caches:
            cache.release(0)
    assert found_at_all > 20


def test_pages_are_given_up_by_age_and_never_in_use(device):
    """Whatever comes and goes: owned pages are nobody else's but by sharing, all are accounted for,
    those adopted too, the bound holds, and what was used last is there longest."""
    rng = random.Random(3)
    caches = [pool(device), pool(device)]
    prefixes = PrefixCache(caches, 1, 7)
    held = {}
    adopted = []

    def write(pages, which):
        assert not {page for page, _ in pages} - set(caches[0].free)
        adopted.extend(which)

    for tokens in texts_of(rng, 600):
        slot = rng.randrange(4)
        if slot == 3:
            prefixes.adopt(prefixes.keys(tokens), write)
        elif slot in held:
            prefixes.keep(slot, held.pop(slot))
            for cache in caches:
                cache.release(slot)
        elif (found := put(prefixes, caches, slot, tokens)) is not None:
            held[slot] = tokens
            others = {page for s in held if s != slot for page in caches[0].pages_of(s)}
            new = caches[0].pages_of(slot)[len(found) :]
            assert not others & set(new) and not set(new) & set(caches[0].free)
        else:
            for cache in caches:
                cache.release(slot)
        owned = {page for s in range(3) for page in caches[0].pages_of(s)}
        assert len(owned) + len(caches[0].free) + prefixes.unused == 12 and len(prefixes) <= 7
    assert prefixes.evictions > 50 and len(adopted) > 50
    for slot in held:
        for cache in caches:
            cache.release(slot)
    before = len(prefixes)
    prefixes.make_room(13, ())
    assert len(prefixes) == before, "what would not do was given up all the same"
    first = [0] * 9
    second = [1] * 9
    for tokens in (first, second, first):
        put(prefixes, caches, 0, tokens)
        prefixes.keep(0, tokens)
        for cache in caches:
            cache.release(0)
    prefixes.make_room(12 - 2, ())
    assert prefixes.count(prefixes.keys(first)) == 2 and not prefixes.match(prefixes.keys(second))
    prefixes.clear()
    assert len(caches[0].free) == len(caches[1].free) == 12


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drafter": LOOKUP_AHEAD},
        {"drafter": UserDrafter.of(repeat, deadline_s=30)},
        *(
            pytest.param(options, marks=pytest.mark.full)
            for options in (
                {"draft_length": 6, "draft_tree": (2, 3)},
                {"speculation": False},
                {"drafter": NGram},
            )
        ),
    ],
)
def test_no_output_and_no_draft_knows_of_it(options):
    """Requests that begin alike, many over: the same tokens, and as many drafts tested and
    accepted, so what a drafter keeps of a prefix is whole."""
    asked = mixed_requests(5, seed=3)
    asked += [
        Request(prompt=r.prompt, max_tokens=30, seed=5, temperature=0.8, verify="coupled")
        for r in asked
    ] + asked
    seen = []
    cached = []
    for kept in (0, None):
        with demo_engine(
            max_batch_size=2, prefix_cache_bytes=kept, page_size=8, **options
        ) as engine:
            outputs = engine.generate(asked)
            seen.append([(o.tokens, o.rounds, o.drafted, o.accepted) for o in outputs])
            cached.append([o.cached_tokens for o in outputs])
            engine.settle()
            counters = engine.counters()
            assert not any(counters["held"].values()), counters["held"]
            assert sum(cached[-1]) == counters["prefixes"]["hit_tokens"]
            assert bool(counters["prefixes"]["pages"]) == (kept is None)
    assert seen[0] == seen[1] and not any(cached[0])
    assert all(8 <= n < o.prompt_tokens for n, o in zip(cached[1][10:], outputs[10:], strict=True))


@pytest.mark.parametrize(
    "ending", [{"max_tokens": 11}, {"max_tokens": 40, "stop_ids": [257]}], ids=str
)
def test_a_conversation_goes_on_from_what_was_said(ending):
    """Of an answer that the device ended, what its drafter never took in is not shared: what goes
    on behind it has the drafts that it would have had."""
    told = []
    for kept in (0, None):
        with demo_engine(max_batch_size=1, page_size=1, prefix_cache_bytes=kept) as engine:
            told.append([])
            for seed in range(6):
                tokens = [300 + seed, *range(260, 275)]
                for _ in range(3):
                    output = engine.generate([Request(tokens=tokens, **ending)])[0]
                    told[-1].append((output.tokens, output.drafted, output.accepted))
                    tokens = [*tokens, *output.tokens, 41]
            assert (output.cached_tokens > 16) == (kept is None)
    assert told[0] == told[1]


def test_warm_prompts_need_no_forward():
    """After `warm` a request's prompt is found but for its last page; one that is refused raises;
    and with the cache switched off nothing is kept."""
    system = "the same beginning of many requests " * 6
    for kept, least in ((None, 100), (0, 0)):
        with demo_engine(max_batch_size=1, prefix_cache_bytes=kept) as engine:
            engine.warm(Request(prompt=system))
            output = engine.generate([Request(prompt=system + "and its end", max_tokens=2)])[0]
            assert least <= output.cached_tokens < output.prompt_tokens
            assert bool(output.cached_tokens) == (kept is None)
            with pytest.raises(RequestError, match="5000"):
                engine.warm(Request(tokens=[5] * 5000))


def test_modules_that_carry_state_share_nothing(tmp_path):
    """A drafter whose entries are of use to nobody else switches it off."""
    make_tiny_mtp(tmp_path, json.loads((TARGET / "config.json").read_text()), modules=2)
    with demo_engine(max_batch_size=1, drafter=tmp_path) as engine:
        engine.generate([Request(tokens=range(4, 80), max_tokens=2)])
        assert engine.counters()["prefixes"]["pages"] == 0
