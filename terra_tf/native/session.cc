#include "session.h"

#include <structmember.h>

#include <algorithm>
#include <deque>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "gil.h"
#include "graph_runner.h"
#include "walk.h"

namespace terra {
namespace {

// --- recording -----------------------------------------------------------------------------------

using Unwrapped = std::vector<std::pair<PyObject*, TFE_TensorHandle*>>;

// Gives recorded placeholders among the arguments their real handles for the time of one call.
void Unwrap(PyObject* const* args, Py_ssize_t count, Unwrapped* unwrapped) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* arg = args[i];
    if (PyList_Check(arg) || PyTuple_Check(arg)) {
      Unwrap(PySequence_Fast_ITEMS(arg), PySequence_Fast_GET_SIZE(arg), unwrapped);
    } else if (Placeholder* placeholder = AsPlaceholder(arg)) {
      if (placeholder->recording == 0 || placeholder->real == nullptr) continue;
      Py_INCREF(arg);
      unwrapped->emplace_back(arg, ExchangeHandle(arg, RefHandle(placeholder->real)));
    }
  }
}

void Rewrap(Unwrapped* unwrapped) {
  // In reverse, so that a tensor passed twice gets its first handle back.
  for (auto it = unwrapped->rbegin(); it != unwrapped->rend(); ++it) {
    TFE_DeleteTensorHandle(ExchangeHandle(it->first, it->second));
    Py_DECREF(it->first);
  }
}

bool IsVariable(PyObject* object) {
  static auto* known = new std::unordered_map<PyTypeObject*, bool>;
  PyTypeObject* type = Py_TYPE(object);
  auto found = known->find(type);
  if (found != known->end()) return found->second;
  Py_INCREF(type);  // so that the address stays this type's
  PyObject* as_object = reinterpret_cast<PyObject*>(type);
  int is = PyObject_IsSubclass(as_object, Parts().variable);
  if (is < 0) PyErr_Clear();
  if (is <= 0) is = PyObject_HasAttrString(as_object, "_should_act_as_resource_variable");
  return (*known)[type] = is > 0;
}

bool AnyVariable(PyObject* const* args, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* arg = args[i];
    if (PyList_Check(arg) || PyTuple_Check(arg)) {
      if (AnyVariable(PySequence_Fast_ITEMS(arg), PySequence_Fast_GET_SIZE(arg))) return true;
    } else if (IsVariable(arg)) {
      return true;
    }
  }
  return false;
}

void WrapResult(PyObject* result, int64_t recording, int output) {
  const bool list = PyList_Check(result) || PyTuple_Check(result);
  const Py_ssize_t size = list ? PySequence_Fast_GET_SIZE(result) : 1;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* tensor = list ? PySequence_Fast_GET_ITEM(result, i) : result;
    if (!EagerTensor_CheckExact(tensor) || AsPlaceholder(tensor) != nullptr) continue;
    const TF_DataType dtype = TFE_TensorHandleDataType(EagerTensor_Handle(tensor));
    if (dtype == TF_RESOURCE || dtype == TF_VARIANT) continue;
    WrapRecorded(tensor, recording, output + i);
  }
}

PyObject* Record(PyObject* const* args, Py_ssize_t count, PyObject* original, CallKind call) {
  Session& session = CurrentSession();
  PyObject* result = nullptr;
  // The fast path reads variables inside C++, unseen; the slow path reads them by an op of its own.
  if (call == CallKind::kFastPath && AnyVariable(args + 3, count - 3)) {
    RaiseFastPathMiss();
  } else {
    Suspended suspended;
    Unwrapped unwrapped;
    Unwrap(args + 3, count - 3, &unwrapped);
    // Unfinished values of earlier iterations have become plain at the latest here.
    session.nested = false;
    if (MaterialiseAll(args + 3, count - 3)) {
      result = PyObject_Vectorcall(original, args, count, nullptr);
    }
    Rewrap(&unwrapped);
  }
  return NoteOutcome(args, count, result, call, session.nested ? Ran::kNested : Ran::kRecorded);
}

// --- the hook ------------------------------------------------------------------------------------

