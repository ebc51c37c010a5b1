r"""Replays a trace of requests against a server, and prints latencies.

  python -m launch.replay --trace=AzureLLMInferenceTrace_conv.csv --rate=2
  python -m launch.replay --sessions=50 --rate=1 --output=replay.json

The server must have OpenAI's /v1/completions with lists of tokens and
ignore_eos, as launch.serve. A published trace (Azure, BurstGPT or Mooncake)
gives arrival times and lengths; tokens of prompts are random, with the common
prefixes of the trace if it has them. Without a trace, conversations with the
lengths of ShareGPT are generated. Requests longer than the model's context are
skipped and counted. Times are measured by the client: TTFT from sending to the
first token, TBT between texts, TPOT the mean per token of a request.
"""

import asyncio
import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_string("url", "http://127.0.0.1:8000", "Address of the server.")
flags.DEFINE_integer("sessions", 20, "Conversations without --trace.", 1)
flags.DEFINE_float("rate", 0.0, "Requests per second; 0: the trace's, or 1.", 0)
flags.DEFINE_integer("num_requests", 0, "Number of requests; 0 for all.", 0)
flags.DEFINE_string("key_file", "", "File with the API key of the server.")
flags.DEFINE_integer("arrivals_seed", 0, "Seed of random arrivals.", 0)


def main() -> int:
  from rich.console import Console
  from rich.progress import Progress

  from caatnet.serving import traces
  from caatnet.show import results, servers
  from parallel.base import files

  try:
    from caatnet.serving.server import client, start
  except ImportError as error:
    raise ValueError(
      f'replaying needs {error.name}: pip install "caatnet[serve]"'
    ) from error
  key = start.key(FLAGS.key_file, "key_file")
  if FLAGS.trace:
    arrivals = traces.load(
      FLAGS.trace, FLAGS.num_requests, FLAGS.arrivals_seed
    )
    if FLAGS.rate:
      arrivals = traces.scaled(arrivals, FLAGS.rate)
  else:
    arrivals = traces.Sessions(
      FLAGS.sessions, FLAGS.rate or 1.0, FLAGS.arrivals_seed
    ).arrivals()[: FLAGS.num_requests or None]
  card = asyncio.run(client.card(FLAGS.url, key))
  asked = client.questions_of(arrivals, card)
  with Progress(transient=True, console=Console(stderr=True)) as progress:
    task = progress.add_task("answers", total=len(asked))
    found = asyncio.run(
      client.ask(FLAGS.url, asked, key, on_end=lambda: progress.advance(task))
    )
  result = client.summary(found) | {"left_out": len(arrivals) - len(asked)}
  if FLAGS.json:
    print(files.to_json(result))
  else:
    servers.show_times(result)
  if FLAGS.output:
    results.write(pathlib.Path(FLAGS.output), result)
  return int(bool(result["errors"]))


if __name__ == "__main__":
  options.run(main, uses=("json", "output", "trace"), required=())
