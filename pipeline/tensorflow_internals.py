"""The only module that touches TensorFlow's and Keras's private API.

Everything else of `pipeline` uses public names or the functions below. Each states which private
name it needs; `tests/pipeline/test_tensorflow_internals.py` has a test for each, so that a new
release shows at once which one it broke.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.random import seed_generator
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager import backprop, backprop_util, context, execute, record
from tensorflow.python.eager.polymorphic_function import autograph_util, polymorphic_function
from tensorflow.python.framework import op_def_registry, ops, random_seed
from tensorflow.python.ops import gen_random_ops, gen_stateful_random_ops
from tensorflow.tsl.profiler.protobuf import xplane_pb2


def sublayers(layer: Any) -> list[Any]:
    """A Keras layer and all layers in it, from the outside in (`Layer._flatten_layers`)."""
    return list(layer._flatten_layers())


def clear_added_losses(layer: Any) -> None:
    """Forgets what earlier calls of a Keras 3 layer added as losses (`Layer._clear_losses`)."""
    layer._clear_losses()


def added_losses(layer: Any) -> list[Any]:
    """What a Keras 3 layer and those in it added by `add_loss` (`Layer._get_own_losses`)."""
    return [loss for part in sublayers(layer) for loss in part._get_own_losses()]


def seed_generators(layer: Any) -> list[keras.random.SeedGenerator]:
    """The sources of random numbers of a Keras 3 layer itself (`Layer._seed_generators`)."""
    return list(layer._seed_generators)


def global_seed_state() -> keras.Variable:
    """The state of Keras's source of random numbers for calls without a seed of their own."""
    return seed_generator.global_seed_generator().state


def own_seed(generator: keras.random.SeedGenerator) -> int | None:
    """The seed that the user gave to a generator, or None (`SeedGenerator._initial_seed`)."""
    return generator._initial_seed


def make_legacy_slots(optimizer: Any, variables: list[tf.Variable]) -> None:
    """Makes what a `tf_keras.optimizers.legacy` optimizer keeps (`_create_all_weights`)."""
    optimizer._create_all_weights(variables)


def legacy_settings(optimizer: Any) -> dict[str, Any]:
    """Learning rate and the like of a legacy optimizer, as variables, numbers or schedules."""
    return dict(optimizer._hyper)


def initializer_seed(initializer: Any) -> Any:
    """The seed that the user gave to an initializer, or None (`_init_seed`)."""
    return getattr(initializer, "_init_seed", None)


def keras_mask(tensor: Any) -> Any:
    """The mask that a Keras layer attached to its output, or None (`_keras_mask`)."""
    return getattr(tensor, "_keras_mask", None)


def set_keras_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask, as the layer that made it would have (`_keras_mask`)."""
    tensor._keras_mask = mask


def capture(tensor: Any) -> Any:
    """A tensor as one of the function that is being traced (`FuncGraph.capture`)."""
    return tf.compat.v1.get_default_graph().capture(tensor)


@functools.cache
def _exact_options() -> context.FunctionCallOptions:
    config = context.context().config
    config.allow_soft_placement = True
    rewrite = config.graph_options.rewrite_options
    off = rewriter_config_pb2.RewriterConfig.OFF
    rewrite.remapping = off
    rewrite.arithmetic_optimization = off
    rewrite.constant_folding = off
    return context.FunctionCallOptions(config_proto=config)


@contextmanager
def exact_graphs() -> Iterator[None]:
    """Compiled functions called inside compute each op as it stands (`function_call_options`).

    Otherwise Grappler fuses and reorders ops depending on what else a function returns, and the
    same forward pass would round differently where it is kept and where it is recomputed.
    """
    eager = context.context()
    before = eager.function_call_options
    eager.function_call_options = _exact_options()
    try:
        yield
    finally:
        eager.function_call_options = before


@functools.cache
def _literal_options() -> context.FunctionCallOptions:
    config = context.context().config
    config.allow_soft_placement = False
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.opt_level = config_pb2.OptimizerOptions.L0
    return context.FunctionCallOptions(config_proto=config)


@contextmanager
def literal_graphs() -> Iterator[None]:
    """Compiled functions called inside run node by node as they stand, where the nodes say.

    Nothing is folded, fused or moved (`function_call_options`, Grappler and graph passes off).
    """
    eager = context.context()
    before = eager.function_call_options
    eager.function_call_options = _literal_options()
    try:
        yield
    finally:
        eager.function_call_options = before


def read_trace(path: str) -> xplane_pb2.XSpace:
    """The planes of a file that TensorFlow's profiler wrote (its message `XSpace`)."""
    space = xplane_pb2.XSpace()
    with open(path, "rb") as file:
        space.ParseFromString(file.read())
    return space


