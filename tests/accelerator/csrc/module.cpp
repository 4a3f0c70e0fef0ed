// What Python has of the process group.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>

#include "process_group.h"

PYBIND11_MODULE(stand_in, module) {
  module.def(
      "make_process_group",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
         std::chrono::milliseconds timeout) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<stand_in::ProcessGroup>(store, rank, size, timeout);
      },
      pybind11::arg("store"), pybind11::arg("rank"), pybind11::arg("size"),
      pybind11::arg("timeout"), pybind11::call_guard<pybind11::gil_scoped_release>());
}
