"""A bad request fails alone, and finished requests are freed.

The oracles are the texts of other requests in the same batch, HTTP status codes, and the counts of
live objects that the soft device keeps.
"""

from __future__ import annotations

import gc
import weakref

import openai
import pytest
from conformance_util import GUIDED, TEXTS, ask, is_person, tokens_of
from guide_util import PythonMatcher, byte_vocabulary
from public_issues import issue
from serving_util import response_format, run_server

from graft.grammar import GrammarService, GrammarSpec, XGrammarBackend


@pytest.fixture(scope="module")
def client(drafting):
    with (
        run_server(drafting) as server,
        openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client,
    ):
        yield client


def chat(client, name="person", **fields):
    messages = [{"role": "user", "content": f"<script:{name}>"}]
    defaults = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 60}
    return client.chat.completions.create(**defaults | fields)


def refused(client, **fields):
    """Send a request that the server must refuse with status 400; return the message.

    Afterwards, check that the server still answers.
    """
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    assert chat(client).choices[0].message.content == TEXTS["person"]
    return caught.value.body["message"]


BAD_SCHEMAS = {
    "type": {"type": "not-a-type"},
    "property": {"type": "object", "properties": {"foo": "bar"}},
    "reference": {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}},
    "pattern": {"type": "string", "pattern": "^hello(\\!$"},
    "unsatisfiable recursion": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
}


@issue(
    "vLLM",
    17248,
    "An invalid JSON schema ends the API server.",
    "Status 400, and the next request is answered.",
)
@issue(
    "vLLM",
    57725,
    "Nine kinds of malformed schemas have status 500 and an empty message; a reference to itself "
    "is accepted, and ends the request in the middle of the output.",
    "Status 400 with a message that names the problem, before anything is generated.",
)
@issue(
    "vLLM",
    47312,
    "A schema passes the check of the front end, fails to compile in the engine, and ends the "
    "engine.",
    "As above.",
)
@pytest.mark.parametrize("name", list(BAD_SCHEMAS))
def test_invalid_schema(client, name):
    message = refused(client, response_format=response_format(BAD_SCHEMAS[name]))
    assert len(message) > 20


@issue(
    "llama.cpp",
    19051,
    "If the grammar of a schema cannot be parsed, for example because of a pattern, the server "
    "generates unconstrained text with status 200.",
    "A pattern that cannot be enforced is refused.",
)
@issue(
    "llama.cpp",
    3878,
    "A malformed grammar (`Root` in place of `root`) ends the server.",
    "Status 400.",
)
@issue("llama.cpp", 4492, "A grammar with a syntax error ends the server.", "Status 400.")
@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "^(?=hello)\\1"},
        {"grammar": 'Root ::= [^\\n]+ "#"'},
        {"grammar": 'root ::= "a" \\"route\\"'},
        {"grammar": 'root ::= "a" missing'},
    ],
)
def test_invalid_grammar(client, grammar):
    message = refused(client, extra_body={"structured_outputs": grammar})
    assert len(message) > 20


@issue(
    "vLLM",
    45346,
    "`json_object: false` and an empty schema text end the engine for all requests.",
    "Both are refused, or mean no constraint; the server answers further requests.",
)
def test_degenerate_structured_outputs(client):
    refused(client, extra_body={"structured_outputs": {"json": ""}})
    try:
        answer = chat(client, extra_body={"structured_outputs": {"json_object": False}})
        assert answer.choices[0].message.content == TEXTS["person"]
    except openai.BadRequestError as error:
        assert "json_object" in error.body["message"]
    assert chat(client).choices[0].message.content == TEXTS["person"]


@issue(
    "vLLM",
    43920,
    "A malformed grammar after a valid one ends the engine.",
    "Valid and malformed grammars alternate; each malformed one is refused alone.",
)
def test_malformed_grammars_between_valid_ones(drafting):
    requests = []
    for i in range(4):
        requests.append(ask("person", grammar=GUIDED))
        requests.append(ask("person", grammar=GrammarSpec.regex(f"(a{i}")))
        requests.append(ask("person", grammar=GrammarSpec.ebnf(f"root ::= b{i}")))
    outputs = drafting.generate(requests)
    assert [output.text for output in outputs[::3]] == [TEXTS["person"]] * 4
    for output in outputs[1::3] + outputs[2::3]:
        assert output.reason == "refused" and output.error_type == "GrammarError"
        assert output.error_param == "grammar" and not output.tokens


@issue(
    "SGLang",
    7639,
    "A recursive grammar ends the deployment.",
    "Grammars with left recursion and without an end are compiled exactly or refused; the other "
    "requests of the batch finish.",
)
def test_recursive_grammars(drafting):
    texts = ['root ::= root "a" | "a"', 'root ::= "(" root ")" | "x"', "root ::= root"]
    requests = [ask("person", grammar=GrammarSpec.ebnf(text), max_tokens=30) for text in texts]
    outputs = drafting.generate([*requests, ask("person", grammar=GUIDED)])
    assert outputs[3].text == TEXTS["person"]
    for output, letters in zip(outputs[:3], ("a", "()x", ""), strict=True):
        if output.reason != "refused":
            assert output.text and {*output.text} <= {*letters}
    assert outputs[2].reason == "refused"


