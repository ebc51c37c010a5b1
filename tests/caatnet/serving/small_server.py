"""Server of a tiny model in a thread, and reference completions."""

import contextlib
import copy
import functools
import json
import socket
import threading

import jax
import jax.numpy as jnp
import tokenizers
from tokenizers import decoders, models

from caatnet.config import serving
from caatnet.data.tokenizers import LibraryTokenizer
from caatnet.inference.decoder import Capacity, Decoder
from caatnet.inference.requests import Request
from caatnet.inference.stops import Stops
from caatnet.inference.weights import make_weights
from caatnet.models.paged import CacheShape
from caatnet.serving.generate import Generation
from caatnet.serving.options import DEFAULTS
from caatnet.serving.server import http, start
from caatnet.serving.server.catalog import OneModel
from caatnet.serving.server.served import ServerParts
from tests.caatnet.inference.decoding_test import put
from tests.caatnet.models.transformer_test import make_program
from tests.caatnet.serving import generate_test

CONTEXT, PAGE_SIZE, PAGES, SLOTS = 96, 8, 40, 4
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 "
TEMPLATE = (
  "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}a"
)


@functools.cache
def tokenizer(template=TEMPLATE):
  """Returns a tokenizer with one token per letter; token 63 ends a text."""
  vocab = {letter: i for i, letter in enumerate(LETTERS)} | {"</s>": 63}
  library = tokenizers.Tokenizer(models.BPE(vocab, []))
  library.decoder = decoders.Fuse()
  library.add_special_tokens(["</s>"])
  config = {"eos_token": "</s>"}
  if template:
    config["chat_template"] = template
  return LibraryTokenizer("letters", {
    "tokenizer.json": library.to_str(),
    "tokenizer_config.json": json.dumps(config),
  }, "letters")


@functools.cache
def first_decoder():
  """Returns the model of `generate_test` with a longer context."""
  program = make_program(generate_test.CONFIG, 4, 1)
  config = program.model.config
  shape = CacheShape(
    config.num_layers, PAGES, PAGE_SIZE,
    config.num_kv_heads // program.layout.tensor.size, config.head_width,
    "float32", "heads",
  )
  weights = make_weights(
    program, put(program, generate_test.trained()), False, False
  )
  return Decoder(
    program, weights, Capacity(SLOTS, CONTEXT, PAGE_SIZE, 16), shape
  )


def decoder():
  """Returns a decoder with its own cache that shares the compiled programs."""
  found = copy.copy(first_decoder())
  found._state = jax.tree.map(jnp.copy, found._state)
  return found


_alone = functools.cache(decoder)


def alone(text, max_tokens, stop=(), **how):
  """Returns the completion of a text that is generated alone."""
  tokens = tokenizer()
  asked = Request(
    tuple(tokens.encode(text).tolist()),
    Stops(max_tokens, frozenset(tokens.stop_ids), stop), **how,
  )
  generation = Generation(_alone(), [asked], tokens)
  # All decoders run the same programs.
  generation._filters = True
  generation._capacity = _alone().capacity
  return generation.run()[0]


class Running:
  """Running server.

  Attributes:
    server: The uvicorn server.
    api: Its application.
    port: Its port on 127.0.0.1.
  """

  def __init__(self, server, port):
    self.server, self.api, self.port = server, server.api, port
    self.url = f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def running(
  template=TEMPLATE, key="", model=None, send_bytes=None, tokens=None,
  **options
):
  """Runs a server of a model (the small one by default) in this context.

  Args:
    template: Chat template.
    key: API key.
    model: Decoder.
    send_bytes: Size of the send buffer of each connection.
    tokens: Tokenizer; None for that of the small model.
    **options: Options of the server.
  """
  model = model or decoder()
  chosen = DEFAULTS.__class__(**vars(DEFAULTS) | {"growth": 1} | options)
  listener = http.bind_listener("127.0.0.1", 0)
  if send_bytes is not None:  # connections inherit it
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
  made = ServerParts(
    serving.engine(model, chosen), model, OneModel("small"),
    tokens or tokenizer(template), chosen,
  )
  server = start.build_server(made, key, serving.page_bytes(model), print)
  thread = threading.Thread(target=server.serve_on, args=(listener,))
  thread.start()
  try:
    yield Running(server, listener.getsockname()[1])
  finally:
    server.should_exit = True
    thread.join()
