"""Read the input files of the grammar benchmark: labelled JSON schemas and tokenizers.

A labelled schema is a JSON object with a ``schema`` and two lists of instances, ``valid`` and
``invalid``.
"""

from __future__ import annotations

import gzip
import json
import re
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


#: ``$schema`` of the drafts of the JSON-Schema-Test-Suite, by the name of its files.
_DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


def read_schemas(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a ``.jsonl`` or ``.jsonl.gz`` file, or of all such files below a folder.

    The files of the JSON-Schema-Test-Suite are named for a draft, such as ``draft7.jsonl.gz``.
    Their schemas declare this draft in the result.
    """
    files = (
        [path] if path.is_file() else sorted([*path.rglob("*.jsonl.gz"), *path.rglob("*.jsonl")])
    )
    if not files:
        raise OptionError(f"no .jsonl or .jsonl.gz file below {path}")
    rows = []
    for file in files:
        draft = _DRAFTS.get(file.name.split(".")[0])
        # str.splitlines is not used because it also splits at U+2028, which JSON allows in strings.
        for row in map(json.loads, filter(str.strip, _read_text(file).split("\n"))):
            if draft is not None and isinstance(row["schema"], dict):
                row["schema"] = {"$schema": draft, **row["schema"]}
            rows.append(row)
    return rows


def byte_vocabulary() -> Vocabulary:
    """Return a vocabulary whose tokens are the 256 bytes, and a stop id."""
    return Vocabulary([bytes([byte]) for byte in range(256)] + [b""], 257, [256])


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
