"""Grammars that compile slowly, or not at all, beside others in one engine."""

from __future__ import annotations

import gzip
import re
import time

import pytest
from engine_util import demo_engine

from graft.grammar import CompileService, GrammarError, GrammarSpec, Vocabulary, XGrammarBackend
from graft.models.request import Request

#: Nested so deeply that XGrammar takes minutes, whatever the vocabulary.
ENDLESS = GrammarSpec.json_schema('{"items": ' * 500 + "{}" + "}" * 500, backend="xgrammar")


def test_a_runaway_grammar_costs_its_request_only():
    """Twenty cheap requests are served; the one whose grammar runs away is refused by its limit."""
    cheap = [
        Request(prompt="Code?", grammar=GrammarSpec.regex(f"[A-Z]{{2}}-{i}")) for i in range(20)
    ]
    engine = demo_engine(max_batch_size=4, compile_timeout_s=2)
    try:
        refused, *served = engine.generate([Request(prompt="?", grammar=ENDLESS), *cheap])
        counters = engine.counters()["compile"]["XGrammar"]
    finally:
        engine.close()
    assert refused.reason == "refused" and not refused.tokens
    assert refused.error == "json_schema: took longer than 2 s to compile"
    assert counters["killed_or_crashed"] == 1
    for i, output in enumerate(served):
        assert output.finished and re.fullmatch(f"[A-Z]{{2}}-{i}", output.text)


def test_grammars_survive_the_engine_on_disk(tmp_path):
    """A second engine with the same folder loads what the first compiled, for the same output."""
    request = Request(prompt="Colour?", grammar=GrammarSpec.choice(["red", "green", "blue"]))
    outputs, hits = [], []
    for run in range(2):
        engine = demo_engine(
            max_batch_size=1,
            grammar_backend="xgrammar",
            grammar_cache_dir=tmp_path,
            grammar_cache_bytes=(1 << 20) + run,  # so that they share nothing in memory
        )
        try:
            outputs += [output.text for output in engine.generate([request])]
            hits.append(engine.counters()["compile"]["XGrammar"]["disk_hits"])
        finally:
            engine.close()
        assert len(list(tmp_path.glob("*.grammar"))) == 1
    assert outputs[0] == outputs[1] in ("red", "green", "blue")
    assert hits == [0, 1]


@pytest.mark.full
def test_long_strings_for_a_real_vocabulary_do_not_hold_up_others(shared_data):
    """String bounds that make XGrammar's masks explode meet the limit; cheap schemas go ahead."""
    path = shared_data / "tokenizers" / "deepseek-128k.json.gz"
    if not path.exists():
        pytest.skip(f"no tokenizer at {path}")
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(gzip.decompress(path.read_bytes()).decode())
    backend = XGrammarBackend(Vocabulary.from_tokenizer(tokenizer, 129280, [1]))
    long = {f"p{i}": {"type": "string", "maxLength": 2000 + i} for i in range(60)}
    service = CompileService(backend, timeout_s=20)
    try:
        begun = time.monotonic()
        slow = service.submit(GrammarSpec.json_schema({"type": "object", "properties": long}))
        cheap = [
            service.submit(GrammarSpec.json_schema({"enum": [f"value {i}", i]})) for i in range(20)
        ]
        for future in cheap:
            assert future.result(timeout=300).nbytes > 0
        with pytest.raises(GrammarError, match=r"took longer than 20 s|GiB of memory"):
            slow.result(timeout=300)
        assert time.monotonic() - begun >= 1  # it was tried
    finally:
        service.close()
