#include "guards.h"

#include <cstring>

#include "placeholder.h"
#include "tensorflow/core/framework/types.h"

namespace terra {

using tensorflow::Tensor;

namespace {

constexpr int64_t kAnySize = -1, kAnyRank = -2;

template <typename Size>
bool Fits(int rank, const std::vector<int64_t>& dims, Size size) {
  if (dims.size() == 1 && dims[0] == kAnyRank) return true;
  if (rank != static_cast<int>(dims.size())) return false;
  for (int i = 0; i < rank; ++i) {
    if (dims[i] != kAnySize && size(i) != dims[i]) return false;
  }
  return true;
}

}  // namespace

bool SameShape(const std::vector<int64_t>& sizes, const std::vector<int64_t>& dims) {
  return Fits(sizes.size(), dims, [&](int i) { return sizes[i]; });
}

bool SameShape(const Tensor& tensor, const std::vector<int64_t>& dims) {
  return Fits(tensor.dims(), dims, [&](int i) { return tensor.dim_size(i); });
}

bool SamePython(PyObject* expected, PyObject* x) {
  if (expected == x) return true;
  if (Py_TYPE(expected) != Py_TYPE(x)) return false;
  if (PyFloat_CheckExact(x)) {  // by bits: -0.0 is not 0.0, and NaN is itself
    const double a = PyFloat_AS_DOUBLE(expected), b = PyFloat_AS_DOUBLE(x);
    return std::memcmp(&a, &b, sizeof a) == 0;
  }
  if (PyList_CheckExact(x) || PyTuple_CheckExact(x)) {  // item by item: [1] is not [True]
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(x);
    if (PySequence_Fast_GET_SIZE(expected) != size) return false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!SamePython(PySequence_Fast_GET_ITEM(expected, i), PySequence_Fast_GET_ITEM(x, i))) {
        return false;
      }
    }
    return true;
  }
  const int equal = PyObject_RichCompareBool(expected, x, Py_EQ);
  if (equal < 0) PyErr_Clear();  // e.g. an array without a single truth value: not the same
  return equal == 1;
}

bool SameOp(PyObject* expected, PyObject* x) {
  if (expected == x) return true;
  if (PyUnicode_Check(x)) return PyUnicode_Compare(expected, x) == 0;
  if (!PyBytes_Check(x)) return false;
  return PyUnicode_CompareWithASCIIString(expected, PyBytes_AS_STRING(x)) == 0;
}

bool IsFunction(PyObject* op) {
  const char* name = PyBytes_Check(op) ? PyBytes_AS_STRING(op) : PyUnicode_AsUTF8(op);
  return name != nullptr && !IsKnownOp(name);
}

bool SameContent(const Arg& arg, PyObject* eager_tensor) {
  Tensor tensor;
  if (!TensorFromHandle(EagerTensor_Handle(eager_tensor), &tensor)) return false;
  return tensor.dtype() == arg.dtype && SameShape(tensor, arg.dims) &&
         tensor.tensor_data().size() == arg.bytes.size() &&
         std::memcmp(tensor.tensor_data().data(), arg.bytes.data(), arg.bytes.size()) == 0;
}

bool SameTensors(PyObject* a, PyObject* b) {
  Tensor one, other;
  if (!TensorFromHandle(EagerTensor_Handle(a), &one)) return false;
  if (!TensorFromHandle(EagerTensor_Handle(b), &other)) return false;
  if (one.dtype() != other.dtype() || one.shape() != other.shape()) return false;
  if (!tensorflow::DataTypeCanUseMemcpy(one.dtype())) return false;
  return one.tensor_data() == other.tensor_data();
}

bool FitsInt32(PyObject* number) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
  return overflow == 0 && value == static_cast<int32_t>(value);
}

bool SameKind(PyObject* expected, PyObject* x) {
  if (Py_TYPE(expected) != Py_TYPE(x)) return false;
  if (PyList_Check(x) || PyTuple_Check(x)) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(x);
    if (PySequence_Fast_GET_SIZE(expected) != size) return false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!SameKind(PySequence_Fast_GET_ITEM(expected, i), PySequence_Fast_GET_ITEM(x, i))) {
        return false;
      }
    }
    return true;
  }
  if (PyLong_Check(x)) return FitsInt32(expected) == FitsInt32(x);  // else it becomes an int64
  if (PyFloat_Check(x) || PyUnicode_Check(x)) return true;
  PyObject* mine = PyObject_GetAttrString(expected, "dtype");
  PyObject* other = PyObject_GetAttrString(x, "dtype");
  PyErr_Clear();
  const bool same = mine == nullptr || other == nullptr || SamePython(mine, other);
  Py_XDECREF(mine);
  Py_XDECREF(other);
  return same;
}

Tensor DeepCopy(const Tensor& tensor) {
  if (!tensorflow::DataTypeCanUseMemcpy(tensor.dtype())) return tensor;  // never shared
  Tensor copy(tensor.dtype(), tensor.shape());
  std::memcpy(const_cast<char*>(copy.tensor_data().data()), tensor.tensor_data().data(),
              tensor.tensor_data().size());
  return copy;
}

PyObject* Convert(const Arg& arg, PyObject* x) {
  if (EagerTensor_CheckExact(x)) return nullptr;
  TFE_TensorHandle* handle = tensorflow::ConvertToEagerTensor(
      Context(), x, static_cast<tensorflow::DataType>(arg.dtype), nullptr);
  if (handle == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  return EagerTensorFromHandle(handle, false);
}

}  // namespace terra
