"""Requests and prompts: validation, defaults and readers."""

import io
import json
import sys

import numpy as np
import pytest
import tokenizers

from caatnet.data.tokenizers import ByteTokenizer, LibraryTokenizer
from caatnet.inference import prompts
from caatnet.inference.filters import choose_sampling_params
from caatnet.inference.requests import (
  Request,
  encode_prompt,
  stack_sampling_params,
)
from caatnet.inference.stops import Stops


def request(prompt=(1, 2), **settings):
  return Request(prompt, Stops(4), **settings)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"prompt": ()}, "the prompt is empty"),
    ({"temperature": -1.0}, "temperature=-1.0 must be at least 0 and finite"),
    ({"temperature": float("nan")}, "temperature=nan must"),
    ({"temperature": float("inf")}, "temperature=inf must"),
    ({"top_k": -1}, "top_k=-1 must"),
    ({"top_p": 0.0}, r"top_p=0.0 must lie in \(0, 1\]"),
    ({"top_p": 1.5}, r"top_p=1.5 must lie in \(0, 1\]"),
    ({"min_p": -0.1}, r"min_p=-0.1 must lie in \[0, 1\]"),
    ({"temperature": 3.5e38}, "temperature=3.5e[+]38 must"),
    ({"top_k": 2**31}, "top_k=2147483648 must be an integer from 0 to 21474"),
    ({"min_p": 1.5}, r"min_p=1.5 must lie in \[0, 1\]"),
    ({"seed": 2**32}, "seed=4294967296 must"),
    ({"seed": -1}, "seed=-1 must be an integer from 0 to"),
  ],
)
def test_invalid_setting_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    request(**settings)
  # The ends of each range are valid.
  request(temperature=3.4e38, top_k=2**31 - 1, top_p=1.0, min_p=1.0)
  request(temperature=0, top_k=0, top_p=1e-9, min_p=0.0, seed=0)


@pytest.mark.parametrize(
  ("prompt", "message"),
  [((3, 256), "has the token 256; tokens must lie in .0, 255"),
   ((-1,), "has the token -1"),
   ((0,) * 8, "has 8 tokens, which leaves no room in config.inference.context")]
)
def test_prompt_outside_of_the_model_limits_is_refused(prompt, message):
  request((0,) * 7).check(256, context=8)
  with pytest.raises(ValueError, match=message):
    request(prompt).check(256, context=8)


def test_filters_are_requested_only_if_they_have_an_effect():
  assert request(temperature=1.0, top_k=5).filters
  assert request(temperature=1.0, top_p=0.5).filters
  assert not request(temperature=1.0, min_p=0.5).filters
  assert not request(top_k=5, top_p=0.5).filters  # greedy


def test_free_slots_are_greedy():
  rows = stack_sampling_params(
    [None, request(temperature=0.5, seed=2**32 - 1, top_k=3)]
  )
  assert rows.temperature.tolist() == [0.0, 0.5]
  assert rows.seed.tolist() == [0, 2**32 - 1]
  assert [x.dtype for x in rows] == [
    np.uint32, np.float32, np.int32, np.float32, np.float32
  ]


def test_prompts_of_all_sources_are_read_in_order(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "stdin", io.StringIO("c\nd\n"))
  path = tmp_path / "prompts.txt"
  path.write_text("e \n\n  f\n")
  assert prompts.read(["a", "-"], str(path)) == ["a", "c\nd\n", "e ", "  f"]


def test_prompts_are_read_one_per_line(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "stdin", io.StringIO("c\nd\n"))
  assert prompts.read(["a"], "-") == ["a", "c", "d"]
  path = tmp_path / "prompts.jsonl"
  path.write_text('{"prompt": "a\\nb", "more": 1}\n\n{"prompt": "c"}')
  assert prompts.read([], str(path)) == ["a\nb", "c"]


