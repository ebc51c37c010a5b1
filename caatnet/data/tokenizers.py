"""Tokenizers: bytes, or a ``tokenizer.json`` of the library `tokenizers`.

Checkpoints in Hugging Face's format have a ``tokenizer.json``. Further files in
the same folder define the token that ends a document
(``tokenizer_config.json``, ``special_tokens_map.json``), the tokens that end
generated text (``generation_config.json`` or, without an entry there,
``config.json``), the defaults of sampling (``generation_config.json``), and the
chat template (``tokenizer_config.json``, ``chat_template.jinja``).
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import hashlib
import json
import pathlib
import re
from typing import Any, NoReturn, Protocol

import numpy as np
import tokenizers

from caatnet.data import chat
from caatnet.data.token_streams import ByteStream, Stream, TokenStream

# The files of a tokenizer; only the first one is required.
FILES = (
  "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
  "generation_config.json", "chat_template.jinja",
)
(
  _TOKENIZER_FILE, _CONFIG_FILE, _SPECIAL_TOKENS_FILE, _GENERATION_FILE,
  _TEMPLATE_FILE
) = FILES
_MODEL_CONFIG_FILE = "config.json"
_CONFIG_KEY = "config.data.tokenizer"
_SENTENCEPIECE_SUFFIX = ".model"
_SENTENCEPIECE_ADVICE = (
  "models of sentencepiece are not read; the fast tokenizers of transformers "
  f"write a {_TOKENIZER_FILE} (save_pretrained)"
)
# Parts of a tokenizer.json without effect: truncation and padding are disabled.
_IGNORED = ("version", "truncation", "padding")


def _byte_letters() -> dict[str, int]:
  """Returns the byte of each letter in byte-level vocabularies, as in GPT-2.

  A printable byte is represented by the letter of equal code. The other bytes,
  in ascending order, are represented by the letters from U+0100 on.
  """
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(byte): byte for byte in printable} | {
    chr(256 + i): byte for i, byte in enumerate(others)
  }


_BYTE_OF_LETTER = _byte_letters()


class Tokenizer(Protocol):
  """Interface of a tokenizer for data, generation and evaluation.

  Attributes:
    name: Name of the tokenizer for users.
    identity: Hex digest of all that determines encoding and decoding, or
      "bytes". Tokenizers with equal identities give equal tokens and texts.
    vocab_size: One more than the largest token.
    separator: The token between two documents of a corpus; None for none.
    start_ids: The tokens at the beginning of a prompt, such as Llama's ``<s>``;
      () for none. `encode` does not add them.
    stop_ids: The tokens that end generated text; () for none.
    generation: Contents of ``generation_config.json``, such as {"temperature":
      0.6}; {} without the file.
    files: The contents of the tokenizer's files by name, which are stored with
      a run; {} for bytes.
  """

  name: str
  identity: str
  vocab_size: int
  separator: int | None
  start_ids: tuple[int, ...]
  stop_ids: tuple[int, ...]
  generation: Mapping[str, Any]
  files: Mapping[str, str]

  def encode(self, text: str) -> np.ndarray:
    """Returns a text's tokens, int32 ``[N]``, without start tokens.

    Special tokens in the text, as in prompts of `chat`, are encoded as such.
    """
    ...

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Returns the text of tokens ``[N]``.

    Special tokens and numbers outside the vocabulary have no text. Bytes that
    are not UTF-8 become U+FFFD.
    """
    ...

  def token_bytes(self, token: int) -> bytes | None:
    """Returns the bytes of a token; None if they are not known.

    Special tokens and numbers outside the vocabulary have no bytes: b"".
    """
    ...

  def stream(self) -> Stream:
    """Returns an incremental decoder."""
    ...

  def special(self, name: str) -> str:
    """Returns the text of a special token such as "eos_token"; "" for none.

    `encode` converts this text to the token.
    """
    ...

  def chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None = None,
  ) -> str:
    """Renders a conversation as the prompt for the assistant's next message.

    The prompt is complete: `start_ids` must not be prepended.

    Args:
      messages: The messages, each with a "role", such as "user", and a
        "content".
      options: Further variables of the template, such as ``enable_thinking``.

    Raises:
      ValueError: If the tokenizer has no chat template, or its template rejects
        the messages.
    """
    ...


