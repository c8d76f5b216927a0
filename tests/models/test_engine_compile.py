"""Grammar compilation: slow and failing grammars do not affect other requests."""

import functools
import re
import threading
import time

from engine_util import demo_engine

from graft.grammar import GrammarError, GrammarSpec, XGrammarBackend
from graft.models.request import Limits, Request

#: Schema nested so deeply that XGrammar takes minutes to compile it for any vocabulary.
ENDLESS = GrammarSpec.json_schema('{"items": ' * 500 + "{}" + "}" * 500, backend="xgrammar")


def test_grammar_compile_timeout_refuses_only_its_request():
    """A grammar that takes too long to compile does not affect eight other requests."""
    cheap = []
    for i in range(8):
        cheap.append(guided(f"cheap {i}", f"[A-Z]{{2}}-{i}"))
    with demo_engine(max_batch_size=4, limits=Limits(compile_s=0.5)) as engine:
        refused, *served = engine.generate([Request(prompt="?", grammar=ENDLESS), *cheap])
        counters = engine.counters()["compile"]
    assert refused.reason == "refused" and not refused.tokens
    assert refused.error == "JSON schema: took longer than 0.5 s"
    assert counters["killed_or_crashed"] == 1
    for i, output in enumerate(served):
        assert output.finished and re.fullmatch(f"[A-Z]{{2}}-{i}", output.text)


class HeldBackend:
    """Grammar backend that waits or fails for certain grammars.

    The grammar "held+" is not compiled before the event `gate` is set. The compilations of
    "refused+" and "crash+" fail. The texts of all grammars are appended to `compiled`.
    """

    name = "held"

    def __init__(self, vocabulary, gate, compiled):
        self.vocabulary = vocabulary
        self.gate = gate
        self.compiled = compiled
        self.inner = XGrammarBackend(vocabulary)
        self.matcher = self.inner.matcher

    def compile(self, spec):
        self.compiled.append(spec.text)
        if spec.text == "held+":
            self.gate.wait()
        if spec.text == "refused+":
            raise GrammarError("regex: not this one")
        if spec.text == "crash+":
            raise KeyError("the compiler failed")
        return self.inner.compile(spec)


def step_until_finished(engine, ids):
    """Step until all requests with these ids have finished, and return all outputs by id."""
    outputs = {}
    deadline = time.monotonic() + 300
    while not ids <= outputs.keys():
        assert time.monotonic() < deadline
        for event in engine.step():
            if event.output is not None:
                outputs[event.id] = event.output
    return outputs


def guided(name, pattern):
    """Return a request whose output must match a regular expression."""
    return Request(prompt="Code?", grammar=GrammarSpec.regex(pattern), max_tokens=24, id=name)


CHEAP = {f"cheap {i}": f"[A-Z]{{2}}-{i}" for i in range(6)}


def test_grammar_compilation_does_not_delay_rounds():
    """Other requests run while a grammar is compiled, and failing grammars do not affect them.

    Requests that wait for a grammar have no slot and can be cancelled. Requests with the same
    grammar share one compilation.
    """
    gate = threading.Event()
    compiled = []
    backend = functools.partial(HeldBackend, gate=gate, compiled=compiled)
    engine = demo_engine(max_batch_size=2, compile_threads=2, grammar_backend=backend)
    try:
        for name in ("held 1", "held 2", "held 3"):
            engine.submit(guided(name, "held+"))
        for name in ("refused", "crash"):
            engine.submit(guided(name, f"{name}+"))
        for name, pattern in CHEAP.items():
            engine.submit(guided(name, pattern))
        outputs = step_until_finished(engine, {*CHEAP, "refused", "crash"})
        assert not gate.is_set() and not {"held 1", "held 2", "held 3"} & outputs.keys()
        assert engine.counters()["held"]["slots"] == 0 and engine.busy
        for name, pattern in CHEAP.items():
            assert outputs[name].finished and re.fullmatch(pattern, outputs[name].text)
        assert outputs["refused"].reason == "refused"
        assert outputs["refused"].error == "regex: not this one"
        assert outputs["crash"].reason == "error"
        assert outputs["crash"].error == "regex: KeyError: 'the compiler failed'"
        assert engine.cancel("held 2")
        assert step_until_finished(engine, {"held 2"})["held 2"].reason == "cancelled"
        gate.set()
        outputs = step_until_finished(engine, {"held 1", "held 3"})
        assert all(re.match("held", output.text) for output in outputs.values())
        assert outputs["held 1"].tokens == outputs["held 3"].tokens
        assert compiled.count("held+") == 1
        [again] = engine.generate([guided("again", "held+")])
        assert again.tokens == outputs["held 1"].tokens
        assert compiled.count("held+") == 1
        assert engine.counters()["grammar"]["errors"] == 0
    finally:
        gate.set()
        engine.close()


def test_cancelled_request_leaves_the_compile_queue():
    """A grammar is not compiled if all its requests are cancelled before its compilation begins."""
    gate = threading.Event()
    compiled = []
    backend = functools.partial(HeldBackend, gate=gate, compiled=compiled)
    engine = demo_engine(max_batch_size=2, compile_threads=1, grammar_backend=backend)
    try:
        for name in ("held", "cancelled", "shared", "kept"):
            engine.submit(guided(name, f"{name}+"))
        engine.submit(guided("other", "shared+"))
        assert engine.cancel("cancelled") and engine.cancel("other")
        gate.set()
        step_until_finished(engine, {"held", "shared", "kept"})
        assert compiled == ["held+", "shared+", "kept+"]
    finally:
        gate.set()
        engine.close()
