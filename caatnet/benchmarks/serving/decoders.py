"""Decoders with randomly initialised parameters, on one device."""

import functools
from typing import Any

import jax
import numpy as np

from caatnet.benchmarks.harness import setup
from caatnet.config import inference
from caatnet.config.inference import Inference
from caatnet.inference.decoder import Decoder
from caatnet.interop import layout


def build_inference(config: Any, **sizes: int) -> Inference:
  """Builds the model of a benchmark's config for inference.

  Args:
    config: Config of the benchmark.
    **sizes: Keys of ``config.inference``, such as ``batch=4``.
  """
  config = setup.without_benchmark(config)
  with config.unlocked():
    config.inference.update(sizes)
  return inference.build(config, None, jax.devices()[:1])


def decoder(made: Inference) -> Decoder:
  """Returns a decoder with randomly initialised parameters."""
  return made.decoder(init_params(made))


def init_params(made: Inference) -> Any:
  """Returns randomly initialised float32 parameters."""
  program = made.program
  draw = jax.jit(
    program.model.init,
    out_shardings=program.layout.shardings(program.unpartitioned_specs),
  )
  return draw(jax.random.key(0))


def hugging_face_params(made: Inference, params: Any) -> dict[str, np.ndarray]:
  """Returns parameters with the names and layouts of Hugging Face's Llama."""
  model, found = made.program.model, {}
  for slot in layout.map_parameters(model.config, model.tensor.size):
    leaf = functools.reduce(lambda tree, key: tree[key], slot.path, params)
    for row in slot.rows():
      values = np.asarray(leaf if row is None else leaf[row])
      for part, x in zip(
        slot.parts, layout.take_apart(slot, values), strict=True
      ):
        found[part.named(row)] = x
  return found
