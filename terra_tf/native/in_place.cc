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
    given_ = GivenDigest(args + 3, count - 3);
    Passed(node);
    given_ = 0;
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

uint64_t Walk::GivenDigest(PyObject* const* args, Py_ssize_t count) const {
  static uint64_t unique = 0;
  if (tape_events_.empty()) return 0;  // nobody will ask
  uint64_t digest = count;
  auto mix = [&](uint64_t x) { digest = (digest ^ (x + 0x9e3779b97f4a7c15)) * 0xff51afd7ed558ccd; };
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* arg = args[i];
    if (PyList_Check(arg) || PyTuple_Check(arg)) {
      mix(GivenDigest(PySequence_Fast_ITEMS(arg), PySequence_Fast_GET_SIZE(arg)));
    } else if (EagerTensor_CheckExact(arg)) {
      const bool resource = TFE_TensorHandleDataType(EagerTensor_Handle(arg)) == TF_RESOURCE;
      mix(resource ? reinterpret_cast<uint64_t>(arg) : WhichTensor(arg));
    } else if (arg == Py_None || PyLong_CheckExact(arg) || PyFloat_CheckExact(arg) ||
               PyUnicode_CheckExact(arg) || PyBytes_CheckExact(arg) || PyBool_Check(arg)) {
      mix(PyObject_Hash(arg));
    } else {
      mix(++unique);  // nothing is known of it
    }
  }
  return digest;
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
