"""Grammars that compile slowly, or not at all, beside others in one engine."""

import functools
import re
import threading
import time

from engine_util import demo_engine

from graft.grammar import GrammarError, GrammarSpec, XGrammarBackend
from graft.models.request import Request

#: Nested so deeply that XGrammar takes minutes, whatever the vocabulary.
ENDLESS = GrammarSpec.json_schema('{"items": ' * 500 + "{}" + "}" * 500, backend="xgrammar")


def test_a_runaway_grammar_costs_its_request_only():
    """Twenty cheap requests are served; the one whose grammar runs away is refused by its limit."""
    cheap = [guided(f"cheap {i}", f"[A-Z]{{2}}-{i}") for i in range(20)]
    with demo_engine(max_batch_size=4, compile_timeout_s=2) as engine:
        refused, *served = engine.generate([Request(prompt="?", grammar=ENDLESS), *cheap])
        counters = engine.counters()["compile"]
    assert refused.reason == "refused" and not refused.tokens
    assert refused.error == "json_schema: took longer than 2 s to compile"
    assert counters["killed_or_crashed"] == 1
    for i, output in enumerate(served):
        assert output.finished and re.fullmatch(f"[A-Z]{{2}}-{i}", output.text)


class HeldBackend:
    """A user's own: some grammars compile when a gate opens; some fail."""

    name = "held"

    def __init__(self, vocabulary, gate, asked):
        self.vocabulary = vocabulary
        self.gate = gate
        self.asked = asked
        self.inner = XGrammarBackend(vocabulary)
        self.matcher = self.inner.matcher

    def compile(self, spec):
        self.asked.append(spec)
        if spec.text == "held+":
            self.gate.wait()
        if spec.text == "refused+":
            raise GrammarError("regex: not this one")
        if spec.text == "crash+":
            raise KeyError("the compiler fell over")
        return self.inner.compile(spec)


def drive(engine, ended):
    """Step until all of these have ended; the outputs that came."""
    outputs = {}
    deadline = time.monotonic() + 300
    while not ended <= outputs.keys():
        assert time.monotonic() < deadline
        outputs |= {e.id: e.output for e in engine.step() if e.output is not None}
    return outputs


def guided(name, pattern):
    return Request(prompt="Code?", grammar=GrammarSpec.regex(pattern), max_tokens=24, id=name)


CHEAP = {f"cheap {i}": f"[A-Z]{{2}}-{i}" for i in range(6)}


def test_compiling_delays_no_round():
    """While one grammar does not get on, others join, run and end; those who wait for it sit in no
    batch, share one compile, and can be cancelled; compiles that fail harm nobody else."""
    gate = threading.Event()
    asked = []
    backend = functools.partial(HeldBackend, gate=gate, asked=asked)
    engine = demo_engine(max_batch_size=2, compile_threads=2, grammar_backend=backend)
    try:
        for name in ("held 1", "held 2", "held 3"):
            engine.submit(guided(name, "held+"))
        for name in ("refused", "crash"):
            engine.submit(guided(name, f"{name}+"))
        for name, pattern in CHEAP.items():
            engine.submit(guided(name, pattern))
        outputs = drive(engine, {*CHEAP, "refused", "crash"})
        assert not gate.is_set() and not {"held 1", "held 2", "held 3"} & outputs.keys()
        assert engine.counters()["held"]["slots"] == 0 and engine.busy
        for name, pattern in CHEAP.items():
            assert outputs[name].finished and re.fullmatch(pattern, outputs[name].text)
        for name, why in (("refused", "not this one"), ("crash", "KeyError: 'the compiler fell")):
            assert outputs[name].reason == "refused" and why in (outputs[name].error or "")
        assert engine.cancel("held 2")
        assert drive(engine, {"held 2"})["held 2"].reason == "cancelled"
        gate.set()
        outputs = drive(engine, {"held 1", "held 3"})
        assert all(re.match("held", output.text) for output in outputs.values())
        assert outputs["held 1"].tokens == outputs["held 3"].tokens
        assert [spec.text for spec in asked].count("held+") == 1
        assert engine.generate([guided("again", "held+")])[0].tokens == outputs["held 1"].tokens
        assert [spec.text for spec in asked].count("held+") == 1
        assert engine.counters()["grammar"]["errors"] == 0
    finally:
        gate.set()
        engine.close()
