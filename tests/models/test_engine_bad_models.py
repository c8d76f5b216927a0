"""A broken model is refused in one typed sentence, and an engine that runs is left alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_util import DRAFTER, TARGET, demo_engine, mixed_requests

from graft.cudagraph.errors import GraftError
from graft.grammar.vocabulary import Vocabulary
from graft.models.engine import Engine
from graft.models.errors import CheckpointError, ConfigError, TokenizerError
from graft.models.request import Request


def edit_json(path: Path, **changes: object) -> None:
    """Change fields of a JSON file; None removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def broken_weights(data: bytes) -> Callable[[Path, Path], None]:
    def change(target: Path, _: Path) -> None:
        (target / "model.safetensors").write_bytes(data)

    return change


def missing_shard(target: Path, _: Path) -> None:
    (target / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def tokenizer_too_large(target: Path, _: Path) -> None:
    value = json.loads((target / "tokenizer.json").read_text())
    vocab = value["model"]["vocab"]
    vocab["\u0120unknownword"] = len(vocab) + 500
    (target / "tokenizer.json").write_text(json.dumps(value))


def target_config(**changes: object) -> Callable[[Path, Path], None]:
    return lambda target, _: edit_json(target / "config.json", **changes)


def drafter_config(**changes: object) -> Callable[[Path, Path], None]:
    return lambda _, drafter: edit_json(drafter / "config.json", **changes)


WEIGHTS = (TARGET / "model.safetensors").read_bytes()
BREAKAGES: dict[str, tuple[Callable[[Path, Path], None], type[GraftError]]] = {
    "truncated": (broken_weights(WEIGHTS[: len(WEIGHTS) // 2]), CheckpointError),
    "cut header": (broken_weights(b"\xff\xff\xff\xff\xff\xff\xff\x7f{}"), CheckpointError),
    "wrong shape": (target_config(intermediate_size=544), CheckpointError),
    "missing shard": (missing_shard, CheckpointError),
    "no hidden size": (target_config(hidden_size=None), ConfigError),
    "absurd heads": (target_config(num_attention_heads=-6), ConfigError),
    "other architecture": (
        target_config(model_type="mamba", architectures=["MambaForCausalLM"]), ConfigError),
    "tokenizer too large": (tokenizer_too_large, TokenizerError),
    "other drafter": (drafter_config(hidden_size=256, vocab_size=50000), ConfigError),
    "draft vocabulary lies": (drafter_config(draft_vocab_size=64), CheckpointError),
}  # fmt: skip


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with demo_engine(max_batch_size=1) as engine:
        yield engine


@pytest.mark.parametrize(("break_it", "error"), BREAKAGES.values(), ids=BREAKAGES)
def test_broken_model(
    break_it: Callable[[Path, Path], None], error: type[GraftError], tmp_path: Path, running: Engine
) -> None:
    """Each breakage raises its own kind of error in one line; the running engine still serves."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    shutil.copytree(TARGET, target)
    shutil.copytree(DRAFTER, drafter)
    break_it(target, drafter)
    with pytest.raises(error) as caught:
        Engine(target, drafter, max_batch_size=1)
    assert "\n" not in str(caught.value)
    (output,) = running.generate(mixed_requests(1))
    assert output.reason == "stop"


def test_shapes_are_checked_before_a_vocabulary_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config of four million ids that the weights do not have costs neither time nor memory."""
    monkeypatch.setattr(Vocabulary, "from_tokenizer", lambda *_: pytest.fail("was built"))
    shutil.copytree(TARGET, tmp_path / "target")
    edit_json(tmp_path / "target" / "config.json", vocab_size=1 << 22)
    with pytest.raises(CheckpointError, match="embed_tokens"):
        Engine(tmp_path / "target")


def test_missing_folder(tmp_path: Path) -> None:
    """A folder that is not there is named."""
    with pytest.raises((ConfigError, CheckpointError), match="nowhere"):
        Engine(tmp_path / "nowhere")


def test_logits_that_are_no_numbers_are_told_as_such(tmp_path: Path) -> None:
    """Weights with NaN end requests with an error of the model's, free and guided ones, where the
    grammar has refused nothing."""
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    data = bytearray((target / "model.safetensors").read_bytes())
    size = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + size])["model.norm.weight"]["data_offsets"]
    data[8 + size + begin : 8 + size + end] = b"\xff" * (end - begin)
    (target / "model.safetensors").write_bytes(data)
    with Engine(target, max_batch_size=2) as engine:
        free, guided = engine.generate([Request(tokens=[40], max_tokens=4), *mixed_requests(1)])
    for output in (free, guided):
        assert output.reason == "error" and not output.tokens
        assert (output.error or "").startswith("the model's logits are NaN or infinite")
