"""Times of training steps and decoding, ours and those of other projects.

Measurements alternate. Each other project runs in a separate process, which
waits while the others run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

import jax
import numpy as np

from caatnet import commands
from caatnet.benchmarks.harness import environments, scripts, setup, timing
from caatnet.benchmarks.peers import over_http, servers
from caatnet.benchmarks.serving import decoders, decoding
from caatnet.benchmarks.training import train_step
from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.show import tables
from caatnet.train.throughput import matmul_rate
from parallel.base.kept import ResultCache
from parallel.plans.placement import rates

_HERE = pathlib.Path(__file__).parent
# Elements of the array whose read bandwidth is measured: 512 MB, far more than
# caches.
_READ_ELEMENTS = 2**27
_KEY = "config.benchmark.python_path"
# Keys of config.benchmark that change no measured result.
_IRRELEVANT_KEYS = ("results", "plot", "target")

# Keys of rates of decoding: of new tokens, and of tokens of prompts.
_SPEEDS = ("tokens_per_second", "prompt_tokens_per_second")

# Function that runs one measurement, and returns its seconds.
TimeMeasurement = Callable[[], float]


def run(config: Any) -> dict[str, Any]:
  """Measures, prints tables, and returns them as plain data.

  Args:
    config: Config like configs/benchmark/peers.py.

  Raises:
    ValueError: An environment cannot be made, or another project's program
      does not run.
  """
  options = config.benchmark
  python = options.python_path
  if not python and options.packages:
    python = str(environments.create(
      pathlib.Path(options.folder), options.packages
    ))
  kept = ResultCache(options.results, "config.benchmark.results")

  def get(part: str, compute: Callable[[], Any], *inputs: Any) -> Any:
    of = _relevant_config(config), commands.current_commit(), part, inputs
    return kept.get(of, compute)

  served, training, decoded = [], [], []
  # Servers first, since those of other projects may fail to start.
  if options.vllm or options.llama_server:
    served = get("http", lambda: over_http.measure_servers(config, python))
  if options.variants:
    training = get("training", lambda: _measure_training(config, python))
  for batch in dict.fromkeys(options.batches):
    decoded += get(
      "decoding",
      lambda batch=batch: list(_measure_decoding(config, python, batch)), batch,
    )
  limits = get("limits", lambda: {
    "matmul_flops_per_second": matmul_rate(
      experiments.build(
        setup.without_benchmark(config), None, jax.devices()[:1]
      ).program.layout.mesh, "float32",
    ),
    "read_bytes_per_second": _read_rate(options.threads),
  })
  if training:
    _print_training(config, training, limits["matmul_flops_per_second"])
  _print_decoding(decoded, limits["read_bytes_per_second"])
  if served:
    over_http.show(served)
  return {
    "environment": setup.describe_environment(), "load": timing.load_average(),
    "limits": limits, "training": training, "decoding": decoded,
    "http": served,
  }


def _relevant_config(config: Any) -> dict[str, Any]:
  """Returns the keys of a config that may change results."""
  found = json.loads(config.to_json())
  found["benchmark"] = {
    key: value
    for key, value in found["benchmark"].items() if key not in _IRRELEVANT_KEYS
  }
  return found


def _read_rate(threads: int) -> float:
  """Returns the bytes per second of reads of an array in memory."""
  array = np.ones(_READ_ELEMENTS, np.float32)
  return rates.measure([array, array, array], threads, ["read"])["read"]


def _measure_training(config: Any, python: str) -> list[dict[str, Any]]:
  """Returns a table row for each project's training step."""
  options = config.benchmark
  tokens = setup.token_batch(config)
  base = setup.without_benchmark(config)
  turns: dict[str, TimeMeasurement] = {}
  facts: dict[str, dict[str, Any]] = {}
  with contextlib.ExitStack() as stack:
    for label, overrides in options.variants:
      ours = experiments.build(
        override(base, overrides), None, jax.devices()[:1]
      )
      step = train_step.our_runner(ours, tokens).step
      turns[label] = functools.partial(_steps_s, step, options.steps)
      facts[label] = {
        "num_params": ours.program.model.num_params,
        "flops": ours.flops_per_step,
      }
    for command, needs, environment, sizes in _peer_scripts(config, python):
      ask = stack.enter_context(scripts.start_script(
        _KEY, command, needs, environment=environment
      ))
      found = ask(sizes)
      turns[found["name"]] = functools.partial(
        _time_peer_steps, ask, options.steps
      )
      facts[found["name"]] = found
    seconds = timing.in_turns(
      turns, options.rounds, label="training steps"
    )
  count = tokens[:, 1:].size
  return [
    {
      "by": name, **facts[name], "seconds": found,
      "tokens_per_second": [count / s for s in found],
    }
    for name, found in seconds.items()
  ]


