// The GraphRunner: a native thread that executes generated graphs, one iteration after the other.
//
// It never takes the GIL. The PythonRunner hands it launches and learns of their end through the
// Iteration. Launches of one runner run in order, so an iteration sees all that the one before did.
#pragma once
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "iteration.h"

namespace terra {

class GraphRunner {
 public:
  explicit GraphRunner(TFE_Context* ctx);
  ~GraphRunner();  // lets closed iterations finish, cancels the others

  // Queues `function` with the arguments (iteration number, captures...). Takes over one reference
  // to each handle of `captures`.
  void Launch(std::shared_ptr<Iteration> iteration, std::string function, std::string config,
              std::vector<TFE_TensorHandle*> captures);

  // Waits (without the GIL) until no launch of any runner is unfinished, except those of iterations
  // whose Python is still inside and of which nobody may wait. False after `milliseconds`.
  static bool WaitClosed(int milliseconds);
  // Whether any launch is unfinished: one relaxed load, for the hot path.
  static bool AnyUnfinished();
  // Whether a closed iteration has failed and was not recovered yet.
  static bool AnyFailed();
  // At the end of the process, when Python is gone: cancels every launch and waits until none runs,
  // because kernels must not outlive what the process tears down next.
  static void StopAll();
  // For a forked child, which has none of the threads: nothing is unfinished, nothing is waited for.
  static void ForgetAll();

 private:
  struct Launched {
    std::shared_ptr<Iteration> iteration;
    std::string function, config;
    std::vector<TFE_TensorHandle*> captures;
  };
  // Shared with the thread, which may outlive the runner by the end of its last graph.
  struct State {
    TFE_Context* ctx;
    std::mutex mu;
    std::condition_variable changed;
    std::deque<Launched> queue;
    std::shared_ptr<Iteration> running;
    bool stopping = false;
    std::shared_ptr<std::atomic<int>> failures = std::make_shared<std::atomic<int>>(0);
  };
  static void Run(std::shared_ptr<State> state);
  static absl::Status Execute(TFE_Context* ctx, const Launched& launch);

  std::shared_ptr<State> state_;
};

}  // namespace terra
