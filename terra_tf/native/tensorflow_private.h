// The one header through which the native core touches TensorFlow's unpublished C++ symbols.
//
// The declarations below are exported by the wheel's shared objects but not by its headers. A
// missing symbol stops the core from loading; a changed layout is found by `FindHandleOffset`.
// Python's self check (terra_tf/native/__init__.py) turns both into one readable warning.
#pragma once
#include <Python.h>

#include "tensorflow/c/eager/c_api.h"
#include "tensorflow/c/eager/c_api_experimental.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/types.pb.h"

// tensorflow/python/eager/pywrap_tensor.h and pywrap_tfe.h (their headers need NumPy's).
bool EagerTensor_CheckExact(const PyObject* object);
TFE_TensorHandle* EagerTensor_Handle(const PyObject* object);
PyObject* EagerTensorFromHandle(TFE_TensorHandle* handle, bool is_packed);
PyObject* TFE_Py_RecordGradient(PyObject* op_name, PyObject* inputs, PyObject* attrs,
                                PyObject* results, PyObject* forward_pass_name_scope);
PyObject* TFE_Py_TapeSetIsEmpty();
namespace tensorflow {
TFE_TensorHandle* ConvertToEagerTensor(TFE_Context* ctx, PyObject* value, DataType dtype,
                                       const char* device_name);
}

namespace terra {

// Offset of the `TFE_TensorHandle*` field inside an EagerTensor object, or -1 if none matches.
int FindHandleOffset(PyObject* eager_tensor);

// Replaces the handle of an EagerTensor in place and returns the old one, owned by the caller.
// Identity, `id`, tape ids and Python attributes of the tensor stay. Steals `handle`.
TFE_TensorHandle* ExchangeHandle(PyObject* eager_tensor, TFE_TensorHandle* handle);

// Drops a handle that C++ frames above us may still be using: it is freed at `FreeRetired`.
void Retire(TFE_TensorHandle* handle);
void FreeRetired();

// New reference to the same handle.
TFE_TensorHandle* RefHandle(TFE_TensorHandle* handle);

// Whether another EagerTensor or an op in flight shares the tensor's handle.
bool HandleIsShared(PyObject* eager_tensor);

// A handle on the local CPU that shares `tensor`'s buffer.
TFE_TensorHandle* HandleFromTensor(const tensorflow::Tensor& tensor);

// The tensor behind a local handle; false if the handle is remote, custom or in error.
bool TensorFromHandle(TFE_TensorHandle* handle, tensorflow::Tensor* tensor);

// Whether the op type is stateful or unknown to the registry (a function's name).
bool IsStatefulOp(const char* op_name);
// Whether the name is an op type; everything else that can be executed is a function.
bool IsKnownOp(const char* op_name);

}  // namespace terra
