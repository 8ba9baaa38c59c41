// Guards: comparisons of what the program passes with what was recorded.
//
// All are exact: numbers by bits and type, tensors by content, so that a call matches only if the
// graph computes for it what eager would.
#pragma once
#include <Python.h>

#include "program.h"
#include "tensorflow/core/framework/tensor.h"

namespace terra {

// Whether sizes fit: in `dims`, -1 stands for any size, and -2 alone for any rank.
bool SameShape(const std::vector<int64_t>& sizes, const std::vector<int64_t>& dims);
bool SameShape(const tensorflow::Tensor& tensor, const std::vector<int64_t>& dims);
// Equal Python values of the same types, lists item by item.
bool SamePython(PyObject* expected, PyObject* x);
// An op type as str or bytes.
bool SameOp(PyObject* expected, PyObject* x);
bool IsFunction(PyObject* op);
// An EagerTensor with the recorded dtype, shape and bytes.
// Whether two EagerTensors that have their values are equal bit for bit.
bool SameTensors(PyObject* a, PyObject* b);
bool SameContent(const Arg& arg, PyObject* eager_tensor);
// The same Python types (and array dtypes), so that TensorFlow infers the same dtype from both.
bool SameKind(PyObject* expected, PyObject* x);
// The same content in memory of its own.
tensorflow::Tensor DeepCopy(const tensorflow::Tensor& tensor);
// The tensor that TensorFlow makes of a Python value where an op takes one; null if it makes none.
PyObject* Convert(const Arg& arg, PyObject* x);

}  // namespace terra
