#include "tape.h"

#include <structmember.h>

#include "session.h"
#include "walk.h"

namespace terra {
namespace {

PyObject* g_variable_accessed = nullptr;

struct TapeHook {
  PyObject_HEAD;
  vectorcallfunc vectorcall;
  TapeAction action;
  PyObject* original;
};

PyObject* Call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  TapeHook* hook = reinterpret_cast<TapeHook*>(self);
  PyObject* result = PyObject_Vectorcall(hook->original, args, nargsf, keywords);
  Session& session = CurrentSession();
  if (result == nullptr) return result;
  if (hook->action == TapeAction::kWatcher || hook->action == TapeAction::kNoWatcher) {
    session.watchers += hook->action == TapeAction::kWatcher ? 1 : session.watchers > 0 ? -1 : 0;
    return result;
  }
  if (session.mode != Mode::kWalk) return result;
  const Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  switch (hook->action) {
    case TapeAction::kNew:
      session.walk->NoteTape(hook->action, result, nullptr);
      break;
    case TapeAction::kWatch:
    case TapeAction::kVariable:
      session.walk->NoteTape(hook->action, count > 0 ? args[0] : nullptr,
                             count > 1 ? args[1] : nullptr);
      break;
    case TapeAction::kAdd:
    case TapeAction::kRemove:
      session.walk->NoteTape(hook->action, count > 0 ? args[0] : nullptr, nullptr);
      break;
    default:
      session.walk->NoteTape(hook->action, nullptr, count > 0 ? args[0] : nullptr);
  }
  return result;
}

int Init(PyObject* self, PyObject* args, PyObject*) {
  TapeHook* hook = reinterpret_cast<TapeHook*>(self);
  int action = 0;
  if (!PyArg_ParseTuple(args, "iO", &action, &hook->original)) return -1;
  Py_INCREF(hook->original);
  hook->action = static_cast<TapeAction>(action);
  hook->vectorcall = Call;
  if (hook->action == TapeAction::kAccessed) g_variable_accessed = hook->original;
  return 0;
}

PyMemberDef g_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(TapeHook, vectorcall), READONLY, nullptr},
    {"original", T_OBJECT_EX, offsetof(TapeHook, original), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyTypeObject g_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

}  // namespace

PyObject* VariableAccessed() { return g_variable_accessed; }

PyTypeObject* TapeHookType() {
  if (g_type.tp_name == nullptr) {
    g_type.tp_name = "terra_tf.native.TapeHook";
    g_type.tp_doc = "Stands in for a function of TensorFlow's that changes tapes: TapeHook(action, original).";
    g_type.tp_basicsize = sizeof(TapeHook);
    g_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    g_type.tp_vectorcall_offset = offsetof(TapeHook, vectorcall);
    g_type.tp_call = PyVectorcall_Call;
    g_type.tp_members = g_members;
    g_type.tp_init = Init;
    g_type.tp_new = PyType_GenericNew;
    if (PyType_Ready(&g_type) < 0) return nullptr;
  }
  return &g_type;
}

}  // namespace terra
