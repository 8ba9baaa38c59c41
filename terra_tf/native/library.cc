#include "library.h"

#include <memory>
#include <vector>

#include "program.h"
#include "state.h"

namespace terra {
namespace {

// So many changes are one too many, and one in so many walks.
constexpr int kMostChanges = 256, kWalksOfChange = 32;
auto* g_modules = new std::vector<PyObject*>;  // owned
auto* g_state = new std::unique_ptr<State>(new State);
int g_changes = 0;
int64_t g_walks = 0;

}  // namespace

void WatchModule(PyObject* dict) {
  for (PyObject* known : *g_modules) {
    if (known == dict) return;
  }
  Py_INCREF(dict);
  g_modules->push_back(dict);
  (*g_state)->AddDict(dict);
}

bool LibraryUnchanged(bool* checked, Program* program) {
  g_walks += !*checked;
  if (!*checked && !(*g_state)->Holds()) {
    ++g_changes;
    g_state->reset(new State);
    for (PyObject* dict : *g_modules) (*g_state)->AddDict(dict);
  }
  *checked = true;
  if (program->library_changes == g_changes) return true;
  program->library_changes = g_changes;
  program->delegations.clear();
  return true;
}

int LibraryChanges() { return g_changes; }

bool LibraryMayDelegate() { return g_changes < kMostChanges + g_walks / kWalksOfChange; }

}  // namespace terra
