"""Server of a config's federated run, and the summary of its result."""

from collections.abc import Callable
from typing import Any

import jax

from caatnet.federated.service import Service
from caatnet.train import files
from caatnet.train.evaluate import make_evaluate
from parallel.elastic.transport.handshake import Address, Security


def serving(
  federation: Any, workdir: str, address: Address, security: Security,
  say: Callable[[str], None] = print,
) -> Service:
  """Returns the service of a run, which continues the run of its folder.

  Args:
    federation: A `caatnet.config.federated.Federation`.
    workdir: The run's folder.
    address: (host, port); port 0 selects a free port.
    security: Token and TLS settings.
    say: Receives lines for the terminal.

  Raises:
    ValueError: The folder has another run.
  """
  folder = files.folder(workdir)
  folder.mkdir(parents=True, exist_ok=True)
  params, uplink = federation.vectors.initial(), federation.uplink
  federation.arithmetic.warm_up(params)
  uplink.decode(uplink.encode(params, jax.random.key(0)), params.size)
  return Service(
    address, security, federation.rules, federation.arithmetic, params,
    uplink.decode, folder,
    silence_s=federation.section.silence_s, say=say,
  )


def summary(federation: Any, service: Service) -> str:
  """Returns the measures of the final model on all validation examples."""
  experiment, state = federation.experiment, service.state
  data = experiment.data
  dataset = data.load(experiment.seed)
  evaluate = make_evaluate(experiment.program, data.batch_size)
  params = jax.jit(federation.vectors.tree)(state.params)
  found = dataset.measures(evaluate(params, dataset.validation).means)
  measures = ", ".join(f"{data.labels[k]} {v:.4f}" for k, v in found.items())
  refused = ", ".join(f"{n} {k}" for k, n in sorted(state.counts.items()))
  return (
    f"{state.finished}: revision {state.revision}, validation {measures}"
    + (f"; refused updates: {refused}" if refused else "")
    + f"; in {service.workdir}"
  )
