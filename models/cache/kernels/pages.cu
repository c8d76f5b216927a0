// Pages of a paged cache, from where they lie to one behind the other, or back.

// Grid (pages, layers): of page p in a layer, `words` words of a cache of `all` pages a layer.
extern "C" __global__ void move_pages(int* cache, int* packed, const int* pages, int all, int words,
                                      int out) {
  const int p = static_cast<int>(blockIdx.x);
  const int layer = static_cast<int>(blockIdx.y);
  int* here = cache + (static_cast<long long>(layer) * all + pages[p]) * words;
  int* there = packed + (static_cast<long long>(p) * static_cast<int>(gridDim.y) + layer) * words;
  int* to = out ? there : here;
  const int* from = out ? here : there;
  for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x)) {
    to[i] = from[i];
  }
}
