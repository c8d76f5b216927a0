// Copies KV-cache pages between a paged cache and a packed buffer (KV transfer).

// Grid: (number of pages to copy, layers). Each block copies one page of one layer.
//
// cache            keys or values of a paged cache, [layers, pages_per_layer, words]
// packed           copied pages, contiguous, [pages, layers, words]
// pages            indices in the cache of the pages to copy, [pages]
// pages_per_layer  number of pages in the cache, including the scratch page
// words            number of 32-bit words of one page in one layer
// read             direction: 1 copies from cache to packed, 0 from packed to cache
extern "C" __global__ void copy_pages(void* cache, void* packed, const int* pages,
                                      int pages_per_layer, int words, int read) {
  const int page = static_cast<int>(blockIdx.x);
  const int layer = static_cast<int>(blockIdx.y);
  const int layers = static_cast<int>(gridDim.y);
  const long long cache_page = static_cast<long long>(layer) * pages_per_layer + pages[page];
  const long long packed_page = static_cast<long long>(page) * layers + layer;
  int* in_cache = static_cast<int*>(cache) + cache_page * words;
  int* in_packed = static_cast<int*>(packed) + packed_page * words;
  int* to = read ? in_packed : in_cache;
  const int* from = read ? in_cache : in_packed;
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) {
    to[i] = from[i];
  }
}
