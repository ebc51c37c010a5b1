"""Schema of claims: what a paper published, what was seen here, the verdict.

Each file docs/claims/PAPER.toml holds the claims of one paper of
docs/papers.toml. `Claim.verdict` is computed from the numbers, for quantities
that were measured or counted here and for those that a model of ours predicts.
Numbers that a free parameter was fitted to never support a claim.
"""

from collections.abc import Sequence
import datetime
import re
from typing import Annotated, Any, Literal

import pydantic

from docs import log
from docs.points import format_mean_and_range, mean

Source = Literal["paper", "code", "arithmetic", "unverified"]
Relation = Literal["equal", "at most", "at least", "below", "above"]
Statistic = Literal[
  "", "min", "max", "mean", "median", "sum", "count"
]
# "computed" gives the verdict "reproduced" or "not reproduced", "predicted" one
# on models (`Claim.verdict`); either may give "fitted to the figure".
Judgement = Literal["computed", "predicted", "cannot be tested here"]
EntryName = Annotated[
  str, pydantic.StringConstraints(pattern=f"^{log.NAME_PATTERN}$")
]
# Numbers that prose must take from a field: decimals, percentages, multiples,
# and integers of three digits or more.
_FIGURE_PATTERN = re.compile(
  r"(?<![\w.,-])[+-]?(\d[\d,]*\.\d+|\d+ ?%|\d+x\b|\d{3,}|\d{1,3}(,\d{3})+)"
)
# Text in which digits are names: code, identifiers of arXiv, dates, references.
_NAME_PATTERN = re.compile(
  r"`[^`]*`|\{[^{}]*\}|<!--.*?-->|arXiv \d{4}\.\d{5}|\d{4}-\d\d-\d\d"
  r"|\bp = \d(?:\.\d+)?|\b(?:section|claim|vLLM|LLMServingSim|Llama|RTX) "
  r"\d+(?:\.\d+)*B?"
)


_FITTED = "fitted to the figure"


class SeedMean(float):
  """Mean over seeds; the format "spread" gives mean (least to most).

  Example:
    >>> from docs.claim_schema import SeedMean
    >>> f"{SeedMean([0.25, 0.5]):.3f} {SeedMean([0.25, 0.5]):spread}"
    '0.375 +0.375 (+0.250 to +0.500)'
  """

  def __new__(cls, seeds: Sequence[float]) -> "SeedMean":
    made = super().__new__(cls, mean(seeds))
    made.seeds = tuple(seeds)
    return made

  @property
  def min(self) -> float:
    return min(self.seeds)

  @property
  def max(self) -> float:
    return max(self.seeds)

  def __format__(self, spec: str) -> str:
    if spec == "spread":
      return format_mean_and_range(self.seeds)
    if spec == "percents":  # "3%" or "2 to 3%"
      low, high = (round(100 * x) for x in (self.min, self.max))
      return f"{low}%" if low == high else f"{low} to {high}%"
    if spec == "times":  # a factor, with a decimal if it is small
      return format(float(self), ".0f" if self >= 20 else ".1f")
    return format(float(self), spec)


class _Model(pydantic.BaseModel):
  model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Tolerance(_Model):
  """Allowed deviation: the larger of `absolute` and `relative` * value."""

  relative: float = pydantic.Field(0.0, ge=0)
  absolute: float = pydantic.Field(0.0, ge=0)

  def of(self, value: float) -> float:
    """Returns the tolerance in the unit of a value."""
    return max(self.absolute, self.relative * abs(value))


EXACT = Tolerance()
# Tolerance of predictions whose criterion has none. With rates and a correction
# fitted to the same machine, our step model has a median error of 6.3% on
# measured steps (results/calibration.json); papers print two or three digits.
PREDICTION_TOLERANCE = Tolerance(relative=0.1)


class Quantity(_Model):
  """Published value and its unit."""

  value: float
  unit: str = ""


class PublishedClaim(_Model):
  """Published claim: its text, its values, and where the claim was read."""

  text: str
  source: Source
  values: dict[str, Quantity] = {}


