#include "graph_runner.h"

#include <algorithm>
#include <chrono>

#include "tensorflow/c/tf_status_helper.h"
#include "tensorflow_private.h"

namespace terra {
namespace {

constexpr int kLongestKernelMilliseconds = 60000;

std::atomic<int> g_unfinished{0};
std::atomic<bool> g_forked{false};
std::mutex* g_all_mu = new std::mutex;
auto* g_all = new std::vector<std::shared_ptr<Iteration>>;  // launched and not finished

}  // namespace

GraphRunner::GraphRunner(TFE_Context* ctx) : state_(std::make_shared<State>()) {
  state_->ctx = ctx;
  std::thread(Run, state_).detach();
}

GraphRunner::~GraphRunner() {
  if (g_forked) {  // its locks may be held by threads that are gone
    new std::shared_ptr<State>(state_);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(state_->mu);
    state_->stopping = true;
    for (Launched& launch : state_->queue) {
      if (!launch.iteration->closed) launch.iteration->Cancel();
    }
    if (state_->running != nullptr && !state_->running->closed) state_->running->Cancel();
  }
  state_->changed.notify_all();
}

void GraphRunner::Launch(std::shared_ptr<Iteration> iteration, std::string function,
                         std::string config, std::vector<TFE_TensorHandle*> captures) {
  iteration->failures = state_->failures;
  iteration->timeline->Launched();
  g_unfinished.fetch_add(1);
  {
    std::lock_guard<std::mutex> lock(*g_all_mu);
    g_all->push_back(iteration);
  }
  {
    std::lock_guard<std::mutex> lock(state_->mu);
    state_->queue.push_back(
        {std::move(iteration), std::move(function), std::move(config), std::move(captures)});
  }
  state_->changed.notify_one();
}

void GraphRunner::Run(std::shared_ptr<State> state) {
  while (true) {
    Launched launch;
    {
      std::unique_lock<std::mutex> lock(state->mu);
      state->changed.wait(lock, [&] { return state->stopping || !state->queue.empty(); });
      if (state->queue.empty()) return;
      launch = std::move(state->queue.front());
      state->queue.pop_front();
      state->running = launch.iteration;
    }
    launch.iteration->timeline->Started();
    // After a failure nothing may run on a state that is not the one it should be.
    const absl::Status status = state->failures->load() > 0
                                    ? absl::CancelledError("an earlier iteration failed")
                                    : Execute(state->ctx, launch);
    for (TFE_TensorHandle* handle : launch.captures) TFE_DeleteTensorHandle(handle);
    {
      std::lock_guard<std::mutex> lock(state->mu);
      state->running = nullptr;
    }
    // Off the list only then: whoever has waited for it knows how it ended.
    launch.iteration->timeline->Finished();
    launch.iteration->Finish(status);
    {
      std::lock_guard<std::mutex> lock(*g_all_mu);
      g_all->erase(std::find(g_all->begin(), g_all->end(), launch.iteration));
    }
    g_unfinished.fetch_sub(1);
  }
}

absl::Status GraphRunner::Execute(TFE_Context* ctx, const Launched& launch) {
  std::unique_ptr<TF_Status, decltype(&TF_DeleteStatus)> status(TF_NewStatus(), TF_DeleteStatus);
  std::unique_ptr<TFE_Op, decltype(&TFE_DeleteOp)> op(
      TFE_NewOp(ctx, launch.function.c_str(), status.get()), TFE_DeleteOp);
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

bool GraphRunner::AnyFailed() { return Iteration::all_failures.load() > 0; }

void GraphRunner::StopAll() {
  if (g_forked) return;
  std::vector<std::shared_ptr<Iteration>> launched;
  {
    std::lock_guard<std::mutex> lock(*g_all_mu);
    launched = *g_all;
  }
  for (const auto& iteration : launched) iteration->Cancel();
  // A kernel that runs is not cancelled but comes to its end.
  for (const auto& iteration : launched) iteration->WaitFinished(kLongestKernelMilliseconds);
}

void GraphRunner::ForgetAll() {
  g_forked = true;
  g_unfinished = 0;
  Iteration::all_failures = 0;
}

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
