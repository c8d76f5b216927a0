"""Tokenizers: ids, texts, chat templates, streaming, and what does not fit the model."""

import json

import numpy as np
import pytest
import tokenizers
from tiny_models import edit_json, make_tiny_tokenizer, write_json

from graft.models.errors import TokenizerError
from graft.models.text import chat
from graft.models.text import stream as text
from graft.models.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path):
    make_tiny_tokenizer(tmp_path, 300)
    return tmp_path


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(folder, vocab_size=300)


def test_text_survives_a_round_trip(tokenizer):
    """decode(encode(text)) is the text, for every kind of character."""
    text = '{"name": "日本 é 🙂"}\n\ttrue'
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())


def test_special_tokens_are_known_and_left_out_of_text(tokenizer):
    """Stop and special ids come from the files; decode leaves special tokens out unless asked."""
    assert tokenizer.stop_ids == (0,)
    ids = [1, *tokenizer.encode("hi"), 0]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, special=True) == "<bos>hi<eos>"


def test_stop_ids_come_from_the_most_specific_file(folder):
    """generation_config.json wins over config.json, which wins over tokenizer_config.json."""
    write_json(folder / "config.json", {"vocab_size": 320, "eos_token_id": 5})
    assert Tokenizer(folder).stop_ids == (5,)
    write_json(folder / "generation_config.json", {"eos_token_id": [7, 9, 7]})
    assert Tokenizer(folder).stop_ids == (7, 9)


def test_a_tokenizer_larger_than_the_model_is_refused(folder):
    """A token id outside the embedding raises, naming the token; a larger model is fine."""
    size = Tokenizer(folder, vocab_size=4096).vocab_size
    assert Tokenizer(folder, vocab_size=size).vocab_size == size
    with pytest.raises(TokenizerError, match=f"id {size - 1}, outside"):
        Tokenizer(folder, vocab_size=size - 1)
    write_json(folder / "config.json", {"vocab_size": 200})
    with pytest.raises(TokenizerError, match="vocabulary of 200"):
        Tokenizer(folder)


@pytest.mark.parametrize(
    ("file", "name", "value", "words"),
    [
        *(
            ("generation_config", "eos_token_id", eos, "eos_token_id")
            for eos in (300, -1, [0, 999], "0", [None])
        ),
        ("tokenizer_config", "eos_token", "<|end|>", r"<\|end\|>"),
    ],
)
def test_stop_ids_outside_the_model_are_refused(folder, file, name, value, words):
    """An end-of-sequence id the model cannot produce, or that is no id, raises; so does an
    eos_token that the vocabulary lacks, by its name."""
    write_json(folder / f"{file}.json", {name: value})
    with pytest.raises(TokenizerError, match=words):
        Tokenizer(folder, vocab_size=300)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"model": 3}'])
def test_a_broken_tokenizer_file_is_refused(folder, text):
    """A damaged or missing tokenizer.json raises, naming the file."""
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="missing"):
        Tokenizer(folder)


def test_ids_outside_the_vocabulary_cannot_be_decoded(tokenizer):
    """An id that no token has raises instead of vanishing."""
    with pytest.raises(TokenizerError, match="99999"):
        tokenizer.decode([5, 99999])
    with pytest.raises(TokenizerError, match="-1"):
        tokenizer.incremental().push([-1])


@pytest.mark.parametrize("seed", range(20))
def test_streamed_pieces_join_to_the_whole_text(tokenizer, seed):
    """Whatever ids come in whatever portions, the pieces join to decode's text, without U+FFFD
    in the middle of a character."""
    rng = np.random.default_rng(seed)
    if seed % 2:
        ids = rng.integers(0, tokenizer.vocab_size, 60).tolist()
    else:
        ids = tokenizer.encode("größe 日本語 🙂🙃 e\u0301 " * 3, special=False)
    stream = tokenizer.incremental()
    pieces = []
    at = 0
    while at < len(ids):
        step = int(rng.integers(1, 5))
        pieces.append(stream.push(ids[at : at + step]))
        at += step
        assert seed % 2 or "\ufffd" not in pieces[-1]
    pieces.append(stream.finish())
    assert "".join(pieces) == tokenizer.decode(ids)


def test_an_incomplete_character_waits(tokenizer):
    """The first bytes of a character give no text until its last byte came."""
    stream = tokenizer.incremental()
    ids = tokenizer.encode("🙂", special=False)
    assert len(ids) == 4
    assert [stream.push([i]) for i in ids] == ["", "", "", "🙂"]
    assert stream.push(ids[:2]) == "" and stream.finish() == "\ufffd"
    assert stream.push([*tokenizer.encode("a"), *ids[:2]]) == "" and stream.finish(cut=True) == "a"


def test_bytes_that_never_become_a_character_are_not_held_for_ever(tokenizer, monkeypatch):
    """Neither text nor work piles up behind ids that spell nothing."""
    stray = tokenizer.encode("🙂", special=False)[1]
    stream = tokenizer.incremental()
    decoded = []
    plain = text.decode
    monkeypatch.setattr(text, "decode", lambda *a: decoded.append(len(a[2])) or plain(*a))
    found = "".join(stream.push([i]) for i in [stray] * 100 + [0] * 100)
    assert found and set(found) == {"\ufffd"} and max(decoded) < 50


