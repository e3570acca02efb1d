"""The state that training carries from step to step, and its shardings."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree

from atlasjax.distributed import sharding
from atlasjax.nn import LanguageModel, ModelConfig, abstract_model, logical_axes
from atlasjax.train.trainable import replaced, select


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes, as a pytree.

    Attributes:
      params: nested dict of float32 parameters, as `nnx.to_pure_dict` gives them.
      optimizer: the state of the outer optimizer, which has only the parameters that train.
      key: typed PRNG key. Random numbers of step n use `jax.random.fold_in(key, n)`.
      step: int32 scalar, number of optimizer steps done.
      ema: the moving average of the parameters that train, float32. None: there is none.
    """

    params: PyTree
    optimizer: PyTree
    key: PyTree
    step: PyTree
    ema: PyTree = None

    @property
    def averaged(self) -> PyTree:
        """All parameters, those that train being their moving average."""
        return replaced(self.params, self.ema)


def model_shapes(config: ModelConfig) -> tuple[nnx.GraphDef, PyTree]:
    """Returns a model's graphdef and a nested dict of its parameters as ShapeDtypeStructs, without making any arrays."""
    graphdef, params, *others = nnx.split(abstract_model(config), nnx.Param, ...)
    if jax.tree.leaves(others):
        raise ValueError(f"the model has state that is neither a parameter nor the cache: {others}.")
    return graphdef, pure(params)


def pure(params: nnx.State) -> PyTree:
    """An nnx.State as a nested dict of its values."""
    return nnx.to_pure_dict(params)


def merge(graphdef: nnx.GraphDef, params: PyTree) -> LanguageModel:
    """Makes the model from its definition and a nested dict of parameters. Can be used inside a transformed function."""
    return nnx.merge(graphdef, nnx.State(params))


def init_params(config: ModelConfig, key: jax.Array) -> PyTree:
    """Initial parameters of `LanguageModel(config)` made with `key`, as a nested dict of float32 arrays."""
    model = LanguageModel(config, rngs=nnx.Rngs(key))
    return pure(nnx.state(model, nnx.Param))


def init_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    trainable: PyTree | None = None,
    *,
    ema: bool = False,
) -> TrainState:
    """The initial state. Use `jax.jit(..., out_shardings=...)`, so that every array is made on the devices that hold it.

    Args:
      config: the model.
      optimizer: the outer optimizer.
      key: typed PRNG key.
      trainable: which parameters train (`trainable_mask`). None: all.
      ema: whether there is a moving average, which starts as the parameters.
    """
    return state_from(init_params(config, initial_key(key)), optimizer, key, trainable, ema=ema)


def initial_key(key: jax.Array) -> jax.Array:
    """The key of the initial parameters of `init_state`."""
    return jax.random.split(key)[0]


def state_from(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    trainable: PyTree | None = None,
    *,
    ema: bool = False,
) -> TrainState:
    """The initial state with given parameters; everything else is that of `init_state` with the same key."""
    part = select(params, trainable)
    average = jax.tree.map(jnp.copy, part) if ema else None  # a copy: the state is donated, and no buffer twice
    return TrainState(params, optimizer.init(part), jax.random.split(key)[1], jnp.zeros((), jnp.int32), average)


def state_shardings(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    trainable: PyTree | None = None,
    *,
    ema: bool = False,
) -> tuple[TrainState, list[str]]:
    """The shardings of a TrainState as the same tree, and a line for each mesh axis that a parameter could not be split over."""
    _, shapes = model_shapes(config)
    # The moments of the optimizer get the shardings of their parameters; without a word XLA would put them on one device.
    param_shardings, skipped = sharding.parameter_shardings(pure(logical_axes(config)), shapes, mesh)
    trained, trained_shardings = select(shapes, trainable), select(param_shardings, trainable)
    optimizer_state = jax.eval_shape(optimizer.init, trained)
    whole = sharding.replicated(mesh)
    shardings = TrainState(
        params=param_shardings,
        optimizer=sharding.optimizer_shardings(optimizer_state, trained, trained_shardings, mesh),
        key=whole,
        step=whole,
        ema=trained_shardings if ema else None,
    )
    return shardings, skipped


def abstract_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    shardings: TrainState,
    trainable: PyTree | None = None,
    *,
    ema: bool = False,
) -> TrainState:
    """Shapes, dtypes and shardings of a TrainState, without its arrays."""
    shapes = jax.eval_shape(lambda key: init_state(config, optimizer, key, trainable, ema=ema), jax.random.key(0))
    return jax.tree.map(
        lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where), shapes, shardings
    )
