// The Walk's delegated calls: whether one fits, and running it.
#include <algorithm>
#include <cstring>

#include "delegation.h"
#include "guards.h"
#include "library.h"
#include "session.h"
#include "tape.h"
#include "walk.h"

namespace terra {

// --- tapes ---------------------------------------------------------------------------------------

int Walk::TapeNumber(PyObject* tape) const {
  const auto found = std::find(tapes_.begin(), tapes_.end(), tape);
  return found == tapes_.end() ? -1 : found - tapes_.begin();
}

// A tape keeps what it has recorded; nobody can use one that only the walk has.
void Walk::DropDeadTapes() {
  for (PyObject*& tape : tapes_) {
    if (tape != nullptr && Py_REFCNT(tape) == 1) Py_CLEAR(tape);
  }
}

long long Walk::WhichTensor(PyObject* tensor) const {
  constexpr long long kFeed = 1LL << 40, kOther = 1LL << 41;
  if (Placeholder* placeholder = AsPlaceholder(tensor)) {
    if (placeholder->iteration == iteration) return placeholder->output;
  }
  // One that has its value is a placeholder no longer.
  const auto value = std::find(values_.begin(), values_.end(), tensor);
  if (value != values_.end()) return value - values_.begin();
  const auto feed = std::find(feeds_.begin(), feeds_.end(), tensor);
  if (feed != feeds_.end()) return kFeed + (feed - feeds_.begin());
  return kOther + (std::find(watched_.begin(), watched_.end(), tensor) - watched_.begin());
}

void Walk::NoteTape(TapeAction action, PyObject* tape, PyObject* about) {
  long long what = 0;
  if (action == TapeAction::kNew) {
    Py_INCREF(tape);
    tapes_.push_back(tape);
  }
  if (tape != nullptr) what = TapeNumber(tape);
  int watched = -1;
  if (action == TapeAction::kWatch && about != nullptr) {
    what = (what << 48) + WhichTensor(about);
    Placeholder* placeholder = AsPlaceholder(about);
    if (placeholder == nullptr || placeholder->iteration != iteration) {
      const auto known = std::find(watched_.begin(), watched_.end(), about);
      watched = known - watched_.begin();
      if (known == watched_.end()) {
        Py_INCREF(about);
        watched_.push_back(about);
      }
    }
  } else if (action == TapeAction::kVariable || action == TapeAction::kAccessed) {
    what = (what << 56) ^ reinterpret_cast<long long>(about);
  }
  tape_events_.push_back({action, static_cast<int>(path_.size()), what, watched});
}

// An event as it is compared. Which feed carries a tensor from outside is known only once an op has
// taken it, so it is looked up as late as possible.
TapeEvent Walk::Settled(TapeEvent event) const {
  if (event.watched < 0) return event;
  const long long tape = event.about >> 48;
  event.about = (tape << 48) + WhichTensor(watched_[event.watched]);
  return event;
}

bool Walk::AnyTapeAlive() const {
  return std::any_of(tapes_.begin(), tapes_.end(),
                     [](PyObject* tape) { return tape != nullptr && Py_REFCNT(tape) > 1; });
}

uint64_t Walk::SourcesDigest(int k) const {
  if (!AnyTapeAlive()) return 0;  // nobody will ask
  const Node& node = program->nodes[k];
  uint64_t digest = 0;
  auto mix = [&](uint64_t x) { digest = (digest ^ (x + 0x9e3779b97f4a7c15)) * 0xff51afd7ed558ccd; };
  auto mix_tensor = [&](PyObject* tensor) {
    TFE_TensorHandle* handle = EagerTensor_Handle(tensor);
    if (Placeholder* placeholder = AsPlaceholder(handle)) {
      handle = placeholder->real;
      if (handle == nullptr) {
        const std::vector<int64_t>* dims = KnownDims(placeholder);
        if (dims == nullptr) return mix(~uint64_t{0});
        for (int64_t size : *dims) mix(size);
        return mix(dims->size());
      }
    }
    tensorflow::Tensor value;
    if (!TensorFromHandle(handle, &value)) return mix(~uint64_t{1});
    for (int64_t size : value.shape().dim_sizes()) mix(size);
    mix(value.dims());
  };
  for (int output = node.first_output; output < node.first_output + node.num_outputs; ++output) {
    if ((*program->outputs)[output].static_shape && !node.in_place) continue;
    PyObject* made = values_[output];
    if (made != nullptr && EagerTensor_CheckExact(made)) mix_tensor(made);
  }
  for (int feed : node.feeds) {
    if (feeds_[feed] != nullptr) mix(WhichTensor(feeds_[feed]));
  }
  for (int feed : node.open_feeds) {
    if (feeds_[feed] != nullptr) mix_tensor(feeds_[feed]);
  }
  return digest;
}

bool Walk::TapeStart(int number, int* event, int* node) const {
  for (size_t i = 0; i < tape_events_.size(); ++i) {
    const TapeEvent& e = tape_events_[i];
    if (e.action != TapeAction::kNew || e.about != number) continue;
    *event = i;
    *node = e.at;
    return true;
  }
  return false;
}

std::vector<TapeEvent> Walk::TapeHistory(int number, std::vector<int>* nodes) const {
  int event = 0, node = 0;
  std::vector<TapeEvent> history;
  if (!TapeStart(number, &event, &node)) return history;
  for (size_t i = event; i < tape_events_.size(); ++i) {
    history.push_back(Settled(tape_events_[i]));
    history.back().at -= node;
  }
  nodes->assign(path_.begin() + node, path_.end());
  return history;
}

bool Walk::SameTape(const DelegatedCall& call, int number) const {
  int event = 0, node = 0;
  if (!TapeStart(number, &event, &node)) return false;
  if (tape_events_.size() - event != call.tape.size()) return false;
  if (path_.size() - node != call.tape_nodes.size()) return false;
  for (size_t i = 0; i < call.tape.size(); ++i) {
    TapeEvent now = Settled(tape_events_[event + i]);
    now.at -= node;
    if (!(now == call.tape[i])) return false;
  }
  return std::equal(call.tape_nodes.begin(), call.tape_nodes.end(), path_.begin() + node) &&
         std::equal(call.tape_sizes.begin(), call.tape_sizes.end(), sizes_.begin() + node);
}

// --- arguments -----------------------------------------------------------------------------------

namespace {

PyObject* Attributes(PyObject* object) {
  PyObject** dict = _PyObject_GetDictPtr(object);
  return dict == nullptr ? nullptr : *dict;
}

bool HasWeakReferences(PyObject* x) {
  return PyType_SUPPORTS_WEAKREFS(Py_TYPE(x)) && *PyObject_GET_WEAKREFS_LISTPTR(x) != nullptr;
}

bool SameKey(PyObject* a, PyObject* b) {
  return a == b || PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

}  // namespace

bool Walk::FitsTensor(const Pattern& pattern, PyObject* x, std::vector<PyObject*>* leaves,
                      const DelegatedCall& call) {
  if (!EagerTensor_CheckExact(x)) return false;
  TFE_TensorHandle* handle = EagerTensor_Handle(x);
  if (TFE_TensorHandleDataType(handle) != pattern.dtype) return false;
  const std::vector<int64_t>* known = nullptr;
  tensorflow::TensorShape shape;
  bool sized = true;
  if (Placeholder* placeholder = AsPlaceholder(handle)) {
    handle = placeholder->real;
    if (handle == nullptr) {
      known = KnownDims(placeholder);
      sized = known != nullptr;
    }
  }
  if (known == nullptr && sized) {
    tensorflow::Tensor tensor;
    if (!TensorFromHandle(handle, &tensor)) return false;
    shape = tensor.shape();
  }
  if (sized != pattern.sized) return false;
  if (sized) {
    const int rank = known != nullptr ? known->size() : shape.dims();
    if (rank != static_cast<int>(pattern.dims.size())) return false;
    for (int i = 0; i < rank; ++i) {
      if ((known != nullptr ? (*known)[i] : shape.dim_size(i)) != pattern.dims[i]) return false;
    }
  }
  if (pattern.source == Pattern::Source::kOutput && values_[pattern.index] != x) {
    Placeholder* placeholder = AsPlaceholder(x);
    if (placeholder == nullptr || placeholder->iteration != iteration ||
        placeholder->output != pattern.index) {
      return false;
    }
  }
  if (pattern.source == Pattern::Source::kFeed && feeds_[pattern.index] != x) return false;
  // Attributes that the library or the user has put on the tensor, a mask for instance.
  PyObject* attributes = Attributes(x);
  const Py_ssize_t size = attributes == nullptr ? 0 : PyDict_GET_SIZE(attributes);
  if (size != static_cast<Py_ssize_t>(pattern.named.size())) return false;
  (*leaves)[pattern.leaf] = x;
  for (const auto& [name, expected] : pattern.named) {
    PyObject* value = PyDict_GetItem(attributes, name.ptr());
    if (value == nullptr || !FitsPattern(expected, value, leaves, call)) return false;
  }
  return true;
}

bool Walk::FitsPattern(const Pattern& pattern, PyObject* x, std::vector<PyObject*>* leaves,
                       const DelegatedCall& call) {
  switch (pattern.kind) {
    case Pattern::Kind::kTensor:
      return FitsTensor(pattern, x, leaves, call);
    case Pattern::Kind::kValue:
      return pattern.value->Is(x);
    case Pattern::Kind::kSequence: {
      if (!pattern.value->Is(reinterpret_cast<PyObject*>(Py_TYPE(x)))) return false;
      if (PySequence_Fast_GET_SIZE(x) != static_cast<Py_ssize_t>(pattern.items.size())) return false;
      for (size_t i = 0; i < pattern.items.size(); ++i) {
        if (!FitsPattern(pattern.items[i], PySequence_Fast_GET_ITEM(x, i), leaves, call)) return false;
      }
      return true;
    }
    case Pattern::Kind::kMapping: {
      if (!PyDict_CheckExact(x)) return false;
      if (PyDict_GET_SIZE(x) != static_cast<Py_ssize_t>(pattern.named.size())) return false;
      PyObject *key, *value;
      Py_ssize_t position = 0;
      for (const auto& [name, expected] : pattern.named) {
        if (!PyDict_Next(x, &position, &key, &value)) return false;
        if (!SameKey(key, name.ptr())) return false;
        if (!FitsPattern(expected, value, leaves, call)) return false;
      }
      return true;
    }
    case Pattern::Kind::kInstance: {
      PyObject* attributes = Attributes(x);
      if (attributes == nullptr || !pattern.value->Is(reinterpret_cast<PyObject*>(Py_TYPE(x)))) {
        return false;
      }
      for (const auto& [name, expected] : pattern.named) {
        PyObject* value = PyDict_GetItem(attributes, name.ptr());
        if (value == nullptr || !FitsPattern(expected, value, leaves, call)) return false;
      }
      return true;
    }
    case Pattern::Kind::kSlice: {
      if (!PySlice_Check(x)) return false;
      const auto* slice = reinterpret_cast<PySliceObject*>(x);
      return FitsPattern(pattern.items[0], slice->start, leaves, call) &&
             FitsPattern(pattern.items[1], slice->stop, leaves, call) &&
             FitsPattern(pattern.items[2], slice->step, leaves, call);
    }
    case Pattern::Kind::kTape: {
      PyObject* tape = PyObject_GetAttrString(x, "_tape");  // TensorFlow's wrapper has it
      if (tape == nullptr) {
        PyErr_Clear();
        return false;
      }
      const int number = TapeNumber(tape);
      Py_DECREF(tape);
      return number == pattern.index && SameTape(call, number);
    }
  }
  return false;
}

bool Walk::FitsCall(const DelegatedCall& call, PyObject* const* args, Py_ssize_t count,
                    PyObject* names, std::vector<PyObject*>* leaves) {
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (count != static_cast<Py_ssize_t>(call.arguments.size())) return false;
  if (named != static_cast<Py_ssize_t>(call.keywords.size())) return false;
  if (call.taped != (TFE_Py_TapeSetIsEmpty() == Py_False)) return false;
  leaves->assign(call.leaves, nullptr);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!FitsPattern(call.arguments[i], args[i], leaves, call)) return false;
  }
  for (Py_ssize_t i = 0; i < named; ++i) {
    const auto& [name, pattern] = call.keywords[i];
    if (!SameKey(PyTuple_GET_ITEM(names, i), name.ptr())) return false;
    if (!FitsPattern(pattern, args[count + i], leaves, call)) return false;
  }
  for (int i = 0; i < call.leaves; ++i) {
    for (int k = 0; k < i; ++k) {
      if (((*leaves)[i] == (*leaves)[k]) != (call.aliases[i] == call.aliases[k])) return false;
    }
  }
  for (int feed : call.needs_feeds) {
    if (feeds_[feed] == nullptr) return false;
  }
  for (const auto& [leaf, arg] : call.constants) {
    if (AsPlaceholder((*leaves)[leaf]) != nullptr || !SameContent(*arg, (*leaves)[leaf])) return false;
  }
  for (const auto& [leaf, tensor] : call.contents) {
    if (AsPlaceholder((*leaves)[leaf]) != nullptr) return false;
    if (!SameTensors(tensor.ptr(), (*leaves)[leaf])) return false;
  }
  if (call.ambient != nullptr && !call.ambient->Holds()) return false;
  if (call.state != nullptr && !call.state->Holds()) return false;
  // Last, because it binds.
  as_before_ = false;
  for (const CallFeed& feed : call.feeds) {
    PyObject* value = feed.source == CallFeed::Source::kLeaf     ? (*leaves)[feed.index]
                      : feed.source == CallFeed::Source::kOutput ? values_[feed.index]
                                                                 : feed.value.ptr();
    if (value != nullptr && FitsFeed(feed.feed, *feed.arg, value)) continue;
    DropBindings();
    return false;
  }
  return true;
}

