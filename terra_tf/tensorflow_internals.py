"""The only module that touches TensorFlow's and Keras's private API.

Everything else of `terra_tf` uses public names, the native core (whose own private symbols are in
`native/tensorflow_private.h`), or the functions below. Each function states which private name it
needs; `tests/test_tensorflow_internals.py` has a test for each, so that a new TensorFlow release
shows at once which one it broke.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.function.polymorphism import function_type as function_type_lib
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager import backprop, context
from tensorflow.python.eager import core as eager_core
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import func_graph as func_graph_lib
from tensorflow.python.framework import meta_graph, op_def_library, op_def_registry, ops
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.ops import resource_variable_ops, weak_tensor_ops
from tensorflow.python.util import pywrap_xla_ops, traceback_utils

ENTRY_POINTS = ("TFE_Py_FastPathExecute", "TFE_Py_Execute", "TFE_Py_ExecuteCancelable")
"""The functions of `pywrap_tfe` through which Python executes eager ops."""

FastPathMiss = eager_core._FallbackException
"""Raised by the fast path to send a generated op wrapper to its slow path."""

EagerTensor = ops.EagerTensor

_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def entry_point(name: str) -> Callable[..., Any]:
    """What `pywrap_tfe.<name>` is at present."""
    return getattr(pywrap_tfe, name)


def replace_entry_point(name: str, replacement: Callable[..., Any]) -> None:
    """Makes TensorFlow's generated op wrappers call `replacement`."""
    setattr(pywrap_tfe, name, replacement)


def install_tensor_views(
    is_placeholder: Callable[[Any], bool], look: Callable[[Any], None]
) -> None:
    """Makes a placeholder look like any tensor where TensorFlow would look behind it.

    Where a tensor lives is answered without waiting for its value. A DLPack capsule, which shows
    the memory itself, first gets the value; so does a look at the value from Python, so that what
    the wait raises is raised as it is and not as a status of TensorFlow's.
    """
    for name in ("device", "backing_device"):
        original = EagerTensor.__dict__[name]

        def where(tensor: Any, _original: Any = original) -> str:
            return _CPU if is_placeholder(tensor) else _original.__get__(tensor)

        setattr(EagerTensor, name, property(where, doc=original.__doc__))
    as_array = EagerTensor.__dict__["_numpy_internal"]

    def numpy_internal(tensor: Any) -> Any:
        look(tensor)
        return as_array(tensor)

    EagerTensor._numpy_internal = numpy_internal
    for name in ("TFE_ToDlpackCapsule", "TFE_DlpackDevice"):
        shown = getattr(pywrap_tfe, name)

        def show(tensor: Any, _shown: Any = shown) -> Any:
            look(tensor)
            return _shown(tensor)

        setattr(pywrap_tfe, name, show)


def context_capsule() -> Any:
    """The eager context's `TFE_Context*`, as a capsule; initialises the context."""
    eager = context.context()
    eager.ensure_initialized()
    return eager._handle


def register_device(device: Any, name: str, info: Any) -> None:
    """Registers a custom device described by two capsules."""
    context.register_custom_device(device, name, info)


def executing_eagerly() -> bool:
    """Whether this thread runs eagerly now (not inside a graph or a `tf.function` trace)."""
    return context.executing_eagerly()


def placed_elsewhere() -> bool:
    """Whether a device scope asks for another device than the one that everything runs on."""
    name = context.context().device_name
    return bool(name) and name != _CPU


def is_variable_handle(tensor: Any) -> bool:
    """Whether a tensor is the handle of a variable; those of iterators and tables are not."""
    data = getattr(tensor, "_handle_data", None)
    return data is not None and data.is_set


def next_id() -> int:
    """A number above the ids of all eager tensors that exist and below those of later ones."""
    return ops.uid()


def tensor_id(tensor: Any) -> int:
    """The id of an eager tensor; they ascend in the order in which tensors are made."""
    return tensor._id


