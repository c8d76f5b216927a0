"""The guided decoder inside a real graph: host steps, kernels and pinned rows of the device."""

from __future__ import annotations

import numpy as np
import pytest
from guide_util import KINDS, STOP, byte_vocabulary
from reference_round import Filter, Slot, chain
from sampling_round import TableRound, even_rows

from graft.cudagraph.device import Device, Stream
from graft.cudagraph.graph import Graph
from graft.grammar import GrammarSpec, GuidedDecoder, GuidedRequest, XGrammarBackend

SIZE, DRAFTS = 270, 3


@pytest.mark.parametrize("transport", ["native", "mailbox", "spinkernel"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [{"threads": 1}, {"threads": 2, "budget_us": 1e6}], ids=str)
def test_a_graph_of_host_steps_and_kernels_follows_the_grammar(
    device: Device, stream: Stream, transport, kind, threads
) -> None:
    """Masked drafting and verification in one replayed graph give the grammar's smallest ids, by
    every transport, with native matchers and with those in Python."""
    spec = GrammarSpec.regex("c{3}(ab){2}[0-9]{4}true")
    compiled = XGrammarBackend(byte_vocabulary(SIZE)).compile(spec)
    r = TableRound(device, stream, slots=1, draft_length=DRAFTS, vocab=SIZE)
    r.put(0, Slot(n=5, tree=chain(0), limit=200, filter=Filter(0.0), epoch=1, stop_ids=(STOP,)))
    logits = np.tile(-np.arange(SIZE, dtype=np.float32), (DRAFTS + 1, 1))
    rows, row = (device.from_host(logits[:n], "float32") for n in (DRAFTS + 1, 1))
    decoder = GuidedDecoder(r.exchange, masked_drafts=True, transport=transport, **threads)

    graph = Graph(device, "guided")
    lane = graph.lane("model")
    decoder.add(lane, decoder.open_work(), name="open")
    r.exchange.bring(lane, 0, DRAFTS + 1)
    placed = even_rows(device, r.row_slot, DRAFTS + 1)
    r.sampler.target(lane, rows, placed)
    r.sampler.verify(lane, placed, r.ring)
    decoder.add(lane, decoder.commit_work(), name="commit")
    r.exchange.bring(lane, 0, 1)
    for j in range(1, DRAFTS + 1):
        r.sampler.draft(lane, row, r.row_slot, j, True)
        if j < DRAFTS:
            decoder.add(lane, decoder.draft_work(j), name=f"draft {j}")
            r.exchange.bring(lane, j, j + 1)
    executable = graph.instantiate()

    expected = [*b"cccabab0000true", STOP]  # the model always wants the smallest legal id
    request = GuidedRequest(0, 1, KINDS[kind](compiled.matcher()), 5)
    tokens: list[int] = []
    replays = 0
    while not tokens or tokens[-1] != STOP:
        replays += 1
        assert replays <= len(expected)
        decoder.publish(replays, [request])
        r.replay_ptr.copy_from(np.array([replays], np.int32))
        executable.launch(stream)
        executable.synchronize(60)
        decoder.retire(replays)
        committed = r.exchange.committed[0]
        assert committed[0] == replays
        tokens += committed[2 : 2 + committed[1]].tolist()
    assert tokens == expected
    assert replays == -(-(len(expected) - 1) // (DRAFTS + 1)) + 1  # all drafts accepted
    counters = decoder.counters()
    assert counters["desyncs"] == counters["missing_snapshots"] == counters["errors"] == 0
    assert counters["terminations"] == 1
    assert np.all(r.exchange.stamps["state"][0, 1:] == 0)
    executable.close()
    graph.close()
    decoder.close()
    r.exchange.close()
