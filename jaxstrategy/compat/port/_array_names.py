"""Functions and types of TensorFlow that mean the same in JAX."""

from jaxstrategy.compat.port._name import Form, Name

_WIDE = "32 bits, unless `jax_enable_x64` is set"
_AXES = {"axis": "axis", "keepdims": "keepdims"}
_NEST = (
    "None is a leaf there and no leaf here; a `PerReplica` is a nest here, of an array "
    "with all versions: `strategy.reduce` and `experimental_local_results` take nests"
)
_WHOLE = r"strategy|distribution|\.reduce\b|local_results|\.unwrap\b"


def _function(old: str, new: str, form: Form, text: str = "") -> Name:
    return Name(old, new, text, exact=True, form=form, certain=False)


def _each(names: str, old: str, new: str, form: Form) -> list[Name]:
    return [_function(f"{old}.{n}", f"{new}.{n}", form) for n in names.split()]


def _type(name: str, new: str = "", text: str = "") -> Name:
    target = f"jax.numpy.{new or name}"
    return Name(f"tf.{name}", target, text, exact=True, certain=False, type=True)


_UNARY = Form(1, lists=False)
_BINARY = Form(2, lists=False, bare=False)
_SHAPED = Form(2, {"shape": "shape", "dtype": "dtype"}, bare=False)
_LIKE = Form(2, {"dtype": "dtype"}, lists=False, bare=False)
_MADE = Form(2, {"dtype": "dtype"}, texts=False, bare=False)
_ALONG = Form(2, {"axis": "axis"}, lists=False)
_REDUCED = Form(2, _AXES, lists=False, bare=False)

ARRAYS: list[Name] = [
    *_each(
        "square exp abs sqrt tanh sin cos sign floor negative",
        "tf",
        "jax.numpy",
        _UNARY,
    ),
    *_each(
        "square exp abs sqrt tanh sin cos sign floor log log1p expm1 negative",
        "tf.math",
        "jax.numpy",
        _UNARY,
    ),
    _function("tf.math.is_nan", "jax.numpy.isnan", _UNARY),
    _function("tf.log", "jax.numpy.log", _UNARY),
    _function("tf.stop_gradient", "jax.lax.stop_gradient", _UNARY),
    _function("tf.math.rsqrt", "jax.lax.rsqrt", _UNARY),
    _function("tf.sigmoid", "jax.nn.sigmoid", _UNARY),
    _function("tf.math.sigmoid", "jax.nn.sigmoid", _UNARY),
    *_each("relu sigmoid elu selu softplus", "tf.nn", "jax.nn", _UNARY),
    _function("tf.nn.tanh", "jax.numpy.tanh", _UNARY),
    *_each("softmax log_softmax", "tf.nn", "jax.nn", _ALONG),
    *_each(
        "add subtract multiply maximum minimum matmul equal not_equal greater less "
        "greater_equal less_equal logical_and logical_or",
        "tf",
        "jax.numpy",
        _BINARY,
    ),
    *_each("add subtract multiply maximum minimum", "tf.math", "jax.numpy", _BINARY),
    *_each("zeros ones", "tf", "jax.numpy", _SHAPED),
    *_each("zeros_like ones_like", "tf", "jax.numpy", _LIKE),
    *_each("expand_dims squeeze", "tf", "jax.numpy", _ALONG),
    *_each("stack", "tf", "jax.numpy", Form(2, {"axis": "axis"}, bare=False)),
    _function("tf.concat", "jax.numpy.concatenate", Form(2, {"axis": "axis"})),
    _function(
        "tf.reshape", "jax.numpy.reshape", Form(2, {"shape": "shape"}, lists=False)
    ),
    _function(
        "tf.transpose", "jax.numpy.transpose", Form(2, {"perm": "axes"}, lists=False)
    ),
    _function("tf.tile", "jax.numpy.tile", Form(2, lists=False)),
    _function("tf.fill", "jax.numpy.full", Form(2)),
    _function("tf.eye", "jax.numpy.eye", Form(1)),
    _function("tf.range", "jax.numpy.arange", Form(3, bare=False)),
    _function("tf.cast", "jax.numpy.astype", Form(2, {"dtype": ""}, lists=False)),
    _function("tf.constant", "jax.numpy.array", _MADE),
    _function("tf.convert_to_tensor", "jax.numpy.asarray", _MADE),
    _function(
        "tf.where",
        "jax.numpy.where",
        Form(3, needed=((1, "x"), (2, "y")), bare=False),
    ),
    _function(
        "tf.argmax",
        "jax.numpy.argmax",
        Form(2, {"axis": "axis"}, needed=((1, "axis"),), bare=False),
        "int32 here, int64 there",
    ),
    _function(
        "tf.one_hot",
        "jax.nn.one_hot",
        Form(2, {"depth": "num_classes"}, bare=False),
    ),
    *[
        _function(f"{module}.reduce_{name}", f"jax.numpy.{name}", _REDUCED, text)
        for module in ("tf", "tf.math")
        for name, text in {
            "sum": "",
            "max": "",
            "min": "",
            "prod": "",
            "all": "",
            "any": "",
            "mean": "of whole numbers: a float here, a whole number there",
        }.items()
    ],
    _function(
        "tf.nest.map_structure",
        "jax.tree.map",
        Form(99, bare=False, avoided=_WHOLE),
        _NEST,
    ),
    _function("tf.nest.flatten", "jax.tree.leaves", Form(1, avoided=_WHOLE), _NEST),
    *[
        _type(name)
        for name in "float16 bfloat16 float32 int8 int16 int32 uint8 uint16 uint32 "
        "complex64".split()
    ],
    _type("bool", "bool_"),
    *[_type(name, text=_WIDE) for name in "float64 int64 uint64 complex128".split()],
    Name("tf.Tensor", "jax.Array", exact=True, certain=False, type=True),
]
