"""Damaged checkpoints raise typed errors and do not affect a running engine."""

import json
import shutil

import pytest
from engine_util import DRAFTER, TARGET, mixed_requests
from tiny_models import edit_json

from graft.grammar.vocabulary import Vocabulary
from graft.models.engine.engine import Engine
from graft.models.errors import CheckpointError, ConfigError, TokenizerError
from graft.models.request import Request


def add_token_outside_vocabulary(file):
    """Add a token whose id is outside the model's vocabulary."""
    model = json.loads(file.read_text())["model"]
    model["vocab"]["\u0120unknownword"] = len(model["vocab"]) + 500
    edit_json(file, model=model)


WEIGHTS = (TARGET / "model.safetensors").read_bytes()
#: Damages by name: relative path of a file, function that damages it, and expected error. Tests of
#: the config, checkpoint and tokenizer modules cover more damages.
DAMAGES = {
    "truncated": (
        "target/model.safetensors",
        lambda file: file.write_bytes(WEIGHTS[: len(WEIGHTS) // 2]),
        CheckpointError,
    ),
    "tokenizer too large": ("target/tokenizer.json", add_token_outside_vocabulary, TokenizerError),
    "other drafter": (
        "drafter/config.json",
        lambda file: edit_json(file, hidden_size=256, vocab_size=50000),
        ConfigError,
    ),
}


@pytest.fixture
def target(tmp_path):
    """A copy of the demo target, with a copy of its drafter in the same parent folder."""
    shutil.copytree(DRAFTER, tmp_path / "drafter")
    return shutil.copytree(TARGET, tmp_path / "target")


@pytest.mark.parametrize(("name", "change", "error"), DAMAGES.values(), ids=DAMAGES)
def test_engine_rejects_damaged_checkpoint(name, change, error, target, engine):
    """Loading a damaged checkpoint raises the expected error, whose message is one line.

    An engine that already exists is not affected.
    """
    change(target.parent / name)
    with pytest.raises(error) as caught:
        Engine(target, target.parent / "drafter", max_batch_size=1)
    assert "\n" not in str(caught.value)
    (output,) = engine.generate(mixed_requests(1))
    assert output.reason == "stop"


def test_engine_checks_weight_shapes_before_building_vocabulary(target, monkeypatch):
    """A config with four million token ids is rejected if the embedding has fewer rows.

    The check comes before the vocabulary of the grammar compiler, which would take long to build.
    """
    monkeypatch.setattr(
        Vocabulary, "from_tokenizer", lambda *_: pytest.fail("the vocabulary was built")
    )
    edit_json(target / "config.json", vocab_size=1 << 22)
    with pytest.raises(CheckpointError, match="embed_tokens"):
        Engine(target)


def set_nan(file, name):
    """Replace a weight of a checkpoint by NaN."""
    data = bytearray(file.read_bytes())
    size = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + size])[name]["data_offsets"]
    data[8 + size + begin : 8 + size + end] = b"\xff" * (end - begin)
    file.write_bytes(data)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.full), {"draft_tree": (2, 2)}],
    ids=["chain", "tree"],
)
def test_engine_reports_drafter_with_nan_logits(tmp_path, caplog, options):
    """The outputs equal those without a drafter, and one warning names the cause."""
    requests = [*mixed_requests(2), *(Request(tokens=[41], max_tokens=2) for _ in range(3))]
    long = Request(tokens=[40], max_tokens=90, temperature=4.0, seed=1, min_tokens=89)
    drafter = shutil.copytree(DRAFTER, tmp_path / "drafter")
    answers = []
    for draft in (None, DRAFTER, drafter):
        if draft == drafter:
            assert not caplog.records
            set_nan(drafter / "model.safetensors", "norm.weight")
        own = options if draft else {}
        with Engine(TARGET, draft, max_batch_size=2, draft_length=4, **own) as engine:
            outputs = engine.generate([long, *requests] if draft == drafter else requests)
        answers.append([output.tokens for output in outputs if output.seed != 1])
    assert answers[0] == answers[1] == answers[2]
    assert not any(output.drafted for output in outputs)
    [record] = caplog.records
    assert "the drafter had no drafts in 64 consecutive rounds" in record.getMessage()


@pytest.mark.parametrize("generation", ["rounds", "graph"])
def test_engine_reports_nan_logits(target, generation):
    """If a weight is NaN, requests with and without a grammar fail with an error about logits.

    No request runs a second time.
    """
    set_nan(target / "model.safetensors", "model.norm.weight")
    with Engine(target, max_batch_size=2, generation=generation) as engine:
        free, guided = engine.generate([Request(tokens=[40], max_tokens=4), *mixed_requests(1)])
    for output in (free, guided):
        assert output.reason == "error" and not output.tokens and not output.preempted
        assert (output.error or "").startswith("the model's logits are NaN or infinite")