def nbytes(tensor: Any) -> int:
    """The size of an eager tensor's data, without a copy (`EagerTensor._num_elements`)."""
    return tensor._num_elements() * tensor.dtype.size


@contextmanager
def direct_updates(optimizer: Any) -> Iterator[None]:
    """Inside, an optimizer of Keras 3 updates variables itself (`_backend_update_step`).

    Otherwise it goes through `tf.distribute`, and then the graph that it is called in is never
    freed, and with it the memory of every variable that the graph uses.
    """
    parts = [
        part
        for part in (optimizer, getattr(optimizer, "inner_optimizer", None))
        if isinstance(part, keras.optimizers.Optimizer) and hasattr(part, "_backend_update_step")
    ]
    for part in parts:

        def update(
            gradients: Any, variables: Any, learning_rate: Any, update_step: Any = part.update_step
        ) -> None:
            for gradient, variable in zip(gradients, variables, strict=True):
                update_step(gradient, getattr(variable, "value", variable), learning_rate)

        vars(part)["_backend_update_step"] = update
    try:
        yield
    finally:
        for part in parts:
            del vars(part)["_backend_update_step"]


class _SharedVariable(keras.Variable):
    """A `keras.Variable` that is another view of a `tf.Variable` (`Variable._initialize`)."""

    def _initialize(self, value: Any) -> None:
        self._value = value


def as_keras_variable(variable: tf.Variable) -> keras.Variable:
    """A view of a `tf.Variable` for optimizers of Keras 3, which take no others."""
    name = variable.name.split(":")[0].replace("/", "_")
    return _SharedVariable(variable, dtype=variable.dtype.name, trainable=True, name=name)


# --- random ops ----------------------------------------------------------------------------------


class _Redirection(threading.local):
    """Where the random ops of this thread get their seeds; None: they are left alone."""

    source: Callable[[int], tf.Tensor] | None = None


_redirection = _Redirection()


@contextmanager
def random_ops_from(source: Callable[[int], tf.Tensor]) -> Iterator[None]:
    """Replaces the stateful random ops that this thread calls inside by stateless ones.

    The functions of `gen_random_ops` and `gen_stateful_random_ops`, through which TensorFlow's
    Python calls these ops, are replaced once, by functions that ask whether they are redirected.

    Args:
        source: gives each op its seed, int64 [2]; called with the op's own seed, or 0.
    """
    _install_redirection()
    if "tf_keras.src.backend" in sys.modules:
        _install_legacy_seeds()
    before, _redirection.source = _redirection.source, source
    try:
        yield
    finally:
        _redirection.source = before


def _uniform(seed: tf.Tensor, shape: Any, dtype: Any, **_: Any) -> tf.Tensor:
    return tf.random.stateless_uniform(shape, seed, dtype=dtype)


def _uniform_int(seed: tf.Tensor, shape: Any, minval: Any, maxval: Any, **_: Any) -> tf.Tensor:
    minval = tf.convert_to_tensor(minval)
    return tf.random.stateless_uniform(shape, seed, minval, maxval, minval.dtype)


def _normal(seed: tf.Tensor, shape: Any, dtype: Any, **_: Any) -> tf.Tensor:
    return tf.random.stateless_normal(shape, seed, dtype=dtype)


