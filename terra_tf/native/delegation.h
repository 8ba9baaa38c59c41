// Delegated calls: library calls whose Python body is skipped.
//
// When a call of a known library function (a layer, an optimizer's update, a tape's gradient) has
// once been walked through op by op, everything is known of it: which nodes it ran, what its
// arguments were, what it returned, and on what state of Python's it depended. A DelegatedCall holds
// that. Where a later call fits it, the walk runs the nodes by itself and hands out the results. Where
// it does not, the library's own Python runs as ever, so a call that is not delegated costs speed and
// nothing else. terra_tf/delegation learns the calls.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <utility>
#include <vector>

#include "iteration.h"
#include "state.h"
#include "tape.h"

namespace terra {

struct Arg;
struct Program;
class Walk;

// What an argument has to be like.
struct Pattern {
  enum class Kind {
    kTensor,    // an EagerTensor; it is leaf `leaf`
    kValue,     // a Python value: the same object, or an equal plain value
    kSequence,  // a list or tuple, item by item
    kMapping,   // a dict: the same keys in the same order
    kInstance,  // an object of a class, with attributes of its own
    kTape,      // the tape that was the walk's tape number `index`
    kSlice,     // a slice: start, stop and step are its `items`
  };
  enum class Source { kAny, kOutput, kFeed };  // of a tensor
  Kind kind = Kind::kValue;
  std::unique_ptr<Same> value;  // kValue; kSequence, kInstance: the class
  std::vector<std::pair<pybind11::object, Pattern>> named;  // kMapping, kInstance; of a tensor
  std::vector<Pattern> items;                               // kSequence
  int leaf = -1;
  Source source = Source::kAny;
  int index = -1;  // of the output or feed; of the tape
  int dtype = 0;
  bool sized = false;  // `dims` are known
  std::vector<int64_t> dims;
};

// What assigning to a variable gives: another view of the variable, of which hardly anybody takes
// notice. It is kept and handed out again as long as nobody else has kept it.
class UnreadView {
 public:
  explicit UnreadView(pybind11::object make) : make_(std::move(make)) {}
  PyObject* Get(PyObject* variable);  // new reference; null: exception

 private:
  pybind11::object make_, view_;
  uint64_t version_ = 0;  // of its attributes
};

// How a value is made that the call hands out.
struct Recipe {
  enum class Kind { kLeaf, kOutput, kValue, kSequence, kMapping, kMake, kUnread };
  Kind kind = Kind::kValue;
  int index = -1;                 // of the leaf or the output
  std::unique_ptr<Same> value;    // kValue; kSequence: the class; kMake: what is called
  std::vector<Recipe> items;
  std::vector<pybind11::object> keys;  // kMapping; kMake: keeps `value` alive
  std::vector<std::pair<pybind11::object, Recipe>> attributes;  // of an output
  std::unique_ptr<UnreadView> unread;  // kUnread: of the variable `value`
};

// A feed that the call's nodes fill.
struct CallFeed {
  enum class Source { kLeaf, kOutput, kValue };
  int at = 0;  // before which of the call's nodes
  int feed = -1;
  const Arg* arg = nullptr;
  Source source = Source::kLeaf;
  int index = -1;
  pybind11::object value;
};

// A call reads a variable, which active tapes then watch, or stops them from recording for a while.
struct TapeStep {
  int at = 0;  // before which of the call's nodes
  TapeAction action = TapeAction::kAccessed;
  std::unique_ptr<Same> variable;
};

struct DelegatedCall {
  std::vector<Pattern> arguments;
  std::vector<std::pair<pybind11::object, Pattern>> keywords;
  bool taped = false;  // a tape was active
  int leaves = 0;
  std::vector<int> aliases;  // per leaf: the first leaf that is the same tensor
  std::vector<std::pair<int, const Arg*>> constants;  // leaf -> what the graph has in its place
  std::vector<std::pair<int, pybind11::object>> contents;  // leaf -> a tensor that it has to equal
  std::shared_ptr<State> state;    // null: it depends on nothing but its arguments
  std::shared_ptr<State> ambient;  // what eager execution keeps for the thread; null: part of `state`
  std::vector<int> nodes;           // in order
  std::vector<int> needs_feeds;     // that have to be there before
  std::vector<CallFeed> feeds;             // known when the call begins
  std::vector<CallFeed> feeds_on_the_way;  // outputs of the call's own nodes
  std::vector<TapeStep> tape_steps;  // what the call does to tapes, in order
  std::vector<TapeEvent> tape;      // kTape: what the tape has been through, from its start
  std::vector<int> tape_nodes;      // the nodes since then
  std::vector<uint64_t> tape_sizes;  // and the sizes of what these made; see Walk::SourcesDigest
  // What follows from the sizes of the arguments: (output, a tensor with its value).
  std::vector<std::pair<int, pybind11::object>> shape_values;
  pybind11::object after;           // called with the arguments at the end, or null
  Recipe result;
  bool dynamic = false;             // shapes have to be inferred
  bool used = false;                // since it was learned
};

// Calls that may come at one place of the walk.
struct DelegationPlace {
  PyObject* function = nullptr;  // the LibraryCall
  std::vector<std::shared_ptr<DelegatedCall>> calls;  // used last first
  int failures = 0;  // in a row, of learning
  int unused = 0;    // how many of `calls` have never been used
  int64_t rest = 0;  // iterations that learning is left off
};

// A call of a function around ops that is being learned (op_call.cc).
class OpCall {
 public:
  // `ambient` makes a State of what eager execution keeps for the thread.
  // `unread` makes what an assignment to a variable gives.
  OpCall(Walk* walk, PyObject* ambient, PyObject* unread);
  // Before the call: notes the arguments; false if there is one of a kind that is not learned.
  bool Describe(PyObject* const* args, Py_ssize_t count, PyObject* names);
  // After it: what is known of it then, or null.
  std::unique_ptr<DelegatedCall> Finish(PyObject* result);

 private:
  bool Describe(PyObject* x, Pattern* pattern);
  bool DescribeTensor(PyObject* x, Pattern* pattern);
  bool DescribeVariable(PyObject* x);
  bool Describe(PyObject* result, Recipe* recipe);
  bool DescribeView(PyObject* view, Recipe* recipe);
  bool DescribeFeeds();
  bool DescribeTape();

  Walk* walk_;
  std::unique_ptr<DelegatedCall> call_;
  std::vector<PyObject*> leaves_;  // borrowed from the call's arguments
  std::vector<char> bound_;        // per feed: there before the call
  PyObject* unread_;
  std::vector<PyObject*> variables_;  // borrowed from the arguments
  size_t start_, events_;
  int64_t walk_looks_, looks_;
};

// The State of the calling thread's eager execution; made anew where it has changed. Null where ops
// run somebody else's code.
std::shared_ptr<State> AmbientState(PyObject* ambient);

// The argument among some that is carried by a feed, or null.
const Arg* FindFeed(const std::vector<Arg>& args, int feed);

// The types of the objects that stand in for library functions.
// LibraryCall(original, learn, before, listed): `before(*args)` is called first inside a walk;
// argument number `listed`, if it is an iterator, becomes a list; `learn(self, args, keywords)` makes
// the call and learns it.
PyTypeObject* LibraryCallType();
// OpFunction(original, ambient, unread): a function around ops, or a method; see OpCall.
PyTypeObject* OpFunctionType();

}  // namespace terra
