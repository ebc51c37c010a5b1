r"""Replays a trace of requests against a server, and prints how long it took.

  python -m launch.replay --trace=AzureLLMInferenceTrace_conv.csv --rate=2
  python -m launch.replay --sessions=50 --rate=1 --output=replay.json

The server is any that has OpenAI's /v1/completions and takes lists of tokens
and ignore_eos, as launch.serve does. Of a trace (Azure, BurstGPT or Mooncake,
as published) it has the times and the lengths; the tokens of prompts are made
up, equal where the trace says so. Without one it makes conversations with the
lengths of ShareGPT's. Requests longer than the model's context are left out
and counted. Times are the client's: TTFT from sending to the first token, TBT
between texts, TPOT the mean per token of a request.
"""

import asyncio
import json
import pathlib

from absl import flags

from launch import options

FLAGS = flags.FLAGS
flags.DEFINE_string("url", "http://127.0.0.1:8000", "The server.")
flags.DEFINE_string("trace", "", "File to replay; conversations if unset.")
flags.DEFINE_integer("sessions", 20, "Conversations without --trace.", 1)
flags.DEFINE_float("rate", 0.0, "Requests per second; 0: the trace's, or 1.", 0)
flags.DEFINE_integer("num_requests", 0, "Of the trace; 0 for all.", 0)
flags.DEFINE_string("key_file", "", "File with the key that the server asks.")
flags.DEFINE_integer("arrivals_seed", 0, "Of what is drawn.", 0)


def main() -> int:
  from rich.console import Console
  from rich.progress import Progress

  from caatnet.serving import traces
  from caatnet.show import results, servers

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
    print(json.dumps(result))
  else:
    servers.show_times(result)
  if FLAGS.output:
    results.write(pathlib.Path(FLAGS.output), result)
  return int(bool(result["errors"]))


if __name__ == "__main__":
  options.run(main, uses=("json", "output"), required=())
