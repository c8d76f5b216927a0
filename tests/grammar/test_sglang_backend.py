"""Tests of the structured-output backend for SGLang with the classes of the installed SGLang."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

import pytest
import tokenizers

from graft.grammar import GrammarError, sglang
from graft.tools.demo_model import demo_model

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}


@pytest.fixture(scope="module")
def base():
    return pytest.importorskip(
        "sglang.srt.constrained.base_grammar_backend",
        reason="needs SGLang: pip install sglang",
        exc_type=ImportError,
    )


@pytest.fixture(scope="module")
def tokenizer():
    target, _ = demo_model()
    return tokenizers.Tokenizer.from_file(str(target / "tokenizer.json"))


@pytest.fixture(scope="module")
def stop_id(tokenizer):
    return tokenizer.token_to_id("<|end|>")


@pytest.fixture(scope="module")
def backend(base, tokenizer, stop_id):
    backend = sglang.create_backend(None, tokenizer, tokenizer.get_vocab_size(), {stop_id})
    yield backend
    backend.compiler.close()


def compile_grammar(backend, kind, text):
    grammar, cached = backend.get_cached_or_future_value((kind, text), False)
    assert not cached
    return grammar.result()


def test_module_imports_neither_torch_nor_sglang():
    code = "import sys, graft.grammar.sglang as module; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.skipif(
    not list(importlib.metadata.Distribution.discover(name="graft-cuda")),
    reason="graft is not installed but imported from a folder",
)
def test_entry_point_names_register():
    (found,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="graft")
    assert found.load() is sglang.register


@pytest.mark.parametrize(
    ("kind", "text", "spec_kind"),
    [
        ("json", json.dumps(SCHEMA), "json_schema"),
        ("json", "$$ANY$$", "json_schema"),
        ("regex", "a+", "regex"),
        ("ebnf", 'root ::= "a"', "ebnf"),
        (
            "structural_tag",
            '{"structures": [{"begin": "<a>", "end": "</a>"}], "triggers": ["<a"]}',
            "structural_tag",
        ),
    ],
)
def test_request_spec_has_kind_of_request(kind, text, spec_kind):
    assert sglang.request_spec(kind, text).kind == spec_kind


def test_request_spec_refuses_unknown_kind():
    with pytest.raises(GrammarError, match="must be json, regex, ebnf or structural_tag"):
        sglang.request_spec("choice", "a")


def test_register_adds_backend_to_sglang(base):
    from sglang.srt.server_args import GRAMMAR_BACKEND_CHOICES

    sglang.register()
    sglang.register()
    assert base.GRAMMAR_BACKEND_REGISTRY["graft"] is sglang.create_backend
    assert GRAMMAR_BACKEND_CHOICES.count("graft") == 1


def test_grammar_masks_logits_of_its_row_only(base, backend, tokenizer):
    torch = base.torch
    grammar = compile_grammar(backend, "json", json.dumps(SCHEMA))
    size = tokenizer.get_vocab_size()
    mask = grammar.allocate_vocab_mask(size, 2, "cpu")
    entries = [base.GrammarRow(row=1, grammar=grammar)]
    grammar.fill_vocab_mask_batched(entries, mask)
    logits = torch.zeros(2, size)
    base.GrammarMask(grammar, grammar.move_vocab_mask(mask, "cpu")).apply(logits)
    assert (logits[0] == 0).all()
    legal = torch.nonzero(logits[1] == 0)[:, 0].tolist()
    assert legal and all(tokenizer.id_to_token(token).startswith("{") for token in legal)
    assert torch.isinf(logits[1]).sum() == size - len(legal)
    grammar.reset_vocab_mask(mask)
    assert (mask == -1).all()


def test_grammar_follows_output_to_its_end(backend, tokenizer, stop_id):
    grammar = compile_grammar(backend, "json", json.dumps(SCHEMA))
    assert grammar.try_jump_forward(tokenizer) == ([], '{"a": "')
    fresh = grammar.copy()
    for token in tokenizer.encode('{"a": "y"}', add_special_tokens=False).ids:
        grammar.accept_token(token)
    assert not grammar.is_terminated()
    grammar.accept_token(stop_id)
    assert grammar.is_terminated()
    grammar.rollback(1)
    assert not grammar.is_terminated()
    assert fresh.try_jump_forward(tokenizer) == ([], '{"a": "')
    with pytest.raises(ValueError, match="illegal"):
        fresh.accept_token(stop_id)


def test_jump_and_retokenize_replaces_tokens(backend, tokenizer):
    grammar = compile_grammar(backend, "regex", "abcd")
    old = [tokenizer.token_to_id(piece) for piece in "abc"]
    for token in old:
        grammar.accept_token(token)
    grammar.jump_and_retokenize(old, [*old, tokenizer.token_to_id("d")], -1)
    assert grammar.matcher.is_completed()


def test_invalid_grammar_is_reported_as_invalid_object(base, backend):
    grammar = compile_grammar(backend, "json", '{"type": "nope"}')
    assert isinstance(grammar, base.InvalidGrammarObject)
    assert "type" in grammar.error_message
