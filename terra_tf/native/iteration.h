// What one co-executed iteration shares between Python and the graph.
//
// An Iteration is a row of write-once slots. Feeds and gates are set by the PythonRunner and awaited
// by kernels; fetches and segment marks are set by kernels and awaited by the PythonRunner. Kernels
// find the Iteration by its number, which is the graph's first argument, so one graph serves any
// number of iterations in flight. Nothing here touches a Python object or needs the GIL.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tensorflow/c/eager/c_api_experimental.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "timeline.h"

namespace terra {

class Walk;

// What the TraceGraph knows of one op output.
struct OutputSpec {
  int dtype = 0;
  bool static_shape = true;  // `dims` is exact; else the value must be there to know the shape
  std::vector<int64_t> dims;
  int fetch = -1;  // slot through which the graph hands the value out, or -1: not fetched
  TFE_TensorHandle* known = nullptr;  // the value, where it follows from what was recorded (owned)
  bool by_values = false;  // its shape depends on values
  int gate = 0;    // how many gates have to be open before the graph can compute it
};
using OutputSpecs = std::vector<OutputSpec>;

enum class SlotState { kPending, kReady, kFailed };

class Iteration : public std::enable_shared_from_this<Iteration> {
 public:
  static std::shared_ptr<Iteration> Make(int slots, std::shared_ptr<const OutputSpecs> outputs);
  static std::shared_ptr<Iteration> Find(int64_t id);
  ~Iteration();

  const int64_t id;
  const std::shared_ptr<const OutputSpecs> outputs;
  // The walk that fills this iteration while Python is inside it; null afterwards. Read and written
  // with the GIL held.
  Walk* walk = nullptr;
  // Python has left the iteration and every gate is open: the graph ends without Python's help.
  std::atomic<bool> closed{false};
  // Failures of the GraphRunner that runs it which were not recovered yet, and those of all runners.
  // A failure counts once the iteration is closed: before that, Python meets it by itself. An
  // interrupt counts as one, too.
  std::shared_ptr<std::atomic<int>> failures;
  static std::atomic<int> all_failures;

  // Fills a slot once and resumes whoever waits for it.
  void Set(int slot, tensorflow::Tensor value);
  // Makes `slot` follow a slot of another iteration (an unfinished value crosses iterations).
  void Follow(int slot, const std::shared_ptr<Iteration>& source, int source_slot);
  // A kernel waits without holding a thread; its first output becomes the value when `emit`.
  void Await(int slot, bool emit, tensorflow::OpKernelContext* ctx,
             tensorflow::AsyncOpKernel::DoneCallback done);
  // Python waits at most `milliseconds` (call without the GIL).
  SlotState Wait(int slot, int milliseconds, tensorflow::Tensor* value);
  SlotState Peek(int slot, tensorflow::Tensor* value);

  // Python has left; the caller opens the gates afterwards.
  void MarkClosed();
  // Python has left in the middle: the graph makes what needs no further gate, and what is missing
  // then is made by a replay.
  void MarkInterrupted();
  bool interrupted() const { return interrupted_; }
  // A replay has put right what was missing.
  void MarkRecovered();
  // The graph's end. `WaitFinished` returns whether it came in time.
  void Finish(const absl::Status& status);
  bool WaitFinished(int milliseconds);
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  absl::Status status();

  // The slots that kernels wait for at present; for people who look for what holds a graph up.
  std::vector<int> Awaited();

  void Cancel();
  TFE_CancellationManager* cancellation() { return cancellation_; }
  // When it ran and waited.
  const std::shared_ptr<Timeline> timeline = std::make_shared<Timeline>();
  // Seconds in which at least one kernel of this iteration waited for Python.
  double graph_wait_seconds();

 private:
  Iteration(int slots, std::shared_ptr<const OutputSpecs> outputs);
  using Callback = std::function<void(const absl::Status&, const tensorflow::Tensor&)>;
  struct Waiter {
    tensorflow::OpKernelContext* ctx;  // identifies it for cancellation; null for a follower
    Callback resume;
  };
  struct Slot {
    bool ready = false;
    tensorflow::Tensor value;
    std::vector<Waiter> waiters;
  };
  void Abandon(int slot, tensorflow::OpKernelContext* ctx);
  void CountWaiter(int change);  // holds mu_
  void CountFailure();           // holds mu_; once

  std::mutex mu_;
  std::condition_variable changed_;
  std::vector<Slot> slots_;
  absl::Status status_;
  std::atomic<bool> finished_{false};
  std::atomic<bool> interrupted_{false};
  bool counts_as_failure_ = false;
  TFE_CancellationManager* cancellation_;
  int waiting_ = 0;
  double waiting_since_ = 0, waited_ = 0;
};

}  // namespace terra
