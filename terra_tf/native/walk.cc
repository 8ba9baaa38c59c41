#include "walk.h"

#include <algorithm>
#include <chrono>

#include "gil.h"
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
      feeds_(program->num_feeds, nullptr),
      ran_(program->nodes.size(), false) {
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
  for (PyObject* tape : tapes_) Py_XDECREF(tape);
  for (PyObject* tensor : watched_) Py_DECREF(tensor);
  DropBindings();
  Py_XDECREF(on_fallback_);
}

void Walk::Launch(GraphRunner* runner) {
  std::vector<TFE_TensorHandle*> captures;
  captures.reserve(program->captures.size());
  for (TFE_TensorHandle* handle : program->captures) captures.push_back(RefHandle(handle));
  runner->Launch(iteration, program->function, program->config, std::move(captures));
  launched_ = true;
}

void Walk::DropBindings() {
  for (Binding& binding : bindings_) Py_DECREF(binding.object);
  bindings_.clear();
}

void Walk::Bind() {
  for (Binding& binding : bindings_) {
    feeds_[binding.feed] = binding.object;  // takes the reference
    ++feeds_sent;
    if (binding.source != nullptr) {
      iteration->Follow(binding.feed, binding.source, binding.source_slot);
    } else {
      iteration->Set(binding.feed, std::move(binding.value));
    }
  }
  bindings_.clear();
}

bool Walk::FitsFeed(int feed, const Arg& arg, PyObject* x) {
  if (feeds_[feed] != nullptr) return feeds_[feed] == x;
  for (const Binding& binding : bindings_) {
    if (binding.feed == feed) return binding.object == x;
  }
  TFE_TensorHandle* handle = EagerTensor_Handle(x);
  if (Placeholder* placeholder = AsPlaceholder(handle)) {
    if (placeholder->real == nullptr) return FitsPlaceholder(feed, arg, x, placeholder);
    handle = placeholder->real;
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
  bindings_.push_back({feed, x, nullptr, -1, std::move(tensor)});
  return true;
}

// A value that may not exist yet follows from slot to slot.
bool Walk::FitsPlaceholder(int feed, const Arg& arg, PyObject* x, Placeholder* placeholder) {
  const bool own = placeholder->iteration == iteration;
  const OutputSpec& spec = (*placeholder->iteration->outputs)[placeholder->output];
  if (spec.fetch < 0 || spec.dtype != arg.dtype) return false;
  if (own && (arg.kind != ArgKind::kSelect || spec.gate > arg.feed)) return false;
  if (own && as_before_ &&
      !std::binary_search(arg.known.begin(), arg.known.end(), placeholder->output)) {
    return false;
  }
  const std::vector<int64_t>* dims = KnownDims(placeholder);
  if (dims == nullptr) {
    if (!own) return false;
    dims = &spec.dims;
  }
  if (!SameShape(*dims, arg.dims)) return false;
  Py_INCREF(x);
  bindings_.push_back({feed, x, placeholder->iteration, spec.fetch, Tensor()});
  return true;
}

bool Walk::FitsArg(const Arg& arg, PyObject* x) {
  switch (arg.kind) {
    case ArgKind::kOutput: {
      if (values_[arg.index] == nullptr) return false;  // its block was skipped
      if (values_[arg.index] == x) return arg.feed < 0 || FitsFeed(arg.feed, arg, x);
      if (arg.feed >= 0) return false;
      Placeholder* placeholder = AsPlaceholder(x);  // another tensor that shares the handle
      return placeholder != nullptr && placeholder->iteration == iteration &&
             placeholder->output == arg.index;
    }
    case ArgKind::kFeed:
    case ArgKind::kSelect:
      return EagerTensor_CheckExact(x) && FitsFeed(arg.index, arg, x);
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
      const bool same = feeds_[arg.index] == nullptr && FitsFeed(arg.index, arg, tensor);
      Py_DECREF(tensor);
      return same;
    }
    case ArgKind::kList: {
      if (!PyList_Check(x) && !PyTuple_Check(x)) return false;
      if (PySequence_Fast_GET_SIZE(x) != static_cast<Py_ssize_t>(arg.items.size())) return false;
      PyObject** items = PySequence_Fast_ITEMS(x);
      for (size_t i = 0; i < arg.items.size(); ++i) {
        if (!FitsArg(arg.items[i], items[i])) return false;
      }
      return true;
    }
  }
  return false;
}