// --- running -------------------------------------------------------------------------------------

PyObject* Walk::OutputObject(int output, const std::vector<int64_t>* sizes) {
  PyObject*& value = values_[output];
  if (value == nullptr) {
    const OutputSpec& spec = (*program->outputs)[output];
    value = spec.known != nullptr ? EagerTensorFromHandle(RefHandle(spec.known), false)
                                  : NewPlaceholder(iteration, output, sizes);
  }
  return value;
}

PyObject* Walk::ArgObject(const Arg& arg, PyObject* number) {
  switch (arg.kind) {
    case ArgKind::kOutput:
      return OutputObject(arg.index);
    case ArgKind::kFeed:
    case ArgKind::kPythonFeed:
    case ArgKind::kSelect:
      return feeds_[arg.index];
    case ArgKind::kConstant:
    case ArgKind::kObject:
      return arg.object;
    default:
      return number;  // of a Python value: the tensor that was made of it
  }
}

// The tensors that a node of a delegated call takes.
bool Walk::InputObjects(const Node& node, std::vector<PyObject*>* inputs) {
  inputs->clear();
  const Py_ssize_t count = PyTuple_GET_SIZE(node.gradient_inputs);
  for (const Arg& arg : node.args) {
    const bool list = arg.kind == ArgKind::kList;
    for (size_t i = 0; i < (list ? arg.items.size() : 1); ++i) {
      const Py_ssize_t position = inputs->size();
      if (position == count) return true;
      PyObject* input = ArgObject(list ? arg.items[i] : arg,
                                  PyTuple_GET_ITEM(node.gradient_inputs, position));
      if (input == nullptr) return false;
      inputs->push_back(input);
    }
  }
  return true;
}

