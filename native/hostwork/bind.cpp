#include "hostwork/bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <tuple>
#include <vector>

#include "hostwork/exec.h"
#include "hostwork/gate.h"
#include "hostwork/mailbox.h"
#include "stacks/stacks.h"
#include "threads.h"

namespace nb = nanobind;
using namespace graft::hostwork;

namespace {

using PollClock = std::chrono::steady_clock;

// Polls `done()` until it returns true or `until` has passed; returns whether it became true. The
// wait as a whole began at `begin`: the function spins until 20 us after `begin`, yields until 200
// us, and then sleeps for increasing times, to leave the cores to the awaited work. The caller must
// not hold the GIL.
template <typename Done>
bool poll_slice(Done&& done, PollClock::time_point begin, PollClock::time_point until) {
  while (true) {
    if (done()) return true;
    const auto now = PollClock::now();
    if (now >= until) return false;
    const auto waited = now - begin;
    if (waited < std::chrono::microseconds(20)) {
      for (int i = 0; i < 32; ++i) graft::cpu_relax();
    } else if (waited < std::chrono::microseconds(200)) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::clamp<PollClock::duration>(
          waited / 20, std::chrono::microseconds(20), std::chrono::milliseconds(1)));
    }
  }
}

// Polls until `done()` returns true or the timeout has passed (no value: no limit). The caller must
// hold the GIL, which is released while polling and acquired at intervals to check for signals, so
// that Ctrl-C raises KeyboardInterrupt.
template <typename Done>
bool poll_until(Done&& done, std::optional<double> timeout_s) {
  const auto begin = PollClock::now();
  // A missing timeout becomes about 100 years, so that the clock arithmetic does not overflow.
  const double limit = std::min(timeout_s.value_or(3.0e9), 3.0e9);
  const auto end =
      begin + std::chrono::duration_cast<PollClock::duration>(std::chrono::duration<double>(limit));
  while (true) {
    bool finished;
    {
      const GilRelease release;
      const auto slice = PollClock::now() + std::chrono::milliseconds(20);
      finished = poll_slice(done, begin, std::min(slice, end));
    }
    if (finished) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (PollClock::now() >= end) return false;
  }
}

// Polls a driver query until its result is not kNotReady; returns (finished, code).
template <typename Query>
std::pair<bool, Result> wait_for(Query&& query, std::optional<double> timeout_s) {
  Result result = kNotReady;
  const bool finished = poll_until(
      [&] {
        result = query();
        return result != kNotReady;
      },
      timeout_s);
  const GilRelease release;
  check_device_timeouts();
  return {finished, result};
}

void bind_lifetime(nb::module_& m) {
  m.def("loaded_library", &loaded_library,
        "Return the path of the library loaded under a SONAME in this process, or ''.");
  m.def(
      "bind_driver",
      [](const std::string& path, std::uint64_t context) {
        bind_driver(path, pointer<void>(context));
        start_reaper();
      },
      nb::call_guard<GilRelease>(),
      "Resolve the driver functions of native code from the loaded libcuda.so.1, which must be the "
      "file `path`, and start the reaper.");
  m.def(
      "set_primary_context",
      [](std::uint64_t context) { set_primary_context(pointer<void>(context)); },
      "Set the primary context; 0 if it is not retained.");
  m.def("make_context_current", &make_context_current, nb::call_guard<GilRelease>(),
        "Make the primary context current on this thread and return the driver's result code.");
  m.def("new_dltensor_capsule", &new_dltensor_capsule,
        "Return a DLPack capsule of the unversioned DLManagedTensor at an address.");
  m.def("in_host_work", &in_host_work, "Return whether this thread is inside a host function.");
  nb::enum_<ResourceKind>(m, "ResourceKind")
      .value("DEVICE_MEMORY", ResourceKind::kDeviceMemory)
      .value("PINNED_MEMORY", ResourceKind::kPinnedMemory)
      .value("EVENT", ResourceKind::kEvent)
      .value("STREAM", ResourceKind::kStream)
      .value("MODULE", ResourceKind::kModule)
      .value("GRAPH", ResourceKind::kGraph);
  nb::class_<Resource>(m, "Resource", "Owner of one driver handle, which the reaper frees.")
      .def(nb::init<ResourceKind, std::uint64_t>())
      .def_prop_ro("handle", &Resource::handle)
      .def("disown", &Resource::disown, "Give up ownership of the handle.");
  m.def("flush", &flush, nb::call_guard<GilRelease>(),
        "Wait until everything released so far is freed; return False on timeout.");
  m.def("live_resources", &live_resources);
  m.def("is_context_fault", &is_context_fault,
        "Return whether the context is lost after a driver call with this result.");
  m.def("failed_frees", &failed_frees);
  m.def("live_thread_states", &live_thread_states);
  m.def("close_gate", &close_gate,
        "Prevent all threads from entering Python; called once, when the interpreter exits.");
  m.def(
      "thread_stack",
      [](int tid, double limit_s) {
        const stacks::Frames frames =
            tid == 0 ? stacks::of_this_thread(0) : stacks::of_thread(tid, limit_s);
        std::vector<std::string> out;
        for (const void* frame : frames) out.push_back(stacks::name_of(frame));
        return out;
      },
      nb::call_guard<GilRelease>(),
      "Return the native stack of a thread (0: the calling thread), innermost frame first. The "
      "list "
      "is empty if the thread does not answer in time.");
}

