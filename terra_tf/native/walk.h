// The Walk: the PythonRunner's native half during one co-executed iteration.
//
// It checks each op call of the user's program against the Program, answers it with placeholders,
// feeds what comes from outside, decides which blocks are taken, opens gates, and waits for what the
// program looks at. When the program does anything else it calls `on_fallback` (terra_tf/runners), which replays the validated
// ops eagerly and leaves every placeholder a plain tensor. All members need the GIL.
#pragma once
#include <memory>
#include <vector>

#include "graph_runner.h"
#include "placeholder.h"
#include "program.h"
#include "tape.h"

namespace terra {

struct Session;

class Walk {
 public:
  Walk(std::shared_ptr<Program> program, PyObject* on_fallback);
  ~Walk();

  void Launch(GraphRunner* runner);

  // One hooked call. `*matched` says whether it was the expected one; then the return value is the
  // call's result (null: a Python exception is set).
  PyObject* Match(CallKind call, PyObject* const* args, Py_ssize_t count, PyObject* original,
                  bool* matched);
  // The value of an output that something looks at. False with a Python exception; true without
  // `value` filled when a fallback has settled the placeholder.
  bool Read(int output, tensorflow::Tensor* value);
  // The program has ended. True when all went as recorded, and then every gate is open.
  bool End();
  // Whether a handle is among the graph's captures.
  bool Captures(PyObject* handle) const { return program->captured.count(handle) > 0; }
  // Calls `on_fallback(code, output)`; false with a Python exception set. Another thread than the
  // walk's own may call it, too; the iteration then goes on unrecorded.
  bool Fallback(const char* code, int output);

  // --- for the fallback ---
  // Waits until the effects behind the boundaries that have been passed are made. Where the graph
  // has failed on its way there, the base moves back to what is complete.
  bool CompleteBoundaries();
  // Ends the graph, after it has handed out what Python holds from before the base, and `needed`.
  bool StopGraph(const std::vector<int>& needed);
  // The value of an output from before the base, or one that is there. New reference.
  PyObject* MadeBefore(int output);
  // Executes the replay of node `k`, a call of a built-in function, and keeps its outputs; all that
  // comes before is settled then, too. No signal's exception can come in between. False: exception.
  bool Make(int k, PyObject* function, PyObject* args);
  // Takes outputs from after the base as far as the graph has them or, with `wait`, is able to make
  // them. Appends those that are there then; false with a Python exception set.
  bool TakeFinished(bool wait, std::vector<int>* there);
  void Close();  // no reads come here any more; drops placeholders that nobody else holds
  // Python has left in the middle and does not wait for what that takes: `on_fallback` is called
  // when somebody looks.
  void Interrupt();
  // Waits until all ops that may fail by value have succeeded, or the graph has ended.
  bool WaitChecked();
  int cursor() const { return cursor_; }
  int base() const { return base_; }
  bool launched() const { return launched_; }
  // The nodes that the program has run, ascending.
  const std::vector<int>& path() const { return path_; }
  PyObject* value(int output) const { return values_[output]; }  // borrowed, may be null
  PyObject* feed(int index) const { return feeds_[index]; }
  void set_value(int output, PyObject* tensor);
  // Outputs that Python still holds.
  std::vector<int> Alive();
  void Release();  // drops all values and feeds

  // --- delegated calls (delegate.cc) ---
  // Runs a call of a library function without its Python, if one like it is known. `*result` is null
  // then where a Python exception is set.
  bool Delegate(PyObject* function, PyObject* const* args, Py_ssize_t count, PyObject* names,
                PyObject** result);
  // Whether a call at the cursor that is not known should be learned.
  bool WantsToLearn(PyObject* function);
  // Keeps a learned call that began at a node; null if it cannot be delegated, and `hopeless` if it
  // never will.
  void Learned(int cursor, PyObject* function, std::unique_ptr<DelegatedCall> call, bool hopeless);
  // Completes a call that is being learned: what follows from the sizes of its arguments, and which of
  // them the graph has as constants.
  void Complete(DelegatedCall* call, const std::vector<PyObject*>& leaves) const;
  static pybind11::object Twin(PyObject* tensor);
  int OwnOutput(PyObject* tensor) const;  // which output of this walk it is, or -1
  // Notes what happened to the program's tapes.
  void NoteTape(TapeAction action, PyObject* tape, PyObject* about);
  int TapeNumber(PyObject* tape) const;  // -1 for one that was made before the walk
  // What a tape has been through, with the nodes that were run since it was made.
  std::vector<TapeEvent> TapeHistory(int number, std::vector<int>* nodes) const;
  const std::vector<TapeEvent>& tape_events() const { return tape_events_; }
  const std::vector<uint64_t>& sizes() const { return sizes_; }
  const std::vector<PyObject*>& feeds() const { return feeds_; }

  // The session of the thread that walks; null before and after.
  Session* session = nullptr;

  const std::shared_ptr<Iteration> iteration;
  const std::shared_ptr<Program> program;
  double python_wait_seconds = 0;
  int64_t feeds_sent = 0, fetches_read = 0, delegated_calls = 0;
  int64_t looks = 0;  // at values of the graph, or at shapes that depend on values

 private:
  // What a node that matches will put into a feed.
  struct Binding {
    int feed;
    PyObject* object;  // owned
    std::shared_ptr<Iteration> source;  // follows this one's slot; else `value` is known
    int source_slot;
    tensorflow::Tensor value;
  };
  using Dims = std::vector<tensorflow::PartialTensorShape>;

