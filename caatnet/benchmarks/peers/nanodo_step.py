"""Script that times nanodo's training steps, for the benchmark of peers.

It runs in a separate process with a checkout of
https://github.com/google-deepmind/nanodo on its path, and imports nothing of
this repository. It reads one JSON object per line from stdin and writes one to
stdout for each: first the sizes of the model and of the batch, whose values are
random, then for each round the number of steps.
"""

import json
import sys
import time


def main() -> None:
  """Creates the model of stdin's first line; times steps for each next line."""
  from nanodo.model import DoConfig, TransformerDo

  asked = json.loads(sys.stdin.readline())
  model = TransformerDo(DoConfig(**asked["model"], fsdp_enabled=False))
  answer_timing_requests(
    model, asked["batch"], asked["length"], asked["model"]["V"]
  )


def answer_timing_requests(
  model, batch: int, length: int, vocab_size: int
) -> None:
  """Writes a model's size; for each line of stdin, seconds of a step and loss.

  Args:
    model: Module of flax.linen from tokens ``[batch, length]`` to logits
      ``[batch, length, vocab_size]``.
    batch: Number of sequences.
    length: Tokens of a sequence.
    vocab_size: Number of different tokens.
  """
  import flax
  import jax
  import jax.numpy as jnp
  import optax

  tokens = jax.random.randint(
    jax.random.key(0), (batch, length + 1), 0, vocab_size
  )
  params = jax.jit(model.init)(jax.random.key(1), tokens[:, :-1])
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1),
  )

  def loss_of(params):
    return optax.softmax_cross_entropy_with_integer_labels(
      model.apply(params, tokens[:, :-1]), tokens[:, 1:]
    ).mean()

  def step(params, state):
    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  step = jax.jit(step, donate_argnums=(0, 1))
  held = [params, jax.jit(optimizer.init)(params)]
  answer({
    "name": f"nanodo, flax {flax.__version__}, jax {jax.__version__}",
    "num_params": sum(x.size for x in jax.tree.leaves(params)),
  })
  for line in sys.stdin:
    count = json.loads(line)["steps"]
    start = time.perf_counter()
    for _ in range(count):
      *held[:], loss = step(*held)
    jax.block_until_ready(held)
    answer({
      "seconds": (time.perf_counter() - start) / count,
      "loss": float(jnp.asarray(loss)),
    })


def answer(value: object) -> None:
  """Writes a line of JSON."""
  print(json.dumps(value), flush=True)


if __name__ == "__main__":
  main()
