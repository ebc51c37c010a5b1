"""Times of decoding and of its parts, compared with Hugging Face's generate.

Tokens per second are measured in `caatnet.serving.generate`, once including
prompts, and once between the first token and the last. The time of a part of a
step is the difference between programs with and without it. All have the shapes
of a step in which every sequence generates a token and has a cache that is
three quarters full:

  inputs      `Decoder.step` with arrays of numpy, minus its compiled program
  sampling    that program, minus program A, which returns the logits
  gathering   A, minus program B, which slices contiguous pages of each sequence
              out of the cache instead of gathering them
  attention   B, minus program C, whose attention returns the queries and writes
              nothing to the cache
  products    C: products, norms, rotary positions of the queries, embedding
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import pathlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from caatnet.benchmarks.harness import scripts, setup, timing
from caatnet.benchmarks.serving import decoders
from caatnet.config.inference import Inference
from caatnet.data.tokenizers import ByteTokenizer
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.requests import Request, stack_sampling_params
from caatnet.inference.sampling import sample
from caatnet.inference.stops import Stops
from caatnet.models.paged import Batch, Cache
from caatnet.serving.generate import Generation
from caatnet.show import tables
from parallel.base.checks import known

_PARTS = ("products", "attention", "gathering", "sampling", "inputs")

# Number of steps whose median is a program's time in a round.
_STEPS = 16


def run(config: Any) -> dict[str, Any]:
  """Measures, prints tables, and returns them as plain data.

  Args:
    config: Config like configs/benchmark/decoding.py.

  Raises:
    ValueError: config.benchmark.rival is not a Python with transformers.
  """
  options = config.benchmark
  rows = []
  with contextlib.ExitStack() as stack:
    ask, facts = None, None
    if options.rival:
      ask, facts = stack.enter_context(
        start_hugging_face("config.benchmark.rival", options.rival, config)
      )
    for batch in options.batches:
      rows.append(_measure(config, batch, ask))
  _print(rows, facts)
  return {
    "environment": setup.describe_environment(), "rival": facts, "rows": rows
  }


def _measure(
  config: Any, batch: int, ask: Callable[[Any], Any] | None
) -> dict[str, Any]:
  """Times our decoder, its parts and Hugging Face's with one batch size.

  ``ask`` times a round of Hugging Face's; None to leave it out.
  """
  options = config.benchmark
  made = decoders.build_inference(
    config, batch=batch, context=options.prompt + options.tokens
  )
  decoder = decoders.decoder(made)
  asked = {"batch": batch, "prompt": options.prompt, "tokens": options.tokens}
  programs = _programs(made, decoder)
  measures: dict[str, Callable[[], Any]] = {
    "ours": lambda: generate(decoder, config.model.vocab_size, asked)
  }
  if ask is not None:
    measures["rival"] = functools.partial(ask, asked)
  measures["ms"] = lambda: {
    name: _median_ms(f) for name, f in programs.items()
  }
  found = timing.in_turns(
    measures, options.rounds, label=f"{batch} at a time"
  )
  row = {
    "batch": batch,
    "tokens_per_second": [r["tokens_per_second"] for r in found["ours"]],
    "seconds": [r["seconds"] for r in found["ours"]],
    "programs": len(decoder.shapes),
    "compile_seconds": decoder.compile_seconds,
    "ms": found["ms"],
    "parts_ms": _median_parts_ms(found["ms"]),
  }
  if ask is not None:
    drawn = batch * (options.tokens - 1)  # the first token is the prefill's
    row["rival_tokens_per_second"] = [
      drawn / r["decode_seconds"] for r in found["rival"]
    ]
    row["rival_seconds"] = [sum(r.values()) for r in found["rival"]]
  return row


def prompts(vocab_size: int, asked: dict[str, int]) -> list[list[int]]:
  """Returns ``asked["batch"]`` random prompts, lists of token ids."""
  return np.random.default_rng(0).integers(
    vocab_size, size=(asked["batch"], asked["prompt"])
  ).tolist()


def generate(
  decoder: Decoder, vocab_size: int, asked: dict[str, int]
) -> dict[str, Any]:
  """Continues random prompts; returns speeds, total seconds, and tokens."""
  generation = Generation(
    decoder,
    [
      Request(tuple(x), Stops(asked["tokens"]))
      for x in prompts(vocab_size, asked)
    ],
    ByteTokenizer(),  # has 256 tokens, and no text for others
  )
  completions = generation.run()
  speed = generation.speed
  return {
    "tokens_per_second": speed.decoded_tokens / speed.decode_seconds,
    "prompt_tokens_per_second": speed.prompt_tokens / speed.prompt_seconds,
    "seconds": speed.prompt_seconds + speed.decode_seconds,
    "tokens": [list(x.tokens) for x in completions],
  }


class _ContiguousCache(Cache):
  """Cache whose attention assumes that a sequence's pages are contiguous."""

  def attend(
    self, layer: jax.Array, queries: jax.Array, batch: Batch, window: int
  ) -> jax.Array:
    shape, num_pages = self.shape, batch.tables.shape[1]
    heads, width = shape.num_kv_heads, shape.head_width

    def one(operands):
      sequence, q, position = operands
      # Pages of sequence s are s * num_pages, ... of each layer.
      start = layer * shape.num_pages + sequence * num_pages
      keys, values = (
        lax.dynamic_slice_in_dim(x[0], start, num_pages, axis=1).reshape(
          heads, -1, width
        )
        for x in self.pages.data
      )
      scores = jnp.einsum("kgd,kcd->kgc", q, keys) * width**-0.5
      seen = jnp.arange(keys.shape[1]) <= position
      weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
      # As in the reference, which excludes values that were never written.
      values = jnp.where(seen[:, None], values, 0)
      return jnp.einsum("kgc,kcd->kgd", weights, values)

    q = queries[0]
    out = lax.map(one, (
      jnp.arange(len(q)), q.reshape(len(q), heads, -1, width), batch.positions,
    ))
    return out.reshape(queries.shape)