def _truncated_normal(seed: tf.Tensor, shape: Any, dtype: Any, **_: Any) -> tf.Tensor:
    return tf.random.stateless_truncated_normal(shape, seed, dtype=dtype)


def _parameterized_truncated_normal(
    seed: tf.Tensor, shape: Any, means: Any, stdevs: Any, minvals: Any, maxvals: Any, **_: Any
) -> tf.Tensor:
    return tf.random.stateless_parameterized_truncated_normal(
        shape, seed, means, stdevs, minvals, maxvals
    )


def _multinomial(
    seed: tf.Tensor, logits: Any, num_samples: Any, output_dtype: Any = tf.int64, **_: Any
) -> tf.Tensor:
    return tf.random.stateless_categorical(logits, num_samples, seed, dtype=output_dtype)


def _shuffle(seed: tf.Tensor, value: Any, **_: Any) -> tf.Tensor:
    return tf.random.experimental.stateless_shuffle(value, seed)


def _gamma(seed: tf.Tensor, shape: Any, alpha: Any, **_: Any) -> tf.Tensor:
    alpha = tf.convert_to_tensor(alpha)
    shape = tf.concat([shape, tf.shape(alpha)], 0)
    return tf.random.stateless_gamma(shape, seed, alpha, dtype=alpha.dtype)


def _poisson(seed: tf.Tensor, shape: Any, rate: Any, dtype: Any = tf.int64, **_: Any) -> tf.Tensor:
    rate = tf.convert_to_tensor(rate)
    shape = tf.concat([shape, tf.shape(rate)], 0)
    return tf.random.stateless_poisson(shape, seed, rate, dtype=dtype)


def _generator_state(seed: tf.Tensor, resource: Any, alg: Any, delta: Any, **_: Any) -> tf.Tensor:
    """What `tf.random.Generator` gets from its variable: a counter, of one or two, and a key."""
    return tf.random.stateless_uniform([3], seed, None, None, tf.int64)


def _binomial(
    seed: tf.Tensor,
    resource: Any,
    algorithm: Any,
    shape: Any,
    counts: Any,
    probs: Any,
    dtype: Any = tf.int64,
    **_: Any,
) -> tf.Tensor:
    return tf.random.stateless_binomial(shape, seed, counts, probs, dtype)


# Module, function → the function in its place, called with the seed and the same arguments.
_STATELESS = (
    (gen_random_ops, "random_uniform", _uniform),
    (gen_random_ops, "random_uniform_int", _uniform_int),
    (gen_random_ops, "random_standard_normal", _normal),
    (gen_random_ops, "truncated_normal", _truncated_normal),
    (gen_random_ops, "parameterized_truncated_normal", _parameterized_truncated_normal),
    (gen_random_ops, "multinomial", _multinomial),
    (gen_random_ops, "random_shuffle", _shuffle),
    (gen_random_ops, "random_gamma", _gamma),
    (gen_random_ops, "random_poisson_v2", _poisson),
    (gen_stateful_random_ops, "rng_read_and_skip", _generator_state),
    (gen_stateful_random_ops, "stateful_random_binomial", _binomial),
)


@functools.cache
def _install_redirection() -> None:
    for module, name, replacement in _STATELESS:
        setattr(module, name, _redirected(getattr(module, name), replacement))
    random_seed.get_seed = _own_seeds(random_seed.get_seed)


@functools.cache
def _install_legacy_seeds() -> None:
    """Keeps `tf_keras` from counting how often a layer was called (`make_legacy_seed`)."""
    generator = sys.modules["tf_keras.src.backend"].RandomGenerator
    count_calls = generator.make_legacy_seed

    @functools.wraps(count_calls)
    def make_legacy_seed(self: Any) -> int | None:
        return count_calls(self) if _redirection.source is None else self._seed

    generator.make_legacy_seed = make_legacy_seed


def _redirected(stateful: Callable[..., Any], stateless: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stateful)
    def op(*args: Any, seed: int = 0, seed2: int = 0, **kwargs: Any) -> Any:
        source = _redirection.source
        if source is None:
            given = {"seed": seed, "seed2": seed2} if takes_seeds else {}
            return stateful(*args, **given, **kwargs)
        kwargs.pop("name", None)
        return stateless(source(seed2 or 0), *args, **kwargs)

    takes_seeds = "seed2" in inspect.signature(stateful).parameters
    return op


