"""models: a drafter of one's own, which proposes the last token again. Nothing else knows of it."""

from __future__ import annotations

from graft.cudagraph import load_text
from graft.models import Drafter, DrafterContext, Engine, Feed, Request, TreeShape
from graft.tools.demo_model import demo_model

TEXT = """
#include "sampling/kernels/slot.cuh"
extern "C" __global__ void propose_last(int batch, const int* row_slot, const Slot* slots,
                                        int drafts, int* proposal) {
  const int b = blockIdx.x;
  if (row_slot[b] < 0) return;  // padding
  for (int j = 0; j < drafts; ++j) proposal[b * drafts + j] = slots[row_slot[b]].last;
}
"""


class LastToken(Drafter):
    """Its drafts come all at once; the engine makes it, checks what it proposes and verifies it."""

    def __init__(self, room: DrafterContext):
        self.shape = TreeShape(room.drafts)
        self._kernel = load_text(room.device, TEXT, "last_token.cu")["propose_last"]

    def start(self, lane, feed: Feed) -> None:
        args = [feed.batch, feed.row_slot, feed.state.array, self.shape.nodes, feed.proposal]
        lane.kernel(self._kernel, feed.batch, 1, args, name="propose the last token")


def main() -> None:
    """The same text with it and without, and how many of its drafts were right."""
    target, _ = demo_model()
    request = Request(prompt="serial: AAAA-1111\nGive only the serial.", max_tokens=40)
    texts = []
    for drafter in (LastToken, None):
        with Engine(target, drafter, draft_length=2) as engine:
            (output,) = engine.generate([request])
            texts.append(output.text)
            print(f"{output.text!r}: {output.accepted} of {output.drafted} drafts accepted")
    print("same text:", texts[0] == texts[1])


if __name__ == "__main__":
    main()