class _NoAttention(Cache):
  """Cache that stores nothing, and whose attention returns the queries."""

  def write(
    self, layer: jax.Array, keys: jax.Array, values: jax.Array, batch: Batch
  ) -> "Cache":
    return self

  def attend(
    self, layer: jax.Array, queries: jax.Array, batch: Batch, window: int
  ) -> jax.Array:
    return queries


for _type in (_ContiguousCache, _NoAttention):
  jax.tree_util.register_dataclass(_type, ("pages", "states"), ("shape",))


def _batch(capacity: Capacity) -> Batch:
  """Returns a step of one token per sequence, with 3/4 of its cache in use."""
  s, pages = capacity.batch, capacity.pages_per_sequence
  own = np.arange(s * pages, dtype=np.int32).reshape(s, pages)  # block tables
  position = capacity.context * 3 // 4  # of the new token
  page, offset = divmod(position, capacity.page_size)
  rows = np.arange(s, dtype=np.int32)
  return Batch(
    np.full(s, 1, np.int32), np.full(s, position, np.int32),
    own[:, page] * capacity.page_size + offset, own, rows, rows, s,
  )


def _programs(
  made: Inference, decoder: Decoder
) -> dict[str, Callable[[], Any]]:
  """Returns functions by name that run a step, or parts of it, and wait."""
  layout, batch = made.program.layout, _batch(made.capacity)
  sampling = stack_sampling_params([None] * made.capacity.batch)
  leading = jax.tree.map(lambda x: x[None], (batch, sampling))
  inputs = jax.device_put(
    (batch, sampling), layout.shardings(P())
  )

  def stepped():
    tokens, *_ = decoder.step(*leading, False)
    tokens.block_until_ready()

  def timed(cache_type, draws):
    step, cache = _partial_step(made, cache_type, draws)
    state = [cache]

    def f():
      result, state[0] = step(decoder.weights.params, state[0], *inputs)
      jax.block_until_ready(result)

    return f

  return {
    "step": stepped,
    "program": timed(Cache, True),
    "logits": timed(Cache, False),
    "dense": timed(_ContiguousCache, False),
    "products": timed(_NoAttention, False),
  }


