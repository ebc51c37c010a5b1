"""Interpreter of jaxprs, which runs a program again with other arithmetic.

`interpreted` returns a function with the equations of a traced program. Control
flow, `jax.shard_map` and derivatives with own rules are entered, and a *rule*
may replace each of the other equations. Three rules measure how much rounding
changes a program's results: `in_float64`, `permuted`, and none at all.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

# Indices of the enclosing equations, and of the equation itself.
Path = tuple[int, ...]
# Replaces an equation: (equation, operands, path) -> results.
Rule = Callable[[Any, Sequence[Any], Path], Sequence[Any]]

# Equations whose jaxpr is run in place, with the name of the jaxpr.
_INLINED = {
  "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr",
  "core_call": "call_jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr",
  "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
  "custom_vjp_call_jaxpr": "fun_jaxpr", "custom_lin": "call_jaxpr",
}
# Equations that run code for arrays of fixed dtypes, or on the host.
_OPAQUE = {
  "pallas_call", "ffi_call", "custom_partitioning", "pure_callback",
  "io_callback", "debug_callback", "bitcast_convert_type", "tpu_custom_call",
}


def interpreted(
  closed: Any, rule: Rule | None = None, wanted: Collection[Path] = (),
  wide: bool = False,
) -> Callable[..., tuple[list[Any], dict[Path, list[Any]]]]:
  """Returns a function that runs a program by its equations.

  Args:
    closed: Closed jaxpr of the program, such as `jax.stages.Traced.jaxpr`.
    rule: Replaces equations; None runs all of them unchanged.
    wanted: Paths of equations whose results are returned, too.
    wide: Whether floating arguments are float64; constants of the program then
      are, too.

  Returns:
    A function of the flat arguments. It returns the flat results, and the
    recorded results by path: those of an equation inside a scan are stacked
    over its iterations, those inside `jax.shard_map` over all devices of the
    mesh, ``[devices, *loops, ...]``, with the loops outside of it first.

  Example:
    >>> closed = jax.make_jaxpr(lambda x: x * 2 + 1)(1.0)
    >>> results, found = interpreted(closed, wanted=[(0,)])(jnp.float32(3))
    >>> results[0].item(), found[0,][0].item()
    (7.0, 6.0)
  """
  run = _Run(rule or unchanged, frozenset(wanted), wide)
  return lambda *args: run.jaxpr(closed.jaxpr, closed.consts, args, ())


class _Run:
  """Interpretation of a program; its methods are called during tracing."""

  def __init__(self, rule: Rule, wanted: frozenset[Path], wide: bool) -> None:
    self.rule, self.wanted, self.wide = rule, wanted, wide

  def jaxpr(
    self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], path: Path
  ) -> tuple[list[Any], dict[Path, list[Any]]]:
    """Runs a jaxpr; returns its results, and what was recorded inside."""
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
      if not isinstance(atom, core.Literal):
        return values[atom]
      # A Python number would have the dtype of its operand.
      value = np.asarray(atom.val, atom.aval.dtype)
      return _wide(value) if self.wide else value

    if self.wide:
      consts = [_wide(x) for x in consts]
    values |= zip(jaxpr.constvars, consts, strict=True)
    values |= zip(jaxpr.invars, args, strict=True)
    found: dict[Path, list[Any]] = {}
    for index, eqn in enumerate(jaxpr.eqns):
      here = (*path, index)
      operands = [read(x) for x in eqn.invars]
      results, inner = self.equation(eqn, operands, here)
      found |= inner
      if here in self.wanted:
        found[here] = list(results)
      values |= zip(eqn.outvars, results, strict=True)
    return [read(x) for x in jaxpr.outvars], found

  def equation(
    self, eqn: Any, operands: list[Any], path: Path
  ) -> tuple[Sequence[Any], dict[Path, list[Any]]]:
    """Runs an equation; returns its results, and what was recorded inside."""
    name = eqn.primitive.name
    if name in _INLINED and _INLINED[name] in eqn.params:
      return self.inlined(eqn.params[_INLINED[name]], operands, path)
    structured = {
      "scan": self.scan, "while": self.loop, "cond": self.branch,
      "shard_map": self.mapped,
    }.get(name)
    if structured is not None:
      return structured(eqn, operands, path)
    return self.rule(eqn, operands, path), {}

  def inlined(
    self, inner: Any, operands: list[Any], path: Path
  ) -> tuple[Sequence[Any], dict[Path, list[Any]]]:
    """Runs the jaxpr ``inner``, closed or not, in place."""
    jaxpr, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
    # Functions with derivatives of their own may have further operands.
    first = len(operands) - len(jaxpr.invars)
    return self.jaxpr(jaxpr, consts, operands[first:], path)

  def scan(
    self, eqn: Any, operands: list[Any], path: Path
  ) -> tuple[Sequence[Any], dict[Path, list[Any]]]:
    p, inner = eqn.params, eqn.params["jaxpr"]
    first, num_carry = scan_sizes(eqn)
    last = first + num_carry

    def body(carry, xs):
      results, found = self.jaxpr(
        inner.jaxpr, inner.consts, [*operands[:first], *carry, *xs], path
      )
      carried = tuple(results[:num_carry])
      return carried, (tuple(results[num_carry:]), found)

    carry, (ys, found) = lax.scan(
      body, tuple(operands[first:last]), tuple(operands[last:]),
      length=p["length"], reverse=p["reverse"], unroll=p["unroll"],
    )
    return [*carry, *ys], found

  def loop(
    self, eqn: Any, operands: list[Any], path: Path
  ) -> tuple[Sequence[Any], dict[Path, list[Any]]]:
    p = eqn.params
    first = p["cond_nconsts"]
    last = first + p["body_nconsts"]
    unrecorded = _Run(self.rule, frozenset(), self.wide)

    def run(closed, consts, carry):
      return unrecorded.jaxpr(
        closed.jaxpr, closed.consts, [*consts, *carry], path
      )[0]

    def goes_on(carry):
      return run(p["cond_jaxpr"], operands[:first], carry)[0]

    def body(carry):
      results = run(p["body_jaxpr"], operands[first:last], carry)
      # Under `jax.vmap`, each example has a condition of its own.
      going = goes_on(carry)
      return tuple(
        jnp.where(lax.expand_dims(going, range(going.ndim, x.ndim)), x, old)
        if going.ndim else x for x, old in zip(results, carry, strict=True)
      )

    return lax.while_loop(
      lambda carry: goes_on(carry).any(), body, tuple(operands[last:])
    ), {}

  def branch(
    self, eqn: Any, operands: list[Any], path: Path
  ) -> tuple[Sequence[Any], dict[Path, list[Any]]]:
    unrecorded = _Run(self.rule, frozenset(), self.wide)

    def one(closed):
      return lambda *args: tuple(
        unrecorded.jaxpr(closed.jaxpr, closed.consts, args, path)[0]
      )

    index, *others = operands
    branches = [one(closed) for closed in eqn.params["branches"]]
    return lax.switch(index.astype(jnp.int32), branches, *others), {}

  def mapped(
    self, eqn: Any, operands: list[Any], path: Path
  ) -> tuple[Sequence[Any], dict[Path, list[Any]]]:
    p = eqn.params
    mesh = p["mesh"]
    axes = tuple(x for x in mesh.axis_names if x in p["newly_manual_axes"])
    every = jax.P(axes)
    paths = sorted(
      x for x in self.wanted if x[: len(path)] == path and x != path
    )

    def body(*args):
      results, found = self.jaxpr(p["jaxpr"], (), args, path)
      # Every device's values, with a leading dim of devices.
      stacked = {place: [x[None] for x in xs] for place, xs in found.items()}
      return tuple(results), stacked

    counts = {x: len(_equation(p["jaxpr"], x[len(path) :]).outvars)
              for x in paths}
    results, found = jax.shard_map(
      body, mesh=mesh, in_specs=tuple(p["in_specs"]),
      out_specs=(tuple(p["out_specs"]), {
        place: [every] * count for place, count in counts.items()
      }),
      axis_names=set(axes), check_vma=False,
    )(*operands)
    return results, found


def scan_sizes(eqn: Any) -> tuple[int, int]:
  """Returns the numbers of constants and of carried values of a scan."""
  p = eqn.params
  if "num_consts" in p:
    return p["num_consts"], p["num_carry"]
  # jax 0.12 has the structure of the operands instead.
  consts, carry, _ = p["ft_in"].update(range(len(eqn.invars))).unpack()
  return len(list(consts)), len(list(carry))


def _equation(jaxpr: Any, path: tuple[int, ...]) -> Any:
  """Returns the equation at a path within a jaxpr."""
  eqn = jaxpr.eqns[path[0]]
  if len(path) == 1:
    return eqn
  inner = next(inner_jaxprs(eqn))
  return _equation(getattr(inner, "jaxpr", inner), path[1:])


def inner_jaxprs(eqn: Any) -> Any:
  """Yields the jaxprs that the interpreter enters, without while and cond."""
  name = eqn.primitive.name
  key = _INLINED.get(name, "jaxpr" if name in ("scan", "shard_map") else None)
  if key in eqn.params:
    yield eqn.params[key]


def bind(eqn: Any, operands: Sequence[Any], **changes: Any) -> Sequence[Any]:
  """Runs an equation on operands, with changed parameters."""
  if eqn.primitive.name in ("psum_invariant", "pvary", "pcast"):
    # Types of varying values are not checked in an interpreted program.
    name = eqn.primitive.name
    if name != "psum_invariant":
      return list(operands)
    return [lax.psum(x, eqn.params["axes"]) for x in operands]
  if eqn.primitive.name == "all_gather_invariant":
    p = eqn.params
    return [lax.all_gather(
      operands[0], p["axis_name"], axis=p["all_gather_dimension"],
      tiled=p["tiled"],
    )]
  results = eqn.primitive.bind(*operands, **eqn.params | changes)
  return results if eqn.primitive.multiple_results else [results]


def unchanged(
  eqn: Any, operands: Sequence[Any], path: Path
) -> Sequence[Any]:
  """Rule that runs equations unchanged."""
  return bind(eqn, operands)


def in_float64(
  eqn: Any, operands: Sequence[Any], path: Path
) -> Sequence[Any]:
  """Rule that computes in float64, whatever dtypes the program asks for.

  It needs ``jax.enable_x64``. Values of a program keep their meaning: explicit
  casts between floating dtypes do nothing. Kernels, callbacks and bits of
  floating numbers get operands of their own dtypes.
  """
  name, p = eqn.primitive.name, eqn.params
  operands = [_wide(x) for x in operands]
  if name in _OPAQUE:
    narrow = [
      x.astype(var.aval.dtype) if _is_float(x) else x
      for x, var in zip(operands, eqn.invars, strict=True)
    ]
    return [_wide(x) for x in bind(eqn, narrow)]
  if name == "reduce_precision":
    return operands
  if name == "convert_element_type" and jnp.issubdtype(
    p["new_dtype"], jnp.inexact
  ):
    is_complex = jnp.issubdtype(p["new_dtype"], jnp.complexfloating)
    return [operands[0].astype(jnp.complex128 if is_complex else jnp.float64)]
  changes: dict[str, Any] = {}
  if "preferred_element_type" in p and _is_float(operands[0]):
    changes["preferred_element_type"] = jnp.dtype(jnp.float64)
  if p.get("precision") is not None:
    changes["precision"] = None
  if p.get("out_dtype") is not None:
    changes["out_dtype"] = None
  if name == "iota" and jnp.issubdtype(p["dtype"], jnp.floating):
    changes["dtype"] = jnp.dtype(jnp.float64)
  if name == "scatter-add":
    return [jax.lax.scatter_add(
      *operands, dimension_numbers=p["dimension_numbers"],
      indices_are_sorted=p["indices_are_sorted"],
      unique_indices=p["unique_indices"], mode=p["mode"],
    )]
  return [_wide(x) for x in bind(eqn, operands, **changes)]


def permuted(seed: Any, after: Rule | None = None) -> Rule:
  """Returns a rule that sums products and elements in another order.

  Contracted dims of ``dot_general`` and reduced dims of ``reduce_sum`` are
  permuted at random, which changes nothing but rounding.

  Args:
    seed: Determines the permutations; an int32, also a traced one.
    after: Rule that runs the equations with permuted operands.
  """

  def rule(
    eqn: Any, operands: Sequence[Any], path: Path
  ) -> Sequence[Any]:
    rng = np.random.default_rng(path)
    name, p = eqn.primitive.name, eqn.params

    def order(size: int) -> Any:
      return (jnp.asarray(rng.permutation(size), jnp.int32) + seed) % size

    if name == "reduce_sum":
      x = operands[0]
      for dim in p["axes"]:
        x = jnp.take(x, order(x.shape[dim]), axis=dim)
      operands = [x]
    elif name == "dot_general":
      left, right = operands
      (of_left, of_right), _ = p["dimension_numbers"]
      for i, j in zip(of_left, of_right, strict=True):
        chosen = order(left.shape[i])
        left, right = jnp.take(left, chosen, i), jnp.take(right, chosen, j)
      # Exact; XLA:CPU lacks some products of bfloat16 with float32 results.
      wide = p.get("preferred_element_type")
      if wide == jnp.float32 and left.dtype == right.dtype == jnp.bfloat16:
        left, right = left.astype(wide), right.astype(wide)
      operands = [left, right]
    return (after or unchanged)(eqn, operands, path)

  return rule


def _is_float(x: Any) -> bool:
  return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _wide(x: Any) -> Any:
  """Returns floats in float64, complex numbers in complex128, others as is."""
  dtype = jnp.result_type(x)
  for kind, wide in (
    (jnp.floating, jnp.float64), (jnp.complexfloating, jnp.complex128)
  ):
    if jnp.issubdtype(dtype, kind) and dtype != wide:
      return jnp.asarray(x).astype(wide)
  return x
