"""Flags of scripts that join a swarm (`parallel.peers`)."""

from typing import Any

from absl import flags

FLAGS = flags.FLAGS

flags.DEFINE_string(
  "elastic", "", "HOST:PORT of a swarm's coordinator; trains as its worker."
)
flags.DEFINE_string(
  "listen", "", "HOST:PORT for connections of other workers; unset: any port "
  "of the interface towards the coordinator."
)
flags.DEFINE_string(
  "advertise", "", "HOST:PORT by which others reach --listen, if different."
)
flags.DEFINE_string(
  "token_file", "", "File with the swarm's token; unset: ELASTIC_TOKEN, or "
  "~/.elastic_token of this user."
)
flags.DEFINE_string(
  "certificate", "", "TLS certificate file of this process, for a swarm."
)
flags.DEFINE_string("key", "", "TLS key file of the certificate.")
flags.DEFINE_string("authority", "", "TLS certificate file of the authority.")


def security() -> Any:
  """Returns the `handshake.Security` of connections that the flags define."""
  from parallel.peers.transport import handshake

  return handshake.read_security(
    FLAGS.token_file, FLAGS.certificate, FLAGS.key, FLAGS.authority
  )


def endpoint() -> Any:
  """Returns the `swarm_loop.Endpoint` of process 0; None on other processes.

  Raises:
    ValueError: If a flag is invalid, or no coordinator accepts the connection.
  """
  from caatnet.train.elastic.swarm_loop import Endpoint
  from parallel.peers.membership import ids, service
  from parallel.peers.transport import handshake

  coordinator = _address("elastic", 1)
  if FLAGS.coordinator and not FLAGS.workdir:
    raise ValueError("--elastic with --coordinator needs one --workdir for all")
  if FLAGS.process_id:  # process 0 is the swarm's peer
    return None
  protected = security()
  request = handshake.DialRequest(
    handshake.Purpose.CONTROL, 0, 0, ids.make(("127.0.0.1", 1)),
    service.COORDINATOR_ID
  )
  try:
    here = handshake.find_local_host(coordinator, request, protected)
  except OSError as error:
    raise ValueError(
      f"--elastic={FLAGS.elastic}: no coordinator there accepts this "
      f"worker ({error}); to start one: python -m launch.coordinator "
      f"--port={coordinator[1]}"
    ) from error
  listen = _address("listen") or (here, 0)
  return Endpoint(coordinator, protected, listen, _address("advertise", 1))


def _address(name: str, least: int = 0) -> Any:
  """Returns a flag's (host, port), with port >= ``least``; None if not set."""
  from parallel.peers.transport import handshake

  text = FLAGS[name].value
  return handshake.parse_address(f"--{name}=", text, least) if text else None
