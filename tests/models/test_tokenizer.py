"""Tokenizer: encoding, incremental decoding, stop ids, special tokens and chat templates."""

import json

import pytest
import tokenizers
from tiny_models import edit_json, make_tiny_tokenizer, write_json

from graft.models.errors import TokenizerError
from graft.models.text import chat
from graft.models.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path):
    make_tiny_tokenizer(tmp_path, 300)
    return tmp_path


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(folder, vocab_size=300)


def test_tokenizer_decodes_what_it_encodes(tokenizer):
    text = '{"name": "日本 é 🙂"}\n\ttrue'
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())


def test_tokenizer_decode_omits_special_tokens_by_default(tokenizer):
    assert tokenizer.stop_ids == (0,)
    ids = [1, *tokenizer.encode("hi"), 0]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, special=True) == "<bos>hi<eos>"


def test_tokenizer_stop_ids_are_those_of_all_files(folder):
    """The stop ids of both configs and the tokenizer's EOS token are united without duplicates."""
    write_json(folder / "config.json", {"vocab_size": 320, "eos_token_id": 5})
    assert Tokenizer(folder).stop_ids == (5, 0)
    write_json(folder / "generation_config.json", {"eos_token_id": [7, 5, 7, 9]})
    assert Tokenizer(folder).stop_ids == (7, 5, 9, 0)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    assert Tokenizer(folder).stop_ids == (7, 5, 9)
    write_json(folder / "config.json", {"vocab_size": 320})
    (folder / "generation_config.json").unlink()
    assert Tokenizer(folder).stop_ids == ()


def test_tokenizer_accepts_larger_model_vocabulary(folder):
    size = Tokenizer(folder, vocab_size=4096).vocab_size
    assert Tokenizer(folder, vocab_size=size).vocab_size == size


#: Contents of a file of the checkpoint that make loading fail, with words of the error. None
#: deletes the file.
INVALID_FILES = [
    *(("tokenizer.json", text, r"tokenizer\.json") for text in ("", "{}", "[1]", '{"model": 3}')),
    ("tokenizer.json", None, "missing"),
    ("config.json", '{"vocab_size": 200}', "vocabulary of 200"),
    ("config.json", '{"vocab_size": 320, "eos_token_id": 320}', "eos_token_id 320 is outside"),
    *(
        ("generation_config.json", f'{{"eos_token_id": {ids}}}', "eos_token_id")
        for ids in ("300", "-1", "[0, 999]", '"0"', "[null]")
    ),
    ("tokenizer_config.json", '{"eos_token": "<|end|>"}', r"<\|end\|>"),
    *(
        ("tokenizer_config.json", f'{{"chat_template": {template}}}', words)
        for template, words in (
            ('"{% for %}"', "the chat template is invalid"),
            ("7", "chat_template"),
            ("[7]", "chat_template"),
            ('[{"name": "tool", "template": "T"}]', "chat template"),
        )
    ),
    ("chat_template.jinja", b"\xff\xfe", r"chat_template\.jinja: cannot be read"),
]


def test_tokenizer_rejects_two_tokens_with_one_id(folder):
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocabulary = data["model"]["vocab"]
    first, second, *_ = vocabulary
    vocabulary[second] = vocabulary[first]
    path.write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match=f"have the same id {vocabulary[first]}"):
        Tokenizer(folder)


@pytest.mark.parametrize(("file", "content", "words"), INVALID_FILES)
def test_tokenizer_rejects_invalid_file(folder, file, content, words):
    path = folder / file
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif file == "tokenizer_config.json":
        edit_json(path, **json.loads(content))
    else:
        path.write_text(content)
    with pytest.raises(TokenizerError, match=words):
        Tokenizer(folder)


