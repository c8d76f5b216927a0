"""A round of speculative decoding with structured output, built by hand as one CUDA graph.

Read this file from top to bottom: it uses nothing of the engine's graph. Two requests, each with
its own grammar and its own *slot* (its index in all arrays), are decoded at temperature 0. A round
is one launch (replay) of the graph. It verifies K drafts of each request, and makes K new ones with
an EAGLE-3 draft head. *Mask row* j of a slot has a bit for each token that is legal after draft j,
or after the last token if j = 0. The graph has two *lanes*, sequences of nodes that run in order.
``^`` is a wait of the model lane for the grammar lane, and ``'`` a wait in the other direction::

    model    begin - target -- verify - head ------------ draft 1 - head ------------ draft 2 - ...
    grammar  open, row K ----^       '- commit, row 0 -^        '- draft 1, row 1 -^

* *Where does the grammar run?* On the CPU, in host steps of the grammar lane: section 2.
* *What waits for what?* A kernel that reads a mask row waits for the host step that fills the row,
  and a host step waits for the kernel that writes the tokens it reads: section 3. Meanwhile, the
  model lane runs the forward pass of target or head, which needs no mask.
* *What makes the output exact?* The kernel ``verify`` (section 1) commits only tokens that the
  target chooses under the grammar's mask. Drafts decide only how many tokens a round commits.

The engine's graph (`graft.models.round.round`) has the same parts, but native host steps. The
engine also samples (see `graft.tools.examples.verify_drafts`), lets requests join and leave, and
launches the next round before it reads the results of this one.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from graft.cudagraph import Device, Graph, StreamLane, load_text, open_device
from graft.grammar import GrammarSpec, Matcher, Vocabulary, make_backend
from graft.models.drafters.eagle3 import Eagle3Head
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows
from graft.models.tokenizer import Tokenizer
from graft.sampling import MaskApply
from graft.tools.demo_model import demo_model

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
REQUESTS = [
    ("name: Olga Novak; age: 42", GrammarSpec.json_schema(SCHEMA)),
    ("code: QF-5702", GrammarSpec.regex("[A-Z]{2}-[0-9]{4}")),
]
LENGTH = 512  # positions per slot in the KV caches
SLOTS = len(REQUESTS)
K = 3  # drafts per round
ROWS = (K + 1) * SLOTS  # forward row j * SLOTS + b: draft j of slot b, or its last token if j = 0

# 1. Kernels: `verify` makes the output exact ------------------------------------------------------

KERNELS = """
struct Slot {  // state of a request, which stays on the device from round to round
  int position, last, active;  // `last` is the last committed token, `position` its position
};

// Writes row r of a forward pass: token, slot and position. Slot -1 marks a row without a token.
__device__ void set_row(int* rows, int count, int r, bool used, int token, int slot, int position) {
  rows[r] = used ? token : 0;
  rows[count + r] = used ? slot : -1;
  rows[2 * count + r] = used ? position : -1;
}

// Begins a round: the target's forward pass gets the last token of each slot and its drafts.
extern "C" __global__ void begin(const Slot* slots, const int* drafts, int* rows) {
  const int r = threadIdx.x, j = r / SLOTS, b = r % SLOTS;
  const int token = j == 0 ? slots[b].last : drafts[r - SLOTS];
  set_row(rows, ROWS, r, slots[b].active && token >= 0, token, b, slots[b].position + j);
}

// Finds the largest logit of each row; of equal logits, the one of the smallest column. The upper
// half of `best` is an integer that is ordered like the logit, and the lower half is ~column.
extern "C" __global__ void find_best(const float* logits, int columns, unsigned long long* best) {
  const unsigned int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  const float logit = logits[static_cast<long long>(blockIdx.y) * columns + column] + 0.0f;
  if (!(logit >= -3.4e38f)) return;  // masked: -inf
  const unsigned int bits = __float_as_uint(logit);
  const unsigned int order = bits >> 31 ? ~bits : bits | 0x80000000u;
  atomicMax(&best[blockIdx.y], static_cast<unsigned long long>(order) << 32 | ~column);
}