bool Walk::AnyCaptured(PyObject* const* args, Py_ssize_t count) const {
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* arg = args[i];
    if (PyList_Check(arg) || PyTuple_Check(arg)) {
      if (AnyCaptured(PySequence_Fast_ITEMS(arg), PySequence_Fast_GET_SIZE(arg))) return true;
    } else if (Captures(arg)) {
      return true;
    }
  }
  return false;
}

bool Walk::Fits(const Node& node, CallKind call, PyObject* const* args, Py_ssize_t count) {
  // FastPathExecute(ctx, op, name, args...); Execute(ctx, device, op, inputs, attrs, outputs).
  const bool fast = call == CallKind::kFastPath;
  if (node.call != call) return false;
  if (node.forward >= 0 && !ran_[node.forward]) return false;
  // A function's name may change with every call; that it is no op is all that counts.
  const bool function = PyUnicode_GET_LENGTH(node.op) == 0;
  if (function ? !IsFunction(args[2]) : !SameOp(node.op, args[fast ? 1 : 2])) return false;
  if (node.misses) return true;
  // Without a boundary before it, an op in place does not see what the graph does to a variable.
  if (node.in_place) return node.boundary >= 0 || !AnyCaptured(args + 3, count - 3);
  const Py_ssize_t expected = node.args.size();
  if (fast ? count - 3 != expected : count - 3 < expected) return false;
  for (Py_ssize_t i = 0; i < expected; ++i) {
    if (FitsArg(node.args[i], args[3 + i])) continue;
    DropBindings();
    return false;
  }
  return true;
}

int Walk::Find(CallKind call, PyObject* const* args, Py_ssize_t count, Dims* dims) {
  const int known = Find(true, call, args, count, dims);
  return known >= 0 ? known : Find(false, call, args, count, dims);
}

int Walk::Find(bool as_before, CallKind call, PyObject* const* args, Py_ssize_t count, Dims* dims) {
  const int size = program->nodes.size();
  for (int k = cursor_; k < size;) {
    const Node& node = program->nodes[k];
    as_before_ = as_before && node.forward < 0;
    if (Fits(node, call, args, count)) {
      if (node.shapes == nullptr || InferShapes(node, args + 3, dims)) return k;
      dims->clear();
      DropBindings();
    }
    const int block = program->block_at[k];
    if (block < 0 || program->blocks[block].taken_slot < 0) break;
    k = program->blocks[block].end;
  }
  return -1;
}

bool Walk::CanSkipToEnd() const {
  const int size = program->nodes.size();
  for (int k = cursor_; k < size;) {
    const int block = program->block_at[k];
    if (block < 0 || program->blocks[block].taken_slot < 0) return false;
    k = program->blocks[block].end;
  }
  return true;
}

void Walk::SkipTo(int node) {
  static const Tensor* skipped = new Tensor(false);
  while (cursor_ < node) {
    Block& block = program->blocks[program->block_at[cursor_]];
    ++block.skipped;
    iteration->Set(block.taken_slot, *skipped);
    cursor_ = block.end;
  }
}

void Walk::Take() {
  static const Tensor* taken = new Tensor(true);
  const int block = program->block_at[cursor_];
  if (block >= 0) ++program->blocks[block].taken;
  if (block < 0 || program->blocks[block].taken_slot < 0) return;
  iteration->Set(program->blocks[block].taken_slot, *taken);
}

void Walk::Ran() {
  path_.push_back(cursor_);
  sizes_.push_back(SourcesDigest(cursor_) ^ given_);
  ran_[cursor_] = true;
  ++cursor_;
}

