#include "walk.h"

#include <chrono>

#include "guards.h"
#include "session.h"
#include "tensorflow/core/framework/types.h"

namespace terra {
namespace {

using tensorflow::Tensor;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Whether anyone but the walk can still reach a value that only the graph has.
bool Kept(PyObject* tensor) {
  if (AsPlaceholder(tensor) == nullptr) return false;
  return Py_REFCNT(tensor) > 1 || HandleIsShared(tensor);
}

}  // namespace

Walk::Walk(std::shared_ptr<Program> p, PyObject* on_fallback)
    : iteration(Iteration::Make(p->num_slots, p->outputs)),
      program(std::move(p)),
      on_fallback_(on_fallback),
      values_(program->outputs->size(), nullptr),
      feeds_(program->num_feeds, nullptr) {
  Py_INCREF(on_fallback_);
  iteration->walk = this;
}

Walk::~Walk() {
  if (session != nullptr) LeaveToPlain(this);
  if (iteration->walk == this) {  // left without an end: nothing of it may become visible
    iteration->Cancel();
    iteration->walk = nullptr;
  }
  for (PyObject* value : values_) Py_XDECREF(value);
  for (PyObject* feed : feeds_) Py_XDECREF(feed);
  Py_XDECREF(on_fallback_);
}

void Walk::Launch(GraphRunner* runner) {
  std::vector<TFE_TensorHandle*> captures;
  captures.reserve(program->captures.size());
  for (TFE_TensorHandle* handle : program->captures) captures.push_back(RefHandle(handle));
  runner->Launch(iteration, program->function, program->config, std::move(captures));
  launched_ = true;
}

bool Walk::MatchFeed(int feed, const Arg& arg, PyObject* x) {
  PyObject*& bound = feeds_[feed];
  if (bound != nullptr) return bound == x;
  TFE_TensorHandle* handle = EagerTensor_Handle(x);
  if (Placeholder* other = AsPlaceholder(handle)) {
    // A value of an earlier iteration that may not exist yet follows from slot to slot.
    if (other->real == nullptr) {
      const OutputSpec& spec = (*other->iteration->outputs)[other->output];
      if (other->iteration == iteration || spec.fetch < 0 || !spec.static_shape ||
          spec.dtype != arg.dtype || spec.dims != arg.dims) {
        return false;
      }
      iteration->Follow(feed, other->iteration, spec.fetch);
      Py_INCREF(x);
      bound = x;
      ++feeds_sent;
      return true;
    }
    handle = other->real;
  }
  Tensor tensor;
  if (!TensorFromHandle(handle, &tensor) || tensor.dtype() != arg.dtype ||
      !SameShape(tensor, arg.dims)) {
    return false;
  }
  // A tensor that was made of an array may share the array's memory, which the program may change
  // before the graph has read it.
  if (arg.kind == ArgKind::kPythonFeed) tensor = DeepCopy(tensor);
  Py_INCREF(x);
  bound = x;
  ++feeds_sent;
  iteration->Set(feed, std::move(tensor));
  return true;
}

bool Walk::MatchArg(const Arg& arg, PyObject* x) {
  switch (arg.kind) {
    case ArgKind::kOutput: {
      if (values_[arg.index] == x) return arg.feed < 0 || MatchFeed(arg.feed, arg, x);
      if (arg.feed >= 0) return false;
      Placeholder* placeholder = AsPlaceholder(x);  // another tensor that shares the handle
      return placeholder != nullptr && placeholder->iteration == iteration &&
             placeholder->output == arg.index;
    }
    case ArgKind::kFeed:
      return EagerTensor_CheckExact(x) && MatchFeed(arg.index, arg, x);
    case ArgKind::kConstant: {
      return EagerTensor_CheckExact(x) && SameContent(arg, x);
    }
    case ArgKind::kObject:
      return x == arg.object;
    case ArgKind::kPython:
      return SamePython(arg.object, x);
    case ArgKind::kArray: {
      if (!SameKind(arg.object, x)) return false;
      PyObject* tensor = Convert(arg, x);
      if (tensor == nullptr) return false;
      const bool same = SameContent(arg, tensor);
      Py_DECREF(tensor);
      return same;
    }
    case ArgKind::kPythonFeed: {
      if (!SameKind(arg.object, x)) return false;
      PyObject* tensor = Convert(arg, x);
      if (tensor == nullptr) return false;
      const bool same = feeds_[arg.index] == nullptr && MatchFeed(arg.index, arg, tensor);
      Py_DECREF(tensor);
      return same;
    }
    case ArgKind::kList: {
      if (!PyList_Check(x) && !PyTuple_Check(x)) return false;
      if (PySequence_Fast_GET_SIZE(x) != static_cast<Py_ssize_t>(arg.items.size())) return false;
      PyObject** items = PySequence_Fast_ITEMS(x);
      for (size_t i = 0; i < arg.items.size(); ++i) {
        if (!MatchArg(arg.items[i], items[i])) return false;
      }
      return true;
    }
  }
  return false;
}

PyObject* Walk::Match(CallKind call, PyObject* const* args, Py_ssize_t count, PyObject* original,
                      bool* matched) {
  *matched = false;
  if (cursor_ >= static_cast<int>(program->nodes.size())) return nullptr;
  const Node& node = program->nodes[cursor_];
  // FastPathExecute(ctx, op, name, args...); Execute(ctx, device, op, inputs, attrs, outputs).
  const bool fast = call == CallKind::kFastPath;
  if (node.call != call) return nullptr;
  // A function's name may change with every call; that it is no op is all that counts.
  const bool function = PyUnicode_GET_LENGTH(node.op) == 0;
  if (function ? !IsFunction(args[2]) : !SameOp(node.op, args[fast ? 1 : 2])) return nullptr;
  if (node.misses) {
    *matched = true;
    ++cursor_;
    return RaiseFastPathMiss();
  }
  if (node.in_place) {
    *matched = true;
    return RunInPlace(node, args, count, original);
  }
  PyObject* const* rest = args + 3;
  const Py_ssize_t expected = node.args.size();
  if (fast ? count - 3 != expected : count - 3 < expected) return nullptr;
  for (Py_ssize_t i = 0; i < expected; ++i) {
    if (!MatchArg(node.args[i], rest[i])) return nullptr;
  }
  *matched = true;
  return Answer(node, rest, fast);
}

PyObject* Walk::Answer(const Node& node, PyObject* const* args, bool record_gradient) {
  PyObject* results = PyList_New(node.num_outputs);
  for (int i = 0; i < node.num_outputs; ++i) {
    TFE_TensorHandle* known = (*program->outputs)[node.first_output + i].known;
    PyObject* tensor = known != nullptr ? EagerTensorFromHandle(RefHandle(known), false)
                                        : NewPlaceholder(iteration, node.first_output + i);
    if (tensor == nullptr) {
      Py_DECREF(results);
      return nullptr;
    }
    Py_INCREF(tensor);
    values_[node.first_output + i] = tensor;
    PyList_SET_ITEM(results, i, tensor);
  }
  ++cursor_;
  if (record_gradient && !RecordGradient(node, args, results)) {
    Py_DECREF(results);
    return nullptr;
  }
  if (!node.groups.empty()) return Nested(node, results);
  if (node.result == ResultKind::kList) return results;
  PyObject* result = Py_None;
  if (node.result == ResultKind::kSingle) result = PyList_GET_ITEM(results, 0);
  Py_INCREF(result);
  Py_DECREF(results);
  return result;
}

// Steals the flat list of results.
PyObject* Walk::Nested(const Node& node, PyObject* results) {
  PyObject* nested = PyList_New(node.groups.size());
  Py_ssize_t next = 0;
  for (size_t i = 0; i < node.groups.size(); ++i) {
    const int size = node.groups[i];
    PyObject* item;
    if (size < 0) {
      item = PyList_GET_ITEM(results, next++);
      Py_INCREF(item);
    } else {
      item = PyList_GetSlice(results, next, next + size);
      next += size;
    }
    PyList_SET_ITEM(nested, i, item);
  }
  Py_DECREF(results);
  return nested;
}

// What TFE_Py_FastPathExecute does for the active tapes after it has run an op. (After the slow
// path, Python does it.)
bool Walk::RecordGradient(const Node& node, PyObject* const* args, PyObject* results) {
  if (node.gradient_attrs == nullptr) return true;
  const Py_ssize_t size = PyTuple_GET_SIZE(node.gradient_inputs);
  PyObject* inputs = PyTuple_New(size);
  Py_ssize_t next = 0;
  for (const Arg& arg : node.args) {
    if (next == size) break;  // the rest are attributes
    const bool list = arg.kind == ArgKind::kList;
    const Py_ssize_t items = list ? arg.items.size() : 1;
    for (Py_ssize_t i = 0; i < items && next < size; ++i) {
      const Arg& item = list ? arg.items[i] : arg;
      PyObject* passed = list ? PySequence_Fast_GET_ITEM(*args, i) : *args;
      PyObject* input = EagerTensor_CheckExact(passed) ? passed
                        : item.kind == ArgKind::kPythonFeed
                            ? feeds_[item.index]
                            : PyTuple_GET_ITEM(node.gradient_inputs, next);
      Py_INCREF(input);
      PyTuple_SET_ITEM(inputs, next++, input);
    }
    ++args;
  }
  PyObject* done = TFE_Py_RecordGradient(node.op, inputs, node.gradient_attrs, results, Py_None);
  Py_DECREF(inputs);
  Py_XDECREF(done);
  return done != nullptr;
}

std::vector<int> Walk::Alive() {
  while (DropDead(cursor_)) {
  }
  std::vector<int> found;
  for (size_t i = 0; i < values_.size(); ++i) {
    if (values_[i] != nullptr) found.push_back(i);
  }
  return found;
}

// Lets go of outputs that nobody else holds; returns whether there were any.
bool Walk::DropDead(int end_node) {
  bool dropped = false;
  for (int k = end_node - 1; k >= 0; --k) {  // later outputs hold earlier ones as attributes
    const Node& node = program->nodes[k];
    if (node.in_place) continue;  // a replay cannot make these again
    for (int i = node.first_output + node.num_outputs - 1; i >= node.first_output; --i) {
      PyObject* tensor = values_[i];
      if (tensor == nullptr || Py_REFCNT(tensor) > 1 || HandleIsShared(tensor)) continue;
      Py_CLEAR(values_[i]);
      dropped = true;
    }
  }
  return dropped;
}

bool Walk::AllKeptAreFetched(int end_node, int* output) {
  while (DropDead(end_node)) {
  }
  for (int k = 0; k < end_node; ++k) {
    const Node& node = program->nodes[k];
    if (node.in_place) continue;
    for (int i = node.first_output; i < node.first_output + node.num_outputs; ++i) {
      PyObject* tensor = values_[i];
      if (tensor == nullptr || (*program->outputs)[i].fetch >= 0) continue;
      if (!Kept(tensor)) continue;
      *output = i;
      return false;
    }
  }
  return true;
}

bool Walk::PassBoundaries(int count, int wanted) {
  while (passed_ < count) {
    const Boundary& boundary = program->boundaries[passed_];
    int output = -1;
    if (cursor_ < boundary.end) return Fallback("early-read", wanted) && false;
    if (!AllKeptAreFetched(boundary.end, &output)) {
      return Fallback("kept-tensor", output) && false;
    }
    iteration->Set(boundary.gate_slot, Tensor());
    base_ = boundary.end;
    ++passed_;
  }
  return true;
}

SlotState Walk::WaitSlot(int slot, Tensor* value, bool* interrupted) {
  SlotState state = iteration->Peek(slot, value);
  if (state != SlotState::kPending) return state;
  const double start = Now();
  do {
    Py_BEGIN_ALLOW_THREADS;
    state = iteration->Wait(slot, 50, value);
    Py_END_ALLOW_THREADS;
    if (PyErr_CheckSignals() != 0) *interrupted = true;
  } while (state == SlotState::kPending && !*interrupted);
  python_wait_seconds += Now() - start;
  return state;
}

bool Walk::Read(int output, Tensor* value) {
  const OutputSpec& spec = (*program->outputs)[output];
  if (spec.fetch < 0) return Fallback("unexpected-read", output);
  if (spec.gate > passed_ && !PassBoundaries(spec.gate, output)) return !PyErr_Occurred();
  ++fetches_read;
  bool interrupted = false;
  const SlotState state = WaitSlot(spec.fetch, value, &interrupted);
  if (interrupted) return false;
  if (state == SlotState::kReady || iteration->walk != this) return true;
  return Fallback("op-error", output);
}

bool Walk::End() {
  const int size = program->nodes.size();
  if (cursor_ != size) {
    Fallback("ended-early", -1);
    return false;
  }
  int output = -1;
  if (!AllKeptAreFetched(size, &output)) {
    Fallback("kept-tensor", output);
    return false;
  }
  // First closed, then opened: whoever waits for closed iterations must not overlook this one.
  iteration->MarkClosed();
  PassBoundaries(program->boundaries.size(), -1);
  Close();
  return true;
}

bool Walk::Fallback(const char* code, int output) {
  if (on_fallback_ == nullptr) return true;  // the walk is over
  if (session != &CurrentSession()) code = "other-thread";
  Suspended suspended;
  PyObject* done = PyObject_CallFunction(on_fallback_, "si", code, output);
  Py_XDECREF(done);
  if (done == nullptr) {  // an interrupt may have come before the callback got that far
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    Close();
    PyErr_Restore(type, error, trace);
  }
  return done != nullptr;
}

bool Walk::CompleteBoundaries() {
  bool interrupted = false;
  Tensor unused;
  for (int i = 0; i < passed_; ++i) {
    const SlotState state = WaitSlot(program->boundaries[i].done_slot, &unused, &interrupted);
    if (interrupted) return false;
    if (state == SlotState::kReady) continue;
    base_ = i == 0 ? 0 : program->boundaries[i - 1].end;
    passed_ = i;
  }
  return true;
}

bool Walk::StopGraph(const std::vector<int>& needed) {
  std::vector<int> outputs = needed;
  for (int k = 0; k < base_; ++k) {
    const Node& node = program->nodes[k];
    for (int i = node.first_output; i < node.first_output + node.num_outputs; ++i) {
      if (values_[i] != nullptr && Kept(values_[i])) outputs.push_back(i);
    }
  }
  for (int output : outputs) {
    if (FetchInto(output)) continue;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a kept tensor was not computed");
    return false;
  }
  iteration->Cancel();
  while (launched_) {
    bool finished;
    Py_BEGIN_ALLOW_THREADS;
    finished = iteration->WaitFinished(50);
    Py_END_ALLOW_THREADS;
    if (finished) break;
  }
  return true;
}

PyObject* Walk::MadeBefore(int output) {
  PyObject* value = values_[output];
  if (value != nullptr && AsPlaceholder(value) == nullptr) {
    Py_INCREF(value);
    return value;
  }
  Tensor tensor;
  if (iteration->Peek((*program->outputs)[output].fetch, &tensor) != SlotState::kReady) {
    PyErr_SetString(PyExc_RuntimeError, "a tensor from before the last boundary is not there");
    return nullptr;
  }
  return EagerTensorFromHandle(HandleFromTensor(tensor), false);
}

bool Walk::FetchInto(int output) {
  const OutputSpec& spec = (*program->outputs)[output];
  PyObject* tensor = values_[output];
  if (tensor != nullptr && AsPlaceholder(tensor) == nullptr) return true;
  if (spec.known != nullptr) {
    values_[output] = EagerTensorFromHandle(RefHandle(spec.known), false);
    return true;
  }
  if (spec.fetch < 0 || spec.gate > passed_) return false;
  Tensor value;
  bool interrupted = false;
  if (WaitSlot(spec.fetch, &value, &interrupted) != SlotState::kReady) return false;
  if (tensor == nullptr) return true;
  TFE_TensorHandle* real = HandleFromTensor(value);
  Settle(values_[output], real);
  TFE_DeleteTensorHandle(real);
  return true;
}

void Walk::Close() {
  iteration->walk = nullptr;
  if (!iteration->closed) iteration->Cancel();  // nobody will open its gates any more
  Py_CLEAR(on_fallback_);
  while (DropDead(cursor_)) {
  }
}

bool Walk::WaitChecked() {
  if (program->checked_slot < 0) return true;
  Tensor unused;
  bool interrupted = false;
  WaitSlot(program->checked_slot, &unused, &interrupted);
  return !interrupted;
}

void Walk::set_value(int output, PyObject* tensor) {
  if (values_[output] != nullptr) Settle(values_[output], EagerTensor_Handle(tensor));
}

void Walk::Release() {
  for (PyObject*& value : values_) Py_CLEAR(value);
  for (PyObject*& feed : feeds_) Py_CLEAR(feed);
}

}  // namespace terra
