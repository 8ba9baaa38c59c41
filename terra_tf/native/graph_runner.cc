#include "graph_runner.h"

#include <algorithm>
#include <chrono>

#include "tensorflow/c/tf_status_helper.h"
#include "tensorflow_private.h"

namespace terra {
namespace {

std::atomic<int> g_unfinished{0}, g_failed{0};
std::mutex* g_all_mu = new std::mutex;
auto* g_all = new std::vector<std::shared_ptr<Iteration>>;  // launched and not finished

}  // namespace

GraphRunner::GraphRunner(TFE_Context* ctx) : ctx_(ctx), thread_([this] { Run(); }) {}

GraphRunner::~GraphRunner() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    stopping_ = true;
    for (Launched& launch : queue_) {
      if (!launch.iteration->closed) launch.iteration->Cancel();
    }
    if (running_ != nullptr && !running_->closed) running_->Cancel();
  }
  changed_.notify_all();
  thread_.join();
}

void GraphRunner::Launch(std::shared_ptr<Iteration> iteration, std::string function,
                         std::string config, std::vector<TFE_TensorHandle*> captures) {
  g_unfinished.fetch_add(1);
  {
    std::lock_guard<std::mutex> lock(*g_all_mu);
    g_all->push_back(iteration);
  }
  {
    std::lock_guard<std::mutex> lock(mu_);
    queue_.push_back(
        {std::move(iteration), std::move(function), std::move(config), std::move(captures)});
  }
  changed_.notify_one();
}

void GraphRunner::Run() {
  while (true) {
    Launched launch;
    {
      std::unique_lock<std::mutex> lock(mu_);
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      launch = std::move(queue_.front());
      queue_.pop_front();
      running_ = launch.iteration;
    }
    // After a failure nothing may run on a state that is not the one it should be.
    const absl::Status status =
        AnyFailed() ? absl::CancelledError("an earlier iteration failed") : Execute(launch);
    for (TFE_TensorHandle* handle : launch.captures) TFE_DeleteTensorHandle(handle);
    {
      std::lock_guard<std::mutex> lock(mu_);
      running_ = nullptr;
    }
    // Out of the list first: whoever sees the iteration finished must not find it unfinished here.
    {
      std::lock_guard<std::mutex> lock(*g_all_mu);
      g_all->erase(std::find(g_all->begin(), g_all->end(), launch.iteration));
    }
    if (!status.ok() && launch.iteration->closed) g_failed.fetch_add(1);
    g_unfinished.fetch_sub(1);
    launch.iteration->Finish(status);
  }
}

absl::Status GraphRunner::Execute(const Launched& launch) {
  std::unique_ptr<TF_Status, decltype(&TF_DeleteStatus)> status(TF_NewStatus(), TF_DeleteStatus);
  std::unique_ptr<TFE_Op, decltype(&TFE_DeleteOp)> op(
      TFE_NewOp(ctx_, launch.function.c_str(), status.get()), TFE_DeleteOp);
  if (TF_GetCode(status.get()) != TF_OK) return tensorflow::StatusFromTF_Status(status.get());

  tensorflow::Tensor id(tensorflow::DT_INT64, {});
  id.scalar<int64_t>()() = launch.iteration->id;
  TFE_TensorHandle* id_handle = HandleFromTensor(id);
  TFE_OpAddInput(op.get(), id_handle, status.get());
  TFE_DeleteTensorHandle(id_handle);
  for (TFE_TensorHandle* handle : launch.captures) TFE_OpAddInput(op.get(), handle, status.get());
  TFE_OpSetAttrString(op.get(), "config_proto", launch.config.data(), launch.config.size());
  TFE_OpSetCancellationManager(op.get(), launch.iteration->cancellation(), status.get());
  if (TF_GetCode(status.get()) != TF_OK) return tensorflow::StatusFromTF_Status(status.get());

  int outputs = 0;
  TFE_Execute(op.get(), nullptr, &outputs, status.get());
  return tensorflow::StatusFromTF_Status(status.get());
}

bool GraphRunner::AnyUnfinished() { return g_unfinished.load(std::memory_order_relaxed) > 0; }

bool GraphRunner::AnyFailed() { return g_failed.load(std::memory_order_relaxed) > 0; }

void GraphRunner::MarkRecovered() { g_failed.fetch_sub(1); }

bool GraphRunner::WaitClosed(int milliseconds) {
  std::vector<std::shared_ptr<Iteration>> closed;
  {
    std::lock_guard<std::mutex> lock(*g_all_mu);
    for (const auto& iteration : *g_all) {
      if (iteration->closed) closed.push_back(iteration);
    }
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
  for (const auto& iteration : closed) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    if (!iteration->WaitFinished(std::max<int>(0, left.count()))) return false;
  }
  return true;
}

}  // namespace terra