def variable_shape(handle: Any) -> tuple[int | None, ...] | None:
    """The static shape of the variable behind a resource handle; None if it is not known."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    shape = data.shape_and_type[0].shape
    if shape.unknown_rank:
        return None
    return tuple(dim.size if dim.size >= 0 else None for dim in shape.dim)


@functools.cache
def input_position(op_type: str, name: str) -> int | None:
    """The position of a named input among those of an op, or None if it has no such input."""
    names = [arg.name for arg in op_def(op_type).input_arg]
    return names.index(name) if name in names else None


class _Gradients(threading.local):
    """The forward ops whose gradient functions this thread's tapes are in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, Any, Any]] = []
        self.finished: tuple[str, Any, Any] | None = None
        self.tapes = 0  # that have begun so far
        self.calls = 0  # of gradient functions in eager mode so far


_gradients = _Gradients()


def gradient_in_progress() -> tuple[str, Any, Any] | None:
    """(op type, inputs, outputs) of the forward op whose gradient is being computed, or None.

    Inputs and outputs are None, or None in part, where the gradient does not need them.
    """
    return _gradients.stack[-1] if _gradients.stack else None


def gradient_finished() -> tuple[str, Any, Any] | None:
    """The same for the forward op whose gradient function returned last; it is told once."""
    finished, _gradients.finished = _gradients.finished, None
    return finished


def install_gradient_watch() -> None:
    """Makes the gradient in progress known; once per process."""
    original = backprop._gradient_function
    gradients = _gradients

    def gradient_function(op: str, attrs: Any, count: int, inputs: Any, outputs: Any, *rest: Any):
        stack = gradients.stack
        gradients.calls += context.executing_eagerly()
        stack.append((op, inputs, outputs))
        try:
            return original(op, attrs, count, inputs, outputs, *rest)
        finally:
            gradients.finished = stack.pop()

    pywrap_tfe.TFE_Py_RegisterGradientFunction(gradient_function)
    new_tape = pywrap_tfe.TFE_Py_TapeSetNew

    def tape_begins(*args: Any) -> Any:
        gradients.tapes += 1
        return new_tape(*args)

    pywrap_tfe.TFE_Py_TapeSetNew = tape_begins


def tape_activity() -> tuple[int, int]:
    """How many tapes have begun, and gradient functions run eagerly, on this thread so far."""
    return _gradients.tapes, _gradients.calls


def tape_is_active() -> bool:
    """Whether a gradient tape or a forward accumulator records on this thread."""
    return not pywrap_tfe.TFE_Py_TapeSetIsEmpty()


def context_is_ready() -> bool:
    """Whether the program has started TensorFlow's runtime; afterwards it cannot be configured."""
    eager = context.context_safe()
    return eager is not None and eager._context_handle is not None


def add_op_callback(callback: Callable[..., Any]) -> None:
    """Has `callback(op_type, inputs, attrs, outputs, name)` called after each op of this thread."""
    context.context().add_op_callback(callback)


def remove_op_callback(callback: Callable[..., Any]) -> None:
    """Undoes `add_op_callback`."""
    context.context().remove_op_callback(callback)


def dtype_and_shape(tensor: Any) -> tuple[int, tuple[int, ...]]:
    """Enum number of the dtype, and the shape, of an eager tensor."""
    return tensor._datatype_enum(), tensor._shape_tuple()


@functools.cache
def list_inputs(op_type: str) -> tuple[bool, ...]:
    """For each input argument of an op, whether it takes a list of tensors."""
    return tuple(bool(arg.number_attr or arg.type_list_attr) for arg in op_def(op_type).input_arg)


@functools.cache
def op_def(op_type: str) -> Any:
    """The OpDef of an op type, or None if it is not an op (the name of a function)."""
    return op_def_registry.get(op_type)


def raw_call(
    op_type: str, inputs: Sequence[tf.Tensor], attrs: Sequence[Any], num_outputs: int
) -> tuple[Callable[..., list[tf.Tensor]], tuple[Any, ...]]:
    """The call that executes an op eagerly, unseen by tapes and callbacks.

    Args:
      op_type: name of a registered op.
      inputs: flat input tensors.
      attrs: alternating names and values, as tapes and op callbacks get them.
      num_outputs: flat number of outputs.

    Returns:
      A built-in function, which returns a flat list of tensors, and its arguments.
    """
    given = {}
    for name, value in zip(attrs[::2], attrs[1::2], strict=True):
        if value is not None:  # None stands for the op's default
            given[name] = value
    flat = tuple(item for pair in given.items() for item in pair)
    handle = context.context()._handle
    return pywrap_tfe.TFE_Py_Execute, (handle, None, op_type, list(inputs), flat, num_outputs)


