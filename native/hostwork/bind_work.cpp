// Python bindings of host work. Python passes the work as a tuple: (callable or None, arguments,
// function address, data address).
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "hostwork/bind.h"
#include "hostwork/gate.h"
#include "hostwork/hostfunc.h"
#include "hostwork/mailbox.h"

namespace nb = nanobind;

namespace graft::hostwork {
namespace {

using WorkTuple = std::tuple<nb::object, nb::tuple, std::uint64_t, std::uint64_t>;
using Attachment = std::tuple<Result, const char*, std::uint64_t>;  // code, api, user object

template <typename AnyRecord>
AnyRecord* make_record(std::string name, const WorkTuple& work, const nb::object& keep) {
  const auto& [fn, args, function, data] = work;
  const Work native{nullptr, nullptr, reinterpret_cast<HostFunction>(function),
                    pointer<void>(data)};
  const Work chosen = fn.is_none() ? native : Work{fn.ptr(), args.ptr()};
  return new AnyRecord(std::move(name), chosen, keep.ptr());
}

Attachment attach_record(std::uint64_t graph, Record* record) {
  const GilRelease release;
  const Attached a = attach(pointer<void>(graph), record);
  return {a.result, a.api, address_of(a.object)};
}

// Converts a failure to the tuple (name of the host step, replay, exception or None, message).
nb::object failure_tuple(const Failure& failure) {
  nb::object exception =
      failure.exception == nullptr ? nb::none() : nb::steal<nb::object>(failure.exception);
  return nb::make_tuple(failure.node, failure.replay, exception, failure.message);
}

void bind_records(nb::module_& m) {
  nb::class_<GraphState>(m, "GraphState", "Replay status and first failure of one graph.")
      .def(nb::new_([](std::uint64_t status) {
        return std::make_shared<GraphState>(pointer<std::int32_t>(status));
      }))
      .def_prop_ro("failed", &GraphState::failed)
      .def_prop_ro("overrun", &GraphState::overrun, nb::call_guard<GilRelease>())
      .def(
          "pending",
          [](const GraphState& self) -> nb::object {
            Failure failure;
            return self.pending(&failure) ? failure_tuple(failure) : nb::none();
          },
          nb::sig("def pending(self) -> tuple[str, int, BaseException | None, str] | None"))
      .def("clear", &GraphState::clear);
  m.def(
      "adopt_state",
      [](std::shared_ptr<GraphState> child, std::shared_ptr<GraphState> parent) {
        return child->set_parent(parent);
      },
      nb::call_guard<GilRelease>(),
      "Make the state of a moved graph a child of the state of the graph that it was moved into.");
  nb::class_<PayloadCell>(m, "PayloadCell", "A value that changes between replays.")
      .def(nb::new_([](nb::object value, std::uint64_t address) {
             return std::make_shared<PayloadCell>(value.release().ptr(), address);
           }),
           nb::arg("value").none(), nb::arg("address"))
      .def_prop_ro("size", &PayloadCell::size)
      .def("restart", &PayloadCell::restart);
  m.def(
      "attach_keep",
      [](std::uint64_t graph, nb::object keep) {
        return attach_record(graph, new Record(keep.ptr()));
      },
      "Keep objects alive as long as the graph can run; return (code, api, user object).");
  m.def(
      "attach_host",
      [](std::uint64_t graph, std::shared_ptr<GraphState> state, std::string name, WorkTuple work,
         nb::object keep, std::shared_ptr<PayloadCell> cell) {
        auto* record = make_record<HostRecord>(std::move(name), work, keep);
        record->set_state(std::move(state));
        record->set_cell(std::move(cell));
        const std::uint64_t data = address_of(record);
        const auto [code, api, object] = attach_record(graph, record);
        return std::make_tuple(code, api, object, reinterpret_cast<std::uint64_t>(&run_host_record),
                               data);
      },
      nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(),
      "Create the record of a host node; return (code, api, user object, function, data).");
  m.def(
      "detach",
      [](std::uint64_t graph, std::uint64_t object) {
        return detach(pointer<void>(graph), pointer<void>(object));
      },
      nb::call_guard<GilRelease>());
  m.def("live_records", &live_records);
  m.def("released_records", &released_records);
  m.def("running_host_work", [] {
    std::vector<RunningHostWork> running;
    {
      const GilRelease release;
      running = running_host_work();
    }
    nb::list out;
    for (const RunningHostWork& r : running) {
      out.append(nb::make_tuple(r.node, r.replay, r.seconds, r.thread, r.tid));
    }
    return out;
  });
  // Returns the addresses of the functions that host work in C functions of other libraries may
  // call.
  m.def("native_api", [] {
    nb::dict out;
    out["current_replay"] = reinterpret_cast<std::uint64_t>(&current_replay);
    out["fail_current"] = reinterpret_cast<std::uint64_t>(&fail_current);
    out["current_output"] = reinterpret_cast<std::uint64_t>(&current_output);
    out["release_thread_state"] = reinterpret_cast<std::uint64_t>(&release_thread_state);
    return out;
  });
}

void bind_streams(nb::module_& m) {
  m.def(
      "eager_host",
      [](std::uint64_t stream, std::string name, WorkTuple work, nb::object keep, bool spin) {
        auto* record = make_record<EagerRecord>(std::move(name), work, keep);
        const GilRelease release;
        return record->launch(stream, spin);
      },
      nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
  m.def(
      "capture_info",
      [](std::uint64_t stream) {
        CaptureInfo info;
        const Result result = capture_info(stream, &info);
        return std::make_tuple(result, info.status, info.id, address_of(info.graph));
      },
      nb::call_guard<GilRelease>(),
      "Return (code, status, capture id, CUgraph) of a stream's capture.");
  m.def(
      "captured_host",
      [](std::uint64_t stream, std::uint64_t id, std::uint64_t graph, std::string name,
         WorkTuple work, nb::object keep, bool spin) {
        auto* record = make_record<HostRecord>(std::move(name), work, keep);
        const GilRelease release;
        const CaptureInfo capture{kCapturing, id, pointer<void>(graph)};
        record->set_state(capture_state(capture));
        const Attached a = launch_captured(stream, capture, record, spin);
        return std::make_pair(a.result, a.api);
      },
      nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
      "Add host work to the captured graph; return (code, api).");
  m.def("spin_supported", [] { return driver().launch_host_func_v2 != nullptr; });
  m.def(
      "take_eager_failure",
      [](std::uint64_t stream) -> nb::object {
        Failure failure;
        return take_eager_failure(stream, &failure) ? failure_tuple(failure) : nb::none();
      },
      nb::sig("def take_eager_failure(stream: int) -> tuple[str, int, BaseException | None, str] | "
              "None"));
  m.def(
      "take_captured_failure",
      []() -> nb::object {
        Failure failure;
        return take_captured_failure(&failure) ? failure_tuple(failure) : nb::none();
      },
      nb::sig("def take_captured_failure() -> tuple[str, int, BaseException | None, str] | None"));
  m.def(
      "take_unreported_failures",
      [] {
        nb::list out;
        for (const Failure& failure : take_unreported_failures())
          out.append(failure_tuple(failure));
        for (const Failure& failure : take_eager_failures()) out.append(failure_tuple(failure));
        return out;
      },
      "Take all failures that were not reported: [(node, replay, exception, message)].");
  m.def("abandon_eager", &abandon_eager, nb::call_guard<GilRelease>());
}

void bind_mailboxes(nb::module_& m) {
  nb::class_<Worker>(m, "MailboxThread", "A persistent thread that runs the work of mailboxes.")
      .def(nb::new_(
          [](std::vector<int> cpus, bool spin, double spin_s, double sleep_s, std::string name) {
            return std::make_shared<Worker>(
                WorkerOptions{std::move(cpus), spin, spin_s, sleep_s, std::move(name)});
          }))
      .def_prop_ro("served", &Worker::served)
      .def_prop_ro("parked", &Worker::parked, nb::call_guard<GilRelease>())
      .def_prop_ro("stuck", &Worker::stuck, nb::call_guard<GilRelease>());
  m.def(
      "attach_mailbox",
      [](std::uint64_t graph, std::shared_ptr<GraphState> state, std::shared_ptr<Worker> worker,
         std::string name, WorkTuple work,
         std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t> words,
         std::tuple<std::uint64_t, std::uint64_t, std::uint64_t> output,
         std::pair<double, double> limits, nb::object keep) {
        auto* record = make_record<HostRecord>(std::move(name), work, keep);
        record->set_state(state);
        const auto [request, ack, timed_out, completed] = words;
        const auto [scratch, results, bytes] = output;
        auto port = std::make_shared<Port>(
            record, state, worker,
            MailboxWords{pointer<std::uint32_t>(request), pointer<std::uint32_t>(ack),
                         pointer<std::uint32_t>(timed_out), pointer<std::uint32_t>(completed)},
            MailboxOutput{pointer<void>(scratch), pointer<void>(results), bytes},
            MailboxLimits{limits.first, limits.second});
        auto* const keeper =
            new PortKeeper(port);  // keeps the port alive as long as the graph exists
        {
          const GilRelease release;
          worker->add(port);
          state->add_listener(port);
          watch(port);
        }
        return attach_record(graph, keeper);  // passes the keeper to the reaper on failure
      },
      "Attach a mailbox to a graph and a worker; return (code, api, user object). `words` are the "
      "addresses (request, ack, timed_out or 0, completed or 0). `output` is (scratch, output, "
      "bytes). `limits` "
      "are "
      "the maximum seconds from the request to the answer and from the launch to the request (0: "
      "no "
      "limit).");
  m.def("abandon_mailboxes", &abandon_mailboxes);
}

}  // namespace

void bind_work(nb::module_& m) {
  bind_records(m);
  bind_streams(m);
  bind_mailboxes(m);
}

}  // namespace graft::hostwork
