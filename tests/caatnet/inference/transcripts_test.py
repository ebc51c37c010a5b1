"""Properties of transcripts: text, tokens and reason of a completion."""

import pytest
import tokenizers

from caatnet.data.tokenizers import ByteTokenizer, LibraryTokenizer
from caatnet.inference.requests import Request
from caatnet.inference.stops import Stops
from caatnet.inference.transcripts import Transcript


def follow(text, stops, context=99):
  """Pushes the bytes of a text until the end; returns the text given out."""
  transcript = Transcript(Request((1, 2), stops), ByteTokenizer(), context)
  given = [
    transcript.push(byte, -float(i))
    for i, byte in enumerate(text.encode()) if not transcript.ended
  ]
  return transcript, "".join(given)


@pytest.mark.parametrize(
  ("stops", "context", "text", "num_tokens", "reason"),
  [
    (Stops(3), 99, "abc", 3, "max_tokens"),
    (Stops(9), 5, "abc", 3, "context"),  # the prompt has two tokens
    (Stops(9, strings=("cd",)), 99, "ab", 4, "stop_string"),
    (Stops(9, frozenset({ord("d")})), 99, "abc", 4, "stop_id"),
  ],
)
def test_completion_has_all_tokens_and_the_text_before_the_end(
  stops, context, text, num_tokens, reason
):
  transcript, given = follow("abcdefghijkl", stops, context)
  assert given == text
  completion = transcript.completion
  assert completion.text == text
  assert completion.tokens == tuple(b"abcdefghijkl"[:num_tokens])
  assert completion.logprobs == tuple(-float(i) for i in range(num_tokens))
  assert completion.reason == reason


def test_interrupt_gives_the_held_text():
  transcript, given = follow("abc", Stops(9, strings=("cd",)))
  assert (given, transcript.ended) == ("ab", False)
  assert transcript.interrupt() == "c"
  assert transcript.completion.text == "abc"
  assert transcript.completion.reason == "interrupted"
  assert transcript.interrupt() == ""  # gives it only once
  assert transcript.completion.text == "abc"


def test_interrupt_does_not_change_an_ended_transcript():
  transcript, _ = follow("abc", Stops(3))
  transcript.interrupt()
  assert transcript.completion.reason == "max_tokens"


@pytest.mark.parametrize(("stops", "context", "pages"), [
  (Stops(6), 99, 2), (Stops(7), 99, 3), (Stops(99), 8, 2), (Stops(99), 9, 3),
])
def test_pages_hold_the_prompt_and_the_longest_text(stops, context, pages):
  transcript = Transcript(Request((1, 2), stops), ByteTokenizer(), context)
  assert transcript.num_pages(4) == pages
  assert transcript.max_tokens == min(stops.max_tokens, context - 2)


def test_text_begins_after_the_prompt():
  """Even if the prompt ends within a character."""
  prompt = tuple("long prompts end in \u20ac".encode()[:-1])
  transcript = Transcript(Request(prompt, Stops(9)), ByteTokenizer(), 99)
  assert transcript.push(ord("a"), 0.0) == "a"
  assert transcript.text == "a"


def test_first_word_keeps_the_space_before_it():
  """Decoded alone, the word would start without a space."""
  vocabulary = {"\u2581a": 0, "\u2581b": 1, "c": 2, "?": 3}
  library = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(vocabulary, unk_token="?")
  )
  library.decoder = tokenizers.decoders.Metaspace()
  tokenizer = LibraryTokenizer(
    "words", {"tokenizer.json": library.to_str()}, "words"
  )
  assert tokenizer.decode([1, 2]) == "bc"
  transcript = Transcript(Request((0,), Stops(2)), tokenizer, 99)
  assert transcript.push(1, 0.0) + transcript.push(2, 0.0) == " bc"
