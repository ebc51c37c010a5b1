"""Simulated executor with real page contents and a tiny model.

The cached value of a position is a hash of all tokens up to it, and the drawn
token depends on everything in the pages of the sequence. A wrong page, a page
that is written too early, and a missing or delayed copy therefore all change
tokens. Copies to the host are executed when they end, as late as permitted. A
write to a page under copy and a read before the end of a copy are errors.

A recurrent state is the list of the same values. It is read when its copy is
requested. A state that has not seen exactly the tokens before a chunk is an
error.
"""

import contextlib
import math
from unittest import mock

import numpy as np

from caatnet.serving.cache import page_loops
from caatnet.serving.engine.simulator import CopyTimes, Simulator
from caatnet.serving.scheduler import running

VOCABULARY = 3
COPIES = CopyTimes(1000, 2, 1e-3, 1e6, 2e6, 1e7)


@contextlib.contextmanager
def interpreted(really=True):
  """Executes the compiled loops as Python, as without an installed numba."""
  with contextlib.ExitStack() as stack:
    for module in (page_loops, running) if really else ():
      found = {
        name: f.py_func for name, f in vars(module).items()
        if hasattr(f, "py_func")
      }
      assert found
      stack.enter_context(mock.patch.multiple(module, **found))
    if really:
      stack.enter_context(mock.patch.object(page_loops, "COMPILES", False))
    yield


class Times:
  """Model of step times: 1 s per step and 0.1 s per token."""

  def step_s(self, contexts, chunks):
    return 1 + 0.1 * (len(contexts) + sum(n for _, n in chunks))


def chain(before, token):
  return hash((before or 0, int(token)))  # equal in each process


def drawn(contents):
  return hash(tuple(contents)) % VOCABULARY


def alone(prompt, count, ends, root=None):
  """Returns the tokens that follow a prompt served alone."""
  contents, tokens, last = [], [], root
  for token in prompt:
    last = chain(last, token)
    contents.append(last)
  while True:
    tokens.append(drawn(contents))
    if len(tokens) == count or ends(tokens[-1]):
      return tokens
    last = chain(last, tokens[-1])
    contents.append(last)


class Oracle(Simulator):
  """Simulator that also computes tokens and copies page contents.

  Attributes:
    moved: Numbers of pages of the finished copies by owner, in order.
    root: Value before the first token, which depends on the weights.
  """

  root = None

  def __init__(
    self, num_pages, host_pages, page_size, delay, paged=True, states=False
  ):
    super().__init__(Times(), COPIES, most=8, delay=delay)
    self._size, self._paged, self._stateful = page_size, paged, states
    self._states = {}  # by slot
    self._kept, self._leaving = {}, {}  # by block of the host; by copy
    self._cache = [[None] * page_size for _ in range(num_pages)]
    self._host = [[None] * page_size for _ in range(host_pages)]
    self._latest = {}
    self._open = {}  # copies under way, by number
    self.moved = []

  def copy(self, copy):
    super().copy(copy)
    assert len(set(copy.target)) == len(copy.target)
    self._open[copy.number] = copy
    if self._stateful and copy.kind == "out":
      self._leaving[copy.number] = list(self._states[copy.state[0]])
    assert self._paged or not len(copy.source)
    if copy.kind != "out":
      for page in copy.target:  # the old contents are overwritten
        self._cache[page] = [None] * self._size

  def _finish(self, number):
    copy = self._open.pop(number, None)
    if copy is None:  # a step has already waited for it
      return
    source = self._host if copy.kind == "in" else self._cache
    target = self._host if copy.kind == "out" else self._cache
    for read, written in zip(copy.source, copy.target, strict=True):
      target[written] = list(source[read])
    if copy.state is not None and copy.kind == "out":
      self._kept[copy.state[1]] = self._leaving.pop(number)
    elif copy.state is not None:
      self._states[copy.state[1]] = list(self._kept[copy.state[0]])
    self.moved.append(copy)

  def _guard(self, page, write):
    for copy in self._open.values():
      if copy.kind != "in" and write:
        assert page not in copy.source, f"page {page} is written under a copy"
      if copy.kind != "out":
        assert page not in copy.target, f"page {page} is not there yet"

  def submit(self, step):
    for number in sorted(step.after):
      self._finish(number)
    super_draw = {}
    for request, slot, position in zip(
      step.decodes, step.slots, step.positions, strict=True
    ):
      token = self._latest[int(slot)]
      super_draw[request.number] = self._latest[int(slot)] = self._read(
        int(slot), step.tables[slot], int(position), [token]
      )
    for chunk in step.chunks:
      slot = chunk.request.slot
      token = self._read(slot, step.tables[slot], chunk.start, chunk.tokens)
      if chunk.draws:
        super_draw[chunk.request.number] = self._latest[slot] = token
    self._draw = lambda request, position: super_draw[request.number]
    super().submit(step)

  def _read(self, slot, table, start, tokens):
    """Writes tokens from a position, and draws from the contents up to them."""
    if self._stateful:
      state = self._recur(slot, start, tokens)
    if not self._paged:
      return drawn(state)
    contents = []
    for position in range(start):
      page = int(table[position // self._size])
      self._guard(page, write=False)
      contents.append(self._cache[page][position % self._size])
    assert None not in contents, "a page has no contents"
    for position, token in enumerate(tokens, start):
      page = int(table[position // self._size])
      self._guard(page, write=True)
      value = chain(contents[-1] if contents else self.root, token)
      self._cache[page][position % self._size] = value
      contents.append(value)
    assert not self._stateful or state == contents
    return drawn(contents)

  def _recur(self, slot, start, tokens):
    """Returns the state of a slot after more tokens, and checks its history."""
    for copy in self._open.values():
      ahead = copy.kind == "in" and copy.state is not None
      assert not (ahead and copy.state[1] == slot), "its state is not there yet"
    state = self._states[slot] if start else []
    assert len(state) == start, "a state has seen other tokens"
    for token in tokens:
      state = [*state, chain(state[-1] if state else self.root, token)]
    self._states[slot] = state
    return state

  def wait(self, until_s=math.inf):
    events = super().wait(until_s)
    for event in events:
      if event.copy is not None:
        self._finish(event.copy.number)
    return events


def prompts(rng, count, longest):
  """Returns prompts over few tokens, so that many share a prefix."""
  return [
    rng.integers(VOCABULARY, size=rng.integers(1, longest + 1)).astype("i4")
    // rng.integers(1, 4)
    for _ in range(count)
  ]


def rng_of(seed):
  return np.random.default_rng(seed)
