#include "shapes.h"

#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/public/version.h"

namespace terra {

using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;

std::shared_ptr<ShapeFunction> ShapeFunction::Make(const std::string& serialized_node_def) {
  auto function = std::make_shared<ShapeFunction>();
  if (!function->node_def_.ParseFromString(serialized_node_def)) return nullptr;
  auto* registry = tensorflow::OpRegistry::Global();
  if (!registry->LookUp(function->node_def_.op(), &function->op_).ok()) return nullptr;
  return function->op_->shape_inference_fn == nullptr ? nullptr : function;
}

bool ShapeFunction::Infer(const std::vector<PartialTensorShape>& inputs,
                          const std::vector<const tensorflow::Tensor*>& values,
                          std::vector<PartialTensorShape>* outputs) const {
  InferenceContext context(TF_GRAPH_DEF_VERSION, tensorflow::AttrSlice(node_def_), op_->op_def, inputs,
                           values, {}, {});
  if (!context.construction_status().ok() || !context.Run(op_->shape_inference_fn).ok()) return false;
  for (int i = 0; i < context.num_outputs(); ++i) {
    auto shape = context.output(i);
    if (shape.SameHandle({}) || !context.RankKnown(shape)) {
      outputs->emplace_back();
      continue;
    }
    std::vector<int64_t> dims;
    for (int d = 0; d < context.Rank(shape); ++d) dims.push_back(context.Value(context.Dim(shape, d)));
    outputs->emplace_back(dims);
  }
  return true;
}

}  // namespace terra