class ByteTokenizer:
  """Byte tokenizer; byte 0 separates documents and ends generated text.

  Example:
    >>> ByteTokenizer().encode("né").tolist()
    [110, 195, 169]
    >>> ByteTokenizer().decode([110, 195])  # an incomplete character
    'n\ufffd'
  """

  name = "bytes"
  identity = "bytes"
  vocab_size = 256
  separator = 0
  start_ids: tuple[int, ...] = ()
  stop_ids = (0,)
  generation: Mapping[str, Any] = {}
  files: Mapping[str, str] = {}

  def encode(self, text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    return bytes(i for i in ids if i < 256).decode(errors="replace")

  def token_bytes(self, token: int) -> bytes:
    return bytes([token]) if token < 256 else b""

  def stream(self) -> Stream:
    return ByteStream()

  def special(self, name: str) -> str:
    return "\0" if name == "eos_token" else ""

  def chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None = None,
  ) -> NoReturn:
    raise ValueError(
      "the run has no tokenizer but reads bytes, so it has no chat template"
    )


class LibraryTokenizer:
  """Tokenizer of the library `tokenizers`, with its configuration files."""

  def __init__(self, name: str, files: Mapping[str, str], where: str) -> None:
    """Creates a tokenizer from the contents of its files.

    Args:
      name: Name of the tokenizer for users.
      files: The contents of files by name, keys of `FILES`.
      where: The files' location in error messages.

    Raises:
      ValueError: If a file is damaged, or the files contradict each other.
    """
    self.name = name
    self.files = dict(files)
    self._where = where
    main = self._json(_TOKENIZER_FILE)
    try:
      self._library = tokenizers.Tokenizer.from_str(files[_TOKENIZER_FILE])
    except Exception as error:  # the library raises plain Exceptions
      raise ValueError(
        f"{where}: {_TOKENIZER_FILE} is not a tokenizer: {error}"
      ) from error
    self._library.no_truncation()
    self._library.no_padding()
    self.vocab_size = 1 + max(self._library.get_vocab(True).values(), default=0)
    added = self._library.get_added_tokens_decoder()
    self._special_ids = {i for i, token in added.items() if token.special}
    self._added_ids = set(added)
    decoder = main.get("decoder") or {}
    self._decoders = {
      part.get("type") for part in (decoder, *decoder.get("decoders", ()))
    }
    end = self._special_token_id("eos_token")
    self.generation = self._json(_GENERATION_FILE)
    self.stop_ids = self._stop_ids() or (() if end is None else (end,))
    self.separator = end if end is not None else next(iter(self.stop_ids), None)
    self.start_ids = self._start_ids()
    # Everything that determines the tokens of texts is part of the identity;
    # the chat template and the stop tokens are not.
    decides = {
      "tokenizer": {k: v for k, v in main.items() if k not in _IGNORED},
      "separator": self.separator,
      "start": self.start_ids,
    }
    self.identity = hashlib.sha256(
      json.dumps(decides, sort_keys=True).encode()
    ).hexdigest()

  def encode(self, text: str) -> np.ndarray:
    text.encode()  # raises a clear error for an unpaired surrogate
    with self._add_location_to_errors():
      found = self._library.encode(text, add_special_tokens=False)
    return np.array(found.ids, np.int32)

  def encode_documents(
    self, documents: Sequence[str], offsets: bool
  ) -> list[tokenizers.Encoding]:
    """Encodes documents; special tokens in their text are ordinary text.

    So a document does not end where its text contains the separator token.

    Args:
      documents: The texts.
      offsets: Whether to compute the character range of each token, which takes
        a third longer.
    """
    library = self._library
    encode = library.encode_batch if offsets else library.encode_batch_fast
    library.encode_special_tokens = True  # special tokens as ordinary text
    try:
      with self._add_location_to_errors():
        return encode(documents, add_special_tokens=False)
    finally:
      library.encode_special_tokens = False

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    # Filtered here, since the library does not skip special tokens that a
    # normalizer changes, as in early conversions of Llama (tokenizers 0.23).
    left = [int(i) for i in ids if i not in self._special_ids]
    return self._library.decode(left, skip_special_tokens=False)

  def token_bytes(self, token: int) -> bytes | None:
    text = self.decode([token])
    if "\ufffd" not in text:
      return text.encode()
    name = self._library.id_to_token(token)
    if token in self._added_ids or name is None:
      return text.encode()
    if "ByteLevel" in self._decoders:
      if all(letter in _BYTE_OF_LETTER for letter in name):
        return bytes(_BYTE_OF_LETTER[letter] for letter in name)
    elif "ByteFallback" in self._decoders and (
      match := re.fullmatch("<0x([0-9A-F]{2})>", name)
    ):
      return bytes.fromhex(match[1])
    return text.encode() if "\ufffd" in name else None

  def stream(self) -> Stream:
    return TokenStream(self._library, self._special_ids)

  def chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None = None,
  ) -> str:
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return chat.render_prompt(
      self._template(), messages,
      {name: self.special(name) for name in names}, options,
    )

  @contextlib.contextmanager
  def _add_location_to_errors(self) -> Iterator[None]:
    """Context manager that adds the tokenizer's location to errors."""
    try:
      yield
    except Exception as error:  # the library raises plain Exceptions
      raise ValueError(f"{self._where} cannot encode: {error}") from error

  def _template(self) -> str:
    """Returns the chat template, a jinja2 program."""
    found = self.files.get(_TEMPLATE_FILE) or self._json(_CONFIG_FILE).get(
      "chat_template"
    )
    if isinstance(found, list):  # several named templates
      named = [x for x in found if isinstance(x, dict)]
      found = {x.get("name"): x.get("template") for x in named}.get("default")
    if not isinstance(found, str):
      raise ValueError(
        f"{self._where} has no chat template, neither in {_CONFIG_FILE} nor as "
        f"{_TEMPLATE_FILE}"
      )
    return found

  def _json(self, file: str) -> dict[str, Any]:
    """Returns the JSON object of a file; {} if the file does not exist."""
    try:
      found = json.loads(self.files.get(file, "{}"))
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{self._where}: {file} is not JSON: {error}") from error
    if not isinstance(found, dict):
      raise ValueError(f"{self._where}: {file} is not a JSON object")
    return found

  def special(self, name: str) -> str:
    for file in (_CONFIG_FILE, _SPECIAL_TOKENS_FILE):
      found = self._json(file).get(name)
      if isinstance(found, dict):
        found = found.get("content")
      if found is not None and not isinstance(found, str):
        raise ValueError(
          f"{self._where}: {file} has an invalid value, {name}={found!r}"
        )
      if found:
        return found
    return ""

  def _special_token_id(self, name: str) -> int | None:
    """Returns a special token; None if the files do not name it."""
    text = self.special(name)
    token = self._library.token_to_id(text) if text else None
    if text and token is None:
      raise ValueError(
        f"{self._where}: {name}={text!r} is not a token of {_TOKENIZER_FILE}"
      )
    return token

  def _stop_ids(self) -> tuple[int, ...]:
    """Returns the end tokens in generation_config.json; () if it has none."""
    found = self.generation.get("eos_token_id")
    listed = found if isinstance(found, list) else [found]
    listed = [token for token in listed if token is not None]
    for token in listed:
      if type(token) is not int or not 0 <= token < self.vocab_size:
        raise ValueError(
          f"{self._where}: {_GENERATION_FILE} has eos_token_id={found!r}, but "
          "it "
          f"must be at most {self.vocab_size - 1}, the largest token of "
          f"{_TOKENIZER_FILE}"
        )
    return tuple(listed)

  def _start_ids(self) -> tuple[int, ...]:
    """Returns the special tokens to add before a text.

    These are the tokens that the library adds, unless ``add_bos_token`` is set
    in the tokenizer's config.
    """
    asked = self._json(_CONFIG_FILE).get("add_bos_token")
    if isinstance(asked, bool):
      start = self._special_token_id("bos_token") if asked else None
      return () if start is None else (start,)
    with self._add_location_to_errors():
      found = self._library.encode("a")
    added = found.special_tokens_mask
    count = added.index(0) if 0 in added else 0
    return tuple(found.ids[:count])