def _own_seeds(get_seed: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_seed)
    def seeds(op_seed: int | None) -> tuple[int | None, int | None]:
        # Redirected, ops do not take part in the sequence that `tf.random.set_seed` begins.
        return get_seed(op_seed) if _redirection.source is None else (0, op_seed or 0)

    return seeds


# --- functions inside stages ---------------------------------------------------------------------


class _InnerFunctions(threading.local):
    """What this thread does with `tf.function`s that a stage calls: `inline`, `copy` or nothing."""

    def __init__(self) -> None:
        self.way: str | None = None
        # Function → its copy, which has captured what this thread draws from.
        self.copies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


_inner_functions = _InnerFunctions()


@contextmanager
def inner_functions(way: str) -> Iterator[None]:
    """Has the `tf.function`s that are called inside depend on nothing outside the stage.

    What such a function was traced with first stays in it (`Function.__call__`).

    Args:
        way: `inline` puts their ops into the graph that is being traced; as graphs of their own
            they would keep values that they captured of that graph and fail in the next. `copy`
            calls a copy of each, which was not traced before, with other random numbers, outside.
    """
    _install_inner_functions()
    before, _inner_functions.way = _inner_functions.way, way
    try:
        yield
    finally:
        _inner_functions.way = before


@functools.cache
def _install_inner_functions() -> None:
    function_class = polymorphic_function.Function
    call = function_class.__call__

    @functools.wraps(call)
    def call_as_told(self: Any, *args: Any, **kwargs: Any) -> Any:
        way = _inner_functions.way
        if way == "inline" and not self._jit_compile and not tf.executing_eagerly():
            function = self._python_function
            if self._autograph:
                function = autograph_util.py_func_from_autograph(
                    function, self._experimental_autograph_options
                )
            converts = ag_ctx.Status.ENABLED if self._autograph else ag_ctx.Status.DISABLED
            with ag_ctx.ControlStatusCtx(converts):
                return function(*args, **kwargs)
        if way == "copy" and tf.executing_eagerly():
            copies = _inner_functions.copies
            if self not in copies:
                copies[self] = self._clone(None)
            return call(copies[self], *args, **kwargs)
        return call(self, *args, **kwargs)

    function_class.__call__ = call_as_told


# --- recording eager ops -------------------------------------------------------------------------


@contextmanager
def recorded_ops(
    sources: list[Any], on_op: Callable[..., None], on_function: Callable[..., None]
) -> Iterator[None]:
    """Tells of every eager op that this thread runs inside and that a gradient could go through.

    Args:
        sources: tensors and handles of variables that gradients are wanted for.
        on_op: called as `on_op(type, inputs, attrs, outputs)` (`Context.add_op_callback`, and
            `execute.record_gradient` for ops whose inputs Python had to convert).
        on_function: called for what knows its gradient, as `on_function(name, outputs, inputs,
            backward)` (`record.record_operation`); the ops that it consists of were told before.
    """

    def callback(
        op_type: str, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None
    ) -> None:
        if graph is None and not pywrap_tfe.TFE_Py_TapeSetIsStopped():
            on_op(op_type, inputs, attrs, outputs)

    eager = context.context()
    before = _watch.on_op, _watch.on_function
    _watch.on_op, _watch.on_function = on_op, on_function
    # With it, functions that are called make the gradient that `on_function` is told.
    tape = tf.GradientTape(persistent=False)
    with _entry_points.replaced(), tape:
        for source in sources:
            tape.watch(source)
        eager.add_op_callback(callback)
        try:
            yield
        finally:
            eager.remove_op_callback(callback)
            _watch.on_op, _watch.on_function = before


class _RecordWatch(threading.local):
    """Who is told in this thread of what tapes record."""

    on_op: Callable[..., None] | None = None
    on_function: Callable[..., None] | None = None


