// Python's view of delegated calls: see terra_tf/delegation.
#pragma once
#include <pybind11/pybind11.h>

namespace terra {

void BindDelegation(pybind11::module_& m);

}  // namespace terra
