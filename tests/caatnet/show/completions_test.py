"""What is printed of completions: all of the text, and nothing obeyed."""

import json
import sys

from caatnet.data.tokenizers import Bytes
from caatnet.inference.requests import Completion
from caatnet.serving.generate import Speed
from caatnet.show import completions


def completion(text, reason="max_tokens"):
  tokens = tuple(text.encode())
  return Completion(text, tokens, tuple(-0.5 * i for i in tokens), reason)


def show(prompts, texts, pieces=(), as_json=False, logprobs=False):
  screen = completions.Screen(prompts, Bytes(), as_json, logprobs)
  with screen:
    for piece in pieces:
      screen.on_text(0, piece)
    for index in range(len(prompts)):
      screen.on_end(index)
  screen.show([completion(text) for text in texts])


def test_one_prompt_s_text_comes_in_pieces_and_once(capsys):
  show(["def "], ["f(x):"], pieces=["f(", "x):"])
  assert capsys.readouterr().out == "f(x):\n"


def test_many_texts_are_under_their_prompts(capsys):
  show(["def ", "a\nb"], ["f(x):", "c\n"], pieces=["f("])
  assert capsys.readouterr().out == "1: 'def '\nf(x):\n\n2: 'a\\nb'\nc\n\n\n"


def test_json_has_a_line_for_each_prompt(capsys):
  show(["a"], ["b\x1b\n"], pieces=["b"], as_json=True)
  show(["a", "\u20ac"], ["b", ""], as_json=True, logprobs=True)
  first, second, third = map(
    json.loads, capsys.readouterr().out.splitlines()
  )
  assert first == {
    "prompt": "a", "text": "b\x1b\n", "reason": "max_tokens",
    "tokens": [98, 27, 10],
  }
  assert second["logprobs"] == [-49.0]
  assert (third["prompt"], third["text"]) == ("\u20ac", "")


def test_a_terminal_is_not_told_what_to_do(capsys, monkeypatch):
  show(["a"], ["b\x1b[2J\tc\n"], pieces=["b\x1b[2J\tc\n"])
  assert "\x1b" in capsys.readouterr().out  # a file gets what was written
  monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
  show(["a"], ["b\x1b[2J\tc\n"], pieces=["b\x1b[2J\tc\n"])
  assert capsys.readouterr().out.startswith("b\ufffd[2J\tc\n")


def test_log_probabilities_are_by_token(capsys):
  show(["a"], ["b\n"], pieces=["b\n"], logprobs=True)
  out = capsys.readouterr().out
  assert "'b'" in out
  assert r"'\n'" in out
  assert "-49.0000" in out


def test_an_interrupt_says_how_many_had_ended(capsys):
  screen = completions.Screen(["a", "b", "c"], Bytes(), False, False)
  screen.show([completion("x"), completion("y", "interrupted"),
               completion("", "interrupted")])
  assert "interrupted: 1 of 3 prompts were finished" in capsys.readouterr().err


def test_speed_is_of_what_was_done(capsys):
  completions.print_speed(Speed(100, 0.5, 30, 2.0), 2, 1.25)
  completions.print_speed(Speed(), 1, 0.0)
  assert capsys.readouterr().err == (
    "prefill 100 tokens, 200 tokens/s; decode 30 tokens, 15 tokens/s; 2 "
    "programs compiled in 1.2 s\n1 program compiled in 0.0 s\n"
  )
