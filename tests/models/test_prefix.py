"""Prefix cache: lookup, eviction, and outputs with and without the cache."""

import json
import random

import pytest
from engine_cases import LOOKUP_CASCADE, answers_and_drafts, propose_repeat
from engine_util import TARGET, demo_engine, mixed_requests
from tiny_models import make_tiny_mtp

from graft.models.cache.kv import PagedKV
from graft.models.cache.prefix import PrefixCache
from graft.models.drafters import NGram, UserDrafter
from graft.models.errors import RequestError
from graft.models.request import Request

PAGE_SIZE = 4
PAGES = 12


def make_cache(device, pages=PAGES):
    return PagedKV(
        device,
        layers=1,
        pages=pages,
        page_size=PAGE_SIZE,
        kv_heads=1,
        head_dim=4,
        dtype="bfloat16",
        slots=3,
        max_pages_per_slot=8,
    )


def random_texts(rng, count):
    """Return random sequences of the tokens 0 and 1, many of which have common prefixes."""
    texts = []
    for _ in range(count):
        length = rng.randrange(2, 26)
        texts.append([rng.randrange(2) for _ in range(length)])
    return texts


def assign_pages(prefixes, caches, slot, tokens):
    """Allocate a slot's pages for a token sequence, beginning with the cached pages.

    Return the cached pages that were used, or None if there are not enough pages.
    """
    found = prefixes.match(prefixes.keys(tokens))
    num_pages = -(-len(tokens) // PAGE_SIZE)
    prefixes.evict_until_free(num_pages - len(found), found)
    for i, cache in enumerate(caches):
        if not cache.allocate(slot, len(tokens), [group[i] for group in found]):
            return None
    return found


def pages_of_slots(cache, slots):
    """Return the set of all pages of several slots."""
    pages = set()
    for slot in slots:
        pages.update(cache.pages_of(slot))
    return pages


def release_slot(caches, slot):
    for cache in caches:
        cache.release(slot)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_prefix_cache_finds_longest_cached_prefix(device, lookahead):
    """A page is found if all tokens up to its end and its lookahead tokens are equal.

    The page that contains the last token is never returned.
    """
    rng = random.Random(lookahead)
    caches = [make_cache(device, 400), make_cache(device, 401)]
    prefixes = PrefixCache(caches, lookahead, 400)
    expected = {}
    num_found = 0
    for tokens in random_texts(rng, 60):
        prefix_ends = range(PAGE_SIZE, len(tokens), PAGE_SIZE)
        prefix_keys = [tuple(tokens[: end + lookahead]) for end in prefix_ends]
        found = assign_pages(prefixes, caches, 0, tokens)
        assert found == [expected[key] for key in prefix_keys if key in expected]
        num_found += len(found)
        prefixes.insert(0, tokens)
        groups = list(zip(*(cache.pages_of(0) for cache in caches), strict=True))
        for group, key in zip(groups, prefix_keys, strict=False):
            expected.setdefault(key, group)
        release_slot(caches, 0)
    assert num_found > 20


def test_prefix_cache_evicts_least_recently_used_unused_pages(device):
    """Random operations never lose a page, assign it twice or exceed the maximum cache size.

    The operations join and leave slots, and insert the pages of migrated requests.
    """
    rng = random.Random(3)
    caches = [make_cache(device), make_cache(device)]
    prefixes = PrefixCache(caches, 1, 7)
    texts = {}  # by slot
    migrated = []

    def write(groups, indices):
        assert not {page for page, _ in groups} - set(caches[0].free)
        migrated.extend(indices)

    for tokens in random_texts(rng, 600):
        slot = rng.randrange(4)
        if slot == 3:
            prefixes.insert_migrated(prefixes.keys(tokens), write)
        elif slot in texts:
            prefixes.insert(slot, texts.pop(slot))
            release_slot(caches, slot)
        else:
            found = assign_pages(prefixes, caches, slot, tokens)
            if found is None:
                release_slot(caches, slot)
            else:
                new = set(caches[0].pages_of(slot)[len(found) :])
                assert not new & pages_of_slots(caches[0], texts)
                assert not new & set(caches[0].free)
                texts[slot] = tokens
        owned = pages_of_slots(caches[0], range(3))
        assert len(owned) + len(caches[0].free) + prefixes.num_unused == PAGES
        assert len(prefixes) <= 7
    assert prefixes.evictions > 50 and len(migrated) > 50
    for slot in texts:
        release_slot(caches, slot)
    before = len(prefixes)
    prefixes.evict_until_free(PAGES + 1, ())
    assert len(prefixes) == before, "pages were evicted although that does not suffice"
    first = [0] * 9
    second = [1] * 9
    for tokens in (first, second, first):
        assign_pages(prefixes, caches, 0, tokens)
        prefixes.insert(0, tokens)
        release_slot(caches, 0)
    prefixes.evict_until_free(PAGES - 2, ())
    assert prefixes.count_hits(prefixes.keys(first)) == (2, 2)
    found = prefixes.match(prefixes.keys(first))
    prefixes.evict_until_free(PAGES, found)
    assert prefixes.match(prefixes.keys(first)) == found, "pages to keep were evicted"
    version = prefixes.version
    assign_pages(prefixes, caches, 0, first)
    assert prefixes.version != version and prefixes.count_hits(prefixes.keys(first)) == (2, 0)
    release_slot(caches, 0)
    assert not prefixes.match(prefixes.keys(second))
    prefixes.clear()
    assert len(caches[0].free) == len(caches[1].free) == PAGES


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": LOOKUP_CASCADE},
        {"drafter": UserDrafter.of(propose_repeat, deadline_s=30)},
        *(
            pytest.param(options, marks=pytest.mark.full)
            for options in (
                {},
                {"draft_length": 6, "draft_tree": (2, 3)},
                {"speculation": False},
                {"drafter": NGram},
            )
        ),
    ],
)
@pytest.mark.full("options0")
def test_prefix_cache_does_not_change_outputs_or_drafts(options):
    """Tokens, rounds and accepted drafts are the same with and without the prefix cache.

    Equal numbers of accepted drafts show that the cached KV entries of the drafter are correct.
    """
    greedy = mixed_requests(3, seed=3)
    sampled = {"seed": 5, "temperature": 0.8, "verify": "coupled"}
    coupled = [Request(prompt=r.prompt, max_tokens=30, **sampled) for r in greedy]
    requests = [*greedy, *coupled, *greedy]
    results = []
    cached = []
    for cache_bytes in (0, None):
        with demo_engine(
            max_batch_size=2, prefix_cache_bytes=cache_bytes, page_size=8, **options
        ) as engine:
            outputs = engine.generate(requests)
            results.append(answers_and_drafts(outputs))
            cached.append([o.cached_tokens for o in outputs])
            engine.synchronize()
            counters = engine.counters()
            assert not any(counters["held"].values()), counters["held"]
            assert sum(cached[-1]) == counters["prefixes"]["hit_tokens"]
            assert bool(counters["prefixes"]["pages"]) == (cache_bytes is None)
    assert results[0] == results[1] and not any(cached[0])
    for num_cached, output in zip(cached[1][6:], outputs[6:], strict=True):
        assert 8 <= num_cached < output.prompt_tokens


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param({"max_tokens": 11}, marks=pytest.mark.full),
        {"max_tokens": 40, "stop_ids": [257]},
    ],
    ids=str,
)
def test_prefix_cache_excludes_pages_the_drafter_has_not_processed(ending):
    """Pages with tokens that the drafter has not processed are not cached.

    These are pages of the last tokens of an output. Requests that continue such an output therefore
    get the same drafts as without the cache.
    """
    results = []
    for cache_bytes in (0, None):
        with demo_engine(max_batch_size=1, page_size=1, prefix_cache_bytes=cache_bytes) as engine:
            results.append([])
            tokens = [300, *range(260, 275)]
            for _ in range(3):
                output = engine.generate([Request(tokens=tokens, **ending)])[0]
                results[-1].append((output.tokens, output.drafted, output.accepted))
                tokens = [*tokens, *output.tokens, 41]
            assert (output.cached_tokens > 16) == (cache_bytes is None)
    assert results[0] == results[1]