def _peer_scripts(
  config: Any, python: str
) -> Iterator[tuple[list[str], str, dict[str, str], dict[str, Any]]]:
  """Yields each peer's command, packages, environment and first request."""
  options, model, data = config.benchmark, config.model, config.data
  batch = {"batch": data.batch_size, "length": data.seq_len}
  for compiled in _compile_choices(options) if python else ():
    # -P: the script's directory is not searched for modules to import.
    yield (
      [python, "-P", str(_HERE / "torch_step.py")], "torch and transformers",
      {},
      batch | {
        "threads": options.threads, "compiled": compiled,
        "model": decoding.llama_sizes(model, data.seq_len),
      },
    )
  if options.nanodo:
    yield (
      [sys.executable, "-P", str(_HERE / "nanodo_step.py")],
      "nanodo in config.benchmark.nanodo, flax and optax",
      {"PYTHONPATH": os.path.abspath(options.nanodo), "JAX_PLATFORMS": "cpu"},
      batch | {"model": {
        "D": model.width, "H": model.num_heads, "L": data.seq_len,
        "N": model.num_layers, "V": model.vocab_size,
        # Two matrices instead of three, so 3/2 of the width: as many weights.
        "F": model.ffn_width * 3 // 2,
      }},
    )


def _compile_choices(options: Any) -> tuple[bool, ...]:
  """Returns whether torch compiles each of Hugging Face's timed models."""
  return (False, True) if options.compiled else (False,)


def _steps_s(step: Callable[[], None], count: int) -> float:
  """Returns the mean seconds per step of our runner."""
  return timing.seconds(lambda: [step() for _ in range(count)]) / count


def _time_peer_steps(ask: Callable[[Any], Any], count: int) -> float:
  """Returns the mean seconds per step of a peer."""
  return float(ask({"steps": count})["seconds"])


def _measure_decoding(
  config: Any, python: str, batch: int
) -> Iterator[dict[str, Any]]:
  """Yields a row for each of our decoders, and one for each peer's.

  Raises:
    ValueError: A peer with the same float32 weights draws other tokens, in more
      than half of the sequences.
  """
  options = config.benchmark
  asked = {"batch": batch, "prompt": options.prompt, "tokens": options.tokens}
  vocab_size = config.model.vocab_size
  read: dict[str, int] = {}  # bytes of weights that a step reads
  last: dict[str, Any] = {}  # tokens of the last round
  turns: dict[str, Callable[[], dict[str, float]]] = {}
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    weights = os.path.join(folder, "weights.npz")
    for name, stored in (("caatnet", "float"), ("caatnet, int8", "int8")):
      made = decoders.build_inference(
        config, batch=batch, context=options.prompt + options.tokens,
        weights=stored,
      )
      params = decoders.init_params(made)
      if python and options.llama and stored == "float":
        np.savez(weights, **decoders.hugging_face_params(made, params))
      decoder = made.decoder(params)
      read[name] = _bytes_read(decoder.weights.params)

      def ours(name: str = name, decoder: Any = decoder) -> dict[str, float]:
        found = decoding.generate(decoder, vocab_size, asked)
        last[name] = found["tokens"]
        return {key: found[key] for key in _SPEEDS}

      turns[name] = ours
    for compiled in _compile_choices(options) if python else ():
      ask, facts = stack.enter_context(
        decoding.start_hugging_face(_KEY, python, config, compiled)
      )
      name = f"transformers {facts['transformers']}, torch {facts['torch']}"
      name += ", compiled" * compiled
      read[name] = read["caatnet"]
      turns[name] = lambda ask=ask: _speeds(asked, ask(asked))
    for kind in options.llama if python else ():
      ask_llama, facts = stack.enter_context(
        _llama_cpp(python, config, batch, kind, weights)
      )
      name = facts["name"]
      table = config.model.vocab_size * config.model.width
      read[name] = facts["bytes"] * (1 - table / facts["elements"])

      def theirs(
        name: str = name, ask: Any = ask_llama
      ) -> dict[str, float]:
        found = ask(
          {"prompts": decoding.prompts(vocab_size, asked)} | asked
        )
        last[name] = found["tokens"]
        return _speeds(asked, found)

      turns[name] = theirs
    found = timing.in_turns(
      turns, options.rounds, label=f"decoding, {batch} at a time"
    )
  same = _equal_fractions(last)
  for name, rounds in found.items():
    speeds = {key: [r[key] for r in rounds] for key in _SPEEDS}
    yield {
      "batch": batch, "by": name, **speeds, "same_sequences": same.get(name),
      # A step reads all weights once.
      "weight_bytes_per_second": [
        read[name] * r / batch for r in speeds["tokens_per_second"]
      ],
    }