class Criterion(Tolerance):
  """Condition under which a claim holds: our value against a published one.

  Attributes:
    name: Name of the published value that is the bound; "" for `number`.
    number: Bound of a claim without a published value, such as 0 for a claim
      about a sign.
    relation: Comparison of our value, of each seed, with the bound.
    neutral: Value that means no effect: 1 for a speedup. The relative tolerance
      is a share of the published effect, and "equal" needs effects of the same
      sign, whatever the tolerance.
  """

  name: str = ""
  number: float | None = None
  relation: Relation = "equal"
  neutral: float = 0.0

  def slack(self, bound: float, default: Tolerance = EXACT) -> float:
    """Returns the tolerance, or the default one, in the unit of the bound."""
    is_own = self.model_fields_set & {"relative", "absolute"}
    return (self if is_own else default).of(bound - self.neutral)

  def holds(
    self, values: Sequence[float], bound: float,
    default: Tolerance = EXACT,
  ) -> bool:
    """Returns whether each value has the relation to the bound."""
    slack = self.slack(bound, default)
    effect = bound - self.neutral
    return all(
      {
        "equal": abs(value - bound) <= slack
        and not (value - self.neutral) * effect < 0,
        "at most": value <= bound + slack,
        "at least": value >= bound - slack,
        "below": value < bound - slack,
        "above": value > bound + slack,
      }[self.relation]
      for value in values
    )


class ExpectedNumber(_Model):
  """Named number that this codebase gives, and how it is read.

  Attributes:
    value: Recorded value, or one value per seed.
    unit: Unit, for readers of the data.
    file: File in results/ that has the number.
    output: File that the command writes in its folder, instead of `file`.
    pointer: Key in a JSON file: names separated by "/"; an entry of a list is
      its index, "KEY=VALUE" (several are separated by ";"), or "*" for all;
      "*KEY=VALUE" for all that match.
    column: Column of a CSV file, one value per row.
    rows: Columns and their values that select rows of a CSV file.
    minus: Rows whose values are subtracted, seed by seed.
    printed: Regular expression with a group "value" on what is printed; with
      the statistic "count", the number of its matches is the value.
    statistic: Reduction of several values to one.
    ratio: Names of two expected numbers; the value is their quotient.
    scale: Factor by which the number that is read is multiplied.
    offset: Number that is added after scaling.
    log: Name of an entry in log/, the only record of a number that neither a
      file nor a command gives: "2026-11-22-multitree".
    against_published: Relation to a published value on which the verdict
      depends.
    fitted_to: Published values by which the number, a parameter behind it, or
      one of several readings of the paper was chosen. The verdict then does
      not depend on it.
    against_recorded: Tolerance of a number that is read again.
  """

  value: float | list[float]
  unit: str = ""
  file: str = ""
  output: str = ""
  pointer: str = ""
  column: str = ""
  rows: dict[str, str] = {}
  minus: dict[str, str] = {}
  printed: str = ""
  statistic: Statistic = ""
  ratio: list[str] = []
  scale: float = 1.0
  offset: float = 0.0
  log: EntryName = ""
  against_published: Criterion | None = None
  fitted_to: list[str] = []
  against_recorded: Tolerance = Tolerance(relative=1e-3)

  @property
  def values(self) -> list[float]:
    """The recorded value of each seed."""
    return self.value if isinstance(self.value, list) else [self.value]

  def agrees(self, seen: Sequence[float]) -> bool:
    """Returns whether values are within tolerance of the recorded ones."""
    return len(seen) == len(self.values) and all(
      abs(now - then) <= self.against_recorded.of(then)
      for now, then in zip(seen, self.values, strict=True)
    )

  @pydantic.model_validator(mode="after")
  def _has_one_reader(self) -> "ExpectedNumber":
    ways = (
      bool(self.file or self.output), bool(self.printed), bool(self.ratio),
      bool(self.log),
    )
    if sum(ways) != 1:
      raise ValueError(
        "exactly one of file, output, printed, ratio and log must be given"
      )
    if self.file and self.output:
      raise ValueError("file and output must not both be given")
    if (self.file or self.output) and not (self.pointer or self.column):
      raise ValueError("a file or output needs pointer or column")
    counted = self.statistic == "count"
    if self.printed and "(?P<value>" not in self.printed and not counted:
      raise ValueError("printed must have a group (?P<value>...)")
    if self.ratio and len(self.ratio) != 2:
      raise ValueError("ratio must have two names")
    return self


