"""sampling: logits of a batch under bitmasks, in place, by a kernel of its own.

Bit ``i`` of a row says whether token ``i`` is legal; 32 tokens a word, the lowest bit first.
"""

from __future__ import annotations

import numpy as np

from graft.cudagraph.device import open_device
from graft.cudagraph.lanes import StreamLane
from graft.sampling.mask import MaskApply


def main() -> None:
    """Three rows of logits, two masks: the first and last row share one, the second has none."""
    device = open_device()
    vocabulary = 40
    logits = device.from_host(np.tile(np.arange(vocabulary, dtype=np.float32), (3, 1)))
    legal = np.zeros((2, 64), bool)
    legal[0, [3, 5, 33]] = True
    legal[1, :4] = True
    words = np.packbits(legal, axis=1, bitorder="little").view(np.int32)
    masks = device.from_host(words)
    rows = device.from_host(np.array([0, -1, 1], np.int32))
    stream = device.stream()
    MaskApply(device)(StreamLane(stream), logits, masks, mask_row=rows)
    stream.synchronize()
    for row in logits.to_host():
        print(np.flatnonzero(np.isfinite(row)).tolist(), "best:", int(row.argmax()))


if __name__ == "__main__":
    main()