def load(path: str, key: str = _CONFIG_KEY) -> Tokenizer:
  """Reads a tokenizer.

  Args:
    path: A ``tokenizer.json``, or a folder that has one; "" for bytes.
    key: Name of the path in error messages.

  Raises:
    ValueError: If a tokenizer is missing or damaged; the message has the path.
  """
  if not path:
    return ByteTokenizer()
  file = pathlib.Path(path).expanduser()
  where = f"{key}={path!r}"
  if not file.exists():
    raise ValueError(f"{where} does not exist")
  folder = file if file.is_dir() else file.parent
  if file.is_dir() and not (file / _TOKENIZER_FILE).exists():
    there = sorted(x.name for x in file.iterdir())
    models = [name for name in there if name.endswith(_SENTENCEPIECE_SUFFIX)]
    what = (
      f"has no {_TOKENIZER_FILE}"
      if there
      else f"is an empty folder: no {_TOKENIZER_FILE}"
    )
    raise ValueError(
      f"{where} {what}" + (
        f" but {models[0]}: {_SENTENCEPIECE_ADVICE}" if models else ""
      )
    )
  if file.name.endswith(_SENTENCEPIECE_SUFFIX):
    raise ValueError(
      f"{where} is not a {_TOKENIZER_FILE}: {_SENTENCEPIECE_ADVICE}"
    )
  if not (file.is_dir() or file.name == _TOKENIZER_FILE):
    # For a file of another name, the other files of its folder may belong to
    # other tokenizers, so they are not read.
    return LibraryTokenizer(
      file.name, {_TOKENIZER_FILE: _text(file, where)}, where
    )
  found = {
    name: _text(folder / name, where)
    for name in FILES if (folder / name).exists()
  }
  if (folder / _MODEL_CONFIG_FILE).exists():
    _add_stop_ids(found, _text(folder / _MODEL_CONFIG_FILE, where), where)
  return LibraryTokenizer(folder.absolute().name, found, where)