bool Walk::RunNode(const Node& node, bool taped) {
  std::vector<PyObject*> inputs;
  if (!InputObjects(node, &inputs)) return false;
  Dims dims;
  if (node.shapes != nullptr && !InferShapes(node, inputs, &dims)) dims.clear();
  std::vector<int64_t> sizes;
  for (int i = 0; i < node.num_outputs; ++i) {
    const bool sized = !(*program->outputs)[node.first_output + i].static_shape &&
                       i < static_cast<int>(dims.size()) && dims[i].IsFullyDefined();
    if (sized) {
      const auto all = dims[i].dim_sizes();
      sizes.assign(all.begin(), all.end());
    }
    if (OutputObject(node.first_output + i, sized ? &sizes : nullptr) == nullptr) return false;
  }
  // Before it is recorded: a tape may ask for a shape that only the graph knows, and then it is known.
  Ran();
  if (!taped || node.gradient_attrs == nullptr) return true;
  PyObject* given = PyTuple_New(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    Py_INCREF(inputs[i]);
    PyTuple_SET_ITEM(given, i, inputs[i]);
  }
  PyObject* results = PyList_New(node.num_outputs);
  for (int i = 0; i < node.num_outputs; ++i) {
    PyObject* result = values_[node.first_output + i];
    Py_INCREF(result);
    PyList_SET_ITEM(results, i, result);
  }
  PyObject* done = TFE_Py_RecordGradient(node.op, given, node.gradient_attrs, results, Py_None);
  Py_DECREF(given);
  Py_DECREF(results);
  Py_XDECREF(done);
  return done != nullptr;
}