__device__ int column_of(unsigned long long best) {
  return best == 0 ? -1 : static_cast<int>(~static_cast<unsigned int>(best));
}

// Verifies the drafts of each slot. WHY THE OUTPUT IS EXACT: the loop reaches row j only if drafts
// 1 to j equal the tokens that it has committed. The row's mask is then that of decoding without
// drafts, and so are its logits: their bits depend on the text up to the row, not on later drafts
// or other slots. The committed token is their argmax; a draft only decides whether the loop goes
// on. A row counts only if its stamp is the position before it: an unfilled row is never used.
extern "C" __global__ void verify(const unsigned long long* best, const int* stamps,
                                  const int* drafts, int stop, Slot* slots, int* committed,
                                  int* counts, int* committed_rows, int* last_row) {
  const int b = threadIdx.x;
  Slot slot = slots[b];
  int count = 0, accepted = 0;
  for (int r = b; r < ROWS && slot.active; r += SLOTS) {
    const int token = column_of(best[r]);
    if (stamps[r] != slot.position + count || token < 0) break;
    committed[r] = token;
    ++count;
    slot.active = token != stop;
    if (r + SLOTS >= ROWS || drafts[r] != token) break;  // drafts[r] is the draft of the next row
    ++accepted;
  }
  for (int j = 0; j <= K; ++j) {  // the head combines the feature of a position with the NEXT token
    const int r = j * SLOTS + b;
    set_row(committed_rows, ROWS, r, slot.active && j < count, committed[r], b, slot.position + j);
  }
  last_row[b] = (count > 0 ? count - 1 : 0) * SLOTS + b;
  if (count > 0) slot.last = committed[last_row[b]];
  slot.position += count;
  slots[b] = slot;
  counts[b] = count;
  counts[SLOTS + b] = accepted;
}

