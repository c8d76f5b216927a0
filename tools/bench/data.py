"""What the grammar benchmarks read: folders of schemas with instances, and tokenizers."""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from graft.cudagraph.errors import OptionError
from graft.grammar.vocabulary import Vocabulary

#: How published vocabularies call the token that ends a text.
_ENDS = re.compile(
    r"</s>|\W*(eos|eot|im_end|eot_id|end\W?of\W?(text|sentence|turn)|endoftext|end)"
    r"\W*",
    re.I,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where schemas and tokenizer are."""
    parser.add_argument("folder", type=Path, help="folder of .jsonl(.gz) files of schemas")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json, or its .gz")
    parser.add_argument("--stop-token", help="name of the end token (default: as it is known)")


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: {error}") from error


def rows_of(folder: Path, every: int = 1) -> Iterator[dict[str, Any]]:
    """Every k-th schema with instances of each ``.jsonl.gz`` or ``.jsonl`` file below a folder."""
    files = sorted([*folder.rglob("*.jsonl.gz"), *folder.rglob("*.jsonl")])
    if not files:
        raise OptionError(f"no .jsonl or .jsonl.gz file below {folder}")
    for path in files:
        # Only a line feed ends a row: JSON strings may hold what Python also calls a line's end.
        lines = filter(str.strip, _read(path).split("\n"))
        rows = [row for row in map(json.loads, lines) if row["valid"] or row["invalid"]]
        yield from rows[::every]


def load_tokenizer(path: Path, stop: str | None = None) -> tuple[tokenizers.Tokenizer, Vocabulary]:
    """A tokenizer.json (or its .gz) and its vocabulary, ended by the token named ``stop``.

    Raises
    ------
    OptionError
        If the file is none, has no such token, or, without ``stop``, no special token with a name
        that ends a text.
    """
    text = _read(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # of no narrower type
        raise OptionError(f"{path} is no tokenizer.json: {error}") from error
    added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    named = [stop] if stop is not None else list(filter(_ENDS.fullmatch, added))[:1]
    end = tokenizer.token_to_id(named[0]) if named else None
    if end is None:
        lacks = f"no token {stop!r}" if stop is not None else "no end token that is known by name"
        raise OptionError(
            f"{path.name} has {lacks}; its special tokens are "
            f"{', '.join(list(added)[:8]) or 'none'}: name one by --stop-token"
        )
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return tokenizer, Vocabulary.from_tokenizer(tokenizer, size, [end])
