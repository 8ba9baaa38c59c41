// What delegated calls take for granted: that the modules of the libraries are as they were.
//
// The dictionaries of all modules whose code a learned call has run are watched together, once in a
// walk. Where one has changed (somebody has replaced a function, say), everything that was learned
// is forgotten.
#pragma once
#include <Python.h>

namespace terra {

struct Program;

// Adds a module's dictionary.
void WatchModule(PyObject* dict);
// Whether the modules are unchanged; `checked` is a walk's own, so that it asks just once.
bool LibraryUnchanged(bool* checked, Program* program);
// How often modules have changed.
int LibraryChanges();
// False where modules change all the time.
bool LibraryMayDelegate();

}  // namespace terra
