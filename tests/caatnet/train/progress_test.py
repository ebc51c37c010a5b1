"""Progress of a run: lines in a file, a bar on a terminal."""

import types

from caatnet.train.progress import TrainProgress
from tests.caatnet.show import terminal


def test_line_is_printed_at_the_end_and_every_ten_seconds(capsys, monkeypatch):
  times = iter([100.0, 109.0, 110.0, 110.5, 110.5, 120.5, 121.0])
  clock = types.SimpleNamespace(monotonic=lambda: next(times))
  monkeypatch.setattr("caatnet.train.progress.time", clock)
  progress = TrainProgress("[b]run", 0, 5)
  expected = []
  # A line is printed 10.5 s after the start; 10 s later, none is.
  for step in range(1, 6):
    speed = None if step < 3 else 12_345.6
    progress.update(step, 2.0 / step, speed, "tokens")
    if step in (3, 5):
      expected.append(
        f"[b]run: step {step}/5  loss {2 / step:.4f}  12,346 tokens/s"
      )
  progress.say("[b]" + "x" * 200)
  progress.close()
  out = capsys.readouterr().out
  assert out.splitlines() == [*expected, "[b]" + "x" * 200]
  monkeypatch.undo()
  progress = TrainProgress("run", 0, 1, quiet=True)
  progress.update(1, 2.0, None, "tokens")
  progress.say("x")
  assert capsys.readouterr().out == ""


def test_terminal_has_a_bar_until_the_run_is_closed(monkeypatch):
  out = terminal.attach(monkeypatch, "stdout", width=120)
  progress = TrainProgress("run", 2, 5)
  assert "2/5" in out.text
  assert "compiling" in out.text
  progress.update(4, 0.5, None, "tokens")
  progress.say("a line 12")
  progress.update(5, 0.25, 1000.0, "tokens")
  progress.close()
  assert "a line 12\n" in out.getvalue()  # without colours
  last = out.text.splitlines()[-1]
  assert "5/5 loss 0.2500  1,000 tokens/s" in last
  assert out.getvalue().endswith("\x1b[?25h")  # the cursor is back
  size = len(out.getvalue())
  quiet = TrainProgress("run", 2, 5, quiet=True)
  quiet.update(3, 0.5, None, "tokens")
  quiet.close()
  assert len(out.getvalue()) == size
