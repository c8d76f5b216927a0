"""Programmatic edges between kernels: a kernel reads its inputs after the wait."""

from __future__ import annotations

import numpy as np
from model_util import normal, upload
from tiny_models import rounded

from graft.cudagraph.graph import graph as graphs
from graft.models.llm.kernels.library import ModelKernels


def test_programmatic_kernels_wait_for_previous_kernel(device, stream, monkeypatch):
    """Three kernels, each of which reads the previous one's output, have correct results."""
    monkeypatch.setattr(graphs, "supports_programmatic_edges", lambda context: True)
    rng = np.random.default_rng(7)
    x = normal(rng, 4, 128)
    matrices = [rounded(normal(rng, 128, 128) / 8, "bfloat16") for _ in range(2)]
    kernels = ModelKernels(device, "warp", "float32")
    weights = [upload(device, matrix, "bfloat16") for matrix in matrices]
    ones = upload(device, np.ones(128))
    normed, first, second = (device.zeros((4, 128), "float32") for _ in range(3))
    graph = graphs.Graph(device, "chain", programmatic=True)
    lane = graph.lane("main")
    kernels.norms.rms_norm(lane, upload(device, x), ones, 0.0, normed)
    kernels.products.linear(lane, normed, weights[0], first)
    kernels.products.linear(lane, first, weights[1], second, residual=first)
    run = graph.instantiate()
    for _ in range(2):
        run.launch(stream)
    stream.synchronize()
    scale = np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True))
    hidden = x / scale @ matrices[0].T
    wanted = hidden + hidden @ matrices[1].T
    np.testing.assert_allclose(second.to_host(), wanted, atol=2e-3)
