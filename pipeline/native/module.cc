// Python's view of the transport. Thin: each binding hands over to the part that does the work.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "endpoint.h"
#include "link.h"
#include "tensorflow/core/framework/types.h"
#include "transfer.h"

namespace py = pybind11;

namespace pipeline {
namespace {

// How long a wait goes without a look at signals, so that Ctrl-C ends it.
constexpr double kSignalSeconds = 0.1;

std::shared_ptr<Link> LinkTo(Endpoint& endpoint, int peer) {
  auto link = endpoint.Find(peer);
  if (link == nullptr) throw std::runtime_error("not connected to rank " + std::to_string(peer));
  return link;
}

// Ends when the transfer does, or after `seconds`; returns whether the transfer has ended.
bool Wait(Transfer& transfer, double seconds) {
  const int64_t end = Now() + static_cast<int64_t>(seconds * 1e9);
  for (;;) {
    const double left = 1e-9 * (end - Now());
    bool done;
    {
      py::gil_scoped_release release;
      done = transfer.Wait(std::clamp(left, 0.0, kSignalSeconds));
    }
    if (done || left <= kSignalSeconds) return done;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

using TransferPointer = std::shared_ptr<Transfer>;

// The send gets its tensors from the op PipelineSend, which posts it.
TransferPointer MakeSend(Endpoint& endpoint, int peer, int64_t tag, bool buffered,
                         TransferPointer after) {
  auto transfer = std::make_shared<Transfer>(tag, buffered);
  transfer->link = LinkTo(endpoint, peer);
  transfer->after = std::move(after);
  return transfer;
}

TransferPointer Receive(Endpoint& endpoint, int peer, int64_t tag, TransferPointer after) {
  auto transfer = std::make_shared<Transfer>(tag, false);
  auto link = LinkTo(endpoint, peer);
  py::gil_scoped_release release;
  if (after == nullptr) {
    link->Receive(transfer);
  } else {
    after->WhenDone([link, transfer] { link->Receive(transfer); });
  }
  return transfer;
}

// What a receive gets goes on to another rank without becoming tensors of Python's.
TransferPointer Forward(Endpoint& endpoint, int peer, int64_t tag, TransferPointer received) {
  auto transfer = std::make_shared<Transfer>(tag, false);
  auto link = LinkTo(endpoint, peer);
  py::gil_scoped_release release;
  received->WhenDone([link, transfer, received] {
    transfer->tensors = std::move(received->tensors);
    received->tensors.clear();
    link->Send(transfer);
  });
  return transfer;
}

py::object Problem(Transfer& transfer) {
  const absl::Status status = transfer.status();
  if (status.ok()) return py::none();
  return py::str(std::string(status.message()));
}

// The connection ended, and nobody has said why.
bool WasCut(Transfer& transfer) { return absl::IsUnavailable(transfer.status()); }

std::vector<int> Dtypes(const Transfer& transfer) {
  std::vector<int> dtypes;
  for (const auto& tensor : transfer.tensors) dtypes.push_back(tensor.dtype());
  return dtypes;
}

void BindTransfer(py::module_& m) {
  py::class_<Transfer, std::shared_ptr<Transfer>>(m, "Transfer")
      .def_property_readonly("id", &Transfer::Register)
      .def_readonly("bytes", &Transfer::bytes)
      .def_readonly("posted", &Transfer::posted)
      .def_readonly("peer_posted", &Transfer::peer_posted)
      .def_readonly("started", &Transfer::started)
      .def_readonly("finished", &Transfer::finished)
      .def_property_readonly("done", [](Transfer& t) { return t.Wait(0); })
      .def_property_readonly("problem", &Problem)
      .def_property_readonly("was_cut", &WasCut)
      .def_property_readonly("dtypes", &Dtypes)
      .def("wait", &Wait);
}

// Has this process end, once all else is done, without the destructors of static objects, some of
// which wait for other processes. What was registered last runs first. Success is out of question.
void EndWithoutDestructors() {
  on_exit(
      [](int status, void*) {
        std::fflush(nullptr);
        _exit(status == 0 ? EXIT_FAILURE : status);
      },
      nullptr);
}

void BindEndpoint(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Endpoint>(m, "Endpoint")
      .def(py::init([](int rank, py::bytes secret, const std::string& interface, uint64_t window) {
        return std::make_unique<Endpoint>(rank, secret, interface, window);
      }))
      .def_property_readonly("unix_name", &Endpoint::unix_name)
      .def_property_readonly("interface", &Endpoint::interface)
      .def_property_readonly("port", &Endpoint::port)
      .def("connect_local", &Endpoint::ConnectLocal, Release())
      .def("connect_tcp", &Endpoint::ConnectTcp, Release())
      .def("expect", &Endpoint::Expect, Release())
      .def("kind_of", &Endpoint::KindOf)
      .def("send", &MakeSend)
      .def("receive", &Receive)
      .def("forward", &Forward)
      .def("abort", &Endpoint::Abort, Release())
      .def("fail", &Endpoint::Fail, Release())
      .def("close", &Endpoint::Close, Release())
      .def("counters", [](Endpoint& endpoint) {
        const LinkCounters c = endpoint.counters();
        py::dict counters;
        counters["messages_sent"] = c.messages_sent;
        counters["messages_received"] = c.messages_received;
        counters["bytes_sent"] = c.bytes_sent;
        counters["bytes_received"] = c.bytes_received;
        counters["cpu_seconds"] = c.cpu_seconds;
        return counters;
      });
}

}  // namespace

PYBIND11_MODULE(_transport, m) {
  m.doc() = "Point-to-point transport between the ranks of a pipeline; see pipeline.communication.";
  m.attr("built_for_tensorflow") = TERRA_BUILT_FOR_TF;
  BindTransfer(m);
  BindEndpoint(m);
  m.def("now", &Now);
  m.def("end_without_destructors", &EndWithoutDestructors);
}

}  // namespace pipeline
