// The table of decoders and handlers for one kind of processor.
#include "lanes.h"

namespace softcuda {
namespace ptx {
namespace SC_PTX_ISA {

// Runs an instruction for the lanes whose guard predicate is true.
static const Instr* run_guarded(Warp& w, const Instr* in) {
  const uint32_t lanes = w.mask & pred_of(w, in->guard);
  if (lanes == 0) return in + 1;
  const uint32_t saved = w.mask;
  w.mask = lanes;
  const Instr* next = in->guarded(w, in);
  w.mask = saved;
  return next;
}

HandlerSet make_handlers() {
  HandlerSet set;
#define SC_ADD_DECODER(name) set.decoders.push_back(name);
  SC_PTX_DECODERS(SC_ADD_DECODER)
#undef SC_ADD_DECODER
  set.guard = run_guarded;
  set.move16 = move_b16;
  set.move32 = move_b32;
  set.move64 = move_b64;
  set.jump = jump;
  set.exit = exit_lanes;
  set.special_call = special_call;
  set.indirect_call = indirect_call;
  set.recursive_call = recursive_call;
  set.recursive_return = recursive_return;
  return set;
}

}  // namespace SC_PTX_ISA
}  // namespace ptx
}  // namespace softcuda
