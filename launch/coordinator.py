r"""Runs the coordinator of a swarm, whose peers may join and leave.

  python -m launch.coordinator --port=7000 --least=2

The coordinator tracks members and committed rounds, shows them on a terminal,
and holds no tensors. Each decision is in its journal before peers receive it: a
coordinator that is restarted with the same journal continues, without a restart
of the peers.
SIGTERM ends it with exit code 0, Ctrl-C with 130. Peers wait for it for at most
config.elastic.alone_s seconds, and then save and end. --log has messages and
decisions as lines of JSON. Peers of the same user on this machine find the
token; others need it. Tokens, ports, certificates and services are in
docs/elastic.md.
"""

import signal
import sys

from absl import flags

from launch import options, swarms

FLAGS = flags.FLAGS
flags.DEFINE_string(
  "journal", "", "File of persistent decisions; runs/coordinator-PORT/journal "
  "if unset. A new run needs a new file."
)
flags.DEFINE_string(
  "log", "", "File of the log; in the journal's folder if unset."
)
flags.DEFINE_integer("least", 1, "Minimum number of peers to start a run.", 1)
flags.DEFINE_integer(
  "quorum", 0, "Contributions that suffice for a round after --grace_s; 0: one "
  "of each member.", 0
)
flags.DEFINE_integer("max_peers", 256, "Maximum number of peers.", 1, 1024)
flags.DEFINE_float(
  "grace_s", 10.0, "Seconds to wait for late contributions after the quorum."
)
flags.DEFINE_float(
  "silence_s", 10.0, "Seconds without a heartbeat until a peer is dropped."
)
flags.DEFINE_float(
  "reconnect_s", 2.0, "Seconds without a connection until a peer is dropped."
)
flags.DEFINE_float(
  "recover_s", 30.0, "Seconds for members to rejoin after a restart."
)


def main() -> None:
  from caatnet.show import swarms as shown
  from parallel.peers.membership import history, journal, service
  from parallel.peers.membership.coordinator import Rules

  path = FLAGS.journal or f"runs/coordinator-{FLAGS.port}/journal"
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
  with journal.Journal(path) as kept, shown.Screen() as screen:
    timing = service.Timing(
      FLAGS.silence_s, FLAGS.reconnect_s, FLAGS.grace_s, FLAGS.recover_s
    )
    with service.CoordinatorService(
      (FLAGS.host, FLAGS.port), swarms.security(), kept, timing=timing,
      rules=Rules(FLAGS.least, FLAGS.quorum), max_peers=FLAGS.max_peers,
      log=history.Log(FLAGS.log or f"{path}.log.jsonl"),
      say=screen.say,
    ) as there:
      screen.follow(there)
      there.serve()


if __name__ == "__main__":
  options.run(
    main,
    uses=("host", "port", "token_file", "certificate", "key", "authority"),
    required=(), devices=False,
    defaults={"host": "0.0.0.0", "port": "7000"},
  )
