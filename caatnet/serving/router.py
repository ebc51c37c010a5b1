"""Router: a linear classifier of prompts, which selects an expert for each.

The features of a prompt are the counts of its byte n-grams, hashed to buckets.
The router has a few thousand parameters, so it runs on the host, without jax;
`caatnet.composition.routing` trains it.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import zlib

import numpy as np

from caatnet.serving import weights_file
from caatnet.serving.experts import Entry
from parallel.base import atomic

FILE = "router.safetensors"
# Lengths of n-grams in bytes.
_NGRAMS = (1, 2, 3, 4)
# Maximum bytes of a prompt that are classified; of a longer prompt, its end.
MAX_PROMPT_BYTES = 4096
_MULTIPLIER = np.uint32(2654435761)  # 2^32 / golden ratio (Knuth)


@dataclasses.dataclass(frozen=True, eq=False)
class Router:
  """Linear classifier of prompts by kind of text, which selects their expert.

  Attributes:
    kinds: Names of the classes, which are kinds of text.
    weights: Weight of each feature for each kind, float32 ``[buckets, kinds]``.
    bias: Bias of each kind, float32 ``[kinds]``.
  """

  kinds: tuple[str, ...]
  weights: np.ndarray
  bias: np.ndarray

  @property
  def num_params(self) -> int:
    """Number of parameters."""
    return self.weights.size + self.bias.size

  def logits(self, prompt: bytes) -> np.ndarray:
    """Returns the logits of a prompt's kinds, float32 ``[kinds]``."""
    return features(prompt, len(self.weights)) @ self.weights + self.bias

  def kind(self, prompt: bytes) -> str:
    """Returns the most probable kind of a prompt."""
    return self.kinds[int(self.logits(prompt).argmax())]

  def route(self, prompt: bytes, entries: Sequence[Entry]) -> str:
    """Returns the name of the expert for a prompt.

    The kind of text is the most probable one for which the library has an
    expert. Of several experts of this kind, it is the first fine-tuned one in
    the library's order, or the first one if none is fine-tuned.

    Args:
      prompt: The prompt's text.
      entries: The experts.

    Raises:
      ValueError: No expert has a kind of text of this classifier.
    """
    experts: dict[str, str] = {}
    for tuned in (True, False):
      for entry in entries:
        if (entry.origin == "fine-tuned") == tuned:
          experts.setdefault(entry.kind, entry.name)
    for index in np.argsort(-self.logits(prompt), kind="stable"):
      if self.kinds[index] in experts:
        return experts[self.kinds[index]]
    raise ValueError(
      f"no expert has one of the kinds {', '.join(self.kinds)}"
    )

  def write(self, folder: str | os.PathLike[str]) -> None:
    """Writes the classifier to `FILE` in a folder, atomically."""
    with atomic.atomic_file(pathlib.Path(folder) / FILE) as temporary:
      weights_file.write(
        temporary, {"weights": self.weights, "bias": self.bias},
        {"kinds": json.dumps(self.kinds), "crc32": self._crc()},
      )

  def _crc(self) -> str:
    """Returns the CRC-32 of weights, bias and kinds, in hex digits."""
    arrays = self.weights.tobytes() + self.bias.tobytes()
    return f"{zlib.crc32(arrays + json.dumps(self.kinds).encode()):08x}"

  @classmethod
  def read(cls, folder: str | os.PathLike[str]) -> "Router":
    """Reads the classifier that selects among a library's experts.

    Raises:
      ValueError: The file is missing or damaged.
    """
    file = weights_file.WeightsFile(pathlib.Path(folder) / FILE)
    header = file.header()
    try:
      tensors = header.views(file.content(header.size_bytes)[0])
      kinds = tuple(json.loads(header.metadata["kinds"]))
      weights, bias = tensors["weights"], tensors["bias"]
      if weights.shape[1:] != bias.shape or bias.shape != (len(kinds),):
        raise ValueError(
          f"the shapes of weights {weights.shape} and bias {bias.shape} must "
          f"agree with the {len(kinds)} kinds"
        )
      found = cls(kinds, weights, bias)
      if header.metadata.get("crc32", found._crc()) != found._crc():
        raise ValueError("the checksum differs from that written with the file")
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(f"{file.path} is damaged: {error}") from error
    return found


def features(prompt: bytes, num_buckets: int) -> np.ndarray:
  """Returns the features of a prompt.

  Args:
    prompt: Text; only its last `MAX_PROMPT_BYTES` bytes count.
    num_buckets: Number of features.

  Returns:
    log(1 + count) of each bucket's n-grams, scaled to norm 1; float32
    ``[num_buckets]``. Zeros for an empty prompt.

  Example:
    >>> features(b"ab", 8).shape
    (8,)
  """
  text = np.frombuffer(prompt[-MAX_PROMPT_BYTES:], np.uint8).astype(np.uint32)
  counts = np.zeros(num_buckets, np.float32)
  for n in _NGRAMS:
    if len(text) < n:
      break
    # Numbers of up to four bytes; the length of the n-gram is part of the hash.
    grams = np.zeros(len(text) - n + 1, np.uint32)
    for i in range(n):
      grams = (grams << np.uint32(8)) | text[i : len(text) - n + 1 + i]
    hashes = (grams + np.uint32(n)) * _MULTIPLIER
    hashes ^= hashes >> np.uint32(15)
    counts += np.bincount(hashes % num_buckets, minlength=num_buckets)
  found = np.log1p(counts)
  return (found / max(1e-6, float(np.linalg.norm(found)))).astype(np.float32)
