"""The log-sum-exp of attention, and the merge of attention over parts."""

import functools

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from caatnet.models.transformer.attention import _flash_lse, attention, merge


def dense(q, k, v, window=0, keys=slice(None)):
  """Returns attention over some of the keys, and its log-sum-exp."""
  k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
  distance = np.subtract.outer(*[np.arange(q.shape[1])] * 2)
  visible = (distance >= 0) & (distance < (window or q.shape[1]))
  visible, k, v = visible[None, :, None, keys], k[:, keys], v[:, keys]
  scores = jnp.einsum("bthd,bshd->bths", q, k) / q.shape[-1] ** 0.5
  weights = jnp.exp(scores) * visible
  is_empty = ~visible.any(axis=-1)
  total = weights.sum(axis=-1) + is_empty
  lse = jnp.where(is_empty, -jnp.inf, jnp.log(total))
  return jnp.einsum("bths,bshd->bthd", weights / total[..., None], v), lse


def draw(batch, length, num_groups):
  rng = np.random.default_rng(0)
  return [
    rng.normal(size=(batch, length, heads, 4)).astype("f4")
    for heads in (4, num_groups, num_groups)
  ]


def with_gradients(f, mesh=None):
  """Maps q, k and v to f's results and gradients of a function of both."""

  def both(*qkv):
    results, pull = jax.vjp(f, *qkv)
    return results, pull(jax.tree.map(jnp.cos, results))

  if mesh:
    both = jax.shard_map(both, mesh=mesh, in_specs=P("t"), out_specs=P("t"))
  return jax.jit(both)


def make_mesh(size):
  axis_types = (jax.sharding.AxisType.Auto,)
  return jax.make_mesh((size,), ("t",), axis_types=axis_types)


@pytest.mark.parametrize(
  ("length", "window", "num_groups"),
  [(9, 0, 2), (520, 200, 1)],  # the second in rematerialised blocks
)
def test_log_sum_exp_and_its_gradient_equal_the_dense_ones(
  length, window, num_groups
):
  qkv = draw(1, length, num_groups)
  ours, expected = (
    with_gradients(functools.partial(f, window=window))(*qkv)
    for f in (
      functools.partial(attention, implementation="xla", return_lse=True), dense
    )
  )
  chex.assert_trees_all_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_merged_parts_of_the_keys_equal_the_whole():
  """Queries 0 to 3 see no key of the last two parts, which merge first."""

  def merged(*qkv):
    first, *later = (
      dense(*qkv, keys=slice(*keys)) for keys in ((0, 4), (4, 7), (7, 9))
    )
    return merge([merge(later), first])

  ours, expected = (with_gradients(f)(*draw(1, 9, 2)) for f in (merged, dense))
  chex.assert_trees_all_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_merged_parts_without_keys_have_no_key():
  empty = np.zeros((1, 1, 1, 2), "bfloat16"), np.full((1, 1, 1), -np.inf, "f4")
  merged = jax.jit(merge)([empty] * 2)
  chex.assert_trees_all_equal_shapes_and_dtypes(merged, empty)
  chex.assert_trees_all_equal(merged, empty)


def test_log_sum_exp_of_a_flash_kernel_has_a_gradient():
  """Runs under `check_vma`, with a kernel that has no such gradient."""

  def kernel(*qkv, return_lse=False):
    out, lse = dense(*qkv)
    return (out, jax.lax.stop_gradient(lse)) if return_lse else out

  ours, expected = (
    with_gradients(f, make_mesh(2))(*draw(2, 5, 2))
    for f in (functools.partial(_flash_lse, kernel), dense)
  )
  chex.assert_trees_all_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_log_sum_exp_of_splash_attention_lowers_for_tpu():
  q, k = (jax.ShapeDtypeStruct((1, 128, n, 128), "bfloat16") for n in (4, 2))
  f = with_gradients(
    functools.partial(attention, implementation="splash", return_lse=True),
    make_mesh(1),
  )
  lowered = f.trace(q, k, k).lower(lowering_platforms=("tpu",))
  (out, lse), _ = lowered.out_info
  assert (out.shape, out.dtype) == (q.shape, q.dtype)
  assert (lse.shape, lse.dtype) == (q.shape[:3], "float32")
