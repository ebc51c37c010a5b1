"""Residuals of a pipeline part: recomputed or saved for the backward.

A backward reads values of the forward, its *residuals*. `RecomputingBackward`
saves none of them and repeats the forward. `SavingBackward` saves those that
depend on the part's input. The other residuals are parameters, or functions of
parameters alone such as a copy in bfloat16. They are recomputed, since saving
them would store a copy per microbatch.

A schedule may split a backward into two actions; neither action of
`SavingBackward` then repeats a computation. The linearization of a part is y' =
U(e, x') with e = K(p'), for tangents p' of the weights and x' of the input: e
are the products that contain weight tangents, U is the rest. The first action
transposes U: it returns the cotangents of the input and saves those of e, the
*deltas*. The second action transposes K.

Source of the split: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv
2401.10241. Here partial evaluation splits it, instead of code in each layer.
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
  """Forward of a part of the model and its backward, in one action or in two.

  All methods take the part's parameters ``params``, its constants ``fixed`` and
  its input ``x``. ``kept`` are the values that `forward` has saved, and ``dy``
  the cotangents of the output.
  """

  def forward(self, params: Tree, fixed: Tree, x: Tree) -> tuple[Tree, Tree]:
    """Returns the part's output and the values to save for the backward."""
    ...

  def both(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    """Runs a whole backward: returns gradients of params, cotangents of x."""
    ...

  def of_input(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    """Runs a backward's first half: returns cotangents of x, and the deltas.

    The deltas are values for the second half, `of_weight`.
    """
    ...

  def of_weight(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree,
    deltas: Tree,
  ) -> Tree:
    """Runs a backward's second half: returns the gradients of ``params``.

    ``deltas`` are those that `of_input` has returned.
    """
    ...


class RecomputingBackward(NamedTuple):
  """A `Backward` that repeats the forward in each of its actions."""

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


class SavingBackward(NamedTuple):
  """A `Backward` that reads residuals which the forward has saved.

  Attributes:
    part: Function of a part of the model: ``(params of the part, constants of
      the part, x) -> x``.
    splits: Whether the schedule splits a backward into two actions.
  """

  part: Part
  splits: bool

  def forward(self, params: Tree, fixed: Tree, x: Tree) -> tuple[Tree, Tree]:
    program, num = self._trace_linearized(params, fixed, x)
    # Results: the output's leaves, then the residuals of the linear function.
    values = program.results()
    y = jax.tree.unflatten(jax.tree.structure(x), values[:num])
    return y, [values[i] for i in _indices_to_save(program, num)]

  def both(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    linear = self._rebuild_linear(params, fixed, x, kept)
    if self.splits:  # `linear` maps tangents to tangents
      return jax.linear_transpose(linear, params, x)(dy)
    return linear(dy)

  def of_input(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree
  ) -> tuple[Tree, Tree]:
    # The transpose of U gives the deltas (cotangents of K's result), and dx.
    sums = _SplitLinear(self._rebuild_linear(params, fixed, x, kept), params, x)
    deltas, dx = jax.linear_transpose(sums.of_summands, sums.summands, x)(dy)
    return dx, deltas

  def of_weight(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree, dy: Tree,
    deltas: Tree,
  ) -> Tree:
    # The transpose of K maps the deltas to the gradients of the parameters.
    sums = _SplitLinear(self._rebuild_linear(params, fixed, x, kept), params, x)
    return jax.linear_transpose(sums.of_params, params)(deltas)[0]

  def _trace_linearized(
    self, params: Tree, fixed: Tree, x: Tree
  ) -> tuple["_Program", int]:
    """Traces the forward and the residuals of its linearization or VJP.

    ``fixed`` are the constants of the part of the model.

    Returns:
      A program whose results are the leaves of the output, then the residuals;
      and the number of leaves of the output.
    """
    # A linearization can be split in two. A VJP cannot, since it is already
    # transposed, but it supports the custom VJPs of ZeRO.
    linearize = jax.linearize if self.splits else jax.vjp

    def forward(params, fixed, x):
      return linearize(lambda p, x: self.part(p, fixed, x), params, x)

    program = _Program(forward, params, fixed, x)
    return program, len(jax.tree.leaves(x))  # the output has x's structure

  def _rebuild_linear(
    self, params: Tree, fixed: Tree, x: Tree, kept: Tree
  ) -> Callable[..., Any]:
    """Rebuilds the linearization or VJP from the residuals in ``kept``.

    ``fixed`` are the constants of the part of the model.
    """
    program, num = self._trace_linearized(params, fixed, x)
    # A residual that equals another one, or an output, is saved only once.
    same, numbers = program.same(num), range(num, len(program.shapes))
    found = dict(zip(_indices_to_save(program, num), kept, strict=True))
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
    """Returns, for each result, the index of the first equal result.

    For results from ``start`` on, only these and earlier ones are compared.
    """
    # Equal results are one variable of the traced program.
    ids = [id(v) for v in self._closed.jaxpr.outvars]
    return [ids.index(v, min(i, start)) for i, v in enumerate(ids)]

  def is_argument(self, i: int) -> bool:
    """Returns whether result ``i`` is an unchanged argument."""
    jaxpr = self._closed.jaxpr
    return any(jaxpr.outvars[i] is v for v in jaxpr.invars)

  def reads_last(self, i: int) -> bool:
    """Returns whether result ``i`` depends on the last argument."""
    return any(self._prune_jaxpr([i])[1][-len(self._last) :])

  def results(self, wanted: Sequence[int] | None = None) -> list[jax.Array]:
    """Computes only the results with the indices ``wanted``; all if None."""
    numbers = range(len(self.shapes)) if wanted is None else wanted
    jaxpr, used = self._prune_jaxpr(numbers)
    # Dead code elimination drops unused arguments, too.
    args = [x for x, use in zip(self._args, used, strict=True) if use]
    return jax.core.eval_jaxpr(jaxpr, self._closed.consts, *args)

  def _prune_jaxpr(self, wanted: Sequence[int]) -> tuple[Any, list[bool]]:
    """Returns a jaxpr of the results ``wanted``, and the arguments it uses.

    The latter are one bool per argument.
    """
    return partial_eval.dce_jaxpr(
      self._closed.jaxpr, [i in wanted for i in range(len(self.shapes))]
    )


def _indices_to_save(program: _Program, num: int) -> list[int]:
  """Returns the indices of the residuals that a forward saves.

  Residuals have indices from ``num`` on. Each value is saved once; functions of
  parameters alone and unchanged arguments are not saved.
  """
  return [
    i for i, first in enumerate(program.same(num))
    if i >= num and i == first and program.reads_last(i)
    and not program.is_argument(i)
  ]


class _SplitLinear:
  """Split of a linear function of tangents p' and x' into U(K(p'), x').

  The function is the linearization of a part of the model; p' are tangents of
  its parameters, x' of its input.

  Attributes:
    summands: Shapes of the results of K.
  """

  def __init__(
    self, linear: Callable[[Tree, Tree], Tree], params: Tree, x: Tree
  ) -> None:
    leaves, self._tree = jax.tree.flatten(x)

    def known(params):
      """Computes what does not depend on tangents of x."""

      def of_x(*leaves):
        return jax.tree.leaves(linear(params, self._tree.unflatten(leaves)))

      # Partial evaluation with unknown x: `values` do not depend on x, and
      # `_rest` is the remaining program.
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
    """Computes K; ``params`` are the tangents p' of the parameters."""
    return _Program(self._known, params).results(self._moving)

  def of_summands(self, summands: list[jax.Array], x: Tree) -> Tree:
    """Computes U of the result of K, ``summands``, and the tangents x'."""
    values = self._still | dict(zip(self._moving, summands, strict=True))
    return self._tree.unflatten(jax.core.eval_jaxpr(
      self._rest, [values[i] for i in sorted(values)], *jax.tree.leaves(x)
    ))
