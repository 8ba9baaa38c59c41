// A transfer is one message on its way: what `isend` and `irecv` return and `wait` waits for.
#ifndef PIPELINE_NATIVE_TRANSFER_H_
#define PIPELINE_NATIVE_TRANSFER_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/tensor.h"

namespace pipeline {

class Link;

// Nanoseconds of the monotonic clock, which all processes of a host share.
inline int64_t Now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// Ended exactly once, by `Finish`. Until then its link writes the fields; afterwards they rest.
class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  Transfer(int64_t tag, bool buffered) : tag(tag), buffered(buffered) {}

  const int64_t tag;
  // Sends only: may travel before the peer posts its receive, as far as the window allows.
  const bool buffered;

  // Where a send goes, and the transfer that has to end before it is posted; null once it is.
  std::shared_ptr<Link> link;
  std::shared_ptr<Transfer> after;
  std::vector<tensorflow::Tensor> tensors;
  uint64_t bytes = 0;
  // When it was asked for here, when its data began to move and when it was through (0: not yet).
  // A message may have arrived before its receive was posted.
  // `peer_posted` of a receive is when the peer asked for it, by the peer's clock.
  int64_t posted = 0, peer_posted = 0, started = 0, finished = 0;

  void Finish(absl::Status status);

  // True when it has ended within `seconds`.
  bool Wait(double seconds);

  // Calls `callback` when it has ended, maybe at once.
  void WhenDone(std::function<void()> callback);

  // What it ended with; only after it has ended.
  absl::Status status();

  // A number by which ops find the transfer as long as somebody holds it.
  int64_t Register();
  static std::shared_ptr<Transfer> Find(int64_t id);
  ~Transfer();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  absl::Status status_;
  std::vector<std::function<void()>> callbacks_;
  int64_t id_ = -1;
};

}  // namespace pipeline

#endif  // PIPELINE_NATIVE_TRANSFER_H_
