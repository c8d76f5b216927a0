"""Read the input files of the grammar benchmark: labelled JSON schemas and tokenizers.

A labelled schema is a JSON object with a ``schema`` and two lists of instances, ``valid`` and
``invalid``.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from graft.cudagraph.errors import OptionError
from graft.grammar.vocabulary import Vocabulary

#: Names of the end token in published vocabularies.
_END_TOKEN_NAMES = re.compile(
    r"</s>|\W*(eos|eot|im_end|eot_id|end\W?of\W?(text|sentence|turn)|endoftext|end)"
    r"\W*",
    re.I,
)


def _read_text(path: Path) -> str:
    """Return the text of a file, decompressed if its name ends in ``.gz``."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: {error}") from error


def read_schemas(folder: Path, every: int = 1) -> Iterator[dict[str, Any]]:
    """Yield every `every`-th schema of each ``.jsonl`` and ``.jsonl.gz`` file below a folder.

    Schemas without instances are left out, and are not counted.
    """
    files = sorted([*folder.rglob("*.jsonl.gz"), *folder.rglob("*.jsonl")])
    if not files:
        raise OptionError(f"no .jsonl or .jsonl.gz file below {folder}")
    for path in files:
        # str.splitlines is not used because it also splits at U+2028, which JSON allows in strings.
        lines = filter(str.strip, _read_text(path).split("\n"))
        rows = [row for row in map(json.loads, lines) if row["valid"] or row["invalid"]]
        yield from rows[::every]


def load_tokenizer(
    path: Path, stop_token: str | None = None
) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """Load a tokenizer.json(.gz) and build its vocabulary.

    `stop_token` is the text of the end token. By default, it is the first special token with
    a usual name of an end token, such as ``</s>``.
    """
    text = _read_text(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower type
        raise OptionError(f"{path} is not a tokenizer.json: {error}") from error
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    name = stop_token
    if name is None:
        name = next(filter(_END_TOKEN_NAMES.fullmatch, special), None)
    stop_id = None if name is None else tokenizer.token_to_id(name)
    if stop_id is None:
        missing = "end token with a known name" if name is None else f"token {name!r}"
        names = ", ".join(special[:8]) or "none"
        raise OptionError(
            f"{path.name} has no {missing}; its special tokens are {names}: specify one with "
            "--stop-token"
        )
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return tokenizer, Vocabulary.from_tokenizer(tokenizer, size, [stop_id])
