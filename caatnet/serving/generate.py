"""Generation: continues many prompts at once by continuous batching.

Each replica has its own scheduler with the first-come policy, and all replicas
run in lockstep. Up to ``Capacity.batch`` sequences of a replica run at a time.
A step reads the newest token of every sequence whose prompt has been read, and
one chunk of a prompt. When a sequence ends, the next prompt gets its slot.

A step is dispatched before the tokens of the previous step are on the host: the
program keeps the newest token of each sequence on the device. A sequence that a
stop id or a stop string ends is therefore part of one more step, whose token is
dropped, unless the program of that step must be compiled first.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import time

from caatnet.data.tokenizers import Tokenizer
from caatnet.inference import batches
from caatnet.inference.buckets import bucket
from caatnet.inference.decoder import Decoder
from caatnet.inference.requests import Completion, Request
from caatnet.inference.transcripts import Transcript
from caatnet.serving import requests as serving
from caatnet.serving.cache.host_cache import HostCache
from caatnet.serving.cache.pages import Pages
from caatnet.serving.engine.device import (
  DispatchedStep,
  SamplingState,
  dispatch,
)
from caatnet.serving.engine.measured import MeasuredCosts
from caatnet.serving.scheduler.limits import Limits
from caatnet.serving.scheduler.policies import registry
from caatnet.serving.scheduler.scheduler import Scheduler

# Ratio between successive bucket sizes for the number of decodes.
_BUCKET_FACTOR = 4


@dataclasses.dataclass
class Speed:
  """Tokens and seconds of a generation, excluding compilation by XLA.

  Tokens drawn in a step that also reads a prompt do not count as decoded.

  Attributes:
    prompt_tokens: Tokens read in chunks: those of prompts, and those of
      preempted sequences that are read again.
    prompt_seconds: Seconds of the steps that read chunks.
    decoded_tokens: Tokens drawn in all other steps.
    decode_seconds: Seconds of all other steps.
  """

  prompt_tokens: int = 0
  prompt_seconds: float = 0.0
  decoded_tokens: int = 0
  decode_seconds: float = 0.0

  def add(self, sent: DispatchedStep, seconds: float) -> None:
    """Counts a step and the seconds until its tokens arrived."""
    steps = [step for step in sent.steps if step is not None]
    if num_read := sum(c.length for step in steps for c in step.chunks):
      self.prompt_tokens += num_read
      self.prompt_seconds += seconds
    else:
      self.decoded_tokens += sum(len(step.drawing) for step in steps)
      self.decode_seconds += seconds


class Generation:
  """Continuous-batching loop that continues requests with a decoder.

  Attributes:
    speed: Tokens and seconds so far.
  """

  def __init__(
    self,
    decoder: Decoder,
    requests: Sequence[Request],
    tokenizer: Tokenizer,
    on_text: Callable[[int, str], None] = lambda index, text: None,
    on_end: Callable[[int], None] = lambda index: None,
  ) -> None:
    """Checks the requests and queues them.

    Args:
      decoder: The model and its cache; all its sequences have ended.
      requests: Prompts with their sampling parameters and stop conditions.
      tokenizer: Decodes tokens to text.
      on_text: Called with a request's index and its new text.
      on_end: Called with a request's index when it has ended.

    Raises:
      ValueError: The model cannot take a request, which the message names.
    """
    self.speed = Speed()
    self._decoder, self._on_text, self._on_end = decoder, on_text, on_end
    self._pending: DispatchedStep | None = None
    capacity = decoder.capacity
    # All steps apply filters if any request does, so that steps of equal sizes
    # run one program.
    self._filters = capacity.batch_invariant or any(
      request.filters for request in requests
    )
    vocab_size = decoder.program.model.vocab_size
    for index, request in enumerate(requests):
      try:
        request.check(vocab_size, capacity.context)
      except ValueError as error:
        raise ValueError(f"prompt {index + 1}: {error}") from error
    self._transcripts = [
      Transcript(request, tokenizer, capacity.context) for request in requests
    ]
    # The page tables are as wide as the longest sequence needs, so that there
    # is not one program per length.
    size = capacity.page_size
    max_pages = bucket(
      max((t.num_pages(size) for t in self._transcripts), default=1),
      1, capacity.pages_per_sequence, 2,
    )
    self._capacity = capacity if capacity.batch_invariant else (
      dataclasses.replace(capacity, context=max_pages * size)
    )
    self._schedulers = [
      _scheduler(decoder) for _ in range(decoder.num_replicas)
    ]
    self._drawings = [
      batches.SlotSampling(capacity.batch) for _ in self._schedulers
    ]
    self._waiting = collections.deque(
      map(self._convert_request, range(len(requests)), requests)
    )

  def _convert_request(self, index: int, request: Request) -> serving.Request:
    """Converts a request to the scheduler's type."""
    transcript = self._transcripts[index]
    drawn = SamplingState(request)

    # Called by the scheduler once per token, in order.
    def stop(token: int) -> bool:
      logprob = drawn.logprobs[len(transcript.tokens)]
      self._show(index, transcript.push(token, logprob))
      if transcript.ended:
        self._on_end(index)
      return transcript.ended

    return serving.Request(
      index, request.prompt, transcript.max_tokens, stop=stop, payload=drawn
    )

  def run(
    self, interrupted: Callable[[], bool] = lambda: False
  ) -> list[Completion]:
    """Continues all requests to their ends.

    Args:
      interrupted: Returns whether to stop early; called before each step.

    Returns:
      The completion of each prompt, in the order of the requests.

    Raises:
      ValueError: The model's logits are NaN: it has diverged, or overflows in
        its dtype.
    """
    self._arrived = self._clock()
    # The first token is shown before the next step's program is compiled.
    self._decoder.before_compile = self._receive
    try:
      while self._going and not interrupted():
        self._admit()
        # The next step is dispatched before the previous one is received,
        # unless its program must be compiled first.
        sent = self._dispatch_step()
        self._receive()
        self._pending = sent
    finally:
      self._decoder.before_compile = lambda: None
    for index, transcript in enumerate(self._transcripts):
      if not transcript.ended:
        self._show(index, transcript.interrupt())
    return [transcript.completion for transcript in self._transcripts]

  def _clock(self) -> float:
    """Returns a time in seconds that excludes compilation by XLA."""
    return time.perf_counter() - self._decoder.compile_seconds

  @property
  def _going(self) -> bool:
    """Whether a request has not ended."""
    return bool(self._waiting) or not all(s.idle for s in self._schedulers)

  def _admit(self) -> None:
    """Assigns waiting requests to the replica with the fewest requests."""
    while self._waiting:
      scheduler = min(self._schedulers, key=lambda s: len(s.requests))
      if len(scheduler.requests) >= self._decoder.capacity.batch:
        return
      scheduler.add(self._waiting.popleft())

  def _dispatch_step(self) -> DispatchedStep | None:
    """Dispatches the next step; None if all remaining work is under way."""
    now = self._clock()
    steps = [scheduler.step(now) for scheduler in self._schedulers]
    if not any(steps):
      return None
    return dispatch(
      self._decoder, self._capacity, steps, self._drawings, _BUCKET_FACTOR,
      self._filters,
    )

  def _receive(self) -> None:
    """Passes the tokens of the step under way, if any, to the schedulers."""
    sent, self._pending = self._pending, None
    if sent is None:
      return
    events = sent.events(self._clock)
    now = self._clock()
    self.speed.add(sent, now - self._arrived)
    self._arrived = now
    for scheduler, event in zip(self._schedulers, events, strict=True):
      if event is None:
        continue
      assert event.step is not None
      for request in map(event.step.request, event.failed):
        count = len(self._transcripts[request.number].tokens)
        # else it ended one step earlier
        if request.state not in serving.FINAL_STATES:
          raise ValueError(
            f"prompt {request.number + 1}: the model's logits are NaN after "
            f"{count} generated tokens, so it has diverged or overflows in its "
            "dtype"
          )
      scheduler.receive(event)

  def _show(self, index: int, text: str) -> None:
    if text:
      self._on_text(index, text)


def _scheduler(decoder: Decoder) -> Scheduler:
  """Returns a replica's scheduler, without swapping and prefix reuse.

  The cache may therefore have pages, recurrent states or both.
  """
  capacity = decoder.capacity
  pages = Pages(decoder.cache_shape.num_pages, capacity.page_size, reuse=False)
  limits = Limits(
    slots=capacity.batch, tokens=capacity.step_tokens,
    chunks=decoder.chunk_limits[:1],
  )
  return Scheduler(
    limits, registry.make("first_come", pages), pages,
    HostCache(0, capacity.page_size, reserve=False), MeasuredCosts(),
  )
