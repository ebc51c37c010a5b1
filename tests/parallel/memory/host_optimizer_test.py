"""AdamW on the host: bits of optax, for any threads, ranges and placement."""

import functools
import itertools
import os
import random
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parallel.memory import host_memory
from parallel.memory.host_optimizer import ARRAYS, AdamW, HostOptimizer
from tests import users
from tests.corruption import FLIPS

# Operands of optax' clipping and schedules differ in dtype.
pytestmark = pytest.mark.mixed_dtypes

NODE = host_memory.nodes()[0]
# Whole pages, and one that is shared by no two arrays.
SIZE = 3 * host_memory.PAGE + 123
LARGE = 2**21 + 123  # enough for three threads
DECAYED = [(10, 700), (700, 900), (2000, SIZE)]
SETTINGS = AdamW(beta_2=0.95, clip_norm=0.7)


def rate(count):
  """Learning rate that changes from step to step."""
  return 1e-2 / (1 + count)


def gradients(step, size=SIZE):
  """Gradients of all magnitudes, subnormal ones and their squares included."""
  draw = np.random.default_rng(step)
  exponents = draw.uniform(-42, 3, size)
  found = (draw.standard_normal(size) * 10.0**exponents).astype(np.float32)
  # Every second step is below the norm that clips.
  return found if step % 2 else found * np.float32(1e-6)


def start(size=SIZE):
  return np.random.default_rng(99).standard_normal(size).astype(np.float32)


def optax_adamw(weight_decay=SETTINGS.weight_decay):
  s = SETTINGS
  return optax.chain(
    optax.clip_by_global_norm(s.clip_norm),
    optax.adamw(rate, s.beta_1, s.beta_2, s.eps, weight_decay=weight_decay),
  )


@functools.cache
def expected(num_steps, size=SIZE):
  """Returns optax' weights and moments after steps, executed one by one.

  Moments do not depend on weight decay; weights outside of DECAYED are those
  without it.
  """
  found = []
  for decay in (0.0, SETTINGS.weight_decay):
    optimizer, weights = optax_adamw(decay), jnp.asarray(start(size))
    state = optimizer.init(weights)
    for step in range(num_steps):
      updates, state = optimizer.update(
        jnp.asarray(gradients(step, size)), state, weights
      )
      weights = optax.apply_updates(weights, updates)
    found.append(np.array(weights))
  for first, last in DECAYED:
    found[0][first:last] = found[1][first:last]
  adam = state[1][0]
  return found[0], np.asarray(adam.mu), np.asarray(adam.nu)


def norm_of(gradient):
  return float(optax.tree.norm(jnp.asarray(gradient)))


def rate_of(step):
  return float(rate(jnp.int32(step)))


def take_step(optimizer, step, cuts=()):
  """Takes a step, with ranges between cuts from the last to the first."""
  size = len(optimizer.weights)
  gradient = gradients(step, size)
  optimizer.begin(rate_of(step), norm_of(gradient))
  bounds = [0, *sorted(cuts), size]
  for first, last in reversed(list(itertools.pairwise(bounds))):
    optimizer.update(first, gradient[first:last])
  optimizer.end()


def check_bits(optimizer, num_steps):
  found = optimizer.weights, optimizer.first, optimizer.second
  wanted = expected(num_steps, len(optimizer.weights))
  for name, ours, theirs in zip(
    ("weights", "first", "second"), found, wanted, strict=True
  ):
    np.testing.assert_array_equal(
      ours.view(np.int32), theirs.view(np.int32), name
    )


def made(
  placement=None, num_threads=2, stripe_bytes=host_memory.PAGE, size=SIZE,
  ahead=2**24,
):
  optimizer = HostOptimizer(
    size, SETTINGS, placement, decayed=DECAYED, num_threads=num_threads,
    stripe_bytes=stripe_bytes, ahead=ahead,
  )
  optimizer.weights[:] = start(size)
  return optimizer


def test_the_inputs_have_subnormal_moments_and_clipped_and_other_steps():
  """Otherwise the tests below would not notice their handling."""
  assert norm_of(gradients(1)) > SETTINGS.clip_norm > norm_of(gradients(0))
  raw = gradients(1).astype(np.float64)
  assert ((raw**2 > 0) & (raw**2 < np.finfo(np.float32).tiny)).any()
  assert ((raw != 0) & (abs(raw) < np.finfo(np.float32).tiny)).any()


def test_steps_have_the_bits_of_optax_one_operation_at_a_time():
  optimizer = made()
  for step in range(5):
    take_step(optimizer, step)
    check_bits(optimizer, step + 1)
  assert optimizer.count == 5


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_do_not_change_bits(num_threads):
  optimizer = made(num_threads=num_threads, size=LARGE)
  for step in range(2):
    take_step(optimizer, step)
  check_bits(optimizer, 2)


