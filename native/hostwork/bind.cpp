// Python face of the host-work room. Rules of INVARIANTS.md: arguments are converted with the GIL
// held, every driver call is made with the GIL released, and native code returns the driver's
// codes for Python to raise.
#include "hostwork/bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "hostwork/bind_captured.h"
#include "hostwork/current.h"
#include "hostwork/driver.h"
#include "hostwork/eager.h"
#include "hostwork/exec.h"
#include "hostwork/gate.h"
#include "hostwork/mailbox.h"
#include "hostwork/poll.h"
#include "hostwork/record.h"
#include "hostwork/resource.h"
#include "stacks/stacks.h"

namespace nb = nanobind;
using namespace graft::hostwork;

namespace {

Handle as_handle(std::uint64_t value) { return reinterpret_cast<Handle>(value); }
std::uint64_t as_int(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

// (node, replay, exception or None, message)
nb::object failure_tuple(Failure failure) {
  nb::object exception =
      failure.exception == nullptr ? nb::none() : nb::steal<nb::object>(failure.exception);
  return nb::make_tuple(failure.node, failure.replay, exception, failure.message);
}

std::tuple<int, std::string, std::uint64_t> attach_record(std::uint64_t graph, Record* record) {
  const GilRelease release;
  const Attached a = attach(as_handle(graph), record);
  return {a.result, a.api, as_int(a.object)};
}

// Adds (code, api, user object, function, data) for a host node.
template <typename... Body>
nb::object attach_host(std::uint64_t graph, std::shared_ptr<GraphState> state,
                       std::shared_ptr<PayloadCell> cell, Body&&... body) {
  auto* record = new HostRecord(std::forward<Body>(body)...);
  record->set_state(std::move(state));
  record->set_cell(std::move(cell));
  const std::uint64_t data = as_int(record);
  auto [code, api, object] = attach_record(graph, record);
  return nb::make_tuple(code, api, object, reinterpret_cast<std::uint64_t>(&run_host_record), data);
}

int launch_eager(std::uint64_t stream, EagerRecord* record, bool spin) {
  const GilRelease release;
  return record->launch(stream, spin);
}

// (finished, code): polls a driver query until it is not "not ready".
template <typename Query>
std::pair<bool, int> wait_for(Query&& query, std::optional<double> timeout_s) {
  Result result = kNotReady;
  const bool finished = poll_until(
      [&] {
        result = query();
        return result != kNotReady;
      },
      timeout_s);
  {
    const GilRelease release;
    hear_devices();
  }
  return {finished, result};
}

void bind_driver_table(nb::module_& m) {
  m.def("loaded_library", &loaded_library, nb::arg("soname"),
        "Path of the file that answers for a SONAME in this process, or ''.");
  m.def(
      "bind_driver",
      [](const std::string& path, std::uint64_t context) {
        const GilRelease release;
        bind_driver(path, as_handle(context));
        start_reaper();
      },
      nb::arg("path"), nb::arg("context"),
      "Take the native driver table from the loaded libcuda.so.1, which must be `path`.");
  m.def("in_host_work", &in_host_work, "Is this thread inside a host function?");
}

void bind_lifetime(nb::module_& m) {
  m.def(
      "set_primary_context", [](std::uint64_t context) { set_primary_context(as_handle(context)); },
      nb::arg("context"), "Name the primary context anew; 0 while it is released.");
  nb::enum_<ResourceKind>(m, "ResourceKind")
      .value("DEVICE_MEMORY", ResourceKind::kDeviceMemory)
      .value("PINNED_MEMORY", ResourceKind::kPinnedMemory)
      .value("EVENT", ResourceKind::kEvent)
      .value("STREAM", ResourceKind::kStream)
      .value("MODULE", ResourceKind::kModule)
      .value("GRAPH", ResourceKind::kGraph);
  nb::class_<Resource>(m, "Resource", "Owner of one driver handle; freed by the reaper.")
      .def(nb::init<ResourceKind, std::uint64_t>(), nb::arg("kind"), nb::arg("handle"))
      .def_prop_ro("handle", &Resource::handle)
      .def("disown", &Resource::disown, "The driver owns the handle from now on.");
  m.def(
      "flush", [](double timeout_s) { return flush(timeout_s); }, nb::arg("timeout_s"),
      nb::call_guard<GilRelease>(),
      "Wait until everything dropped so far is freed; False on timeout.");
  m.def("live_resources", &live_resources);
  m.def("failed_frees", &failed_frees);
  m.def("leaked_items", &leaked_items);
  m.def("live_records", &live_records);
  m.def("released_records", &released_records);
  m.def(
      "adopt_state",
      [](std::shared_ptr<GraphState> child, std::shared_ptr<GraphState> parent) {
        return child->set_parent(parent);
      },
      nb::arg("child"), nb::arg("parent"), nb::call_guard<GilRelease>(),
      "Let the host steps of a moved graph count, fail and stand down with its parent.");
  m.def("live_thread_states", &live_thread_states);
  m.def("close_gate", &close_gate, nb::arg("timeout_s"),
        "Let no thread enter Python any more; called once, when the interpreter exits.");
}

void bind_records(nb::module_& m) {
  nb::class_<GraphState>(m, "GraphState", "Replay status and first failure of one graph.")
      .def(nb::new_([](std::uint64_t status) {
             return std::make_shared<GraphState>(reinterpret_cast<std::int32_t*>(status));
           }),
           nb::arg("status"))
      .def_prop_ro("failed", &GraphState::failed)
      .def_prop_ro("failures", &GraphState::failures)
      .def_prop_ro("overrun",
                   [](const GraphState& self) {
                     const GilRelease release;
                     return self.overrun();
                   })
      .def("pending",
           [](const GraphState& self) -> nb::object {
             Failure failure;
             if (!self.pending(&failure)) return nb::none();
             return failure_tuple(std::move(failure));
           })
      .def("clear", &GraphState::clear);

  m.def(
      "attach_keep",
      [](std::uint64_t graph, nb::object keep) {
        return attach_record(graph, new Record(keep.ptr()));
      },
      nb::arg("graph"), nb::arg("keep").none(),
      "Keep objects alive as long as the graph can run: (code, api, user object).");
  m.def(
      "attach_python",
      [](std::uint64_t graph, std::shared_ptr<GraphState> state, std::string name, nb::object fn,
         nb::tuple args, nb::object keep, std::shared_ptr<PayloadCell> cell) {
        return attach_host(graph, std::move(state), std::move(cell), std::move(name), fn.ptr(),
                           args.ptr(), keep.ptr());
      },
      nb::arg("graph"), nb::arg("state"), nb::arg("name"), nb::arg("fn"), nb::arg("args"),
      nb::arg("keep").none(), nb::arg("cell").none() = nb::none(),
      "Record of a Python host node: (code, api, user object, function, data).");
  m.def(
      "attach_native",
      [](std::uint64_t graph, std::shared_ptr<GraphState> state, std::string name,
         std::uint64_t function, std::uint64_t data, nb::object keep,
         std::shared_ptr<PayloadCell> cell) {
        return attach_host(graph, std::move(state), std::move(cell), std::move(name),
                           reinterpret_cast<HostFunction>(function), as_handle(data), keep.ptr());
      },
      nb::arg("graph"), nb::arg("state"), nb::arg("name"), nb::arg("function"), nb::arg("data"),
      nb::arg("keep").none(), nb::arg("cell").none() = nb::none(),
      "Record of a native host node: (code, api, user object, function, data).");
  m.def(
      "detach",
      [](std::uint64_t graph, std::uint64_t object) {
        return detach(as_handle(graph), as_handle(object));
      },
      nb::arg("graph"), nb::arg("object"), nb::call_guard<GilRelease>());
  // For native work that is compiled elsewhere: addresses of functions of current.h, mailbox.h and
  // gate.h.
  m.def("native_api", [] {
    nb::dict out;
    out["current_replay"] = reinterpret_cast<std::uint64_t>(&current_replay);
    out["fail_current"] = reinterpret_cast<std::uint64_t>(&fail_current);
    out["current_output"] = reinterpret_cast<std::uint64_t>(&current_output);
    out["release_thread_state"] = reinterpret_cast<std::uint64_t>(&release_thread_state);
    return out;
  });
  m.def("run_counts", [] {
    const RunCounts c = run_counts();
    return nb::make_tuple(c.python, c.native, c.stood_down);
  });
  m.def(
      "thread_stack",
      [](int tid, double limit_s) {
        std::vector<std::string> out;
        const GilRelease release;
        const stacks::Frames frames =
            tid == 0 ? stacks::of_this_thread(0) : stacks::of_thread(tid, limit_s);
        for (const void* frame : frames) out.push_back(stacks::name_of(frame));
        return out;
      },
      nb::arg("tid"), nb::arg("limit_s"),
      "Native stack of a thread (0: this one), innermost first; [] when it does not answer.");
  m.def("running_host_work", [] {
    std::vector<Running> running;
    {
      const GilRelease release;
      running = running_host_work();
    }
    nb::list out;
    for (const Running& r : running) {
      out.append(nb::make_tuple(r.node, r.replay, r.seconds, r.thread, r.tid));
    }
    return out;
  });
}

void bind_eager(nb::module_& m) {
  m.def(
      "eager_python",
      [](std::uint64_t stream, std::string name, nb::object fn, nb::tuple args, nb::object keep,
         bool spin) {
        return launch_eager(
            stream, new EagerRecord(std::move(name), fn.ptr(), args.ptr(), keep.ptr()), spin);
      },
      nb::arg("stream"), nb::arg("name"), nb::arg("fn"), nb::arg("args"), nb::arg("keep").none(),
      nb::arg("spin") = false);
  m.def(
      "eager_native",
      [](std::uint64_t stream, std::string name, std::uint64_t function, std::uint64_t data,
         nb::object keep, bool spin) {
        return launch_eager(
            stream,
            new EagerRecord(std::move(name), reinterpret_cast<HostFunction>(function),
                            as_handle(data), keep.ptr()),
            spin);
      },
      nb::arg("stream"), nb::arg("name"), nb::arg("function"), nb::arg("data"),
      nb::arg("keep").none(), nb::arg("spin") = false);
  m.def(
      "take_eager_failure",
      [](std::uint64_t stream) -> nb::object {
        Failure failure;
        if (!take_eager_failure(stream, &failure)) return nb::none();
        return failure_tuple(std::move(failure));
      },
      nb::arg("stream"));
  m.def(
      "take_untold",
      [] {
        nb::list out;
        for (Failure& failure : take_untold()) out.append(failure_tuple(std::move(failure)));
        for (Failure& failure : take_eager_failures())
          out.append(failure_tuple(std::move(failure)));
        return out;
      },
      "Failures that nobody was told of yet, told now: [(node, replay, exception, message)].");
  m.def("abandon_eager", &abandon_eager, nb::call_guard<GilRelease>());
  m.def("pending_eager", &pending_eager, nb::call_guard<GilRelease>());
}

void bind_exec(nb::module_& m) {
  nb::class_<PayloadCell>(m, "PayloadCell", "A value that changes between replays.")
      .def(nb::new_([](nb::object value, std::uint64_t address) {
             auto cell = std::make_shared<PayloadCell>();
             Py_XDECREF(cell->set(0, value.release().ptr(), address));
             return cell;
           }),
           nb::arg("value").none(), nb::arg("address"))
      .def_prop_ro("size", &PayloadCell::size)
      .def("restart", &PayloadCell::restart);
  const auto pair = [](Outcome outcome) {
    return std::make_pair(outcome.result, std::string(outcome.api));
  };
  nb::class_<Exec>(m, "Exec", "One executable graph.")
      .def(nb::init<std::uint64_t, std::uint64_t, std::shared_ptr<GraphState>>(), nb::arg("exec"),
           nb::arg("event"), nb::arg("state"))
      .def_prop_ro("handle", &Exec::handle)
      .def_prop_ro("launches",
                   [](Exec& self) {
                     const GilRelease release;
                     return self.launches();
                   })
      .def(
          "launch",
          [pair](Exec& self, std::uint64_t stream) {
            const GilRelease release;
            return pair(self.launch(stream));
          },
          nb::arg("stream"))
      .def(
          "upload",
          [pair](Exec& self, std::uint64_t stream) {
            const GilRelease release;
            return pair(self.upload(stream));
          },
          nb::arg("stream"))
      .def(
          "set_kernel",
          [pair](Exec& self, std::uint64_t node, std::uint64_t params) {
            const GilRelease release;
            return pair(self.set_kernel(node, params));
          },
          nb::arg("node"), nb::arg("params"))
      .def(
          "set_enabled",
          [pair](Exec& self, std::uint64_t node, bool enabled) {
            const GilRelease release;
            return pair(self.set_enabled(node, enabled));
          },
          nb::arg("node"), nb::arg("enabled"))
      .def(
          "get_enabled",
          [](Exec& self, std::uint64_t node) {
            bool enabled = false;
            const GilRelease release;
            const Outcome outcome = self.get_enabled(node, &enabled);
            return std::make_tuple(outcome.result, std::string(outcome.api), enabled);
          },
          nb::arg("node"))
      .def(
          "keep",
          [](Exec& self, nb::object owners) {
            PyObject* reference = owners.release().ptr();
            const GilRelease release;
            self.keep(reference);
          },
          nb::arg("owners"))
      .def(
          "set_payload",
          [](Exec& self, std::shared_ptr<PayloadCell> cell, nb::object value,
             std::uint64_t address) {
            PyObject* reference = value.release().ptr();
            PyObject* replaced = nullptr;
            {
              const GilRelease release;
              replaced = self.set_payload(*cell, reference, address);
            }
            Py_XDECREF(replaced);
          },
          nb::arg("cell"), nb::arg("value").none(), nb::arg("address"))
      .def("query",
           [pair](Exec& self) {
             const GilRelease release;
             return pair(self.query());
           })
      .def(
          "wait",
          [](Exec& self, std::optional<double> timeout_s) {
            std::shared_ptr<Resource> event;
            Result idle = kSuccess;
            {
              const GilRelease release;
              event = self.launched_so_far();
              if (event == nullptr && self.closed()) idle = kClosed;
            }
            return wait_for(
                [&] {
                  return event == nullptr ? idle : driver().event_query(as_handle(event->handle()));
                },
                timeout_s);
          },
          nb::arg("timeout_s").none(),
          "Wait for what was launched before the call: (finished, code).")
      .def(
          "update",
          [](Exec& self, std::uint64_t graph, std::shared_ptr<GraphState> state) {
            UpdateInfo info{};
            const GilRelease release;
            const Result result = self.update(graph, std::move(state), &info);
            return std::make_tuple(result, info.result, as_int(info.error_node));
          },
          nb::arg("graph"), nb::arg("state"), "(code, update result, node to blame)")
      .def("close", [](Exec& self) {
        const GilRelease release;
        self.close();
      });
}

void bind_waits(nb::module_& m) {
  m.def(
      "query_stream", [](std::uint64_t stream) { return driver().stream_query(as_handle(stream)); },
      nb::arg("stream"), nb::call_guard<GilRelease>());
  m.def(
      "query_event", [](std::uint64_t event) { return driver().event_query(as_handle(event)); },
      nb::arg("event"), nb::call_guard<GilRelease>());
  m.def(
      "wait_event",
      [](std::uint64_t event, std::optional<double> timeout_s) {
        return wait_for([event] { return driver().event_query(as_handle(event)); }, timeout_s);
      },
      nb::arg("event"), nb::arg("timeout_s").none(), "(finished, code)");
  m.def(
      "wait_streams",
      [](const std::vector<std::uint64_t>& streams, std::optional<double> timeout_s) {
        std::size_t next = 0;
        return wait_for(
            [&streams, &next] {
              for (; next < streams.size(); ++next) {
                const Result result = driver().stream_query(as_handle(streams[next]));
                if (result != kSuccess) return result;
              }
              return kSuccess;
            },
            timeout_s);
      },
      nb::arg("streams"), nb::arg("timeout_s").none(),
      "Wait until each stream was seen idle once: (finished, code).");

  m.def("load_acquire_i32", [](std::uint64_t address) {
    return __atomic_load_n(reinterpret_cast<const std::int32_t*>(address), __ATOMIC_ACQUIRE);
  });
  m.def("store_release_i32", [](std::uint64_t address, std::int32_t value) {
    __atomic_store_n(reinterpret_cast<std::int32_t*>(address), value, __ATOMIC_RELEASE);
  });
  const auto load = [](std::uint64_t address) {
    return __atomic_load_n(reinterpret_cast<const std::int32_t*>(address), __ATOMIC_ACQUIRE);
  };
  m.def(
      "poll_i32_eq",
      [load](std::uint64_t address, std::int32_t value, std::optional<double> timeout_s) {
        const auto done = [=] { return load(address) == value; };
        return done() || poll_until(done, timeout_s);
      },
      nb::arg("address"), nb::arg("value"), nb::arg("timeout_s").none(),
      "Wait, with acquire order, until the word equals value; False at the deadline.");
  m.def(
      "poll_i32_ge",
      [load](std::uint64_t address, std::int32_t value, std::optional<double> timeout_s) {
        const auto done = [=] { return load(address) >= value; };
        return done() || poll_until(done, timeout_s);
      },
      nb::arg("address"), nb::arg("value"), nb::arg("timeout_s").none(),
      "Wait, with acquire order, until the word is at least value; False at the deadline.");
}

}  // namespace

void bind_mailboxes(nb::module_& m);  // bind_mailbox.cpp

void bind_hostwork(nb::module_& m) {
  bind_driver_table(m);
  bind_lifetime(m);
  bind_records(m);
  bind_eager(m);
  bind_captured(m);
  bind_exec(m);
  bind_waits(m);
  bind_mailboxes(m);
}