struct Hook {
  PyObject_HEAD;
  vectorcallfunc vectorcall;
  CallKind call;
  PyObject* original;
};

// Ops that are no part of the program's sequence and pass on in every mode. `_EagerConst` turns a
// Python value into a tensor that a tape can watch; gradient code reads it as a Python value. The
// others free a resource when Python's garbage collection comes to it, which can be anywhere.
bool OutsideOfSequence(PyObject* op) {
  static auto* names = new std::unordered_set<std::string>{
      "_EagerConst", "DestroyResourceOp", "DeleteIterator", "DeleteMultiDeviceIterator",
      "DeleteMemoryCache", "DeleteRandomSeedGenerator", "DeleteSeedGenerator"};
  const char* name = PyBytes_Check(op) ? PyBytes_AS_STRING(op) : PyUnicode_AsUTF8(op);
  return name != nullptr && (name[0] == 'D' || name[0] == '_') && names->count(name) > 0;
}

int g_inside = 0;  // threads inside a region; changed with the GIL held
auto* g_walks = new std::vector<Walk*>;  // walks in progress; the same
auto* g_shared = new std::deque<PyObject*>;  // owned, latest last, bounded
constexpr size_t kMostShared = 256;

// A thread outside of any region uses resources while others are inside. Iterations that hold back
// effects on one of them fall back, so that the thread sees what eager would show it.
bool NoteShared(PyObject* const* args, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* arg = args[i];
    if (PyList_Check(arg) || PyTuple_Check(arg)) {
      if (!NoteShared(PySequence_Fast_ITEMS(arg), PySequence_Fast_GET_SIZE(arg))) return false;
    } else if (EagerTensor_CheckExact(arg) && AsPlaceholder(arg) == nullptr &&
               TFE_TensorHandleDataType(EagerTensor_Handle(arg)) == TF_RESOURCE) {
      if (!IsShared(arg)) {
        Py_INCREF(arg);
        g_shared->push_back(arg);
        if (g_shared->size() > kMostShared) {
          Py_DECREF(g_shared->front());
          g_shared->pop_front();
        }
      }
      const std::vector<Walk*> walks = *g_walks;  // a fallback changes the list
      for (Walk* walk : walks) {
        if (walk->session == nullptr || !walk->Captures(arg)) continue;
        if (!walk->Fallback("other-thread", -1)) return false;
      }
    }
  }
  return true;
}

void Unlist(Walk* walk) {
  walk->session = nullptr;
  g_walks->erase(std::remove(g_walks->begin(), g_walks->end(), walk), g_walks->end());
}

PyObject* PassOn(PyObject* const* args, Py_ssize_t count, PyObject* original, CallKind call) {
  if (!MaterialiseAll(args + 3, count - 3)) return nullptr;
  if (g_inside > 0 && CurrentSession().mode == Mode::kOutside) {
    // The fast path reads variables inside C++, unseen; the slow path reads them by an op of its own.
    if (call == CallKind::kFastPath && AnyVariable(args + 3, count - 3)) return RaiseFastPathMiss();
    if (!NoteShared(args + 3, count - 3)) return nullptr;
  }
  if (GraphRunner::AnyUnfinished() || GraphRunner::AnyFailed()) {
    PyObject* op = args[call == CallKind::kFastPath ? 1 : 2];
    const char* name = PyBytes_Check(op) ? PyBytes_AS_STRING(op) : PyUnicode_AsUTF8(op);
    if (name == nullptr) return nullptr;
    // The fast path reads variables inside C++.
    const bool reads = IsStatefulOp(name) ||
                       (call == CallKind::kFastPath && AnyVariable(args + 3, count - 3));
    if (reads && !SyncClosed()) return nullptr;
  }
  // A Python function that the op calls must not open a region: what it returns goes to C++.
  Session& session = CurrentSession();
  ++session.calling;
  PyObject* result = PyObject_Vectorcall(original, args, count, nullptr);
  --session.calling;
  return result;
}