def test_prefix_cache_warm_prompt_is_not_prefilled_again():
    """`Engine.warm` caches all pages of a prompt except for the last one.

    If the cache is disabled, `warm` caches nothing. If the request is refused, `warm` raises.
    """
    shared = "the same beginning of many requests " * 6
    for cache_bytes, min_cached in ((None, 100), (0, 0)):
        with demo_engine(max_batch_size=1, prefix_cache_bytes=cache_bytes) as engine:
            engine.warm(Request(prompt=shared, max_tokens=20, min_tokens=10))
            output = engine.generate([Request(prompt=shared + "and its end", max_tokens=2)])[0]
            assert min_cached <= output.cached_tokens < output.prompt_tokens
            assert bool(output.cached_tokens) == (cache_bytes is None)
            with pytest.raises(RequestError, match="5000"):
                engine.warm(Request(tokens=[5] * 5000))


def test_prefix_cache_is_disabled_for_stateful_mtp_modules(tmp_path):
    """The prefix cache is disabled for a drafter with two multi-token prediction modules.

    Such modules carry state from position to position that KV-cache pages do not contain.
    """
    make_tiny_mtp(tmp_path, json.loads((TARGET / "config.json").read_text()), modules=2)
    with demo_engine(max_batch_size=1, drafter=tmp_path) as engine:
        engine.generate([Request(tokens=range(4, 80), max_tokens=2)])
        assert engine.counters()["prefixes"]["pages"] == 0
