"""Server and client of a config's federated run, and its summary."""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

import jax
import numpy as np

from caatnet.federated.client import Client
from caatnet.federated.local import LocalTrainer
from caatnet.federated.service import STATE_FILE, Service
from caatnet.train import records
from caatnet.train.evaluate import make_evaluate
from parallel.base import files
from parallel.peers.transport.handshake import Security, parse_address


@contextlib.contextmanager
def open_service(
  federation: Any, workdir: str, say: Callable[[str], None] = print
) -> Iterator[Service]:
  """Context manager of a `Service`, which resumes the run of its folder.

  It does not listen yet. If the run ends before its first round, a new folder
  is left without a config, so that another run can use it.

  Args:
    federation: A `caatnet.config.federated.Federation`.
    workdir: The run's folder.
    say: Receives lines for the terminal.

  Raises:
    ValueError: The folder has another run's state, or is used by a process.
  """
  folder = files.parse_folder(workdir, local=True)
  folder.mkdir(parents=True, exist_ok=True)
  with files.lock(folder):
    is_new = not (folder / "config.json").exists()
    notice = records.write_config(folder, federation.config)
    if notice:
      say(notice)
    params, uplink = federation.vectors.initial(), federation.uplink
    # Compile before clients connect, so that no round includes compilation.
    federation.arithmetic.warm_up(params)
    uplink.decode(uplink.encode(params, jax.random.key(0)), params.size)
    try:
      with Service(
        federation.rules, federation.arithmetic, params, uplink.decode, folder,
        silence_s=federation.section.silence_s, say=say,
      ) as service:
        yield service
    finally:
      if is_new and not (folder / STATE_FILE).exists():
        (folder / "config.json").unlink()


def run_client(
  federation: Any, number: int, server: str, security: Security
) -> str:
  """Runs a client until the run ends; returns the reason of the end.

  Args:
    federation: A `caatnet.config.federated.Federation`.
    number: Id of the client.
    server: HOST:PORT of the server.
    security: Token and TLS settings.

  Raises:
    ValueError: The address is not HOST:PORT, the run has no client with this
      id, or the server cannot be reached or refuses the client.
  """
  address = parse_address("--server=", server, 1)
  last = federation.section.clients - 1
  if number > last:
    raise ValueError(
      f"--client={number} must be at most {last}: config.federated.clients is "
      f"{last + 1}"
    )
  trainer = federation.trainer(number)
  if isinstance(trainer, LocalTrainer):
    trainer.warm_up()
  return Client(
    number, trainer, federation.codecs(number), address, security,
    alone_s=federation.section.alone_s,
  ).run()


def summary(federation: Any, service: Service) -> str:
  """Returns one line about a federated run that has ended.

  It has the reason for the end, the final model's validation measures such as
  loss and accuracy, and the numbers of refused updates. With ``numpy_client``,
  the server has no validation examples: the measure is the lowest mean loss
  that clients reported for an earlier revision of the model.
  """
  state = service.state
  if federation.experiment is None:
    measures = f"loss of clients at most {state.best:.4f}"
  else:
    measures = _measures(federation, state.params)
  refused = ", ".join(f"{n} {k}" for k, n in sorted(state.counts.items()))
  return (
    f"{state.finished}: revision {state.revision}, validation {measures}"
    + (f"; refused updates: {refused}" if refused else "")
    + f"; in {service.workdir}"
  )


def _measures(federation: Any, vector: np.ndarray) -> str:
  """Returns loss, accuracy etc. on all validation examples, as text.

  ``vector`` has the model's parameters.
  """
  experiment = federation.experiment
  data = experiment.data
  dataset = data.load(experiment.seed)
  evaluate = make_evaluate(experiment.program, data.batch_size)
  params = jax.jit(federation.vectors.tree)(vector)
  found = dataset.measures(evaluate(params, dataset.validation).means)
  return ", ".join(f"{data.labels[k]} {v:.4f}" for k, v in found.items())
