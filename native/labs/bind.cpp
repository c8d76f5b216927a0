#include "labs/bind.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "hostwork/gate.h"
#include "labs/launch_loop.h"

namespace nb = nanobind;
using namespace graft;

void bind_labs(nb::module_& m) {
  nb::module_ labs = m.def_submodule("labs", "What the laboratories need outside of Python.");
  labs.def("tick", &labs::tick, "Say that the calling thread keeps the GIL busy.");
  labs.def("gaps", &labs::gaps,
           "Spans (first, last) in ns of CLOCK_MONOTONIC without a tick; forgets them.");
  labs.def("wake_ups", &labs::wake_ups, nb::arg("count"),
           nb::call_guard<graft::hostwork::GilRelease>(),
           "Nanoseconds that a sleeping thread takes to wake up, `count` times.");
  labs.def(
      "replay",
      [](hostwork::Exec* exec, std::uint64_t handle, std::uint64_t stream, std::size_t callbacks,
         std::uint64_t stamps, std::uint64_t hops, std::uint64_t said, bool busy,
         std::size_t count) {
        labs::Samples out;
        int code;
        {
          const graft::hostwork::GilRelease release;
          code = labs::replay(
              {exec, handle, stream, callbacks, reinterpret_cast<const std::uint64_t*>(stamps),
               hops, reinterpret_cast<const std::uint64_t*>(said), busy},
              count, &out);
        }
        return std::make_tuple(code, out.launched, out.join, out.hops, out.said);
      },
      nb::arg("exec").none(), nb::arg("handle"), nb::arg("stream"), nb::arg("callbacks"),
      nb::arg("stamps"), nb::arg("hops"), nb::arg("said"), nb::arg("busy"), nb::arg("count"),
      "Replay without the GIL; (code, launched, join, hops, said), see native/labs/launch_loop.h.");
}