#: Calls that raise a TokenizerError, with words of the error.
INVALID_CALLS = {
    "unknown id": (lambda tokenizer: tokenizer.decode([5, 99999]), "99999"),
    "negative id": (lambda tokenizer: tokenizer.incremental().push([-1]), "-1"),
    "high surrogate": (lambda tokenizer: tokenizer.encode("\ud800"), "is not valid Unicode"),
    "low surrogate": (lambda tokenizer: tokenizer.encode("x\udfff"), "is not valid Unicode"),
    "high surrogate in a message": (
        lambda tokenizer: tokenizer.chat([user("\ud800")]),
        "is not valid Unicode",
    ),
    "low surrogate in a message": (
        lambda tokenizer: tokenizer.chat([user("x\udfff")]),
        "is not valid Unicode",
    ),
    "vocabulary of the model": (
        lambda tokenizer: Tokenizer(tokenizer.path, vocab_size=tokenizer.vocab_size - 1),
        "outside the model's vocabulary",
    ),
    "no chat template": (
        lambda tokenizer: set_template(tokenizer.path, None).chat([]),
        "no chat template",
    ),
    "raise_exception": (
        lambda tokenizer: set_template(tokenizer.path, "{{ raise_exception('twice') }}").chat([]),
        "twice",
    ),
}


def user(content):
    """Return a chat message of the user."""
    return {"role": "user", "content": content}


@pytest.mark.parametrize(("call", "words"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_tokenizer_rejects_invalid_arguments(tokenizer, call, words):
    with pytest.raises(TokenizerError, match=words):
        call(tokenizer)


def test_incremental_decoder_holds_back_incomplete_characters(tokenizer):
    """The first bytes of a character produce no text until its last byte arrives."""
    stream = tokenizer.incremental()
    ids = tokenizer.encode("🙂", special=False)
    assert len(ids) == 4
    assert [stream.push([i]) for i in ids] == ["", "", "", "🙂"]
    assert stream.push(ids[:2]) == "" and stream.finish() == "\ufffd"
    assert stream.push([*tokenizer.encode("a"), *ids[:2]]) == "a" and stream.finish() == "\ufffd"


def test_tokenizer_disables_truncation_padding_and_dropout(folder):
    text = "the name the value the name"
    expected = Tokenizer(folder, vocab_size=300).encode(text)
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
    assert all(tokenizer.encode(text) == expected for _ in range(20))


def test_tokenizer_parses_special_names_in_user_text_on_request(tokenizer):
    """With ``parse_special=False``, names of special tokens in user text are plain text.

    Names in the template itself always become ids. Text without names is encoded in one piece.
    """
    assert tokenizer.encode("a<eos>") == [*tokenizer.encode("a"), 0]
    assert 0 not in tokenizer.encode("a<eos>", parse_special=False)
    for content, ends in (("say <eos> and <bos>!", 1), ("the name", 0)):
        messages = [{"role": "user", "content": content}]
        ids = tokenizer.chat(messages, parse_special=False)
        assert (ids.count(0), ids.count(1)) == (0, 1) and ids[0] == 1
        assert tokenizer.decode(ids[1:], special=True) == f"<|user|>{content}\n<|assistant|>"
        parsed = tokenizer.chat(messages)
        assert parsed.count(0) == ends and (ends or parsed == ids)


def test_incremental_decoder_keeps_spaces_of_metaspace_tokenizers(tmp_path):
    """The library strips the first space of each text that it decodes.

    The incremental decoder must strip only the first space of the whole output.
    """
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    stream = tokenizer.incremental()
    pieces = [stream.push([i]) for i in (1, 2, 3, 1)]
    assert "".join(pieces) + stream.finish() == "a bc a" == tokenizer.decode([1, 2, 3, 1])


def test_chat_template_renders_messages(tokenizer):
    """Each special token in the template becomes one id."""
    assert tokenizer.has_chat_template
    messages = [{"role": "user", "content": "hé"}]
    ids = tokenizer.chat(messages)
    assert ids[0] == 1 and ids.count(1) == 1
    assert tokenizer.decode(ids) == "<|user|>hé\n<|assistant|>"
    assert tokenizer.decode(tokenizer.chat(messages, add_generation_prompt=False)) == "<|user|>hé\n"


def set_template(folder, template) -> Tokenizer:
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    return Tokenizer(folder, vocab_size=300)


def test_chat_template_has_expected_helpers(folder):
    """Templates can use loop controls, further variables, and `tojson` without HTML escapes.

    The newline after a block and the spaces before it are removed (``trim_blocks``,
    ``lstrip_blocks``).
    """
    template = (
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}|{{ tools | tojson(indent=1) }}\n{% endfor %}"
    )
    tokenizer = set_template(folder, template)
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "no"}]
    text = tokenizer.render(messages, tools=[1])
    assert text == '{"role": "user", "content": "<é>"}|[\n 1\n]\n'


