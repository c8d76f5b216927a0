"""A broken model is refused in one typed sentence, and an engine that runs is left alone."""

import json
import shutil

import pytest
from engine_util import DRAFTER, TARGET, mixed_requests
from tiny_models import edit_json

from graft.grammar.vocabulary import Vocabulary
from graft.models.engine.engine import Engine
from graft.models.errors import CheckpointError, ConfigError, TokenizerError
from graft.models.request import Request


def unknown_word(file):
    """One more token, beyond the model's."""
    model = json.loads(file.read_text())["model"]
    model["vocab"]["\u0120unknownword"] = len(model["vocab"]) + 500
    edit_json(file, model=model)


WEIGHTS = (TARGET / "model.safetensors").read_bytes()
#: A file, how it is spoilt, and the error; what else can be wrong is for the tests of each file.
BREAKAGES = {
    "truncated": (
        "target/model.safetensors",
        lambda file: file.write_bytes(WEIGHTS[: len(WEIGHTS) // 2]),
        CheckpointError,
    ),
    "tokenizer too large": ("target/tokenizer.json", unknown_word, TokenizerError),
    "other drafter": (
        "drafter/config.json",
        lambda file: edit_json(file, hidden_size=256, vocab_size=50000),
        ConfigError,
    ),
}


@pytest.fixture
def target(tmp_path):
    """A copy of the demo's model, beside one of its drafter."""
    shutil.copytree(DRAFTER, tmp_path / "drafter")
    return shutil.copytree(TARGET, tmp_path / "target")


@pytest.mark.parametrize(("name", "change", "error"), BREAKAGES.values(), ids=BREAKAGES)
def test_broken_model(name, change, error, target, engine):
    """Each breakage raises its own kind of error in one line; the running engine still serves."""
    change(target.parent / name)
    with pytest.raises(error) as caught:
        Engine(target, target.parent / "drafter", max_batch_size=1)
    assert "\n" not in str(caught.value)
    (output,) = engine.generate(mixed_requests(1))
    assert output.reason == "stop"


def test_shapes_are_checked_before_a_vocabulary_is_built(target, monkeypatch):
    """A config of four million ids that the weights do not have costs neither time nor memory."""
    monkeypatch.setattr(Vocabulary, "from_tokenizer", lambda *_: pytest.fail("was built"))
    edit_json(target / "config.json", vocab_size=1 << 22)
    with pytest.raises(CheckpointError, match="embed_tokens"):
        Engine(target)


def test_logits_that_are_no_numbers_are_told_as_such(target):
    """Weights with NaN end requests with an error of the model's, free and guided ones, where the
    grammar has refused nothing."""
    data = bytearray(WEIGHTS)
    size = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + size])["model.norm.weight"]["data_offsets"]
    data[8 + size + begin : 8 + size + end] = b"\xff" * (end - begin)
    (target / "model.safetensors").write_bytes(data)
    with Engine(target, max_batch_size=2) as engine:
        free, guided = engine.generate([Request(tokens=[40], max_tokens=4), *mixed_requests(1)])
    for output in (free, guided):
        assert output.reason == "error" and not output.tokens
        assert (output.error or "").startswith("the model's logits are NaN or infinite")
