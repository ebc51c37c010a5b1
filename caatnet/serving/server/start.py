"""Construction of a server from an engine and its options."""

from collections.abc import Callable
import os
import pathlib

from caatnet.data.tokenizers import Tokenizer
from caatnet.inference.decoder import Decoder
from caatnet.inference.scoring import Scorer
from caatnet.serving.engine.engine import Engine
from caatnet.serving.options import ServingOptions
from caatnet.serving.server.api import Api, Bounds
from caatnet.serving.server.catalog import Models, OneModel
from caatnet.serving.server.http import Server
from caatnet.serving.server.metrics import Metrics
from caatnet.serving.server.service import Service

KEY = "CAATNET_API_KEY"


def key(path: str, flag: str = "api_key_file") -> str:
  """Returns the API key that clients must send; "" for none.

  Args:
    path: File that contains the key; "" for the environment variable ``KEY``.
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
    raise ValueError(f"--{flag}={path} is empty")
  return found


def api(
  engine: Engine, decoder: Decoder, tokenizer: Tokenizer,
  chosen: ServingOptions, models: Models, key: str, page_bytes: int,
) -> Api:
  """Returns the HTTP interface to an idle engine.

  Args:
    engine: Engine whose executor runs `decoder`.
    decoder: The model and its cache.
    tokenizer: Tokenizer of the model.
    chosen: Limits of the server.
    models: Models by name.
    key: API key; "" for none.
    page_bytes: Bytes of a page over all layers and ranks.
  """
  capacity = decoder.capacity
  bounds = Bounds(
    capacity.context, decoder.program.model.vocab_size,
    capacity.batch + chosen.queue, chosen.choices, chosen.max_tokens,
    chosen.body_bytes, chosen.read_s,
  )
  scorer = None
  if isinstance(models, OneModel):
    # One prompt at a time, so that decoding waits for one prompt at most.
    scorer = Scorer(decoder.program, decoder.weights, capacity.context, 1)
  metrics = Metrics(page_bytes, decoder.state_bytes)
  service = Service(engine, metrics, scorer)
  return Api(service, tokenizer, models, bounds, key)


def server(
  engine: Engine, decoder: Decoder, tokenizer: Tokenizer,
  chosen: ServingOptions, models: Models, key: str, page_bytes: int,
  say: Callable[[str], None],
) -> Server:
  """Returns a server of `api`, which prints its messages with ``say``."""
  made = api(engine, decoder, tokenizer, chosen, models, key, page_bytes)
  return Server(made, chosen.read_s, chosen.write_s, chosen.drain_s, say)
