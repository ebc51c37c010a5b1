"""Experts stored as differences from a base, reconstructed on the device.

Matrices are stored as a product of two factors ("low_rank") or as integer codes
with one scale per block of a row ("int8", "int4"). Matrices of a model are
stacked over layers or ranks, so arrays with fewer than three dims, such as the
gains of norms, are stored unchanged.

The factors are the truncated singular value decomposition, which has the least
squared error among all products of this rank (Eckart and Young, 1936).
`parallel.kernels.codec` defines the codes.
"""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from caatnet.serving.experts import WHOLE_FORM, scale_block_size
from parallel.kernels.codec import reference as codec


def encode(
  params: Mapping[str, Any], base: Mapping[str, Any], form: str, rank: int = 8
) -> dict[str, Any]:
  """Returns parameters in a form of `caatnet.serving.experts.FORMS`.

  Args:
    params: Nested dict of float32 arrays.
    base: The base's parameters, of the same structure.
    form: "whole", "low_rank", "int8" or "int4".
    rank: Rank of the factors of "low_rank". Matrices that have fewer elements
      than their factors are stored unchanged.

  Returns:
    A nested dict of numpy arrays. A parameter NAME becomes ``NAME``, its value
    ("whole") or unencoded difference; or ``NAME:left`` ``[..., m, rank]`` and
    ``NAME:right`` ``[..., rank, n]``; or ``NAME:codes`` uint8 and
    ``NAME:scales`` float32.
  """
  stored: dict[str, Any] = {}
  for key, value in params.items():
    if isinstance(value, Mapping):
      stored[key] = encode(value, base[key], form, rank)
      continue
    if form == WHOLE_FORM:
      stored[key] = np.asarray(value)
      continue
    delta = np.asarray(value) - np.asarray(base[key])
    if delta.ndim < 3:
      stored[key] = delta
    elif form == "low_rank":
      m, n = delta.shape[-2:]
      if rank * (m + n) >= m * n:
        stored[key] = delta
        continue
      u, s, v = np.linalg.svd(delta, full_matrices=False)
      stored[f"{key}:left"] = u[..., :rank] * s[..., None, :rank]
      stored[f"{key}:right"] = v[..., :rank, :]
    else:
      encoded = _encoded(delta, form)
      stored[f"{key}:codes"] = np.asarray(encoded.payload)
      stored[f"{key}:scales"] = np.asarray(encoded.scales)
  return stored


def restore(
  base: Mapping[str, Any], stored: Mapping[str, Any], form: str
) -> dict[str, Any]:
  """Returns the parameters of an expert; inverse of `encode`.

  A traceable function: ``jax.jit(restore, static_argnames="form")`` runs on the
  device, so that only the stored arrays are copied to it.

  Args:
    base: The base's parameters.
    stored: Result of `encode`, or of `caatnet.serving.experts.Reader.load`.
    form: Form of ``stored``; "whole" returns it unchanged.
  """
  if form == WHOLE_FORM:
    return dict(stored)
  made: dict[str, Any] = {}
  for key, value in base.items():
    if isinstance(value, Mapping):
      made[key] = restore(value, stored[key], form)
      continue
    if key in stored:
      delta = stored[key]
    elif form == "low_rank":
      delta = jnp.matmul(
        stored[f"{key}:left"], stored[f"{key}:right"],
        precision=jax.lax.Precision.HIGHEST,
      )
    else:
      encoded = codec.Encoded(stored[f"{key}:codes"], stored[f"{key}:scales"])
      width = value.shape[-1]
      delta = codec.decode(encoded, width, _codec(form, width))
    made[key] = value + delta
  return made


def size_bytes(stored: Any) -> int:
  """Returns the total size in bytes of all arrays in a tree."""
  return sum(x.nbytes for x in jax.tree.leaves(stored))


@functools.partial(jax.jit, static_argnames="form")
def _encoded(delta: jax.Array, form: str) -> codec.Encoded:
  """Returns a matrix as integer codes and scales of its rows."""
  return codec.encode(delta, _codec(form, delta.shape[-1]))


def _codec(form: str, width: int) -> codec.Codec:
  """Returns the codec of a form for matrix rows of ``width`` elements."""
  return codec.Codec(form, scale_block_size(width))
