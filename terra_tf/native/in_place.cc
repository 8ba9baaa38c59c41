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

PyObject* Walk::RunInPlace(int found, PyObject* const* args, Py_ssize_t count,
                           PyObject* original) {
  const CallKind call = program->nodes[found].call;
  if (!MaterialiseAll(args + 3, count - 3)) return nullptr;
  // Materialising may have ended in a fallback; then the call goes the recorder's way.
  if (iteration->walk != this) return CallRecorded(args, count, original, call);
  SkipTo(found);
  const int boundary = program->nodes[found].boundary;
  if (boundary >= 0) {
    if (!PassBoundaries(boundary + 1, -1)) {
      if (PyErr_Occurred()) return nullptr;
      return CallRecorded(args, count, original, call);
    }
    bool interrupted = false;
    tensorflow::Tensor unused;
    const SlotState state =
        WaitSlot(program->boundaries[boundary].done_slot, &unused, &interrupted);
    if (interrupted) return nullptr;
    if (iteration->walk != this) return CallRecorded(args, count, original, call);
    if (state == SlotState::kFailed) {
      if (!Fallback("op-error", -1)) return nullptr;
      return CallRecorded(args, count, original, call);
    }
  }
  PyObject* result;
  {
    Suspended suspended;  // what the op itself runs is not part of the trace
    result = PyObject_Vectorcall(original, args, count, nullptr);
  }
  PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
  if (result == nullptr) PyErr_Fetch(&type, &error, &trace);
  // Whether it raised, and how many outputs it has, decides which node it is.
  const int outcome = iteration->walk == this ? FindOutcome(call, args, count, result) : -1;
  if (outcome >= 0) {
    SkipTo(outcome);
    Take();
    const Node& node = program->nodes[outcome];
    if (result != nullptr) KeepOutputs(node, result);
    Passed(node);
  } else if (iteration->walk == this) {
    // It is another op to the trace, but it has run and stays run.
    const bool fell_back = Fallback("new-op", -1);
    if (fell_back) result = NoteOutcome(args, count, result, call, terra::Ran::kInPlace);
    if (!fell_back || PyErr_Occurred()) {
      Py_CLEAR(result);
      Py_XDECREF(type);
      Py_XDECREF(error);
      Py_XDECREF(trace);
      return nullptr;
    }
  }
  if (result == nullptr) PyErr_Restore(type, error, trace);
  return result;
}

int Walk::FindOutcome(CallKind call, PyObject* const* args, Py_ssize_t count, PyObject* result) {
  std::vector<PyObject*> outputs;
  if (result != nullptr && result != Py_None) Flatten(result, &outputs);
  const int size = program->nodes.size();
  for (int k = cursor_; k < size;) {
    const Node& node = program->nodes[k];
    if (node.in_place && node.fails == (result == nullptr) &&
        node.num_outputs == static_cast<int>(outputs.size()) && Fits(node, call, args, count)) {
      return k;
    }
    const int block = program->block_at[k];
    if (block < 0 || program->blocks[block].taken_slot < 0) break;
    k = program->blocks[block].end;
  }
  return -1;
}

// An op in place has run as recorded.
void Walk::Passed(const Node& node) {
  Ran();
  if (node.boundary < 0) return;
  base_ = cursor_;
  iteration->Set(program->boundaries[node.boundary].resume_slot, tensorflow::Tensor());
}

void Walk::KeepOutputs(const Node& node, PyObject* result) {
  std::vector<PyObject*> flat;
  if (result != Py_None) Flatten(result, &flat);
  for (int i = 0; i < node.num_outputs; ++i) {
    Py_INCREF(flat[i]);
    values_[node.first_output + i] = flat[i];
  }
}

}  // namespace terra
