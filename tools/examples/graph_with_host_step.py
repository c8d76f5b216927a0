"""cudagraph: a kernel, a step in Python and a kernel again, in one graph that is replayed.

A step reads and writes pinned memory, which host and device share; it calls nothing of the driver.
"""

from __future__ import annotations

from graft.cudagraph import Graph, load_text, open_device

KERNELS = """
extern "C" __global__ void square(int* numbers, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) numbers[i] *= numbers[i];
}
"""


def main() -> None:
    """Square, add one on the host, square again; three times."""
    device = open_device()
    numbers = device.pinned((8,), "int32")
    numbers.array[:] = range(8)
    square = load_text(device, KERNELS, "square.cu")["square"]

    def add_one() -> None:
        numbers.array[:] = (numbers.array + 1) % 10

    graph = Graph(device, "example")
    lane = graph.lane("main")
    lane.kernel(square, 1, 32, (numbers, 8))
    lane.host(add_one)
    lane.kernel(square, 1, 32, (numbers, 8))
    run = graph.instantiate()
    stream = device.stream()
    for _ in range(3):
        run.launch(stream)
        run.synchronize(timeout_s=10)
        print(numbers.array.tolist())
    run.close()
    graph.close()


if __name__ == "__main__":
    main()