def test_chat_template_precedence(folder):
    """chat_template.jinja takes precedence over the templates in tokenizer_config.json.

    Of several templates, "tool_use" is used if there are tools, and otherwise "default".
    """
    named = [
        {"name": "rag", "template": "{{ documents | length }}"},
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D"},
    ]
    tokenizer = set_template(folder, named)
    assert [tokenizer.render([], tools=tools) for tools in (None, [], [{}])] == ["D", "T", "T"]
    assert tokenizer.tool_template == "T"
    (folder / "chat_template.jinja").write_text("F")
    tokenizer = Tokenizer(folder, vocab_size=300)
    assert (
        tokenizer.render([]) == tokenizer.render([], tools=[{}]) == tokenizer.tool_template == "F"
    )
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("A")
    tokenizer = Tokenizer(folder, vocab_size=300)
    assert [tokenizer.render([]), tokenizer.render([], tools=[{}])] == ["F", "A"]
    replaced = Tokenizer(folder, vocab_size=300, chat_template="R")
    assert replaced.render([], tools=[{}]) == replaced.tool_template == "R"


def test_chat_template_variables_are_none_if_absent(folder):
    """Templates compare tools and documents with None. An undefined variable is not None."""
    template = "{{ tools is none }} {{ documents is none }} {{ tools is defined }}"
    tokenizer = set_template(folder, template)
    assert tokenizer.render([]) == "True True True"
    assert tokenizer.render([], tools=[], documents=[]) == "False False True"


def test_chat_template_renders_generation_blocks(folder):
    """The expected text is that of transformers: variables set in the block are local to it."""
    template = (
        "{% set x = 1 %}\n{% for m in messages %}\n  {% generation %}\n{{ loop.index }}"
        "{{ m.content }}{% set x = 2 %}{{ x }}\n  {% endgeneration %}\n{{ x }}{% endfor %}\n"
        "{%- generation -%} end {%- endgeneration %}!"
    )
    messages = [{"content": "a"}, {"content": "b"}]
    assert set_template(folder, template).render(messages) == "1a2\n12b2\n1end!"
    with pytest.raises(TokenizerError, match="endgeneration"):
        set_template(folder, "{% generation %}a")


@pytest.fixture(scope="module")
def child():
    """Separate child process for chat templates, so that tests do not kill the shared one."""
    process = chat.ChildProcess(chat.MEMORY_BYTES)
    yield process
    process.close()


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
def test_chat_template_runs_in_sandbox_with_limits(folder, template, child, monkeypatch):
    """A template that accesses Python internals, fails or exceeds a limit raises TokenizerError.

    The limits apply to memory, time and the length of the text. Afterwards, another template is
    rendered normally.
    """
    monkeypatch.setattr(chat, "_CHILD", child)
    monkeypatch.setattr(chat, "LIMIT_S", 0.5)
    tokenizer = set_template(folder, template)
    with pytest.raises(TokenizerError):
        tokenizer.chat([], max_bytes=1000)
    assert set_template(folder, "{{ bos_token }}").chat([]) == [1]


def test_tokenizer_without_chat_template(folder):
    assert not set_template(folder, None).has_chat_template
