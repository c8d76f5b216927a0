// Python face of host functions in captured streams; the rules of bind.cpp hold.
#include "hostwork/bind_captured.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "hostwork/captured.h"
#include "hostwork/gate.h"

namespace nb = nanobind;
using namespace graft::hostwork;

namespace {

// (code, api): makes the record with the GIL, hands it over without.
std::tuple<int, std::string> launch(std::uint64_t stream, std::uint64_t id, std::uint64_t graph,
                                    HostRecord* record, bool spin) {
  const GilRelease release;
  const CaptureInfo capture{kCapturing, id, reinterpret_cast<Handle>(graph)};
  record->set_state(capture_state(capture));
  const Attached a = launch_captured(stream, capture, record, spin);
  return {a.result, a.api};
}

}  // namespace

void bind_captured(nb::module_& m) {
  m.def(
      "capture_info",
      [](std::uint64_t stream) {
        CaptureInfo info;
        const GilRelease release;
        const Result result = capture_info(stream, &info);
        return std::make_tuple(result, info.status, info.id,
                               reinterpret_cast<std::uint64_t>(info.graph));
      },
      nb::arg("stream"), "(code, status, capture id, CUgraph)");
  m.def(
      "captured_python",
      [](std::uint64_t stream, std::uint64_t id, std::uint64_t graph, std::string name,
         nb::object fn, nb::tuple args, bool spin) {
        return launch(stream, id, graph,
                      new HostRecord(std::move(name), fn.ptr(), args.ptr(), nullptr), spin);
      },
      nb::arg("stream"), nb::arg("id"), nb::arg("graph"), nb::arg("name"), nb::arg("fn"),
      nb::arg("args"), nb::arg("spin") = false);
  m.def(
      "captured_native",
      [](std::uint64_t stream, std::uint64_t id, std::uint64_t graph, std::string name,
         std::uint64_t function, std::uint64_t data, nb::object keep, bool spin) {
        return launch(stream, id, graph,
                      new HostRecord(std::move(name), reinterpret_cast<HostFunction>(function),
                                     reinterpret_cast<void*>(data), keep.ptr()),
                      spin);
      },
      nb::arg("stream"), nb::arg("id"), nb::arg("graph"), nb::arg("name"), nb::arg("function"),
      nb::arg("data"), nb::arg("keep").none(), nb::arg("spin") = false);
  m.def("spin_supported", [] { return driver().launch_host_func_v2 != nullptr; });
  m.def("take_captured_failure", []() -> nb::object {
    Failure failure;
    if (!take_captured_failure(&failure)) return nb::none();
    nb::object exception =
        failure.exception == nullptr ? nb::none() : nb::steal<nb::object>(failure.exception);
    return nb::make_tuple(failure.node, failure.replay, exception, failure.message);
  });
}
