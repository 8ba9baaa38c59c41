#include "link.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace pipeline {

using tensorflow::Tensor;

namespace {

enum Kind : uint32_t {
  kMessage = 1,      // `count` tensor headers and the tensors' bytes follow
  kCredit = 2,       // a receive was posted for the tag
  kTaken = 3,        // a message of `bytes`, sent from the window, was matched: room again
  kTakenCredit = 4,  // the same, and its receive had not been announced by a credit
  kAbort = 5,        // the peer gives up; a text of `bytes` follows
  kBye = 6,          // the peer closes the link; nothing follows
};

constexpr uint32_t kMaxTensors = 1 << 16;
constexpr int kMaxDims = 8;
constexpr uint64_t kMaxText = 1 << 16;

struct TensorHeader {
  int32_t dtype;
  int32_t rank;
  int64_t dims[kMaxDims];
};

double CpuSeconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec + 1e-9 * time.tv_nsec;
}

// Lets the system back the inside of a large fresh tensor with large pages: touching it for the
// first time, which is most of what a copy into it costs, then takes far fewer page faults.
void AdviseLargePages(const Tensor& tensor) {
  constexpr uintptr_t kLargePage = 2 << 20;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data());
  const uintptr_t first = (begin + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t last = (begin + tensor.tensor_data().size()) / kLargePage * kLargePage;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

// Fills `tensors` with fresh ones of the announced shapes; false if the headers make no sense.
bool Allocate(const std::vector<TensorHeader>& headers, uint64_t bytes,
              std::vector<Tensor>* tensors) {
  uint64_t total = 0;
  for (const TensorHeader& header : headers) {
    const auto dtype = static_cast<tensorflow::DataType>(header.dtype);
    if (header.rank < 0 || header.rank > kMaxDims || !tensorflow::DataTypeCanUseMemcpy(dtype)) {
      return false;
    }
    tensorflow::TensorShape shape;
    for (int i = 0; i < header.rank; ++i) {
      if (!shape.AddDimWithStatus(header.dims[i]).ok()) return false;
    }
    total += shape.num_elements() * tensorflow::DataTypeSize(dtype);
    if (total > bytes) return false;
    tensors->emplace_back(dtype, shape);
    if (!tensors->back().IsInitialized() && shape.num_elements() > 0) return false;
    AdviseLargePages(tensors->back());
  }
  return total == bytes;
}

// A receive has got its message.
void Complete(Transfer& receive, Transfer& message) {
  receive.tensors = std::move(message.tensors);
  receive.bytes = message.bytes;
  receive.peer_posted = message.peer_posted;
  receive.started = message.started;
  receive.finished = message.finished;
  receive.Finish(absl::OkStatus());
}

}  // namespace

struct Frame {
  uint32_t kind;
  uint32_t count;  // of tensors
  int64_t tag;
  uint64_t bytes;
  int64_t posted;  // when the send was asked for, by the sender's clock
  uint64_t from_window;
};

Link::Link(int peer, std::unique_ptr<Channel> channel, uint64_t window)
    : peer_(peer), channel_(std::move(channel)), window_(window) {
  writer_ = std::thread([this] { Write(); });
  reader_ = std::thread([this] { Read(); });
  pthread_setname_np(writer_.native_handle(), "pipeline-send");
  pthread_setname_np(reader_.native_handle(), "pipeline-recv");
}

Link::~Link() { Close(0); }

absl::Status Link::Ended() const {
  return absl::UnavailableError(
      peer_closed_
          ? absl::StrCat("rank ", peer_, " has ended or closed its pipeline")
          : absl::StrCat("the connection to rank ", peer_, " was lost: its process has ended"));
}

void Link::PeerEnded() {
  peer_ended_ = true;
  channel_->Shutdown();
}

void Link::Send(std::shared_ptr<Transfer> transfer) {
  transfer->posted = Now();
  transfer->bytes = 0;
  for (const Tensor& tensor : transfer->tensors) {
    if (tensor.dims() > kMaxDims || !tensorflow::DataTypeCanUseMemcpy(tensor.dtype())) {
      return transfer->Finish(absl::InvalidArgumentError(absl::StrCat(
          "a tensor of type ", tensorflow::DataTypeString(tensor.dtype()), " and ", tensor.dims(),
          " dimensions cannot be sent: plain numbers in at most ", kMaxDims, " dimensions can")));
    }
    transfer->bytes += tensor.tensor_data().size();
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failed_) {
      sends_.push_back(std::move(transfer));
      changed_.notify_all();
      return;
    }
  }
  transfer->Finish(status_);
}

