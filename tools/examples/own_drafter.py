"""Use a custom drafter class in graft.models. Its drafts repeat the last token.

The class is passed to `Engine`, which creates the drafter, checks its drafts against the grammar
and verifies them.
"""

from __future__ import annotations

from graft.cudagraph import load_text
from graft.models import Drafter, DrafterContext, Engine, Feed, Request, TreeShape
from graft.tools.demo_model import demo_model

KERNEL = """
#include "sampling/kernels/slot.cuh"
extern "C" __global__ void propose_last(int batch, const int* row_slot, const Slot* slots,
                                        int drafts, int* proposal) {
  const int b = blockIdx.x;
  if (row_slot[b] < 0) return;  // padding
  for (int j = 0; j < drafts; ++j) proposal[b * drafts + j] = slots[row_slot[b]].last;
}
"""


class LastToken(Drafter):
    """A drafter that generates all drafts of a round with one kernel."""

    def __init__(self, context: DrafterContext):
        self.shape = TreeShape(context.max_drafts)
        self._kernel = load_text(context.device, KERNEL, "last_token.cu")["propose_last"]

    def start(self, lane, feed: Feed) -> None:
        """Add to the graph of a round the kernel that writes the drafts."""
        arguments = [feed.batch, feed.row_slot, feed.state.array, self.shape.nodes, feed.proposal]
        lane.kernel(self._kernel, feed.batch, 1, arguments, name="propose the last token")


def main() -> None:
    """Generate the same text with and without the drafter, and print the accepted drafts."""
    target, _ = demo_model()
    request = Request(prompt="code: AA-1111\nGive only the code.", max_tokens=40)
    texts = []
    for drafter in (LastToken, None):
        with Engine(target, drafter, draft_length=2) as engine:
            [output] = engine.generate([request])
            texts.append(output.text)
            print(f"{output.text!r}: {output.accepted} of {output.drafted} drafts accepted")
    print("same text:", texts[0] == texts[1])


if __name__ == "__main__":
    main()
