"""The sampler written on a graph lane replays what it does on a stream."""

from __future__ import annotations

import numpy as np
import numpy_sampling as ref
from sampling_round import TableRound

from graft.cudagraph.graph import Graph

V, K, SLOTS, ROUNDS = 30, 2, 6, 12


def _joined(device, stream) -> TableRound:
    r = TableRound(device, stream, slots=SLOTS, draft_length=K, vocab=V)
    for slot in range(SLOTS):
        verify = ref.COUPLED if slot % 2 else ref.REJECTION
        f = ref.Filter(0.0 if slot == 5 else 1.0, top_k=12)
        r.put(slot, ref.Slot(n=3, last=1, limit=400, seed=slot, filter=f, verify=verify))
        for j in range(K + 1):
            r.write_mask(slot, j, ref.MaskRow(ref.FREE, 1, 0, more=1))
    return r


def test_a_replayed_graph_produces_the_tokens_of_the_stream(device, stream):
    """Target, verify and two drafts as one graph: twelve replays equal twelve eager rounds."""
    rng = np.random.default_rng(8)
    logits = rng.normal(0, 1.5, (ROUNDS, SLOTS, K + 1, V)).astype(np.float32)
    draft_logits = rng.normal(0, 1.5, (ROUNDS, K, SLOTS, V)).astype(np.float32)

    eager, wanted = _joined(device, stream), []
    for i in range(ROUNDS):
        wanted.append(eager.verify(logits[i]))
        for j in range(1, K + 1):
            eager.draft(j, draft_logits[i, j - 1], masked=True)

    r = _joined(device, stream)
    on_device = device.zeros((SLOTS * (K + 1), V), "float32")
    drafts_on_device = [device.zeros((SLOTS, V), "float32") for _ in range(K)]
    graph = Graph(device, "sampling")
    lane = graph.lane("model")
    r.sampler.target(lane, on_device, r.row_slot, K + 1)
    r.sampler.verify(lane, r.row_slot, K + 1, r.ring)
    for j in range(1, K + 1):
        r.sampler.draft(lane, drafts_on_device[j - 1], r.row_slot, j, True)
    run = graph.instantiate()
    for i in range(ROUNDS):
        on_device.copy_from(logits[i].reshape(-1, V))
        for array, values in zip(drafts_on_device, draft_logits[i], strict=True):
            array.copy_from(values)
        r.replay_ptr.copy_from(np.array([i + 1], np.int32))
        run.launch(stream)
        r.ring.poll(i + 1, 30.0)
        stream.synchronize()
        out = r.results(i + 1)
        for name, values in wanted[i].items():
            got = out[name]
            if name == "tokens":
                kept = np.arange(K + 1) < wanted[i]["count"][:, None]
                got, values = got[kept], values[kept]
            np.testing.assert_array_equal(got, values, err_msg=f"replay {i + 1}: {name}")
    assert max(int(w["accepted"].max()) for w in wanted) == K
    state = r.state.to_host()
    assert state["n"].all() and state["last"].all()
    run.close()
    graph.close()
