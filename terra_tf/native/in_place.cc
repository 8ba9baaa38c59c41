// The Walk's ops in place: what the graph cannot do runs eagerly where the program calls it.
#include <vector>

#include "session.h"
#include "walk.h"

namespace terra {
namespace {

void Flatten(PyObject* result, std::vector<PyObject*>* flat) {
  if (!PyList_Check(result) && !PyTuple_Check(result)) return flat->push_back(result);
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(result); ++i) {
    Flatten(PySequence_Fast_GET_ITEM(result, i), flat);
  }
}

}  // namespace

PyObject* Walk::RunInPlace(const Node& node, PyObject* const* args, Py_ssize_t count,
                           PyObject* original) {
  if (!MaterialiseAll(args + 3, count - 3)) return nullptr;
  // Materialising may have ended in a fallback; then the call goes the recorder's way.
  if (iteration->walk != this) return CallRecorded(args, count, original, node.call);
  if (node.boundary >= 0) {
    if (!PassBoundaries(node.boundary + 1, -1)) {
      if (PyErr_Occurred()) return nullptr;
      return CallRecorded(args, count, original, node.call);
    }
    bool interrupted = false;
    tensorflow::Tensor unused;
    const SlotState state =
        WaitSlot(program->boundaries[node.boundary].done_slot, &unused, &interrupted);
    if (interrupted) return nullptr;
    if (iteration->walk != this) return CallRecorded(args, count, original, node.call);
    if (state == SlotState::kFailed) {
      if (!Fallback("op-error", -1)) return nullptr;
      return CallRecorded(args, count, original, node.call);
    }
  }
  PyObject* result;
  {
    Suspended suspended;  // what the op itself runs is not part of the trace
    result = PyObject_Vectorcall(original, args, count, nullptr);
  }
  if (result == nullptr) {
    if (node.fails) Passed(node);
    return nullptr;
  }
  // With another number of outputs it is another op to the trace, but it has run and stays run.
  const bool as_recorded = !node.fails && KeepOutputs(node, result);
  if (as_recorded) Passed(node);
  if (!as_recorded && !Fallback("new-op", -1)) Py_CLEAR(result);
  return result;
}

// An op in place has run as recorded.
void Walk::Passed(const Node& node) {
  ++cursor_;
  if (node.boundary < 0) return;
  base_ = cursor_;
  iteration->Set(program->boundaries[node.boundary].resume_slot, tensorflow::Tensor());
}

bool Walk::KeepOutputs(const Node& node, PyObject* result) {
  std::vector<PyObject*> flat;
  if (result != Py_None) Flatten(result, &flat);
  if (static_cast<int>(flat.size()) != node.num_outputs) return false;
  for (int i = 0; i < node.num_outputs; ++i) {
    Py_INCREF(flat[i]);
    values_[node.first_output + i] = flat[i];
  }
  return true;
}

}  // namespace terra
