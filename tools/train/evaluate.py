"""Measurements during training: whole answers right, acceptance length."""

from __future__ import annotations

import torch

from .data import pad
from .nets import Eagle3, Llama

AUX = (0, 2, 3)
"""Layers whose residual stream, after the layer, feeds the drafter (low, middle, high)."""


@torch.no_grad()
def whole_right(model: Llama, rows: list[tuple[list[int], int]]) -> float:
    """Share of answers that greedy decoding gets entirely right.

    Greedy decoding reproduces the answer exactly when every one of its tokens is
    the argmax after the true tokens before it: one forward pass decides.
    """
    right = 0
    for i in range(0, len(rows), 32):
        ids, answer = pad(rows[i : i + 32])
        wanted = answer[:, 1:]
        hit = torch.ones_like(wanted)
        hit[wanted] = model.logits(model(ids[:, :-1])[-1][wanted]).argmax(-1) == ids[:, 1:][wanted]
        right += int(hit.all(1).sum())
    return right / len(rows)


def walked(hits: list[list[bool]], row: list[int], start: int) -> tuple[int, int]:
    """Rounds and tokens of speculation along a row; ``hits[j][i]``: draft j is token i + 2's."""
    rounds, at = 0, start
    while at < len(row) - 1:
        m = 0
        while m < len(hits) and at + 1 + m < len(row) and hits[m][at - 1 + m]:
            m += 1
        rounds, at = rounds + 1, at + min(m + 1, len(row) - 1 - at)
    return rounds, at - start


@torch.no_grad()
def acceptance(head: Eagle3, target: Llama, rows: list[tuple[list[int], int]], k: int) -> float:
    """Tokens per round of greedy chain speculation with `k` unmasked drafts.

    `rows` hold what the target itself would say; a draft is accepted as long as all
    drafts before it were, so true tokens may stand for them in the unrolled drafter.
    """
    rounds = tokens = 0
    for i in range(0, len(rows), 32):
        ids, _ = pad(rows[i : i + 32])
        streams = target(ids[:, :-1])
        features = torch.cat([streams[a] for a in AUX], -1)[:, :-1]
        every = torch.arange(features.shape[1]).expand(len(ids), -1)
        outs = head.unroll(features, target.model.embed_tokens(ids[:, 1:-1]), k, every)
        drafts = [head.kept()[head.lm_head(head.norm(o)).argmax(-1)] for o in outs]
        hits = torch.stack([d == ids[:, 2:] for d in drafts]).tolist()
        for b, (row, start) in enumerate(rows[i : i + 32]):
            some = walked([hit[b] for hit in hits], row, start)
            rounds, tokens = rounds + some[0], tokens + some[1]
    return tokens / rounds