@pytest.mark.parametrize(
  ("flags", "text", "message"),
  [
    ([], None, "--prompt=TEXT or --prompt_file=PATH is required"),
    (["a", ""], None, "--prompt number 2 is empty"),
    (["-"], None, "--prompt number 1 is empty"),  # of standard input
    (["-", "-"], None, "only one of"),
    ([], "\n\n", "prompts.jsonl must have at least one prompt"),
    ([], '{"prompt": "a"}\n{}', "line 2: prompt is missing"),
    ([], '["prompt"]', "line 1: the content must be an object"),
    ([], "a", "line 1: is not JSON"),
    ([], '{"prompt": 3}', "line 1: prompt=3 must be a valid string"),
    ([], '{"prompt": ""}', 'line 1: prompt="" must satisfy: string'),
  ],
)
def test_invalid_prompt_is_named(flags, text, message, tmp_path, monkeypatch):
  monkeypatch.setattr(sys, "stdin", io.StringIO(""))
  path = tmp_path / "prompts.jsonl"
  if text is not None:
    path.write_text(text)
  with pytest.raises(ValueError, match=message):
    prompts.read(flags, None if text is None else str(path))


def test_prompt_that_is_not_text_is_named(tmp_path):
  with pytest.raises(ValueError, match=r"^prompt 2 is not UTF-8 text"):
    prompts.read(["a", "\ud800"], None)
  with pytest.raises(ValueError, match=rf"^--prompt_file={tmp_path} cannot be"):
    prompts.read([], str(tmp_path))


def test_file_that_is_not_text_is_named(tmp_path):
  (tmp_path / "prompts.txt").write_bytes(b"\xff\xfe")
  with pytest.raises(ValueError, match=r"prompts\.txt is not UTF-8 text"):
    prompts.read([], str(tmp_path / "prompts.txt"))
  with pytest.raises(FileNotFoundError, match="no such file"):
    prompts.read([], str(tmp_path / "none.txt"))


def test_prompt_start_is_added_once():
  """Adds the tokenizer's start tokens, or leaves them to its chat template."""
  library = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      {token: i for i, token in enumerate(["<s>", "[", "]", "a", "b"])}, []
    )
  )
  library.add_special_tokens(["<s>"])
  config = {
    "bos_token": "<s>", "add_bos_token": True,
    "chat_template": "{{ bos_token }}[{{ messages[0].content }}]",
  }
  letters = LibraryTokenizer(
    "letters",
    {"tokenizer.json": library.to_str(),
     "tokenizer_config.json": json.dumps(config)},
    "letters",
  )
  assert encode_prompt("ab", letters, chat=False) == (0, 3, 4)
  assert encode_prompt("ab", letters, chat=True) == (0, 1, 3, 4, 2)
  assert encode_prompt("ab", ByteTokenizer(), chat=False) == (97, 98)
  with pytest.raises(ValueError, match="no chat template"):
    encode_prompt("ab", ByteTokenizer(), chat=True)


@pytest.mark.parametrize(("given", "generation", "expected"), [
  ({}, {"do_sample": True}, {"temperature": 1.0}),
  ({}, {"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
  ({"top_k": 4}, {"temperature": 0.6}, {"temperature": 0.6, "top_k": 4}),
  ({"top_k": None}, {"top_k": 7, "top_p": None}, {"temperature": 1.0,
                                                 "top_k": 7}),
  ({"temperature": 0.5}, {}, {"temperature": 0.5, "top_p": 0.95}),
])
def test_given_sampling_precedes_the_recommended_one(
  given, generation, expected
):
  assert choose_sampling_params(given, generation) == expected


@pytest.mark.parametrize(("generation", "message"), [
  ({"temperature": "hot"}, "temperature='hot'"),
  ({"top_k": True}, "top_k=True"),
  ({"top_p": 1.5}, r"top_p=1.5, which must lie in \(0, 1\]"),
])
def test_recommended_sampling_must_be_in_range(generation, message):
  with pytest.raises(ValueError, match=f"generation_config.json has {message}"):
    choose_sampling_params({}, generation)
