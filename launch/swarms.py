"""The flags of scripts that take part in a swarm (`parallel.elastic`)."""

import re
from typing import Any

from absl import flags

FLAGS = flags.FLAGS

flags.DEFINE_string(
  "elastic", "", "HOST:PORT of a swarm's coordinator: train as a worker of it."
)
flags.DEFINE_string(
  "listen", "", "HOST:PORT for other workers; unset: any port at this "
  "machine's address on the way to the coordinator."
)
flags.DEFINE_string(
  "advertise", "", "HOST:PORT at which others reach --listen, if not there."
)
flags.DEFINE_string(
  "token_file", "", "File with the swarm's token; unset: ELASTIC_TOKEN, or "
  "~/.elastic_token, this user's own on this machine."
)
flags.DEFINE_string(
  "certificate", "", "For TLS in a swarm: file of the certificate."
)
flags.DEFINE_string("key", "", "For TLS: file of the certificate's key.")
flags.DEFINE_string("authority", "", "For TLS: who has signed them all.")


def security() -> Any:
  """Returns what the flags say about connections, a `handshake.Security`."""
  from parallel.elastic.transport import handshake

  return handshake.from_files(
    FLAGS.token_file, FLAGS.certificate, FLAGS.key, FLAGS.authority
  )


def place() -> Any:
  """Returns where the flags find a swarm, a `swarming.Place`.

  Raises:
    ValueError: A flag is not right, or there is no coordinator.
  """
  from caatnet.train.elastic.swarm_loop import Place
  from parallel.elastic.membership import ids, service
  from parallel.elastic.transport import handshake

  coordinator = _address("elastic")
  if FLAGS.coordinator and not FLAGS.workdir:
    raise ValueError("--elastic with --coordinator needs --workdir, of all")
  if FLAGS.process_id:  # process 0 speaks for all
    return None
  protected = security()
  request = handshake.Request(
    handshake.Purpose.CONTROL, 0, 0, ids.make(("127.0.0.1", 1)), service.NAME
  )
  try:
    scope = handshake.Scope()
    with handshake.dial(coordinator, request, protected, scope, 2) as sock:
      here = sock.getsockname()[0]
  except OSError as error:
    raise ValueError(
      f"--elastic={FLAGS.elastic}: no coordinator there takes this "
      f"worker ({error}); to start one: python -m launch.coordinator "
      f"--port={coordinator[1]}"
    ) from error
  listen = _address("listen") or (here, 0)
  return Place(coordinator, protected, listen, _address("advertise"))


def _address(name: str) -> tuple[str, int] | None:
  """Returns a flag HOST:PORT, or None if it is not set."""
  text = FLAGS[name].value
  match = re.fullmatch(r"([^:\s]+):(\d{1,5})", text)
  if text and not (match and int(match[2]) < 65536):
    raise ValueError(f"--{name}={text} is not HOST:PORT, as in 10.0.0.1:7000")
  return (match[1], int(match[2])) if match else None
