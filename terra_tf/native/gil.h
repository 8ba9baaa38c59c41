// Letting go of the GIL and taking it, in a program that may be ending meanwhile.
//
// Until version 3.14, CPython ends a daemon thread that asks for the GIL once the interpreter is
// being finalized: by pthread_exit, which unwinds the thread's C++ frames. Where a frame cannot be
// unwound, a destructor for instance, that ends the whole process: "terminate called without an
// active exception". Such a thread has to sleep for ever instead, as it does in CPython 3.14.
#pragma once
#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace terra {

// Calls what asks for the GIL; sleeps for ever where that ends the thread.
template <typename Call>
auto TakeGil(Call call) -> decltype(call()) {
  try {
    return call();
  } catch (const abi::__forced_unwind&) {
    while (true) pause();
  }
}

// While one exists, the thread does not have the GIL.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    TakeGil([this] { PyEval_RestoreThread(state_); });
  }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// While one exists, the thread has the GIL, whether or not it had it before.
class WithGil {
 public:
  WithGil() : state_(TakeGil([] { return PyGILState_Ensure(); })) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// The same for threads in TensorFlow's frames, which take the GIL in destructors all over: lets
// them sleep where the process would be terminated. To be called once.
void OutliveFinalization();

}  // namespace terra
