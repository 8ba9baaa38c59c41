// Learns calls of TensorFlow's own functions around ops (`tf.matmul`, `x + y`, `x[:, 0]`).
//
// A training step that is written op by op makes hundreds of them, and nearly all of their time is
// TensorFlow's Python. What such a function does depends on nothing but its arguments and what eager
// execution keeps for the thread, so that they are learned without the watch that other library calls
// need (terra_tf/delegation/learning.py), in a few microseconds: from tensors of the walk that have no
// value yet (looking at one would be noticed), variables, and plain values.
#include <algorithm>
#include <cstring>

#include "delegation.h"
#include "library.h"
#include "session.h"
#include "walk.h"

namespace terra {
namespace {

PyObject* Attributes(PyObject* object) {
  PyObject** dict = _PyObject_GetDictPtr(object);
  return dict == nullptr ? nullptr : *dict;
}

bool HasAttributes(PyObject* object) {
  PyObject* attributes = Attributes(object);
  return attributes != nullptr && PyDict_GET_SIZE(attributes) > 0;
}

bool IsNamed(PyTypeObject* type, const char* name) {
  const char* dot = std::strrchr(type->tp_name, '.');
  return std::strcmp(dot == nullptr ? type->tp_name : dot + 1, name) == 0;
}

bool IsPlain(PyObject* x) {
  return x == Py_None || x == Py_Ellipsis || PyBool_Check(x) || PyLong_CheckExact(x) ||
         PyFloat_CheckExact(x) || PyComplex_CheckExact(x) || PyUnicode_CheckExact(x) ||
         PyBytes_CheckExact(x) || IsNamed(Py_TYPE(x), "DType");
}

}  // namespace

// --- before the call ---

OpCall::OpCall(Walk* walk, PyObject* ambient, PyObject* unread)
    : walk_(walk), call_(new DelegatedCall), unread_(unread) {
  start_ = walk->path().size();
  events_ = walk->tape_events().size();
  walk_looks_ = walk->looks;
  looks_ = CurrentSession().looks;
  for (PyObject* feed : walk->feeds()) bound_.push_back(feed != nullptr);
  call_->taped = TFE_Py_TapeSetIsEmpty() == Py_False;
  call_->ambient = AmbientState(ambient);
}

bool OpCall::Describe(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  if (call_->ambient == nullptr) return false;
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < count + named; ++i) {
    Pattern pattern;
    if (!Describe(args[i], &pattern)) return false;
    if (i < count) {
      call_->arguments.push_back(std::move(pattern));
    } else {
      call_->keywords.emplace_back(
          pybind11::reinterpret_borrow<pybind11::object>(PyTuple_GET_ITEM(names, i - count)),
          std::move(pattern));
    }
  }
  call_->leaves = leaves_.size();
  for (PyObject* leaf : leaves_) {
    call_->aliases.push_back(std::find(leaves_.begin(), leaves_.end(), leaf) - leaves_.begin());
  }
  return call_->leaves > 0 || call_->state != nullptr;
}

bool OpCall::Describe(PyObject* x, Pattern* pattern) {
  if (EagerTensor_CheckExact(x)) return DescribeTensor(x, pattern);
  if (PySlice_Check(x)) {
    const auto* slice = reinterpret_cast<PySliceObject*>(x);
    pattern->kind = Pattern::Kind::kSlice;
    pattern->items.resize(3);
    return Describe(slice->start, &pattern->items[0]) && Describe(slice->stop, &pattern->items[1]) &&
           Describe(slice->step, &pattern->items[2]);
  }
  if (PyList_CheckExact(x) || PyTuple_CheckExact(x)) {
    pattern->kind = Pattern::Kind::kSequence;
    pattern->value = std::make_unique<Same>(reinterpret_cast<PyObject*>(Py_TYPE(x)));
    pattern->items.resize(PySequence_Fast_GET_SIZE(x));
    for (size_t i = 0; i < pattern->items.size(); ++i) {
      if (!Describe(PySequence_Fast_GET_ITEM(x, i), &pattern->items[i])) return false;
    }
    return true;
  }
  pattern->kind = Pattern::Kind::kValue;
  pattern->value = std::make_unique<Same>(x);
  return IsPlain(x) || DescribeVariable(x);
}

bool OpCall::DescribeTensor(PyObject* x, Pattern* pattern) {
  if (HasAttributes(x)) return false;
  pattern->kind = Pattern::Kind::kTensor;
  pattern->leaf = leaves_.size();
  pattern->dtype = TFE_TensorHandleDataType(EagerTensor_Handle(x));
  leaves_.push_back(x);
  Placeholder* placeholder = AsPlaceholder(x);
  const bool unsettled = placeholder != nullptr && placeholder->real == nullptr;
  if (unsettled) {
    const std::vector<int64_t>* dims = KnownDims(placeholder);
    pattern->sized = dims != nullptr;
    if (dims != nullptr) pattern->dims = *dims;
  } else {
    tensorflow::Tensor tensor;
    TFE_TensorHandle* handle = EagerTensor_Handle(x);
    if (!TensorFromHandle(placeholder == nullptr ? handle : placeholder->real, &tensor)) return false;
    const auto sizes = tensor.shape().dim_sizes();
    pattern->sized = true;
    pattern->dims.assign(sizes.begin(), sizes.end());
  }
  pattern->index = walk_->OwnOutput(x);
  if (pattern->index >= 0) {
    pattern->source = Pattern::Source::kOutput;
    return true;
  }
  const auto& feeds = walk_->feeds();
  const auto feed = std::find(feeds.begin(), feeds.end(), x);
  if (feed == feeds.end()) return true;
  pattern->source = Pattern::Source::kFeed;
  pattern->index = feed - feeds.begin();
  return true;
}

