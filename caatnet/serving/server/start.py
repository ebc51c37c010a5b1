"""Construction of a server from an engine and its options."""

from collections.abc import Callable
import os
import pathlib

from caatnet.inference.scoring import Scorer
from caatnet.serving.server.api import Api, Bounds
from caatnet.serving.server.http import HttpServer
from caatnet.serving.server.metrics import Metrics
from caatnet.serving.server.served import Served
from caatnet.serving.server.service import Service

KEY = "CAATNET_API_KEY"


def key(path: str, flag: str = "api_key_file") -> str:
  """Returns the API key that clients must send; "" for none.

  Args:
    path: File that contains the key; "" for the environment variable `KEY`.
    flag: Name of the flag, for messages.

  Raises:
    ValueError: The file cannot be read, or is empty.
  """
  if not path:
    return os.environ.get(KEY, "").strip()
  try:
    found = pathlib.Path(path).read_text().strip()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"--{flag}={path}: {error}") from error
  if not found:
    raise ValueError(f"--{flag}={path} must not be empty")
  return found


def api(made: Served, key: str, page_bytes: int) -> Api:
  """Returns the HTTP interface to an idle engine.

  Args:
    made: Engine, models and options.
    key: API key; "" for none.
    page_bytes: Bytes of a page over all layers and ranks.
  """
  decoder, chosen, capacity = made.decoder, made.chosen, made.decoder.capacity
  bounds = Bounds(
    capacity.context, decoder.program.model.vocab_size,
    capacity.batch + chosen.queue, chosen.choices, chosen.max_tokens,
    chosen.body_bytes, chosen.read_s,
  )
  # One prompt at a time, so that decoding waits for one prompt at most.
  scorer = Scorer(decoder.program, decoder.weights, capacity.context, 1)
  metrics = Metrics(page_bytes, decoder.state_bytes)
  service = Service(made.engine, metrics, scorer)
  return Api(service, made.tokenizer, made.models, bounds, key)


def server(
  made: Served, key: str, page_bytes: int, say: Callable[[str], None]
) -> HttpServer:
  """Returns a server of `api`, which prints its messages with ``say``."""
  chosen = made.chosen
  return HttpServer(
    api(made, key, page_bytes), chosen.read_s, chosen.write_s, chosen.drain_s,
    say,
  )
