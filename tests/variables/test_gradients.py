"""`value_and_grad` and `grad`: gradients with respect to variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of
from helpers.replicas import ids

import jaxstrategy as js


def variable(strategy, value, **choices):
    with strategy.scope():
        return js.Variable(value, **choices)


def versions(strategy, value):
    return [v.tolist() for v in strategy.experimental_local_results(value)]


def test_gradients_outside_of_run(two):
    v = variable(two, 3.0)
    w = js.Variable([1.0, 2.0])
    value, grads = js.value_and_grad(lambda x: x * v**2, {"v": v})(2.0)
    assert value == 18 and grads == {"v": 12}
    assert js.grad(lambda: jnp.sum(w**3), [w])()[0].tolist() == [3, 12]


def test_gradients_come_in_a_pytree_like_the_variables(two):
    w, b = variable(two, [[1.0, 2.0]]), variable(two, 1.0)
    params = {"dense": (w, [b]), "none": None}

    def step(x):
        return js.grad(lambda: jnp.sum(w * x + b), params)()

    grads = two.run(step, (2.0,))
    wanted = {"dense": (0, [0]), "none": None}
    assert jax.tree.structure(grads) == jax.tree.structure(wanted)
    assert grads["dense"][0].tolist() == [[2, 2]] and grads["dense"][1] == [2]


def test_a_variable_that_is_not_read_has_gradient_zero(two):
    v, w = variable(two, 3.0), variable(two, [1.0, 2.0])
    grads = two.run(lambda: js.grad(lambda: v**2, [v, w])())
    assert grads[0] == 6 and grads[1].tolist() == [0, 0]


def test_what_is_returned_beside_the_scalar(two):
    v = variable(two, 3.0)

    def step(x):
        def loss(x, *, scale):
            return v * x * scale, {"x": x + 1}

        both = js.value_and_grad(loss, [v], has_aux=True)(x, scale=2.0)
        return both, js.grad(loss, [v], has_aux=True)(x, scale=2.0)

    ((value, aux), grads), (again, same) = two.run(step, (5.0,))
    assert (value, aux, grads) == (30, {"x": 6}, [10])
    assert again == grads and same == aux


def test_on_read_variables(two):
    v = variable(two, 3.0, synchronization="on_read", aggregation="mean")
    v.assign(ids(two, 1.0))

    def step(x):
        return js.grad(lambda: v**2 * x, v)()

    assert versions(two, two.run(step, (ids(two, 1.0),))) == [2, 8]
    assert js.grad(lambda: v**2, v)() == 3  # of the value that the copies combine to


def test_nested_gradients(two):
    v, w = variable(two, 3.0), variable(two, 2.0)

    def step():
        def inner():
            return js.grad(lambda: v**3 * w, v)()  # 3 v^2 w

        return js.grad(inner, [v, w])(), js.grad(inner, v)()

    assert two.run(step) == ([36, 27], 36)


@each_of("op", ["assign", "assign_add", "assign_sub"])
def test_assigning_what_is_differentiated(two, op):
    v = variable(two, 3.0, name="v")

    def loss():
        getattr(v, op)(1.0)
        return v.value()

    words = "Variable 'v' was assigned inside the function whose gradient.*afterwards"
    with pytest.raises(ValueError, match=words):
        two.run(lambda: js.grad(loss, v)())
    with pytest.raises(ValueError, match=words):
        js.grad(loss, v)()
    assert v.value() == 3 and two.run(lambda: v.assign_add(1.0)) == 4


@pytest.mark.slow
@each_of("where", ["run", "outside", "users-grad"])
def test_other_variables_are_assigned_on_the_way(two, where):
    w = variable(two, 2.0)
    moving = variable(two, 0.0, aggregation="mean")
    count = variable(two, 0, synchronization="on_read", aggregation="sum")

    def loss(x, w=w):
        h = w * x
        count.assign_add(jnp.int32(1))
        moving.assign(0.5 * moving + h)  # to the gradient a constant
        return h**2 + moving

    if where == "run":
        grad = two.run(lambda x: js.grad(loss, w)(x), (ids(two, 1.0),))
    elif where == "users-grad":
        grad = two.run(
            lambda x: jax.grad(lambda w: loss(x, w))(w.value()), (ids(two, 1.0),)
        )
    else:
        assert (
            js.grad(loss, w)(3.0) == 36 and moving.value() == 6 and count.value() == 1
        )
        return
    assert versions(two, grad) == [4, 16]
    assert moving.value() == 3 and count.value() == 2


def test_gradients_through_jit_remat_scan_and_collectives(two):
    v = variable(two, 2.0)

    @jax.jit
    def power(x):
        return v**2 * x

    def step(x):
        def loss():
            summed = js.get_replica_context().all_reduce("mean", v * x)
            scanned = jax.lax.scan(lambda c, _: (c * v, None), 1.0, length=3)[0]
            return power(x) + summed + scanned + jax.checkpoint(lambda x: v * x)(x)

        return js.grad(loss, v)()

    # 2 v x + mean(x) + 3 v^2 + x, by hand for x = 1 and 2; the mean's own gradient is
    # the mean of both replicas' incoming ones, times this replica's x.
    expected = [4 * x + x + 12 + x for x in (1, 2)]
    out = two.run(step, (ids(two, 1.0),))
    np.testing.assert_allclose(versions(two, out), expected)


@pytest.mark.slow
def test_functions_that_were_jitted_and_called_before():
    v = js.Variable(3.0)
    square = jax.jit(lambda x: v**2 * x)
    assert square(2.0) == 18
    slope = js.grad(lambda: square(2.0), v)
    assert slope() == 12
    v.assign(5.0)
    assert slope() == 20 and square(2.0) == 50
    both = js.Variable(2.0)
    slopes = js.grad(lambda: both * js.grad(lambda: square(2.0), v)(), [v, both])
    assert slopes() == [8, 20]  # d/dv of both * 4 v, and 4 v
    assert slope() == 20


def test_a_gradient_through_run(two):
    v = variable(two, 2.0, name="v")

    def step(x):
        return v**2 * x

    def loss(x):
        return two.reduce("sum", two.run(step, (x,)))

    words = "gradient with respect to variable 'v' is taken outside `run`"
    for _ in range(2):
        with pytest.raises(js.errors.ContextError, match=words):
            js.grad(loss, v)(ids(two))
        # It is not traced any more the second time.
        assert loss(ids(two)) == 4
    # Steps that use other variables may be run there.
    w = variable(two, 3.0)
    assert js.grad(lambda: w**2 + loss(ids(two)), w)() == 6


def test_what_is_no_variable():
    words = r"`variables` holds 3\.0, which is no Variable.*jax\.value_and_grad"
    with pytest.raises(TypeError, match=words):
        js.value_and_grad(lambda: 1.0, [js.Variable(1.0), 3.0])
    with pytest.raises(TypeError, match="requires real- or complex-valued inputs"):
        js.grad(lambda: 1.0, js.Variable(1))()