bool Walk::RunNodes(const DelegatedCall& call) {
  for (const auto& [output, value] : call.shape_values) {
    Py_XDECREF(values_[output]);
    values_[output] = EagerTensorFromHandle(RefHandle(EagerTensor_Handle(value.ptr())), false);
  }
  bool recording = call.taped;
  auto step = call.tape_steps.begin();
  auto feed = call.feeds_on_the_way.begin();
  as_before_ = false;
  for (size_t i = 0; i <= call.nodes.size(); ++i) {
    for (; step != call.tape_steps.end() && step->at == static_cast<int>(i); ++step) {
      if (!call.taped) continue;
      if (step->action != TapeAction::kAccessed) {
        recording = step->action == TapeAction::kRestart;
        NoteTape(step->action, nullptr, nullptr);
      } else if (PyObject* variable = step->variable->get()) {
        PyObject* done = recording ? PyObject_CallOneArg(VariableAccessed(), variable) : Py_None;
        if (done == nullptr) return false;
        if (recording) Py_DECREF(done);
        NoteTape(step->action, nullptr, variable);
      }
    }
    if (i == call.nodes.size()) break;
    for (; feed != call.feeds_on_the_way.end() && feed->at == static_cast<int>(i); ++feed) {
      if (!FillFeed(*feed)) return false;
    }
    const int k = call.nodes[i];
    const Node& node = program->nodes[k];
    SkipTo(k);
    Take();
    const bool objects = call.taped || call.dynamic;
    if (!objects || node.misses || node.num_outputs == 0) {
      Ran();
    } else if (!RunNode(node, recording)) {
      return false;
    }
  }
  return true;
}

