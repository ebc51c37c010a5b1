r"""Trains a model on examples that never leave the clients that have them.

  python -m launch.federate --config=configs/federated/tiny.py
  python -m launch.federate --config=configs/federated/tiny.py --role=server \
    --host=0.0.0.0 --port=7100
  python -m launch.federate --config=configs/federated/tiny.py --role=client \
    --client=0 --server=HOST:7100

The first command runs the server and all clients on this machine. If a server
was killed, the same command resumes it from its state in --workdir, which also
has metrics.jsonl. Tokens and certificates are those of docs/elastic.md, the
protocol is described in docs/federated.md.
"""

import sys

from absl import flags

from launch import options, swarms

FLAGS = flags.FLAGS
flags.DEFINE_enum(
  "role", "all", ["all", "server", "client"],
  "Processes to run: server and all clients, the server, or one client.",
)
flags.DEFINE_string("server", "", "HOST:PORT of the server, for a client.")
flags.DEFINE_integer("client", None, "Id of the client, from 0.", 0)


def main() -> None:
  from caatnet import commands
  from caatnet.config import federated
  from caatnet.federated import emulation, report, run
  from caatnet.show import render
  from parallel.peers.transport.handshake import format_address

  if (FLAGS.role == "client") != bool(FLAGS.server) or (
    (FLAGS.role == "client") != (FLAGS.client is not None)
  ):
    raise ValueError("--role=client needs --server=HOST:PORT and --client=K")
  federation = federated.build(FLAGS.config, FLAGS.client or 0)
  security = swarms.security()
  if FLAGS.role == "server":
    emulation.check_not_emulated(federation)
  if FLAGS.role == "client":
    print(run.run_client(federation, FLAGS.client, FLAGS.server, security))
    return
  workdir = FLAGS.workdir or f"runs/{FLAGS.config.name}"
  with run.open_service(federation, workdir) as service:
    if not service.state.finished:
      with emulation.start_emulation(federation, FLAGS.host) as network:
        render.show(*network.parts())
        with network.listening_context():
          service.listen((network.host, FLAGS.port), security)
        print(f"server at {format_address(service.address)}", flush=True)
        if FLAGS.role == "all":
          network.serve(service, commands.script_command(
            "federate", *sys.argv[1:], "--role=client"
          ))
        else:
          service.serve()
  if service.rows or FLAGS.plot:
    render.present(
      report.report(service.rows, federation.links), {}, picture=FLAGS.plot
    )
  print(run.summary(federation, service))


if __name__ == "__main__":
  options.run(
    main, defaults={"port": "0"},
    uses=(
      "config", "plot", "workdir", "host", "port", "cpu_devices", "token_file",
      "certificate", "key", "authority",
    ),
  )