PyObject* Walk::Match(CallKind call, PyObject* const* args, Py_ssize_t count, PyObject* original,
                      bool* matched) {
  *matched = false;
  Dims dims;
  const int found = Find(call, args, count, &dims);
  if (found < 0) return nullptr;
  const Node& node = program->nodes[found];
  *matched = true;
  if (node.in_place) return RunInPlace(found, args, count, original);
  SkipTo(found);
  Take();
  if (node.misses) {
    Ran();
    return RaiseFastPathMiss();
  }
  Bind();
  std::vector<Tensor> values;
  if (node.shape_value == ShapeValue::kComputed) {
    PyObject* result = ComputeShapeValue(node, args, count, original);
    if (result != nullptr) return result;
  } else if (node.shape_value != ShapeValue::kNone) {
    if (!ShapeValues(node, args + 3, count - 3, &values)) values.clear();
  }
  return Answer(node, args + 3, call == CallKind::kFastPath, dims, values);
}

namespace {

// Visits the tensor inputs among a node's arguments, with what the program has passed for each.
template <typename Visit>
void ForEachInput(const Node& node, PyObject* const* args, Py_ssize_t count, Visit visit) {
  Py_ssize_t next = 0;
  for (size_t k = 0; k < node.args.size() && next < count; ++k) {
    const Arg& arg = node.args[k];
    const bool list = arg.kind == ArgKind::kList;
    const Py_ssize_t items = list ? arg.items.size() : 1;
    for (Py_ssize_t i = 0; i < items && next < count; ++i) {
      visit(next++, list ? arg.items[i] : arg,
            list ? PySequence_Fast_GET_ITEM(args[k], i) : args[k]);
    }
  }
}

bool IsShapeLike(const Tensor& tensor) {
  return (tensor.dtype() == tensorflow::DT_INT32 || tensor.dtype() == tensorflow::DT_INT64) &&
         tensor.dims() <= 1;
}

}  // namespace

bool Walk::InferShapes(const Node& node, PyObject* const* args, Dims* dims) {
  const Py_ssize_t count = PyTuple_GET_SIZE(node.numbers);
  std::vector<PyObject*> inputs(count, nullptr);
  ForEachInput(node, args, count, [&](Py_ssize_t i, const Arg& arg, PyObject* passed) {
    if (!EagerTensor_CheckExact(passed)) {
      passed = PyTuple_GET_ITEM(node.numbers, i);
      for (const Binding& binding : bindings_) {
        if (arg.kind == ArgKind::kPythonFeed && binding.feed == arg.index) passed = binding.object;
      }
    }
    inputs[i] = passed;
  });
  return InferShapes(node, inputs, dims);
}

bool Walk::InferShapes(const Node& node, const std::vector<PyObject*>& inputs, Dims* dims) {
  Dims shapes(inputs.size());
  std::vector<Tensor> tensors(inputs.size());
  std::vector<const Tensor*> values(inputs.size(), nullptr);
  HandleShapes handles(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i] == nullptr || !EagerTensor_CheckExact(inputs[i])) continue;
    TFE_TensorHandle* handle = EagerTensor_Handle(inputs[i]);
    if (Placeholder* placeholder = AsPlaceholder(handle)) {
      handle = placeholder->real;
      if (handle == nullptr) {
        const std::vector<int64_t>* known = KnownDims(placeholder);
        if (known != nullptr) shapes[i] = tensorflow::PartialTensorShape(*known);
        continue;
      }
    }
    if (!TensorFromHandle(handle, &tensors[i])) continue;
    shapes[i] = tensors[i].shape();
    if (IsShapeLike(tensors[i])) values[i] = &tensors[i];
    handles[i] = ShapesBehind(tensors[i]);
  }
  return node.shapes->Infer(shapes, values, handles, dims);
}

