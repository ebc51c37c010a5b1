"""Each operator on small sources, and what is never mutated."""

import pytest

from tests.mutation.candidates import candidates, is_distinct
from tests.mutation.operators import OPERATORS

# operator -> source, and what it becomes
CASES = [
  ("comparison", "x = a < b", {"x = (a <= b)", "x = (a > b)"}),
  ("comparison", "x = a in b", {"x = (a not in b)"}),
  ("comparison", "x = 0 < a == b", {
    "x = (0 <= a == b)", "x = (0 > a == b)", "x = (0 < a != b)",
  }),
  ("sign", "x = -a", {"x = (a)"}),
  ("sign", "x = (a + b) * c", {"x = ((a + b) / c)", "x = ((a - b)) * c"}),
  ("sign", "x += a", {"x -= a"}),
  ("sign", "x = [1] + a", set()),
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
  ("constant", "x = .5", {"x = (1.0)"}),
  ("constant", "x = 0.0", {"x = (1.0)"}),
  ("constant", "x = True", {"x = (False)"}),
  ("constant", "x = 8", {"x = (16)"}),
  ("removed_statement", "x.a = 1", {"pass"}),
  ("removed_statement", "x = f(x)", {"pass"}),
  ("removed_statement", "x = f(y)", set()),
  ("removed_statement", "raise ValueError(1 + 2)", {"pass"}),
  ("removed_statement", "f(\n  a,\n)\ny = 0", {"pass\n\n\ny = 0"}),
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
    m.apply(source) for m in candidates(source, "a.py")
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
  "x: tuple[1]",
  "@cache(maxsize=8)\ndef f(): ...",
  "import a",
  "assert a < b",
  'x = f"{a + 1}"',
  "logging.info(a, b)",
  "LOG.info(a, b)",
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
  for m in candidates(source, "a.py"):
    assert m.apply(source).count("\n") == source.count("\n")
  assert "x = ((a - b\n)\n)\ny = 'é' < c\n" in mutated(source, "sign")
  assert "x = (a\n  + b\n)\ny = ('é' <= c)\n" in mutated(source, "comparison")


def test_the_same_code_is_no_mutant():
  source = "x = 2 * 1\n"
  same = {
    m.apply(source) for m in candidates(source, "a.py")
    if not is_distinct(source, m)
  }
  assert same == {"x = (2)\n"}


def test_identities_tell_equal_changes_apart_and_survive_edits():
  source = "def f(a):\n  a += 1\n  a += 1\n"
  before = {m.identity for m in candidates(source, "a.py")}
  assert len(before) == len(candidates(source, "a.py"))
  edited = "# A comment.\n\nb = 1\n\n" + source
  assert before <= {m.identity for m in candidates(edited, "a.py")}
