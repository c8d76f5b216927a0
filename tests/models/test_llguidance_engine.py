"""Grammar backends, markers and structural tags with the engine."""

import json
import re
from dataclasses import replace

import pytest
from engine_util import demo_engine, mixed_requests
from reference_matchers import LLGuidanceMatcher, ReferenceLLGuidance

from graft.cudagraph.errors import OptionError
from graft.grammar import GrammarSpec, StructuralTag
from graft.grammar.backends.base import ending_ids
from graft.models.request import Request
from graft.tools.output_check import is_valid
from graft.tools.serve.errors import ApiError, check_output


def generate(requests, **options):
    """Return the outputs, and check that no matcher rejected a committed token."""
    with demo_engine(max_batch_size=4, **options) as engine:
        outputs = engine.generate(requests)
        assert engine.counters()["grammar"]["desyncs"] == 0
        return outputs


def schema_requests(**options):
    """Return requests without a grammar whose chat prompts contain a JSON schema."""
    return [
        Request(prompt=request.prompt, schema=request.grammar.schema, **options)
        for request in mixed_requests(7, seed=5)
        if request.grammar is not None and request.grammar.schema
    ]


@pytest.mark.full
def test_llguidance_native_matcher_equals_python_matcher():
    """The native matcher and the reference matcher in Python produce the same valid outputs."""
    requests = mixed_requests(8, seed=3)
    native = generate(requests, grammar_backend="llguidance")
    python = generate(requests, grammar_backend=ReferenceLLGuidance)
    assert [o.tokens for o in native] == [o.tokens for o in python]
    assert sum(o.finished for o in native) >= 6
    for request, output in zip(requests, native, strict=True):
        if output.finished and request.grammar is not None:
            assert is_valid(request.grammar, output.text) is not False


@pytest.mark.parametrize(
    "backend", [pytest.param("xgrammar", marks=pytest.mark.full), "llguidance"]
)
@pytest.mark.full
def test_grammar_starts_after_marker(backend):
    """Text before the marker is unconstrained, and text after it follows the grammar.

    The marker may occur among the drafts of a round, so the outputs are compared with those of an
    engine without a drafter.
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


@pytest.mark.parametrize(
    "backend", ["xgrammar", pytest.param("llguidance", marks=pytest.mark.full)]
)
def test_structural_tag_constrains_text_after_trigger(backend):
    """After the trigger text, the output continues as one of the tags.

    The content of a tag satisfies the tag's schema.
    """
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


class FailingMatcher(LLGuidanceMatcher):
    """Matcher that raises an error after two tokens of one particular grammar."""

    def accept(self, token):
        if len(self._history) == 2 and self.compiled.spec.text == "[0-9]{13}":
            raise LookupError("failed on purpose")
        return super().accept(token)


class PythonBackend(ReferenceLLGuidance):
    """User-defined grammar backend whose matchers are Python objects."""

    def matcher(self, compiled, stop_ids=None):
        return FailingMatcher(compiled, ending_ids(self, compiled, stop_ids))


@pytest.mark.parametrize(
    "transport, threads, budget_us",
    [
        ("native", 1, None),
        ("mailbox", 2, None),
        ("spinkernel", 2, 1e6),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("native", 2, None),
                ("native", 2, 1e6),
                ("mailbox", 1, None),
                ("mailbox", 2, 1e6),
                ("spinkernel", 1, None),
                ("spinkernel", 2, None),
            )
        ),
    ],
)
@pytest.mark.full("mailbox-2")
def test_python_grammar_backend_serves_requests(transport, threads, budget_us):
    """Matchers in Python work with every transport, with several threads and with a time budget.

    If a matcher raises an exception, only its request fails, and the exception is its error.
    """
    requests = []
    for length in (1, 13, 5, 9):
        grammar = GrammarSpec.regex(f"[0-9]{{{length}}}")
        requests.append(Request(prompt="Digits.", grammar=grammar))
    with demo_engine(
        max_batch_size=4,
        grammar_backend=PythonBackend,
        grammar_transport=transport,
        grammar_threads=threads,
        grammar_budget_us=budget_us,
    ) as engine:
        one, failing, five, nine = engine.generate(requests)
    assert failing.reason == "error" and failing.error == "LookupError: failed on purpose"
    assert failing.error_type == "MatcherError"
    for length, output in ((1, one), (5, five), (9, nine)):
        assert output.finished and output.text.isdigit() and len(output.text) == length


def test_failures_of_own_backend_are_errors_with_traceback(caplog):
    """A failure is not reported as a refusal. The log contains its traceback."""
    patterns = ("compile+", "fill+", "[0-9]{3}", "refused+")
    requests = [Request(prompt="?", grammar=GrammarSpec.regex(p)) for p in patterns]
    with demo_engine(max_batch_size=4, grammar_backend="own_backend:UnfinishedBackend") as engine:
        compiled, filled, served, refused = engine.generate(requests)
    assert served.finished and served.text.isdigit()
    assert (refused.reason, refused.error) == ("refused", "regex: not this one")
    for output, line in ((compiled, "in compile"), (filled, "in fail_to_fill")):
        assert output.reason == "error" and output.error == "regex: NotImplementedError"
        assert output.error_type == "GrammarBackendError"
        records = [r for r in caplog.records if f"request {output.id} " in r.getMessage()]
        assert len(records) == 1 and line in caplog.text
    with pytest.raises(ApiError) as caught:
        check_output(filled)
    assert caught.value.status == 500


def test_failure_of_matcher_during_generation_keeps_traceback(caplog):
    request = Request(prompt="Digits.", grammar=GrammarSpec.regex("[0-9]{13}"))
    with demo_engine(max_batch_size=4, grammar_backend=PythonBackend) as engine:
        [output] = engine.generate([request])
    assert output.error == "LookupError: failed on purpose"
    assert 'raise LookupError("failed on purpose")' in caplog.text


def test_engine_rejects_unknown_grammar_backend():
    """Unknown backend names, and functions that return no GrammarBackend, are rejected."""
    for choice, message in (
        ("guidance", "guidance"),
        ("no_module:x", "ModuleNotFoundError"),
        (lambda v: v, "it has no `name`.*and no method `matcher`"),
    ):
        with pytest.raises(OptionError, match=message):
            demo_engine(grammar_backend=choice)
