"""Residuals of a pipeline part: recomputed or saved for the backward.

A backward reads values of the forward, its *residuals*. `Recomputed` saves none
of them and repeats the forward. `Kept` saves those that depend on the part's
input. The other residuals are parameters, or functions of parameters alone such
as a copy in bfloat16. They are recomputed, since saving them would store a copy
per microbatch.

A schedule may split a backward into two actions; `Kept` then repeats no
computation in either. The linearization of a part is y' = U(e, x') with e =
K(p'), for tangents p' of the weights and x' of the input: e are the products
that contain weight tangents, U is the rest. The first action transposes U: it
returns the cotangents of the input and saves those of e, called *deltas*. The
second action transposes K.

Source of the split: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv
2401.10241. Here partial evaluation finds it, instead of code in each layer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.api_util import debug_info
from jax.extend import linear_util
from jax.interpreters import partial_eval

Tree = Any
# ``(params of a part, constants of a part, x) -> x``.
Part = Callable[[Tree, Tree, Tree], Tree]


class Backward(Protocol):
  """Forward of a part and its backward, in one action or in two.

  All methods take the part's parameters ``params``, its constants ``fixed`` and
  its input ``x``; ``kept`` is the second result of `forward`, ``dy`` the
  cotangents of the output.
  """

  def forward(self, params: Tree, fixed: Tree, x: Tree) -> tuple[Tree, Tree]:
    """Returns the part's output and the values to save for the backward."""
    ...

  def both(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    """Returns the gradients of the parameters and the cotangents of x."""
    ...

  def of_input(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    """Returns the cotangents of x and the deltas for `of_weight`."""
    ...

  def of_weight(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree,
    deltas: Tree,
  ) -> Tree:
    """Returns the gradients of the parameters."""
    ...


class Recomputed(NamedTuple):
  """A `Backward` whose actions each repeat the forward."""

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
    part: ``(params of a part, constants of a part, x) -> x``.
    splits: Whether the backward of some microbatches is two actions.
  """

  part: Part
  splits: bool

  def forward(self, params: Tree, fixed: Tree, x: Tree) -> tuple[Tree, Tree]:
    program, num = self._linearized(params, fixed, x)
    # Results: the output's leaves, then the residuals of the linear function.
    values = program.results()
    y = jax.tree.unflatten(jax.tree.structure(x), values[:num])
    return y, [values[i] for i in _to_keep(program, num)]

  def both(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    linear = self._linear(params, fixed, x, kept)
    if self.splits:  # a linearization, from tangents to tangents
      return jax.linear_transpose(linear, params, x)(dy)
    return linear(dy)

  def of_input(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    # The transpose of U gives the deltas (cotangents of K's result), and dx.
    sums = _Sums(self._linear(params, fixed, x, kept), params, x)
    deltas, dx = jax.linear_transpose(sums.added_up, sums.summands, x)(dy)
    return dx, deltas

  def of_weight(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree,
    deltas: Tree,
  ) -> Tree:
    # The transpose of K maps the deltas to the gradients of the parameters.
    sums = _Sums(self._linear(params, fixed, x, kept), params, x)
    return jax.linear_transpose(sums.of_params, params)(deltas)[0]

  def _linearized(
    self, params: Tree, fixed: Tree, x: Tree
  ) -> tuple["_Program", int]:
    """Traces the forward to its output and its linear function's residuals.

    Returns:
      The program, and the number of its results that are the output.
    """
    # Both functions are pytrees of residuals. A linearization can be split in
    # two. A VJP is already transposed; it supports the custom VJPs of ZeRO.
    linearize = jax.linearize if self.splits else jax.vjp

    def forward(params, fixed, x):
      return linearize(lambda p, x: self.part(p, fixed, x), params, x)

    program = _Program(forward, params, fixed, x)
    return program, len(jax.tree.leaves(x))  # the output has x's structure

  def _linear(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree
  ) -> Callable[..., Any]:
    """Rebuilds the linear function from its forward's saved residuals."""
    program, num = self._linearized(params, fixed, x)
    # A residual that is also an output or another residual is saved only once.
    same, numbers = program.same(num), range(num, len(program.shapes))
    found = dict(zip(_to_keep(program, num), kept, strict=True))
    # Residuals that do not depend on x are recomputed from the parameters.
    others = [i for i in numbers if same[i] not in found]
    found |= dict(zip(others, program.results(others), strict=True))
    # The program returns (output, linear function): take the second subtree.
    _, tree = program.tree.children()
    return tree.unflatten([
      found[same[i] if same[i] in found else i] for i in numbers
    ])


class _Program:
  """A traced function whose results can be computed separately."""

  def __init__(self, f: Callable[..., Any], *args: Tree) -> None:
    # `_last`: leaves of the last argument, the one that `reads_last` refers to.
    self._closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    self._args, self._last = jax.tree.leaves(args), jax.tree.leaves(args[-1])
    self.shapes, self.tree = jax.tree.flatten(shapes)

  def same(self, start: int) -> list[int]:
    """Returns, per result, the index of the first equal one from ``start``."""
    # Equal results are one variable of the traced program.
    ids = [id(v) for v in self._closed.jaxpr.outvars]
    return [ids.index(v, min(i, start)) for i, v in enumerate(ids)]

  def is_argument(self, i: int) -> bool:
    """Returns whether a result is an unchanged argument."""
    jaxpr = self._closed.jaxpr
    return any(jaxpr.outvars[i] is v for v in jaxpr.invars)

  def reads_last(self, i: int) -> bool:
    """Returns whether a result depends on the last argument."""
    return any(self._only([i])[1][-len(self._last) :])

  def results(self, wanted: Sequence[int] | None = None) -> list[jax.Array]:
    """Computes the wanted results (None: all) and nothing else."""
    numbers = range(len(self.shapes)) if wanted is None else wanted
    jaxpr, used = self._only(numbers)
    # Dead code elimination drops unused arguments, too.
    args = [x for x, use in zip(self._args, used, strict=True) if use]
    return jax.core.eval_jaxpr(jaxpr, self._closed.consts, *args)

  def _only(self, wanted: Sequence[int]) -> tuple[Any, list[bool]]:
    """Returns the jaxpr of some results, and a mask of its used arguments."""
    return partial_eval.dce_jaxpr(
      self._closed.jaxpr, [i in wanted for i in range(len(self.shapes))]
    )


def _to_keep(program: _Program, num: int) -> list[int]:
  """Returns the indices, from ``num`` on, of the results that a forward saves.
  """
  # Each value is saved once; functions of parameters alone and unchanged
  # arguments are not saved.
  return [
    i for i, first in enumerate(program.same(num))
    if i >= num and i == first and program.reads_last(i)
    and not program.is_argument(i)
  ]


class _Sums:
  """Linear function of tangents p' (parameters), x' (input): U(K(p'), x').

  Attributes:
    summands: Shapes of the results of K.
  """

  def __init__(
    self, linear: Callable[[Tree, Tree], Tree], params: Tree, x: Tree
  ) -> None:
    leaves, self._tree = jax.tree.flatten(x)

    def known(params):
      """Computes the part of the function without tangents of x."""

      def of_x(*leaves):
        return jax.tree.leaves(linear(params, self._tree.unflatten(leaves)))

      # Partial evaluation with unknown x: `values` are known without x, and
      # `_rest` is the remaining program of x.
      self._rest, _, values = partial_eval.trace_to_jaxpr_nounits(
        linear_util.wrap_init(
          of_x, debug_info=debug_info("linear program", of_x, leaves, {})
        ),
        [partial_eval.PartialVal.unknown(jax.typeof(x)) for x in leaves],
        instantiate=True,
      )
      return values

    self._known, program = known, _Program(known, params)
    # Values that do not depend on the parameters' tangents are constants of U.
    numbers = range(len(program.shapes))
    self._moving = [i for i in numbers if program.reads_last(i)]
    still = [i for i in numbers if i not in self._moving]
    self._still = dict(zip(still, program.results(still), strict=True))
    self.summands = [program.shapes[i] for i in self._moving]

  def of_params(self, params: Tree) -> list[jax.Array]:
    """Computes the products with ``params``, the tangents of parameters: K."""
    return _Program(self._known, params).results(self._moving)

  def added_up(self, summands: list[jax.Array], x: Tree) -> Tree:
    """Computes the function of K's result and of ``x``, input tangents: U."""
    values = self._still | dict(zip(self._moving, summands, strict=True))
    return self._tree.unflatten(jax.core.eval_jaxpr(
      self._rest, [values[i] for i in sorted(values)], *jax.tree.leaves(x)
    ))
