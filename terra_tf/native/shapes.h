// Shapes of a node's outputs, computed while Python runs, before the graph has any values.
//
// Where traces differ in their shapes, a placeholder gets its shape from those of the inputs of its
// op, by the shape function that TensorFlow registers for the op type. So the program can ask for a
// shape without waiting, and an op whose inputs do not fit is found out where it is called.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
#include "tensorflow/core/framework/tensor.h"

namespace terra {

// Per input: the shape and type of what a resource handle stands for; null for other inputs.
using HandleShapes = std::vector<
    std::unique_ptr<std::vector<std::pair<tensorflow::PartialTensorShape, tensorflow::DataType>>>>;

// What is known of the variable behind a resource handle; null: nothing.
HandleShapes::value_type ShapesBehind(const tensorflow::Tensor& handle);

class ShapeFunction {
 public:
  // Null where the op type has no shape function.
  static std::shared_ptr<ShapeFunction> Make(const std::string& serialized_node_def);

  // Computes the shapes of the outputs; false where the op would fail on these inputs.
  // `values` holds the inputs whose value is known, null for the others.
  bool Infer(const std::vector<tensorflow::PartialTensorShape>& inputs,
             const std::vector<const tensorflow::Tensor*>& values, const HandleShapes& handles,
             std::vector<tensorflow::PartialTensorShape>* outputs) const;

 private:
  tensorflow::NodeDef node_def_;
  const tensorflow::OpRegistrationData* op_ = nullptr;
};

}  // namespace terra
