"""A step on one layout, executed compiled or by its equations."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax.extend import core, source_info_util
import jax.numpy as jnp
import numpy as np

from parallel.ledger.equal.interpret import (
  Path,
  in_float64,
  inner_jaxprs,
  interpreted,
  permuted,
  unchanged,
)

# Builds a step for a layout, axis -> number of devices; {} is one device.
Builder = Callable[[Mapping[str, int]], tuple[Any, Sequence[Any]]]
# Programs that are run once or twice: they compile several times faster.
_FAST = {"xla_backend_optimization_level": 0}
_CALLBACKS = {"pure_callback", "io_callback", "debug_callback"}
_RANDOM = {"random_bits", "threefry2x32", "rng_bit_generator"}


def parse_layouts(text: str) -> list[dict[str, int]]:
  """Parses layouts: axes and devices, separated by spaces.

  Raises:
    ValueError: The text has another form.

  Example:
    >>> parse_layouts("data:8 data:2,tensor:4")
    [{'data': 8}, {'data': 2, 'tensor': 4}]
  """
  found = []
  for layout in text.split():
    axes: dict[str, int] = {}
    for part in layout.split(","):
      name, _, size = part.partition(":")
      if not name or not size.isdecimal() or int(size) < 1 or name in axes:
        raise ValueError(
          f"layouts={text!r}: {part!r} must be AXIS:DEVICES, each axis once, "
          "as in 'data:8 data:2,tensor:4'"
        )
      axes[name] = int(size)
    found.append(axes)
  if not found:
    raise ValueError("layouts='' must name one layout or more, such as data:8")
  return found


def format_layout(layout: Mapping[str, int]) -> str:
  """Formats a layout as `parse_layouts` reads it; "one device" for {}."""
  return ",".join(f"{k}:{n}" for k, n in layout.items()) or "one device"


class Results(NamedTuple):
  """Flat results of an execution, on the host.

  Attributes:
    values: The results, each from the first device that has a copy.
    spreads: Largest difference between copies of each result; 0 if they are
      equal.
    recorded: Recorded results by path of their equation.
  """

  values: list[np.ndarray]
  spreads: list[float]
  recorded: Mapping[Path, list[np.ndarray]]


@dataclasses.dataclass(frozen=True, eq=False)
class LayoutProgram:
  """A step on a layout, with the arguments of its first execution.

  Attributes:
    layout: Axis -> number of devices.
    traced: The traced step.
    compiled: The compiled step.
    args: Flat arguments on the host.
    num_state: Number of the first flat arguments that are replaced by the first
      flat results after a step; 0 if the results have another structure.
  """

  layout: Mapping[str, int]
  traced: Any
  compiled: Any
  args: list[Any]
  num_state: int
  _jitted: dict[tuple[bool, bool], Callable] = dataclasses.field(
    default_factory=dict, repr=False
  )

  @functools.cached_property
  def result_names(self) -> list[str]:
    """Paths of the results, such as "[0]['w']"."""
    paths = jax.tree.leaves_with_path(self.traced.out_info)
    return [jax.tree_util.keystr(path) or "result" for path, _ in paths]

  @functools.cached_property
  def result_types(self) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of the results."""
    leaves = jax.tree.leaves(self.traced.out_info)
    return [(x.shape, str(x.dtype)) for x in leaves]

  @property
  def structure(self) -> Any:
    """Tree structure of the results."""
    return jax.tree.structure(self.traced.out_info)

  @property
  def closed(self) -> Any:
    """Closed jaxpr of the step."""
    return self.traced.jaxpr

  @property
  def bytes_needed(self) -> int:
    """Bytes of all virtual devices while the step runs in float64."""
    memory = self.compiled.memory_analysis()
    shardings = jax.tree.leaves(self.compiled.input_shardings[0])
    number = max((len(x.device_set) for x in shardings), default=1)
    return 2 * number * (
      memory.argument_size_in_bytes + memory.output_size_in_bytes
      + memory.temp_size_in_bytes
    )

  @property
  def _tree(self) -> Any:
    """Tree structure of the arguments."""
    return jax.tree.structure(self.traced.args_info[0])

  def _placed(self, args: Sequence[Any]) -> list[Any]:
    # The sharding of an argument that the step does not use is None.
    shardings = self._tree.flatten_up_to(self.compiled.input_shardings[0])
    return [
      x if s is None else jax.device_put(x, s)
      for x, s in zip(args, shardings, strict=True)
    ]

  def run(self, args: Sequence[Any]) -> "Results":
    """Runs the compiled step on flat arguments.

    Raises:
      ValueError: The execution fails.
    """
    with _one_line("the step fails"):
      results = self.compiled(*self._tree.unflatten(self._placed(args)))
      return Results(*_copies(jax.tree.leaves(results)), {})

  def run_by_equations(
    self, args: Sequence[Any], wide: bool = False, seed: int | None = None,
    wanted: Collection[Path] = (),
  ) -> "Results":
    """Runs the equations of the step.

    Args:
      args: Flat arguments on the host.
      wide: Whether to compute in float64 (`in_float64`).
      seed: Seed of the order of sums (`permuted`); None keeps it.
      wanted: Paths of equations whose results are returned, too.

    Raises:
      ValueError: The execution fails.
    """
    run = self._by_equations(wide, seed is not None, frozenset(wanted))
    with jax.enable_x64(wide), _one_line("the equations of the step fail"):
      if wide:
        args = [*map(widened, args)]
      results, found = run(np.int32(seed or 0), *self._placed(args))
      return Results(*_copies(results), {
        path: [np.asarray(x) for x in xs] for path, xs in found.items()
      })

  def _by_equations(
    self, wide: bool, is_permuted: bool, wanted: frozenset[Path]
  ) -> Callable:
    """Returns the jitted equations, a function of a seed and the arguments."""
    rule = in_float64 if wide else unchanged

    def run(seed: jax.Array, *args: Any) -> Any:
      chosen = permuted(seed, rule) if is_permuted else rule
      return interpreted(self.closed, chosen, wanted, wide)(*args)

    jitted = jax.jit(run, compiler_options=_FAST)
    if wanted:
      return jitted  # is run once
    return self._jitted.setdefault((wide, is_permuted), jitted)

  def next_args(
    self, args: Sequence[Any], results: Sequence[np.ndarray]
  ) -> list[Any]:
    """Returns the arguments of the next step."""
    return [*results[: self.num_state], *args[self.num_state :]]

  @functools.cached_property
  def primitives(self) -> set[str]:
    """Names of all primitives of the step."""
    found: set[str] = set()

    def visit(jaxpr: Any) -> None:
      for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for value in jax.tree.leaves(
          list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
          inner = getattr(value, "jaxpr", value)
          if hasattr(inner, "eqns"):
            visit(inner)

    visit(self.closed.jaxpr)
    return found

  def random_depends_on_device(self) -> bool:
    """Returns whether a device's number influences its random numbers."""

    def visit(jaxpr: Any, marked: Sequence[bool]) -> tuple[list[bool], bool]:
      """Returns which results depend on the device, and whether draws do."""
      depends = dict(zip(jaxpr.invars, marked, strict=True))
      drawn = False
      for eqn in jaxpr.eqns:
        of_operands = [depends.get(x, False) for x in eqn.invars
                       if not isinstance(x, core.Literal)]
        any_operand = any(of_operands)
        drawn |= any_operand and eqn.primitive.name in _RANDOM
        inner = next(inner_jaxprs(eqn), None)
        if inner is not None:
          inner = getattr(inner, "jaxpr", inner)
          flags = [
            not isinstance(x, core.Literal) and depends.get(x, False)
            for x in eqn.invars
          ]
          flags = flags[len(flags) - len(inner.invars):]
          of_results, inside = visit(inner, flags)
          drawn |= inside
          any_operand |= any(of_results)
        if eqn.primitive.name == "axis_index":
          any_operand = True
        depends |= dict.fromkeys(eqn.outvars, any_operand)
      return [
        not isinstance(x, core.Literal) and depends.get(x, False)
        for x in jaxpr.outvars
      ], drawn

    jaxpr = self.closed.jaxpr
    return visit(jaxpr, [False] * len(jaxpr.invars))[1]

  def has_callbacks(self) -> bool:
    """Returns whether the step calls functions on the host."""
    return bool(self.primitives & _CALLBACKS)


def build(
  builder: Builder, layout: Mapping[str, int], seed: int = 0
) -> LayoutProgram:
  """Builds and compiles a step on a layout.

  Args:
    builder: Function of the layout that returns a jitted step and arguments.
      Arguments that are `jax.ShapeDtypeStruct` are drawn from the seed.
    layout: Axis -> number of devices.
    seed: Determines drawn arguments, equally for all layouts.

  Raises:
    ValueError: The function returns something else, or the step fails.
  """
  try:
    step, args = builder(layout)
    assert callable(getattr(step, "trace", None))
  except Exception as error:
    raise ValueError(
      "the program must return (jitted function, arguments): "
      f"{type(error).__name__}: {_first_line(error)}"
    ) from error
  try:
    with _lines_of_backwards():
      traced = step.trace(*args)
    compiled = traced.lower().compile(_FAST)
  except Exception as error:
    raise ValueError(
      f"the step cannot be compiled: {type(error).__name__}: "
      f"{_first_line(error)}"
    ) from error
  leaves = jax.tree.leaves((traced.in_avals, traced.out_info))
  if any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in leaves):
    raise ValueError(
      "complex numbers are not compared; use their real and imaginary parts"
    )
  if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves):
    raise ValueError(
      "typed random keys are not compared; use jax.random.key_data, and "
      "jax.random.wrap_key_data in the step"
    )
  flat = [
    _drawn(x, seed + place) if isinstance(x, jax.ShapeDtypeStruct)
    else np.asarray(x) for place, x in enumerate(jax.tree.leaves(tuple(args)))
  ]
  first = args[0] if args else ()
  state = traced.out_info
  if isinstance(state, tuple) and jax.tree.structure(state) != (
    jax.tree.structure(first)
  ):
    state = state[0] if state else ()
  same = jax.tree.structure(state) == jax.tree.structure(first) and all(
    (jnp.shape(x), jnp.result_type(x)) == (y.shape, y.dtype)
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(state), strict=True)
  )
  number = len(jax.tree.leaves(first)) if same else 0
  return LayoutProgram(layout, traced, compiled, flat, number)


