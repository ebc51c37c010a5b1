r"""Replays a trace of requests against a server, and prints latencies.

  python -m launch.replay --trace=AzureLLMInferenceTrace_conv.csv --rate=2
  python -m launch.replay --workdir=runs/llama --sessions=50 --rate=2 \
    --think_s=1 --compare=first_come,shortest_first

The server must have OpenAI's /v1/completions with lists of tokens and
ignore_eos, as launch.serve has; --compare starts a server for each scheduling
policy, with equal requests. A published trace (Azure, BurstGPT, Mooncake) has
arrival times, lengths and perhaps common prefixes; prompts have random tokens.
Without a trace, conversations with the lengths of ShareGPT are generated. Times
are the client's: TTFT from sending to the first token, TBT between texts, TPOT
per token.
"""

import contextlib
import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_string("url", "http://127.0.0.1:8000", "Address of the server.")
flags.DEFINE_integer("sessions", 20, "Conversations without --trace.", 1)
flags.DEFINE_float("rate", 0.0, "Requests per second; 0: the trace's, or 1.", 0)
flags.DEFINE_float("think_s", 30.0, "Mean seconds before the next turn.", 0)
flags.DEFINE_integer("num_requests", 0, "Number of requests; 0 for all.", 0)
flags.DEFINE_string("key_file", "", "File with the API key of the server.")
flags.DEFINE_integer("arrivals_seed", 0, "Seed of random arrivals.", 0)


def main() -> int:
  from caatnet.serving import traces
  from caatnet.show import results, servers
  from parallel.base import files

  try:
    from caatnet.serving.server import load, local, start
  except ImportError as error:
    needed = f'replaying needs {error.name}: pip install "caatnet[serve]"'
    raise ValueError(needed) from error
  key = start.read_api_key(FLAGS.key_file, "key_file")
  policies = local.parse_policies(FLAGS.compare) if FLAGS.compare else [""]
  given = [bool(FLAGS.compare), FLAGS.workdir is not None]
  if any(given) and (not all(given) or FLAGS["url"].present):
    raise ValueError("--compare and --workdir go together, without --url")
  seed, most = FLAGS.arrivals_seed, FLAGS.num_requests
  trace = traces.load(FLAGS.trace, most, seed) if FLAGS.trace else None
  asked = load.Load(trace, FLAGS.sessions, FLAGS.rate, FLAGS.think_s,
                    FLAGS.max_tokens or 0, most, seed)
  found = {}
  for policy in policies:
    override = [f"--config.serving.policy={policy}"]
    server = (
      local.running_server(FLAGS.workdir, override) if policy
      else contextlib.nullcontext(FLAGS.url)
    )
    with servers.show_answer_progress(policy) as (begun, on_end), server as url:
      found[policy] = load.replay(url, asked, key, begun, on_end)
  result = found if FLAGS.compare else found[""]
  if FLAGS.json:
    print(files.to_json(result))
  else:
    servers.show_replay(found, FLAGS.rate)
  if FLAGS.output:
    results.write(pathlib.Path(FLAGS.output), result)
  return int(any(one["errors"] for one in found.values()))


if __name__ == "__main__":
  options.run(
    main, required=(),
    uses=("compare", "json", "max_tokens", "output", "trace", "workdir"),
    helps={
      "compare": "Scheduling policies of --workdir, as in first_come,vtc.",
      "workdir": "Run to serve for --compare.",
    },
  )
