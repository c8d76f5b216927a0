"""Multiply with K splits whose blocks wait for each other, for a test with several workers.

Usage: ``shares_launch.py JSON`` with the arguments of `launch`. The script prints the number of
floats that the blocks store to the workspace of partial sums, and whether the result has the bits
of a launch whose blocks do not wait.
"""

import json
import sys

import numpy as np
from model_util import download, normal, same_bits, upload

from graft.cudagraph.device import open_device
from graft.cudagraph.lanes import StreamLane
from graft.models.llm.kernels import tensor_cores
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.kernels.loader import KernelLoader

LOAD = KernelLoader.load


def launch(rows, columns, inner, splits):
    """Multiply by a bfloat16 matrix [columns, inner] with tiles of `rows` rows."""
    device = open_device()
    tensor_cores._choose_splits = lambda *_: splits
    tensor_cores._choose_block = lambda *_: rows
    stream = device.stream("products")
    lane = StreamLane(stream)
    rng = np.random.default_rng(splits)
    x = upload(device, normal(rng, rows, inner), "bfloat16")
    weight = upload(device, normal(rng, columns, inner), "bfloat16")
    results = []
    for polls in (0, 1 << 30):
        KernelLoader.load = lambda loader, *names, polls=polls, **defines: LOAD(
            loader, *names, POLLS=polls, **defines
        )
        products = ModelKernels(device, "warp").products
        out = device.zeros((rows, columns), "float32")
        for _ in range(2):  # the second launch has the workspace that the first has allocated
            for workspace in products._workspace.values():
                if workspace.dtype == "float32":
                    workspace.fill(0xFF)
            products.linear(lane, x, weight, out)
            results.append(download(stream, out))
    stored = int(np.sum(~np.isnan(products._workspace["float32"].to_host())))
    print(json.dumps([stored, all(same_bits(results[0], other) for other in results)]))


if __name__ == "__main__":
    launch(**json.loads(sys.argv[1]))