def _drawn(x: jax.ShapeDtypeStruct, seed: int) -> np.ndarray:
  """Draws an argument of which only the shape is given."""
  rng = np.random.default_rng(seed)
  if jnp.issubdtype(x.dtype, jnp.floating):
    scale = max(x.shape[-2], 1) ** -0.5 if len(x.shape) > 1 else 1.0
    return (scale * rng.normal(size=x.shape)).astype(x.dtype)
  return rng.integers(2, size=x.shape).astype(x.dtype)


def widened(x: Any) -> Any:
  """Returns floats in float64, and other values unchanged."""
  is_floating = jnp.issubdtype(x.dtype, jnp.floating)
  return np.asarray(x, "float64") if is_floating else x


def _copies(results: Sequence[Any]) -> tuple[list[np.ndarray], list[float]]:
  """Returns results on the host, and the differences between their copies."""
  values, spreads = [], []
  for x in results:
    values.append(np.asarray(x))
    first: dict[str, np.ndarray] = {}
    spread = 0.0
    for shard in x.addressable_shards:
      mine = np.asarray(shard.data, "float64")
      other = first.setdefault(str(shard.index), mine)
      same = (mine == other) | (np.isnan(mine) & np.isnan(other))
      with np.errstate(invalid="ignore"):
        change = np.abs(np.where(same, 0.0, mine - other))
      spread = max(spread, float(np.nan_to_num(
        change, nan=np.inf
      ).max(initial=0.0)))
    spreads.append(spread)
  return values, spreads


@contextlib.contextmanager
def _lines_of_backwards() -> Iterator[None]:
  """Gives equations of the backward of a `jax.custom_vjp` their own lines.

  JAX gives them those of the forward call.
  """
  call = jax.custom_vjp.__call__

  def with_lines(self: Any, *args: Any, **kwargs: Any) -> Any:
    backward = self.bwd

    def traced(*operands: Any) -> Any:
      # A traceback that is false: JAX takes one for each equation.
      context = source_info_util.user_context(())
      context.__enter__()
      try:
        return backward(*operands)
      finally:
        context.__exit__(None, None, None)

    self.bwd = backward and functools.wraps(backward)(traced)
    try:
      return call(self, *args, **kwargs)
    finally:
      self.bwd = backward

  jax.custom_vjp.__call__ = with_lines
  try:
    yield
  finally:
    jax.custom_vjp.__call__ = call


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
  """Turns errors of an execution into a ValueError of one line."""
  try:
    yield
  except Exception as error:
    raise ValueError(
      f"{what}: {type(error).__name__}: {_first_line(error)}"
    ) from error


def _first_line(error: Exception) -> str:
  return (str(error).strip() or "no message").splitlines()[0]