def _partial_step(
  made: Inference, cache_type: type[Cache], draws: bool
) -> tuple[Callable[..., Any], Cache]:
  """Returns a jitted ``(params, cache, batch, sampling) -> (result, cache)``.

  Args:
    made: Model on one device with one tensor rank.
    cache_type: Class of the cache, which defines attention.
    draws: Whether the result is tokens and log-probabilities instead of logits.

  Returns:
    The function, and an empty cache.
  """
  model, layout = made.program.model, made.program.layout
  weights = made.abstract_weights()
  tensor = P(layout.tensor.name)

  def step(params, cache, batch, sampling):
    logits, cache = model.decode(params, cache, batch, weights.access)
    if not draws:
      return logits, cache
    positions = batch.positions[batch.rows]
    drawn = sample(
      logits, model.token_ids(), positions, sampling, layout.tensor, False
    )
    return drawn, cache

  f = jax.shard_map(
    step, mesh=layout.mesh, in_specs=(weights.specs, tensor, P(), P()),
    out_specs=(P() if draws else tensor, tensor),
  )
  pages = jax.tree.map(
    lambda x: jnp.zeros((1, *x.shape), x.dtype), made.cache_shape.pages()
  )
  cache = jax.device_put(
    cache_type(pages, made.cache_shape), layout.shardings(tensor)
  )
  return jax.jit(f, donate_argnums=1), cache  # updates the cache in place


def _median_ms(step: Callable[[], Any]) -> float:
  """Returns the median milliseconds of a few calls after an untimed one."""
  step()
  times = [timing.seconds(step) for _ in range(_STEPS)]
  return 1e3 * float(np.median(times))


def _median_parts_ms(rounds: list[dict[str, float]]) -> dict[str, float]:
  """Returns the median milliseconds of each part, and of the whole step."""
  names = ("products", "dense", "logits", "program", "step")
  times = np.array([[r[name] for name in names] for r in rounds])
  parts = np.median(np.diff(times, axis=1, prepend=0.0), axis=0)
  median = dict(zip(_PARTS, parts.tolist(), strict=True))
  return median | {"step": float(np.median(times[:, -1]))}


@contextlib.contextmanager
def start_hugging_face(
  key: str, python: str, config: Any, compiled: bool = False
) -> Iterator[tuple[Callable[[Any], Any], Any]]:
  """Starts Hugging Face's model of the same sizes in a separate Python.

  Args:
    key: Config key that names the Python, for errors.
    python: Python with torch and transformers.
    config: Config of the benchmark, with the lengths of prompts and responses.
    compiled: Whether torch compiles the steps after the prompt, with a cache of
      a fixed size.

  Yields:
    Function that times one round, and facts about the libraries.
  """
  options, model = config.benchmark, config.model
  known("config.model.dtype=", model.dtype, ("float32",))
  script = pathlib.Path(__file__).with_name("hugging_face.py")
  # -P: the script's directory is not searched for modules to import.
  with scripts.start_script(
    key, [python, "-P", str(script)], "torch and transformers"
  ) as ask:
    yield ask, ask({
      "threads": options.threads, "compiled": compiled,
      "model": llama_sizes(model, options.prompt + options.tokens),
    })


def llama_sizes(model: Any, positions: int) -> dict[str, int]:
  """Returns the arguments of transformers' ``LlamaConfig``."""
  return {
    "vocab_size": model.vocab_size,
    "hidden_size": model.width,
    "intermediate_size": model.ffn_width,
    "num_hidden_layers": model.num_layers,
    "num_attention_heads": model.num_heads,
    "num_key_value_heads": model.num_kv_heads,
    "max_position_embeddings": positions,
  }


def _print(rows: list[dict[str, Any]], facts: Any) -> None:
  compared = [
    [str(r["batch"]), name, timing.range_text(r[key]),
     timing.range_text(r[seconds], ".2f"), ratio, programs]
    for r in rows
    for name, key, seconds, ratio, programs in _comparison_cells(r, facts)
  ]
  tables.print_table(
    "decoding: median (range) of rounds; of the ratio, too",
    ["sequences", "by", "tokens/s", "s with prompts", "x rival's tokens/s",
     "programs (s to compile)"],
    compared,
  )
  tables.print_table(
    "ms of a step, and its parts (medians)",
    "batch=sequences | parts_ms.*:.2f", rows,
  )


def _comparison_cells(
  row: dict[str, Any], facts: Any
) -> Iterator[tuple[str, str, str, str, str]]:
  """Yields the name, keys and cells of our table row, then of the rival's.

  The rival is Hugging Face's generate; ``facts`` has its versions, or is None.
  """
  ratio = ""
  if facts:
    ours, theirs = row["tokens_per_second"], row["rival_tokens_per_second"]
    ratio = timing.range_text(np.array(ours) / theirs, ".2f")
  programs = f"{row['programs']} ({row['compile_seconds']:.0f})"
  yield "caatnet", "tokens_per_second", "seconds", ratio, programs
  if facts:
    name = f"transformers {facts['transformers']}, torch {facts['torch']}"
    yield name, "rival_tokens_per_second", "rival_seconds", "", ""
