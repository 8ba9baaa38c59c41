// What a walk sees of the program's gradient tapes.
//
// TensorFlow's functions that change a tape, or which tapes are active, are stood in for, so that the
// walk has a list of what happened to each tape and when. A call of `tape.gradient` makes the same ops
// as another one if its tape went through the same and the same ops were run in the meantime.
#pragma once
#include <Python.h>

#include <vector>

namespace terra {

enum class TapeAction {
  kNew,        // a tape was made and is active
  kAdd,        // an existing one became active
  kRemove,     // it is active no longer
  kWatch,      // it watches a tensor
  kVariable,   // it watches a variable
  kAccessed,   // a variable was read, and is watched by active tapes
  kStop,       // no tape records
  kRestart,
  kRecord,     // an operation was recorded that is no op (a custom gradient)
  kWatcher,    // somebody watches which variables are read
  kNoWatcher,  // no longer
};

struct TapeEvent {
  TapeAction action;
  int at = 0;          // how many nodes the walk had run
  long long about = 0;  // number of the tape, the output or the feed; address of a variable
  int watched = -1;     // kWatch of a tensor from outside: its number among these, see Walk::Settled
  bool operator==(const TapeEvent& o) const {
    return action == o.action && at == o.at && about == o.about && watched == o.watched;
  }
};

// The type of the stand-ins: TapeHook(action, original).
PyTypeObject* TapeHookType();
// TensorFlow's own `TFE_Py_TapeVariableAccessed`, once a hook for it exists.
PyObject* VariableAccessed();

}  // namespace terra