PyObject* Walk::Answer(const Node& node, PyObject* const* args, bool record_gradient,
                       const Dims& dims, const std::vector<Tensor>& values) {
  PyObject* results = PyList_New(node.num_outputs);
  std::vector<int64_t> sizes;
  for (int i = 0; i < node.num_outputs; ++i) {
    const OutputSpec& spec = (*program->outputs)[node.first_output + i];
    const bool sized = !spec.static_shape && i < static_cast<int>(dims.size()) &&
                       dims[i].IsFullyDefined();
    if (sized) {
      const auto all = dims[i].dim_sizes();
      sizes.assign(all.begin(), all.end());
    }
    PyObject* tensor =
        spec.known != nullptr
            ? EagerTensorFromHandle(RefHandle(spec.known), false)
        : !values.empty()
            ? EagerTensorFromHandle(HandleFromTensor(values[i]), false)
            : NewPlaceholder(iteration, node.first_output + i, sized ? &sizes : nullptr);
    if (tensor == nullptr) {
      Py_DECREF(results);
      return nullptr;
    }
    Py_INCREF(tensor);
    values_[node.first_output + i] = tensor;
    PyList_SET_ITEM(results, i, tensor);
  }
  Ran();
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
  ForEachInput(node, args, size, [&](Py_ssize_t i, const Arg& arg, PyObject* passed) {
    PyObject* input = EagerTensor_CheckExact(passed)          ? passed
                      : arg.kind == ArgKind::kPythonFeed ? feeds_[arg.index]
                                                         : PyTuple_GET_ITEM(node.gradient_inputs, i);
    Py_INCREF(input);
    PyTuple_SET_ITEM(inputs, i, input);
  });
  PyObject* done = TFE_Py_RecordGradient(node.op, inputs, node.gradient_attrs, results, Py_None);
  Py_DECREF(inputs);
  Py_XDECREF(done);
  return done != nullptr;
}

std::vector<int> Walk::Alive() {
  DropDeadTapes();
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
  // Backwards: later outputs hold earlier ones as attributes.
  for (int i = program->OutputsBefore(end_node) - 1; i >= 0; --i) {
    PyObject* tensor = values_[i];
    if (tensor == nullptr || Py_REFCNT(tensor) > 1) continue;
    // A replay cannot make again what was made in place.
    if (program->made_in_place[i] || HandleIsShared(tensor)) continue;
    Py_CLEAR(values_[i]);
    dropped = true;
  }
  return dropped;
}

bool Walk::AllKeptAreFetched(int end_node, int* output) {
  DropDeadTapes();
  while (DropDead(end_node)) {
  }
  for (int i = 0; i < program->OutputsBefore(end_node); ++i) {
    PyObject* tensor = values_[i];
    if (tensor == nullptr || program->made_in_place[i]) continue;
    if ((*program->outputs)[i].fetch >= 0 || !Kept(tensor)) continue;
    *output = i;
    return false;
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
    {
      WithoutGil unlocked;
      state = iteration->Wait(slot, 50, value);
    }
    if (PyErr_CheckSignals() != 0) *interrupted = true;
  } while (state == SlotState::kPending && !*interrupted);
  const double end = Now();
  python_wait_seconds += end - start;
  iteration->timeline->PythonWaited(start, end);
  return state;
}

bool Walk::Read(int output, Tensor* value) {
  const OutputSpec& spec = (*program->outputs)[output];
  if (spec.fetch < 0) return Fallback("unexpected-read", output);
  if (spec.gate > passed_ && !PassBoundaries(spec.gate, output)) return !PyErr_Occurred();
  ++fetches_read;
  ++looks;
  bool interrupted = false;
  const double start = Now();
  const SlotState state = WaitSlot(spec.fetch, value, &interrupted);
  if (interrupted || !NoteWait(*iteration, output, start)) return false;
  if (state == SlotState::kReady || iteration->walk != this) return true;
  return Fallback("op-error", output);
}