_watch = _RecordWatch()


def _read(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return type(argument)(map(_read, argument)) if type(argument) in (list, tuple) else argument
    return argument.value() if isinstance(argument, tf.Variable) else argument


class _EntryPoints:
    """Replaces the functions that ops and gradients pass through while anything is recorded.

    Not for longer: another thread's first use may come late, everything else that hooks these
    functions expects to find TensorFlow's own, and an op has a frame more on its stack.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo = contextlib.ExitStack()

    @contextmanager
    def replaced(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                for module, name, function in _watching_entry_points():
                    undo = functools.partial(self._put_back, module, name, function)
                    self._undo.callback(undo, getattr(module, name))
                    setattr(module, name, function)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._undo.close()

    @staticmethod
    def _put_back(module: Any, name: str, ours: Any, before: Any) -> None:
        # Whoever replaced it after us still calls ours, which passes on what nobody watches.
        if getattr(module, name) is ours:
            setattr(module, name, before)


_entry_points = _EntryPoints()


def _watching_entry_points() -> list[tuple[Any, str, Callable[..., Any]]]:
    """What tells `_watch`, as (module, name, function over the present one)."""
    fast_path = pywrap_tfe.TFE_Py_FastPathExecute

    @functools.wraps(fast_path)
    def with_variables_read(ctx: Any, op_type: str, name: Any, *args: Any) -> Any:
        # It would read variables itself and tell nobody.
        if _watch.on_op is not None:
            args = tuple(map(_read, args))
        return fast_path(ctx, op_type, name, *args)

    original, record_op = record.record_operation, execute.record_gradient

    @functools.wraps(record_op)
    def record_gradient(op_type: str, inputs: Any, attrs: Any, results: Any) -> Any:
        if _watch.on_op is not None and tf.executing_eagerly():
            _watch.on_op(op_type, inputs, attrs, results)
        return record_op(op_type, inputs, attrs, results)

    @functools.wraps(original)
    def record_operation(
        op_type: str,
        output_tensors: Any,
        input_tensors: Any,
        backward_function: Any,
        forward_function: Any = None,
    ) -> None:
        told = _watch.on_function
        eagerly = all(isinstance(t, ops.EagerTensor) for t in output_tensors)
        if told is not None and eagerly and not pywrap_tfe.TFE_Py_TapeSetIsStopped():
            told(op_type, output_tensors, input_tensors, backward_function)
        original(op_type, output_tensors, input_tensors, backward_function, forward_function)

    return [
        (pywrap_tfe, "TFE_Py_FastPathExecute", with_variables_read),
        (execute, "record_gradient", record_gradient),
        (record, "record_operation", record_operation),
    ]


def op_gradient(
    op_type: str, attrs: Any, inputs: list[Any], outputs: list[Any], outgoing: Any, skipped: Any
) -> Any:
    """The gradients of an eager op's inputs, as a tape computes them (`_gradient_function`)."""
    return backprop._gradient_function(
        op_type, attrs, len(inputs), inputs, outputs, outgoing, skipped, ""
    )


@functools.cache
def has_gradient(op_type: str) -> bool:
    """Whether gradients go through ops of this type (`ops._gradient_registry`)."""
    try:
        return ops._gradient_registry.lookup(op_type) is not None
    except LookupError:
        return False


@functools.cache
def is_stateful(op_type: str) -> bool:
    """Whether ops of this type depend on more than their inputs (`op_def_registry`)."""
    definition = op_def_registry.get(op_type)
    return definition is None or definition.is_stateful


def is_trainable_type(dtype: Any) -> bool:
    """Whether tensors of this type have gradients (`backprop_util.IsTrainable`)."""
    return backprop_util.IsTrainable(dtype)


def run_op(op_type: str, inputs: list[Any], attrs: Any, num_outputs: int) -> list[Any]:
    """Runs an eager op as it was recorded (`execute.execute`)."""
    attrs = tuple(attrs) if attrs is not None else None
    return execute.quick_execute(op_type, num_outputs, inputs, attrs, context.context())
