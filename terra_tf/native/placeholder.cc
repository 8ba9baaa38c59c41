#include "placeholder.h"

#include <cstring>

#include "gil.h"
#include "session.h"
#include "tensorflow/c/eager/tfe_tensorhandle_internal.h"
#include "tensorflow/c/tf_status_helper.h"
#include "tensorflow/core/common_runtime/eager/custom_device.h"
#include "walk.h"

namespace terra {

const char kDeviceName[] = "/job:localhost/replica:0/task:0/device:TERRA:0";

namespace {

const char kCpuName[] = "/job:localhost/replica:0/task:0/device:CPU:0";
TFE_Context* g_ctx = nullptr;
TFE_CustomDevice g_device;
TFE_CustomDeviceTensorHandleMethods g_methods;
tensorflow::CustomDevice* g_our_device = nullptr;  // learned from the first handle made

Placeholder* FromData(void* data) { return static_cast<Placeholder*>(data); }

// Moves the pending Python exception into a TF_Status, keeping its text.
void StatusFromPythonError(TF_Status* status) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  TF_Code code = TF_UNKNOWN;
  std::string text = "terra_tf could not provide this value";
  if (value != nullptr) {
    if (PyObject* number = PyObject_GetAttrString(value, "error_code")) {
      code = static_cast<TF_Code>(PyLong_AsLong(number));
      Py_DECREF(number);
    }
    PyErr_Clear();
    PyObject* message = PyObject_GetAttrString(value, "message");
    if (message == nullptr) {
      PyErr_Clear();
      message = PyObject_Str(value);
    }
    if (message != nullptr && PyUnicode_Check(message)) text = PyUnicode_AsUTF8(message);
    Py_XDECREF(message);
    // An interrupt must not be swallowed by whatever handles the status.
    if (PyErr_GivenExceptionMatches(value, PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
  }
  PyErr_Clear();
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  TF_SetStatus(status, code, text.c_str());
}

// A new reference to the value's handle, for C++ that has released the GIL or never held it.
TFE_TensorHandle* ResolveFromCpp(TFE_TensorHandle* handle, TF_Status* status) {
  Placeholder* placeholder = AsPlaceholder(handle);
  WithGil gil;
  TFE_TensorHandle* real = Resolve(placeholder);
  if (real == nullptr) {
    StatusFromPythonError(status);
    return nullptr;
  }
  return RefHandle(real);
}

const std::vector<int64_t>* DimsBeforeValue(const Placeholder* placeholder) {
  return placeholder->real != nullptr ? nullptr : KnownDims(placeholder);
}

TFE_TensorHandle* RealForShape(void* data, TF_Status* status) {
  Placeholder* placeholder = FromData(data);
  if (placeholder->real == nullptr) {
    WithGil gil;
    const std::shared_ptr<Iteration> iteration = placeholder->iteration;
    Walk* walk = iteration == nullptr ? nullptr : iteration->walk;
    const int64_t looks = walk == nullptr ? 0 : walk->looks;
    if (Resolve(placeholder) == nullptr) StatusFromPythonError(status);
    const bool walks_on = walk != nullptr && iteration->walk == walk;
    if (walks_on && !(*iteration->outputs)[placeholder->output].by_values) walk->looks = looks;
  }
  return placeholder->real;
}

int NumDims(void* data, TF_Status* status) {
  if (const auto* dims = DimsBeforeValue(FromData(data))) return dims->size();
  TFE_TensorHandle* real = RealForShape(data, status);
  return real == nullptr ? 0 : TFE_TensorHandleNumDims(real, status);
}

int64_t Dim(void* data, int index, TF_Status* status) {
  if (const auto* dims = DimsBeforeValue(FromData(data))) return (*dims)[index];
  TFE_TensorHandle* real = RealForShape(data, status);
  return real == nullptr ? 0 : TFE_TensorHandleDim(real, index, status);
}

void Deallocate(void* data) {
  Placeholder* placeholder = FromData(data);
  if (placeholder->real != nullptr) TFE_DeleteTensorHandle(placeholder->real);
  delete placeholder;
}

TFE_TensorHandle* CopyTo(TFE_Context*, TFE_TensorHandle*, TF_Status* status, void*) {
  TF_SetStatus(status, TF_UNIMPLEMENTED, "tensors cannot be copied to terra_tf's device");
  return nullptr;
}

TFE_TensorHandle* CopyFrom(TFE_Context*, TFE_TensorHandle* handle, const char*, TF_Status* status,
                           void*) {
  return ResolveFromCpp(handle, status);
}

// An op that reached TensorFlow past the hooks with a placeholder among its inputs: it runs on the
// CPU with the real values.
void Execute(const TFE_Op* op, int* num_outputs, TFE_TensorHandle** outputs, TF_Status* status,
             void*) {
  TFE_Op* plain = TFE_NewOp(g_ctx, TFE_OpGetName(op, status), status);
  if (TF_GetCode(status) != TF_OK) return;
  TFE_OpAddAttrs(plain, TFE_OpGetAttrs(op));
  TFE_OpSetDevice(plain, kCpuName, status);
  const int inputs = TFE_OpGetFlatInputCount(op, status);
  for (int i = 0; i < inputs && TF_GetCode(status) == TF_OK; ++i) {
    TFE_TensorHandle* input = TFE_OpGetFlatInput(op, i, status);
    const bool ours = AsPlaceholder(input) != nullptr;
    if (ours) input = ResolveFromCpp(input, status);
    if (input != nullptr) TFE_OpAddInput(plain, input, status);
    if (ours && input != nullptr) TFE_DeleteTensorHandle(input);
  }
  if (TF_GetCode(status) == TF_OK) TFE_Execute(plain, outputs, num_outputs, status);
  TFE_DeleteOp(plain);
}

void DeleteDevice(void*) {}
bool PinHere(const TFE_Op*, TF_Status*) { return true; }

TFE_TensorHandle* NewHandle(Placeholder* placeholder, TF_DataType dtype) {
  std::unique_ptr<TF_Status, decltype(&TF_DeleteStatus)> status(TF_NewStatus(), TF_DeleteStatus);
  TFE_TensorHandle* handle =
      TFE_NewCustomDeviceTensorHandle(g_ctx, kDeviceName, dtype, placeholder, g_methods, status.get());
  if (TF_GetCode(status.get()) != TF_OK) {
    PyErr_SetString(PyExc_RuntimeError, TF_Message(status.get()));
    return nullptr;
  }
  if (g_our_device == nullptr) {
    g_our_device =
        static_cast<tensorflow::CustomDeviceTensorHandle*>(tensorflow::unwrap(handle))->device();
  }
  return handle;
}

}  // namespace

TFE_CustomDevice* InitDevice(TFE_Context* ctx) {
  g_ctx = ctx;
  g_methods.num_dims = NumDims;
  g_methods.dim = Dim;
  g_methods.deallocator = Deallocate;
  g_device.copy_tensor_to_device = CopyTo;
  g_device.copy_tensor_from_device = CopyFrom;
  g_device.execute = Execute;
  g_device.delete_device = DeleteDevice;
  g_device.shall_pin_to_this_device = PinHere;
  return &g_device;
}

TFE_Context* Context() { return g_ctx; }

const std::vector<int64_t>* KnownDims(const Placeholder* placeholder) {
  if (placeholder->sized) return &placeholder->dims;
  if (placeholder->iteration == nullptr) return nullptr;
  const OutputSpec& spec = (*placeholder->iteration->outputs)[placeholder->output];
  return spec.static_shape ? &spec.dims : nullptr;
}

PyObject* NewPlaceholder(std::shared_ptr<Iteration> iteration, int output,
                         const std::vector<int64_t>* dims) {
  const int dtype = (*iteration->outputs)[output].dtype;
  auto* placeholder = new Placeholder{std::move(iteration), 0, output, nullptr};
  if (dims != nullptr) {
    placeholder->dims = *dims;
    placeholder->sized = true;
  }
  TFE_TensorHandle* handle = NewHandle(placeholder, static_cast<TF_DataType>(dtype));
  return handle == nullptr ? nullptr : EagerTensorFromHandle(handle, false);
}

bool WrapRecorded(PyObject* eager_tensor, int64_t recording, int output) {
  TFE_TensorHandle* real = EagerTensor_Handle(eager_tensor);
  auto* placeholder = new Placeholder{nullptr, recording, output, RefHandle(real)};
  TFE_TensorHandle* handle = NewHandle(placeholder, TFE_TensorHandleDataType(real));
  if (handle == nullptr) return false;
  TFE_DeleteTensorHandle(ExchangeHandle(eager_tensor, handle));
  return true;
}

Placeholder* AsPlaceholder(TFE_TensorHandle* handle) {
  tensorflow::ImmediateExecutionTensorHandle* base = tensorflow::unwrap(handle);
  if (!tensorflow::CustomDeviceTensorHandle::classof(base)) return nullptr;
  auto* custom = static_cast<tensorflow::CustomDeviceTensorHandle*>(base);
  return custom->device() == g_our_device ? FromData(custom->DevicePointer()) : nullptr;
}

Placeholder* AsPlaceholder(PyObject* object) {
  return EagerTensor_CheckExact(object) ? AsPlaceholder(EagerTensor_Handle(object)) : nullptr;
}

TFE_TensorHandle* Resolve(Placeholder* placeholder) {
  if (placeholder->real != nullptr) {
    if (placeholder->recording != 0 && !NoteRecordedRead(*placeholder)) return nullptr;
    return placeholder->real;
  }
  std::shared_ptr<Iteration> iteration = placeholder->iteration;
  tensorflow::Tensor value;
  if (iteration->walk != nullptr) {
    if (!iteration->walk->Read(placeholder->output, &value)) return nullptr;
    if (placeholder->real != nullptr) return placeholder->real;  // a fallback has settled it
  } else if (!WaitForClosed(*placeholder, &value)) {
    return nullptr;
  }
  if (placeholder->real == nullptr) placeholder->real = HandleFromTensor(value);
  return placeholder->real;
}

bool Materialise(PyObject* eager_tensor) {
  Placeholder* placeholder = AsPlaceholder(eager_tensor);
  if (placeholder == nullptr) return true;
  TFE_TensorHandle* real = Resolve(placeholder);
  if (real == nullptr) return false;
  // Resolving may have settled this very tensor.
  if (AsPlaceholder(eager_tensor) != nullptr) Settle(eager_tensor, real);
  return true;
}

bool MaterialiseAll(PyObject* const* args, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* arg = args[i];
    if (PyList_Check(arg) || PyTuple_Check(arg)) {
      if (!MaterialiseAll(PySequence_Fast_ITEMS(arg), PySequence_Fast_GET_SIZE(arg))) return false;
    } else if (!Materialise(arg)) {
      return false;
    }
  }
  return true;
}

void Settle(PyObject* eager_tensor, TFE_TensorHandle* real) {
  Placeholder* placeholder = AsPlaceholder(eager_tensor);
  if (placeholder == nullptr) return;
  if (placeholder->real == nullptr) placeholder->real = RefHandle(real);
  // C++ frames above us may be using the old handle, so it is not freed here.
  Retire(ExchangeHandle(eager_tensor, RefHandle(real)));
}

}  // namespace terra