class Claim(_Model):
  """Published claim and what was seen of it here.

  Attributes:
    number: Section and number in CLAIMS.md, "3.10".
    title: Claim in one line, for the table.
    heading: Heading of its entry in CLAIMS.md.
    published: The published text and its values.
    conditions: Named settings of the runs, for placeholders.
    commands: Shell commands that give the numbers, run in this order.
    shown: Further commands that CLAIMS.md shows, which are not run.
    same_as: Number of another claim, whose commands give the numbers.
    note: Words in CLAIMS.md after the time that the commands take.
    budget_s: Seconds that the commands take on two cores.
    cannot_run: Reason why they are not run here.
    writes: File in results/ -> file that the commands write instead.
    reads: Keys of all expected numbers that are read from a file; a number's
      own keys take precedence.
    expected: Named numbers.
    judgement: "computed" or "predicted", or the verdict itself.
    checks: Entries in log/ on checks of the ledger (docs/ledger.md) that
      support the prediction; only for claims that are predicted.
    reproduced_if: Whether all criteria must hold, or any.
    scope: Words after "reproduced" in the verdict, which limit it.
    date: Day on which the numbers were seen.
    commit: Commit at which they were seen, if known.
    seen: Prose on what was seen, with placeholders.
    explanation: Prose after the verdict, with placeholders.
    after: Markdown after the entry in CLAIMS.md, such as a generated table.
  """

  number: Annotated[str, pydantic.StringConstraints(pattern=r"^\d+\.\d+$")]
  title: str
  heading: str = ""
  published: PublishedClaim
  conditions: dict[str, int | float | str] = {}
  commands: list[str] = []
  shown: list[str] = []
  same_as: str = ""
  note: str = ""
  budget_s: float | None = None
  cannot_run: str = ""
  writes: dict[str, str] = {}
  reads: dict[str, Any] = {}
  expected: dict[str, ExpectedNumber] = {}
  judgement: Judgement = "computed"
  checks: list[EntryName] = []
  reproduced_if: Literal["all", "any"] = "all"
  scope: str = ""
  date: datetime.date
  commit: str = ""
  seen: str
  explanation: str
  after: str = ""

  @property
  def order(self) -> tuple[int, ...]:
    """Key that sorts numbers: 3.9 before 3.10."""
    return tuple(map(int, self.number.split(".")))

  def criteria(self) -> dict[str, tuple[ExpectedNumber, Criterion, float]]:
    """Returns expected numbers with a criterion, and the bound of each."""
    found = {}
    for name, expected in self.expected.items():
      criterion = expected.against_published
      if criterion is not None:
        bound = criterion.number
        if criterion.name:
          bound = self.published.values[criterion.name].value
        found[name] = expected, criterion, bound
    return found

  def verdict(
    self, seen: dict[str, Sequence[float]] | None = None
  ) -> str:
    """Returns the verdict on recorded values, or on those in ``seen``.

    Args:
      seen: Values by the name of an expected number; recorded ones for names
        that are missing.
    """
    if self.judgement == "cannot be tested here":
      return self.judgement
    held = [held for *_, held in self.comparisons(seen)]
    if not held:
      return _FITTED if self._fitted_names() else "predicted, no figure"
    holds = all(held) if self.reproduced_if == "all" else any(held)
    if self.judgement == "predicted":
      return "predicted within tolerance" if holds else "predicted, misses"
    if not holds:
      return "not reproduced"
    return " ".join(["reproduced", self.scope]).strip()

  def comparisons(
    self, seen: dict[str, Sequence[float]] | None = None
  ) -> list[tuple[str, SeedMean, Criterion, float, float, bool]]:
    """Returns the comparisons that decide the verdict.

    Args:
      seen: Values by name, an argument of `verdict`.

    Returns:
      Name of an expected number, its values, criterion, bound, tolerance in the
      unit of the bound, and whether all values keep to it.
    """
    default = PREDICTION_TOLERANCE if self.judgement == "predicted" else EXACT
    found = []
    for name, (expected, criterion, bound) in self.criteria().items():
      values = (seen or {}).get(name, expected.values)
      if not expected.fitted_to:
        found.append((
          name, SeedMean(values), criterion, bound,
          criterion.slack(bound, default),
          criterion.holds(values, bound, default),
        ))
    return found

  def _fitted_names(self) -> set[str]:
    return {name for e in self.expected.values() for name in e.fitted_to}

  def fields(self) -> dict[str, Any]:
    """Returns the values of placeholders: published, seen and condition."""
    return {
      "published": _Names({
        name: SeedMean([q.value]) for name, q in self.published.values.items()
      }),
      "seen": _Names({
        name: SeedMean(e.values) for name, e in self.expected.items()
      }),
      "condition": _Names(self.conditions),
    }

  def filled(self, text: str) -> str:
    """Returns prose with its placeholders replaced by fields."""
    return text.format(**self.fields())

  @pydantic.model_validator(mode="before")
  @classmethod
  def _inherit_reads(cls, fields: dict[str, Any]) -> dict[str, Any]:
    expected = {
      name: number if {"printed", "ratio", "log"} & number.keys()
      else fields.get("reads", {}) | number
      for name, number in fields.get("expected", {}).items()
    }
    return fields | {"expected": expected}

  @pydantic.model_validator(mode="after")
  def _is_sound(self) -> "Claim":
    if bool(self.commands) and bool(self.same_as):
      raise ValueError("commands and same_as must not both be given")
    if self.commands and self.budget_s is None and not self.cannot_run:
      raise ValueError("commands need budget_s, or cannot_run with the reason")
    if not self.commands and not self.same_as and not self.cannot_run:
      raise ValueError("one of commands, same_as and cannot_run must be given")
    if self.checks and self.judgement != "predicted":
      raise ValueError(
        "checks must be given only for claims that are predicted"
      )
    self._check_criteria()
    texts = {
      "published.text": self.published.text, "seen": self.seen,
      "explanation": self.explanation,
    }
    for key, text in texts.items():
      try:
        self.filled(text)
      except (KeyError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"{key}: placeholder has no value: {error}") from error
      bare = _FIGURE_PATTERN.search(
        _NAME_PATTERN.sub(" ", " ".join(text.split()))
      )
      if bare:
        raise ValueError(
          f"{key}: the number {bare[0]!r} must be a placeholder, as in {{name}}"
        )
    return self

  def _check_criteria(self) -> None:
    for name, expected in self.expected.items():
      criterion = expected.against_published
      unknown = set(expected.ratio) - set(self.expected)
      if unknown:
        raise ValueError(
          f"expected.{name}: ratio must have names of expected numbers, got "
          f"{unknown.pop()!r}"
        )
      if criterion is None:
        continue
      if bool(criterion.name) == (criterion.number is not None):
        raise ValueError(
          f"expected.{name} must have a published name or a number"
        )
      if criterion.name and criterion.name not in self.published.values:
        raise ValueError(
          f"expected.{name}: published.values has no value {criterion.name!r}"
        )
    self._check_fits()
    if self.judgement == "computed" and not self.criteria():
      raise ValueError("judgement 'computed' needs a criterion")
    if self.published.source == "unverified" and self.verdict().startswith(
      ("reproduced", "predicted within")
    ):
      raise ValueError("an unverified claim must not be marked as reproduced")

  def _check_fits(self) -> None:
    unknown = self._fitted_names() - set(self.published.values)
    if unknown:
      raise ValueError(
        f"fitted_to: published.values has no value {min(unknown)!r}"
      )
    names = {
      c.name for _, c, _ in self.criteria().values()
    } | self._fitted_names()
    missing = set(self.published.values) - names
    if self.judgement == "predicted" and missing:
      raise ValueError(
        f"published.values.{min(missing)}: a prediction needs a number with "
        "against_published or fitted_to for each published value"
      )


class Claims(_Model):
  """Content of one file docs/claims/PAPER.toml."""

  claims: list[Claim]


class _Names:
  """Namespace with values as attributes, for placeholders as ``seen.ratio``."""

  def __init__(self, values: dict[str, Any]) -> None:
    self.__dict__.update(values)
