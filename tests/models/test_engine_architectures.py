"""Engines with models of other architectures than Llama, with RoPE scaling and sliding windows."""

import numpy as np
import pytest
from tiny_models import (
    QWEN2,
    SMOLLM3,
    llama_config,
    make_tiny_dflash,
    make_tiny_eagle3,
    make_tiny_llama,
    make_tiny_mtp,
    make_tiny_tokenizer,
)

from graft.cudagraph.errors import OptionError
from graft.models.engine.engine import Engine
from graft.models.errors import ConfigError, MigrationError
from graft.models.request import Request

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.fixture
def make(tmp_path):
    """Return a function that writes a model with these config fields and returns its folder."""

    def make_model(name, **fields):
        make_tiny_llama(tmp_path / name, **fields)
        make_tiny_tokenizer(tmp_path / name)
        return tmp_path / name

    return make_model


def test_engine_outputs_do_not_depend_on_speculation_in_other_architectures(make):
    """A SmolLM3 drafts for a Qwen2 with YaRN, whose greedy outputs remain the same."""
    target = make("target", **QWEN2, rope_scaling=YARN)
    drafter = make("drafter", **SMOLLM3, num_hidden_layers=2)
    requests = [Request(tokens=range(5, 20 + i), max_tokens=30, id=str(i)) for i in range(3)]
    outputs = []
    for choice in (None, drafter, target):
        with Engine(target, choice, max_length=512, max_batch_size=2) as engine:
            outputs.append([output.tokens for output in engine.generate(requests)])
            accepted = sum(engine.stats.accepted)
    assert outputs[0] == outputs[1] == outputs[2]
    assert all(len(tokens) > 1 for tokens in outputs[0])
    assert accepted > 0  # the last engine uses the target as its drafter


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash"])
def test_draft_heads_work_with_other_architectures(make, tmp_path, kind):
    """Draft heads use the RoPE scaling of their own config, here with a Qwen2 target with YaRN."""
    target = make("target", **QWEN2, rope_scaling=YARN)
    drafter = tmp_path / "drafter"
    if kind == "eagle3":
        make_tiny_eagle3(drafter, llama_config(), rope_scaling=YARN)
    elif kind == "mtp":
        make_tiny_mtp(drafter, llama_config(**QWEN2, rope_scaling=YARN), modules=1)
    else:
        make_tiny_dflash(drafter, llama_config(rope_scaling=YARN), layers=(0, 1), block=4)
    requests = [Request(tokens=range(5, 20 + i), max_tokens=20, id=str(i)) for i in range(2)]
    outputs = []
    for choice in (None, drafter):
        with Engine(target, choice, max_length=512, max_batch_size=2) as engine:
            outputs.append([output.tokens for output in engine.generate(requests)])
            if choice is not None:
                resources = engine._built.resources
                tables = [resources.target.stack.rope_table.to_host()]
                tables.append(rope_table_of(resources.drafter))
    assert outputs[0] == outputs[1]
    positions = min(map(len, tables))
    np.testing.assert_array_equal(tables[0][:positions], tables[1][:positions])


def rope_table_of(drafter):
    """Return the RoPE table of a drafter with a decoder stack."""
    stack = getattr(drafter, "_stack", None) or drafter.head.stack
    return stack.rope_table.to_host()


def test_engine_refuses_max_length_beyond_sliding_window(make):
    """`max_length` must not exceed the sliding window of the target or of a drafter."""
    target = make("target", **MISTRAL, sliding_window=128)
    drafter = make("drafter", **MISTRAL, sliding_window=64)
    request = Request(tokens=[5, 6, 7], max_tokens=2)
    with Engine(target, max_length=128) as engine:
        assert len(engine.generate([request])[0].tokens) == 2
    with pytest.raises(ConfigError, match=r"target: sliding_window = 128 .* max_length = 256"):
        Engine(target)
    with pytest.raises(ConfigError, match=r"drafter: sliding_window = 64 .* max_length = 128"):
        Engine(target, drafter, max_length=128)


def test_migration_rejects_other_rope_factors(make):
    """Engines whose `max_length` selects different LongRoPE factors have different cached keys."""
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 64,
    }
    model = make("model", rope_scaling=scaling)
    request = Request(tokens=range(5, 40), max_tokens=8, id="moved")
    with Engine(model, max_length=64) as short, Engine(model, max_length=65) as long:
        short.submit(request)
        short.step()
        migrated = short.migrate_out("moved")
        message = "rope_type: the source engine has longrope with short_factor, this engine has"
        with pytest.raises(MigrationError, match=message):
            long.migrate_in(migrated)


def test_engine_max_length_includes_yarn(make):
    """A sequence may be longer than max_position_embeddings, up to the length that YaRN extends."""
    target = make("target", **QWEN2, rope_scaling=YARN)
    tokens = [7 + i % 200 for i in range(400)]
    with Engine(target, max_length=512, max_batch_size=1) as engine:
        assert len(engine.generate([Request(tokens=tokens, max_tokens=3)])[0].tokens) == 3
    with pytest.raises(OptionError, match="max_length 513 is greater than the model's 512"):
        Engine(target, max_length=513)
