r"""Serves a run's model, or converted weights, by OpenAI's HTTP API.

  python -m launch.serve --workdir=runs/demo/p0.5
  python -m launch.serve --workdir=runs/llama --config.serving.policy=vtc \
    --config.inference.batch=64 --config.inference.context=8192
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \
    -d '{"model": "p0.5", "prompt": "def ", "max_tokens": 32}'

/v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize; /
has the state, /state as JSON; /metrics is for Prometheus, /health for proxies.
CAATNET_API_KEY or --api_key_file sets the key that clients must send. After
SIGTERM or Ctrl-C, running requests finish; a second signal ends the process.
config.inference.batch is the number of concurrent sequences; in config.serving:

  policy      first_come, strict_priority (the field "priority", the default),
              shortest_first, vtc or dlpm (fair among the fields "user")
  preempt     swap, recompute or cost (the cheaper one, the default)
  host_pages, growth, wait_s, reuse, keep_turns: use of cache pages
  queue, choices, max_tokens, body_bytes, read_s, write_s, drain_s: limits

--help_config explains each key. Models with one state per sequence, such as
configs/recurrent, are served without reuse.
"""

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_string("name", "", "The model's name; the folder's if unset.")
flags.DEFINE_string("api_key_file", "", "File with the clients' API key.")
flags.DEFINE_bool("warm_up", True, "Compile all programs before serving.")
flags.DEFINE_string(
  "programs", "~/.cache/caatnet/programs", "Folder that caches compiled "
  "programs; JAX_COMPILATION_CACHE_DIR takes precedence."
)


def main() -> int:
  from caatnet.config import serving
  from caatnet.serving.engine import warm_up
  from caatnet.show import servers
  from caatnet.train import files, tokenizer

  try:
    from caatnet.serving.server import http, start
  except ImportError as error:
    raise ValueError(
      f'a server needs {error.name}: pip install "caatnet[serve]"'
    ) from error
  listener = http.bound(FLAGS.host, FLAGS.port)
  warm_up.keep_programs(FLAGS.programs)
  key = start.key(FLAGS.api_key_file)
  tokens = tokenizer.load(FLAGS.workdir)
  decoder, chosen = serving.from_folder(
    FLAGS.workdir, options.mesh(), options.overrides(), FLAGS.step
  )
  if notice := serving.reuse_notice(decoder, chosen):
    servers.say(notice)
  engine = serving.engine(decoder, chosen)
  if FLAGS.warm_up:
    warm_up.prepare(engine.executor, servers.progress)
  name = FLAGS.name or files.folder(FLAGS.workdir).name
  server = start.server(
    engine, decoder, tokens, chosen, name, key, serving.page_bytes(decoder),
    servers.say,
  )
  servers.announce(
    name, listener, serving.describe(decoder, engine), chosen, bool(key)
  )
  return server.serve_on(listener)


if __name__ == "__main__":
  options.run(
    main, uses=("workdir", "mesh", "cpu_devices", "step", "host", "port"),
    required=("workdir",),
    changeable=("inference", "serving", "model.max_positions"),
  )
