// Python bindings of messages between ranks.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "hostwork/bind.h"
#include "hostwork/gate.h"
#include "hostwork/ranks.h"

namespace nb = nanobind;

namespace graft::hostwork {

void bind_ranks(nb::module_& m) {
  nb::class_<Mpi>(m, "Mpi", "MPI functions and a communicator.")
      .def(nb::new_([](std::uint64_t isend, std::uint64_t irecv, std::uint64_t test, bool wide,
                       std::uint64_t comm, std::uint64_t byte) {
        return std::make_shared<Mpi>(isend, irecv, test, wide, comm, byte);
      }))
      .def_prop_ro("failure", [](const Mpi& self) -> nb::object {
        if (!self.failed) return nb::none();
        return nb::cast(std::string(self.reason));
      });
  using MessageTuple = std::tuple<int, bool, std::uint64_t, int>;
  nb::class_<Messages>(m, "Messages",
                       "Messages (peer, sent, address, bytes) that are posted together.")
      .def(nb::new_(
          [](std::shared_ptr<Mpi> mpi, const std::vector<MessageTuple>& tuples, double deadline) {
            std::vector<Message> messages;
            for (const auto& [peer, sent, address, bytes] : tuples) {
              messages.push_back({peer, sent, pointer<void>(address), bytes});
            }
            return new Messages(mpi, std::move(messages), deadline);
          }))
      .def(
          "wait",
          [](Messages& self, double seconds) -> nb::object {
            Messages::Outcome outcome;
            {
              const GilRelease release;
              outcome = self.wait(seconds);
            }
            return outcome == Messages::Outcome::kFailed
                       ? nb::none()
                       : nb::cast(outcome == Messages::Outcome::kDone);
          },
          "Return whether all messages have completed within the seconds; None if they failed.")
      .def("abandon", &Messages::abandon)
      .def_prop_ro(
          "work",
          [](Messages& self) {
            return std::make_tuple(reinterpret_cast<std::uint64_t>(&Messages::step),
                                   address_of(&self));
          },
          "Function and data of a host step that sends and receives the messages.");
}

}  // namespace graft::hostwork
