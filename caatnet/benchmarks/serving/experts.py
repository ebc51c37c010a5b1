"""Server of experts over HTTP, compared with one server process per expert.

Requests are for ``auto``. The experts have random parameters, so the router is
not trained: each expert has a vocabulary, of which its prompts consist, and the
router selects the vocabulary that is most similar to a prompt.

The baseline reproduces llama-swap: requests are taken in the order of
arrival; one for another expert waits until the requests under way have ended,
the process is stopped, and a process for the expert has started. Both run the
same server program on the same files under the same memory limit.
"""

import asyncio
from collections.abc import Iterator
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from typing import Any

import httpx2
import numpy as np

from caatnet import commands
from caatnet.benchmarks.harness import memory_limits, processes, setup
from caatnet.benchmarks.harness.memory_limits import Group
from caatnet.config import experts
from caatnet.serving.experts import INDEX, Library
from caatnet.serving.router import Router, features
from caatnet.serving.server import client
from caatnet.serving.server.catalog import AUTO
from caatnet.serving.server.client import Outcome, Question
from caatnet.show import tables
from caatnet.studies.serving import composition
from parallel.memory import slots

# Seconds until a server must be ready.
_START_S = 600.0
# Requests of a stream, which all exist before it starts.
_MOST_REQUESTS = 1_000_000
_COUNTERS = ("hits", "misses", "loads", "failures", "bytes", "exposed_s")
# Words of an expert's vocabulary, letters of a word, and features of a router.
_WORDS, _LETTERS, _BUCKETS = 8, 4, 4096


def run(config: Any) -> dict[str, Any]:
  """Measures, prints a table, and returns it as plain data.

  Args:
    config: Config like configs/benchmark/experts.py.

  Raises:
    ValueError: A stream is too long, a request exceeds the context, or an
      expert has no kind of its own.
  """
  given = config.benchmark
  check(config)
  if given.seconds * given.rate > _MOST_REQUESTS:
    raise ValueError(
      f"config.benchmark.rate={given.rate:g} for seconds={given.seconds:g}: "
      f"more than {_MOST_REQUESTS:,} requests"
    )
  library = experts.create_random(config.experts.path, config, given.number)
  _check_kinds(library)
  size = library.size_bytes(library.names[0])
  words = _vocabularies(given.number, given.seed)
  router = _router(library, words)
  router.write(library.path)
  streams = {
    kind: _questions(config, library, router, words, kind)
    for kind in given.streams
  }
  rows = []
  for eviction in given.evictions:
    with (
      memory_limits.limited(given.memory * size) as group,
      _server(config, library.path, group, eviction) as url,
    ):
      for kind, questions in streams.items():
        row = _served(config, url, questions, kind, eviction)
        rows.append(row | {"peak_bytes": group.peak_bytes()})
        _say(rows[-1])
  if given.processes:
    for kind, questions in streams.items():
      with memory_limits.limited(given.memory * size) as group:
        first = questions[: given.processes]
        swapped = _Swapped(config, library, group)
        outcomes = asyncio.run(swapped.ask_all(first))
        rows.append({
          "stream": kind, "eviction": "processes", **_summary(outcomes),
          "loads": len(swapped.starts_s), "peak_bytes": group.peak_bytes(),
          "load_s": float(np.median(swapped.starts_s)),
        })
        _say(rows[-1])
  limit = group.limit_bytes
  _print(rows, size, limit)
  return {
    "environment": setup.one_device(), "expert_bytes": size,
    "limit_bytes": limit, "rows": rows,
  }


def check(config: Any) -> None:
  """Checks the values that this benchmark and `experts_simulated` share.

  Args:
    config: Config with ``config.benchmark`` and ``config.inference``.

  Raises:
    ValueError: A request exceeds the context.
  """
  given, context = config.benchmark, config.inference.context
  if given.prompt + given.tokens > context:
    raise ValueError(
      f"config.benchmark.prompt={given.prompt} and config.benchmark.tokens="
      f"{given.tokens} exceed config.inference.context={context}"
    )


def _check_kinds(library: Library) -> None:
  """Raises ValueError if a router cannot select each expert by its kind."""
  for entry in library.entries:
    if entry.kind != entry.name:
      raise ValueError(
        f"{library.path}: expert {entry.name!r} has the kind {entry.kind!r}, "
        "not its name, as earlier versions wrote it; delete the folder"
      )


def _vocabularies(count: int, seed: int) -> list[list[bytes]]:
  """Returns the words of each expert: random lowercase letters."""
  letters = np.random.default_rng(seed).integers(
    ord("a"), ord("z") + 1, (count, _WORDS, _LETTERS), np.uint8
  )
  return [[word.tobytes() for word in words] for words in letters]