PyObject* HookCall(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  Hook* hook = reinterpret_cast<Hook*>(self);
  const Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  if (keywords != nullptr || count < 3) {
    return PyObject_Vectorcall(hook->original, args, nargsf, keywords);
  }
  Session& session = CurrentSession();
  ++session.calls;
  const bool inside = session.mode == Mode::kRecord || session.mode == Mode::kWalk;
  if (inside && session.suspended > 0) session.nested = true;
  if (!inside || session.suspended > 0 ||
      OutsideOfSequence(args[hook->call == CallKind::kFastPath ? 1 : 2])) {
    return PassOn(args, count, hook->original, hook->call);
  }
  if (session.mode == Mode::kWalk) {
    bool matched = false;
    PyObject* result = session.walk->Match(hook->call, args, count, hook->original, &matched);
    if (matched || PyErr_Occurred()) return result;
    if (!session.walk->Fallback("new-op", -1)) return nullptr;
  }
  return CallRecorded(args, count, hook->original, hook->call);
}

int HookInit(PyObject* self, PyObject* args, PyObject*) {
  Hook* hook = reinterpret_cast<Hook*>(self);
  int call = 0;
  if (!PyArg_ParseTuple(args, "iO", &call, &hook->original)) return -1;
  Py_INCREF(hook->original);
  hook->call = static_cast<CallKind>(call);
  hook->vectorcall = HookCall;
  return 0;
}

PyMemberDef g_hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Hook, vectorcall), READONLY, nullptr},
    {"original", T_OBJECT_EX, offsetof(Hook, original), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyTypeObject g_hook_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

}  // namespace

Session& CurrentSession() {
  thread_local Session session;
  return session;
}

PythonParts& Parts() {
  static PythonParts* parts = new PythonParts;
  return *parts;
}

void SetMode(Mode mode, Walk* walk, PyObject* recorder) {
  static int64_t recordings = 0;
  Session& session = CurrentSession();
  g_inside += (mode != Mode::kOutside) - (session.mode != Mode::kOutside);
  if (session.walk != nullptr && session.walk != walk) {
    Walk* left = session.walk;
    Unlist(left);
    left->Close();  // a walk that was left by an exception must not hold up what comes after it
  }
  session.mode = mode;
  session.walk = walk;
  if (walk != nullptr && walk->session == nullptr) {
    walk->session = &session;
    g_walks->push_back(walk);
  }
  PyObject* old = session.recorder;
  Py_XINCREF(recorder);
  session.recorder = recorder;
  if (recorder != nullptr) session.recording = ++recordings;
  Py_XDECREF(old);
}

void LeaveToPlain(Walk* walk) {
  Session* session = walk->session;
  if (session == nullptr) return;
  Unlist(walk);
  session->mode = Mode::kPlain;
  session->walk = nullptr;
}

PyObject* RaiseFastPathMiss() {
  PyErr_SetString(Parts().fast_path_miss, "not for the fast path");
  return nullptr;
}

PyObject* NoteOutcome(PyObject* const* args, Py_ssize_t count, PyObject* result, CallKind call,
                      Ran ran) {
  PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &error, &trace);
  Session& session = CurrentSession();
  PyObject* first = nullptr;
  const int64_t recording = session.recording;
  if (session.mode == Mode::kRecord) {
    const bool missed = type != nullptr && PyErr_GivenExceptionMatches(type, Parts().fast_path_miss);
    Suspended suspended;
    PyObject* recorder = session.recorder;
    Py_INCREF(recorder);
    PyObject* seen = PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      Py_INCREF(args[i]);
      PyTuple_SET_ITEM(seen, i, args[i]);
    }
    const char* method = result != nullptr ? "on_call" : missed ? "on_miss" : "on_error";
    first = PyObject_CallMethod(recorder, method, "iOOi", static_cast<int>(call), seen,
                                result != nullptr ? result : Py_None, static_cast<int>(ran));
    Py_DECREF(seen);
    Py_DECREF(recorder);
    if (first == nullptr) {
      Py_XDECREF(result);
      Py_XDECREF(type);
      Py_XDECREF(error);
      Py_XDECREF(trace);
      return nullptr;
    }
  }
  const long output = first == nullptr ? -1 : PyLong_AsLong(first);
  Py_XDECREF(first);
  if (result == nullptr) {
    PyErr_Restore(type, error, trace);
  } else if (output >= 0) {
    WrapResult(result, recording, output);
  }
  return result;
}

