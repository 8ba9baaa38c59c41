// The Program: one op sequence of the TraceGraph in the form that the matcher checks calls against.
//
// Built once per generated graph from Python (terra_tf/generation/program.py) and read-only after
// that, but for the library calls that are learned on the way. Node k says which call the user's program is expected to make, with which arguments, and what
// it gets back. The nodes are cut into blocks, of which an iteration may skip those that have a slot
// for the decision.
#pragma once
#include <Python.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "delegation.h"
#include "iteration.h"
#include "shapes.h"

namespace terra {

enum class CallKind { kFastPath, kExecute, kExecuteCancelable };

enum class ArgKind {
  kOutput,    // the output `index` of an earlier node
  kFeed,      // a tensor from outside: goes into feed `index`, dtype and shape as recorded
  kConstant,  // a small tensor from outside whose value was always the same: compared by value
  kObject,    // this very object (a resource handle)
  kPython,    // an equal Python value of the same type
  kPythonFeed,  // a Python number or array that varies: converted, then as kFeed
  kList,      // a list or tuple of the above
  kArray,     // a Python value that can change in place: converted, then as kConstant
  kSelect,    // any tensor, an earlier node's output included: goes into feed `index`
};

struct Arg {
  ArgKind kind = ArgKind::kPython;
  int index = -1;
  int feed = -1;  // kOutput of an in-place node: the feed that takes its value into the graph;
                  // kSelect: how many gates may have to be open before an output is computed
  PyObject* object = nullptr;  // kObject, kPython: what to compare with; else kept for gradients
  int dtype = 0;
  std::vector<int64_t> dims;  // see SameShape
  std::string bytes;       // kConstant
  std::vector<int> known;  // kSelect: the outputs that it has been, ascending
  std::vector<Arg> items;  // kList
};

// Whether a node's outputs follow from shapes, and how; see native/shape_values.cc.
enum class ShapeValue {
  kNone,
  kShape,  // the inputs' sizes
  kSize,   // their product
  kRank,   // their number
  kComputed,  // an op on such values
};

enum class ResultKind { kNone, kSingle, kList };

struct Node {
  PyObject* op = nullptr;  // str
  CallKind call = CallKind::kFastPath;
  bool misses = false;    // the fast path refuses this call; its slow path follows as other nodes
  bool fails = false;     // in place, and it raised an error
  bool in_place = false;  // runs eagerly where eager would have
  int boundary = -1;      // in place, and this boundary has to be passed before
  std::vector<Arg> args;
  PyObject* gradient_attrs = nullptr;  // complete attributes, for tapes
  PyObject* gradient_inputs = nullptr;  // per tensor input: the recorded tensor, or None: as passed
  int first_output = 0, num_outputs = 0;
  ResultKind result = ResultKind::kSingle;
  std::vector<int> groups;  // of a nested result: -1 for a tensor, else the length of a list
  int forward = -1;  // a backward node's forward node: where that was skipped, this one is
  ShapeValue shape_value = ShapeValue::kNone;
  std::shared_ptr<ShapeFunction> shapes;  // where the outputs' shapes follow from the inputs'
  PyObject* numbers = nullptr;  // for `shapes`: as gradient_inputs
  std::vector<int> feeds;       // that it takes
  std::vector<int> open_feeds;  // of these, those whose sizes are not always the same
};

// Nodes that an iteration runs all or none of.
struct Block {
  int start = 0, end = 0;
  int taken_slot = -1;  // for the decision, or -1: never skipped
  int64_t taken = 0, skipped = 0;  // by iterations so far
};

// A place between two nodes where effects before it become visible, behind one gate.
struct Boundary {
  int end = 0;        // nodes before this one are covered
  int gate_slot = 0;  // opened by Python
  int done_slot = 0;  // set by the graph when the effects of this segment have been made
  int resume_slot = -1;  // set by Python when the op in place at this boundary has run
};

struct Program {
  std::vector<Node> nodes;
  std::vector<Boundary> boundaries;  // ascending; the last one covers everything
  std::vector<Block> blocks;
  std::vector<int> block_at;  // node -> the block that begins with it, or -1
  std::vector<int> outputs_before;  // see OutputsBefore
  std::vector<char> made_in_place;  // output -> whether its node runs in place
  std::shared_ptr<OutputSpecs> outputs = std::make_shared<OutputSpecs>();
  int num_feeds = 0;
  int checked_slot = -1;  // set by the graph when every op that may fail by value has succeeded
  int num_slots = 0;  // feeds first, so feed k is slot k
  std::string function, config;
  std::vector<TFE_TensorHandle*> captures;
  std::unordered_set<PyObject*> captured;  // the same as Python objects
  std::vector<PyObject*> owned;  // keeps every object above alive
  // The node at the cursor → what is known of library calls that begin there.
  std::unordered_map<int, std::vector<DelegationPlace>> delegations;
  int library_changes = 0;  // when they were learned

  // How many outputs the nodes before one have.
  int OutputsBefore(int node) const {
    return node < static_cast<int>(outputs_before.size()) ? outputs_before[node] : outputs->size();
  }

  ~Program() {
    for (TFE_TensorHandle* handle : captures) TFE_DeleteTensorHandle(handle);
    for (OutputSpec& output : *outputs) {
      if (output.known != nullptr) TFE_DeleteTensorHandle(output.known);
      output.known = nullptr;
    }
    for (PyObject* object : owned) Py_DECREF(object);
  }
  PyObject* Own(PyObject* object) {
    if (object != nullptr) {
      Py_INCREF(object);
      owned.push_back(object);
    }
    return object;
  }
};

}  // namespace terra
