"""Use graft.sampling to verify the drafts of any drafter exactly, without an engine.

The inputs are logits of the target, drafts, and the distributions q that the drafts were sampled
from. The results are the accepted drafts and one more token of each sequence. Here, the inputs are
NumPy arrays; arrays of CuPy and torch are passed in the same way.
"""

from __future__ import annotations

import numpy as np

from graft.sampling import verify_drafts

B = 4  # sequences
K = 3  # drafts per sequence
V = 10  # token ids


def main() -> None:
    """Verify the same drafts in three modes, and then drafts that share the target's noise."""
    rng = np.random.default_rng(7)
    draft_logits = rng.normal(0, 2, (B, K, V)).astype(np.float32)
    q = np.exp(draft_logits) / np.exp(draft_logits).sum(axis=-1, keepdims=True)
    drafts = (q[..., :-1].cumsum(axis=-1) < rng.random((B, K, 1))).sum(axis=-1)  # sampled from q
    # Row j of the logits is the target's output for draft j; row 0 is that for the last token.
    logits = rng.normal(0, 0.5, (B, K + 1, V)).astype(np.float32)
    logits[:, :K] += draft_logits
    # Random numbers depend on the seed of a sequence and on the position of the token to decide.
    seeds = np.array([11, 12, 13, 14])
    positions = np.array([20, 20, 31, 5])  # position of the token that row 0 decides

    for mode in ("greedy", "rejection", "coupled"):
        tokens = verify_drafts(logits, drafts, q, mode=mode, seeds=seeds, positions=positions)
        print(f"{mode}: {tokens}, {sum(map(len, tokens)) - B} of {B * K} drafts accepted")

    # In mode "coupled", more drafts are accepted if the drafter samples with the random numbers of
    # the target. Without drafts, the same function samples one token of each sequence.
    for j in range(K):
        row = draft_logits[:, j : j + 1]
        sampled = verify_drafts(row, None, mode="coupled", seeds=seeds, positions=positions + j)
        drafts[:, j] = np.ravel(sampled)
    tokens = verify_drafts(logits, drafts, mode="coupled", seeds=seeds, positions=positions)
    print(f"coupled drafts: {tokens}, {sum(map(len, tokens)) - B} of {B * K} drafts accepted")


if __name__ == "__main__":
    main()