@settings(max_examples=15)
@given(st.data())
def test_neither_ranges_nor_placement_change_bits(tmp_path_factory, data):
  """The placement also changes between two steps."""
  file = str(tmp_path_factory.mktemp("tier"))
  shares = st.floats(0, 1).map(lambda x: {NODE: x, file: 1 - x})
  placements = st.fixed_dictionaries(dict.fromkeys(ARRAYS, shares))
  optimizer = made(
    data.draw(placements), data.draw(st.sampled_from([1, 2])),
    data.draw(st.sampled_from([1, 2, 5])) * host_memory.PAGE,
    ahead=data.draw(st.integers(1000, SIZE)),
  )
  for step in range(3):
    take_step(
      optimizer, step, data.draw(st.sets(st.integers(1, SIZE - 1), max_size=4))
    )
    optimizer.buffer.drop()
    optimizer.move(data.draw(placements))
  check_bits(optimizer, 3)


def test_moments_are_within_one_ulp_of_jitted_optax_in_a_step():
  """An ulp of the larger summand of a moment, since the sum may cancel.

  Subnormal products are zeros, unless they are fused with a sum.
  """
  optimizer = HostOptimizer(SIZE, AdamW())
  tiny = np.finfo(np.float32).tiny
  theirs = optax.adamw(rate, 0.9, 0.95)
  state = theirs.init(jnp.zeros(SIZE))
  # tests/conftest.py disables the passes that fuse products with sums.
  update = jax.jit(theirs.update).lower(
    jnp.zeros(SIZE), state, jnp.zeros(SIZE)
  ).compile(compiler_options=users.OPTIONS | {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
  })
  num_differ = 0
  for step in range(4):
    before = optimizer.first.copy(), optimizer.second.copy()
    adam = state[0]._replace(
      mu=jnp.asarray(before[0]), nu=jnp.asarray(before[1])
    )
    _, state = update(
      jnp.asarray(gradients(step)), (adam, *state[1:]), jnp.zeros(SIZE)
    )
    optimizer.begin(rate_of(step))
    optimizer.update(0, gradients(step))
    optimizer.end()
    for old, ours, jitted in zip(
      before, (optimizer.first, optimizer.second),
      (state[0].mu, state[0].nu), strict=True,
    ):
      ulp = np.spacing(np.maximum(abs(ours), abs(old))) + 2 * tiny
      assert (abs(ours - np.asarray(jitted)) <= ulp).all()
      num_differ += (ours != np.asarray(jitted)).sum()
  assert num_differ  # otherwise `expected` could be jitted as well


def test_without_clipping_no_norm_is_needed():
  gradient = gradients(1)
  optimizer = HostOptimizer(SIZE, AdamW(weight_decay=0.0))
  optimizer.weights[:] = start()
  optimizer.begin(0.1)
  optimizer.gradients[:] = gradient
  optimizer.update(0, optimizer.gradients)
  optimizer.end()
  theirs = optax.adamw(0.1, 0.9, 0.95, weight_decay=0.0)
  weights = jnp.asarray(start())
  updates, _ = theirs.update(
    jnp.asarray(gradient), theirs.init(weights), weights
  )
  np.testing.assert_array_equal(
    optimizer.weights, optax.apply_updates(weights, updates)
  )


def test_a_gradient_that_is_not_finite_reaches_every_weight():
  """The norm is not finite, as in optax."""
  optimizer = made()
  gradient = gradients(1)
  gradient[5] = np.nan
  optimizer.begin(0.1, norm_of(gradient))
  optimizer.update(0, gradient)
  optimizer.end()
  assert np.isnan(optimizer.weights).all()


@pytest.mark.parametrize("second", [(0, 10), (5, 15), (90, 101), (9, 10)])
def test_an_element_is_updated_once_in_a_step(second):
  optimizer = HostOptimizer(100, AdamW())
  optimizer.begin(0.1)
  optimizer.update(0, np.ones(10, np.float32))
  before = optimizer.weights.copy()
  message = r"cannot be updated: elements \[10, 100"
  with pytest.raises(ValueError, match=message):
    optimizer.update(second[0], np.ones(second[1] - second[0], np.float32))
  np.testing.assert_array_equal(optimizer.weights, before)


