"""Control flow and scoping of Python: the scenarios that AutoGraph's reference tests think of."""

import collections

import tensorflow as tf

from ..cases import case

Pair = collections.namedtuple("Pair", "left right")
THREE, FIVE, NONE = tf.constant(3), tf.constant(5), tf.constant(0)
ROWS = [tf.constant([1.0, 2.0]), tf.constant([4.0, -1.0, 3.0]), tf.zeros([0])]

# --- loops ---------------------------------------------------------------------------------------


@case([THREE], [FIVE], [NONE])
def autograph_while_on_tensor(s, n):
    """`while` on a tensor that counts down, perhaps not once."""
    total = tf.constant(0)
    while n > 0:
        total += n * n
        n -= 1
    return total


@case([THREE], [FIVE], [NONE])
def autograph_while_with_else(s, n):
    """`else` of a loop, reached unless `break` leaves it."""
    while n > 0:
        n -= 1
        if n == 3:
            break
    else:
        s.v.assign_add(1.0)
    return n


@case([0], [3], [7])
def autograph_break_and_continue(s, n):
    """`break` and `continue` in two nested loops."""
    total = tf.constant(0)
    for i in range(n):
        if i % 3 == 1:
            continue
        for j in range(n):
            if j > i:
                break
            total += i * j
        if total > 20:
            break
    return total


@case(*([rows] for rows in ROWS))
def autograph_for_over_a_tensor(s, rows):
    """Iteration over a tensor of varying length, with a variable written in each turn."""
    for row in rows:
        s.v.assign_add(row)
        if row < 0:
            break
    return s.v * 1.0


@case([3], [5], [0])
def autograph_for_over_a_dataset(s, n):
    """Iteration over a dataset made in the step, left early where it is long."""
    total = tf.constant(0, tf.int64)
    for value in tf.data.Dataset.range(n):
        if value > 3:
            break
        total += value
    return total


@case([2], [4], [0], raises=UnboundLocalError)
def autograph_loop_variable_afterwards(s, n):
    """The loop's own variable after the loop; there is none after no turns."""
    for i in range(n):
        s.v.assign_add(float(i))
    return tf.constant(i) + 1


@case([2], [4], [0])
def autograph_variable_made_in_a_loop(s, n):
    """A name that exists after the first turn only."""
    for i in range(n):
        found = s.v * float(i) if i == 0 else found + 1.0  # noqa: F821
    return found if n else None


@case([2], [3], [1])
def autograph_same_name_in_nested_loops(s, n):
    """Two nested loops over one name."""
    seen = []
    for i in range(n):
        for i in range(i, n):  # noqa: B020
            seen.append(i)
        s.v.assign_add(float(i))
    return tf.constant(seen), i


@case([2], [4])
def autograph_value_becomes_a_tensor(s, n):
    """A loop variable that begins as a number, becomes an int and then a float tensor."""
    value = 1
    for i in range(n):
        value = value + 1 if i == 0 else tf.cast(value, tf.float32) * s.v
    return value


@case([1], [3])
def autograph_shape_grows_in_a_loop(s, n):
    """Illegal in a graph's loop: a value whose shape, and one whose dtype, changes."""
    rows, number = tf.ones([1, 2]), tf.constant(1)
    for i in range(n):
        rows = tf.concat([rows, rows * 2.0], axis=i % 2)
        number = tf.cast(number, tf.float64 if i % 2 else tf.float32) * 1.5
    return rows, number


@case([3], [5], raises=(TypeError, tf.errors.InvalidArgumentError))
def autograph_dtypes_clash_in_a_loop(s, n):
    """A loop that adds an int to a float in its fifth turn."""
    total = tf.constant(0.0)
    for i in range(n):
        s.v.assign_add(1.0)
        total += tf.constant(i) if i == 4 else tf.constant(float(i))
    return total


@case([2], [4])
def autograph_loop_calls_functions(s, n):
    """Functions with loops and branches of their own, called from two places of a loop."""

    def power(x, times):
        for _ in range(times):
            x = x * x if x < 3.0 else x - 2.0
        return x

    total = s.v * 1.0
    for i in range(n):
        total = power(total, i) + power(tf.constant(float(i)), 2)
    return total