def status_error(error: BaseException) -> Exception:
    """The public `tf.errors` exception for what the raw execution raised."""
    if not isinstance(error, eager_core._NotOkStatusException):
        return error
    return eager_core._status_to_exception(error)


def create_graph_op(
    graph: tf.Graph, op_type: str, inputs: Sequence[tf.Tensor], attrs: dict[str, Any]
) -> tf.Operation:
    """Adds an op with flat inputs to a graph; `attrs` are Python values, None for the default."""
    definition = op_def(op_type)
    kinds = {attr.name: attr.type for attr in definition.attr}
    values = {
        name: op_def_library.value_to_attr_value(value, kinds[name], name)
        for name, value in attrs.items()
        if value is not None and name in kinds
    }
    return graph._create_op_internal(op_type, list(inputs), attrs=values, op_def=definition)


def add_control_inputs(
    graph: tf.Graph, operation: tf.Operation, inputs: Sequence[tf.Operation]
) -> None:
    """Makes an existing op of a graph wait for others."""
    operation._add_control_inputs(list(inputs))


@functools.cache
def xla_kernels() -> frozenset[str]:
    """The op types that XLA can compile for CPUs."""
    return frozenset(pywrap_xla_ops.get_cpu_kernel_names())


def mark_for_xla(operation: tf.Operation, span: str) -> None:
    """Has TensorFlow's auto-clustering compile an op of a graph, with others of that span only."""
    operation._set_attr("_XlaCompile", attr_value_pb2.AttrValue(b=True))
    for name in ("_XlaScope", "_XlaInternalScope"):
        operation._set_attr(name, attr_value_pb2.AttrValue(s=span.encode()))


def rewritten_ops(concrete: Any, config: bytes) -> list[str]:
    """The op types of a generated graph after Grappler has rewritten it.

    Args:
      concrete: the graph as a ConcreteFunction.
      config: what `function_config` returned.
    """
    graph = concrete.graph
    exported = meta_graph.create_meta_graph_def(graph=graph)
    ends = [operation.name for operation in graph.control_outputs]
    exported.collection_def["train_op"].node_list.value.extend(ends)
    proto = config_pb2.ConfigProto.FromString(config)
    return [node.op for node in tf_optimizer.OptimizeGraph(proto, exported, verbose=False).node]


