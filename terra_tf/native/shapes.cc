#include "shapes.h"

#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/public/version.h"

namespace terra {

using tensorflow::PartialTensorShape;
using tensorflow::shape_inference::InferenceContext;

HandleShapes::value_type ShapesBehind(const tensorflow::Tensor& handle) {
  if (handle.dtype() != tensorflow::DT_RESOURCE || handle.NumElements() != 1) return nullptr;
  const auto& known = handle.flat<tensorflow::ResourceHandle>()(0).dtypes_and_shapes();
  if (known.empty()) return nullptr;
  auto shapes = std::make_unique<HandleShapes::value_type::element_type>();
  for (const auto& one : known) shapes->emplace_back(one.shape, one.dtype);
  return shapes;
}

std::shared_ptr<ShapeFunction> ShapeFunction::Make(const std::string& serialized_node_def) {
  auto function = std::make_shared<ShapeFunction>();
  if (!function->node_def_.ParseFromString(serialized_node_def)) return nullptr;
  auto* registry = tensorflow::OpRegistry::Global();
  if (!registry->LookUp(function->node_def_.op(), &function->op_).ok()) return nullptr;
  return function->op_->shape_inference_fn == nullptr ? nullptr : function;
}

bool ShapeFunction::Infer(const std::vector<PartialTensorShape>& inputs,
                          const std::vector<const tensorflow::Tensor*>& values,
                          const HandleShapes& handles,
                          std::vector<PartialTensorShape>* outputs) const {
  InferenceContext context(TF_GRAPH_DEF_VERSION, tensorflow::AttrSlice(node_def_), op_->op_def, inputs,
                           values, {}, handles);
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
