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
  ~GraphRunner();  // waits for closed iterations, cancels the others, joins the thread

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
  static void MarkRecovered();

 private:
  struct Launched {
    std::shared_ptr<Iteration> iteration;
    std::string function, config;
    std::vector<TFE_TensorHandle*> captures;
  };
  void Run();
  absl::Status Execute(const Launched& launch);

  TFE_Context* ctx_;
  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<Launched> queue_;
  std::shared_ptr<Iteration> running_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace terra
