// Kernels of the GPU measurement (tools/gpu_first): an empty kernel, a read of memory, generators
// of random values, and comparisons of results.
#include "graft.cuh"

struct alignas(16) Words {
  unsigned int word[4];
};

// Waits for the previous kernel in the stream or graph, and does nothing else.
extern "C" __global__ void nothing() { wait_for_previous_kernel(); }

// Reads `count` words of 16 bytes. The compiler cannot remove the reads, because a write to `sink`
// depends on their values.
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

// Returns 32 pseudo-random bits that depend on an index and a seed.
__device__ __forceinline__ unsigned int random_bits(long long index, unsigned int seed) {
  unsigned int hash = static_cast<unsigned int>(index) * 0x9e3779b1u + seed * 0x85ebca6bu;
  hash = (hash ^ (hash >> 15)) * 0x2c1b3c6du;
  hash = (hash ^ (hash >> 12)) * 0x297a2d39u;
  return hash ^ (hash >> 15);
}

// Writes `count` pseudo-random values between -scale and scale.
extern "C" __global__ void fill_random(bf16_t* out, long long count, float scale,
                                       unsigned int seed) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    const float unit = static_cast<float>(random_bits(i, seed) >> 8) * (1.0f / 8388608.0f);
    from_float((unit - 1.0f) * scale, out + i);
  }
}

// Writes `count` pseudo-random E4M3 codes. Magnitudes are below 2, and no code is NaN.
extern "C" __global__ void fill_random_e4m3(e4m3_t* out, long long count, unsigned int seed) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    out[i].bits = static_cast<unsigned char>((random_bits(i, seed) >> 24) & 0xbfu);
  }
}

// Adds to `wrong` the number of words i < count with data[i] != expected[i % period].
extern "C" __global__ void count_different(const unsigned int* data, const unsigned int* expected,
                                           long long count, long long period, int* wrong) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  int found = 0;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step)
    found += data[i] != expected[i % period] ? 1 : 0;
  if (found != 0) atomicAdd(wrong, found);
}

// Checks the answer of the previous host step, which must be 3 * question + 1, and asks the next
// question. Must be launched with one thread.
extern "C" __global__ void ask(int* question, const int* answer, int* wrong) {
  const int number = *question;
  if (*answer != 3 * number + 1) *wrong += 1;
  *question = number + 1;
}
