#include "transfer.h"

#include <unordered_map>
#include <utility>

namespace pipeline {
namespace {

// id → transfer; a transfer takes itself out when it goes.
struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::weak_ptr<Transfer>> transfers;
  int64_t next = 0;
};

Registry& TheRegistry() {
  static Registry* registry = new Registry;  // never destroyed: threads may outlive main
  return *registry;
}

}  // namespace

void Transfer::Finish(absl::Status status) {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (done_) return;
    done_ = true;
    status_ = std::move(status);
    if (finished == 0) finished = Now();
    callbacks.swap(callbacks_);
  }
  changed_.notify_all();
  for (auto& callback : callbacks) callback();
}

bool Transfer::Wait(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return done_; });
}

void Transfer::WhenDone(std::function<void()> callback) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!done_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

absl::Status Transfer::status() {
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

int64_t Transfer::Register() {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  if (id_ < 0) {
    id_ = registry.next++;
    registry.transfers[id_] = weak_from_this();
  }
  return id_;
}

std::shared_ptr<Transfer> Transfer::Find(int64_t id) {
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  auto found = registry.transfers.find(id);
  return found == registry.transfers.end() ? nullptr : found->second.lock();
}

Transfer::~Transfer() {
  if (id_ < 0) return;
  Registry& registry = TheRegistry();
  std::lock_guard<std::mutex> lock(registry.mutex);
  registry.transfers.erase(id_);
}

}  // namespace pipeline
