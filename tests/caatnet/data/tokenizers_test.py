"""Properties of tokenizers: round trips, streams, templates and training."""

import datetime
import json
import os
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from caatnet.data import bpe, tokenizers
from caatnet.data.tokenizers import LibraryTokenizer
from tests.caatnet.data.small_tokenizers import (
  SUBJECTS,
  TEXTS,
  bpe_files,
  llama_files,
  subject,
  write,
)

# Letters that have tokens, share tokens, or take several.
DRAWN = st.text("ab c.\u00e9\u20ac\u2581\U0001f600\n\ufffd") | st.text(
  st.characters(exclude_categories=["Cs"])
)
MANY = settings(max_examples=60)
SPECIAL = ("<s>", "</s>", "<unk>", bpe.END)


@pytest.mark.quick
@pytest.mark.parametrize("name", SUBJECTS)
def test_text_round_trips(name):
  tokenizer = subject(name)

  @MANY
  @given(DRAWN)
  def law(text):
    if name in ("llama", "mistral"):  # both encode it as a space
      text = text.replace("\u2581", " ")
    if name == "mistral":  # does not keep leading spaces
      text = text.lstrip(" ")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    if not any(x in text for x in SPECIAL):
      assert tokenizer.decode(ids) == text

  law()


@pytest.mark.quick
@pytest.mark.parametrize("name", SUBJECTS)
def test_bytes_of_tokens_are_those_of_their_text(name):
  """Also of tokens that are part of a character."""
  tokenizer = subject(name)
  for token in range(tokenizer.vocab_size + 3):
    found = tokenizer.token_bytes(token)
    assert found is not None
    assert found.decode(errors="replace") == tokenizer.decode([token])
  for text in ("a\u20ac", "b\u00e9", "\U0001f600", "\ufffd"):
    parts = map(tokenizer.token_bytes, tokenizer.encode(text).tolist())
    assert b"".join(parts).strip() == text.encode()