PyObject* CallRecorded(PyObject* const* args, Py_ssize_t count, PyObject* original, CallKind call) {
  if (CurrentSession().mode == Mode::kRecord) return Record(args, count, original, call);
  return PassOn(args, count, original, call);
}

bool NoteRecordedRead(const Placeholder& placeholder) {
  Session& session = CurrentSession();
  if (session.mode != Mode::kRecord || session.recording != placeholder.recording) return true;
  Suspended suspended;
  PyObject* done = PyObject_CallMethod(session.recorder, "on_read", "i", placeholder.output);
  Py_XDECREF(done);
  return done != nullptr;
}

bool WaitForClosed(const Placeholder& placeholder, tensorflow::Tensor* value) {
  Iteration& iteration = *placeholder.iteration;
  const int slot = (*iteration.outputs)[placeholder.output].fetch;
  SlotState state = SlotState::kFailed;
  if (slot >= 0) {
    state = iteration.Peek(slot, value);
    if (state == SlotState::kPending) {
      const double start = MonotonicSeconds();
      while (state == SlotState::kPending) {
        {
          WithoutGil unlocked;
          state = iteration.Wait(slot, 50, value);
        }
        if (PyErr_CheckSignals() != 0) return false;
      }
      iteration.timeline->PythonWaited(start, MonotonicSeconds());
      if (!NoteWait(iteration, placeholder.output, start)) return false;
    }
  }
  if (state == SlotState::kReady) return true;
  Suspended suspended;
  PyObject* done = PyObject_CallFunction(Parts().recover, "L", (long long)iteration.id);
  if (done == nullptr) return false;
  Py_DECREF(done);
  if (placeholder.real != nullptr) return true;
  PyErr_SetString(PyExc_RuntimeError, "this tensor was never computed: an op before it failed");
  return false;
}

bool NoteWait(const Iteration& iteration, int output, double start) {
  constexpr double kWorthTelling = 1e-5;
  const double seconds = MonotonicSeconds() - start;
  if (Parts().waited == nullptr || seconds < kWorthTelling) return true;
  Suspended suspended;
  PyObject* done =
      PyObject_CallFunction(Parts().waited, "Lid", (long long)iteration.id, output, seconds);
  Py_XDECREF(done);
  return done != nullptr;
}

bool AnyShared() { return !g_shared->empty(); }

bool IsShared(PyObject* handle) {
  return std::find(g_shared->begin(), g_shared->end(), handle) != g_shared->end();
}

bool SyncClosed() {
  bool done = !GraphRunner::AnyUnfinished();
  while (!done) {
    {
      WithoutGil unlocked;
      done = GraphRunner::WaitClosed(50);
    }
    if (PyErr_CheckSignals() != 0) return false;
  }
  if (!GraphRunner::AnyFailed()) return true;
  Suspended suspended;
  PyObject* recovered = PyObject_CallFunction(Parts().recover, "L", -1LL);
  Py_XDECREF(recovered);
  return recovered != nullptr;
}

PyTypeObject* HookType() {
  if (g_hook_type.tp_name == nullptr) {
    g_hook_type.tp_name = "terra_tf.native.Hook";
    g_hook_type.tp_doc = "Stands in for one of TensorFlow's eager entry points: Hook(kind, original).";
    g_hook_type.tp_basicsize = sizeof(Hook);
    g_hook_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    g_hook_type.tp_vectorcall_offset = offsetof(Hook, vectorcall);
    g_hook_type.tp_call = PyVectorcall_Call;
    g_hook_type.tp_members = g_hook_members;
    g_hook_type.tp_init = HookInit;
    g_hook_type.tp_new = PyType_GenericNew;
    if (PyType_Ready(&g_hook_type) < 0) return nullptr;
  }
  return &g_hook_type;
}

}  // namespace terra
