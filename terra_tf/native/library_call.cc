// The objects that stand in for library functions: they ask the walk whether the call is known.
#include <Python.h>
#include <structmember.h>

#include "delegation.h"
#include "session.h"
#include "walk.h"

namespace terra {
namespace {

struct LibraryCall {
  PyObject_HEAD;
  vectorcallfunc vectorcall;
  PyObject* original;
  PyObject* learn;
  PyObject* before;  // or null
  int listed;        // or -1
};

// Whether somebody traces or profiles this thread's Python: then library code runs as ever.
bool IsWatched() {
  PyThreadState* thread = PyThreadState_Get();
  return thread->c_tracefunc != nullptr || thread->c_profilefunc != nullptr;
}

PyObject* Learn(LibraryCall* hook, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  PyObject* positional = PyTuple_New(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_INCREF(args[i]);
    PyTuple_SET_ITEM(positional, i, args[i]);
  }
  PyObject* keywords = PyDict_New();
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyDict_SetItem(keywords, PyTuple_GET_ITEM(names, i), args[count + i]);
  }
  PyObject* result = PyObject_CallFunctionObjArgs(hook->learn, reinterpret_cast<PyObject*>(hook),
                                                  positional, keywords, nullptr);
  Py_DECREF(positional);
  Py_DECREF(keywords);
  return result;
}

struct OpFunction {  // begins like a LibraryCall
  PyObject_HEAD;
  vectorcallfunc vectorcall;
  PyObject* original;
  PyObject* ambient;
  PyObject* unread;
};

PyObject* CallAndLearn(OpFunction* function, PyObject* const* args, size_t nargsf, PyObject* names) {
  Walk* walk = CurrentSession().walk;
  const int cursor = walk->cursor();
  OpCall call(walk, function->ambient, function->unread);
  const bool known = call.Describe(args, PyVectorcall_NARGS(nargsf), names);
  PyObject* result = PyObject_Vectorcall(function->original, args, nargsf, names);
  const Session& session = CurrentSession();
  if (result == nullptr || session.walk != walk || session.mode != Mode::kWalk) return result;
  walk->Learned(cursor, reinterpret_cast<PyObject*>(function),
                known ? call.Finish(result) : nullptr, false);
  return result;
}

PyObject* CallOp(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  OpFunction* function = reinterpret_cast<OpFunction*>(self);
  const Session& session = CurrentSession();
  if (session.mode != Mode::kWalk || session.suspended > 0 || session.learning > 0 || IsWatched()) {
    return PyObject_Vectorcall(function->original, args, nargsf, names);
  }
  Walk* walk = session.walk;
  PyObject* result = nullptr;
  if (walk->Delegate(self, args, PyVectorcall_NARGS(nargsf), names, &result)) return result;
  if (walk->WantsToLearn(self)) return CallAndLearn(function, args, nargsf, names);
  return PyObject_Vectorcall(function->original, args, nargsf, names);
}

PyObject* CallInWalk(LibraryCall* hook, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  Session& session = CurrentSession();
  PyObject* self = reinterpret_cast<PyObject*>(hook);
  if (hook->before != nullptr) {
    PyObject* done = PyObject_Vectorcall(hook->before, args, count, names);
    if (done == nullptr) return nullptr;
    Py_DECREF(done);
    if (session.mode != Mode::kWalk) return PyObject_Vectorcall(hook->original, args, count, names);
  }
  if (session.learning > 0) return Learn(hook, args, count, names);
  Walk* walk = session.walk;
  PyObject* result = nullptr;
  if (walk->Delegate(self, args, count, names, &result)) return result;
  if (walk->WantsToLearn(self)) return Learn(hook, args, count, names);
  return PyObject_Vectorcall(hook->original, args, count, names);
}

PyObject* Call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  LibraryCall* hook = reinterpret_cast<LibraryCall*>(self);
  const Session& session = CurrentSession();
  const Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  if (session.mode != Mode::kWalk || session.suspended > 0 ||
      (session.learning == 0 && IsWatched())) {
    return PyObject_Vectorcall(hook->original, args, nargsf, names);
  }
  if (hook->listed >= 0 && hook->listed < count && PyIter_Check(args[hook->listed])) {
    PyObject* list = PySequence_List(args[hook->listed]);
    if (list == nullptr) return nullptr;
    const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    std::vector<PyObject*> copy(args, args + count + named);
    copy[hook->listed] = list;
    PyObject* result = CurrentSession().mode == Mode::kWalk
                           ? CallInWalk(hook, copy.data(), count, names)
                           : PyObject_Vectorcall(hook->original, copy.data(), count, names);
    Py_DECREF(list);
    return result;
  }
  return CallInWalk(hook, args, count, names);
}

