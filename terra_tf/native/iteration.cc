#include "iteration.h"

#include <chrono>
#include <unordered_map>
#include <utility>

namespace terra {
namespace {

using tensorflow::Tensor;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::mutex* g_registry_mu = new std::mutex;
auto* g_registry = new std::unordered_map<int64_t, std::weak_ptr<Iteration>>;
std::atomic<int64_t> g_next_id{1};

}  // namespace

Iteration::Iteration(int slots, std::shared_ptr<const OutputSpecs> specs)
    : id(g_next_id++),
      outputs(std::move(specs)),
      slots_(slots),
      cancellation_(TFE_NewCancellationManager()) {}

Iteration::~Iteration() {
  TFE_DeleteCancellationManager(cancellation_);
  std::lock_guard<std::mutex> lock(*g_registry_mu);
  g_registry->erase(id);
}

std::shared_ptr<Iteration> Iteration::Find(int64_t id) {
  std::lock_guard<std::mutex> lock(*g_registry_mu);
  auto found = g_registry->find(id);
  return found == g_registry->end() ? nullptr : found->second.lock();
}

std::shared_ptr<Iteration> Iteration::Make(int slots, std::shared_ptr<const OutputSpecs> outputs) {
  std::shared_ptr<Iteration> iteration(new Iteration(slots, std::move(outputs)));
  std::lock_guard<std::mutex> lock(*g_registry_mu);
  (*g_registry)[iteration->id] = iteration;
  return iteration;
}

void Iteration::CountWaiter(int change) {
  if (waiting_ == 0 && change > 0) waiting_since_ = Now();
  waiting_ += change;
  if (waiting_ > 0) return;
  const double now = Now();
  waited_ += now - waiting_since_;
  timeline->GraphWaited(waiting_since_, now);
}

void Iteration::Set(int slot, Tensor value) {
  std::vector<Waiter> waiters;
  {
    std::lock_guard<std::mutex> lock(mu_);
    Slot& s = slots_[slot];
    if (s.ready) return;
    s.ready = true;
    s.value = std::move(value);
    waiters.swap(s.waiters);
    for (const Waiter& waiter : waiters) {
      if (waiter.ctx != nullptr) CountWaiter(-1);
    }
  }
  changed_.notify_all();
  // `slots_` never changes its size and a ready slot never changes its value: safe without the lock.
  for (Waiter& waiter : waiters) waiter.resume(absl::OkStatus(), slots_[slot].value);
}

void Iteration::Follow(int slot, const std::shared_ptr<Iteration>& source, int source_slot) {
  std::weak_ptr<Iteration> weak = weak_from_this();
  Callback pass_on = [weak, slot](const absl::Status& status, const Tensor& value) {
    std::shared_ptr<Iteration> self = weak.lock();
    if (self == nullptr) return;
    if (status.ok()) {
      self->Set(slot, value);
    } else {
      self->Cancel();
    }
  };
  absl::Status failed;
  {
    std::lock_guard<std::mutex> lock(source->mu_);
    Slot& s = source->slots_[source_slot];
    if (!s.ready) {
      if (!source->finished()) {
        s.waiters.push_back({nullptr, pass_on});
        return;
      }
      failed = absl::CancelledError("the iteration that makes this value failed");
    }
  }
  pass_on(failed, source->slots_[source_slot].value);
}

void Iteration::Await(int slot, bool emit, tensorflow::OpKernelContext* ctx,
                      tensorflow::AsyncOpKernel::DoneCallback done) {
  bool cancelled = false;
  {
    std::lock_guard<std::mutex> lock(mu_);
    Slot& s = slots_[slot];
    if (!s.ready) {
      tensorflow::CancellationManager* manager = ctx->cancellation_manager();
      const tensorflow::CancellationToken token = manager->get_cancellation_token();
      std::shared_ptr<Iteration> self = shared_from_this();
      cancelled = !manager->RegisterCallback(token, [self, slot, ctx] { self->Abandon(slot, ctx); });
      if (!cancelled) {
        CountWaiter(1);
        s.waiters.push_back({ctx, [emit, ctx, done, manager, token](const absl::Status& status,
                                                                    const Tensor& value) {
                               if (!status.ok()) {
                                 ctx->SetStatus(status);
                               } else {
                                 manager->TryDeregisterCallback(token);
                                 if (emit) ctx->set_output(0, value);
                               }
                               done();
                             }});
        return;
      }
    }
  }
  if (cancelled) {
    ctx->SetStatus(absl::CancelledError("the iteration was cancelled"));
  } else if (emit) {
    ctx->set_output(0, slots_[slot].value);
  }
  done();
}

void Iteration::Abandon(int slot, tensorflow::OpKernelContext* ctx) {
  Callback resume;
  {
    std::lock_guard<std::mutex> lock(mu_);
    std::vector<Waiter>& waiters = slots_[slot].waiters;
    for (auto waiter = waiters.begin(); waiter != waiters.end(); ++waiter) {
      if (waiter->ctx != ctx) continue;
      resume = std::move(waiter->resume);
      waiters.erase(waiter);
      CountWaiter(-1);
      break;
    }
  }
  if (resume) resume(absl::CancelledError("the iteration was cancelled"), Tensor());
}

SlotState Iteration::Wait(int slot, int milliseconds, Tensor* value) {
  std::unique_lock<std::mutex> lock(mu_);
  changed_.wait_for(lock, std::chrono::milliseconds(milliseconds),
                    [&] { return slots_[slot].ready || finished(); });
  if (slots_[slot].ready) {
    *value = slots_[slot].value;
    return SlotState::kReady;
  }
  return finished() ? SlotState::kFailed : SlotState::kPending;
}

SlotState Iteration::Peek(int slot, Tensor* value) {
  std::lock_guard<std::mutex> lock(mu_);
  if (slots_[slot].ready) {
    *value = slots_[slot].value;
    return SlotState::kReady;
  }
  return finished() ? SlotState::kFailed : SlotState::kPending;
}

std::atomic<int> Iteration::all_failures{0};

void Iteration::CountFailure() {
  if (counts_as_failure_ || failures == nullptr) return;  // null before it is launched
  counts_as_failure_ = true;
  failures->fetch_add(1);
  all_failures.fetch_add(1);
}

void Iteration::MarkRecovered() {
  std::lock_guard<std::mutex> lock(mu_);
  if (!counts_as_failure_) return;
  counts_as_failure_ = false;
  failures->fetch_sub(1);
  all_failures.fetch_sub(1);
}

void Iteration::MarkClosed() {
  std::lock_guard<std::mutex> lock(mu_);
  closed = true;
  if (finished() && !status_.ok()) CountFailure();
}

void Iteration::MarkInterrupted() {
  std::lock_guard<std::mutex> lock(mu_);
  interrupted_ = true;
  CountFailure();
}

void Iteration::Finish(const absl::Status& status) {
  std::vector<Waiter> orphans;
  {
    std::lock_guard<std::mutex> lock(mu_);
    status_ = status;
    if (closed && !status.ok()) CountFailure();  // first: whoever sees the end sees how it ended
    finished_.store(true, std::memory_order_release);
    for (Slot& slot : slots_) {
      for (Waiter& waiter : slot.waiters) orphans.push_back(std::move(waiter));
      slot.waiters.clear();
    }
  }
  changed_.notify_all();
  for (Waiter& waiter : orphans) {
    waiter.resume(absl::CancelledError("the iteration that makes this value failed"), Tensor());
  }
}

bool Iteration::WaitFinished(int milliseconds) {
  std::unique_lock<std::mutex> lock(mu_);
  return changed_.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] { return finished(); });
}

absl::Status Iteration::status() {
  std::lock_guard<std::mutex> lock(mu_);
  return status_;
}

std::vector<int> Iteration::Awaited() {
  std::lock_guard<std::mutex> lock(mu_);
  std::vector<int> awaited;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (!slots_[slot].waiters.empty()) awaited.push_back(slot);
  }
  return awaited;
}

void Iteration::Cancel() { TFE_CancellationManagerStartCancel(cancellation_); }

double Iteration::graph_wait_seconds() {
  std::lock_guard<std::mutex> lock(mu_);
  return waited_;
}

}  // namespace terra
