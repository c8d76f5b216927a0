"""Launch two products with a folded norm between them, for tests that count what they execute.

Usage: ``product_launch.py JSON`` with the arguments of `launch`. The products are attention out,
and gate and up.
"""

import json
import sys

from graft.cudagraph.device import open_device
from graft.cudagraph.lanes import StreamLane
from graft.models.llm.kernels.library import ModelKernels
from graft.models.llm.kernels.operands import NORM_GROUP, Norm


def launch(rows, columns, inner):
    """Multiply `rows` rows by bfloat16 matrices [inner, inner] and [columns, inner]."""
    device = open_device()
    products = ModelKernels(device, "warp").products
    stream = device.stream("products")
    lane = StreamLane(stream)
    x = device.zeros((rows, inner), "bfloat16")
    hidden = device.zeros((rows, inner), "float32")
    norm = Norm(
        device.zeros((inner,), "float32"),
        1e-5,
        device.zeros((rows, inner), "bfloat16"),
        device.zeros((rows, inner // NORM_GROUP), "float32"),
    )
    weight = device.zeros((inner, inner), "bfloat16")
    products.linear(lane, x, weight, hidden, residual=hidden, norm=norm, name="attention out")
    out = device.zeros((rows, columns // 2), "bfloat16")
    gate_up = device.zeros((columns, inner), "bfloat16")
    products.gated_linear(lane, norm, gate_up, out, name="gate, up")
    stream.synchronize()
    stream.close()


if __name__ == "__main__":
    launch(**json.loads(sys.argv[1]))