// Fills a feed from an output that was made on the way; its shape is static, so that it fits.
bool Walk::FillFeed(const CallFeed& feed) {
  PyObject* value = OutputObject(feed.index);
  if (value == nullptr) return false;
  if (feeds_[feed.feed] == value) return true;
  if (!FitsFeed(feed.feed, *feed.arg, value)) {
    PyErr_SetString(PyExc_RuntimeError, "a value of a delegated call does not fit");
    return false;
  }
  Bind();
  return true;
}

PyObject* Walk::Cook(const Recipe& recipe, const std::vector<PyObject*>& leaves) {
  switch (recipe.kind) {
    case Recipe::Kind::kLeaf:
      Py_INCREF(leaves[recipe.index]);
      return leaves[recipe.index];
    case Recipe::Kind::kOutput: {
      PyObject* output = OutputObject(recipe.index);
      if (output == nullptr) return nullptr;
      for (const auto& [name, value] : recipe.attributes) {
        PyObject* attribute = Cook(value, leaves);
        if (attribute == nullptr || PyObject_SetAttr(output, name.ptr(), attribute) < 0) return nullptr;
        Py_DECREF(attribute);
      }
      Py_INCREF(output);
      return output;
    }
    case Recipe::Kind::kValue: {
      PyObject* value = recipe.value->get();
      if (value == nullptr) PyErr_SetString(PyExc_ReferenceError, "a delegated call's result is gone");
      Py_XINCREF(value);
      return value;
    }
    case Recipe::Kind::kUnread: {
      PyObject* variable = recipe.value->get();
      if (variable == nullptr) PyErr_SetString(PyExc_ReferenceError, "a variable is gone");
      return variable == nullptr ? nullptr : recipe.unread->Get(variable);
    }
    case Recipe::Kind::kMapping: {
      PyObject* mapping = PyDict_New();
      for (size_t i = 0; i < recipe.items.size(); ++i) {
        PyObject* item = Cook(recipe.items[i], leaves);
        if (item == nullptr) return nullptr;
        PyDict_SetItem(mapping, recipe.keys[i].ptr(), item);
        Py_DECREF(item);
      }
      return mapping;
    }
    case Recipe::Kind::kSequence:
    case Recipe::Kind::kMake: {
      PyObject* items = PyList_New(recipe.items.size());
      for (size_t i = 0; i < recipe.items.size(); ++i) {
        PyObject* item = Cook(recipe.items[i], leaves);
        if (item == nullptr) {
          Py_DECREF(items);
          return nullptr;
        }
        PyList_SET_ITEM(items, i, item);
      }
      PyObject* maker = recipe.value->get();
      if (maker == reinterpret_cast<PyObject*>(&PyList_Type)) return items;
      PyObject* tuple = PyList_AsTuple(items);
      Py_DECREF(items);
      if (maker == reinterpret_cast<PyObject*>(&PyTuple_Type)) return tuple;
      PyObject* made = PyObject_CallObject(maker, tuple);
      Py_DECREF(tuple);
      return made;
    }
  }
  return nullptr;
}