void Link::Receive(std::shared_ptr<Transfer> transfer) {
  transfer->posted = Now();
  std::shared_ptr<Transfer> message;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Incoming& incoming = incoming_[transfer->tag];
    if (!incoming.arrived.empty()) {
      message = std::move(incoming.arrived.front());
      incoming.arrived.pop_front();
      controls_.push_back({kTakenCredit, transfer->tag, message->bytes, ""});
    } else if (!failed_) {
      incoming.posted.push_back(std::move(transfer));
      const int64_t tag = incoming.posted.back()->tag;
      controls_.push_back({kCredit, tag, 0, ""});
    }
    changed_.notify_all();
  }
  if (message != nullptr) {
    Complete(*transfer, *message);
  } else if (transfer != nullptr) {
    transfer->Finish(status_);
  }
}

void Link::Fail(const std::string& why) { End(absl::AbortedError(why)); }

void Link::End(absl::Status status) {
  std::vector<std::shared_ptr<Transfer>> under_way;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) return;
    failed_ = true;
    status_ = status;
    under_way.assign(sends_.begin(), sends_.end());
    if (sending_ != nullptr) under_way.push_back(sending_);
    // What has arrived can still be received.
    for (auto& [tag, incoming] : incoming_) {
      under_way.insert(under_way.end(), incoming.posted.begin(), incoming.posted.end());
      incoming.posted.clear();
    }
    sends_.clear();
    controls_.clear();
  }
  channel_->Shutdown();
  changed_.notify_all();
  for (auto& transfer : under_way) transfer->Finish(status);
}

void Link::Abort(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failed_) return;
  controls_.push_back({kAbort, 0, 0, why.substr(0, kMaxText)});
  changed_.notify_all();
}

void Link::Close(double seconds) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!failed_) controls_.push_back({kBye, 0, 0, ""});
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
      return failed_ || (sends_.empty() && controls_.empty() && idle_);
    });
  }
  Fail(absl::StrCat("the connection to rank ", peer_, " is closed"));
  if (writer_.joinable()) writer_.join();
  if (reader_.joinable()) reader_.join();
}

LinkCounters Link::counters() {
  std::lock_guard<std::mutex> lock(mutex_);
  LinkCounters counters = counters_;
  counters.cpu_seconds = writer_cpu_seconds_ + reader_cpu_seconds_;
  return counters;
}

// Takes the first message that may travel from the queue. With the lock held.
std::shared_ptr<Transfer> Link::NextToSend(bool* from_window) {
  std::unordered_set<int64_t> waiting;  // tags whose first message may not travel yet
  for (auto it = sends_.begin(); it != sends_.end(); ++it) {
    Transfer& transfer = **it;
    if (waiting.count(transfer.tag) != 0) continue;
    Outgoing& outgoing = outgoing_[transfer.tag];
    const bool credited = outgoing.credited > outgoing.sent;
    if (!credited && !(transfer.buffered && transfer.bytes <= window_)) {
      waiting.insert(transfer.tag);
      continue;
    }
    *from_window = !credited;
    if (!credited) window_ -= transfer.bytes;
    ++outgoing.sent;
    auto next = std::move(*it);
    sends_.erase(it);
    return next;
  }
  return nullptr;
}

void Link::Write() {
  for (;;) {
    Control control{};
    std::shared_ptr<Transfer> transfer;
    bool from_window = false;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      sending_ = nullptr;
      while (!failed_ && controls_.empty()) {
        if ((transfer = NextToSend(&from_window)) != nullptr) break;
        idle_ = true;
        changed_.notify_all();
        changed_.wait(lock);
      }
      if (failed_) return;
      idle_ = false;
      sending_ = transfer;
      if (transfer == nullptr) {
        control = std::move(controls_.front());
        controls_.pop_front();
      }
    }
    bool ok;
    if (transfer != nullptr) {
      ok = WriteMessage(*transfer, from_window);
    } else {
      const uint64_t bytes = control.kind == kAbort ? control.text.size() : control.bytes;
      const Frame frame{control.kind, 0, control.tag, bytes, 0, 0};
      ok = channel_->Write(&frame, sizeof(frame)) &&
           channel_->Write(control.text.data(), control.text.size());
    }
    if (!ok) return End(Ended());
  }
}

