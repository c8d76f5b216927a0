"""Metrics during training: share of correct answers, and acceptance length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .data import Row, pad
from .nets import Block, Eagle3, Llama

#: Layers whose outputs the EAGLE-3 head reads: low, middle and high.
AUX_LAYERS = (0, 2, 3)
#: Layers whose outputs the block drafter reads.
BLOCK_AUX_LAYERS = (0, 1, 2)
#: Number of sequences per forward pass.
EVALUATION_BATCH = 32


@torch.no_grad()
def share_of_correct_answers(model: Llama, rows: list[Row]) -> float:
    """Return the share of answers that greedy decoding reproduces exactly.

    Greedy decoding reproduces an answer if each of its tokens is the argmax of the logits that
    follow the true tokens before it. One forward pass per batch is therefore sufficient.
    """
    correct = 0
    for i in range(0, len(rows), EVALUATION_BATCH):
        ids, is_answer = pad(rows[i : i + EVALUATION_BATCH])
        is_target = is_answer[:, 1:]
        streams = model(ids[:, :-1])
        predictions = model.logits(streams[-1][is_target]).argmax(-1)
        hit = torch.ones_like(is_target)
        hit[is_target] = predictions == ids[:, 1:][is_target]
        correct += int(hit.all(1).sum())
    return correct / len(rows)


def simulate_speculation(hits: list[list[bool]], row: list[int], start: int) -> tuple[int, int]:
    """Simulate greedy speculative decoding along a sequence.

    Parameters
    ----------
    hits
        ``hits[i][j]`` says whether draft j after token i, a guess of token i + j + 1, is correct.
    row
        Token ids.
    start
        Index of the first token of the answer. This token is committed before the first round.

    Returns
    -------
    rounds, tokens : int
        Number of rounds and committed tokens.
    """
    rounds = 0
    position = start
    last = len(row) - 1
    while position < last:
        accepted = 0
        drafts = hits[position]
        while position + 1 + accepted < len(row) and accepted < len(drafts) and drafts[accepted]:
            accepted += 1
        rounds += 1
        position += min(accepted + 1, last - position)
    return rounds, position - start


@torch.no_grad()
def acceptance_length(head: Eagle3, target: Llama, rows: list[Row], drafts: int) -> float:
    """Return the tokens per round of greedy chains of unmasked EAGLE-3 drafts.

    The simulation assumes that greedy decoding with the target generates exactly the rows. A draft
    is accepted only if all drafts before it are correct. The drafter can therefore be unrolled
    along the true tokens instead of its own drafts.

    Parameters
    ----------
    head, target
        Drafter and target.
    rows
        Sequences.
    drafts
        Number of drafts per round.
    """
    rounds = 0
    tokens = 0
    for i in range(0, len(rows), EVALUATION_BATCH):
        some = rows[i : i + EVALUATION_BATCH]
        ids, _ = pad(some)
        streams = target(ids[:, :-1])
        features = torch.cat([streams[layer] for layer in AUX_LAYERS], -1)[:, :-1]
        embedded = target.model.embed_tokens(ids[:, 1:-1])
        positions = torch.arange(features.shape[1]).expand(len(ids), -1)
        hits = []
        for j, out in enumerate(head.unroll(features, embedded, drafts, positions)):
            draft = head.kept()[head.lm_head(head.norm(out)).argmax(-1)]
            # Draft j after token i is a guess of token i + j + 1, which draft step j makes at
            # position i + j - 1. Shift the results of the step, so that index i is token i.
            hits.append(F.pad(draft == ids[:, 2:], (1 - j, j)))
        for (row, start), hit in zip(some, torch.stack(hits, -1).tolist(), strict=True):
            row_rounds, row_tokens = simulate_speculation(hit, row, start)
            rounds += row_rounds
            tokens += row_tokens
    return tokens / rounds


def embed_blocks(target: Llama, ids: Tensor, start: Tensor, width: int, mask: int) -> Tensor:
    """Return the embeddings of blocks. A block is a token followed by mask tokens.

    Parameters
    ----------
    target
        Model whose embedding is used.
    ids
        Token ids; int64 [batch, length].
    start
        Positions of the first token of each block; int64 [batch, blocks].
    width
        Rows per block.
    mask
        Id of the mask token.

    Returns
    -------
    Tensor
        [batch, blocks, width, hidden].
    """
    block = torch.full((*start.shape, width), mask)
    block[..., 0] = ids.gather(1, start)
    return target.model.embed_tokens(block)


@torch.no_grad()
def block_acceptance_length(
    drafter: Block, target: Llama, rows: list[Row], drafts: int, mask: int
) -> float:
    """Return the tokens per round of greedy chains of the block drafter.

    The parameters are those of `acceptance_length`, and `mask` is the id of the mask token.
    """
    rounds = 0
    tokens = 0
    for row, start in rows:
        ids = torch.tensor([row])
        streams = target(ids)
        features = torch.cat([streams[layer] for layer in BLOCK_AUX_LAYERS], -1)
        positions = torch.arange(start, len(row))[None]
        blocks = embed_blocks(target, ids, positions, drafts + 1, mask)
        out = drafter(features, blocks, positions)[0, :, 1:]
        predictions = F.linear(out, target.model.embed_tokens.weight).argmax(-1)
        following = F.pad(ids[0], (0, drafts), value=-1).unfold(0, drafts, 1)
        hits = (predictions == following[start + 1 : len(row) + 1]).tolist()
        row_rounds, row_tokens = simulate_speculation([[]] * start + hits, row, start)
        rounds += row_rounds
        tokens += row_tokens
    return tokens / rounds
