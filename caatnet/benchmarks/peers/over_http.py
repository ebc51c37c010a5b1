"""Tokens per second over HTTP from our server, vLLM's and llama.cpp's."""

from collections.abc import Mapping, Sequence
import contextlib
import os
import tempfile
from typing import Any

import numpy as np

from caatnet.benchmarks.harness import scripts, timing
from caatnet.benchmarks.peers import servers
from caatnet.benchmarks.serving import decoders, server
from caatnet.config import serving
from caatnet.serving.engine import warm_up
from caatnet.show import servers as shown
from caatnet.show import tables


def measure_servers(config: Any, python: str) -> list[dict[str, Any]]:
  """Returns a row per server, with tokens per second and TTFT of each round.

  Args:
    config: Config like configs/benchmark/peers.py, with ``benchmark.vllm`` or
      ``benchmark.llama_server``.
    python: Python with gguf, for llama.cpp.

  Raises:
    ValueError: A server cannot be started, or a stream has failed.
  """
  options = config.benchmark
  batch = max(options.batches, default=1)
  context = options.prompt + options.tokens
  made = decoders.build_inference(config, batch=batch, context=context)
  params = decoders.init_params(made)
  prompts = np.random.default_rng(0).integers(
    config.model.vocab_size, size=(2 * batch, options.prompt)
  ).tolist()
  with contextlib.ExitStack() as stack:
    weights = os.path.join(
      stack.enter_context(tempfile.TemporaryDirectory()), "weights.npz"
    )
    if options.llama_server:
      np.savez(weights, **decoders.hugging_face_params(made, params))
    decoder = made.decoder(params)  # deletes the parameters
    sizes = decoder, serving.BATCH_SIZE_FACTOR
    shown.run_with_progress(
      warm_up.warm_up(*sizes), len(warm_up.shapes(*sizes))
    )
    pool = stack.enter_context(scripts.pool(1))  # the client's process
    lengths = [options.tokens] * len(prompts)
    turns = {"caatnet": lambda: server.measure_server(
      decoder, server.first_come_options(len(prompts)), prompts, lengths, pool
    )}
    urls: dict[str, str] = {}
    if options.vllm:
      urls["vllm"] = stack.enter_context(servers.vllm(config, batch, context))
    if options.llama_server:
      urls["llama.cpp"] = stack.enter_context(
        servers.llama_cpp(config, batch, context, python, weights)
      )
    for name, url in urls.items():
      turns[name] = lambda url=url: pool.submit(
        server.ask, url, prompts, lengths
      ).result()
    found = timing.in_turns(
      turns, options.rounds, label=f"{len(prompts)} streams over HTTP"
    )
  for name, rounds in found.items():
    for each in rounds:
      if each["errors"]:
        raise ValueError(f"streams of {name}: {each['errors'][0]}")
  return [
    {
      "by": name, "streams": len(prompts), "batch": batch,
      "tokens_per_second": [each["tokens_per_second"] for each in rounds],
      "ttft_p50_s": [each["measures"]["TTFT"]["P50"] for each in rounds],
    } for name, rounds in found.items()
  ]


def show(found: Sequence[Mapping[str, Any]]) -> None:
  """Prints the table of `measure_servers`."""
  first = np.array(found[0]["tokens_per_second"])
  tables.print_table(
    f"{found[0]['streams']} streams over HTTP, at most {found[0]['batch']} at "
    "a time, float32",
    ["by", "tokens/s", "caatnet is x times as fast", "TTFT P50 (s)"],
    [
      [
        row["by"], timing.range_text(row["tokens_per_second"]),
        timing.range_text(first / row["tokens_per_second"], ".2f"),
        timing.range_text(row["ttft_p50_s"], ".2f"),
      ] for row in found
    ],
  )