  // The node from the cursor on, past blocks that may be skipped, that fits a call; -1 if none does.
  // One that takes what it has taken before comes first, but for backward nodes, which are told apart
  // by whether their forward node has run.
  int Find(CallKind call, PyObject* const* args, Py_ssize_t count, Dims* dims);
  int Find(bool as_before, CallKind call, PyObject* const* args, Py_ssize_t count, Dims* dims);
  bool Fits(const Node& node, CallKind call, PyObject* const* args, Py_ssize_t count);
  bool AnyCaptured(PyObject* const* args, Py_ssize_t count) const;
  bool FitsArg(const Arg& arg, PyObject* x);
  bool FitsFeed(int feed, const Arg& arg, PyObject* x);
  bool FitsPlaceholder(int feed, const Arg& arg, PyObject* x, Placeholder* placeholder);
  void Bind();
  void DropBindings();
  // Goes to a node, past blocks that are skipped; `Take` decides that node's own.
  void SkipTo(int node);
  void Take();
  bool CanSkipToEnd() const;
  bool InferShapes(const Node& node, PyObject* const* args, Dims* dims);
  bool InferShapes(const Node& node, const std::vector<PyObject*>& inputs, Dims* dims);

  // A digest of what a node has taken through feeds: which tensors, for one may be passed as several
  // feeds, and the sizes of these and of what it has made, where the trace leaves them open. (An
  // output that nobody holds has the sizes that follow from these.)
  uint64_t SourcesDigest(int k) const;
  // The same for an op in place, of all that it is given.
  uint64_t GivenDigest(PyObject* const* args, Py_ssize_t count) const;
  bool AnyTapeAlive() const;
  TapeEvent Settled(TapeEvent event) const;
  bool TapeStart(int number, int* event, int* node) const;
  bool SameTape(const DelegatedCall& call, int number) const;
  long long WhichTensor(PyObject* tensor) const;
  bool FitsCall(const DelegatedCall& call, PyObject* const* args, Py_ssize_t count, PyObject* names,
                std::vector<PyObject*>* leaves);
  bool FitsPattern(const Pattern& pattern, PyObject* x, std::vector<PyObject*>* leaves,
                   const DelegatedCall& call);
  bool FitsTensor(const Pattern& pattern, PyObject* x, std::vector<PyObject*>* leaves,
                  const DelegatedCall& call);
  DelegationPlace* Place(PyObject* function);
  bool RunNodes(const DelegatedCall& call);
  bool RunNode(const Node& node, bool taped);
  bool FillFeed(const CallFeed& feed);
  bool InputObjects(const Node& node, std::vector<PyObject*>* inputs);
  PyObject* ArgObject(const Arg& arg, PyObject* number);                            // borrowed
  PyObject* OutputObject(int output, const std::vector<int64_t>* sizes = nullptr);  // borrowed
  PyObject* Cook(const Recipe& recipe, const std::vector<PyObject*>& leaves);

  // `values` are those of the outputs, where they are known, or empty.
  PyObject* Answer(const Node& node, PyObject* const* args, bool record_gradient, const Dims& dims,
                   const std::vector<tensorflow::Tensor>& values);
  // Values that follow from shapes (native/shape_values.cc); false if these are not known.
  bool ShapeValues(const Node& node, PyObject* const* args, Py_ssize_t count,
                   std::vector<tensorflow::Tensor>* values) const;
  // Runs an op on such values at once; null without an exception if that is not possible.
  PyObject* ComputeShapeValue(const Node& node, PyObject* const* args, Py_ssize_t count,
                              PyObject* original);
  PyObject* RunInPlace(int found, PyObject* const* args, Py_ssize_t count, PyObject* original);
  int FindOutcome(CallKind call, PyObject* const* args, Py_ssize_t count, PyObject* result);
  PyObject* Nested(const Node& node, PyObject* results);
  void Passed(const Node& node);
  void Ran();  // the node at the cursor
  void KeepOutputs(const Node& node, PyObject* result);
  bool RecordGradient(const Node& node, PyObject* const* args, PyObject* results);
  // Opens the gates before `boundaries[count]`; false when that has ended in a fallback instead.
  // `wanted` is the output that somebody looks at, if any.
  bool PassBoundaries(int count, int wanted);
  bool FetchInto(int output);  // settles a placeholder from its fetch
  bool AllKeptAreFetched(int end_node, int* output);
  bool DropDead(int end_node);
  void DropDeadTapes();
  SlotState WaitSlot(int slot, tensorflow::Tensor* value, bool* interrupted);

  PyObject* on_fallback_;
  int cursor_ = 0;
  int base_ = 0;    // nodes before it are settled for good: their effects are made
  int passed_ = 0;  // boundaries passed
  bool launched_ = false;
  std::vector<PyObject*> values_;  // one strong reference per output made so far
  std::vector<PyObject*> feeds_;
  std::vector<int> path_;
  std::vector<uint64_t> sizes_;  // per node of the path, see SourcesDigest
  std::vector<char> ran_;  // per node
  bool as_before_ = false;  // selects take only what they have taken before
  std::vector<Binding> bindings_;  // of the node that is being compared
  std::vector<PyObject*> tapes_;   // that were made in the walk (owned); null once they are dead
  std::vector<TapeEvent> tape_events_;
  uint64_t given_ = 0;  // GivenDigest of the op in place that has just run
  std::vector<PyObject*> watched_;  // tensors from outside that tapes watch (owned)
  bool library_checked_ = false;
};

}  // namespace terra
