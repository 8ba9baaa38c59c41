// Placeholders: real EagerTensors whose handle lives on a custom device of ours.
//
// A placeholder stands for one output of one op. It knows dtype and (mostly) shape without waiting.
// Whatever reads its value, from Python or C++, ends in a copy from our device, and so in `Resolve`.
// Two kinds exist: of a co-executed iteration (the value comes from the graph), and recorded (the
// value is there already; the detour tells the recorder that the program looked at it).
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "iteration.h"
#include "tensorflow_private.h"

namespace terra {

struct Placeholder {
  std::shared_ptr<Iteration> iteration;  // null for a recorded one
  int64_t recording = 0;                 // the recording that made it; 0 for a co-executed one
  int output = 0;                        // index among the outputs of the trace
  TFE_TensorHandle* real = nullptr;      // the value, once known (owned)
  std::vector<int64_t> dims = {};        // where the trace does not fix them: the sizes, if `sized`
  bool sized = false;
};

// The sizes of a co-executed placeholder, or null where only its value tells them.
const std::vector<int64_t>* KnownDims(const Placeholder* placeholder);

// The device's description for TFE_RegisterCustomDevice; `ctx` must outlive all tensors.
TFE_CustomDevice* InitDevice(TFE_Context* ctx);
TFE_Context* Context();
extern const char kDeviceName[];

// New EagerTensors. `NewRecorded` replaces the handle of an existing one instead.
PyObject* NewPlaceholder(std::shared_ptr<Iteration> iteration, int output,
                         const std::vector<int64_t>* dims = nullptr);
bool WrapRecorded(PyObject* eager_tensor, int64_t recording, int output);

// The placeholder behind an object, or null if it is anything else (or has become a plain tensor).
Placeholder* AsPlaceholder(PyObject* object);
Placeholder* AsPlaceholder(TFE_TensorHandle* handle);

// The real handle (borrowed), waiting or falling back as needed. Needs the GIL. Null with a Python
// exception set on failure.
TFE_TensorHandle* Resolve(Placeholder* placeholder);

// Turns an EagerTensor that is a placeholder into a plain one, in place. False: exception set.
bool Materialise(PyObject* eager_tensor);
// The same for every tensor among call arguments, lists one level deep included.
bool MaterialiseAll(PyObject* const* args, Py_ssize_t count);
// Gives a placeholder the value of `real` and makes its EagerTensor a plain one.
void Settle(PyObject* eager_tensor, TFE_TensorHandle* real);

}  // namespace terra
