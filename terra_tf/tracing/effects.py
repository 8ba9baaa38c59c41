"""What an op type does besides computing its outputs.

This decides how a node takes part in co-execution: computed in the graph, computed there behind a
gate, or run in place. Unknown stateful ops run in place behind a barrier, which is always right.
"""

from __future__ import annotations

import enum
import functools

from terra_tf import tensorflow_internals


class Effect(enum.Enum):
    """The effect of an op type."""

    PURE = "pure"
    READ = "reads a variable"
    ASSIGN = "assigns a variable"  # the new value is computed early, only its commit is gated
    WRITE = "writes variables in place"  # the whole op waits behind the gate
    LOCAL = "in place"  # touches nothing that generated graphs touch
    BARRIER = "in place, after all effects before it"


READS = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}
)
ASSIGNS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
_WRITE_PREFIXES = ("ResourceApply", "ResourceSparseApply", "ResourceScatter")
_WRITES = frozenset({"ResourceStridedSliceAssign"})
# These are not all marked as stateful.
_PYTHON_FUNCTIONS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_COLLECTIVES = ("Horovod", "Collective", "Nccl")
_LOCAL_PREFIXES = (
    "Random",
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "TruncatedNormal",
    "Print",
    "Iterator",
    "AnonymousIterator",
    "MakeIterator",
    "DeleteIterator",
    "OptionalGetValue",
    "OptionalHasValue",
    "WriteScalarSummary",
    "WriteSummary",
    "WriteHistogramSummary",
    "WriteImageSummary",
    "FlushSummaryWriter",
    "SummaryWriter",
    "CreateSummary",
    "LookupTable",
    "HashTable",
    "MutableHashTable",
    "AnonymousHashTable",
    "AnonymousMutable",
    "Queue",
    "FIFOQueue",
    "PaddingFIFOQueue",
    "PriorityQueue",
    "VarHandleOp",
    "ReadFile",
    "WriteFile",
    "MatchingFiles",
    "Timestamp",
    "NonDeterministicInts",
    "StatelessRandomGetKeyCounter",
)


@functools.cache
def effect_of(op: str) -> Effect:
    """The effect of an op type; a name that is no op type is a function, which can do anything."""
    definition = tensorflow_internals.op_def(op)
    if definition is None:
        return Effect.BARRIER
    if op in _PYTHON_FUNCTIONS or "IteratorGetNext" in op:  # functions of a dataset use variables
        return Effect.BARRIER
    if op.startswith(_COLLECTIVES):  # every rank has to make them in the order of its program
        return Effect.BARRIER if "Resource" in op else Effect.LOCAL
    if op == "StringFormat":  # its template holds Python values, which differ from call to call
        return Effect.LOCAL
    if op in READS:
        return Effect.READ
    if op in ASSIGNS:
        return Effect.ASSIGN
    if op.startswith(_WRITE_PREFIXES) or op in _WRITES:
        return Effect.WRITE
    if any(attr.type in ("func", "list(func)") for attr in definition.attr):
        return Effect.LOCAL if "Dataset" in op else Effect.BARRIER
    if "Dataset" in op:
        return Effect.LOCAL
    if not definition.is_stateful:
        return Effect.PURE
    return Effect.LOCAL if op.startswith(_LOCAL_PREFIXES) else Effect.BARRIER


ON_VARIABLES = (Effect.READ, Effect.ASSIGN, Effect.WRITE)


def runs_in_place(effect: Effect) -> bool:
    """Whether such an op is executed eagerly where the program calls it."""
    return effect in (Effect.LOCAL, Effect.BARRIER)


# Ops that cannot fail for any values of their inputs once shapes and dtypes are valid. What is
# missing here only costs a control edge, so the list need not be complete.
_INFALLIBLE_NAMES = """
Abs Acos Acosh Add AddN AddV2 All Any ArgMax ArgMin AsString Asin Asinh Atan Atan2 Atanh AvgPool
AvgPoolGrad BatchMatMulV2 BiasAdd BiasAddGrad BroadcastGradientArgs BroadcastTo Cast Ceil
ClipByValue Concat ConcatV2 Const Conv2D Conv2DBackpropFilter Conv2DBackpropInput Cos Cosh
Cumprod Cumsum DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter
DepthwiseConv2dNativeBackpropInput Div DivNoNan Einsum Elu EluGrad Equal Erf Erfc Exp ExpandDims
Expm1 Fill Floor FusedBatchNormGradV3 FusedBatchNormV3 Greater GreaterEqual Identity IdentityN
InvGrad IsFinite IsInf IsNan L2Loss LeakyRelu LeakyReluGrad Less LessEqual Log Log1p LogSoftmax
LogicalAnd LogicalNot LogicalOr MatMul Max MaxPool MaxPoolGrad Maximum Mean Min Minimum Mul
MulNoNan Neg NoOp NotEqual OneHot OnesLike Pack Pad PadV2 Pow Prod Range Rank ReadVariableOp
RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Reshape ResizeBilinear ReverseV2
Rint Round Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad Shape ShapeN Sigmoid SigmoidGrad Sign
Sin Sinh Size Slice Softmax SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad Softsign
SoftsignGrad Split SplitV Sqrt SqrtGrad Square SquaredDifference Squeeze StatelessRandomNormalV2
StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessTruncatedNormalV2 StopGradient
StridedSlice StridedSliceGrad StringFormat StringJoin StringLength StringLower StringUpper Sub
Sum Tan Tanh TanhGrad Tile TopKV2 Transpose Unpack VarIsInitializedOp VariableShape Xdivy
Xlog1py Xlogy ZerosLike
"""
_INFALLIBLE = frozenset(_INFALLIBLE_NAMES.split())


# Ops whose output shapes depend on values, so that what uses them may not fit.
_SHAPES_FROM_VALUES = (
    "Where",
    "Unique",
    "NonMaxSuppression",
    "DynamicPartition",
    "Sparse",
    "StringSplit",
    "RaggedRange",
    "SetDiff",
    "ListDiff",
    "BooleanMask",
    "DecodeJpeg",
    "DecodePng",
    "DecodeRaw",
    "DecodeImage",
)


# Their names begin alike, but their shapes follow from those of their inputs.
_SHAPES_FROM_SHAPES = frozenset({"SparseSoftmaxCrossEntropyWithLogits", "SparseMatMul"})


def makes_shape_of_values(op: str) -> bool:
    """Whether the shape of an output depends on input values."""
    return op.startswith(_SHAPES_FROM_VALUES) and op not in _SHAPES_FROM_SHAPES


INTEGERS = frozenset({3, 9})  # int32 and int64, in which sizes, axes and permutations are given


def may_fail(op: str) -> bool:
    """Whether the op may raise depending on values, all shapes being certain."""
    return op not in _INFALLIBLE and op not in ASSIGNS and not op.startswith("ResourceApply")