// Nobody can tell a view that nobody else holds, and that is as it was made, from a new one.
PyObject* UnreadView::Get(PyObject* variable) {
  PyObject* view = view_.ptr();
  if (view != nullptr && Py_REFCNT(view) == 1 && !HasWeakReferences(view) &&
      DictVersion(Attributes(view)) == version_) {
    Py_INCREF(view);
    return view;
  }
  view = PyObject_CallOneArg(make_.ptr(), variable);
  if (view == nullptr) return nullptr;
  view_ = pybind11::reinterpret_borrow<pybind11::object>(view);
  version_ = DictVersion(Attributes(view));
  return view;
}

DelegationPlace* Walk::Place(PyObject* function) {
  const auto found = program->delegations.find(cursor_);
  if (found == program->delegations.end()) return nullptr;
  for (DelegationPlace& place : found->second) {
    if (place.function == function) return &place;
  }
  return nullptr;
}

bool Walk::Delegate(PyObject* function, PyObject* const* args, Py_ssize_t count, PyObject* names,
                    PyObject** result) {
  if (session->watchers > 0) return false;  // they would not see what the nodes read
  if (!LibraryUnchanged(&library_checked_, program.get())) return false;
  DelegationPlace* place = Place(function);
  if (place == nullptr) return false;
  std::vector<PyObject*> leaves;
  for (size_t i = 0; i < place->calls.size(); ++i) {
    const std::shared_ptr<DelegatedCall> held = place->calls[i];
    DelegatedCall& call = *held;
    if (!FitsCall(call, args, count, names, &leaves)) continue;
    if (!std::exchange(call.used, true)) --place->unused;
    if (i > 0) std::rotate(place->calls.begin(), place->calls.begin() + i, place->calls.begin() + i + 1);
    Bind();
    if (RunNodes(call)) *result = Cook(call.result, leaves);
    if (*result != nullptr && call.after) {
      PyObject* done = PyObject_Vectorcall(call.after.ptr(), args, count, names);
      if (done == nullptr) Py_CLEAR(*result);
      Py_XDECREF(done);
    }
    ++delegated_calls;
    return true;
  }
  return false;
}