def capture(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor:
    """The graph's own name for an outside tensor, which becomes one of its arguments."""
    return graph.capture(tensor)


class GeneratedFunction:
    """A graph function built op by op, without automatic control dependencies.

    Attributes:
      concrete: the `tf.function` ConcreteFunction, for people to print and look at.
      name: under which the eager context knows the function.
      captures: outside tensors to be passed after the explicit arguments, in order.
    """

    def __init__(
        self,
        name: str,
        argument: tf.TensorSpec,
        build: Callable[[tf.Graph, tf.Tensor], list[tf.Operation]],
    ):
        """Builds the graph.

        Args:
          name: base of the function's name.
          argument: spec of the only explicit argument.
          build: called with the graph and the argument; returns the ops that have to run.
        """
        last: list[tf.Operation] = []

        def body(value: tf.Tensor) -> None:
            last.extend(build(tf.compat.v1.get_default_graph(), value))

        graph = func_graph_lib.func_graph_from_py_func(
            name, body, (), {}, signature=[argument], add_control_dependencies=False
        )
        graph.control_outputs = last
        function_type = function_type_lib.from_structured_signature(
            ((argument,), {}), None, graph.function_captures.capture_types
        )
        self.concrete = concrete_function.ConcreteFunction.from_func_graph(graph, function_type, {})
        self.name = self.concrete._inference_function.name.decode()
        self.captures = list(graph.external_captures)


def function_config(exact: bool) -> bytes:
    """A serialized ConfigProto for the generated function.

    Args:
      exact: keep Grappler's passes that change floating-point results off.
    """
    config = config_pb2.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    off = rewriter_config_pb2.RewriterConfig.OFF
    # It would drop ops that nothing uses but that have to fail as in eager.
    rewrite.dependency_optimization = off
    if exact:
        rewrite.arithmetic_optimization = off
        rewrite.constant_folding = off
        rewrite.remapping = off
    return config.SerializeToString(deterministic=True)


# --- delegated calls ---

_TAPE_FUNCTIONS = (
    "TFE_Py_TapeSetNew",
    "TFE_Py_TapeSetAdd",
    "TFE_Py_TapeSetRemove",
    "TFE_Py_TapeWatch",
    "TFE_Py_TapeWatchVariable",
    "TFE_Py_TapeVariableAccessed",
    "TFE_Py_TapeSetStopOnThread",
    "TFE_Py_TapeSetRestartOnThread",
    "TFE_Py_TapeSetRecordOperation",
)


_WATCHER_FUNCTIONS = ("TFE_Py_VariableWatcherNew", "TFE_Py_VariableWatcherRemove")


def install_tape_hooks(make: Callable[[int, Any], Any]) -> None:
    """Stands in for the functions that change tapes, and for those that watch variables.

    Args:
      make: makes a stand-in, from a number of native/tape.h and the original.
    """
    for number, name in enumerate(_TAPE_FUNCTIONS):
        setattr(pywrap_tfe, name, make(number, getattr(pywrap_tfe, name)))
    for name in ("Backprop", "Forwardprop"):
        whole = _TAPE_FUNCTIONS[-1] + name
        setattr(pywrap_tfe, whole, make(len(_TAPE_FUNCTIONS) - 1, getattr(pywrap_tfe, whole)))
    for number, name in enumerate(_WATCHER_FUNCTIONS, len(_TAPE_FUNCTIONS)):
        setattr(pywrap_tfe, name, make(number, getattr(pywrap_tfe, name)))


def tape_of(tape: tf.GradientTape) -> Any:
    """The native tape that a GradientTape records on; None if it is used up."""
    return None if tape._tape is None else tape._tape._tape


def tape_attributes(tape: tf.GradientTape) -> dict[str, Any]:
    """The attributes of a GradientTape that decide what `gradient` does."""
    names = ("_tape", "_persistent", "_recording", "_watch_accessed_variables")
    return {name: getattr(tape, name) for name in names}


def gradient_begins(tape: tf.GradientTape, *_: Any, **__: Any) -> None:
    """What `gradient` does before it computes anything."""
    if tape._tape is not None and tape._recording and not tape._persistent:
        tape._pop_tape()


def gradient_ends(tape: tf.GradientTape, *_: Any, **__: Any) -> None:
    """What `gradient` does after it has computed everything."""
    if not tape._persistent:
        tape._watched_variables = tape._tape.watched_variables()
        tape._tape = None


def handle_of_lazy_read(x: Any) -> Any:
    """The handle of what `variable.assign` gives, another view of it; None for anything else."""
    lazy = isinstance(x, resource_variable_ops._UnreadVariable)
    return x.handle if lazy and x._parent_op is None else None


def lazy_read(variable: tf.Variable) -> Any:
    """What `variable.assign` gives."""
    return variable._lazy_read(None)


def unread(variable: tf.Variable) -> Any:
    """What `variable.assign` gives, without telling tapes that the variable was accessed."""
    return resource_variable_ops._UnreadVariable(
        handle=variable.handle,
        dtype=variable.dtype,
        shape=variable._shape,
        in_graph_mode=variable._in_graph_mode,
        parent_op=None,
        unique_id=variable._unique_id,
    )


def read_code() -> Any:
    """The code of the function that every look at a tensor's value from Python goes through."""
    return EagerTensor._numpy_internal.__code__


def thread_state() -> tuple[Any, ...]:
    """What eager execution keeps for each thread: device scopes and the like."""
    return (context.context()._thread_local_data,)


@functools.cache
def is_immutable(kind: type) -> bool:
    """Whether objects of a class are taken to be unchangeable, or not to matter to any result."""
    if issubclass(kind, (tf.DType, tf.TensorShape, tf.TypeSpec, tf.Graph, inspect.Signature)):
        return True
    if kind is context.Context:  # `thread_state` is what matters of it
        return True
    if kind.__module__.partition(".")[0] == "terra_tf":  # the steps of an accelerated model
        return True
    # Initializers have done their work when a call makes no variables, which is never skipped.
    return kind.__module__.startswith(("keras.", "tf_keras.")) and any(
        base.__qualname__ in _IMMUTABLE_IN_KERAS for base in kind.__mro__
    )


_IMMUTABLE_IN_KERAS = frozenset(
    (
        "Initializer",
        "Node",
        "SymbolicArguments",
        "KerasTensor",
        "Tracker",
        "History",
        "KerasHistory",
    )
)


def has_no_more_than_items(kind: type) -> bool:
    """Whether attributes of a container are not for users: a list's of Keras's tracking."""
    return kind.__name__ == "TrackedList" and kind.__module__.startswith("keras.")


_BOOKKEEPING_NAMES = """
    _inbound_nodes _outbound_nodes _keras_history
    _tracker _tracked _auto_config _build_shapes_dict _last_wrapped_list_snapshot
    _initializer _initial_value _keras_api_names
    _compile_loss _compile_metrics _loss_tracker optimizer history stop_training
    _compile_config train_function test_function predict_function
    _compiled_trainable_state
    compiled_loss compiled_metrics _metrics_lock _obj_reference_counts_dict
    _layer_call_argspecs _call_result
"""
_BOOKKEEPING = frozenset(_BOOKKEEPING_NAMES.split())


def is_bookkeeping(owner: Any, name: str) -> bool:
    """Whether an attribute of a library object has no influence on what its calls compute."""
    if not type(owner).__module__.startswith(("keras.", "tf_keras.", "tensorflow.")) and not (
        isinstance(owner, tf.Module)
    ):
        return False
    return name in _BOOKKEEPING or name.startswith("_self_")


def only_names_things(attribute: str) -> bool:
    """Whether a library's attribute of a thread only serves to name what is made."""
    return attribute in ("name_scope_stack", "scope_name")


def is_made_anew(item: Any) -> bool:
    """Whether an item of a stack is made for each call, so that only its contents matter.

    AutoGraph puts one on a stack of its thread around whatever it does not convert, and around
    what a distribution strategy runs.
    """
    return type(item) is ag_ctx.ControlStatusCtx


LAYERS_OF_CALLS = frozenset(("entry_layer", "layer"))
"""What a call's context names the layer by whose call it is of."""

ASKED_OF_LAYERS_OF_CALLS = "_trainable"
"""All that calls inside read of that layer: the contexts of Keras 2 say by it what is `frozen`."""


def call_context_keys(value: Any) -> tuple[str, ...] | None:
    """For what Keras makes anew for each call of a layer: the keys that matter; else None."""
    kind = type(value)
    if kind.__name__ == "CallContext" and kind.__module__.startswith("keras."):
        return tuple(vars(value))
    if kind is dict and value.keys() >= {"layer", "inputs", "build_graph"}:
        return tuple(key for key in value if key != "inputs")
    return None


def library_functions(library: str) -> list[tuple[type, str, int]]:
    """The functions of "keras" or "tf_keras" that may be delegated.

    Returns:
      (class, name, position of an argument that may be an iterator, or -1).
    """
    root = sys.modules[library]
    found: list[tuple[type, str, int]] = [
        (root.layers.Layer, "__call__", -1),
        (root.losses.Loss, "__call__", -1),
    ]
    for kind in _with_subclasses(root.metrics.Metric):
        names = [name for name in ("update_state", "result") if name in vars(kind)]
        if kind.__module__.startswith(f"{library}."):
            found += [(kind, name, -1) for name in names]
    for kind in _with_subclasses(root.optimizers.Optimizer.__mro__[-3]):
        if kind.__module__.startswith(f"{library}."):
            for name in ("apply_gradients", "apply", "_backend_update_step"):
                if name in vars(kind):
                    found.append((kind, name, 1))
    containers = sys.modules.get(f"{library}.src.engine.compile_utils")
    if containers is not None:  # Keras 2: what a compiled model's step calls
        found.append((containers.LossesContainer, "__call__", -1))
        found.append((containers.MetricsContainer, "update_state", -1))
    return found


def op_functions() -> Iterator[tuple[str, types.CellType]]:
    """TensorFlow's public functions and operators around ops.

    The outermost function of each only looks after tracebacks or weak types, and calls the one in
    a cell of its closure: whoever replaces what is in the cell leaves the function itself, which
    the user's program may have imported, as it is.

    Yields:
      (name, the cell).
    """
    outermost = {
        traceback_utils.filter_traceback(print).__code__: "fn",
        weak_tensor_ops.weak_tensor_unary_op_wrapper(abs).__code__: "op",
        weak_tensor_ops.weak_tensor_binary_op_wrapper(pow).__code__: "op",
    }
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("tensorflow._api.v2.") and ".compat." not in name
    ]
    seen: set[int] = set()
    for owner in (tf.Tensor, tf, *modules):
        for name, function in list(vars(owner).items()):
            variable = outermost.get(getattr(function, "__code__", None))
            if variable is None:
                continue
            code = function.__code__
            cell = function.__closure__[code.co_freevars.index(variable)]
            if id(cell) not in seen:
                seen.add(id(cell))
                yield name, cell


