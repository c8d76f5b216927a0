"""Grammar backends, markers and tags through the engine on the demo model."""

import json
import re
from dataclasses import replace

import pytest
from engine_util import demo_engine, mixed_requests
from stock import LLGuidanceMatcher, StockLLGuidance

from graft.cudagraph.errors import OptionError
from graft.grammar import GrammarSpec, StructuralTag
from graft.grammar.backends.base import ending_ids
from graft.models.request import Request
from graft.tools.validity import is_valid


def generate(requests, **options):
    with demo_engine(max_batch_size=4, **options) as engine:
        outputs = engine.generate(requests)
        assert engine._parts.decoder.counters()["desyncs"] == 0
        return outputs


def schema_requests(**options):
    """Requests whose prompts show a schema that no grammar enforces."""
    return [
        Request(prompt=request.prompt, schema=request.grammar.schema, **options)
        for request in mixed_requests(7, seed=5)
        if request.grammar is not None and request.grammar.schema
    ]


def test_llguidance_serves_the_demo():
    """Outputs satisfy their grammars; LLGuidance's own matchers in Python give the same tokens."""
    requests = mixed_requests(8, seed=3)
    native = generate(requests, grammar_backend="llguidance")
    python = generate(requests, grammar_backend=StockLLGuidance)
    assert [o.tokens for o in native] == [o.tokens for o in python]
    assert sum(o.finished for o in native) >= 6
    for request, output in zip(requests, native, strict=True):
        if output.finished and request.grammar is not None:
            assert is_valid(request.grammar, output.text) is not False


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_free_text_ends_where_the_marker_does(backend):
    """Text up to the marker is what the model writes unconstrained; then comes a choice.

    Drafts cross the boundary, so the same must come out without a drafter.
    """
    free = schema_requests(max_tokens=60)
    grammar = GrammarSpec.choice(["alpha", "beta", "gamma"]).after('": "', required=True)
    marked = [replace(request, grammar=grammar) for request in free]
    plain = generate(free, grammar_backend=backend)
    outputs = generate(marked, grammar_backend=backend)
    alone = generate(marked, grammar_backend=backend, speculation=False)
    assert [o.tokens for o in outputs] == [o.tokens for o in alone]
    crossed = 0
    for expected, output in zip(plain, outputs, strict=True):
        if '": "' not in output.text:
            continue
        before, after = output.text.split('": "', 1)
        assert output.finished and after in ("alpha", "beta", "gamma")
        assert expected.text.startswith(before)
        crossed += 1
    assert crossed >= 3


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_a_trigger_opens_a_tag(backend):
    """Free text that reaches a trigger goes on as one of the tags, with content by its schema."""
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    tags = [StructuralTag.of('{"call": ', schema, "}!")]
    spec = GrammarSpec.structural_tag(tags, ['{"'])
    opened = 0
    for output in generate(schema_requests(max_tokens=40, grammar=spec), grammar_backend=backend):
        for match in re.finditer(r'(?s)\{"call": (.*?)\}!', output.text):
            assert json.loads(match[1]) == {"n": 7}
            opened += 1
        assert '{"' not in re.sub(r'(?s)\{"call": (.*?)(\}!|$)', "", output.text)
    assert opened >= 2


class Unlucky(LLGuidanceMatcher):
    """Raises after two tokens of thirteen digits."""

    def accept(self, token):
        if len(self._history) == 2 and self.compiled.spec.text == "[0-9]{13}":
            raise LookupError("unlucky")
        return super().accept(token)


class InPythonAlone(StockLLGuidance):
    """A user's backend, whose matchers are no native ones."""

    def matcher(self, compiled, stop_ids=None):
        return Unlucky(compiled, ending_ids(self, compiled, stop_ids))


@pytest.mark.parametrize("transport", ["native", "mailbox", "spinkernel"])
@pytest.mark.parametrize("threads, budget_us", [(1, None), (2, None), (2, 1e6)])
def test_a_backend_in_python_alone_serves_requests(transport, threads, budget_us):
    """A user's backend runs on every transport, on several threads and under a budget; one whose
    matcher raises loses its own request, which says what was raised."""
    requests = [
        Request(prompt="Digits.", grammar=GrammarSpec.regex(f"[0-9]{{{n}}}")) for n in (1, 13, 5, 9)
    ]
    with demo_engine(
        max_batch_size=4,
        grammar_backend=InPythonAlone,
        grammar_transport=transport,
        grammar_threads=threads,
        grammar_budget_us=budget_us,
    ) as engine:
        one, unlucky, five, nine = engine.generate(requests)
    assert unlucky.reason == "error" and unlucky.error == "LookupError: unlucky"
    for length, output in ((1, one), (5, five), (9, nine)):
        assert output.finished and output.text.isdigit() and len(output.text) == length


def test_unknown_backends_are_refused_by_name():
    """A backend that does not exist, or a factory of something else, stops the engine's start."""
    for choice, message in (("guidance", "guidance"), (lambda v: v, "no GrammarBackend")):
        with pytest.raises(OptionError, match=message):
            demo_engine(grammar_backend=choice)
