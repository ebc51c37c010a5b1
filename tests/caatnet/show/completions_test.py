"""Printed completions: complete text, without terminal control sequences."""

import io
import json
import math
import sys

import pytest

from caatnet.data.tokenizers import ByteTokenizer
from caatnet.inference.requests import Completion
from caatnet.serving.generate import Speed
from caatnet.show import completions
from tests.caatnet.show import terminal


def completion(text, reason="max_tokens"):
  tokens = tuple(text.encode())
  return Completion(text, tokens, tuple(-0.5 * i for i in tokens), reason)


def show(prompts, texts, pieces=(), as_json=False, logprobs=False):
  screen = completions.Screen(prompts, ByteTokenizer(), as_json, logprobs)
  with screen:
    for piece in pieces:
      screen.on_text(0, piece)
    for index in range(len(prompts)):
      screen.on_end(index)
  screen.show([completion(text) for text in texts])


def test_text_of_one_prompt_is_streamed_once(capsys):
  show(["def "], ["f(x):"], pieces=["f(", "x):"])
  assert capsys.readouterr().out == "f(x):\n"


def test_each_piece_is_visible_at_once(monkeypatch):
  """Flushes a stream that is not flushed at line ends."""
  raw = io.BytesIO()
  monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw))
  screen = completions.Screen(["a"], ByteTokenizer(), False, False)
  screen.on_text(0, "f(")
  assert raw.getvalue() == b"f("


def test_texts_of_several_prompts_follow_their_prompts(capsys):
  show(["def ", "a\nb"], ["f(x):", "c\n"], pieces=["f("])
  assert capsys.readouterr().out == "1: 'def '\nf(x):\n\n2: 'a\\nb'\nc\n\n\n"


def test_json_has_a_line_for_each_prompt(capsys):
  show(["a"], ["b\x1b\n"], pieces=["b"], as_json=True)
  show(["a", "\u20ac"], ["b", ""], as_json=True, logprobs=True)
  never = Completion("c", (99,), (-math.inf,), "max_tokens")
  completions.Screen(["a"], ByteTokenizer(), True, True).show([never])
  first, second, third, last = (
    json.loads(line, parse_constant=pytest.fail)
    for line in capsys.readouterr().out.splitlines()
  )
  assert first == {
    "prompt": "a", "text": "b\x1b\n", "reason": "max_tokens",
    "tokens": [98, 27, 10],
  }
  assert second["logprobs"] == [-49.0]
  assert (third["prompt"], third["text"]) == ("\u20ac", "")
  assert last["logprobs"] == [None]  # JSON has no infinity


def test_control_characters_are_replaced_on_a_terminal(capsys, monkeypatch):
  show(["a"], ["b\x1b[2J\tc\n"], pieces=["b\x1b[2J\tc\n"])
  assert "\x1b" in capsys.readouterr().out  # a file gets the exact text
  monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
  show(["a"], ["b\x1b[2J\tc\n"], pieces=["b\x1b[2J\tc\n"])
  assert capsys.readouterr().out.startswith("b\ufffd[2J\tc\n")


def test_exactly_the_control_characters_are_replaced(monkeypatch):
  """Those of ASCII and Latin-1, except for line ends and tabs."""
  text = "".join(map(chr, range(256)))
  out = terminal.attach(monkeypatch, "stdout")
  show(["a"], [text], pieces=[text])
  controls = {*range(32), *range(127, 160)} - {9, 10}
  assert out.getvalue() == "".join(
    "\ufffd" if code in controls else chr(code) for code in range(256)
  ) + "\n"


@pytest.mark.parametrize(("num", "as_json", "shown"), [
  (1, False, False), (1, True, True), (3, False, True), (2, True, True),
])
def test_progress_is_shown_where_no_text_is_streamed(
  monkeypatch, capsys, num, as_json, shown
):
  prompts = ["x"] * num
  show(prompts, prompts, as_json=as_json)
  assert capsys.readouterr().err == ""  # not in a log
  error = terminal.attach(monkeypatch)
  show(prompts, prompts, as_json=as_json)
  if not shown:
    assert error.text == ""
    return
  first, last = error.text.split()[0], error.text.split("\n")[0]
  assert first == "prompts"
  assert f"0/{num}" in last  # shown at once
  assert f"{num}/{num}" in error.text
  assert error.getvalue().endswith("\x1b[2K")  # and removed at the end
  assert "\x1b[?25h" in error.getvalue()  # the cursor is back


def test_headings_are_whole_and_without_markup(monkeypatch, capsys):
  prompts = ["[bold]" * 30, "b"]
  show(prompts, ["x", "y"])
  assert capsys.readouterr().out.splitlines()[0] == f"1: {prompts[0]!r}"
  out = terminal.attach(monkeypatch, "stdout")
  show(prompts, ["x", "y"])
  assert "\x1b[1m2: 'b'\x1b[0m\ny\n\n" in out.getvalue()


def test_log_probabilities_are_listed_by_token(capsys):
  show(["a"], ["b\n"], pieces=["b\n"], logprobs=True)
  out = capsys.readouterr().out
  assert out.startswith("b\n\n")
  assert list(terminal.tables(out.removeprefix("b\n\n")).values()) == [[
    ["text", "token", "log-probability"], ["'b'", "98", "-49.0000"],
    [r"'\n'", "10", "-5.0000"],
  ]]


def test_interrupt_reports_the_number_of_finished_prompts(capsys):
  screen = completions.Screen(["a", "b", "c"], ByteTokenizer(), False, False)
  screen.show([completion("x"), completion("y", "interrupted"),
               completion("", "interrupted")])
  assert capsys.readouterr().err == (
    "interrupted: 1 of 3 prompts were finished\n"
  )
  screen.show([completion("x")] * 3)
  assert capsys.readouterr().err == ""


def test_speed_is_tokens_by_time_of_each_phase(capsys):
  completions.print_speed(Speed(100, 0.5, 30, 2.0), 2, 1.25)
  completions.print_speed(Speed(), 1, 0.0)
  assert capsys.readouterr().err == (
    "prefill 100 tokens, 200 tokens/s; decode 30 tokens, 15 tokens/s; 2 "
    "programs compiled in 1.2 s\n1 program compiled in 0.0 s\n"
  )
