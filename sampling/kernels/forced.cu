// Drafts without a drafter: the tokens that the grammar forces, as far as its rows say so.
//
// One thread per batch row. Rows 0 .. were made after this replay's commit; the same conditions as
// in sample_draft decide whether a position is drafted.
#include "slot.cuh"

extern "C" __global__ void place_forced(int rows, const int* row_slot, int draft_length,
                                        int draft_stride, const int* count_of, const int* n,
                                        int* drafts, int* draft_len, const int* active,
                                        const int* epoch, const int* limit, const int* stop_ids,
                                        const int* stop_count, int* q_kind, const int* row_state,
                                        int row_state_stride, const int* replay_number,
                                        int* drafted, int drafted_stride) {
  const int b = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (b >= rows) return;
  const int slot = row_slot[b];
  if (slot < 0 || count_of[b] == 0 || !active[slot]) return;
  int* record = drafted + static_cast<long long>(slot) * drafted_stride;
  const int* states = row_state + static_cast<long long>(slot) * row_state_stride;
  for (int j = draft_len[slot] + 1; j <= draft_length; ++j) {
    const int position = n[slot] + j;  // being drafted
    if (position >= limit[slot]) break;
    const int token = forced_token(states + 4 * (j - 1), epoch[slot], position - 1);
    if (token < 0) break;
    keep_draft(slot * draft_stride + j - 1, j, token, DRAFT_POINT, *replay_number, drafts, q_kind,
               draft_len + slot, record);
    if (is_stop(stop_ids + slot * MAX_STOP_IDS, stop_count[slot], token)) break;
  }
}
