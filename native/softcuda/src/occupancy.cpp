// Occupancy queries. They apply the limits that the device attributes state, so that programs can
// choose a block size. They do not predict speed, because a worker runs one block at a time.
#include <algorithm>
#include <cstring>

#include "modules.h"

using namespace softcuda;

namespace {

using BlockToShared = size_t (*)(int);  // CUoccupancyB2DSize

constexpr int kWarp = 32;

int max_block_size(const Function& f) {
  const unsigned bound = f.entry().max_threads;
  return bound != 0 ? static_cast<int>(bound) : 1024;
}

// Returns the number of blocks that fit on one multiprocessor.
int blocks_per_sm(const Function& f, int block_size, size_t dynamic_shared) {
  if (block_size > max_block_size(f)) return 0;
  if (dynamic_shared > static_cast<size_t>(f.max_dynamic_shared.load())) return 0;
  const int threads = (block_size + kWarp - 1) / kWarp * kWarp;
  const size_t shared =
      dynamic_shared +
      static_cast<size_t>(device_attribute(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK));
  const int by_shared =
      static_cast<int>(static_cast<size_t>(device_attribute(
                           CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)) /
                       shared);
  const int by_threads =
      device_attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR) / threads;
  const int limit = device_attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
  return std::min({by_shared, by_threads, limit});
}

// Chooses the block size with the most threads per multiprocessor. If several block sizes give the
// same number, it chooses the largest one.
void choose_block_size(int* grid, int* block, CUfunction handle, BlockToShared shared_of,
                       size_t dynamic_shared, int limit) {
  const auto f = functions.find(handle);
  require(grid != nullptr && block != nullptr && limit >= 0);
  int most = 0;
  *block = 0;
  *grid = 0;
  const int largest = limit == 0 ? max_block_size(*f) : std::min(limit, max_block_size(*f));
  for (int size = largest; size > 0; size = (size - 1) / kWarp * kWarp) {
    const size_t shared = shared_of != nullptr ? shared_of(size) : dynamic_shared;
    const int blocks = blocks_per_sm(*f, size, shared);
    if (blocks * size <= most) continue;
    most = blocks * size;
    *block = size;
    *grid = blocks * device_attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  }
}

void active_blocks(int* out, CUfunction handle, int block_size, size_t dynamic_shared) {
  const auto f = functions.find(handle);
  require(out != nullptr && block_size > 0);
  *out = blocks_per_sm(*f, block_size, dynamic_shared);
}

}  // namespace

SC_API(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050, kNoLock, int*, out, CUfunction, f, int,
       block_size, size_t, dynamic_shared) {
  active_blocks(out, f, block_size, dynamic_shared);
}

SC_API(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 7000, kNoLock, int*, out, CUfunction,
       f, int, block_size, size_t, dynamic_shared, unsigned, flags) {
  require(flags <= 1);
  active_blocks(out, f, block_size, dynamic_shared);
}

SC_API(cuOccupancyMaxPotentialBlockSize, 6050, kNoLock, int*, grid, int*, block, CUfunction, f,
       BlockToShared, shared_of, size_t, dynamic_shared, int, limit) {
  choose_block_size(grid, block, f, shared_of, dynamic_shared, limit);
}

SC_API(cuOccupancyMaxPotentialBlockSizeWithFlags, 7000, kNoLock, int*, grid, int*, block,
       CUfunction, f, BlockToShared, shared_of, size_t, dynamic_shared, int, limit, unsigned,
       flags) {
  require(flags <= 1);
  choose_block_size(grid, block, f, shared_of, dynamic_shared, limit);
}

// Returns the number of blocks per cluster of a launch configuration.
static unsigned cluster_size(const CUlaunchConfig& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) continue;
    unsigned size[3];
    std::memcpy(size, config.attrs[i].value, sizeof size);
    return size[0] * size[1] * size[2];
  }
  return 1;
}

// Only clusters of one block are supported.
SC_API(cuOccupancyMaxPotentialClusterSize, 11070, kNoLock, int*, out, CUfunction, f,
       const CUlaunchConfig*, config) {
  functions.find(f);
  require(out != nullptr && config != nullptr);
  *out = 1;
}

SC_API(cuOccupancyMaxActiveClusters, 11070, kNoLock, int*, out, CUfunction, handle,
       const CUlaunchConfig*, config) {
  const auto f = functions.find(handle);
  require(out != nullptr && config != nullptr);
  const unsigned threads = config->blockDimX * config->blockDimY * config->blockDimZ;
  require(threads > 0, CUDA_ERROR_INVALID_VALUE, "a block dimension is 0");
  const int blocks = threads > 1024 || cluster_size(*config) != 1
                         ? 0
                         : blocks_per_sm(*f, static_cast<int>(threads), config->sharedMemBytes);
  *out = blocks * device_attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
}

SC_API(cuOccupancyAvailableDynamicSMemPerBlock, 10020, kNoLock, size_t*, out, CUfunction, handle,
       int, blocks, int, block_size) {
  const auto f = functions.find(handle);
  require(out != nullptr && blocks > 0 && block_size > 0 && block_size <= max_block_size(*f));
  require(blocks <= blocks_per_sm(*f, block_size, 0), CUDA_ERROR_INVALID_VALUE,
          "a multiprocessor cannot run this many blocks");
  const int share =
      device_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR) / blocks -
      device_attribute(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
  *out = static_cast<size_t>(std::min(share, f->max_dynamic_shared.load()));
}
