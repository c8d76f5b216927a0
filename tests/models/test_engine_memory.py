"""Memory of finished requests: the engine keeps nothing of them, whatever it caches."""

import gc
import weakref

from engine_util import demo_engine

from graft.grammar import GrammarSpec
from graft.models.request import Request

PATTERNS = ("[a-c]{2}", "(refused", "[d-f]{2}", "[a-c]{2}", "(refused")


def submit_all(engine):
    """Submit requests with and without grammars; return weak references to them and their states.

    Some requests wait for the same compilation, and some find its result in the cache.
    """
    references = []
    for pattern in PATTERNS:
        request = Request(prompt="code", grammar=GrammarSpec("regex", pattern), max_tokens=4)
        name = engine.submit(request)
        references.append(weakref.ref(request))
        references.append(weakref.ref(engine._scheduler.unfinished[name]))
    return references


def num_alive(references):
    """Return the number of live objects after a garbage collection."""
    gc.collect()
    return sum(reference() is not None for reference in references)


def test_engine_frees_finished_requests_while_their_grammars_are_cached():
    """This includes requests that are cancelled during a compilation, and refused requests."""
    with demo_engine(speculation=False, max_batch_size=2) as engine:
        references = submit_all(engine)
        cancelled = engine.submit(
            Request(prompt="code", grammar=GrammarSpec.regex("[x-z]{3}"), id="cancelled")
        )
        references.append(weakref.ref(engine._scheduler.unfinished[cancelled]))
        engine.cancel(cancelled)
        while engine.busy:
            engine.step()
        references += submit_all(engine)
        while engine.busy:
            engine.step()
        engine.synchronize()
        assert engine.counters()["compile"]["cache_entries"] >= 3
        assert num_alive(references) == 0


def test_closed_engine_is_freed_while_its_grammars_are_cached():
    """An engine that shares the cache keeps no part of a closed engine alive."""
    options = {"speculation": False, "max_batch_size": 1}
    with demo_engine(**options) as other:
        with demo_engine(**options) as engine:
            references = [weakref.ref(engine._scheduler), *submit_all(engine)]
            while engine.busy:
                engine.step()
        del engine
        assert other.counters()["compile"]["cache_entries"] >= 3
        assert num_alive(references) == 0