def _router(library: Library, words: list[list[bytes]]) -> Router:
  """Returns a router to the most similar vocabulary, by cosine."""
  kinds = library.names[: len(words)]
  weights = [features(b" ".join(each), _BUCKETS) for each in words]
  return Router(
    kinds, np.stack(weights, axis=1), np.zeros(len(kinds), np.float32)
  )


def _questions(
  config: Any, library: Library, router: Router, words: list[list[bytes]],
  kind: str,
) -> list[Question]:
  """Returns the requests of a stream: a Poisson process.

  Their model is the expert that the router selects for the prompt.
  """
  given = config.benchmark
  rng = np.random.default_rng(given.seed)
  count = max(1, round(given.seconds * given.rate))
  order = composition.ORDERS[kind](rng, count, {
    "experts": {"number": given.number, "slots": config.experts.slots},
    "stream": {"exponent": given.exponent, "burst": given.burst},
  })
  times = rng.exponential(1 / given.rate, count).cumsum()
  # A token is a byte: the experts have no other tokenizer.
  drawn = rng.integers(_WORDS, size=(count, given.prompt))
  found = []
  for time_s, number, each in zip(times, order, drawn, strict=True):
    prompt = b" ".join(words[number][i] for i in each)[: given.prompt]
    found.append(Question(float(time_s), {
      "model": router.route(prompt, library.entries), "prompt": prompt.decode(),
      "max_tokens": given.tokens, "temperature": 0, "ignore_eos": True,
      "logprobs": 0,  # each token is an event, even one without text
    }))
  return found


@contextlib.contextmanager
def _server(
  config: Any, path: pathlib.Path, group: Group, eviction: str = "lru",
  num_slots: int = 0, warm_up: bool = True,
) -> Iterator[str]:
  """Runs a server of a library in a process; yields its URL."""
  port = processes.free_port()
  ours = {"path": str(path), "eviction": eviction, "random": 0}
  if num_slots:
    ours["slots"] = num_slots
  sections = {
    "experts": config.experts.to_dict() | ours,
    "inference": config.inference.to_dict(),
    "serving": config.serving.to_dict(),
  }
  command = commands.spawned(
    "serve", "--config=configs/serving/experts.py", f"--port={port}",
    "--cpu_devices=1", f"--warm_up={warm_up}",
    *(
      f"--config.{section}.{key}={value}"
      for section, values in sections.items() for key, value in values.items()
    ),
  )
  url = f"http://127.0.0.1:{port}"
  with (
    tempfile.TemporaryFile() as log,
    processes.Process(command, output=log) as process,
  ):
    group.add(process.popen.pid)
    _wait(url, process.popen, log)
    yield url
    process.popen.terminate()  # it has no requests, and ends at once
    process.popen.wait()


def _wait(url: str, popen: subprocess.Popen, log: Any) -> None:
  """Waits until a server is ready.

  Raises:
    ValueError: It has ended or takes too long, with its last line.
  """
  end = time.monotonic() + _START_S
  while popen.poll() is None and time.monotonic() < end:
    with contextlib.suppress(httpx2.HTTPError):
      if httpx2.get(f"{url}/health", timeout=5).status_code == 200:
        return
    time.sleep(0.02)
  log.seek(0)
  lines = log.read().decode(errors="replace").strip().splitlines()
  raise ValueError(f"the server has not started: {(lines or ['killed'])[-1]}")


def _served(
  config: Any, url: str, questions: list[Question], kind: str, eviction: str
) -> dict[str, Any]:
  """Sends a stream to a server of all experts, whose router selects them."""
  before = _counters(url)
  outcomes = asyncio.run(client.ask(url, [
    dataclasses.replace(question, body={**question.body, "model": AUTO})
    for question in questions
  ]))
  after = _counters(url)
  order = [question.body["model"] for question in questions]
  return {
    "stream": kind, "eviction": eviction, **_summary(outcomes),
    **{key: after[key] - before[key] for key in _COUNTERS},
    "load_s": after["load_s"],
    # In the order of arrival, from empty slots.
    "least_misses": slots.misses(order, config.experts.slots, "belady"),
  }


def _counters(url: str) -> dict[str, float]:
  """Returns the counters of a server, summed over its experts."""
  found = httpx2.get(f"{url}/state", timeout=60).json()["experts"]
  rows = found["counters"].values()
  return {
    **{key: sum(row[key] for row in rows) for key in _COUNTERS},
    "load_s": found["load_s"],
  }