PyObject* Get(PyObject* self, PyObject* instance, PyObject*) {
  if (instance == nullptr || instance == Py_None) {
    Py_INCREF(self);
    return self;
  }
  return PyMethod_New(self, instance);
}

// Everything else that somebody asks about it is the original's.
PyObject* GetAttribute(PyObject* self, PyObject* name) {
  PyObject* found = PyObject_GenericGetAttr(self, name);
  if (found != nullptr || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
  PyErr_Clear();
  return PyObject_GetAttr(reinterpret_cast<LibraryCall*>(self)->original, name);
}

PyObject* Original(PyObject* self, void* name) {
  return PyObject_GetAttrString(reinterpret_cast<LibraryCall*>(self)->original,
                                static_cast<const char*>(name));
}

int Init(PyObject* self, PyObject* args, PyObject*) {
  LibraryCall* hook = reinterpret_cast<LibraryCall*>(self);
  PyObject* before = Py_None;
  hook->listed = -1;
  if (!PyArg_ParseTuple(args, "OO|Oi", &hook->original, &hook->learn, &before, &hook->listed)) {
    return -1;
  }
  Py_INCREF(hook->original);
  Py_INCREF(hook->learn);
  hook->before = before == Py_None ? nullptr : before;
  Py_XINCREF(hook->before);
  hook->vectorcall = Call;
  return 0;
}

PyMemberDef g_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(LibraryCall, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT_EX, offsetof(LibraryCall, original), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

char g_doc[] = "__doc__", g_module[] = "__module__";
PyGetSetDef g_getset[] = {{"__doc__", Original, nullptr, nullptr, g_doc},
                          {"__module__", Original, nullptr, nullptr, g_module},
                          {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject g_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

int InitOpFunction(PyObject* self, PyObject* args, PyObject*) {
  OpFunction* function = reinterpret_cast<OpFunction*>(self);
  if (!PyArg_ParseTuple(args, "OOO", &function->original, &function->ambient, &function->unread)) {
    return -1;
  }
  Py_INCREF(function->original);
  Py_INCREF(function->ambient);
  Py_INCREF(function->unread);
  function->vectorcall = CallOp;
  return 0;
}

PyMemberDef g_op_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(OpFunction, vectorcall), READONLY, nullptr},
    {"__wrapped__", T_OBJECT_EX, offsetof(OpFunction, original), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyTypeObject g_op_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

}  // namespace

PyTypeObject* LibraryCallType() {
  if (g_type.tp_name == nullptr) {
    g_type.tp_name = "terra_tf.native.LibraryCall";
    g_type.tp_basicsize = sizeof(LibraryCall);
    g_type.tp_flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
    g_type.tp_vectorcall_offset = offsetof(LibraryCall, vectorcall);
    g_type.tp_call = PyVectorcall_Call;
    g_type.tp_getattro = GetAttribute;
    g_type.tp_descr_get = Get;
    g_type.tp_members = g_members;
    g_type.tp_getset = g_getset;
    g_type.tp_init = Init;
    g_type.tp_new = PyType_GenericNew;
    if (PyType_Ready(&g_type) < 0) return nullptr;
  }
  return &g_type;
}

PyTypeObject* OpFunctionType() {
  if (g_op_type.tp_name == nullptr) {
    g_op_type.tp_name = "terra_tf.native.OpFunction";
    g_op_type.tp_basicsize = sizeof(OpFunction);
    g_op_type.tp_flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
    g_op_type.tp_getattro = GetAttribute;
    g_op_type.tp_descr_get = Get;
    g_op_type.tp_getset = g_getset;
    g_op_type.tp_vectorcall_offset = offsetof(OpFunction, vectorcall);
    g_op_type.tp_call = PyVectorcall_Call;
    g_op_type.tp_members = g_op_members;
    g_op_type.tp_init = InitOpFunction;
    g_op_type.tp_new = PyType_GenericNew;
    if (PyType_Ready(&g_op_type) < 0) return nullptr;
  }
  return &g_op_type;
}

}  // namespace terra
