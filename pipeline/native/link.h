// A link carries messages (a tag and some tensors) to and from one peer, over a channel.
//
// Messages of one tag arrive in the order in which they were sent; those of different tags may
// overtake each other. Memory is bounded by credits: a message travels when
//   1. the peer has posted a receive for it (one credit per receive), or
//   2. it is `buffered` and fits into what is left of the window, a number of bytes that the peer
//      keeps for messages which nobody has asked for yet.
// Until then it stays where it is, in the sender's own tensors. Two threads serve a link, one for
// each direction; the one that reads never waits for anything but data, so two links cannot block
// each other.
#ifndef PIPELINE_NATIVE_LINK_H_
#define PIPELINE_NATIVE_LINK_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "channel.h"
#include "transfer.h"

namespace pipeline {

// What a link has carried so far.
struct LinkCounters {
  uint64_t messages_sent = 0, messages_received = 0;
  uint64_t bytes_sent = 0, bytes_received = 0;
  double cpu_seconds = 0;  // of its two threads
};

class Link {
 public:
  Link(int peer, std::unique_ptr<Channel> channel, uint64_t window);
  ~Link();

  int peer() const { return peer_; }
  // The socket to watch for the end of the peer; -1 if there is nothing to watch.
  int companion() const { return peer_ended_ ? -1 : channel_->companion(); }

  // The companion has shown the peer's end. What the peer still sent is read, then the link fails.
  void PeerEnded();

  void Send(std::shared_ptr<Transfer> transfer);
  void Receive(std::shared_ptr<Transfer> transfer);

  // Ends every transfer under way and to come with an error that says `why`. Where the channel
  // just ends, and nobody has said why, the error is one of the kind `Unavailable` instead.
  void Fail(const std::string& why);

  // Tells the peer that this process gives up; the peer's link fails with `why`.
  void Abort(const std::string& why);

  // Sends what is asked for already, for up to `seconds`; then ends the link.
  void Close(double seconds);

  LinkCounters counters();

 private:
  // The order of messages of one tag, and the right to send them.
  struct Outgoing {
    uint64_t credited = 0, sent = 0;
  };
  struct Incoming {
    std::deque<std::shared_ptr<Transfer>> posted;   // receives without a message
    std::deque<std::shared_ptr<Transfer>> arrived;  // messages without a receive
  };
  struct Control {
    uint32_t kind;
    int64_t tag;
    uint64_t bytes;
    std::string text;
  };

  void Write();
  void Read();
  bool WriteMessage(Transfer& transfer, bool from_window);
  bool ReadMessage(const struct Frame& frame);
  bool ReadControl(const struct Frame& frame);
  std::shared_ptr<Transfer> NextToSend(bool* from_window);
  absl::Status Ended() const;
  void End(absl::Status status);

  const int peer_;
  const std::unique_ptr<Channel> channel_;
  std::atomic<bool> peer_ended_{false};
  std::atomic<bool> peer_closed_{false};  // it said so, and did not just end

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<Control> controls_;
  std::deque<std::shared_ptr<Transfer>> sends_;
  std::unordered_map<int64_t, Outgoing> outgoing_;
  std::unordered_map<int64_t, Incoming> incoming_;
  std::shared_ptr<Transfer> sending_;
  uint64_t window_;  // bytes that may still be sent unasked
  LinkCounters counters_;
  double writer_cpu_seconds_ = 0, reader_cpu_seconds_ = 0;
  bool failed_ = false;
  bool idle_ = true;  // the writer has nothing under way
  absl::Status status_;  // what it ended with

  std::thread writer_, reader_;
};

}  // namespace pipeline

#endif  // PIPELINE_NATIVE_LINK_H_
