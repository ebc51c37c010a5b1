"""Times of training steps: ours, with one or several ranks, and plain JAX.

The plain step uses nothing but jax and optax: the same architecture, optimizer
and scan. All variants alternate, so that a drift of the machine's speed affects
all of them.
"""

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from caatnet.benchmarks.harness import setup, timing
from caatnet.config import experiments
from caatnet.config.override import override
from caatnet.show import tables
from caatnet.train.evaluate import put_batch
from caatnet.train.experiment import Experiment
from caatnet.train.records import environment
from caatnet.train.throughput import matmul_rate
from parallel.base.checks import known


def run(config: Any) -> dict[str, Any]:
  """Measures, prints a table, and returns it as plain data.

  Args:
    config: Config like configs/benchmark/train_step.py.
  """
  options = config.benchmark
  tokens = setup.token_batch(config)
  base = setup.without_benchmark(config)
  runners = {}
  for dtype in options.dtypes:
    for label, overrides in options.variants:
      ours = experiments.build(
        override(base, f"{overrides} model.dtype={dtype}".strip()), None,
        jax.devices()[:1],
      )
      # Variants are compared on one device.
      make = plain_runner if label.startswith("plain") else our_runner
      runners[dtype, label] = make(ours, tokens)
  seconds = timed_in_turns(
    {key: runner.step for key, runner in runners.items()}, options.rounds
  )
  # Measured rate of plain products, the reference for utilisation.
  rates = {d: matmul_rate(ours.program.layout.mesh, d) for d in options.dtypes}
  count = tokens[:, 1:].size
  rows = _rows(
    seconds, options.variants[0][0], count, ours.flops_per_step, rates
  )
  for row in rows:
    runner = runners[row["dtype"], row["variant"]]
    row["device_bytes"] = runner.device_bytes
    row["host_bytes"] = runner.host_bytes
  _show(rows, ours, count, rates)
  facts = environment(ours.program.layout.mesh) | {
    "matmul_flops_per_second": rates
  }
  return {"environment": facts, "rows": rows}


def _rows(
  seconds: Mapping[tuple[str, str], list[float]], first: str, count: int,
  flops: float, rates: Mapping[str, float],
) -> list[dict[str, Any]]:
  """Returns a row for each dtype and variant.

  Args:
    seconds: Seconds of a step in each round, by dtype and variant.
    first: Variant that the others are compared with, in the same dtype.
    count: Tokens of a step.
    flops: Floating-point operations of a step.
    rates: Floating-point operations per second of matrix products, by dtype.
  """
  rows = []
  for (dtype, label), times in seconds.items():
    found = timing.summary(times, seconds[dtype, first])
    median = found["median_s"]
    rows.append({"dtype": dtype, "variant": label} | found | {
      "tokens_per_second": count / median,
      "fraction_of_matmul_rate": flops / median / rates[dtype],
    })
  return rows


def _show(
  rows: list[dict[str, Any]], experiment: Experiment, count: int,
  rates: Mapping[str, float],
) -> None:
  tables.print_table(
    f"training step, {experiment.program.model.num_params / 1e6:.1f}M "
    f"parameters, {count} tokens, {jax.devices()[0].device_kind}; products: "
    + ", ".join(f"{rates[d] / 1e9:.0f} GFLOP/s {d}" for d in rates),
    "variant | dtype | median_s:.3f=median s | "
    "{min_s:.3f} to {max_s:.3f}=range s | relative:.3f=x plain | "
    "tokens_per_second:,.0f=tokens/s | "
    "fraction_of_matmul_rate:.1%=of products | "
    "device_bytes/1e9:.2f=device GB | host_bytes/1e9:.2f=host GB", rows,
  )


def timed_in_turns(
  runners: Mapping[Any, Callable[[], Any]], rounds: int
) -> dict[Any, list[float]]:
  """Returns the seconds of each runner's step per round, after a warm-up."""
  return timing.in_turns({
    key: functools.partial(timing.seconds_when_warm, step)
    for key, step in runners.items()
  }, rounds, warm_up=0)


class Runner(NamedTuple):
  """Compiled training step that is ready to be timed.

  Attributes:
    step: Function that runs a step and waits for it.
    device_bytes: Device memory of the program: arguments, results that do not
      reuse them, and temporaries.
    host_bytes: Arguments and temporaries of the program in host memory.
  """

  step: Callable[[], None]
  device_bytes: int
  host_bytes: int


def _runner(step: Callable[[], None], program: jax.stages.Compiled) -> Runner:
  """Returns a runner; runs two steps, since the first ones allocate memory."""
  step(), step()
  found = program.memory_analysis()
  return Runner(
    step,
    found.argument_size_in_bytes + found.output_size_in_bytes
    - found.alias_size_in_bytes + found.temp_size_in_bytes,
    found.host_argument_size_in_bytes + found.host_temp_size_in_bytes,
  )


def our_runner(experiment: Experiment, tokens: np.ndarray) -> Runner:
  """Returns our training step.

  Args:
    experiment: Run, whose step `launch.train` would execute.
    tokens: The batch.
  """
  step = experiment.lower_step().compile(
    experiment.program.layout.compiler_options()
  )
  batch = put_batch(experiment.program.layout, tokens)
  state = [experiment.init_state()]

  def run_once():
    state[0], metrics = step(state[0], batch, ())
    jax.block_until_ready(metrics)

  return _runner(run_once, step)


