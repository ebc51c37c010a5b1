r"""Serves a run's model, converted weights or experts by OpenAI's HTTP API.

  python -m launch.serve --workdir=runs/demo/p0.5
  python -m launch.serve --workdir=runs/llama --config.serving.policy=vtc \
    --config.inference.batch=64 --config.inference.context=8192
  python -m launch.serve --config=configs/serving/experts.py
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
    -d '{"model": "p0.5", "prompt": "def ", "max_tokens": 32}'

Paths are /v1/completions, /v1/chat/completions, /v1/models, /tokenize and
/detokenize; / (a page) and /state (JSON) have the server's state, /metrics is
for Prometheus, /health for proxies. CAATNET_API_KEY or --api_key_file sets the
key that clients must send. After SIGTERM or Ctrl-C, running requests finish; a
second signal ends the process.
config.inference.batch is the number of concurrent sequences; in config.serving:

  policy      first_come, strict_priority (the default, by a field "priority"),
              shortest_first, vtc or dlpm (fair among the fields "user")
  preempt     swap, recompute or cost (the cheaper one, the default)

--help_config explains these and all other keys.
"""

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_string("name", "", "The model's name; the folder's if unset.")
flags.DEFINE_string("api_key_file", "", "File with the clients' API key.")
flags.DEFINE_bool("warm_up", True, "Compile all programs before serving; "
                  "if not, the first request of each shape waits for its own.")


def main() -> int:
  from caatnet.composition import library
  from caatnet.config import experts, serving
  from caatnet.serving.engine import warm_up
  from caatnet.show import servers

  try:
    from caatnet.serving.server import http, start
  except ImportError as error:
    needed = f'a server needs {error.name}: pip install "caatnet[serve]"'
    raise ValueError(needed) from error
  if (FLAGS.workdir is None) == (FLAGS.config is None):
    raise ValueError("--workdir is required, or --config for experts (--help)")
  if FLAGS.config is not None and (FLAGS.name or FLAGS.step is not None):
    raise ValueError("--name and --step have no effect with --config")
  listener = http.bind_listener(FLAGS.host, FLAGS.port)
  key = start.read_api_key(FLAGS.api_key_file)
  mesh, say = options.mesh(), servers.say
  say(f"reading {FLAGS.workdir or 'experts'}" + ", compiling" * FLAGS.warm_up)
  progress = servers.run_with_progress if FLAGS.warm_up else None
  options.resume_gc()
  if FLAGS.config is not None:
    made = experts.build(FLAGS.config, mesh, say, library.put)
  else:
    made = serving.build_server(
      FLAGS.workdir, FLAGS.name, mesh, options.overrides(), FLAGS.step, progress
    )
  if notice := serving.reuse_notice(made.decoder, made.chosen):
    say(notice)
  warm_up.prepare(made.engine, progress)
  server = start.build_server(made, key, serving.page_bytes(made.decoder), say)
  servers.announce(
    made.models.title, listener, serving.describe(made.decoder, made.engine),
    made.chosen, bool(key),
  )
  return server.serve_on(listener)


if __name__ == "__main__":
  options.run(
    main, required=(), helps={"workdir": "Folder of the run."}, reads_run=True,
    changeable=("inference", "serving", "model.max_positions"),
    uses=("workdir", "config", "mesh", "cpu_devices", "step", "host", "port",
          "programs"),
  )
