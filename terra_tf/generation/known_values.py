"""Values that are certain before the graph runs: sizes of tensors, and what is computed of them.

TensorFlow, Keras and gradient code look at such values a lot. A placeholder of one holds its value
at once, so nobody waits for the graph.
"""

from __future__ import annotations

import tensorflow as tf

from terra_tf import tensorflow_internals
from terra_tf.tracing.effects import Effect
from terra_tf.tracing.trace import Kind, Node, Output, Outside, Trace

_SMALL = 32  # elements of a tensor that is a shape or part of one


class KnownValues:
    """What is known of the outputs of one trace.

    Attributes:
      values: output -> its value.
    """

    def __init__(self, trace: Trace) -> None:
        self.values: dict[int, tf.Tensor] = {}
        self._trace = trace

    def look(self, node: Node, output: int, tensor: tf.Tensor) -> bool:
        """Finds out whether the value of an output is certain.

        Args:
          node: makes the output.
          output: its number.
          tensor: the same in the graph; its static shape has to be certain.

        Returns:
          Whether `values` has it now.
        """
        if not tensor.dtype.is_integer or tensor.shape.rank > 1:
            return False
        if tensor.shape.num_elements() > _SMALL or tensor.op.type == "TerraFeed":
            return False
        value = tf.get_static_value(tensor)
        if value is not None:
            with tf.init_scope():
                self.values[output] = tf.constant(value, tensor.dtype)
        elif node.effect is Effect.PURE:
            self._compute(node)
        return output in self.values

    def _compute(self, node: Node) -> None:
        """Executes an op all of whose inputs are known, as eager would."""
        inputs = [self._value_of(source) for source in node.inputs]
        if not inputs or any(value is None for value in inputs):
            return
        call, arguments = tensorflow_internals.raw_call(
            node.op, inputs, node.attrs, node.num_outputs
        )
        self.values.update(zip(node.outputs, call(*arguments), strict=True))

    def _value_of(self, source: Output | Outside) -> tf.Tensor | None:
        if isinstance(source, Output):
            return self.values.get(source.index)
        external = self._trace.externals[source.index]
        if external.fed or external.kind in (Kind.RESOURCE, Kind.SELECT):
            return None
        return external.tensor
