// Admission of a request to a slot, and leaving it. One thread each; values come as arguments, so
// nothing that the host may overwrite is read later.
#include "slot.cuh"

extern "C" __global__ void slot_join(
    int slot, int position, int last_token, int epoch_number, int end, int stops, int stop0,
    int stop1, int stop2, int stop3, int stop4, int stop5, int stop6, int stop7,
    unsigned long long seed_value, int sample_index, float temperature_value, int top_k_value,
    float top_p_value, float min_p_value, int verify_mode, int* n, int* last, int* draft_len,
    int* active, int* epoch, int* limit, int* stop_ids, int* stop_count, unsigned long long* seed,
    int* sample, float* temperature, int* top_k, float* top_p, float* min_p, int* verify) {
  const int ids[MAX_STOP_IDS] = {stop0, stop1, stop2, stop3, stop4, stop5, stop6, stop7};
  for (int i = 0; i < MAX_STOP_IDS; ++i) stop_ids[slot * MAX_STOP_IDS + i] = ids[i];
  stop_count[slot] = stops;
  n[slot] = position;
  last[slot] = last_token;
  draft_len[slot] = 0;
  epoch[slot] = epoch_number;
  limit[slot] = end;
  seed[slot] = seed_value;
  sample[slot] = sample_index;
  temperature[slot] = temperature_value;
  top_k[slot] = top_k_value;
  top_p[slot] = top_p_value;
  min_p[slot] = min_p_value;
  verify[slot] = verify_mode;
  active[slot] = 1;
}

extern "C" __global__ void slot_leave(int slot, int* active, int* draft_len) {
  active[slot] = 0;
  draft_len[slot] = 0;
}
