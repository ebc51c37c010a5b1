"""Parts of a server, before it accepts requests."""

import dataclasses

from caatnet.data.tokenizers import Tokenizer
from caatnet.inference.decoder import Decoder
from caatnet.serving.engine.engine import Engine
from caatnet.serving.options import ServingOptions
from caatnet.serving.server.catalog import Models


@dataclasses.dataclass(frozen=True)
class ServerParts:
  """Engine, models and options of a server.

  Attributes:
    engine: Idle engine.
    decoder: The model and its cache.
    models: Models by name.
    tokenizer: Tokenizer of the models.
    chosen: Options of ``config.serving``.
  """

  engine: Engine
  decoder: Decoder
  models: Models
  tokenizer: Tokenizer
  chosen: ServingOptions