def _add_stop_ids(found: dict[str, str], config: str, where: str) -> None:
  """Adds the model's ``eos_token_id`` if generation_config.json has none.

  ``found`` has the files' contents by name and is updated in place; ``config``
  is the content of the model's config.json.

  Older checkpoints have no generation_config.json; transformers derives one
  from the model's config in the same way.
  """
  parts = []
  given = found.get(_GENERATION_FILE, "{}")
  for name, text in (_GENERATION_FILE, given), (_MODEL_CONFIG_FILE, config):
    try:
      parts.append(json.loads(text))
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{where}: {name} is not JSON: {error}") from error
  generation, model = parts
  if not (isinstance(generation, dict) and isinstance(model, dict)):
    return  # generation_config.json is checked with the other files
  end = model.get("eos_token_id")
  if end is not None and generation.get("eos_token_id") is None:
    found[_GENERATION_FILE] = json.dumps(generation | {"eos_token_id": end})


def _text(file: pathlib.Path, where: str) -> str:
  """Returns the text of a file; errors name ``where`` and the file."""
  try:
    if not file.is_file():  # opening a FIFO would block
      raise ValueError("it is not a regular file")
    return file.read_text(encoding="utf-8")
  except OSError as error:
    raise ValueError(
      f"{where}: cannot read {file.name}: {error.strerror}"
    ) from error
  except ValueError as error:
    raise ValueError(f"{where}: {file.name}: {error}") from error
