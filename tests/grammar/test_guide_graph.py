"""The guided decoder inside a real graph: host steps, kernels and pinned rows of the device."""

from __future__ import annotations

import numpy as np
import pytest
from guide_util import KINDS, STOP, byte_vocabulary, exchange_for

from graft.cudagraph.device import Device, Stream
from graft.cudagraph.graph import Graph
from graft.cudagraph.kernels import load_text
from graft.grammar import GrammarSpec, GuidedDecoder, GuidedRequest, XGrammarBackend

SIZE, WORDS, DRAFTS = 270, 9, 3

# A device whose model always wants the smallest legal id: verification then accepts all drafts.
KERNELS = """
#define K 3
#define WORDS 9
__device__ int smallest(const unsigned int* row) {
  for (int id = 0; id < 32 * WORDS; ++id)
    if (row[id >> 5] >> (id & 31) & 1u) return id;
  return -1;
}
extern "C" __global__ void verify(int* replay, int* words, int masks, int stamps, int commits,
                                  int drafts) {
  const unsigned int* mask = reinterpret_cast<const unsigned int*>(words + masks);
  const int* state = words + stamps;
  int* committed = words + commits;
  int* drafted = words + drafts;
  const int now = ++*replay;
  int count = 0;
  const int v = drafted[1];
  for (int j = 0; j <= v; ++j) {
    if (state[4 * j] != 2) break;
    const int token = smallest(mask + j * WORDS);
    committed[2 + count++] = token;
    if (token == 256 || token == 257) break;
  }
  committed[0] = now;
  committed[1] = count;
  if (count > 0) { drafted[0] = now; drafted[1] = 0; }
}
extern "C" __global__ void draft(int* words, int masks, int stamps, int commits,
                                 int drafts, int j) {
  const unsigned int* mask = reinterpret_cast<const unsigned int*>(words + masks);
  const int* state = words + stamps;
  const int* committed = words + commits;
  int* drafted = words + drafts;
  if (committed[1] == 0 || drafted[1] != j - 1 || state[4 * (j - 1)] != 2) return;
  if (j > 1 && drafted[j] >= 256 && drafted[j] <= 257) return;
  drafted[1 + j] = smallest(mask + (j - 1) * WORDS);
  drafted[1] = j;
}
"""


def smallest_legal(backend: XGrammarBackend, compiled, stop: int) -> list[int]:
    """What such a model generates, by a stock matcher."""
    matcher, tokens = compiled.matcher(), []
    while not matcher.is_terminated():
        tokens.append(int(matcher.legal()[0]))
        assert matcher.accept(tokens[-1])
    assert tokens[-1] == stop
    return tokens


@pytest.mark.parametrize("transport", ["native", "mailbox", "spinkernel"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [{"threads": 1}, {"threads": 2, "budget_us": 1e6}], ids=str)
def test_a_graph_of_host_steps_and_kernels_follows_the_grammar(
    device: Device, stream: Stream, transport, kind, threads
) -> None:
    """Masked drafting and verification in one replayed graph give the stock matcher's sequence, by
    every transport, with native matchers and with those in Python."""
    backend = XGrammarBackend(byte_vocabulary(SIZE))
    compiled = backend.compile(GrammarSpec.regex("c{3}(ab){2}[0-9]{4}true"))
    exchange = exchange_for(1, DRAFTS, SIZE)
    decoder = GuidedDecoder(exchange, masked_drafts=True, transport=transport, **threads)
    module = load_text(device, KERNELS, "smallest.cu")
    replay = device.zeros((1,), "int32")
    parts = ("masks", "stamps", "committed", "drafted")
    fields = [exchange.memory, *(int(exchange.layout[part]) for part in parts)]

    graph = Graph(device, "guided")
    lane = graph.lane("model")
    decoder.add(lane, decoder.open_work(), name="open")
    lane.kernel(module["verify"], 1, 1, [replay, *fields])
    decoder.add(lane, decoder.commit_work(), name="commit")
    for j in range(1, DRAFTS + 1):
        lane.kernel(module["draft"], 1, 1, [*fields, j])
        if j < DRAFTS:
            decoder.add(lane, decoder.draft_work(j), name=f"draft {j}")
    executable = graph.instantiate()

    expected = smallest_legal(backend, compiled, STOP)
    request = GuidedRequest(0, 1, KINDS[kind](compiled.matcher()), 5)
    tokens: list[int] = []
    replays = 0
    while not tokens or tokens[-1] != STOP:
        replays += 1
        assert replays <= len(expected)
        decoder.publish(replays, [request])
        executable.launch(stream)
        executable.synchronize(60)
        decoder.retire(replays)
        committed = exchange.committed[0]
        assert committed[0] == replays
        tokens += committed[2 : 2 + committed[1]].tolist()
    assert tokens == expected
    assert replays == -(-(len(expected) - 1) // (DRAFTS + 1)) + 1  # all drafts accepted
    counters = decoder.counters()
    assert counters["desyncs"] == counters["missing_snapshots"] == counters["errors"] == 0
    assert counters["terminations"] == 1
    assert np.all(exchange.stamps["state"][0, 1:] == 0)
    executable.close()
    graph.close()
    decoder.close()
    exchange.close()
