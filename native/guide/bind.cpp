#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <tuple>

#include "hostwork/gate.h"
#include "worker.h"

namespace nb = nanobind;

namespace graft::guide {
namespace {

// A request as Python passes it: slot, epoch, position, matcher or None, closing_end.
using RequestTuple = std::tuple<int32_t, int32_t, int32_t, NativeMatcher*, int32_t>;

Exchange exchange_of(uintptr_t address, const nb::bytes& layout, int vocab_size) {
  Exchange exchange{reinterpret_cast<int32_t*>(address), {}, vocab_size};
  if (layout.size() != sizeof exchange.layout)
    throw std::invalid_argument("layout has the wrong size");
  std::memcpy(&exchange.layout, layout.c_str(), sizeof exchange.layout);
  return exchange;
}

bool publish(Worker& worker, int64_t replay, const std::vector<RequestTuple>& tuples,
             int64_t previous) {
  std::vector<Request> requests;
  requests.reserve(tuples.size());
  for (const auto& [slot, epoch, position, matcher, closing_end] : tuples) {
    if (slot < 0 || slot >= worker.exchange().layout.slots)
      throw std::out_of_range("slot is out of range");
    requests.push_back({slot, epoch, position, matcher, closing_end});
  }
  return worker.publish(replay, previous < 0 ? replay - 1 : previous, requests);
}

nb::dict counters(const Worker& worker) {
#define GRAFT_GUIDE_NAME(name) #name,
  constexpr const char* names[] = {GRAFT_GUIDE_COUNTS(GRAFT_GUIDE_NAME)};
#undef GRAFT_GUIDE_NAME
  const Counters& c = worker.counters();
  nb::dict out;
  for (int i = 0; i < count::kinds; ++i) out[names[i]] = c.of[i].value();
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

[[noreturn]] void fail(const ErrorText& error) { throw std::runtime_error(error.text); }

bool yes(Outcome outcome, const ErrorText& error) {
  if (outcome == Outcome::kFailed) fail(error);
  return outcome == Outcome::kYes;
}

using Row = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void bind_matchers(nb::module_& guide) {
  using Release = nb::call_guard<graft::hostwork::GilRelease>;
  nb::class_<OrderTiming>(guide, "OrderTiming")
      .def(nb::init<>())
      .def_prop_ro("trusted", &OrderTiming::trusted);
  nb::class_<NativeMatcher>(guide, "NativeMatcher")
      .def_rw("timing", &NativeMatcher::timing, nb::arg().none())
      .def(
          "accept",
          [](NativeMatcher& matcher, int32_t token) {
            ErrorText error;
            return yes(matcher.accept(token, &error), error);
          },
          nb::arg("token"), Release())
      .def(
          "accept_all",
          [](NativeMatcher& matcher, const std::vector<int32_t>& tokens) {
            ErrorText error;
            const int accepted =
                matcher.accept_all(tokens.data(), static_cast<int>(tokens.size()), &error);
            if (accepted < 0) fail(error);
            return accepted;
          },
          nb::arg("tokens"), Release())
      .def(
          "fill",
          [](NativeMatcher& matcher, const Row& row, int32_t budget) {
            ErrorText error;
            const Filled filled =
                matcher.fill(row.data(), static_cast<int64_t>(row.shape(0)), budget, &error);
            if (filled == Filled::kFailed) fail(error);
            return filled != Filled::kFree;
          },
          nb::arg("row").noconvert(), nb::arg("budget") = kNoBudget)
      .def("distance",
           [](NativeMatcher& matcher) {
             ErrorText error;
             const int32_t distance = matcher.distance(&error);
             if (distance < 0 && error.text[0] != '\0') fail(error);
             return distance;
           })
      .def(
          "rollback",
          [](NativeMatcher& matcher, int32_t tokens) {
            ErrorText error;
            yes(matcher.rollback(tokens, &error), error);
          },
          nb::arg("tokens"), Release())
      .def("is_terminated", [](NativeMatcher& matcher) {
        ErrorText error;
        return yes(matcher.is_terminated(&error), error);
      });

  nb::class_<Forced>(guide, "Forced")
      .def(
          "__init__",
          [](Forced* self, const std::vector<uint32_t>& lengths, const nb::bytes& bytes,
             bool unique_only) {
            new (self) Forced(lengths, {bytes.c_str(), bytes.size()}, unique_only);
          },
          nb::arg("lengths"), nb::arg("bytes"), nb::arg("unique_only"))
      .def(
          "token",
          [](const Forced& forced, const Row& row) {
            return forced.token(row.data(), static_cast<int64_t>(row.shape(0)));
          },
          nb::arg("row").noconvert());
}

}  // namespace

// Each of these functions is defined in the file that it is named after.
void bind_xgrammar(nb::module_& guide);
void bind_llguidance(nb::module_& guide);
void bind_marked(nb::module_& guide);
void bind_python_matcher(nb::module_& guide);
void bind_automaton(nb::module_& guide);
void bind_unique(nb::module_& guide);

}  // namespace graft::guide

void bind_guide(nb::module_& module) {
  using namespace graft::guide;  // NOLINT
  nb::module_ guide = module.def_submodule(
      "guide", "Grammar worker and native interfaces of the grammar backends.");
  guide.attr("UNKNOWN_DISTANCE") = kUnknownDistance;
  bind_matchers(guide);
  bind_xgrammar(guide);
  bind_llguidance(guide);
  bind_marked(guide);
  bind_python_matcher(guide);
  bind_automaton(guide);
  bind_unique(guide);
  guide.attr("STEP") = reinterpret_cast<uintptr_t>(&graft_guide_step);

  nb::class_<Worker>(guide, "Worker")
      .def(
          "__init__",
          [](Worker* self, uintptr_t exchange, const nb::bytes& layout, int vocab_size, int ring,
             int threads, int64_t budget_ns, uintptr_t clock, std::shared_ptr<const Forced> forced,
             bool follow_forced) {
            new (self) Worker(exchange_of(exchange, layout, vocab_size), ring, threads,
                              {budget_ns, 0, reinterpret_cast<const int64_t*>(clock)},
                              std::move(forced), follow_forced);
          },
          nb::arg("exchange"), nb::arg("layout"), nb::arg("vocab_size"), nb::arg("ring"),
          nb::arg("threads") = 1, nb::arg("budget_ns") = 0, nb::arg("clock") = 0,
          nb::arg("forced").none() = nb::none(), nb::arg("follow_forced") = false)
      .def("busy", &Worker::busy, nb::arg("slot"))
      .def("busy_slots", &Worker::busy_slots)
      .def("waiting", &Worker::waiting)
      .def("wait_idle", &Worker::wait_idle, nb::call_guard<graft::hostwork::GilRelease>())
      .def("publish", &publish, nb::arg("replay"), nb::arg("requests"), nb::arg("previous") = -1)
      .def("retire", &Worker::retire, nb::arg("replay"))
      .def(
          "record",
          [](Worker& worker, int step, int draft) {
            return reinterpret_cast<uintptr_t>(worker.record(static_cast<Step>(step), draft));
          },
          nb::arg("step"), nb::arg("draft"))
      .def("counters", &counters)
      .def("timeline", &timeline)
      .def("error", &Worker::error, nb::arg("slot"));
}
