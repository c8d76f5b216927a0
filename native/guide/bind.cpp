#include "bind.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <tuple>

#include "worker.h"

namespace nb = nanobind;

namespace graft::guide {
namespace {

using FieldTuple = std::pair<uintptr_t, int64_t>;  // address, stride
// slot, epoch, position, matcher handle, address of its acceptable ids
using RequestTuple = std::tuple<int32_t, int32_t, int32_t, uintptr_t, uintptr_t>;

Field field(const FieldTuple& tuple) {
  return {reinterpret_cast<int32_t*>(tuple.first), tuple.second};
}

bool publish(Worker& worker, int64_t replay, const std::vector<RequestTuple>& tuples) {
  std::vector<Request> requests;
  requests.reserve(tuples.size());
  for (const auto& [slot, epoch, position, handle, acceptable] : tuples) {
    void* matcher = reinterpret_cast<void*>(handle);
    if (slot < 0 || slot >= worker.shape().slots) throw std::out_of_range("slot");
    if (matcher != nullptr && !xgrammar::is_matcher(matcher)) {
      throw std::invalid_argument("the handle is not one of an XGrammar matcher");
    }
    if (matcher != nullptr && acceptable == 0) throw std::invalid_argument("acceptable is NULL");
    requests.push_back(
        {slot, epoch, position, matcher, reinterpret_cast<const uint32_t*>(acceptable)});
  }
  return worker.publish(replay, requests);
}

nb::dict counters(const Worker& worker) {
  const Counters& c = worker.counters();
  nb::dict out;
  out["replays"] = c.replays.value();
  out["missing_snapshots"] = c.missing_snapshots.value();
  out["joins"] = c.joins.value();
  out["fills"] = c.fills.value();
  out["accepts"] = c.accepts.value();
  out["rollbacks"] = c.rollbacks.value();
  out["commits"] = c.commits.value();
  out["committed_tokens"] = c.committed_tokens.value();
  out["refused_drafts"] = c.refused_drafts.value();
  out["terminations"] = c.terminations.value();
  out["dead_ends"] = c.dead_ends.value();
  out["desyncs"] = c.desyncs.value();
  out["errors"] = c.errors.value();
  out["free_rows"] = c.free_rows.value();
  const std::array<const char*, 3> kinds = {"open", "commit", "draft"};
  for (size_t k = 0; k < kinds.size(); ++k) {
    out[(std::string(kinds[k]) + "_calls").c_str()] = c.step_calls[k].value();
    out[(std::string(kinds[k]) + "_ns").c_str()] = c.step_ns[k].value();
  }
  return out;
}

std::vector<std::tuple<int64_t, int, int64_t, int64_t>> timeline(const Worker& worker) {
  std::vector<std::tuple<int64_t, int, int64_t, int64_t>> out;
  for (const Timeline::Span& span : worker.timeline().read()) {
    out.emplace_back(span.replay, span.step, span.start_ns, span.end_ns);
  }
  return out;
}

}  // namespace
}  // namespace graft::guide

void bind_guide(nb::module_& module) {
  using namespace graft::guide;  // NOLINT
  nb::module_ guide = module.def_submodule("guide", "The guided worker and its way to XGrammar.");
  guide.def("load_xgrammar", &xgrammar::load, nb::arg("tvm_ffi_library"));
  guide.attr("STEP") = reinterpret_cast<uintptr_t>(&graft_guide_step);

  nb::class_<Worker>(guide, "Worker")
      .def(
          "__init__",
          [](Worker* self, const FieldTuple& mask, const FieldTuple& row_state,
             const FieldTuple& committed, const FieldTuple& drafted, int slots, int draft_length,
             int vocab_size, int ring) {
            new (self) Worker({field(mask), field(row_state), field(committed), field(drafted)},
                              {slots, draft_length, vocab_size}, ring);
          },
          nb::arg("mask"), nb::arg("row_state"), nb::arg("committed"), nb::arg("drafted"),
          nb::arg("slots"), nb::arg("draft_length"), nb::arg("vocab_size"), nb::arg("ring"))
      .def("publish", &publish, nb::arg("replay"), nb::arg("requests"))
      .def("retire", &Worker::retire, nb::arg("replay"))
      .def(
          "record",
          [](Worker& worker, int step, int draft) {
            return reinterpret_cast<uintptr_t>(worker.record(static_cast<Step>(step), draft));
          },
          nb::arg("step"), nb::arg("draft"))
      .def("counters", &counters)
      .def("timeline", &timeline)
      .def("first_error", [](const Worker& worker) { return worker.first_error().text; })
      .def(
          "history",
          [](const Worker& worker, int slot) {
            int32_t epoch = 0;
            std::vector<int32_t> tokens = worker.history(slot, &epoch);
            return std::make_pair(epoch, tokens);
          },
          nb::arg("slot"));
}