@case([4], [6])
def autograph_tensor_array_and_list(s, n):
    """A `TensorArray` and a list filled side by side, one read while it grows."""
    array, items = tf.TensorArray(tf.float32, 0, dynamic_size=True, clear_after_read=False), []
    for i in range(n):
        array = array.write(i, s.v * float(i))
        items.append(array.read(i // 2))
    return array.stack(), tf.stack(items[::-1])


# --- names, attributes, items --------------------------------------------------------------------


@case([1.0], [-1.0])
def autograph_composite_names(s, x):
    """Attributes and items assigned in a branch and in a loop."""
    s.pair, s.items = Pair(x, [x]), {"a": s.v * x}
    if s.items["a"] > 0:
        s.pair.right[0] = s.items["a"] * 2.0
        s.items["b"] = tf.constant(1.0)
    else:
        s.pair = s.pair._replace(left=s.v * 3.0)
    for key in list(s.items):
        s.items[key] += s.pair.left
    return s.pair, s.items


@case([tf.constant(1.0)], [tf.constant(-1.0)])
def autograph_closure_and_nonlocal(s, x):
    """Nested functions that read and rebind names of the step."""
    count, total = 0, tf.constant(0.0)

    def add(value):
        nonlocal count, total
        count += 1
        total = total + value

    for scale in (1.0, 2.0, 3.0):
        if x * scale > 1.5:
            continue
        add(x * scale)
    return total, count


@case([1], [2])
def autograph_late_binding_of_closures(s, n):
    """Functions made in a loop see its variable's last value, defaults an earlier one."""
    made = [(lambda: s.v * i, lambda j=i: s.v * j) for i in map(float, range(n + 1))]  # noqa: B023
    return [(late(), early()) for late, early in made]


@case([tf.constant([1, 2, 3])], [tf.constant([4, 5, 6])])
def autograph_unpacking(s, x):
    """Unpacking of tensors, starred and nested."""
    first, *others = x
    (a, b), c = (others[0], others[1]), first
    a, b = b, a
    return a - b, c, dict(zip("xyz", x, strict=True))


@case([tf.constant([[1, 2], [3, 4]]), 0], [tf.constant([[1, 2], [3, 4]]), 1])
def autograph_slices(s, x, axis):
    """Extended slices, an ellipsis, a new axis, a mask, a slice by a tensor."""
    return x[..., axis], x[::-1, tf.newaxis], x[x > 2], x[: tf.reduce_min(x)], x[axis][-1]


# --- branches ------------------------------------------------------------------------------------


@case([tf.constant(1.0)], [tf.constant(-1.0)], [tf.constant(0.0)])
def autograph_nested_conditions(s, x):
    """`if` in `if`, conditional expressions, chained comparisons."""
    if x > 0:
        y = x * 2.0 if x > 0.5 else x
    elif -2.0 < x < 0:
        y = s.v - x
        if y > 3.0:
            s.v.assign(0.0)
    else:
        y = None
    return y, s.v * 1.0


@case([2, 0.0], [0, 1.0], [2, 1.0])
def autograph_logical_expressions(s, n, x):
    """`and` and `or` evaluate no more than they need, and give a tensor, not a bool."""

    def noted(value):
        s.log.append(n)
        return value * tf.constant(1.0)

    return noted(x) and noted(n), noted(x) or noted(5.0), not noted(x), noted(n) is not None


@case([tf.constant(2.0)], [tf.constant(-2.0)], raises=UnboundLocalError)
def autograph_name_of_one_branch(s, x):
    """A name that only one branch defines, used after the branch."""
    s.v.assign_add(x)
    if x > 0:
        y = x * 2.0
    return y + s.v


@case([1], [0], coexecuted=3)
def autograph_branches_of_other_kinds(s, n):
    """Illegal in a graph: branches that return other dtypes, shapes, structures."""
    if n:
        return tf.constant([1.0, 2.0]) * s.v
    return {"a": tf.constant(1), "b": None}


# --- early return, exceptions, assertions --------------------------------------------------------


@case([tf.constant(1)], [tf.constant(5)], [tf.constant(-1)])
def autograph_early_returns(s, x):
    """Returns from a loop, from a branch in it, from the end, and of nothing."""
    if x < 0:
        return None
    for i in range(4):
        s.v.assign_add(1.0)
        if x + i > 3:
            return i, s.v * 2.0
        if x == 9:
            return
    return tf.constant(-1), x


@case([1.0], [-1.0], raises=AssertionError)
def autograph_assert_statement(s, x):
    """`assert` on a tensor, with a message that is made only where it fails."""
    y = s.v.assign_add(1.0) * x
    assert y > 0, f"negative: {s.log.append('message') or float(y)}"
    return y


@case([1], [0], [3])
def autograph_try_in_a_loop(s, n):
    """`try` with `continue`, `break` and `else` inside a loop, and a `return` in `finally`."""

    def guarded(i):
        try:
            if i == 2:
                raise KeyError(i)
            return s.v + float(i)
        except KeyError:
            s.v.assign_add(0.5)
            return s.v * 0.0
        finally:
            s.log.append(i)

    total = tf.constant(0.0)
    for i in range(n + 1):
        try:
            if i % 2:
                continue
            total += guarded(i)
        finally:
            total += 1.0
    return total


@case([3], [0], [1], [2], raises=(ZeroDivisionError, ValueError))
def autograph_raise_with_a_cause(s, n):
    """An exception chained to another one passes out of three functions and a loop."""

    def inner():
        s.v.assign_add(1.0)
        return [1 // n, 1.0][n == 2]

    for _ in range(2):
        try:
            value = inner()
        except ZeroDivisionError as error:
            raise ValueError(f"from {n}, {float(s.v)}") from error
        if value == 1.0:
            raise ZeroDivisionError("second")
    return s.v * value


# --- generators, calls, builtins -----------------------------------------------------------------


@case([3], [1], [0])
def autograph_generators(s, n):
    """Generators with state, `yield from`, `send`, `return`, and one that is not used up."""

    def values():
        for i in range(n):
            got = yield s.v * float(i)
            s.log.append(got)
        return n

    def delegating():
        count = yield from values()
        yield tf.constant(float(count))

    running = delegating()
    first = next(running)
    if n > 1:
        first += running.send("sent")
    return first, list(running), sum(values(), tf.constant(0.0))


@case([3], [1])
def autograph_recursion(s, n):
    """Mutual recursion, with tensors that decide its depth."""

    def even(x):
        return x * 0.0 + 1.0 if x == 0 else odd(x - 1.0)

    def odd(x):
        return x if x == 0 else even(x - 1.0)

    return even(tf.constant(float(n))), odd(s.v * n)


@case(*([rows] for rows in ROWS))
def autograph_builtins(s, rows):
    """`len`, `range`, `enumerate`, `zip`, `map`, `filter`, `any`, `all`, `sorted`, `sum`, ... ."""
    pairs = [(i, a * b) for i, (a, b) in enumerate(zip(rows, reversed(list(rows)), strict=True))]
    kept = list(filter(lambda row: row > 1.5, map(tf.square, rows)))
    print(len(rows), any(rows > 0), all(rows > 0), [f"{row:.1f}" for row in sorted(rows)])
    ranged = sum(rows[i] for i in range(len(rows)))
    return pairs, kept, ranged, max(rows, default=None), [abs(int(row)) for row in rows]


@case([2], [3])
def autograph_call_forms(s, n):
    """Lambdas, defaults, `*args`, `**kwargs`, callable objects, class and static methods."""

    class Calls:
        @classmethod
        def one(cls, x, *others, scale=2.0, **named):
            return x * scale + sum(others) + sum(named.values())

        @staticmethod
        def two(x, y=s.v * 1.0):
            return x + y

        def __call__(self, *args, **kwargs):
            return self.one(*args, **kwargs)

    calls = Calls()
    doubled = (lambda f: lambda *a: f(f(*a), *a))(calls)
    return doubled(s.v * n, 1.0), calls(s.v, scale=float(n), extra=tf.constant(3.0)), calls.two(n)


@case([tf.constant(2.0)], [tf.constant(3.0)])
def autograph_operators_of_user_classes(s, x):
    """Operators, properties and iteration that a user's class implements with ops."""

    class Interval:
        def __init__(self, low, high):
            self.low, self.high = low, high

        width = property(lambda self: self.high - self.low)

        def __add__(self, other):
            return Interval(self.low + other.low, self.high + other.high)

        def __contains__(self, value):
            return bool(self.low <= value) and bool(value <= self.high)

        def __iter__(self):
            yield from (self.low, self.high)

    total = sum((Interval(s.v * i, x * (i + 1)) for i in range(2)), start=Interval(x, x))
    return list(total), total.width, 2.5 in total


@case([1.0], [2.0])
def autograph_printed_text(s, x):
    """`print` of tensors, in a loop and with separators, in the order of TensorFlow's effects."""
    for i in range(2):
        print("turn", i, s.v.assign_add(x) * 1.0, sep="|", end=";\n")
    print(*tf.constant([1, 2]), f"{s.v.numpy():5.2f}", repr(tf.constant("text")))
