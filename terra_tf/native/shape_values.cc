// The Walk's answers that need no graph: values that follow from shapes alone.
//
// What Python asks of a shape, such as `tf.shape(x)[0]`, is known as soon as the shape is. The graph
// computes it, too, for its own use; but the program gets a plain tensor with the value and never
// waits for it. Which nodes those are is decided when the graph is planned (generation/plan.py).
#include <vector>

#include "session.h"
#include "walk.h"

namespace terra {
namespace {

using tensorflow::Tensor;

// The sizes of a tensor that may not have a value yet; false if they are not known.
bool Sizes(PyObject* x, std::vector<int64_t>* sizes) {
  if (!EagerTensor_CheckExact(x)) return false;
  TFE_TensorHandle* handle = EagerTensor_Handle(x);
  if (Placeholder* placeholder = AsPlaceholder(handle)) {
    handle = placeholder->real;
    if (handle == nullptr) {
      const std::vector<int64_t>* dims = KnownDims(placeholder);
      if (dims != nullptr) *sizes = *dims;
      return dims != nullptr;
    }
  }
  Tensor tensor;
  if (!TensorFromHandle(handle, &tensor)) return false;
  const auto all = tensor.shape().dim_sizes();
  sizes->assign(all.begin(), all.end());
  return true;
}

template <typename T>
Tensor ValueOf(ShapeValue kind, const std::vector<int64_t>& sizes) {
  const auto type = tensorflow::DataTypeToEnum<T>::value;
  if (kind == ShapeValue::kShape) {
    Tensor value(type, {static_cast<int64_t>(sizes.size())});
    for (size_t i = 0; i < sizes.size(); ++i) value.vec<T>()(i) = static_cast<T>(sizes[i]);
    return value;
  }
  int64_t number = kind == ShapeValue::kRank ? sizes.size() : 1;
  if (kind == ShapeValue::kSize) {
    for (int64_t size : sizes) number *= size;
  }
  Tensor value(type, {});
  value.scalar<T>()() = static_cast<T>(number);
  return value;
}

bool ArePlain(PyObject* const* args, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* arg = args[i];
    if (PyList_Check(arg) || PyTuple_Check(arg)) {
      if (!ArePlain(PySequence_Fast_ITEMS(arg), PySequence_Fast_GET_SIZE(arg))) return false;
    } else if (AsPlaceholder(arg) != nullptr) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool Walk::ShapeValues(const Node& node, PyObject* const* args, Py_ssize_t count,
                       std::vector<Tensor>* values) const {
  for (Py_ssize_t i = 0; i < count && static_cast<int>(values->size()) < node.num_outputs; ++i) {
    const bool list = PyList_Check(args[i]) || PyTuple_Check(args[i]);
    PyObject* const* items = list ? PySequence_Fast_ITEMS(args[i]) : &args[i];
    const Py_ssize_t size = list ? PySequence_Fast_GET_SIZE(args[i]) : 1;
    for (Py_ssize_t k = 0; k < size; ++k) {
      std::vector<int64_t> sizes;
      if (!Sizes(items[k], &sizes)) return false;
      const int dtype = (*program->outputs)[node.first_output].dtype;
      values->push_back(dtype == tensorflow::DT_INT64 ? ValueOf<int64_t>(node.shape_value, sizes)
                                                      : ValueOf<int32_t>(node.shape_value, sizes));
    }
  }
  return static_cast<int>(values->size()) == node.num_outputs;
}

PyObject* Walk::ComputeShapeValue(const Node& node, PyObject* const* args, Py_ssize_t count,
                                  PyObject* original) {
  if (!ArePlain(args + 3, count - 3)) return nullptr;
  PyObject* result;
  {
    Suspended suspended;
    result = PyObject_Vectorcall(original, args, count, nullptr);
  }
  if (result == nullptr) {  // the graph fails, too, and its error is the one to be seen
    PyErr_Clear();
    return nullptr;
  }
  KeepOutputs(node, result);
  Ran();
  return result;
}

}  // namespace terra