// Makes the head's best legal token draft j of each slot, and the input of the head's next pass. A
// stop token ends the chain (-1). A slot that committed no token keeps its drafts.
extern "C" __global__ void draft(int j, const unsigned long long* best, const int* d2t, int stop,
                                 const Slot* slots, const int* counts, int* drafts,
                                 int* draft_rows) {
  const int b = threadIdx.x;
  int* own = drafts + (j - 1) * SLOTS + b;
  const int before = j == 1 ? slots[b].last : own[-SLOTS], column = column_of(best[b]);
  const bool goes_on = slots[b].active && before >= 0 && before != stop && column >= 0;
  if (counts[b] > 0) *own = !goes_on ? -1 : d2t == nullptr ? column : d2t[column];
  set_row(draft_rows, SLOTS, b, counts[b] > 0 && goes_on, *own, b, slots[b].position + j - 1);
}
"""

# 2. Host steps: the grammar runs here, on the CPU -------------------------------------------------


class Grammar:
    """The host steps, and the pinned memory through which they and the kernels exchange data.

    No locks are needed: the graph orders the host steps and the kernels that use the same memory. A
    step must not call the CUDA driver. Its exceptions are raised by `synchronize` or `launch`.
    """

    def __init__(self, device: Device, matchers: list[Matcher], positions: list[int]) -> None:
        self.matchers = matchers
        self.positions = positions  # of the last committed token of each slot
        self.ahead = [0] * SLOTS  # number of drafts that each matcher has accepted
        self.masks = [device.pinned((SLOTS, matchers[0].words), "int32") for _ in range(K + 1)]
        self.stamps = device.pinned((K + 1, SLOTS), "int32")
        self.drafts = device.pinned((K, SLOTS), "int32")
        self.drafts.array[:] = -1  # no drafts before the first round
        self.committed = device.pinned((K + 1, SLOTS), "int32")
        self.counts = device.pinned((2, SLOTS), "int32")  # committed tokens, accepted drafts

    def fill(self, j: int, b: int) -> None:
        """Fill mask row j of slot b, and stamp it with the position for which it is valid."""
        if not self.matchers[b].is_terminated():
            row = self.masks[j].array[b]
            if not self.matchers[b].fill(row):
                row[:] = -1  # every token is legal
            self.stamps.array[j, b] = self.positions[b] + j

    def commit(self) -> None:
        """Take back all drafts, accept the tokens that `verify` committed, and fill row 0."""
        for b, matcher in enumerate(self.matchers):
            count = int(self.counts.array[0, b])
            matcher.rollback(self.ahead[b])
            if matcher.accept_all(self.committed.array[:count, b].tolist()) < count:
                raise RuntimeError(f"slot {b}: the grammar refuses a committed token")
            self.ahead[b] = 0
            self.positions[b] += count
            self.fill(0, b)

    def follow(self, j: int) -> None:
        """Accept draft j, and fill the mask row of the token after it."""
        for b, matcher in enumerate(self.matchers):
            draft = int(self.drafts.array[j - 1, b])
            if draft >= 0 and self.ahead[b] == j - 1 and matcher.accept(draft):
                self.ahead[b] = j
                self.fill(j, b)


def generate() -> list[list[tuple[int, list[int]]]]:
    """Answer `REQUESTS`. For each round of a request, return accepted drafts and tokens."""
    # 3. Models and graph: what waits for what -----------------------------------------------------
    device = open_device()
    target_dir, head_dir = demo_model()
    target = LlamaModel.from_dir(device, target_dir, slots=SLOTS, positions=LENGTH)
    head = Eagle3Head.from_dir(device, head_dir, target)  # an EAGLE-3 draft head
    target.set_feature_layers(head.feature_layers)  # the outputs of these layers are its features
    feature_width = len(head.feature_layers) * target.config.hidden_size
    tokenizer = Tokenizer(target_dir)
    [stop] = tokenizer.stop_ids
    vocabulary = Vocabulary.from_tokenizer(tokenizer.backend, target.vocab_size, [stop])
    backend = make_backend("llguidance", vocabulary)
    prompts, matchers = [], []
    for text, spec in REQUESTS:
        prompts.append(tokenizer.chat([{"role": "user", "content": text}], schema=spec.schema))
        matchers.append(backend.compile(spec).matcher())
    host = Grammar(device, matchers, [len(prompt) - 1 for prompt in prompts])
    slots = device.from_host(np.array([(len(p) - 1, p[-1], 1) for p in prompts], np.int32))
    masks = device.zeros((K + 1, SLOTS, vocabulary.words), "int32")  # copies of `host.masks`
    rows, committed_rows = device.zeros((3, ROWS), "int32"), device.zeros((3, ROWS), "int32")
    draft_rows, last_row = device.zeros((3, SLOTS), "int32"), device.zeros((SLOTS,), "int32")
    features = device.zeros((ROWS, feature_width), "float32")
    logits = device.zeros((ROWS, target.vocab_size), "float32")
    head_logits = device.zeros((SLOTS, head.draft_vocab), "float32")
    best = device.zeros((ROWS,), "uint64")

    defines = {"K": str(K), "SLOTS": str(SLOTS), "ROWS": str(ROWS)}
    kernels = load_text(device, KERNELS, "one_round.cu", defines)
    apply_mask = MaskApply(device)
    graph = Graph(device, "one round")
    model, grammar = graph.lane("model"), graph.lane("grammar")

    def add_host_step(work, j, name):
        """Add a host step and a copy of the mask rows that it fills; return the mark after it."""
        grammar.host(work, name=name)
        grammar.copy(masks[j], host.masks[j], name=f"copy row {j}")
        return grammar.record()

    def add_argmax(values, **mask):
        """Mask logits and find the best legal token of each row."""
        apply_mask(model, values, **mask)
        model.fill(best)
        grid = (-(-values.shape[1] // 256), values.shape[0], 1)
        model.kernel(kernels["find_best"], grid, 256, [values, values.shape[1], best])

    # `open` reads only drafts of the previous round, so it runs during the target's forward pass.
    model.kernel(kernels["begin"], 1, ROWS, [slots, host.drafts, rows])
    filled = add_host_step(partial(host.follow, K), K, f"open: row {K}")
    target.forward(model, Rows(*rows), features, logits)  # no row reads KV of rejected drafts
    model.wait(filled)  # rows 0 to K - 1 were filled while the drafts were made
    add_argmax(logits, mask=masks.reshape(ROWS, -1))
    outputs = [host.committed, host.counts, committed_rows, last_row]
    args = [best, host.stamps, host.drafts, stop, slots, *outputs]
    model.kernel(kernels["verify"], 1, SLOTS, args)

    grammar.wait(model.record())  # `commit` reads the tokens that `verify` writes
    filled = add_host_step(host.commit, 0, "commit: row 0")
    hidden = head.entries(model, Rows(*committed_rows), features)  # feed the committed tokens
    hidden = head.head(model, hidden, head_logits, last_row)  # logits after the last committed one
    for j in range(1, K + 1):
        model.wait(filled)  # draft j is chosen under row j - 1
        add_argmax(head_logits, mask=masks[j - 1], d2t=head.d2t)
        args = [j, best, head.d2t, stop, slots, host.counts, host.drafts, draft_rows]
        model.kernel(kernels["draft"], 1, SLOTS, args, name=f"draft {j}")
        if j < K:
            grammar.wait(model.record())  # the step reads draft j
            filled = add_host_step(partial(host.follow, j), j, f"draft {j}: row {j}")
            hidden = head.step(model, Rows(*draft_rows), hidden, head_logits)  # feed draft j

    # 4. Prefill and rounds ------------------------------------------------------------------------
    stream = device.stream()
    lane = StreamLane(stream)  # the same calls as above, but the work runs at once
    for b, prompt in enumerate(prompts):
        host.fill(0, b)  # the first round has no drafts, so only row 0 is needed
        for cache in (target.kv, head.kv):
            cache.allocate(b, LENGTH)
            cache.set_table(lane, b)
        count = len(prompt) - 1  # the first round feeds the last token to the target
        prompt_rows, next_rows = (
            Rows(*device.from_host(np.array([tokens, [b] * count, range(count)], np.int32)))
            for tokens in (prompt[:-1], prompt[1:])
        )
        prompt_features = device.zeros((count, feature_width), "float32")
        target.forward(lane, prompt_rows, prompt_features)
        head.entries(lane, next_rows, prompt_features)
    lane.copy(masks[0], host.masks[0])
    run = graph.instantiate()
    results: list[list[tuple[int, list[int]]]] = [[] for _ in REQUESTS]
    for _ in range(64):  # a limit for outputs that do not end; each slot has LENGTH positions
        run.launch(stream)
        run.synchronize(timeout_s=10)
        for b, (count, accepted) in enumerate(host.counts.array.T.tolist()):
            if count > 0:
                results[b].append((accepted, host.committed.array[:count, b].tolist()))
        if all(result[-1][1][-1] == stop for result in results):
            break
    return results


def main() -> None:
    """Print the tokens of each round with the number of accepted drafts, and the texts."""
    tokenizer = Tokenizer(demo_model()[0])
    for (prompt, _), rounds in zip(REQUESTS, generate(), strict=True):
        print(prompt)
        for number, (accepted, tokens) in enumerate(rounds, 1):
            text = tokenizer.decode(tokens)
            print(f"  round {number}: {accepted} of {K} drafts accepted, {text!r}")
        tokens = [token for _, committed in rounds for token in committed]
        print(f"  {tokens}\n  {tokenizer.decode(tokens)}")


if __name__ == "__main__":
    main()
