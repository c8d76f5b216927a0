// What tests of drafts leave of the target's distribution: weight * p once q is taken away.
#pragma once

#include "row.cuh"
#include "slot.cuh"

// The column of a target id in a drafter's vocabulary, -1: it has none.
__device__ __forceinline__ int column_of(const int* t2d, int draft_vocab, int id) {
  return t2d ? t2d[id] : id < draft_vocab ? id : -1;
}

// By target id: weight * p - q, not above 0 where the draft may have all of it.
struct Left {
  float weight;
  const float* p;
  const float* q;  // of the drafter's columns; null: a point, all on `draft`
  int draft;
  const int* t2d;
  int draft_vocab;

  __device__ __forceinline__ float operator()(int id) const {
    if (!(p[id] > 0.0f) || (!q && id == draft)) return 0.0f;
    const float mass = fmul(weight, p[id]);
    const int column = q ? column_of(t2d, draft_vocab, id) : -1;
    return column < 0 ? mass : fadd(mass, -q[column]);
  }
};