def test_settings_for_training_are_switched_off(folder):
    """Truncation, padding and dropout in tokenizer.json neither cut, nor pad, nor roll dice."""
    text = "the name the value the name"
    plain = Tokenizer(folder, vocab_size=300).encode(text)
    value = json.loads((folder / "tokenizer.json").read_text())
    value["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    value["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<eos>",
    }
    value["model"]["dropout"] = 0.5
    write_json(folder / "tokenizer.json", value)
    tokenizer = Tokenizer(folder, vocab_size=300)
    assert all(tokenizer.encode(text) == plain for _ in range(20))


def test_names_of_special_tokens_in_user_text(tokenizer):
    """They are special tokens, unless asked for as text; the template's own always are; text that
    has none is tokenized as a whole either way."""
    assert tokenizer.encode("a<eos>") == [*tokenizer.encode("a"), 0]
    assert 0 not in tokenizer.encode("a<eos>", names=False)
    for content, ends in (("say <eos> and <bos>!", 1), ("the name", 0)):
        messages = [{"role": "user", "content": content}]
        ids = tokenizer.chat(messages, names=False)
        assert (ids.count(0), ids.count(1)) == (0, 1) and ids[0] == 1
        assert tokenizer.decode(ids[1:], special=True) == f"<|user|>{content}\n<|assistant|>"
        loose = tokenizer.chat(messages)
        assert loose.count(0) == ends and (ends or loose == ids)


@pytest.mark.parametrize("text", ["\ud800", "x\udfff"])
def test_what_is_no_text_is_refused(tokenizer, text):
    """A lone surrogate has no bytes: a typed error, in a chat too."""
    with pytest.raises(TokenizerError, match="is not Unicode"):
        tokenizer.encode(text)
    with pytest.raises(TokenizerError):
        tokenizer.chat([{"role": "user", "content": text}])


def test_leading_spaces_of_metaspace_tokenizers_survive_streaming(tmp_path):
    """A decoder that strips the first space of a text strips it once, not at every piece."""
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    made.decoder = tokenizers.decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    stream = tokenizer.incremental()
    pieces = [stream.push([i]) for i in (1, 2, 3, 1)]
    assert "".join(pieces) + stream.finish() == "a bc a" == tokenizer.decode([1, 2, 3, 1])


def test_chat_renders_the_template(tokenizer):
    """Messages go through the template; its special tokens become their ids, once."""
    assert tokenizer.has_chat_template
    messages = [{"role": "user", "content": "hé"}]
    ids = tokenizer.chat(messages)
    assert ids[0] == 1 and ids.count(1) == 1
    assert tokenizer.decode(ids) == "<|user|>hé\n<|assistant|>"
    assert tokenizer.decode(tokenizer.chat(messages, add_generation_prompt=False)) == "<|user|>hé\n"


def set_template(folder, template) -> Tokenizer:
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    return Tokenizer(folder, vocab_size=300)


def test_templates_find_the_usual_helpers(folder):
    """tojson keeps characters as they are, blocks are trimmed, loops can break, extra variables
    arrive."""
    template = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}|{{ tools | tojson(indent=1) }}\n{% endfor %}"
    )
    tokenizer = set_template(folder, template)
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "no"}]
    text = tokenizer.render(messages, tools=[1])
    assert text == '{"role": "user", "content": "<é>"}|[\n 1\n]\n'


def test_named_templates_and_template_files_are_found(folder):
    """The template called default is used; chat_template.jinja wins over the config."""
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    assert set_template(folder, named).render([]) == "D"
    (folder / "chat_template.jinja").write_text("F")
    assert Tokenizer(folder, vocab_size=300).render([]) == "F"


@pytest.fixture(scope="module")
def child():
    """A process that renders, of these tests' own: what it is killed for is on purpose."""
    made = chat.Child(chat.MEMORY_BYTES)
    yield made
    made.close()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.nothing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['content'] }}",
        "{{ ('x' * 2000000000) | length }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 2000 }}",
    ],
)
def test_templates_run_in_a_sandbox(folder, template, child, monkeypatch):
    """Reaching for Python's insides, changing the messages, failing, eating memory or time, or
    making too much text raises TokenizerError; the next template is rendered."""
    monkeypatch.setattr(chat, "_CHILD", child)
    monkeypatch.setattr(chat, "LIMIT_S", 0.5)
    tokenizer = set_template(folder, template)
    with pytest.raises(TokenizerError):
        tokenizer.chat([], most_bytes=1000)
    assert set_template(folder, "{{ bos_token }}").chat([]) == [1]


def test_a_template_that_does_not_parse_is_refused_at_load(folder):
    """A syntax error raises when the tokenizer is opened; raise_exception becomes a TokenizerError
    with the template's words when it chats."""
    tokenizer = set_template(folder, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TokenizerError, match="roles must alternate"):
        tokenizer.chat([])
    with pytest.raises(TokenizerError, match="parse"):
        set_template(folder, "{% for %}")
    for wrong in (7, [{"name": "tool", "template": "T"}], [7]):
        with pytest.raises(TokenizerError, match="chat_template"):
            set_template(folder, wrong)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: cannot be read"):
        Tokenizer(folder, vocab_size=300)


def test_chat_without_a_template_is_refused(folder):
    """A model without a template cannot chat, and says so."""
    tokenizer = set_template(folder, None)
    assert not tokenizer.has_chat_template
    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizer.chat([])
