"""Small tokenizers of each family of checkpoints."""

import functools
import json

from tokenizers import (
  AddedToken,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)

from caatnet.data import bpe
from caatnet.data.tokenizers import ByteTokenizer, LibraryTokenizer

TEXTS = (
  "the cat and the hat, the bat and the rat: that is that\n" * 40,
  "na\u00efve caf\u00e9 \u20ac \u20ac \U0001f600 the end\n" * 40,
  "def f(x):\n  return x + 1\n" * 40,
)


@functools.cache
def bpe_files(vocab_size=300):
  return bpe.train_tokenizer(TEXTS, vocab_size)


def _pieces():
  """Returns a vocabulary as of sentencepiece: bytes, then pieces of words."""
  names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
  names += [
    "\u2581", "\u2581\u2581", "a", "b", "c", ".", "\u2581a", "\u2581b", "ab",
    "\u2581ab", "\u00e9", "\u20ac", "\ufffd",
  ]
  merges = ["\u2581 \u2581", "\u2581 a", "\u2581 b", "a b", "\u2581a b"]
  vocab = {name: number for number, name in enumerate(names)}
  return models.BPE(
    vocab, [tuple(x.split()) for x in merges], unk_token="<unk>",
    fuse_unk=True, byte_fallback=True,
  )


def _finished(tokenizer, normalized=False):
  tokenizer.add_special_tokens([
    *(AddedToken(x, special=True, normalized=normalized)
      for x in ("<unk>", "<s>")),
    AddedToken("</s>", special=True),
  ])
  tokenizer.post_processor = processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", 1)]
  )
  return {
    "tokenizer.json": tokenizer.to_str(),
    "tokenizer_config.json": json.dumps(
      {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    ),
  }


@functools.cache
def llama_files():
  """Files as of Llama 2: a normalizer prepends spaces, also before "<s>"."""
  tokenizer = Tokenizer(_pieces())
  tokenizer.normalizer = normalizers.Sequence([
    normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581"),
  ])
  tokenizer.decoder = decoders.Sequence([
    decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
  ])
  return _finished(tokenizer, normalized=True)


@functools.cache
def mistral_files():
  """Files as of Mistral: a pre-tokenizer prepends spaces."""
  tokenizer = Tokenizer(_pieces())
  spaces = dict(prepend_scheme="first", split=False)
  tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**spaces)
  tokenizer.decoder = decoders.Sequence([
    decoders.ByteFallback(), decoders.Metaspace(**spaces),
  ])
  return _finished(tokenizer)


@functools.cache
def subject(name):
  if name == "bytes":
    return ByteTokenizer()
  files = {"bpe": bpe_files, "llama": llama_files, "mistral": mistral_files}
  return LibraryTokenizer(name, files[name](), name)


SUBJECTS = ("bytes", "bpe", "llama", "mistral")


def write(folder, files):
  """Writes files to a new folder; returns its path."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, text in files.items():
    (folder / name).write_text(text)
  return str(folder)
