"""What a part's forward leaves for its backward: nothing, or its residuals.

A backward reads values of the forward, its *residuals*. `Recomputed` keeps none
of them and computes the forward again. `Kept` keeps those that depend on the
part's input. Others are a part's parameters or made of these alone, such as a
copy in bfloat16: kept, there would be one of each microbatch, so they are made
again.

Where a backward is two actions, `Kept` computes nothing in both. A part's
linearization is a sum of what products with tangents of weights add, and of
what they are added to: y' = U(e, x') with e = K(p'), for tangents p' of weights
and x' of the input. So the first action transposes U: it returns the cotangents
of the input, and keeps those of e, the *deltas*. The second one transposes K.

Source: the split of a backward is that of Qi et al., "Zero Bubble Pipeline
Parallelism", 2401.10241, here found by partial evaluation instead of in the
code of each layer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.extend import linear_util
from jax.interpreters import partial_eval

Tree = Any
# ``(params of a part, constants of a part, x) -> x``.
Part = Callable[[Tree, Tree, Tree], Tree]


class Backward(Protocol):
  """A part's forward and what its backward does, in one action or in two.

  All take the part's parameters, its constants and its input x.
  """

  def forward(self, params: Tree, fixed: Tree, x: Tree) -> tuple[Tree, Tree]:
    """Returns the part's output, and what its backward is to be given."""
    ...

  def both(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    """Returns the gradients of parameters, and the cotangents of x."""
    ...

  def of_input(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    """Returns the cotangents of x, and what `of_weight` is to be given."""
    ...

  def of_weight(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree,
    deltas: Tree,
  ) -> Tree:
    """Returns the gradients of parameters."""
    ...


class Recomputed(NamedTuple):
  """A `Backward` whose actions begin with another forward each."""

  part: Part

  def forward(self, params: Tree, fixed: Tree, x: Tree) -> tuple[Tree, Tree]:
    return self.part(params, fixed, x), ()

  def both(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    _, vjp = jax.vjp(lambda p, x: self.part(p, fixed, x), params, x)
    return vjp(dy)

  def of_input(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    _, vjp = jax.vjp(lambda x: self.part(params, fixed, x), x)
    return *vjp(dy), ()

  def of_weight(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree,
    deltas: Tree,
  ) -> Tree:
    _, vjp = jax.vjp(lambda p: self.part(p, fixed, x), params)
    return vjp(dy)[0]


class Kept(NamedTuple):
  """A `Backward` that reads residuals of the forward.

  Attributes:
    part: The part.
    splits: Whether the backward is two actions.
  """

  part: Part
  splits: bool

  def forward(self, params: Tree, fixed: Tree, x: Tree) -> tuple[Tree, Tree]:
    program, num = self._linearized(params, fixed, x)
    values = program.results()
    y = jax.tree.unflatten(jax.tree.structure(x), values[:num])
    return y, [values[i] for i in _to_keep(program, num)]

  def both(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    return self._linear(params, fixed, x, kept)(dy)

  def of_input(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    sums = _Sums(self._linear(params, fixed, x, kept), params, x)
    deltas, dx = jax.linear_transpose(sums.added_up, sums.summands, x)(dy)
    return dx, deltas

  def of_weight(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree,
    deltas: Tree,
  ) -> Tree:
    sums = _Sums(self._linear(params, fixed, x, kept), params, x)
    return jax.linear_transpose(sums.of_params, params)(deltas)[0]

  def _linearized(
    self, params: Tree, fixed: Tree, x: Tree
  ) -> tuple["_Program", int]:
    """Traces a program of the output and the forward's linear function.

    Returns:
      The program, and how many of its results are the output.
    """
    # Both kinds of functions are trees of residuals. The first can be cut in
    # two; the second is a transpose already, which partitions write themselves.
    linearize = jax.linearize if self.splits else jax.vjp

    def forward(params, fixed, x):
      return linearize(lambda p, x: self.part(p, fixed, x), params, x)

    program = _Program(forward, params, fixed, x)
    return program, len(jax.tree.leaves(x))  # the output is like x

  def _linear(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree
  ) -> Callable[..., Any]:
    """Makes the linear function from what its forward has kept."""
    program, num = self._linearized(params, fixed, x)
    same, numbers = program.same(num), range(num, len(program.shapes))
    found = dict(zip(_to_keep(program, num), kept, strict=True))
    others = [i for i in numbers if same[i] not in found]
    found |= dict(zip(others, program.results(others), strict=True))
    _, tree = program.tree.children()
    return tree.unflatten([
      found[same[i] if same[i] in found else i] for i in numbers
    ])


class _Program:
  """A traced function, some results of which can be had without the others."""

  def __init__(self, f: Callable[..., Any], *args: Tree) -> None:
    self._closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    self._args, self._last = jax.tree.leaves(args), jax.tree.leaves(args[-1])
    self.shapes, self.tree = jax.tree.flatten(shapes)

  def same(self, start: int) -> list[int]:
    """Returns for each result the first one from ``start`` that it equals."""
    ids = [id(v) for v in self._closed.jaxpr.outvars]
    return [ids.index(v, min(i, start)) for i, v in enumerate(ids)]

  def is_argument(self, i: int) -> bool:
    """Returns whether a result is an argument as it came."""
    jaxpr = self._closed.jaxpr
    return any(jaxpr.outvars[i] is v for v in jaxpr.invars)

  def reads_last(self, i: int) -> bool:
    """Returns whether a result depends on the last argument."""
    return any(self._only([i])[1][-len(self._last) :])

  def results(self, wanted: Sequence[int] | None = None) -> list[jax.Array]:
    """Computes results, or those that are wanted and nothing else."""
    numbers = range(len(self.shapes)) if wanted is None else wanted
    jaxpr, used = self._only(numbers)
    args = [x for x, use in zip(self._args, used, strict=True) if use]
    return jax.core.eval_jaxpr(jaxpr, self._closed.consts, *args)

  def _only(self, wanted: Sequence[int]) -> tuple[Any, list[bool]]:
    """Returns the program of some results, and which arguments it reads."""
    return partial_eval.dce_jaxpr(
      self._closed.jaxpr, [i in wanted for i in range(len(self.shapes))]
    )


def _to_keep(program: _Program, num: int) -> list[int]:
  """Returns which results, after the first ``num``, a forward keeps."""
  return [
    i for i, first in enumerate(program.same(num))
    if i >= num and i == first and program.reads_last(i)
    and not program.is_argument(i)
  ]


class _Sums:
  """A linear function of parameters' and x's tangents, as U(K(p'), x').

  Attributes:
    summands: Shapes of what K returns.
  """

  def __init__(
    self, linear: Callable[[Tree, Tree], Tree], params: Tree, x: Tree
  ) -> None:
    leaves, self._tree = jax.tree.flatten(x)

    def known(params):
      """Computes all of the function for which no tangents of x are needed."""

      def of_x(*leaves):
        return jax.tree.leaves(linear(params, self._tree.unflatten(leaves)))

      self._rest, _, values = partial_eval.trace_to_jaxpr_nounits(
        linear_util.wrap_init(of_x),
        [partial_eval.PartialVal.unknown(jax.typeof(x)) for x in leaves],
        instantiate=True,
      )
      return values

    self._known, program = known, _Program(known, params)
    # What does not move with tangents of parameters U reads as it is.
    numbers = range(len(program.shapes))
    self._moving = [i for i in numbers if program.reads_last(i)]
    still = [i for i in numbers if i not in self._moving]
    self._still = dict(zip(still, program.results(still), strict=True))
    self.summands = [program.shapes[i] for i in self._moving]

  def of_params(self, params: Tree) -> list[jax.Array]:
    """Computes K."""
    return _Program(self._known, params).results(self._moving)

  def added_up(self, summands: list[jax.Array], x: Tree) -> Tree:
    """Computes U."""
    values = self._still | dict(zip(self._moving, summands, strict=True))
    return self._tree.unflatten(jax.core.eval_jaxpr(
      self._rest, [values[i] for i in sorted(values)], *jax.tree.leaves(x)
    ))
