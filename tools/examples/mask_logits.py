"""Use graft.sampling to apply token bitmasks to a batch of logits in place, with one kernel.

A mask row is the token bitmask of one row of logits. Bit ``i`` of a mask row is set if token ``i``
is legal. A row consists of 32-bit words, and the lowest bit of a word belongs to its first token.
"""

from __future__ import annotations

import numpy as np

from graft.cudagraph.device import open_device
from graft.cudagraph.lanes import StreamLane
from graft.sampling.mask import MaskApply

VOCABULARY = 40


def main() -> None:
    """Mask the first and the third of three rows of logits, and print the legal tokens of each."""
    device = open_device()
    values = np.tile(np.arange(VOCABULARY, dtype=np.float32), (3, 1))
    logits = device.from_host(values)
    legal = np.zeros((2, 64), bool)
    legal[0, [3, 5, 33]] = True
    legal[1, :4] = True
    words = np.packbits(legal, axis=1, bitorder="little").view(np.int32)
    masks = device.from_host(words)
    mask_row = device.from_host(np.array([0, -1, 1], np.int32))  # -1: not masked
    stream = device.stream()
    MaskApply(device)(StreamLane(stream), logits, masks, mask_row=mask_row)
    stream.synchronize()
    for row in logits.to_host():
        print(np.flatnonzero(np.isfinite(row)).tolist(), "best:", int(row.argmax()))


if __name__ == "__main__":
    main()
