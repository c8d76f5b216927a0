// Python face of mailboxes and their workers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "hostwork/gate.h"
#include "hostwork/mailbox.h"
#include "hostwork/mailbox_worker.h"

namespace nb = nanobind;
using namespace graft::hostwork;

namespace {

template <typename T>
T* pointer(std::uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// What Python collects for one mailbox; addresses are host addresses.
struct Spec {
  std::string name;
  nb::object fn;  // None: `function` and `data` are a native function's
  nb::tuple args;
  std::uint64_t function, data;
  std::uint64_t request, ack, gave_up;
  std::uint64_t scratch, output, bytes;
  double answer_s, replay_s;
  nb::object keep;
};

HostRecord* make_record(const Spec& spec) {
  if (!spec.fn.is_none()) {
    return new HostRecord(spec.name, spec.fn.ptr(), spec.args.ptr(), spec.keep.ptr());
  }
  return new HostRecord(spec.name, reinterpret_cast<HostFunction>(spec.function),
                        pointer<void>(spec.data), spec.keep.ptr());
}

// (code, api, user object): the port lives as long as the graph can run.
nb::tuple attach_mailbox(std::uint64_t graph, const std::shared_ptr<GraphState>& state,
                         const std::shared_ptr<Worker>& worker, const Spec& spec) {
  HostRecord* const record = make_record(spec);
  record->set_state(state);
  const MailboxWords words{pointer<std::uint32_t>(spec.request), pointer<std::uint32_t>(spec.ack),
                           pointer<std::uint32_t>(spec.gave_up)};
  const MailboxOutput output{pointer<void>(spec.scratch), pointer<void>(spec.output),
                             static_cast<std::size_t>(spec.bytes)};
  auto port = std::make_shared<Port>(record, state, worker, words, output,
                                     MailboxLimits{spec.answer_s, spec.replay_s});
  auto* const hold = new PortHold(port);
  Attached attached{};
  {
    const GilRelease release;
    worker->add(port);
    state->add_listener(port);
    watch(port);
    attached = attach(pointer<void>(graph), hold);  // reaped on failure
  }
  return nb::make_tuple(attached.result, attached.api,
                        reinterpret_cast<std::uint64_t>(attached.object));
}

}  // namespace

void bind_mailboxes(nb::module_& m);

void bind_mailboxes(nb::module_& m) {
  nb::class_<Worker>(m, "MailboxThread", "A persistent thread that answers mailboxes.")
      .def(nb::new_([](std::vector<int> cpus, bool spin, double spin_s, double sleep_s,
                       std::string name) {
             return std::make_shared<Worker>(
                 WorkerOptions{std::move(cpus), spin, spin_s, sleep_s, std::move(name)});
           }),
           nb::arg("cpus"), nb::arg("spin"), nb::arg("spin_s"), nb::arg("sleep_s"), nb::arg("name"))
      .def_prop_ro("served", &Worker::served)
      .def_prop_ro("affinity_error", &Worker::affinity_error)
      .def_prop_ro("parked",
                   [](const Worker& self) {
                     const GilRelease release;
                     return self.parked();
                   })
      .def_prop_ro("stuck", [](const Worker& self) {
        const GilRelease release;
        return self.stuck();
      });
  m.def(
      "attach_mailbox",
      [](std::uint64_t graph, std::shared_ptr<GraphState> state, std::shared_ptr<Worker> worker,
         std::string name, nb::object fn, nb::tuple args, std::pair<std::uint64_t, std::uint64_t> c,
         nb::tuple words, nb::tuple output, std::pair<double, double> limits, nb::object keep) {
        const auto word = [](nb::tuple& t, int i) { return nb::cast<std::uint64_t>(t[i]); };
        return attach_mailbox(
            graph, state, worker,
            Spec{std::move(name), std::move(fn), std::move(args), c.first, c.second, word(words, 0),
                 word(words, 1), word(words, 2), word(output, 0), word(output, 1), word(output, 2),
                 limits.first, limits.second, std::move(keep)});
      },
      nb::arg("graph"), nb::arg("state"), nb::arg("worker"), nb::arg("name"), nb::arg("fn").none(),
      nb::arg("args"), nb::arg("native"), nb::arg("words"), nb::arg("output"), nb::arg("limits"),
      nb::arg("keep").none(),
      "Let a worker answer a mailbox: (code, api, user object). `native` is (function, data), "
      "`words` (request, ack, gave_up or 0), `output` (scratch, output, bytes).");
  m.def("abandon_mailboxes", &abandon_mailboxes);
}