def plain_runner(
  experiment: Experiment,
  tokens: np.ndarray,
  mesh: jax.sharding.Mesh | None = None,
) -> Runner:
  """Returns a training step of the same architecture in plain JAX.

  Args:
    experiment: Run, whose model and optimizer, AdamW, are reimplemented.
    tokens: The batch.
    mesh: Mesh with one axis. Batch and activations are sharded over it, and
      every array of the state along the largest dim that it divides; XLA
      decides the rest. None for one device.

  Raises:
    ValueError: The config requires a feature that is not implemented here.
  """
  config = experiment.program.model.config
  if config.tied_embeddings:
    raise ValueError("config.model.tied_embeddings must be False")
  optimizer = _plain_optimizer(experiment)
  params = _plain_params(config)
  state = [params, optimizer.init(params)]
  batch = jnp.asarray(tokens)
  over_batch, shardings = None, (None, None)
  if mesh is not None:
    # First dim: the batch.
    over_batch = NamedSharding(mesh, P(*mesh.axis_names))
    state = jax.device_put(state, jax.tree.map(
      lambda x: _along_largest_dim(x, mesh), state
    ))
    batch = jax.device_put(batch, over_batch)
    shardings = tuple(jax.tree.map(lambda x: x.sharding, state))
  loss = functools.partial(
    _plain_loss, config=config, over_batch=over_batch
  )

  @functools.partial(
    jax.jit, donate_argnums=(0, 1), out_shardings=(*shardings, None)
  )
  def step(params, opt_state, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  program = step.lower(*state, batch).compile()

  def run_once():
    *state[:], value = program(*state, batch)
    jax.block_until_ready(value)

  return _runner(run_once, program)


def _plain_optimizer(
  experiment: Experiment,
) -> optax.GradientTransformation:
  """Returns AdamW after clipping, with the experiment's options."""
  keys = experiment.config["optimizer"]
  known("config.optimizer.name=", keys["name"], ("adamw",))
  return optax.chain(
    optax.clip_by_global_norm(experiment.clip_norm or math.inf),
    optax.adamw(
      experiment.learning_rate, b1=keys["beta_1"], b2=keys["beta_2"],
      eps=keys["eps"], weight_decay=keys["weight_decay"],
      mask=lambda params: jax.tree_util.tree_map_with_path(  # no decay of norms
        lambda path, _: "norm" not in path[-1].key, params
      ),
    ),
  )


def _plain_params(config: Any) -> dict[str, Any]:
  """Draws float32 parameters; blocks are stacked, ``[layers, ...]``."""
  h, f = config.width, config.ffn_width  # H, F
  qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_width
  shapes = {"w_qkv": (h, qkv), "w_out": (h, h), "w_gate_up": (h, 2 * f),
            "w_down": (f, h)}
  keys = iter(jax.random.split(jax.random.key(0), 6))

  def draw(*shape):
    return config.init_std * jax.random.normal(next(keys), shape)

  layers = config.num_layers
  blocks = {name: draw(layers, *shape) for name, shape in shapes.items()}
  blocks |= {"norm_1": jnp.ones((layers, h)), "norm_2": jnp.ones((layers, h))}
  return {
    "embedding": draw(config.vocab_size, h),
    "blocks": blocks,
    "norm": jnp.ones(h),
    "head": draw(h, config.vocab_size),
  }


def _along_largest_dim(
  x: jax.Array, mesh: jax.sharding.Mesh
) -> NamedSharding:
  """Shards an array along the largest dim that the mesh divides, if any."""
  # Dims that the mesh divides.
  fitting = [i for i, n in enumerate(x.shape) if n % mesh.size == 0]
  spec: list[Any] = [None] * x.ndim
  if fitting:
    spec[max(fitting, key=lambda i: x.shape[i])] = mesh.axis_names[0]
  return NamedSharding(mesh, P(*spec))


def _plain_loss(
  params: Any,
  tokens: jax.Array,
  config: Any,
  over_batch: NamedSharding | None,
) -> jax.Array:
  """Computes the mean cross-entropy of a Llama-style transformer."""
  dtype, eps = config.dtype, config.norm_eps

  def apart(x):
    if over_batch is None:
      return x
    return jax.lax.with_sharding_constraint(x, over_batch)

  def norm(x, gain):
    # RMS norm in float32, as in our model.
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    gain = jnp.expand_dims(gain, range(x.ndim - 1))
    return (wide * rstd * gain).astype(dtype)

  def rope(x):
    half = x.shape[-1] // 2
    frequency = config.rope_base ** (-jnp.arange(half) / half)
    # [1, T, 1, D / 2], for x [B, T, heads, D].
    angle = jnp.arange(x.shape[1])[:, None] * frequency[None]
    angle = angle[None, :, None]
    cos, sin = jnp.cos(angle).astype(dtype), jnp.sin(angle).astype(dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

  def block(x, w):
    batch, length, _ = x.shape
    heads, kv = config.num_heads, config.num_kv_heads
    y = norm(x, w["norm_1"]) @ w["w_qkv"].astype(dtype)
    # [B, T, query, key and value heads, D].
    y = y.reshape(batch, length, heads + 2 * kv, -1)
    q, k, v = jnp.split(y, [heads, heads + kv], axis=2)
    y = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
    x = x + y.reshape(batch, length, -1) @ w["w_out"].astype(dtype)
    y = norm(x, w["norm_2"]) @ w["w_gate_up"].astype(dtype)
    gate, up = jnp.split(y, 2, -1)
    x = x + (jax.nn.silu(gate) * up) @ w["w_down"].astype(dtype)
    return apart(x), None

  x = apart(params["embedding"].astype(dtype)[tokens[:, :-1]])
  x, _ = jax.lax.scan(block, x, params["blocks"], unroll=config.unroll)
  logits = norm(x, params["norm"]) @ params["head"].astype(dtype)
  return optax.softmax_cross_entropy_with_integer_labels(
    logits.astype(jnp.float32), tokens[:, 1:]
  ).mean()
