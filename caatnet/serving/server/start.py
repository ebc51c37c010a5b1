"""Construction of a server from an engine and its options."""

from collections.abc import Callable
import os
import pathlib

from caatnet.inference.scoring import Scorer
from caatnet.serving.server.api import Api, ServerLimits
from caatnet.serving.server.http import HttpServer
from caatnet.serving.server.metrics import Metrics
from caatnet.serving.server.served import ServerParts
from caatnet.serving.server.service import Service

KEY_VARIABLE = "CAATNET_API_KEY"


def read_api_key(path: str, flag: str = "api_key_file") -> str:
  """Returns the API key that clients must send; "" for none.

  Args:
    path: File that contains the key; "" for the environment variable
      `KEY_VARIABLE`.
    flag: Name of the flag, for messages.

  Raises:
    ValueError: The file cannot be read, or is empty.
  """
  if not path:
    return os.environ.get(KEY_VARIABLE, "").strip()
  try:
    found = pathlib.Path(path).read_text().strip()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"--{flag}={path}: {error}") from error
  if not found:
    raise ValueError(f"--{flag}={path} must not be empty")
  return found


def build_api(made: ServerParts, key: str, page_bytes: int) -> Api:
  """Returns the HTTP interface to an idle engine.

  Args:
    made: Engine, models and options.
    key: API key; "" for none.
    page_bytes: Bytes of a page over all layers and ranks.
  """
  decoder, chosen, capacity = made.decoder, made.chosen, made.decoder.capacity
  bounds = ServerLimits(
    capacity.context, decoder.program.model.vocab_size,
    capacity.batch + chosen.queue, chosen.choices, chosen.max_tokens,
    chosen.body_bytes, chosen.read_s,
  )
  # One prompt at a time, so that decoding waits for one prompt at most.
  scorer = Scorer(decoder.program, decoder.weights, capacity.context, 1)
  metrics = Metrics(page_bytes, decoder.state_bytes)
  service = Service(made.engine, metrics, scorer)
  return Api(service, made.tokenizer, made.models, bounds, key)


def build_server(
  made: ServerParts, key: str, page_bytes: int, say: Callable[[str], None]
) -> HttpServer:
  """Returns an HTTP server of `build_api`'s result; ``say`` prints messages."""
  chosen = made.chosen
  return HttpServer(
    build_api(made, key, page_bytes), chosen.read_s, chosen.write_s,
    chosen.drain_s, say,
  )