@issue(
    "TensorRT-LLM",
    18896,
    "In a state without a legal token, all logits are minus infinity; an assertion on the device "
    "ends all ranks.",
    "The request ends with the reason `dead_end`; its neighbours are not affected, also if the "
    "state is reached within drafts.",
)
def test_dead_end(drafting, plain):
    """No token of the model may be used for the last letter."""
    letter = tokens_of(plain, "q")
    banned = [
        id
        for id in range(plain.tokenizer.backend.get_vocab_size())
        if "q" in plain.tokenizer.decode([id])
    ]
    assert letter[0] in banned
    grammar = GrammarSpec.regex("(abc){2,4}q")
    requests = []
    for seed in range(4):
        requests.append(
            ask("prose", grammar=grammar, banned_ids=banned, temperature=9.0, seed=seed)
        )
        requests.append(ask("person", grammar=GUIDED))
    outputs = drafting.generate(requests)
    assert [output.text for output in outputs[1::2]] == [TEXTS["person"]] * 4
    for output in outputs[::2]:
        assert output.reason == "dead_end" and output.text == "abc" * 4


def live_objects(device):
    gc.collect()
    return device.stats()["live"]


@issue(
    "llama.cpp",
    25835,
    "With speculation and CUDA graphs, device memory grows by 8 MiB with each request.",
    "After 60 requests, the device has the same numbers of graphs, allocations and other objects "
    "as after 10.",
)
@issue(
    "llama.cpp",
    20315,
    "Each token adds a CUDA graph to a cache, until the memory is full.",
    "As above.",
)
def test_requests_leave_no_device_objects(model, engine_of, device):
    if device.kind != "soft":
        pytest.skip("the soft device counts live objects")
    # With prefill_rows="auto", graphs for further sizes of prompts are built when rounds are slow.
    engine = engine_of(model, draft_length=7, prefill_rows=4)

    def run(first, count):
        requests = []
        for i in range(first, first + count):
            schema = {"type": "object", "properties": {f"key{i}": {"type": "integer"}}}
            requests.append(ask("person", grammar=GrammarSpec.json_schema(schema), max_tokens=20))
            requests.append(ask("list", max_tokens=5 + i % 7))
        engine.generate(requests)
        engine.synchronize()

    run(0, 5)
    before = live_objects(device)
    run(5, 25)
    assert live_objects(device) == before
    assert before["graph_exec"] > 0
    assert not any(engine.counters()["held"].values())


@issue(
    "vLLM",
    16283,
    "The cache of compiled grammars has no limit; requests with different schemas fill the "
    "memory of the host.",
    "The cache stays within its limit; grammars that it has dropped are compiled again.",
)
@issue("SGLang", 22196, "The cache of compiled grammars has no limit.", "As above.")
def test_cache_of_compiled_grammars_is_bounded():
    limit = 1 << 20
    service = GrammarService(byte_vocabulary(), "llguidance", cache_bytes=limit)
    for i in range(30):
        spec = GrammarSpec.regex(f"[a-z]{{{i % 20 + 1}}}|[0-9]{{4000}}")
        assert service.submit(spec).result(60).matcher().accept_all(b"a" * 30) == i % 20 + 1
        assert service.counters()["cache_bytes"] <= limit
    assert 0 < service.counters()["cache_entries"] < 20
    service.close()


@issue(
    "SGLang",
    34111,
    "A cancelled request with a grammar still emits text, which the grammar forbids.",
    "After `cancel`, no event of the request has tokens or text; its slot is used by others.",
)
def test_cancelled_request_emits_nothing(model, engine_of):
    engine = engine_of(model, draft_length=3, max_batch_size=2)
    for after in range(1, 6):
        name = engine.submit(ask("long", grammar=GUIDED))
        other = engine.submit(ask("person", grammar=GUIDED))
        texts = {name: "", other: ""}
        found = {}
        steps = 0
        while engine.busy:
            steps += 1
            for event in engine.step():
                assert event.id != name or name not in found
                texts[event.id] += event.text
                if event.output is not None:
                    found[event.id] = event.output
            if steps == after:
                assert engine.cancel(name)
                texts[name] = ""
        assert texts[other] == TEXTS["person"] and not texts[name]
        assert found[name].reason == "cancelled"
        assert TEXTS["long"].startswith(found[name].text)


@issue(
    "vLLM",
    38663,
    "If the grammar refuses the next token, the request hangs forever.",
    "A matcher that refuses tokens which it has allowed fails its request; the others finish.",
)
@issue(
    "SGLang",
    21172,
    "If `accept_token` fails for a running request, the abort is a no-op, and the request goes on "
    "with a broken grammar.",
    "As above.",
)
def test_matcher_that_refuses_a_legal_token(model, engine_of):
    class Refusing(PythonMatcher):
        def accept(self, token):
            return token not in refused and super().accept(token)

    class Backend(XGrammarBackend):
        name = "refusing"

        def matcher(self, compiled, stop_ids=None):
            matcher = super().matcher(compiled, stop_ids)
            return Refusing(matcher) if compiled.spec.text == "[ab]{9}" else matcher

    engine = engine_of(model, draft_length=3, grammar_backend=Backend)
    refused = set(tokens_of(engine, "ab"))
    texts = ("[ab]{9}", "[ab]{8}", "[ab]{9}", "[ab]{7}")
    outputs = engine.generate(
        [ask("prose", grammar=GrammarSpec.regex(text), max_tokens=40) for text in texts]
    )
    assert [output.reason for output in outputs] == ["error", "stop", "error", "stop"]
    assert [len(output.text) for output in outputs[1::2]] == [8, 7]
    assert all(output.error for output in outputs[::2])


@issue(
    "SGLang",
    19412,
    "Finished requests are still referenced by batches, with their grammars and masks: 6 to 10 MiB "
    "of device memory for each request.",
    "No object of a finished request is alive while its grammar is cached.",
)
def test_finished_requests_are_freed(drafting):
    requests = [ask("person", grammar=GUIDED) for _ in range(20)]
    references = [weakref.ref(request) for request in requests]
    texts = [output.text for output in drafting.generate(requests)]
    assert all(map(is_person, texts))
    del requests
    drafting.synchronize()
    gc.collect()
    assert not any(reference() for reference in references)