VARIABLE_FUNCTIONS = ("assign", "assign_add", "assign_sub")
"""Functions around ops that are methods of variables."""

PlainVariable = resource_variable_ops.ResourceVariable


_MODULES_OF_OPS = """
    framework.ops framework.constant_op framework.dtypes framework.tensor
    framework.tensor_conversion framework.tensor_conversion_registry
    framework.override_binary_operator eager.execute ops.weak_tensor_ops
    ops.tensor_getitem_override ops.tensor_math_operator_overrides ops.array_ops ops.math_ops
    ops.nn_ops ops.nn_impl ops.gen_array_ops ops.gen_math_ops ops.gen_nn_ops util.dispatch
    util.traceback_utils
"""


def modules_of_ops() -> list[dict[str, Any]]:
    """The globals of the modules that functions around ops are made of."""
    names = _MODULES_OF_OPS.split()
    modules = [importlib.import_module(f"tensorflow.python.{name}") for name in names]
    return [vars(module) for module in (pywrap_tfe, *modules)]


def _with_subclasses(kind: type) -> list[type]:
    return list(
        dict.fromkeys([kind, *(x for s in kind.__subclasses__() for x in _with_subclasses(s))])
    )


def batch_function_of_keras(model: Any, kind: str) -> Any:
    """What Keras does with the outputs of an eager step before callbacks get them.

    Args:
      model: compiled with `run_eagerly=True`.
      kind: "train" or "test".

    Returns:
      A function of the model and the outputs; None where a call of Keras's is not one step.
    """
    if not hasattr(model, f"_{kind}_counter"):  # Keras 3
        if getattr(model, "steps_per_execution", None) != 1:
            return None
        return _as_tensors
    steps = model._steps_per_execution
    one = steps is None or steps.numpy().item() == 1
    if not one or model.autotune_steps_per_execution or model._cluster_coordinator:
        return None
    if model.jit_compile:
        return None
    return _count_training if kind == "train" else _count_testing


def _count_training(model: Any, outputs: Any) -> Any:
    model._train_counter.assign_add(1)
    return outputs


def _count_testing(model: Any, outputs: Any) -> Any:
    model._test_counter.assign_add(1)
    return outputs


def _as_tensors(_: Any, outputs: Any) -> Any:
    """What a step gives, as Keras 3 hands it to callbacks: numbers become tensors."""
    if type(outputs) is dict and all(type(value) is EagerTensor for value in outputs.values()):
        return dict(outputs)
    return tf.experimental.Optional.from_value(outputs).get_value()