bool Link::WriteMessage(Transfer& transfer, bool from_window) {
  transfer.started = Now();
  const Frame frame{kMessage,       static_cast<uint32_t>(transfer.tensors.size()),
                    transfer.tag,   transfer.bytes,
                    transfer.posted, from_window};
  // The frame and the headers go in one piece: one wake-up of the peer instead of several.
  std::vector<char> head(sizeof(Frame) + frame.count * sizeof(TensorHeader));
  std::memcpy(head.data(), &frame, sizeof(frame));
  for (uint32_t i = 0; i < frame.count; ++i) {
    const Tensor& tensor = transfer.tensors[i];
    TensorHeader header{static_cast<int32_t>(tensor.dtype()), tensor.dims(), {}};
    for (int dim = 0; dim < tensor.dims(); ++dim) header.dims[dim] = tensor.dim_size(dim);
    std::memcpy(head.data() + sizeof(Frame) + i * sizeof(TensorHeader), &header, sizeof(header));
  }
  if (!channel_->Write(head.data(), head.size())) return false;
  for (const Tensor& tensor : transfer.tensors) {
    if (!channel_->Write(tensor.tensor_data().data(), tensor.tensor_data().size())) return false;
  }
  // The memory of what was sent is free before anybody hears of it.
  transfer.tensors.clear();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++counters_.messages_sent;
    counters_.bytes_sent += transfer.bytes;
    writer_cpu_seconds_ = CpuSeconds();
  }
  transfer.Finish(absl::OkStatus());
  return true;
}

void Link::Read() {
  for (;;) {
    Frame frame;
    if (!channel_->Read(&frame, sizeof(frame))) return End(Ended());
    const bool ok = frame.kind == kMessage ? ReadMessage(frame) : ReadControl(frame);
    if (!ok) return End(Ended());
  }
}

bool Link::ReadMessage(const Frame& frame) {
  auto message = std::make_shared<Transfer>(frame.tag, false);
  message->bytes = frame.bytes;
  message->peer_posted = frame.posted;
  message->started = Now();
  if (frame.count > kMaxTensors) return false;
  std::vector<TensorHeader> headers(frame.count);
  if (!channel_->Read(headers.data(), frame.count * sizeof(TensorHeader))) return false;
  if (!Allocate(headers, frame.bytes, &message->tensors)) {
    Fail(absl::StrCat("rank ", peer_, " sent a message that makes no sense or is too large (",
                      frame.bytes, " bytes)"));
    return false;
  }
  for (const Tensor& tensor : message->tensors) {
    if (!channel_->Read(tensor.data(), tensor.tensor_data().size())) return false;
  }
  message->finished = Now();
  std::shared_ptr<Transfer> receive;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++counters_.messages_received;
    counters_.bytes_received += frame.bytes;
    reader_cpu_seconds_ = CpuSeconds();
    Incoming& incoming = incoming_[frame.tag];
    if (incoming.posted.empty()) {
      incoming.arrived.push_back(std::move(message));
      return true;
    }
    receive = std::move(incoming.posted.front());
    incoming.posted.pop_front();
    if (frame.from_window != 0) {
      controls_.push_back({kTaken, frame.tag, frame.bytes, ""});
      changed_.notify_all();
    }
  }
  Complete(*receive, *message);
  return true;
}

bool Link::ReadControl(const Frame& frame) {
  if (frame.kind == kAbort) {
    std::string text(std::min(frame.bytes, kMaxText), ' ');
    if (!channel_->Read(text.data(), text.size())) return false;
    Fail(text);
    return false;
  }
  if (frame.kind == kBye) {
    peer_closed_ = true;
    return true;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (frame.kind == kCredit || frame.kind == kTakenCredit) ++outgoing_[frame.tag].credited;
  if (frame.kind == kTaken || frame.kind == kTakenCredit) window_ += frame.bytes;
  changed_.notify_all();
  return true;
}

}  // namespace pipeline
