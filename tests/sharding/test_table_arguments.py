"""Odd tables, ids, rows and optimizers are refused with what was wanted."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import each_of

import jaxstrategy as js
from jaxstrategy.sharded import SGD, Adagrad, Embedding, lookup

TABLE = np.ones((4, 2), np.float32)
SLICES = js.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]))


def state(optimizer=None):
    return Embedding(4, 2, optimizer).from_rows(TABLE)


def returning(value):
    return Embedding(4, 2, initializer=lambda key, shape, dtype: value)


KEY = np.zeros(2, np.uint32)
REFUSED = [
    (lambda: lookup("words", [0]), TypeError, "`table` was 'words'; an array of num"),
    (lambda: lookup(3.0, [0]), ValueError, r"`table` has shape \(\); one of \[rows"),
    (lambda: lookup(TABLE[:0], [0]), ValueError, "with at least one row was wanted"),
    (
        lambda: lookup(state(), [0]),
        TypeError,
        "`table` was Emb.*, such as `state.table`, was w",
    ),
    (lambda: lookup(TABLE, [0.5]), TypeError, r"`ids` are float32\[1\]; whole numbers"),
    (
        lambda: lookup(TABLE, [True]),
        TypeError,
        "`ids` was .*; an array of numbers, with",
    ),
    (lambda: lookup(TABLE, [[0], [1, 2]]), TypeError, "filled up with -1"),
    (lambda: lookup(TABLE, np.array([2**40])), ValueError, "int32 holds"),
    (lambda: lookup(TABLE, [0], "max"), ValueError, "`combiner` was 'max'; 'sum', 'm"),
    (lambda: lookup(TABLE, [0], ["sum"]), ValueError, r"`combiner` was \['sum'\]; "),
    (lambda: lookup(TABLE, 0, "sum"), ValueError, "for one id; ids .* were wanted"),
    (lambda: lookup(TABLE, [0], weights=[1.0]), ValueError, "without a `combiner`"),
    (
        lambda: lookup(TABLE, [0], "sum", weights=[1.0, 2.0]),
        ValueError,
        r"`weights` have shape \(2,\) and `ids` \(1,\); one weight for each",
    ),
    (
        lambda: lookup(TABLE, [0], "sum", weights=[1j]),
        TypeError,
        "`weights` are complex64; real numbers were wanted",
    ),
    (lambda: Embedding(0, 2), ValueError, "`rows` was 0; a whole number from 1"),
    (lambda: Embedding(4, 2.0), TypeError, "`features` was 2.0; a whole number"),
    (lambda: Embedding(4, 2, multiple=-1), ValueError, "`multiple` was -1; a whole"),
    (lambda: Embedding(4, 2, "sgd"), TypeError, "`optimizer` was 'sgd'; `js.sharded"),
    (lambda: Embedding(4, 2, initializer=0), TypeError, "`initializer` was 0; a funct"),
    (lambda: Embedding(4, 2, dtype="int32"), TypeError, "`dtype` was 'int32'; a type"),
    (lambda: Embedding(4, 2, dtype="word"), TypeError, "`dtype` was 'word'; a type"),
    (
        lambda: returning(TABLE.T).init(KEY),
        ValueError,
        r"`initializer` gave an array of shape \(2, 4\); \(4, 2\), rows and feat",
    ),
    (lambda: returning("x").init(KEY), TypeError, "`initializer` was 'x'; an array"),
    (lambda: Embedding(5, 2).from_rows(TABLE), ValueError, r"`rows` gave .* \(5, 2\)"),
    (lambda: SGD("fast"), TypeError, "`learning_rate` was 'fast'; a number was wanted"),
    (lambda: SGD(jnp.float32(1)), TypeError, r"`update\(..., learning_rate=\)`"),
    (lambda: SGD(-0.1), ValueError, "`learning_rate` was -0.1; a finite number from 0"),
    (lambda: Adagrad(0.1, -1), ValueError, "`initial_accumulator_value` was -1; a"),
    (lambda: Adagrad(0.1, epsilon=np.nan), ValueError, "`epsilon` was nan; a finite"),
    (
        lambda: state().update([0], TABLE[:1]),
        ValueError,
        r"has no optimizer, which `update` uses. Make it with one, as in `js.sharded",
    ),
    (
        lambda: state(SGD(0.1)).update([0], TABLE),
        ValueError,
        r"`row_gradients` have shape \(4, 2\); \(1, 2\) was wanted, .* shape \(1,\)\.",
    ),
    (
        lambda: state(SGD(0.1)).update([[0]], TABLE, "mean"),
        ValueError,
        r"`row_gradients` have .* \(1, 1\) with the combiner 'mean'",
    ),
    (
        lambda: state(SGD(0.1)).update([0], TABLE[:1], op="max"),
        ValueError,
        "`op` was MAX; 'mean' or 'sum' was wanted",
    ),
    (
        lambda: state(SGD(0.1)).update([0], TABLE[:1], learning_rate=[1.0]),
        ValueError,
        r"`learning_rate` was \[1.0\]; a number or a scalar was wanted",
    ),
    (
        lambda: state(SGD(0.1)).apply(TABLE),
        TypeError,
        r"`gradient` was array.*; `IndexedSlices` were wanted",
    ),
    (
        lambda: state(SGD(0.1)).apply(js.IndexedSlices(TABLE, np.arange(4), (9, 2))),
        ValueError,
        r"dense_shape \(9, 2\); the gradient of a table of shape \(4, 2\) was wanted",
    ),
    (lambda: state().apply(SLICES), ValueError, "has no optimizer"),
]


@each_of("call, error, text", REFUSED)
def test_odd_arguments_are_refused_with_what_was_wanted(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_versions_of_all_replicas_are_no_ids(two):
    ids = two.per_replica([0, 1])
    with pytest.raises(TypeError, match="PerReplica"):
        lookup(TABLE, ids)


def test_an_update_across_replicas_says_where_it_belongs(two):
    def step(x):
        def merge(strategy, x):
            return state(SGD(0.1)).update([0], TABLE[:1])

        return js.get_replica_context().merge_call(merge, (x,))

    with pytest.raises(js.errors.ContextError, match="`update` was called in `merge_c"):
        two.run(step, (1.0,))
    with two.scope():
        with pytest.raises(js.errors.ContextError, match="`update` was called in `mer"):
            state(SGD(0.1)).update([0], TABLE[:1])
