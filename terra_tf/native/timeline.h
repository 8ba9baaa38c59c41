// When the two runners of one iteration worked and when they waited, for people to look at.
//
// Outlives the Iteration and its Walk, so that a report can be made of iterations that are long over.
// Times are seconds of CLOCK_MONOTONIC, which is also Python's time.perf_counter().
#pragma once
#include <chrono>
#include <mutex>
#include <vector>

namespace terra {

inline double MonotonicSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Timeline {
 public:
  struct Span {
    double start, end;
  };
  // Longer rows are cut: an iteration with more waits than that is told by its first ones.
  static constexpr size_t kMostSpans = 256;

  void Launched() { Note(&launched_); }
  void Started() { Note(&started_); }
  void Finished() { Note(&finished_); }
  void GraphWaited(double start, double end) { Add(&graph_waits_, start, end); }
  void PythonWaited(double start, double end) { Add(&python_waits_, start, end); }

  double launched() { return Get(launched_); }
  double started() { return Get(started_); }
  double finished() { return Get(finished_); }
  std::vector<Span> graph_waits() { return Copy(graph_waits_); }
  std::vector<Span> python_waits() { return Copy(python_waits_); }

 private:
  void Note(double* when) {
    std::lock_guard<std::mutex> lock(mu_);
    *when = MonotonicSeconds();
  }
  double Get(const double& when) {
    std::lock_guard<std::mutex> lock(mu_);
    return when;
  }
  void Add(std::vector<Span>* spans, double start, double end) {
    std::lock_guard<std::mutex> lock(mu_);
    if (spans->size() < kMostSpans) spans->push_back({start, end});
  }
  std::vector<Span> Copy(const std::vector<Span>& spans) {
    std::lock_guard<std::mutex> lock(mu_);
    return spans;
  }

  std::mutex mu_;
  double launched_ = 0, started_ = 0, finished_ = 0;
  std::vector<Span> graph_waits_, python_waits_;
};

}  // namespace terra
