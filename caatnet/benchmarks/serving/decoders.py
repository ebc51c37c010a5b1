"""Decoders with randomly initialised parameters, on one device."""

from typing import Any

import jax

from caatnet.benchmarks.harness import setup
from caatnet.config import inference
from caatnet.config.inference import Inference
from caatnet.inference.decoder import Decoder


def built(config: Any, **sizes: int) -> Inference:
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
  program = made.program
  draw = jax.jit(
    program.model.init,
    out_shardings=program.layout.shardings(program.whole_specs),
  )
  return made.decoder(draw(jax.random.key(0)))