void bind_exec(nb::module_& m) {
  using Guard = nb::call_guard<GilRelease>;
  nb::class_<Exec>(m, "Exec", "One executable graph.")
      .def(nb::init<std::uint64_t, std::uint64_t, std::shared_ptr<GraphState>>())
      .def_prop_ro("handle", &Exec::handle)
      .def_prop_ro("launches", &Exec::launches, Guard())
      .def("launch", &Exec::launch, Guard())
      .def("upload", &Exec::upload, Guard())
      .def("set_kernel", &Exec::set_kernel, Guard())
      .def("set_enabled", &Exec::set_enabled, Guard())
      .def("keep",
           [](Exec& self, nb::object owners) {
             PyObject* reference = owners.release().ptr();
             const GilRelease release;
             self.keep(reference);
           })
      .def(
          "set_payload",
          [](Exec& self, std::shared_ptr<PayloadCell> cell, nb::object value,
             std::uint64_t address) {
            PyObject* reference = value.release().ptr();
            PyObject* replaced = nullptr;
            {
              const GilRelease release;
              replaced = self.set_payload(cell, reference, address);
            }
            Py_XDECREF(replaced);
          },
          nb::arg(), nb::arg().none(), nb::arg())
      .def("query", &Exec::query, Guard())
      .def(
          "wait",
          [](Exec& self, std::optional<double> timeout_s) {
            std::pair<Result, std::shared_ptr<Resource>> last;
            {
              const GilRelease release;
              last = self.last_launch();
            }
            const auto& [idle, event] = last;
            const auto query = [idle = idle, event = event] {
              return event == nullptr ? idle : driver().event_query(pointer<void>(event->handle()));
            };
            return wait_for(query, timeout_s);
          },
          nb::arg().none(), "Wait for the launches made before the call; return (finished, code).")
      .def(
          "update",
          [](Exec& self, std::uint64_t graph, std::shared_ptr<GraphState> state) {
            UpdateInfo info{};
            const Result result = self.update(graph, std::move(state), &info);
            return std::make_tuple(result, info.result, address_of(info.error_node));
          },
          Guard(),
          "Update the executable to another definition; return (code, update result, node that "
          "caused the failure).")
      .def("close", &Exec::close, Guard());
}

void bind_waits(nb::module_& m) {
  const auto query_stream = [](std::uint64_t stream) {
    return driver().stream_query(pointer<void>(stream));
  };
  const auto query_event = [](std::uint64_t event) {
    return driver().event_query(pointer<void>(event));
  };
  m.def("query_stream", query_stream, nb::call_guard<GilRelease>());
  m.def("query_event", query_event, nb::call_guard<GilRelease>());
  m.def(
      "wait_event",
      [=](std::uint64_t event, std::optional<double> timeout_s) {
        return wait_for([=] { return query_event(event); }, timeout_s);
      },
      nb::arg(), nb::arg().none(), "Wait for an event; return (finished, code).");
  m.def(
      "wait_streams",
      [=](const std::vector<std::uint64_t>& streams, std::optional<double> timeout_s) {
        std::size_t next = 0;
        return wait_for(
            [&] {
              for (; next < streams.size(); ++next) {
                const Result result = query_stream(streams[next]);
                if (result != kSuccess) return result;
              }
              return kSuccess;
            },
            timeout_s);
      },
      nb::arg(), nb::arg().none(),
      "Wait until each stream has been idle once; return (finished, code).");
  const auto load = [](std::uint64_t address) {
    return __atomic_load_n(pointer<const std::int32_t>(address), __ATOMIC_ACQUIRE);
  };
  m.def("load_acquire_i32", load);
  m.def("store_release_i32", [](std::uint64_t address, std::int32_t value) {
    __atomic_store_n(pointer<std::int32_t>(address), value, __ATOMIC_RELEASE);
  });
  m.def(
      "poll_i32_eq",
      [load](std::uint64_t address, std::int32_t value, std::optional<double> timeout_s,
             std::uint64_t stream) {
        constexpr std::chrono::milliseconds kQueryInterval{1};
        auto next_query = PollClock::now() + kQueryInterval;
        const auto done = [&] {
          if (stream != 0 && PollClock::now() >= next_query) {
            driver().stream_query(pointer<void>(stream));
            next_query = PollClock::now() + kQueryInterval;
          }
          return load(address) == value;
        };
        return load(address) == value || poll_until(done, timeout_s);
      },
      nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
      "Wait, with acquire order, until the word equals value; return False on timeout. If `stream` "
      "is not 0, query this CUstream every millisecond, because some platforms (WSL2) may pass the "
      "device's stores to host memory on only when the driver is called.");
}

}  // namespace

void bind_hostwork(nb::module_& m) {
  bind_lifetime(m);
  bind_work(m);
  bind_ranks(m);
  bind_exec(m);
  bind_waits(m);
}
