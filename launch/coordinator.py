r"""Runs the coordinator of peers that come and go while they train.

  python -m launch.coordinator --port=7000 --least=2

It knows who is there and which rounds are committed, and holds no tensors; on a
terminal it shows them. All that it decides is in its journal before a peer
hears of it: started again with the same journal it goes on where it was, and no
peer has to restart. SIGTERM and Ctrl-C end it. Peers wait for it as long as
they were told to, and then halt with all they have. Messages and decisions are
lines of JSON in --log. Peers of the same user on this machine have its token,
others need it. Tokens, ports, certificates, services: docs/elastic.md.
"""

import signal
import sys

from absl import flags

from launch import options, swarms

FLAGS = flags.FLAGS
flags.DEFINE_string(
  "journal", "", "File of what it must not forget; runs/coordinator-PORT/"
  "journal if unset. A new run needs a new one."
)
flags.DEFINE_string("log", "", "File of the log; beside the journal if unset.")
flags.DEFINE_integer("least", 1, "Peers with which the run begins.", 1)
flags.DEFINE_integer(
  "quorum", 0, "Parts with which a round begins after --grace_s; 0: all.", 0
)
flags.DEFINE_integer("most_peers", 256, "Peers at once, at most.", 1, 1024)
flags.DEFINE_float("grace_s", 10.0, "Seconds for parts beyond the quorum.")
flags.DEFINE_float("silence_s", 10.0, "Silent for so long, a peer is dropped.")
flags.DEFINE_float(
  "reconnect_s", 2.0, "Without a connection for so long, a peer is dropped."
)
flags.DEFINE_float(
  "recover_s", 30.0, "Seconds for members to come back after a restart."
)


def main() -> None:
  from caatnet.show import swarms as shown
  from parallel.elastic.membership import history, journal, service
  from parallel.elastic.membership.coordinator import Rules

  path = FLAGS.journal or f"runs/coordinator-{FLAGS.port}/journal"
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
  with journal.Journal(path) as kept, shown.Screen() as screen:
    timing = service.Timing(
      FLAGS.silence_s, FLAGS.reconnect_s, FLAGS.grace_s, FLAGS.recover_s
    )
    with service.Service(
      (FLAGS.host, FLAGS.port), swarms.security(), kept, timing=timing,
      rules=Rules(FLAGS.least, FLAGS.quorum), most_peers=FLAGS.most_peers,
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
