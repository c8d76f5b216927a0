"""Tokenizer, prompt template and batches for the training of the demo model."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import jinja2
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from ..demo_tasks import Task

SPECIAL = ("<|begin|>", "<|user|>", "<|assistant|>", "<|end|>")

#: A schema becomes one short line: key names with type hints, `?` after optional keys, at most 12,
#: 8, 4, 2 keys an object level by level, 6 choices an enum, 600 characters in all.
CONFIG = Path(__file__).resolve().parents[2] / "models/demo/target/tokenizer_config.json"
TEMPLATE: str = json.loads(CONFIG.read_text())["chat_template"]

_compiled = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)


def prompt(task: Task) -> str:
    """The whole prompt of a task, special tokens included."""
    return _compiled.render(
        messages=[{"role": "user", "content": task.text}],
        schema=task.schema,
        add_generation_prompt=True,
    )


def train_tokenizer(texts: Iterator[str], size: int) -> Tokenizer:
    """Byte-level BPE in which letters, single digits and runs of the rest never mix.

    A word therefore has the same tokens wherever it stands, which makes copying a
    matter of equal tokens, and the seams of JSON (`": "`, `", "`) become one token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} entries, not {size}")
    return tokenizer


def encode(tokenizer: Tokenizer, tasks: list[Task]) -> list[tuple[list[int], int]]:
    """Token ids of prompt, answer and <|end|>, with the prompt's length."""
    heads = tokenizer.encode_batch([prompt(t) for t in tasks])
    tails = tokenizer.encode_batch([t.answer + "<|end|>" for t in tasks])
    return [(h.ids + t.ids, len(h.ids)) for h, t in zip(heads, tails, strict=True)]


def pad(rows: list[tuple[list[int], int]]) -> tuple[Tensor, Tensor]:
    """Ids (batch, length) padded on the right with 0, and where the answer's tokens are."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    answer = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (row, start) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        answer[i, start : len(row)] = True
    return ids, answer


def batches(
    tokenizer: Tokenizer, tasks: Iterator[Task], tokens: int, longest: int, rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of about `tokens` tokens, of sequences alike in length, in random order."""
    while True:
        rows = encode(tokenizer, list(itertools.islice(tasks, 1024)))
        rows = sorted((r for r in rows if len(r[0]) <= longest), key=lambda r: len(r[0]))
        groups: list[list[tuple[list[int], int]]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * len(row[0]) > tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from (pad(g) for g in groups)
