"""Use graft.cudagraph to run a kernel, a Python function and a kernel in one CUDA graph.

The graph is launched three times. The Python function is a host step: a node of the graph that runs
on the CPU. The function uses pinned memory, which host and device share. It must not call the CUDA
driver.
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
    """Square numbers on the device, add one on the host, and square again on the device."""
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
    executable = graph.instantiate()
    stream = device.stream()
    for _ in range(3):
        executable.launch(stream)
        executable.synchronize(timeout_s=10)
        print(numbers.array.tolist())
    executable.close()
    graph.close()


if __name__ == "__main__":
    main()
