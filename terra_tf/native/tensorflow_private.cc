#include "tensorflow_private.h"

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensorflow/c/eager/tfe_context_internal.h"
#include "tensorflow/c/eager/tfe_tensorhandle_internal.h"
#include "tensorflow/core/common_runtime/eager/custom_device.h"
#include "tensorflow/core/common_runtime/eager/tensor_handle.h"
#include "tensorflow/core/framework/op.h"

namespace terra {
namespace {

int g_handle_offset = -1;
std::vector<TFE_TensorHandle*>* g_retired = new std::vector<TFE_TensorHandle*>;

TFE_TensorHandle** HandleField(PyObject* eager_tensor) {
  return reinterpret_cast<TFE_TensorHandle**>(reinterpret_cast<char*>(eager_tensor) +
                                              g_handle_offset);
}

}  // namespace

int FindHandleOffset(PyObject* eager_tensor) {
  TFE_TensorHandle* handle = EagerTensor_Handle(eager_tensor);
  const int size = static_cast<int>(Py_TYPE(eager_tensor)->tp_basicsize);
  int found = -1;
  for (int offset = sizeof(PyObject); offset + (int)sizeof(void*) <= size; offset += sizeof(void*)) {
    if (*reinterpret_cast<void**>(reinterpret_cast<char*>(eager_tensor) + offset) != handle) continue;
    if (found >= 0) return -1;  // two fields hold it: we would not know which one counts
    found = offset;
  }
  g_handle_offset = found;
  return found;
}

TFE_TensorHandle* ExchangeHandle(PyObject* eager_tensor, TFE_TensorHandle* handle) {
  TFE_TensorHandle** field = HandleField(eager_tensor);
  TFE_TensorHandle* old = *field;
  *field = handle;
  return old;
}

void Retire(TFE_TensorHandle* handle) { g_retired->push_back(handle); }

void FreeRetired() {
  std::vector<TFE_TensorHandle*> handles;
  handles.swap(*g_retired);
  for (TFE_TensorHandle* handle : handles) TFE_DeleteTensorHandle(handle);
}

TFE_TensorHandle* RefHandle(TFE_TensorHandle* handle) {
  tensorflow::unwrap(handle)->Ref();
  return handle;
}

bool HandleIsShared(PyObject* eager_tensor) {
  return !tensorflow::unwrap(*HandleField(eager_tensor))->RefCountIsOne();
}

TFE_TensorHandle* HandleFromTensor(const tensorflow::Tensor& tensor) {
  return tensorflow::wrap(tensorflow::TensorHandle::CreateLocalHandle(tensor));
}

bool TensorFromHandle(TFE_TensorHandle* handle, tensorflow::Tensor* tensor) {
  tensorflow::ImmediateExecutionTensorHandle* base = tensorflow::unwrap(handle);
  if (tensorflow::CustomDeviceTensorHandle::classof(base)) return false;
  const tensorflow::Tensor* value = nullptr;
  if (!tensorflow::TensorHandleFromInterface(base)->Tensor(&value).ok()) return false;
  *tensor = *value;
  return true;
}

namespace {

struct OpFacts {
  bool known = false, stateful = true;
};

OpFacts FactsOf(const char* op_name) {
  static std::mutex* mu = new std::mutex;
  static auto* facts = new std::unordered_map<std::string, OpFacts>;
  std::lock_guard<std::mutex> lock(*mu);
  auto found = facts->find(op_name);
  if (found != facts->end()) return found->second;
  const tensorflow::OpRegistrationData* data = nullptr;
  // Functions have new names all the time, so they are not kept.
  if (!tensorflow::OpRegistry::Global()->LookUp(op_name, &data).ok()) return {};
  return (*facts)[op_name] = {true, data->op_def.is_stateful()};
}

}  // namespace

bool IsStatefulOp(const char* op_name) { return FactsOf(op_name).stateful; }

bool IsKnownOp(const char* op_name) { return FactsOf(op_name).known; }

}  // namespace terra