bool Walk::End() {
  const int size = program->nodes.size();
  if (!CanSkipToEnd()) {
    Fallback("ended-early", -1);
    return false;
  }
  int output = -1;
  if (!AllKeptAreFetched(size, &output)) {
    Fallback("kept-tensor", output);
    return false;
  }
  SkipTo(size);
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
  if (done == nullptr && PyErr_ExceptionMatches(PyExc_Exception)) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    Close();
    PyErr_Restore(type, error, trace);
  } else if (done == nullptr) {
    Interrupt();  // it may have come before the callback got that far
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
  while (launched_ && !iteration->finished()) {
    {
      WithoutGil unlocked;
      iteration->WaitFinished(50);
    }
    if (PyErr_CheckSignals() != 0) return false;
  }
  return true;
}

PyObject* Walk::MadeBefore(int output) {
  PyObject* value = values_[output];
  if (value != nullptr && AsPlaceholder(value) == nullptr) {
    Py_INCREF(value);
    return value;
  }
  const OutputSpec& spec = (*program->outputs)[output];
  if (spec.known != nullptr) return EagerTensorFromHandle(RefHandle(spec.known), false);
  Tensor tensor;
  if (spec.fetch < 0 || iteration->Peek(spec.fetch, &tensor) != SlotState::kReady) {
    PyErr_SetString(PyExc_RuntimeError, "a tensor from before the last boundary is not there");
    return nullptr;
  }
  return EagerTensorFromHandle(HandleFromTensor(tensor), false);
}

bool Walk::Make(int k, PyObject* function, PyObject* args) {
  PyObject* made = PyObject_CallObject(function, args);
  if (made == nullptr) return false;
  const Node& node = program->nodes[k];
  for (int i = 0; i < node.num_outputs; ++i) {
    set_value(node.first_output + i, PyList_GET_ITEM(made, i));
  }
  Py_DECREF(made);
  base_ = k + 1;
  return true;
}

bool Walk::TakeFinished(bool wait, std::vector<int>* there) {
  for (int k = base_; k < cursor_; ++k) {
    const Node& node = program->nodes[k];
    for (int i = node.first_output; i < node.first_output + node.num_outputs; ++i) {
      if (values_[i] == nullptr) continue;
      const int fetch = (*program->outputs)[i].fetch;
      Tensor unused;
      const bool ready = fetch >= 0 && iteration->Peek(fetch, &unused) == SlotState::kReady;
      if ((ready || wait) && !FetchInto(i) && PyErr_Occurred()) return false;
      if (AsPlaceholder(values_[i]) == nullptr) there->push_back(i);
    }
  }
  return true;
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
  if (WaitSlot(spec.fetch, &value, &interrupted) != SlotState::kReady || interrupted) return false;
  if (tensor == nullptr) return true;
  TFE_TensorHandle* real = HandleFromTensor(value);
  Settle(values_[output], real);
  TFE_DeleteTensorHandle(real);
  return true;
}

void Walk::Close() {
  iteration->walk = nullptr;
  for (PyObject* tape : tapes_) Py_XDECREF(tape);
  tapes_.clear();
  for (PyObject* tensor : watched_) Py_DECREF(tensor);
  watched_.clear();
  if (!iteration->closed) iteration->Cancel();  // nobody will open its gates any more
  Py_CLEAR(on_fallback_);
  while (DropDead(cursor_)) {
  }
}

void Walk::Interrupt() {
  LeaveToPlain(this);
  iteration->MarkInterrupted();
}

bool Walk::WaitChecked() {
  if (program->checked_slot < 0) return true;
  Tensor unused;
  bool interrupted = false;
  WaitSlot(program->checked_slot, &unused, &interrupted);
  return !interrupted;
}

void Walk::set_value(int output, PyObject* tensor) {
  if (values_[output] != nullptr) return Settle(values_[output], EagerTensor_Handle(tensor));
  Py_INCREF(tensor);
  values_[output] = tensor;
}

void Walk::Release() {
  for (PyObject*& tape : tapes_) Py_CLEAR(tape);
  tapes_.clear();
  for (PyObject*& value : values_) Py_CLEAR(value);
  for (PyObject*& feed : feeds_) Py_CLEAR(feed);
}

}  // namespace terra
