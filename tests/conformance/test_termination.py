"""Outputs end where the grammar ends, and only there.

The scripted model wants to stop too early, to go on after the end, or to write a special token. The
oracles are jsonschema and the texts of the scripted model.
"""

from __future__ import annotations

import logging

import openai
from conformance_util import (
    GUIDED,
    STOPS,
    TEXTS,
    ask,
    is_person,
    matches,
    one_by_one,
    results,
    tokens_of,
)
from public_issues import issue
from scripted_model import Script, write_scripted_model
from serving_util import response_format, run_server
from tiny_models import edit_json

from graft.grammar import GrammarSpec
from graft.models import Engine
from graft.models.drafters import UserDrafter


def stop_ids(engine):
    return {token for name in STOPS for token in tokens_of(engine, name)}


@issue(
    "vLLM",
    51693,
    "After the last brace, the model writes a special token; the mask allows it, the grammar "
    "refuses it, and the request ends with status 500.",
    "At the end of the grammar only stop ids are legal, so the output ends with one.",
)
def test_special_token_after_the_end_of_the_grammar(drafting):
    [output] = drafting.generate([ask("separator", grammar=GUIDED)])
    assert (output.reason, output.error) == ("stop", None)
    assert output.text == TEXTS["separator"].partition("<|sep|>")[0]
    assert output.tokens[-1] in stop_ids(drafting)


@issue(
    "llama.cpp",
    13341,
    "The model writes an unused token such as `<unused32>` under a grammar; the empty stack of the "
    "grammar ends the server.",
    "A special token that the model wants inside a string is illegal; the output is valid.",
)
def test_special_token_inside_a_string(plain, drafting):
    [unused] = tokens_of(plain, "<|unused|>")
    requests = [
        ask("separator-inside", grammar=GUIDED),
        ask("person", grammar=GUIDED, logit_bias={unused: 500.0}),
    ]
    outputs = drafting.generate(requests)
    assert all(is_person(output.text) and output.error is None for output in outputs)
    assert not {unused, *tokens_of(plain, "<|sep|>")} & {*outputs[0].tokens, *outputs[1].tokens}
    assert outputs[1].text == TEXTS["person"]


@issue(
    "vLLM",
    49227,
    "The grammar knows only the tokenizer's EOS. Other stop ids of generation_config.json are "
    "legal inside a string and cut the JSON.",
    "A stop id of any configuration file is illegal until the JSON is complete.",
)
@issue(
    "vLLM",
    52146,
    "As above: inside a property name, the second EOS id of the model is legal.",
    "With a large bias towards one of the three stop ids, each output is complete.",
)
def test_stop_ids_of_all_files_inside_json(plain, drafting):
    requests = [ask(name, grammar=GUIDED) for name in ("stops-early", "stops-early-again")]
    for stop in sorted(stop_ids(plain)):
        requests.append(ask("person", grammar=GUIDED, logit_bias={stop: 500.0}))
    outputs = drafting.generate(requests)
    assert all(output.reason == "stop" and is_person(output.text) for output in outputs)
    assert [output.text for output in outputs[2:]] == [TEXTS["person"]] * 3
    assert {output.tokens[-1] for output in outputs[2:]} == stop_ids(plain)
    assert results(outputs) == one_by_one(plain, requests)


@issue(
    "vLLM",
    42403,
    "A request's own `stop_token_ids` are legal in the middle of an object.",
    "A special token that the request names as stop id ends only complete JSON.",
)
def test_stop_ids_of_the_request_inside_json(plain, drafting):
    [separator] = tokens_of(plain, "<|sep|>")
    requests = [ask("separator-inside", grammar=GUIDED, stop_ids=[separator])]
    requests += [ask("separator", grammar=GUIDED, stop_ids=[separator])]
    inside, after = drafting.generate(requests)
    assert inside.reason == after.reason == "stop"
    assert is_person(inside.text) and is_person(after.text)
    assert after.tokens[-1] == separator


@issue(
    "SGLang",
    31533,
    "If only tokenizer_config.json names the chat model's EOS, constrained requests never end.",
    "The tokenizer's EOS ends outputs although config.json names another id.",
)
def test_stop_id_that_only_the_tokenizer_names(tmp_path):
    folder = write_scripted_model(tmp_path / "model", {"x": Script(TEXTS["person"], "<eos>")})
    with Engine(folder, max_batch_size=1, max_length=128) as engine:
        [other] = tokens_of(engine, "<|tool|>")
    edit_json(folder / "config.json", eos_token_id=other)
    with Engine(folder, folder, max_batch_size=2, max_length=256) as engine:
        outputs = engine.generate([ask("x", grammar=GUIDED), ask("x")])
    assert [(output.reason, output.text) for output in outputs] == [("stop", TEXTS["person"])] * 2


