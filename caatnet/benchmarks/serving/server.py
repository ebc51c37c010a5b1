"""Rate of many streams over HTTP, compared with the engine without a server."""

import asyncio
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import gc
import threading
import time
from typing import Any

import numpy as np

from caatnet.benchmarks.harness import scripts, setup, timing
from caatnet.benchmarks.serving import decoders
from caatnet.config import serving
from caatnet.data.tokenizers import ByteTokenizer
from caatnet.inference.decoder import Decoder
from caatnet.inference.requests import Request as Drawing
from caatnet.inference.stops import Stops
from caatnet.serving.engine import warm_up
from caatnet.serving.engine.device import SamplingState
from caatnet.serving.engine.engine import replay, tune_gc
from caatnet.serving.options import DEFAULTS, ServingOptions
from caatnet.serving.requests import Request
from caatnet.serving.server import client, http, start
from caatnet.serving.server.catalog import OneModel
from caatnet.serving.server.served import ServerParts
from caatnet.show import servers, tables


def run(config: Any) -> dict[str, Any]:
  """Measures, prints a table, and returns it as plain data.

  Args:
    config: Config like configs/benchmark/server.py.
  """
  rows = [_measure(config, batch) for batch in config.benchmark.batches]
  _print(rows, config.benchmark)
  return {"environment": setup.describe_environment(), "rows": rows}


def _measure(config: Any, batch: int) -> dict[str, Any]:
  """Times server and engine with up to ``batch`` sequences running at once."""
  options = config.benchmark
  chosen = first_come_options(options.streams)
  decoder = decoders.decoder(decoders.build_inference(config, batch=batch))
  rng = np.random.default_rng(0)
  prompts = rng.integers(
    config.model.vocab_size, size=(options.streams, options.prompt)
  ).tolist()
  # Lengths differ: with equal ones, streams that begin together would also end
  # together, and the steps of a run would depend on which prompts share a step.
  lengths = rng.integers(
    options.tokens // 2, 3 * options.tokens // 2, size=len(prompts),
    endpoint=True,
  ).tolist()
  sizes = decoder, serving.BATCH_SIZE_FACTOR
  servers.run_with_progress(
    warm_up.warm_up(*sizes), len(warm_up.shapes(*sizes))
  )
  often = gc.get_threshold()
  tune_gc()  # as `warm_up.prepare` does for a server
  with scripts.pool(1) as pool:  # client process, started in the first round
    found = timing.in_turns({
      "bare": lambda: _measure_engine(decoder, chosen, prompts, lengths),
      "http": lambda: measure_server(decoder, chosen, prompts, lengths, pool),
    }, options.rounds, label=f"{batch} at a time")
  gc.set_threshold(*often)
  over_http = found["http"]
  return {
    "batch": batch, "streams": options.streams,
    "bare": found["bare"],
    "http": [each["tokens_per_second"] for each in over_http],
    "errors": sum(len(each["errors"]) for each in over_http),
    "times": [each["measures"] for each in over_http],
  }


def first_come_options(streams: int) -> ServingOptions:
  """Returns options of an engine that serves streams in order of arrival."""
  return dataclasses.replace(
    DEFAULTS, queue=streams, policy="first_come", reuse=False,
    preempt="recompute", keep_turns=False,
  )


def _measure_engine(
  decoder: Decoder, chosen: ServingOptions, prompts: list[list[int]],
  lengths: Sequence[int],
) -> float:
  """Returns the tokens per second of an engine alone."""
  engine = serving.engine(decoder, chosen)
  requests = [
    Request(
      i, prompt, length, arrival_s=0.0,
      payload=SamplingState(Drawing(tuple(prompt), Stops(length))),
    )
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
  ]
  begin = time.perf_counter()
  replay(engine, requests)
  seconds = time.perf_counter() - begin
  engine.executor.close()
  return sum(lengths) / seconds


def measure_server(
  decoder: Decoder, chosen: ServingOptions, prompts: list[list[int]],
  lengths: Sequence[int], pool: futures.Executor,
) -> dict[str, Any]:
  """Starts a server; returns the result of `ask` in a process of a pool."""
  listener = http.bind_listener("127.0.0.1", 0)
  made = ServerParts(
    serving.engine(decoder, chosen), decoder, OneModel("benchmark"),
    ByteTokenizer(), chosen,
  )
  server = start.build_server(made, "", serving.page_bytes(decoder), print)
  thread = threading.Thread(target=server.serve_on, args=(listener,))
  thread.start()
  try:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    pool.submit(tune_gc).result()
    return pool.submit(ask, url, prompts, lengths).result()
  finally:
    server.should_exit = True
    thread.join()


def ask(
  url: str, prompts: list[list[int]], lengths: Sequence[int]
) -> dict[str, Any]:
  """Sends all requests at once; returns `client.summary` of the streams.

  Args:
    url: Address of the server.
    prompts: Token ids of each prompt.
    lengths: Number of tokens of each response.
  """
  # Log-probabilities make each token an event, even one without text.
  body = {
    "model": "benchmark", "temperature": 0, "ignore_eos": True, "logprobs": 0,
  }
  questions = [
    client.TimedRequest(0.0, body | {"prompt": prompt, "max_tokens": length})
    for prompt, length in zip(prompts, lengths, strict=True)
  ]
  return client.summary(asyncio.run(client.send_requests(url, questions)))


def _print(rows: list[dict[str, Any]], options: Any) -> None:
  def median(values: Any) -> float:
    return float(np.median(values))

  tables.print_table(
    f"{options.streams} streams at once, {options.prompt} tokens and "
    f"{options.tokens} more on average; medians of {options.rounds} rounds",
    ["running", "tokens/s without HTTP", "with HTTP", "share", "TTFT P50 (s)",
     "TBT P50 (ms)", "TBT P99 (ms)", "errors"],
    [
      [
        str(r["batch"]), f"{median(r['bare']):,.0f}",
        f"{median(r['http']):,.0f}",
        f"{median(np.array(r['http']) / r['bare']):.1%}",
        f"{median([t['TTFT']['P50'] for t in r['times']]):.2f}",
        *(
          f"{1e3 * median([t['TBT'][p] for t in r['times']]):.1f}"
          for p in ("P50", "P99")
        ),
        str(r["errors"]),
      ]
      for r in rows
    ],
  )