@pytest.mark.quick
@pytest.mark.parametrize("name", SUBJECTS)
def test_stream_gives_the_text_of_all_tokens(name):
  """Draws any tokens, in every second list only tokens of a text."""
  tokenizer, rng = subject(name), np.random.default_rng(0)
  text = tokenizer.encode("a\u20ac b.\u00e9 \U0001f600c\ufffd " * 2)
  for trial in range(600):
    tokens = text if trial % 2 else np.arange(tokenizer.vocab_size + 3)
    ids = rng.choice(tokens, rng.integers(24))
    stream = tokenizer.stream()
    pieces = [stream.push(int(i)) for i in ids] + [stream.flush()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not stream.flush()


@pytest.mark.parametrize("name", SUBJECTS)
def test_stream_delays_only_incomplete_characters(name):
  """Holds back part of a character or a run of byte tokens."""
  tokenizer = subject(name)

  @MANY
  @given(st.text("ab c.\u00e9\u20ac"))
  def law(text):
    text = f"a{text}"
    stream, given_out, ids = tokenizer.stream(), "", []
    for i in tokenizer.encode(text):
      ids.append(i)
      given_out += stream.push(int(i))
      whole = tokenizer.decode(ids)
      assert given_out == whole or whole.endswith("\ufffd")
    assert given_out == text

  law()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_special_tokens_have_no_text(name):
  a = subject(name).encode("a b")
  assert subject(name).decode([1, *a[:1], 0, 1, *a[1:], 2]) == "a b"


def test_prompt_starts_with_the_special_tokens_of_the_library():
  """Follows the post-processor, and add_bos_token if it is set."""
  tokenizer = subject("llama")
  assert tokenizer.start_ids == (1,)
  assert 1 not in tokenizer.encode("a")
  assert subject("bpe").start_ids == ()
  for asked, expected in ((False, ()), (True, (1,))):
    files = dict(llama_files())
    config = json.loads(files["tokenizer_config.json"])
    files["tokenizer_config.json"] = json.dumps(
      config | {"add_bos_token": asked}
    )
    assert LibraryTokenizer("x", files, "x").start_ids == expected


@pytest.mark.parametrize(
  ("files", "stop", "separator"),
  [
    ({}, (), None),
    ({"tokenizer_config.json": {"eos_token": "</s>"}}, (2,), 2),
    ({"special_tokens_map.json": {"eos_token": {"content": "</s>"}}}, (2,), 2),
    ({"tokenizer_config.json": {"eos_token": None},
      "generation_config.json": {"eos_token_id": 7}}, (7,), 7),
    ({"tokenizer_config.json": {"eos_token": "</s>"},
      "generation_config.json": {"eos_token_id": [7, 2]}}, (7, 2), 2),
    ({"tokenizer_config.json": {"eos_token": "</s>"},
      "generation_config.json": {"max_length": 9}}, (2,), 2),
    ({"tokenizer_config.json": {"eos_token": "</s>"},
      "special_tokens_map.json": {"eos_token": "<s>"}}, (2,), 2),
    ({"generation_config.json": {"eos_token_id": [0, 271]}}, (0, 271), 0),
  ],
)
def test_stop_ids_and_separator_are_read_from_config_files(
  files, stop, separator
):
  texts = {name: json.dumps(facts) for name, facts in files.items()}
  texts["tokenizer.json"] = llama_files()["tokenizer.json"]
  found = LibraryTokenizer("x", texts, "x")
  assert (found.stop_ids, found.separator) == (stop, separator)


@pytest.mark.parametrize(
  ("generation", "model", "stop"),
  [
    (None, {"eos_token_id": [7, 8]}, (7, 8)),
    ({"temperature": 0.6}, {"eos_token_id": 7}, (7,)),
    ({"eos_token_id": 9}, {"eos_token_id": [7, 8]}, (9,)),
    (None, {"eos_token_id": None}, (2,)),
    (None, {"model": {"eos_token_id": 7}}, (2,)),
  ],
)
def test_stop_ids_of_the_model_apply_if_generation_config_has_none(
  tmp_path, generation, model, stop
):
  """A model may have several; ``eos_token`` is one. transformers agrees."""
  files = llama_files() | {
    "tokenizer_config.json": json.dumps({"eos_token": "</s>"}),
    "config.json": json.dumps(model),
  }
  if generation is not None:
    files["generation_config.json"] = json.dumps(generation)
  for name, text in files.items():
    (tmp_path / name).write_text(text)
  found = tokenizers.load(str(tmp_path))
  assert (found.stop_ids, found.separator) == (stop, 2)
  again = LibraryTokenizer("again", found.files, "again")  # as kept with a run
  assert again.stop_ids == stop
  assert (generation or {}).items() <= again.generation.items()


def test_identity_depends_only_on_what_changes_tokens():
  def identity(change, **others):
    main = json.loads(llama_files()["tokenizer.json"])
    change(main)
    texts = dict(llama_files()) | others
    texts["tokenizer.json"] = json.dumps(main, indent=7)
    return LibraryTokenizer("x", texts, "x").identity

  same = [
    identity(lambda main: None),
    identity(lambda main: main.update(dict(reversed(main.items())))),
    identity(lambda main: main.update(padding={
      "strategy": {"Fixed": 9}, "direction": "Right", "pad_id": 0,
      "pad_type_id": 0, "pad_token": "<unk>", "pad_to_multiple_of": None,
    })),
    identity(
      lambda main: None, **{"chat_template.jinja": "{{ messages }}"}
    ),
    subject("llama").identity,
  ]
  assert len(set(same)) == 1
  others = [
    identity(lambda main: main["model"]["merges"].pop()),
    identity(lambda main: main["model"]["vocab"].update({"new": 272})),
    identity(lambda main: main.update(normalizer=None)),
    identity(lambda main: main["decoder"]["decoders"].pop()),
    identity(
      lambda main: None,
      **{"tokenizer_config.json": '{"eos_token": "<s>"}'},
    ),
    identity(
      lambda main: None,
      **{"tokenizer_config.json":
         '{"eos_token": "</s>", "add_bos_token": false}'},
    ),
  ]
  assert len({*same, *others}) == 1 + len(others)


# Conversations ----------------------------------------------------------------

TEMPLATE = """{{ bos_token }}{% for m in messages %}
{% if m.role not in ["user", "assistant"] %}
{{ raise_exception("no " + m.role) }}
{% endif %}
[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""


def talking(template, **files):
  config = json.loads(llama_files()["tokenizer_config.json"])
  texts = llama_files() | files | {
    "tokenizer_config.json": json.dumps(config | {"chat_template": template})
  }
  return LibraryTokenizer("x", texts, "x")


def test_conversation_is_rendered_by_its_template():
  pytest.importorskip("jinja2")
  messages = [
    {"role": "user", "content": " a "}, {"role": "assistant", "content": "b"},
  ]
  expected = "<s>[user]a</s>[assistant]b</s>[assistant]"
  found = talking(TEMPLATE).chat(messages)
  assert found == expected
  assert list(subject("llama").encode(found)).count(2) == 2
  named = [{"name": "tool_use", "template": "x"},
           {"name": "default", "template": TEMPLATE}]
  assert talking(named).chat(messages) == expected
  file = {"chat_template.jinja": "{{ messages | tojson }}<"}
  assert talking(TEMPLATE, **file).chat([{"a": "<\u20ac>"}]) == (
    '[{"a": "<\u20ac>"}]<'
  )


@pytest.mark.parametrize(
  ("template", "message"),
  [
    (TEMPLATE, "the chat template fails: no system"),
    ("{% if", "the chat template fails: "),
    ("{{ messages[0].x.y }}", "has no attribute 'x'"),
    ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
    ("{{ ''.__class__.__mro__ }}", "attribute '__class__' .* is unsafe"),
    ("{{ 1 / 0 }}", "the chat template fails: division by zero"),
    ("{% for i in range(10 ** 9) %}{% endfor %}", "fails: Range too big"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: maximum recur"),
    ("{{ 'a'.encode('b') }}", "fails: unknown encoding: b"),
    (None, "x has no chat template, neither in tokenizer_config"),
    (["{{ messages }}"], "x has no chat template, neither in tokenizer_config"),
  ],
)
def test_template_can_refuse_but_not_escape_its_sandbox(template, message):
  pytest.importorskip("jinja2")
  with pytest.raises(ValueError, match=message) as error:
    talking(template).chat([{"role": "system", "content": "a"}])
  assert "\n" not in str(error.value)


def test_without_jinja2_its_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "jinja2", None)
  with pytest.raises(ValueError, match=r'pip install "caatnet\[chat\]"'):
    talking(TEMPLATE).chat([])
  with pytest.raises(ValueError, match="so it has no chat template"):
    subject("bytes").chat([])


def test_template_has_the_functions_of_transformers(monkeypatch):
  pytest.importorskip("jinja2")
  template = (
    "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}\n"
    "{{ m | tojson(indent=1) }}{% endfor %}{{ strftime_now('%d %b %Y') }}"
  )
  before = datetime.datetime.now()
  found = talking(template).chat([{"b": 1, "a": "<"}, {}])
  dates = [before, datetime.datetime.now()]  # around midnight
  assert found in {
    '{\n "b": 1,\n "a": "<"\n}' + date.strftime("%d %b %Y") for date in dates
  }


@pytest.mark.parametrize(("template", "expected"), [
  ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "<a>!"),
  ("{% if tools is not none %}{{ tools | length }}{% endif %}.", "."),
  ("{{ messages[0] | tojson(separators=(',', ':'), sort_keys=True) }}",
   '{"content":"<a>","role":"user"}'),
  ("{{ messages[0].content | tojson(ensure_ascii=True) }}", '"<a>"'),
  ("{{ enable_thinking is defined and not enable_thinking }}", "True"),
])
def test_template_renders_as_in_transformers(template, expected):
  """The language of templates is that of transformers."""
  pytest.importorskip("jinja2")
  messages = [{"role": "user", "content": "<a>"}]
  options = {"enable_thinking": False}
  assert talking(template).chat(messages, options) == expected


def test_option_cannot_replace_the_conversation():
  pytest.importorskip("jinja2")
  for name in ("messages", "add_generation_prompt", "bos_token"):
    with pytest.raises(ValueError, match=f"^{name} is not an option"):
      talking(TEMPLATE).chat([], {name: []})


# Training ---------------------------------------------------------------------


def test_equal_texts_give_equal_tokenizers():
  again = bpe.train_tokenizer(iter(TEXTS), 300)
  assert again == bpe_files()
  assert bpe.train_tokenizer(TEXTS[::-1], 300) == again
  assert bpe.train_tokenizer(TEXTS[:2], 300) != again
  assert subject("bpe").vocab_size == 300


def test_only_repeated_pairs_are_merged():
  assert json.loads(
    bpe.train_tokenizer(["abcdefg"], 300)["tokenizer.json"]
  )["model"][
    "merges"
  ] == []
  found = json.loads(
    bpe.train_tokenizer(["ab cd ab"], 300)["tokenizer.json"]
  )["model"]
  assert found["merges"] == [["a", "b"]]


def test_config_of_a_trained_tokenizer_has_its_end():
  config = json.loads(bpe_files()["tokenizer_config.json"])
  assert config["eos_token"] == bpe.END
  assert config["clean_up_tokenization_spaces"] is False
  assert all(text.endswith("}\n") for text in bpe_files().values())


def test_bytes_have_256_tokens_and_end_with_byte_0():
  tokenizer = subject("bytes")
  assert tokenizer.vocab_size == 256
  assert (tokenizer.separator, tokenizer.stop_ids) == (0, (0,))
  assert (tokenizer.start_ids, dict(tokenizer.files)) == ((), {})
  assert tokenizers.load("").identity == tokenizer.identity
  assert tokenizer.decode([97, 255, 256, 0]) == "a\ufffd\0"


def test_smallest_tokenizer_has_all_bytes():
  smallest = LibraryTokenizer("x", bpe_files(257), "x")
  assert smallest.vocab_size == 257
  text = "a\u20ac\0\xff"
  assert len(smallest.encode(text)) == len(text.encode())
  assert smallest.decode(smallest.encode(text)) == text
  assert smallest.stop_ids == (smallest.separator,) == (0,)
  with pytest.raises(ValueError, match="vocab_size=256 must be at least 257"):
    bpe.train_tokenizer(TEXTS, 256)


# Mistakes ---------------------------------------------------------------------

MAIN = "tokenizer.json"
# Each row: files to write, path to load, pattern of the error.
MISTAKES = {
  "missing": ({}, "no", "='.*no' does not exist"),
  "empty folder": ({}, "", "='.*' is an empty folder: no tokenizer.json"),
  "another folder": ({"a.txt": "a"}, "", "='.*' has no tokenizer.json$"),
  "sentencepiece": (
    {"tokenizer.model": "a"}, "",
    "has no tokenizer.json but tokenizer.model: models of sentencepiece are",
  ),
  "a sentencepiece file": (
    {"tokenizer.model": "a"}, "tokenizer.model",
    "model' is not a tokenizer.json: models of sentencepiece are not read",
  ),
  "not JSON": ({MAIN: "{"}, "", "tokenizer.json is not JSON: "),
  "not JSON, a file": ({"x.json": "{"}, "x.json", "x.json.*is not JSON: "),
  "a list": ({MAIN: "[]"}, "", "tokenizer.json is not a JSON object"),
  "another JSON": ({MAIN: "{}"}, "", "tokenizer.json is not a tokenizer: "),
  "a model of no kind": (
    {MAIN: '{"model": {"type": "magic"}}'}, MAIN,
    "tokenizer.json is not a tokenizer: ",
  ),
  "no text": ({MAIN: b"\xff\xfe"}, "", "tokenizer.json: 'utf-8' codec"),
  "config that is not JSON": (
    {MAIN: None, "tokenizer_config.json": "{"}, "",
    "tokenizer_config.json is not JSON: ",
  ),
  "an end that is no token": (
    {MAIN: None, "tokenizer_config.json": '{"eos_token": "<end>"}'}, "",
    "eos_token='<end>' is not a token of tokenizer.json",
  ),
  "an end that is no text": (
    {MAIN: None, "tokenizer_config.json": '{"eos_token": 2}'}, "",
    "tokenizer_config.json has an invalid value, eos_token=2",
  ),
  "an end beyond the vocabulary": (
    {MAIN: None, "generation_config.json": '{"eos_token_id": [2, 272]}'}, "",
    r"eos_token_id=\[2, 272\], but it must be at most 271",
  ),
  "an end below the vocabulary": (
    {MAIN: None, "generation_config.json": '{"eos_token_id": -1}'}, "",
    "eos_token_id=-1, but",
  ),
  "an end that is a truth value": (
    {MAIN: None, "generation_config.json": '{"eos_token_id": true}'}, "",
    "eos_token_id=True, but",
  ),
  "an end that is no number": (
    {MAIN: None, "generation_config.json": '{"eos_token_id": "2"}'}, "",
    "eos_token_id='2', but",
  ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_error_is_one_line_with_the_path(mistake, tmp_path):
  files, path, message = MISTAKES[mistake]
  for name, content in files.items():
    content = llama_files()[MAIN] if content is None else content
    content = content.encode() if isinstance(content, str) else content
    (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=message) as error:
    tokenizers.load(str(tmp_path / path))
  assert str(error.value).startswith(f"config.data.tokenizer='{tmp_path}")
  assert "\n" not in str(error.value)


def test_non_regular_file_is_refused_without_blocking(tmp_path):
  os.mkfifo(tmp_path / MAIN)
  with pytest.raises(ValueError, match="it is not a regular file"):
    tokenizers.load(str(tmp_path))


def test_tokenizer_is_loaded_from_a_file_or_its_folder(tmp_path):
  """Reads the other files of the folder only for a file with the usual name."""
  folder = write(tmp_path / "mine", llama_files())
  found = tokenizers.load(folder)
  assert (found.name, found.separator) == ("mine", 2)
  assert tokenizers.load(f"{folder}/{MAIN}").identity == found.identity
  (tmp_path / "mine" / MAIN).rename(tmp_path / "mine" / "other.json")
  alone = tokenizers.load(f"{folder}/other.json")
  assert (alone.name, alone.separator) == ("other.json", None)
  assert set(alone.files) == {MAIN}
