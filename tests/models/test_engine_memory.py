"""Memory of finished requests: the engine keeps no reference to them, whatever it caches."""

import ctypes
import gc
import weakref

import pytest
from engine_util import demo_engine
from guide_util import output_of

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
    """Requests that finish, are refused or are cancelled during a compilation are freed."""
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


CLOSED = """
import ctypes
from graft.grammar import GrammarSpec
from graft.models.engine.engine import Engine
from graft.models.request import Request
from graft.tools.demo_model import demo_model

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20

target, _ = demo_model()
requests = []
for i in range(4):
    properties = {f"key_{i}_{j}": {"type": "string", "pattern": "[a-z]{2,9}"} for j in range(40)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    spec = GrammarSpec.json_schema(schema, backend="xgrammar")
    requests.append(Request(prompt="x", grammar=spec, max_tokens=2))
with Engine(target, max_batch_size=1) as engine:
    engine.generate(requests)
    del requests
del engine
closed = resident()
ctypes.CDLL(None).malloc_trim(0)
print(closed - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_closed_engine_returns_memory_to_the_system():
    """After an engine is closed, the C library returns the memory of its grammars to the system."""
    assert int(output_of(CLOSED)) < 8  # MiB; measured: 0, and 15 without return_free_memory
