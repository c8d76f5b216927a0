"""The grammar starts exactly after the reasoning section.

The end of the section lies in the middle of the drafts: the model is its own drafter with up to
seven drafts. The oracles are jsonschema and the texts of the scripted model.
"""

from __future__ import annotations

import openai
import pytest
from conformance_util import (
    ANSWER,
    REASONED,
    SCRIPTS,
    TEXTS,
    ask,
    is_person,
    one_by_one,
    results,
    tokens_of,
)
from public_issues import issue
from serving_util import response_format, run_server

from graft.models.drafters import UserDrafter

THINKS = ("thinks", "thinks-fence", "thinks-brace")


def answer_of(output):
    """Return the text after the reasoning section."""
    reasoning, marker, answer = output.text.partition("</think>")
    assert marker and reasoning + marker == TEXTS_BEFORE[reasoning]
    return answer


#: Each script's text up to the end of its reasoning section, by this text without the marker.
TEXTS_BEFORE = {
    script.text.partition("</think>")[0]: "".join(script.text.partition("</think>")[:2])
    for script in SCRIPTS.values()
}


@pytest.fixture(scope="module")
def server(drafting):
    with run_server(drafting, reasoning_parser="qwen3") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client:
        yield client


def chat(client, name, **fields):
    messages = [{"role": "user", "content": f"<script:{name}>"}]
    return client.chat.completions.create(
        model="demo", messages=messages, temperature=0, max_tokens=120, **fields
    )


@issue(
    "vLLM",
    44006,
    "The end of the reasoning section and white space after it are drafted together; the grammar "
    "gets them, refuses them, and the request ends with status 500.",
    "The text after the marker is valid JSON, and the reasoning is the model's own.",
)
@issue(
    "vLLM",
    44297,
    "The positions after the marker have the open mask row of the reasoning section, and so has "
    "the bonus token.",
    "A model that opens a code fence after the marker, as its own drafter, writes JSON at once.",
)
def test_marker_in_the_middle_of_drafts(plain, drafting):
    requests = [ask(name, grammar=REASONED) for name in THINKS]
    outputs = drafting.generate(requests)
    assert all(output.reason == "stop" and is_person(answer_of(output)) for output in outputs)
    assert answer_of(outputs[0]) == TEXTS["thinks"].partition("</think>")[2]
    assert results(outputs) == one_by_one(plain, requests)


@issue(
    "vLLM",
    36138,
    "Drafts after the end token of the reasoning section are not checked against the grammar.",
    "A drafter proposes the marker and prose after it; the prose is rejected.",
)
@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.full("[2]", "[4]", "[5]", "[6]")
def test_drafts_of_marker_and_prose(plain, engine_of, count):
    """The marker is the draft with number `count`."""
    texts = [plain.generate([ask(name)])[0].tokens for name in ("thinks-fence", "prose")]
    [marker] = tokens_of(plain, "</think>")
    end = texts[0].index(marker)

    def propose(tokens):
        at = texts[0].index(tokens[-1]) + 1 if tokens[-1] in texts[0] else 0
        if at == end + 1 - count:
            return [*texts[0][at : end + 1], *texts[1]][:7]
        return texts[0][at : min(at + 1, end + 1 - count)]

    engine = engine_of(UserDrafter.of(propose, deadline_s=20), draft_length=7)
    request = ask("thinks-fence", grammar=REASONED)
    outputs = engine.generate([request])
    assert is_person(answer_of(outputs[0]))
    assert results(outputs) == one_by_one(plain, [request])


@issue(
    "vLLM",
    48228,
    "With reasoning, the answer begins with a doubled brace, `{{`.",
    "The model wants `{{` after its reasoning; the answer is valid and begins with one brace.",
)
def test_doubled_brace_after_reasoning(client):
    schema = response_format(ANSWER)
    [choice] = chat(client, "thinks-brace", response_format=schema).choices
    assert choice.message.content.startswith('{"') and is_person(choice.message.content)
    assert choice.message.reasoning_content == "So be it."


@issue(
    "vLLM",
    47027,
    "A request for JSON output disables the reasoning section.",
    "The response has both the reasoning and the JSON.",
)
@issue(
    "llama.cpp",
    22537,
    "The grammar applies to the reasoning section; the marker is illegal, so the model never "
    "leaves the section.",
    "As above; the reasoning contains text that the grammar forbids.",
)
def test_reasoning_and_answer_of_the_server(client):
    schema = response_format(ANSWER)
    for stream in (False, True):
        response = chat(client, "thinks", response_format=schema, stream=stream)
        content = reasoning = ""
        for chunk in response if stream else [response]:
            part = chunk.choices[0].delta if stream else chunk.choices[0].message
            content += part.content or ""
            reasoning += getattr(part, "reasoning_content", None) or ""
        assert content == TEXTS["thinks"].partition("</think>")[2]
        assert reasoning == 'He said {"name": 1}.'


@issue(
    "SGLang",
    25798,
    "If `</think>` consists of several tokens, the first of them is taken for the marker, and the "
    "server does not start.",
    "A marker that is spelled with several tokens, across rounds and drafts, starts the grammar.",
)
def test_marker_that_spans_several_tokens(plain, model, engine_of):
    request = ask("spelled-marker", grammar=REASONED)
    expected = one_by_one(plain, [request])
    for length in (1, 2, 3, 5):
        outputs = engine_of(model, draft_length=length).generate([request])
        assert results(outputs) == expected
        assert outputs[0].text == SCRIPTS["spelled-marker"].text
        assert is_person(answer_of(outputs[0]))
    [marker] = tokens_of(plain, "</think>")
    assert marker not in outputs[0].tokens


@issue(
    "SGLang",
    29102,
    "After a retraction, the reasoning wrapper of the grammar accepts the last token twice.",
    "Requests that are preempted before, at and after the marker have the same output as without "
    "preemption.",
)
def test_preemption_around_the_marker(plain, model, engine_of):
    [expected] = one_by_one(plain, [ask("thinks-goes-on", grammar=REASONED)])
    assert is_person(expected[2].partition("</think>")[2])
    engine = engine_of(model, draft_length=1)
    counts = range(1, len(expected[1]))
    for count in counts:
        engine.submit(ask("thinks-goes-on", grammar=REASONED, id=str(count)))
    seen = dict.fromkeys(map(str, counts), 0)
    found = []
    while engine.busy:
        for event in engine.step():
            seen[event.id] += len(event.tokens)
            if event.output is not None:
                found.append(event.output)
            elif 0 < int(event.id) <= seen[event.id]:
                seen[event.id] = -1000
                assert engine.preempt(event.id)
    assert results(found) == [expected] * len(counts)
    assert engine.stats.preemptions > len(counts) - 3


@issue(
    "SGLang",
    39826,
    "With speculation, reasoning tokens are counted past EOS; there are more of them than "
    "completion tokens.",
    "The number of reasoning tokens is that of the tokens before the answer.",
)
def test_number_of_reasoning_tokens(client, plain):
    [output] = plain.generate([ask("thinks")])
    [marker] = tokens_of(plain, "</think>")
    response = client.responses.create(
        model="demo", input="<script:thinks>", temperature=0, max_output_tokens=120
    )
    usage = response.usage
    before = output.tokens.index(marker)
    assert before - 1 <= usage.output_tokens_details.reasoning_tokens <= before + 1
    assert usage.output_tokens == len(output.tokens)
