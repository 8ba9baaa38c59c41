// The Session: what the hooks on TensorFlow's eager entry points do for the calling thread.
//
// Three functions of `pywrap_tfe` are replaced by Hook objects once per process. Each asks the
// thread's session: outside a region a call passes on (after it has waited for values and effects
// that are still on their way); while recording it runs and is noted; in a walk it is matched.
#pragma once
#include <Python.h>

#include "iteration.h"
#include "placeholder.h"
#include "program.h"

namespace terra {

enum class Mode { kOutside, kPlain, kRecord, kWalk };

struct Session {
  Mode mode = Mode::kOutside;
  int suspended = 0;
  int64_t calls = 0;             // op calls that this thread has made so far, in whatever mode
  int calling = 0;               // calls that have been passed on and not returned
  int learning = 0;              // library calls in progress that are being learned
  int64_t looks = 0;             // at the values of tensors, from Python
  int watchers = 0;              // of variable reads that are active, as custom gradients have them
  bool nested = false;           // the call in progress has called ops of its own
  Walk* walk = nullptr;          // kWalk
  PyObject* recorder = nullptr;  // kRecord, owned
  int64_t recording = 0;         // number of the current recording
  std::shared_ptr<State> ambient;  // what eager execution keeps for the thread, as of late
  int ambient_changes = 0;         // LibraryChanges when it was made
};

Session& CurrentSession();
void SetMode(Mode mode, Walk* walk, PyObject* recorder);

// Takes a walk's thread, which may be another one, out of the walk: it goes on in plain mode.
void LeaveToPlain(Walk* walk);

// While one exists, the thread's calls pass on unmatched and unrecorded.
class Suspended {
 public:
  Suspended() { ++CurrentSession().suspended; }
  ~Suspended() { --CurrentSession().suspended; }
};

// Python objects that the native core needs; set once by terra_tf/native/__init__.py.
struct PythonParts {
  PyObject* fast_path_miss = nullptr;  // the exception class that sends gen ops to their slow path
  PyObject* variable = nullptr;        // the class that all variables inherit from
  PyObject* recover = nullptr;         // recover(iteration id): settles a failed iteration
  PyObject* waited = nullptr;          // waited(iteration id, output, seconds): Python has waited
};
PythonParts& Parts();

// Sets the exception that sends a generated op wrapper to its slow path; returns null.
PyObject* RaiseFastPathMiss();

// Runs a call that the walk gave up on in whatever mode the fallback has left.
PyObject* CallRecorded(PyObject* const* args, Py_ssize_t count, PyObject* original, CallKind call);

// Tells the recorder, if there is one, how a call has ended: with a result (which is stolen), or, where
// that is null, with the exception that is set. Returns the result.
enum class Ran { kRecorded, kNested, kInPlace };  // as in terra_tf/tracing/recorder.py
PyObject* NoteOutcome(PyObject* const* args, Py_ssize_t count, PyObject* result, CallKind call,
                      Ran ran);

// Tells the recorder that the program looked at a recorded value. False: exception set.
bool NoteRecordedRead(const Placeholder& placeholder);

// Waits for a value of an iteration that Python has left. True without `value` filled when a replay
// has settled the placeholder. False: exception set, which is the op's error where one failed.
bool WaitForClosed(const Placeholder& placeholder, tensorflow::Tensor* value);

// Tells Python that it has waited for a value since `start`, if that was worth telling. False:
// exception set.
bool NoteWait(const Iteration& iteration, int output, double start);

// Handles that another thread has used while this one was inside a region. Needs the GIL.
bool IsShared(PyObject* handle);
bool AnyShared();

// Waits until every closed iteration has finished. False: exception set.
bool SyncClosed();

// The hook's type object; an instance is made with (kind, original).
PyTypeObject* HookType();

}  // namespace terra
