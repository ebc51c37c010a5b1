"""Each operator on small sources, and what is never mutated."""

import pytest

from tests.mutation.operators import OPERATORS, draw, mutants

# operator -> source, and what it becomes
CASES = [
  ("comparison", "x = a < b", {"x = (a <= b)", "x = (a > b)"}),
  ("comparison", "x = 0 < a == b", {
    "x = (0 <= a == b)", "x = (0 > a == b)", "x = (0 < a != b)",
  }),
  ("sign", "x = -a", {"x = (a)"}),
  ("sign", "x = (a + b) * c", {"x = ((a + b) / c)", "x = ((a - b)) * c"}),
  ("sign", "x += a", {"x -= a"}),
  ("off_by_one", "x = a[1]", {"x = a[(2)]", "x = a[(0)]"}),
  ("off_by_one", "x = a[:n]", {"x = a[:(n + 1)]", "x = a[:(n - 1)]"}),
  ("off_by_one", "for i in range(n): pass", {
    "for i in range((n + 1)): pass", "for i in range((n - 1)): pass",
  }),
  ("dropped_term", "x = a - b", {"x = (a)"}),
  ("dropped_term", "x = a and b and c", {
    "x = (b and c)", "x = (a and c)", "x = (a and b)",
  }),
  ("dropped_term", "x = max(a, 1)", {"x = (a)", "x = (1)"}),
  ("swapped_arguments", "f(a, b, 1)", {"(f(b, a, 1))"}),
  ("swapped_arguments", "f(x=a, y=b)", {"(f(x=b, y=a))"}),
  ("swapped_arguments", "f(a, 1)", set()),
  ("swapped_arguments", "max(a, b)", set()),
  ("swapped_arguments", "x = a / b", {"x = (b / a)"}),
  ("constant", "x = 0.0", {"x = (1.0)"}),
  ("constant", "x = True", {"x = (False)"}),
  ("constant", "x = 8", {"x = (16)"}),
  ("removed_statement", "x.a = 1", {"pass"}),
  ("removed_statement", "x = f(x)", {"pass"}),
  ("removed_statement", "x = f(y)", set()),
  ("removed_statement", "raise ValueError(1 + 2)", {"pass"}),
  ("negated_condition", "if a: f()", {"if (not a): f()"}),
  ("negated_condition", "x = b if not a else c", {"x = b if (a) else c"}),
  ("negated_condition", "x = [a for a in b if a.c]", {
    "x = [a for a in b if (not a.c)]",
  }),
  ("wrong_axis", "f(a, axis=0)", {"f(a, axis=(1))"}),
  ("wrong_axis", "a.sum(b, -1)", {"a.sum(b, (-2))"}),
  ("wrong_axis", 'psum(a, "tensor")', {"psum(a, ('data'))"}),
  ("wrong_axis", "x = axes.data", {"x = (axes.tensor)"}),
]


def mutated(source, operator=None):
  return {
    m.apply(source) for m in mutants(source, "a.py")
    if operator in (None, m.operator)
  }


@pytest.mark.parametrize(("operator", "source", "wanted"), CASES)
def test_operators(operator, source, wanted):
  assert mutated(source, operator) == wanted


def test_every_operator_has_a_case():
  assert {operator for operator, _, wanted in CASES if wanted} == set(OPERATORS)


@pytest.mark.parametrize("source", [
  '"""1 + 2."""',
  "def f(a: tuple[1, 2]) -> 3: ...",
  "@cache(maxsize=8)\ndef f(): ...",
  "import a",
  "assert a < b",
  'x = f"{a + 1}"',
  "logging.getLogger(a).info(a, b)",
  "print(a + 1)",
  "x = zip(a, [], strict=True)",
  'if __name__ == "__main__":\n  f(1)',
  "if TYPE_CHECKING:\n  f(1)",
])
def test_what_does_not_compute_is_not_mutated(source):
  assert mutated(source) == set()


def test_messages_of_errors_are_not_mutated():
  assert mutated("raise ValueError(f(a, b), 1 + 2)") == {"pass"}


def test_lines_keep_their_numbers():
  source = "x = (a\n  + b\n)\ny = 'é' < c\n"
  for m in mutants(source, "a.py"):
    assert m.apply(source).count("\n") == source.count("\n")
  assert "x = ((a - b\n)\n)\ny = 'é' < c\n" in mutated(source, "sign")
  assert "x = (a\n  + b\n)\ny = ('é' <= c)\n" in mutated(source, "comparison")


def test_a_mutant_is_described_by_its_place_and_its_lines():
  mutant, = mutants("x = 1\ny = [\n  -a,\n]\n", "a.py")[2:]
  assert mutant.described("x = 1\ny = [\n  -a,\n]\n") == (
    "a.py:3 (sign)\n  - -a,\n  + (a),"
  )


TEXTS = {
  "long.py": "def f(a):\n" + "  a[0] = a[1] + 2\n" * 50,
  "short.py": "def g(a):\n  return a < 1\n\n\ndef h(a):\n  return a - 1\n",
}


def test_a_seed_gives_one_sample():
  assert draw(TEXTS, 9, "0") == draw(TEXTS, 9, "0")
  assert draw(TEXTS, 9, "0") != draw(TEXTS, 9, "1")
  assert draw(TEXTS, 9, "0")[:5] == draw(TEXTS, 5, "0")


def test_nothing_is_drawn_twice_and_all_that_compiles_can_be():
  every = [m for file, text in TEXTS.items() for m in mutants(text, file)]
  found = draw(TEXTS, 10_000, "0")
  assert len(set(found)) == len(found)
  assert set(found) == set(every)
  outside = {"a.py": "for i in a:\n  if i:\n    break\nb = [*c][0]\n"}
  for mutant in draw(outside, 10_000, "0"):
    compile(mutant.apply(outside["a.py"]), "a.py", "exec")


def test_short_files_are_represented():
  """In proportion to mutants, the short file would have 2%."""
  drawn = [draw(TEXTS, 1, str(seed))[0].file for seed in range(300)]
  assert 45 < drawn.count("short.py") < 120