bool OpCall::DescribeVariable(PyObject* x) {
  PyTypeObject* type = Py_TYPE(x);
  if (!IsNamed(type, "ResourceVariable")) return false;
  if (PyObject_IsInstance(x, Parts().variable) != 1) {
    PyErr_Clear();
    return false;
  }
  if (call_->state == nullptr) call_->state = std::make_shared<State>();
  variables_.push_back(x);
  if (call_->state->AddObject(x, false, false) >= 0 &&
      call_->state->AddClass(reinterpret_cast<PyObject*>(type)) >= 0) {
    return true;
  }
  PyErr_Clear();
  return false;
}

// --- after the call ---

std::unique_ptr<DelegatedCall> OpCall::Finish(PyObject* result) {
  if (walk_->looks != walk_looks_ || CurrentSession().looks != looks_) return nullptr;
  call_->nodes.assign(walk_->path().begin() + start_, walk_->path().end());
  if (call_->nodes.empty() || !DescribeFeeds() || !DescribeTape()) return nullptr;
  for (int k : call_->nodes) {
    if (walk_->program->nodes[k].in_place) return nullptr;
  }
  if (!Describe(result, &call_->result)) return nullptr;
  if (call_->state != nullptr && !call_->state->Holds()) return nullptr;
  if (!call_->ambient->Holds()) return nullptr;
  walk_->Complete(call_.get(), leaves_);
  return std::move(call_);
}

bool OpCall::Describe(PyObject* result, Recipe* recipe) {
  if (PyList_CheckExact(result) || PyTuple_CheckExact(result)) {
    recipe->kind = Recipe::Kind::kSequence;
    recipe->value = std::make_unique<Same>(reinterpret_cast<PyObject*>(Py_TYPE(result)));
    recipe->items.resize(PySequence_Fast_GET_SIZE(result));
    for (size_t i = 0; i < recipe->items.size(); ++i) {
      if (!Describe(PySequence_Fast_GET_ITEM(result, i), &recipe->items[i])) return false;
    }
    return !recipe->items.empty();
  }
  if (!EagerTensor_CheckExact(result)) return DescribeView(result, recipe);
  if (HasAttributes(result)) return false;
  recipe->kind = Recipe::Kind::kOutput;
  for (int k : call_->nodes) {
    const Node& node = walk_->program->nodes[k];
    for (int o = node.first_output; o < node.first_output + node.num_outputs; ++o) {
      if (walk_->value(o) == result) {
        recipe->index = o;
        return true;
      }
    }
  }
  return false;
}

bool OpCall::DescribeView(PyObject* view, Recipe* recipe) {
  if (view == Py_None) {
    recipe->value = std::make_unique<Same>(view);
    return true;
  }
  if (variables_.empty() || !IsNamed(Py_TYPE(view), "_UnreadVariable")) return false;
  PyObject* mine = PyObject_GetAttrString(view, "_handle");
  PyObject* other = PyObject_GetAttrString(variables_[0], "_handle");
  PyErr_Clear();
  const bool same = mine != nullptr && mine == other;
  Py_XDECREF(mine);
  Py_XDECREF(other);
  recipe->kind = Recipe::Kind::kUnread;
  recipe->value = std::make_unique<Same>(variables_[0]);
  recipe->unread = std::make_unique<UnreadView>(
      pybind11::reinterpret_borrow<pybind11::object>(unread_));
  return same;
}

bool OpCall::DescribeFeeds() {
  std::vector<int> seen;
  for (size_t i = 0; i < call_->nodes.size(); ++i) {
    const Node& node = walk_->program->nodes[call_->nodes[i]];
    for (int feed : node.feeds) {
      if (std::find(seen.begin(), seen.end(), feed) != seen.end()) continue;
      seen.push_back(feed);
      if (bound_[feed]) {
        call_->needs_feeds.push_back(feed);
        continue;
      }
      const auto leaf = std::find(leaves_.begin(), leaves_.end(), walk_->feeds()[feed]);
      const Arg* arg = FindFeed(node.args, feed);
      if (leaf == leaves_.end() || arg == nullptr) return false;
      CallFeed filled;
      filled.at = i;
      filled.feed = feed;
      filled.arg = arg;
      filled.index = leaf - leaves_.begin();
      call_->feeds.push_back(std::move(filled));
    }
  }
  return true;
}

bool OpCall::DescribeTape() {
  const std::vector<TapeEvent>& events = walk_->tape_events();
  bool stopped = false;
  for (size_t i = events_; i < events.size(); ++i) {
    const TapeAction action = events[i].action;
    TapeStep step{events[i].at - static_cast<int>(start_), action, nullptr};
    if (action == TapeAction::kAccessed) {
      step.variable = std::make_unique<Same>(reinterpret_cast<PyObject*>(events[i].about));
    } else if (action == TapeAction::kStop || action == TapeAction::kRestart) {
      stopped = action == TapeAction::kStop;
    } else {
      return false;
    }
    call_->tape_steps.push_back(std::move(step));
  }
  return !stopped;
}

std::shared_ptr<State> AmbientState(PyObject* ambient) {
  Session& session = CurrentSession();
  const int changes = LibraryChanges();
  const bool same = session.ambient != nullptr && session.ambient_changes == changes;
  if (same && session.ambient->Holds()) return session.ambient;
  session.ambient = nullptr;
  session.ambient_changes = changes;
  try {
    const auto make = pybind11::reinterpret_borrow<pybind11::object>(ambient);
    const pybind11::object made = make();
    if (!made.is_none()) session.ambient = made.cast<std::shared_ptr<State>>();
  } catch (pybind11::error_already_set&) {
  }
  return session.ambient;
}

}  // namespace terra