def test_a_step_ends_when_all_elements_are_updated():
  optimizer = HostOptimizer(100, AdamW(clip_norm=1.0))
  with pytest.raises(ValueError, match="no step has begun"):
    optimizer.end()
  with pytest.raises(ValueError, match="no step began"):
    optimizer.update(0, np.ones(1, np.float32))
  with pytest.raises(ValueError, match="needs the norm"):
    optimizer.begin(0.1)
  optimizer.begin(0.1, 2.0)
  optimizer.update(20, np.ones(30, np.float32))
  missing = r"elements \[0, 20\), \[50, 100\) are not updated"
  with pytest.raises(ValueError, match=missing):
    optimizer.end()
  with pytest.raises(ValueError, match=missing):
    optimizer.begin(0.1, 2.0)
  assert optimizer.count == 0
  optimizer.update(50, np.ones(50, np.float32))
  optimizer.update(0, np.ones(20, np.float32))
  optimizer.end()
  assert optimizer.count == 1
  with pytest.raises(ValueError, match="no step has begun"):
    optimizer.end()


@pytest.mark.parametrize(("change", "message"), [
  ({"size": 0}, "size=0"),
  ({"num_threads": -1}, "num_threads=-1"),
  ({"ahead": 0}, "ahead=0"),
  ({"decayed": [(5, 3)]}, "ascending"),
  ({"decayed": [(0, 5), (4, 9)]}, "ascending"),
  ({"decayed": [(0, 101)]}, r"\[0, 100\)"),
  ({"placement": {"wights": {NODE: 1.0}}}, "did you mean weights"),
  ({"placement": {"weights": {NODE: 0.5}}}, "sum to 0.5"),
  ({"placement": {"weights": {4096: 1.0}}}, "node=4096 does not exist"),
  ({"placement": {"weights": {"/nowhere": 1.0}}}, "a folder that exists"),
])
def test_invalid_arguments_are_named(change, message):
  with pytest.raises(ValueError, match=message):
    HostOptimizer(**({"size": 100, "settings": AdamW()} | change))


def test_without_numba_the_error_names_the_extra():
  """In another process, since this one has compiled the loops."""
  code = (
    "import sys; sys.modules['numba'] = None\n"
    "from parallel.memory.host_optimizer import AdamW, HostOptimizer\n"
    "HostOptimizer(1, AdamW())"
  )
  result = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=False
  )
  assert result.stderr.splitlines()[-1] == (
    "ValueError: the host optimizer needs numba: pip install 'caatnet[memory]'"
  )


def test_the_buffer_can_have_no_gradients():
  arrays = ("weights", "first", "second")
  optimizer = HostOptimizer(SIZE, AdamW(), arrays=arrays)
  with_gradients = HostOptimizer(SIZE, AdamW())
  assert 4 * len(optimizer.buffer.array) == 3 * len(with_gradients.buffer.array)
  for found in (optimizer, with_gradients):
    found.begin(0.1)
    found.update(0, gradients(1))
    found.end()
  for name in arrays:
    np.testing.assert_array_equal(
      getattr(optimizer, name), getattr(with_gradients, name)
    )
  with pytest.raises(ValueError, match="gradients"):
    HostOptimizer(
      SIZE, AdamW(), {"gradients": {NODE: 1.0}}, arrays=arrays
    )


@pytest.mark.parametrize("gradient", [
  np.ones(5), np.ones((5, 1), np.float32), np.ones(5, np.float16),
])
def test_a_gradient_is_float32_with_one_dim(gradient):
  optimizer = HostOptimizer(100, AdamW())
  optimizer.begin(0.1)
  with pytest.raises(ValueError, match="float32 with one dim"):
    optimizer.update(0, gradient)


def test_moments_and_weights_in_files_are_verified(tmp_path):
  """Each changed byte is an error of `verify`, and of the next step."""
  names = ("weights", "first", "second")
  optimizer = HostOptimizer(
    SIZE, AdamW(), {x: {str(tmp_path): 1.0} for x in names}
  )
  (file,) = optimizer.buffer._files.values()
  draw = random.Random(0)

  def step(number):
    optimizer.begin(0.01)
    for first, last in ((2000, SIZE), (0, 2000)):
      optimizer.update(first, gradients(number)[first:last])
    optimizer.end()

  for number in range(FLIPS):
    optimizer.weights[:] = start()
    optimizer.first[:] = optimizer.second[:] = 0
    optimizer.written()
    for _ in range(2):
      step(2 * number + 1)
      optimizer.verify()
    name = draw.choice(names)
    begin = getattr(optimizer, name).ctypes.data
    at = begin - optimizer.buffer.array.ctypes.data + draw.randrange(4 * SIZE)
    (old,) = os.pread(file.fileno(), 1, at)
    os.pwrite(file.fileno(), bytes([old ^ draw.randrange(1, 256)]), at)
    with pytest.raises(ValueError, match=f"{name} of the optimizer"):
      optimizer.verify()
    with pytest.raises(ValueError, match=f"{name} .* last checkpoint"):
      step(0)
