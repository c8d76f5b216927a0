"""Measurements during training: whole answers right, acceptance length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import pad
from .nets import Block, Eagle3, Llama

AUX = (0, 2, 3)
"""Layers whose residual stream, after the layer, feeds the EAGLE-3 head (low, middle, high)."""
BLOCK_AUX = (0, 1, 2)
"""And those that feed the block drafter, which does not read the last one."""


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
    """Rounds and tokens of speculation along a row; ``hits[i][j]`` of draft j behind token i."""
    rounds = 0
    at = start
    while at < len(row) - 1:
        m = 0
        while at + 1 + m < len(row) and m < len(hits[at]) and hits[at][m]:
            m += 1
        rounds = rounds + 1
        at = at + min(m + 1, len(row) - 1 - at)
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
        # Draft j behind token i is the one that entry i + j - 1 predicts in step j.
        hits = [F.pad(d == ids[:, 2:], (1 - j, j)) for j, d in enumerate(drafts)]
        every_hit = torch.stack(hits, -1).tolist()
        for (row, start), hit in zip(rows[i : i + 32], every_hit, strict=True):
            some = walked(hit, row, start)
            rounds = rounds + some[0]
            tokens = tokens + some[1]
    return tokens / rounds


def blocks_of(target: Llama, ids: Tensor, start: Tensor, width: int, mask: int) -> Tensor:
    """Rows of blocks that start at positions (batch, blocks): the token there, then masks."""
    block = torch.full((*start.shape, width), mask)
    block[..., 0] = ids.gather(1, start)
    return target.model.embed_tokens(block)


@torch.no_grad()
def block_acceptance(
    drafter: Block, target: Llama, rows: list[tuple[list[int], int]], k: int, mask: int
) -> float:
    """The same of a block drafter."""
    rounds = tokens = 0
    for row, start in rows:
        ids = torch.tensor([row])
        features = torch.cat([target(ids)[a] for a in BLOCK_AUX], -1)
        at = torch.arange(start, len(row))[None]
        out = drafter(features, blocks_of(target, ids, at, k + 1, mask), at)[0, :, 1:]
        drafts = F.linear(out, target.model.embed_tokens.weight).argmax(-1)
        wanted = F.pad(ids[0], (0, k), value=-1).unfold(0, k, 1)[start + 1 : len(row) + 1]
        some = walked([[]] * start + (drafts == wanted).tolist(), row, start)
        rounds = rounds + some[0]
        tokens = tokens + some[1]
    return tokens / rounds
