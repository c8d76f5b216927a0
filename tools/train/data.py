"""Tokenizer, prompt template and batches for training the demo model."""

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

from ..demo.tasks import Task

SPECIAL = ("<|begin|>", "<|user|>", "<|assistant|>", "<|end|>")

#: Number of tasks that are sorted by length and batched together.
TASKS_PER_CHUNK = 1024

#: File with the prompt template. The template describes a schema in one short line, which contains
#: key names with type hints, and `?` after optional keys. The line has at most 600 characters. It
#: shows at most 12, 8, 4 and 2 keys per object at nesting levels 1 to 4, and at most 6 values of an
#: enum.
CONFIG = Path(__file__).resolve().parents[2] / "models/demo/target/tokenizer_config.json"
TEMPLATE: str = json.loads(CONFIG.read_text())["chat_template"]

_template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)

#: Token ids of a prompt and its answer, and the length of the prompt.
Row = tuple[list[int], int]


def prompt(task: Task) -> str:
    """Return the prompt of a task in the demo model's chat format, with its special tokens."""
    return _template.render(
        messages=[{"role": "user", "content": task.text}],
        schema=task.schema,
        add_generation_prompt=True,
    )


def train_tokenizer(texts: Iterator[str], size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with `size` tokens.

    A token contains letters, one digit, or other characters, but never a mixture. A word therefore
    has the same tokens in every context, so that the model can copy the word by repeating its
    tokens. Separators of JSON, such as `": "` and `", "`, become single tokens.
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
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {size}")
    return tokenizer


def encode(tokenizer: Tokenizer, tasks: list[Task]) -> list[Row]:
    """Return the token ids of prompts and answers. Each answer is followed by ``<|end|>``."""
    prompts = tokenizer.encode_batch([prompt(task) for task in tasks])
    answers = tokenizer.encode_batch([task.answer + "<|end|>" for task in tasks])
    rows = []
    for encoded_prompt, answer in zip(prompts, answers, strict=True):
        rows.append((encoded_prompt.ids + answer.ids, len(encoded_prompt.ids)))
    return rows


def pad(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Pad rows on the right to the length of the longest row.

    Returns
    -------
    ids : Tensor
        Token ids, padded with 0; int64 [rows, length].
    is_answer : Tensor
        Whether a token belongs to the answer; bool [rows, length].
    """
    length = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    is_answer = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, (row, start) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        is_answer[i, start : len(row)] = True
    return ids, is_answer


def batches(
    tokenizer: Tokenizer, tasks: Iterator[Task], tokens: int, max_length: int, rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield padded batches of sequences of similar length, in random order.

    A batch has at most about `tokens` tokens, including padding. Sequences longer than `max_length`
    are dropped.
    """
    while True:
        rows = encode(tokenizer, list(itertools.islice(tasks, TASKS_PER_CHUNK)))
        rows = [row for row in rows if len(row[0]) <= max_length]
        rows.sort(key=lambda row: len(row[0]))
        groups: list[list[Row]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * len(row[0]) > tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from (pad(group) for group in groups)
