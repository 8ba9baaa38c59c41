// TensorFlow ops over transfers: one hands tensors to a send, one takes them from a receive.
//
// Transfers are made and posted from Python (see module.cc) and found here by their number. Neither
// op blocks a thread: the send only queues, the take is asynchronous.
#include <utility>

#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

#include "link.h"
#include "transfer.h"

namespace pipeline {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::shape_inference::InferenceContext;

absl::Status Forgotten() {
  return absl::FailedPreconditionError("this transfer is not under way: it was already waited for");
}

REGISTER_OP("PipelineSend")
    .Input("transfer: int64")
    .Input("tensors: T")
    .Attr("T: list(type) >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext*) { return absl::OkStatus(); })
    .Doc("Posts the send `transfer` with these tensors and returns at once.");

class SendOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override {
    auto transfer = Transfer::Find(context->input(0).scalar<int64_t>()());
    OP_REQUIRES(context, transfer != nullptr && transfer->link != nullptr, Forgotten());
    for (int i = 1; i < context->num_inputs(); ++i) {
      transfer->tensors.push_back(context->input(i));
    }
    auto link = std::exchange(transfer->link, nullptr);
    auto after = std::exchange(transfer->after, nullptr);
    if (after == nullptr) {
      link->Send(std::move(transfer));
    } else {
      after->WhenDone([link, transfer] { link->Send(transfer); });
    }
  }
};
REGISTER_KERNEL_BUILDER(Name("PipelineSend").Device(tensorflow::DEVICE_CPU), SendOp);

REGISTER_OP("PipelineTake")
    .Input("transfer: int64")
    .Output("tensors: T")
    .Attr("T: list(type) >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      for (int i = 0; i < context->num_outputs(); ++i) {
        context->set_output(i, context->UnknownShape());
      }
      return absl::OkStatus();
    })
    .Doc("The tensors of the receive `transfer`, when it is complete.");

class TakeOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;
  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto transfer = Transfer::Find(context->input(0).scalar<int64_t>()());
    OP_REQUIRES_ASYNC(context, transfer != nullptr, Forgotten(), done);
    Transfer* received = transfer.get();
    received->WhenDone([context, done = std::move(done), transfer = std::move(transfer)] {
      context->SetStatus(Hand(context, *transfer));
      done();
    });
  }

 private:
  static absl::Status Hand(OpKernelContext* context, Transfer& transfer) {
    absl::Status status = transfer.status();
    if (!status.ok()) return status;
    const int count = static_cast<int>(transfer.tensors.size());
    if (count != context->num_outputs()) {
      return absl::InvalidArgumentError("another number of tensors arrived than was expected");
    }
    for (int i = 0; i < count; ++i) {
      if (transfer.tensors[i].dtype() != context->expected_output_dtype(i)) {
        return absl::InvalidArgumentError("a tensor of another type arrived than was expected");
      }
      context->set_output(i, transfer.tensors[i]);
    }
    transfer.tensors.clear();
    return absl::OkStatus();
  }
};
REGISTER_KERNEL_BUILDER(Name("PipelineTake").Device(tensorflow::DEVICE_CPU), TakeOp);

}  // namespace
}  // namespace pipeline