def _equal_fractions(
  last: Mapping[str, Sequence[Sequence[int]]]
) -> dict[str, float]:
  """Returns, by decoder, the fraction of sequences equal to those of "caatnet".

  Rounding may decide between almost equal logits of single tokens; another
  convention of rotary positions or norms changes all sequences.

  Args:
    last: Tokens of each sequence, by decoder.

  Raises:
    ValueError: More than half of several sequences of float32 weights differ.
  """
  ours = last["caatnet"]
  same = {
    name: float(np.mean([a == b for a, b in zip(x, ours, strict=True)]))
    for name, x in last.items()
  }
  for name, share in same.items():
    if name.endswith("F32") and len(ours) > 1 and share < 0.5:
      raise ValueError(
        f"{name} draws other tokens than this package from the same float32 "
        f"weights, in {1 - share:.0%} of {len(ours)} sequences"
      )
  return same


def _speeds(
  asked: Mapping[str, int], found: Mapping[str, float]
) -> dict[str, float]:
  """Returns tokens per second, new and of prompts, from a peer's seconds.

  ``asked`` has the number of sequences, and of tokens of each.
  """
  batch = asked["batch"]
  # The first token is drawn with the prompt.
  return dict(zip(_SPEEDS, (
    batch * (asked["tokens"] - 1) / found["decode_seconds"],
    batch * asked["prompt"] / found["prompt_seconds"],
  ), strict=True))


@contextlib.contextmanager
def _llama_cpp(
  python: str, config: Any, batch: int, kind: str, weights: str
) -> Iterator[tuple[Callable[[Any], Any], Any]]:
  """Starts llama.cpp with our weights in a separate Python.

  Args:
    python: Python with llama-cpp-python and gguf.
    config: Config of the benchmark, with the lengths of prompts and responses.
    batch: Number of sequences.
    kind: Type of llama.cpp's matrices, "F32" or "Q8_0".
    weights: npz file of `decoders.hugging_face_params`.

  Yields:
    Function that times one round, and facts about the library.
  """
  options = config.benchmark
  with scripts.start_script(
    _KEY, [python, "-P", str(servers.LLAMA_SCRIPT)], "llama-cpp-python and gguf"
  ) as ask:
    yield ask, ask({"threads": options.threads, "batch": batch} | (
      servers.llama_request(
        config, options.prompt + options.tokens, kind, weights
      )
    ))


def _bytes_read(params: Any) -> int:
  """Returns the bytes of weights that a step reads."""
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  return size - params["embedding"].nbytes  # a step reads only a few rows of it


def _speedup_text(row: Mapping[str, Any], base: Mapping[str, Any]) -> str:
  """Returns how many times as fast as ``row`` the base is: median and range."""
  return timing.range_text(
    np.array(base["tokens_per_second"]) / row["tokens_per_second"], ".2f"
  )


def _print_training(
  config: Any, rows: Sequence[Mapping[str, Any]], products: float
) -> None:
  """Prints training steps; ``products`` is the FLOP/s of matrix products."""
  first = rows[0]
  tables.print_table(
    f"training step, {config.data.batch_size} x {config.data.seq_len} tokens, "
    f"float32; products {products / 1e9:.0f} GFLOP/s; median (range)",
    ["by", "parameters", "tokens/s", f"{first['by']} is x times as fast",
     "of products"],
    [
      [
        row["by"], f"{row['num_params'] / 1e6:.1f}M",
        timing.range_text(row["tokens_per_second"]), _speedup_text(row, first),
        f"{row['flops'] / np.median(row['seconds']) / products:.0%}"
        if "flops" in row else "",
      ]
      for row in rows
    ],
  )


def _print_decoding(rows: Sequence[Mapping[str, Any]], read: float) -> None:
  """Prints decoding; ``read`` is the bytes/s that memory can be read at."""
  tables.print_table(
    f"greedy decoding; reads of memory {read / 1e9:.1f} GB/s",
    ["sequences", "by", "tokens/s", "caatnet is x times as fast",
     "weights, GB/s", "prompts, tokens/s"],
    [
      [
        str(row["batch"]), row["by"],
        timing.range_text(row["tokens_per_second"]),
        _speedup_text(row, next(r for r in rows if r["batch"] == row["batch"])),
        timing.range_text(
          np.array(row["weight_bytes_per_second"]) / 1e9, ".1f"
        ),
        timing.range_text(row["prompt_tokens_per_second"]),
      ]
      for row in rows
    ],
  )
