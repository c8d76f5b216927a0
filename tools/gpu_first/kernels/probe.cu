// Kernels of the GPU measurement (tools/gpu_first): an empty kernel, a read of memory, and a
// generator of random values.
#include "graft.cuh"

struct alignas(16) Words {
  unsigned int word[4];
};

// Waits for the previous kernel in the stream or graph, and does nothing else.
extern "C" __global__ void nothing() { wait_for_previous_kernel(); }

// Reads `count` words of 16 bytes. The conditional write to `sink` makes the result observable, so
// that the compiler cannot remove the reads.
extern "C" __global__ void read_words(const Words* data, long long count, unsigned int* sink) {
  wait_for_previous_kernel();
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  unsigned int sum = 0u;
#pragma unroll 8
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    const Words words = data[i];
    sum ^= words.word[0] ^ words.word[1] ^ words.word[2] ^ words.word[3];
  }
  if (sum == 0x9e3779b9u) *sink = sum;
}

// Writes `count` pseudo-random values between -scale and scale.
extern "C" __global__ void fill_random(bf16_t* out, long long count, float scale) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    unsigned int hash = static_cast<unsigned int>(i) * 0x9e3779b1u + 0x85ebca6bu;
    hash = (hash ^ (hash >> 15)) * 0x2c1b3c6du;
    hash = (hash ^ (hash >> 12)) * 0x297a2d39u;
    hash ^= hash >> 15;
    from_float((static_cast<float>(hash >> 8) * (1.0f / 8388608.0f) - 1.0f) * scale, out + i);
  }
}