bool Walk::WantsToLearn(PyObject* function) {
  constexpr size_t kMostPlaces = 16;  // calls in calls that begin with the same op
  if (session->watchers > 0 || !LibraryMayDelegate()) return false;
  DelegationPlace* place = Place(function);
  if (place == nullptr) {
    std::vector<DelegationPlace>& places = program->delegations[cursor_];
    if (places.size() >= kMostPlaces) return false;
    places.emplace_back();
    places.back().function = function;
    return true;
  }
  if (place->rest <= 0) return true;
  --place->rest;
  return false;
}

const Arg* FindFeed(const std::vector<Arg>& args, int feed) {
  for (const Arg& arg : args) {
    if (arg.kind == ArgKind::kList) {
      if (const Arg* found = FindFeed(arg.items, feed)) return found;
    } else if (arg.kind == ArgKind::kOutput) {
      if (arg.feed == feed) return &arg;
    } else if (arg.index == feed && (arg.kind == ArgKind::kFeed || arg.kind == ArgKind::kPythonFeed ||
                                     arg.kind == ArgKind::kSelect)) {
      return &arg;
    }
  }
  return nullptr;
}

namespace {

void NoteConstants(const std::vector<Arg>& args, const std::vector<PyObject*>& leaves,
                   DelegatedCall* call) {
  for (const Arg& arg : args) {
    NoteConstants(arg.items, leaves, call);
    if (arg.kind != ArgKind::kConstant) continue;
    for (size_t i = 0; i < leaves.size(); ++i) {
      if (AsPlaceholder(leaves[i]) != nullptr || !SameContent(arg, leaves[i])) continue;
      call->constants.emplace_back(i, &arg);
    }
  }
}

}  // namespace

int Walk::OwnOutput(PyObject* tensor) const {
  Placeholder* placeholder = AsPlaceholder(tensor);
  if (placeholder != nullptr && placeholder->iteration == iteration) return placeholder->output;
  const auto value = std::find(values_.begin(), values_.end(), tensor);
  return value == values_.end() ? -1 : value - values_.begin();
}

// A tensor with the handle of another one, so that the program's own may die.
pybind11::object Walk::Twin(PyObject* tensor) {
  return pybind11::reinterpret_steal<pybind11::object>(
      EagerTensorFromHandle(RefHandle(EagerTensor_Handle(tensor)), false));
}

void Walk::Complete(DelegatedCall* call, const std::vector<PyObject*>& leaves) const {
  for (int k : call->nodes) {
    const Node& node = program->nodes[k];
    NoteConstants(node.args, leaves, call);
    if (node.shapes != nullptr) call->dynamic = true;
    if (node.shape_value == ShapeValue::kNone) continue;
    for (int o = node.first_output; o < node.first_output + node.num_outputs; ++o) {
      if (values_[o] == nullptr || AsPlaceholder(values_[o]) != nullptr) continue;
      call->shape_values.emplace_back(o, Twin(values_[o]));
    }
  }
  if (call->shape_values.empty()) return;
  // These may follow from arguments that follow from shapes themselves.
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (AsPlaceholder(leaves[i]) == nullptr && OwnOutput(leaves[i]) >= 0) {
      call->contents.emplace_back(i, Twin(leaves[i]));
    }
  }
}

void Walk::Learned(int cursor, PyObject* function, std::unique_ptr<DelegatedCall> call, bool hopeless) {
  constexpr size_t kMostCalls = 64;
  constexpr int kMostUnused = 16;
  constexpr int64_t kForEver = int64_t{1} << 60;
  for (DelegationPlace& place : program->delegations[cursor]) {
    if (place.function != function) continue;
    if (call == nullptr) {
      ++place.failures;
      place.rest = hopeless ? kForEver : int64_t{1} << std::min(20, 2 * place.failures);
      return;
    }
    place.failures = 0;
    place.calls.insert(place.calls.begin(), std::move(call));
    ++place.unused;
    if (place.calls.size() > kMostCalls) {
      place.unused -= !place.calls.back()->used;
      place.calls.pop_back();
    }
    // What never comes again is not worth learning each time; what has a few dozen forms is.
    place.rest = place.unused > kMostUnused ? place.unused : 0;
    return;
  }
}

}  // namespace terra