def _summary(outcomes: list[Outcome]) -> dict[str, Any]:
  """Returns numbers of requests and errors, and latencies in seconds."""
  good = [outcome for outcome in outcomes if not outcome.error]
  latency = [o.times_s[-1] - o.sent_s for o in good] or [float("nan")]
  first = [o.ttft_s for o in good] or [float("nan")]
  return {
    "requests": len(outcomes), "errors": [o.error for o in outcomes if o.error],
    **{
      f"{name}_p{p}_s": float(np.percentile(values, p))
      for name, values in (("ttft", first), ("latency", latency))
      for p in (50, 99)
    },
  }


class _Swapped:
  """One server process per expert, of which one runs at a time.

  Attributes:
    starts_s: Seconds from the stop of a process until the next one was ready.
  """

  def __init__(self, config: Any, library: Library, group: Group) -> None:
    self.starts_s: list[float] = []
    self._config, self._library, self._group = config, library, group
    # Waiters get the lock in the order of arrival.
    self._lock, self._expert, self._url = asyncio.Lock(), "", ""
    self._num_open, self._idle = 0, asyncio.Event()
    self._process = contextlib.ExitStack()

  async def ask_all(self, questions: list[Question]) -> list[Outcome]:
    """Sends requests at their times."""
    start = time.perf_counter()
    # On the same file system, for links.
    with tempfile.TemporaryDirectory(dir=self._library.path.parent) as folder:
      self._folder = pathlib.Path(folder)
      try:
        return list(await asyncio.gather(
          *(self._ask(question, start) for question in questions)
        ))
      finally:
        self._process.close()

  async def _ask(self, question: Question, start: float) -> Outcome:
    await asyncio.sleep(start + question.time_s - time.perf_counter())
    sent_s = time.perf_counter()
    async with self._lock:
      if self._expert != question.body["model"]:
        while self._num_open:  # requests under way are answered
          self._idle.clear()
          await self._idle.wait()
        await asyncio.to_thread(self._switch, question.body["model"])
      self._num_open += 1
    now = dataclasses.replace(question, time_s=0.0)
    (outcome,) = await client.ask(self._url, [now])
    self._num_open -= 1
    self._idle.set()
    outcome.sent_s = sent_s  # also counts the wait for the process
    return outcome

  def _switch(self, name: str) -> None:
    """Stops the process and starts that of another expert."""
    begun = time.perf_counter()
    self._process.close()
    path = self._folder / name
    if not path.exists():
      _link(self._library, name, path)
    # Programs are read from the cache when they are needed: a start is quicker.
    self._url = self._process.enter_context(_server(
      self._config, path, self._group, num_slots=1, warm_up=False
    ))
    self._expert = name
    self.starts_s.append(time.perf_counter() - begun)


def _link(library: Library, name: str, path: pathlib.Path) -> None:
  """Creates a library that has one expert of another one, without a copy."""
  Library.create(path)
  entry = library.entry(name)
  os.link(library.path / entry.file, path / entry.file)
  shutil.copy(library.path / "config.json", path)
  (path / INDEX).write_text(json.dumps({"experts": [entry.model_dump()]}))


def _say(row: dict[str, Any]) -> None:
  print(
    f"{row['stream']}, {row['eviction']}: {row['requests']} requests, "
    f"{len(row['errors'])} errors, {row['loads']:g} loads, TTFT P50 "
    f"{row['ttft_p50_s']:.3f} s, P99 {row['ttft_p99_s']:.3f} s", flush=True,
  )


def _print(rows: list[dict[str, Any]], size: int, limit: int) -> None:
  def text(row: dict[str, Any], key: str, form: str) -> str:
    return format(row[key], form) if key in row else ""

  limited = f"limit {limit / 1e9:.2f} GB" if limit else "no memory limit"
  tables.table(
    f"experts of {size / 1e6:.1f} MB in files, {limited}",
    ["stream", "eviction", "requests", "errors", "misses", "Belady", "loads",
     "load (s)", "exposed (s)", "TTFT P50 (s)", "P99", "latency P99",
     "peak (GB)"],
    [
      [
        row["stream"], row["eviction"], str(row["requests"]),
        str(len(row["errors"])), text(row, "misses", "g"),
        text(row, "least_misses", "d"), text(row, "loads", "g"),
        f"{row['load_s']:.3f}", text(row, "exposed_s", ".2f"),
        f"{row['ttft_p50_s']:.3f}", f"{row['ttft_p99_s']:.3f}",
        f"{row['latency_p99_s']:.3f}", f"{row['peak_bytes'] / 1e9:.2f}",
      ]
      for row in rows
    ],
  )