@issue(
    "vLLM",
    22098,
    "With n-gram drafts, each request logs that the matcher gets a token after its stop token.",
    "A drafter proposes tokens after the stop id; the output ends at the stop id, without a "
    "message in the log.",
)
@issue(
    "vLLM",
    52805,
    "Drafts after an EOS of the same round reach the terminated matcher and damage its state.",
    "As above.",
)
def test_drafts_after_a_stop_id(plain, engine_of, caplog):
    text = plain.generate([ask("person", grammar=GUIDED)])[0].tokens

    def propose(tokens):
        rest = text[text.index(tokens[-1]) + 1 :] if tokens[-1] in text else text
        return [*rest, *tokens_of(plain, '} {"x'), *text][:7]

    engine = engine_of(UserDrafter.of(propose, deadline_s=20), draft_length=7)
    with caplog.at_level(logging.INFO, "graft"):
        outputs = engine.generate([ask("person", grammar=GUIDED) for _ in range(4)])
    assert [(output.reason, output.tokens) for output in outputs] == [("stop", text)] * 4
    assert not caplog.messages
    assert sum(engine.stats.accepted) > 40


@issue(
    "vLLM",
    29632,
    "When the grammar is satisfied, every token becomes legal, and the model goes on with free "
    "text until `max_tokens`.",
    "The output ends with the JSON, although the model has more to say.",
)
def test_text_after_the_end_of_the_grammar(plain, drafting):
    requests = [ask("goes-on", grammar=GUIDED), ask("goes-on")]
    guided, free = drafting.generate(requests)
    assert guided.reason == "stop" and is_person(guided.text)
    assert free.text == TEXTS["goes-on"] == guided.text + free.text[len(guided.text) :]


@issue(
    "vLLM",
    53665,
    "`min_tokens` masks EOS after the JSON is complete, so that no token is legal: token 0 is "
    "sampled, refused, and the request ends with status 500.",
    "If only stop ids are legal, the output ends before `min_tokens`.",
)
@issue(
    "vLLM",
    47489,
    'With `{"type": "boolean"}` and `min_tokens`, one backend returns `true!`, another one `!` '
    "until `min_tokens` is reached.",
    "The output is `true` or `false`; where the grammar allows more text, `min_tokens` holds.",
)
def test_min_tokens_with_a_grammar(plain, drafting):
    requests = [
        ask("person", grammar=GUIDED, min_tokens=64),
        ask("prose", grammar=GrammarSpec.json_schema({"type": "boolean"}), min_tokens=20),
        ask("prose", grammar=GrammarSpec.choice(["a"]), min_tokens=9),
        ask("list", grammar=GrammarSpec.regex("[a-z]{1,60}"), min_tokens=25),
    ]
    outputs = drafting.generate(requests)
    assert all((output.reason, output.error) == ("stop", None) for output in outputs)
    assert [output.text for output in outputs[::2]] == [TEXTS["person"], "a"]
    assert outputs[1].text in ("true", "false")
    assert len(outputs[3].tokens) > 25
    assert results(outputs) == one_by_one(plain, requests)


@issue(
    "outlines-core",
    227,
    "In a batch, a sequence that ends early in `[1]{1,3}` gets further ones, because EOS cannot be "
    "consumed in the final state.",
    "Each output has the one, two or three digits that its model wants.",
)
def test_sequences_of_a_batch_that_end_at_different_lengths(tmp_path):
    scripts = {f"x{count}": Script("1" * count) for count in (1, 2, 3, 4)}
    folder = write_scripted_model(tmp_path / "model", scripts)
    with Engine(folder, folder, max_batch_size=4, max_length=64) as engine:
        grammar = GrammarSpec.regex("[1]{1,3}")
        outputs = engine.generate([ask(name, grammar=grammar, max_tokens=9) for name in scripts])
    assert [output.text for output in outputs[:3]] == ["1", "11", "111"]
    assert all(output.reason == "stop" and matches("1{1,3}", output.text) for output in outputs)


@issue(
    "vLLM",
    38696,
    "The grammar allows unbounded white space between elements; the model writes spaces until "
    "`max_tokens`.",
    "JSON is written on one line, so a model that repeats spaces ends with valid JSON.",
)
def test_white_space_between_json_elements_is_bounded(drafting):
    requests = [ask("spaces", grammar=GUIDED, max_tokens=60), ask("newlines", grammar=GUIDED)]
    outputs = drafting.generate(requests)
    assert all(output.reason == "stop" and is_person(output.text) for output in outputs)
    assert not any("  " in output.text or "\n" in output.text for output in outputs)


@issue(
    "vLLM",
    37506,
    "With `ignore_eos` and a grammar, tokens after the end of the grammar are fed to the "
    "terminated matcher, and the request fails.",
    "The server answers with the complete JSON.",
)
def test_ignore_eos_with_a_grammar(drafting):
    schema = {
        "type": "object",
        "properties": {"name": {"const": "Ann"}, "age": {"const": 31}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    with (
        run_server(drafting) as server,
        openai.OpenAI(base_url=server.url, api_key="-", max_retries=0) as client,
    ):
        response = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "<script:goes-on>"}],
            response_format=response_format(schema),
            max_tokens=100,
            extra_body={"ignore_eos": True},
        )
    [choice] = response.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", TEXTS["person"])
