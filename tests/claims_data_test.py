"""Claims as data: their fields, their readers, verdicts and page."""

import json
import re
import tomllib

from hypothesis import given
from hypothesis import strategies as st
import pydantic
import pytest

from docs import claim_values, claims, log, papers, reproduce
from docs.claim_schema import Claim, Criterion, ExpectedNumber, SeedMean
from docs.points import ROOT

ALL = claims.load_ordered()
MODELS = {
  "predicted within tolerance", "predicted, misses", "fitted to the figure",
  "predicted, no figure",
}
VERDICTS = MODELS | {"reproduced", "not reproduced", "cannot be tested here"}


@pytest.mark.quick
def test_each_paper_of_the_registry_has_its_file():
  """Requires claims of registered papers only."""
  assert len(ALL) > 60
  assert set(claims.load()) <= {paper.key for paper in papers.load()}
  numbers = [claim.number for claim in ALL]
  assert len(set(numbers)) == len(numbers)


@pytest.mark.quick
def test_sections_have_no_gaps():
  last = (0, 0)
  for claim in ALL:
    section, entry = claim.order
    assert claim.order in ((last[0], last[1] + 1), (last[0] + 1, 1))
    last = section, entry


@pytest.mark.parametrize("claim", ALL, ids=lambda claim: claim.number)
def test_verdicts_follow_from_values(claim):
  verdict = claim.verdict()
  assert verdict.removesuffix(claim.scope).strip() in VERDICTS
  assert verdict in claims.overview()
  if claim.published.source == "unverified":
    assert not verdict.startswith(("reproduced", "predicted within"))


def predicted(claim):
  """The verdict on a model, from the file's numbers alone."""
  within, fitted = [], False
  values = claim["published"].get("values", {})
  for number in claim["expected"].values():
    given = number.get("against_published")
    fitted |= "fitted_to" in number
    if not given or "fitted_to" in number:
      continue
    bound = values[given["name"]]["value"] if "name" in given else (
      given["number"]
    )
    effect = bound - given.get("neutral", 0)
    slack = abs(effect) * given.get("relative", 0.1)
    seeds = number["value"]
    for value in seeds if isinstance(seeds, list) else [seeds]:
      away = value - bound
      signs = (value - given.get("neutral", 0)) * effect >= 0
      within.append({
        "equal": signs and abs(away) <= slack, "above": away > slack,
        "at least": away >= -slack, "at most": away <= slack,
      }[given.get("relation", "equal")])
  if within:
    return "predicted within tolerance" if all(within) else "predicted, misses"
  return "fitted to the figure" if fitted else "predicted, no figure"


@pytest.mark.quick
def test_predictions_have_the_verdict_of_their_numbers():
  """Computed again from the files; only claims without figures have none."""
  found = {}
  for path in claims.FOLDER.glob("*.toml"):
    for claim in tomllib.loads(path.read_text())["claims"]:
      if claim["judgement"] == "predicted":
        verdict = found[claim["number"]] = predicted(claim)
        has_values = "values" in claim["published"]
        assert has_values or verdict in (
          "predicted, misses", "predicted, no figure"
        )
        assert not has_values or verdict != "predicted, no figure", claim
  assert found == {c.number: c.verdict() for c in ALL if c.verdict() in MODELS}
  assert {*found.values()} == MODELS
  assert {found[n] for n in ("5.8", "9.5", "16.4", "17.1", "17.4")} == {
    "predicted, misses"
  }
  page = " ".join(claims.page().split())
  assert "0.8764, published 1.71, tolerance 0.071: outside, opposite" in page


@pytest.mark.parametrize("claim", ALL, ids=lambda claim: claim.number)
def test_keys_of_results_exist_and_have_the_recorded_values(claim):
  for name, expected in claim.expected.items():
    if expected.file:
      found = claim_values.read_one(expected, ROOT)
      assert expected.agrees(found), (name, found)
    if expected.ratio:
      over, under = (SeedMean(claim.expected[n].values) for n in expected.ratio)
      value = over / under * expected.scale
      assert SeedMean(expected.values) == pytest.approx(value, rel=1e-4), name


@pytest.mark.quick
def test_every_field_of_a_claim_is_used_by_its_prose():
  """A number is shown, decides the verdict, or is an operand of a ratio."""
  unused = []
  for claim in ALL:
    prose = " ".join([claim.published.text, claim.seen, claim.explanation])
    operands = [n for e in claim.expected.values() for n in e.ratio]
    decisive = list(claim.criteria())
    bounds = [
      e.against_published.name for e in claim.expected.values()
      if e.against_published is not None
    ] + [name for e in claim.expected.values() for name in e.fitted_to]
    for space, names in (
      ("seen", claim.expected), ("condition", claim.conditions),
      ("published", claim.published.values),
    ):
      for name in names:
        is_shown = any(f"{space}.{name}{end}" in prose for end in ":.}[")
        if not is_shown and name not in (*operands, *decisive, *bounds):
          unused.append(f"{claim.number} {space}.{name}")
  assert unused == []


def shown(claim, name):
  """The figures by which a claim's prose shows a number, or its value."""
  prose = " ".join([claim.seen, claim.explanation])
  fields = re.findall(rf"\{{seen\.{name}[:.\[][^}}]*\}}", prose)
  value = claim.expected[name].value
  return [claim.filled(field) for field in fields] or [f"{value:g}"]


@pytest.mark.quick
def test_entries_of_the_log_have_the_figures_that_claims_take_from_them():
  missing, count = [], 0
  for claim in ALL:
    for name, expected in claim.expected.items():
      if expected.log:
        text = log.path_of(expected.log).read_text()
        figures = shown(claim, name)
        count += len(figures)
        missing += [
          (claim.number, name, figure, expected.log) for figure in figures
          if not log.contains_figure(text, figure)
        ]
  assert missing == []
  assert count > 60


@pytest.mark.quick
def test_claims_link_to_entries_of_the_log_and_not_to_its_index():
  """Prose that names the log or an entry's file is a link to an entry."""
  links, others = set(), []
  for claim in ALL:
    prose = " ".join([claim.seen, claim.explanation, claim.note, claim.after])
    links |= set(re.findall(rf"\]\(log/({log.NAME_PATTERN})\.md\)", prose))
    rest = re.sub(rf"\]\(log/{log.NAME_PATTERN}\.md\)", "", prose)
    others += re.findall(r"\blog/|LOG\.md|recorded in the log", rest, re.I)
  assert others == []
  assert links != set()
  names = {path.stem for path in log.paths()}
  assert {name for name, _ in links} <= names


@pytest.mark.quick
def test_the_page_links_numbers_to_the_entries_that_record_them():
  page = " ".join(claims.page().split())
  for claim in ALL:
    entry = page.partition(f" ### {claim.number} ")[2].partition(" ### ")[0]
    for expected in claim.expected.values():
      assert not expected.log or log.link(expected.log) in entry, claim.number


@pytest.mark.quick
def test_predictions_list_the_checks_of_the_ledger_with_their_verdicts():
  page = " ".join(claims.page().split())
  for claim in ALL:
    entry = page.partition(f" ### {claim.number} ")[2].partition(" ### ")[0]
    listed = entry.partition("**Checks of the ledger**: ")[2]
    assert bool(listed) == (claim.judgement == "predicted"), claim.number
    assert listed.startswith("none") == bool(listed and not claim.checks)
    for name in claim.checks:
      entry = log.parse(name, log.path_of(name).read_text())
      text = f"{log.link(name)}: {entry.head['Question']} {entry.verdict}"
      assert text in listed, claim.number
    if listed and "compile" in " ".join([*claim.commands, *claim.shown]):
      assert claim.checks, claim.number


GOOD = {
  "number": "1.1", "title": "a claim", "date": "2026-11-25",
  "published": {
    "text": "{published.bytes:.0f} bytes", "source": "paper",
    "values": {"bytes": {"value": 8.0, "unit": "B"}},
  },
  "commands": ["true"], "budget_s": 1.0, "seen": "{seen.bytes:.1f}",
  "explanation": "",
  "expected": {
    "bytes": {
      "value": 8.1, "printed": "(?P<value>.)",
      "against_published": {"name": "bytes", "relative": 0.05},
    },
  },
}


def changed(**changes):
  """A sound claim with other fields; those that are None are left out."""
  fields = json.loads(json.dumps(GOOD))
  for key, value in changes.items():
    *path, last = key.split("__")
    place = fields
    for part in path:
      place = place[part]
    place[last] = value
    if value is None:
      del place[last]
  return fields


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"colour": "red"}, "colour"),
    ({"number": "1"}, "number"),
    ({"date": None}, "date"),
    ({"judgement": "likely"}, "judgement"),
    ({"checks": ["2026-11-27-chakra-traces"]}, "claims that are predicted"),
    ({"expected__bytes__fitted_to": ["size"]}, "published.values has no value"),
    ({"judgement": "predicted", "expected__bytes__against_published": None},
     "published.values.bytes: a prediction needs"),
    ({"judgement": "predicted", "published__source": "unverified"},
     "must not be marked as reproduced"),
    ({"expected__bytes__against_published__relative": -0.1}, "relative"),
    ({"published__source": "hearsay"}, "published.source"),
    ({"published__source": "unverified"}, "must not be marked as reproduced"),
    ({"seen": "{seen.byte:.1f}"}, "seen: placeholder"),
    ({"seen": "{seen.bytes:.1q}"}, "seen: placeholder"),
    ({"seen": "it is 8.1"}, "'8.1' must be a placeholder"),
    ({"explanation": "5% or 1234"}, "'5%' must be a placeholder"),
    ({"explanation": "1234 or so"}, "'1234' must be a placeholder"),
    ({"budget_s": None}, "budget_s, or cannot_run"),
    ({"commands": None}, "one of commands, same_as and cannot_run"),
    ({"same_as": "1.2"}, "must not both be given"),
    ({"expected__bytes__file": "results/x.json"}, "one of file, output"),
    ({"expected__bytes__printed": "."}, "P<value>"),
    ({"expected__bytes__log": "2026-11-25"}, "expected.bytes.log"),
    ({"expected__bytes__log": "2026-11-25-Ring"}, "expected.bytes.log"),
    ({"expected__bytes__against_published": None}, "needs a criterion"),
    ({"expected__bytes__against_published__name": "b"}, "values has no value"),
    ({"expected__bytes__against_published__number": 1.0}, "name or a number"),
    ({"judgement": "consistent"}, "judgement"),
  ],
)
def test_a_wrong_claim_is_refused_in_one_line(tmp_path, changes, message):
  path = tmp_path / "paper.toml"
  fields = changed(**changes)
  with pytest.raises(pydantic.ValidationError):
    Claim.model_validate(fields)
  path.write_text(_toml(fields))
  with pytest.raises(ValueError) as error:
    claims.load(tmp_path)
  (line,) = str(error.value).splitlines()
  assert line.startswith("paper.toml, claim 1")
  assert message in line


def _toml(fields):
  """A file with one claim; JSON's scalars and lists are TOML's."""
  lines = ["[[claims]]"]

  def write(table, place):
    nested = {k: v for k, v in table.items() if isinstance(v, dict)}
    for key, value in table.items():
      if key not in nested:
        lines.append(f"{key} = {json.dumps(value)}")
    for key, value in nested.items():
      lines.append(f"[{place}.{key}]")
      write(value, f"{place}.{key}")

  write(fields, "claims")
  return "\n".join(lines).replace('"2026-11-25"', "2026-11-25")


def test_numbers_are_unique_and_references_exist(tmp_path):
  (tmp_path / "a.toml").write_text(_toml(GOOD))
  assert claims.load(tmp_path)["a"][0].verdict() == "reproduced"
  (tmp_path / "b.toml").write_text(_toml(GOOD))
  with pytest.raises(ValueError, match=r"b\.toml, claim 1\.1: a\.toml also"):
    claims.load(tmp_path)
  other = changed(number="1.2", commands=None, same_as="1.3")
  (tmp_path / "b.toml").write_text(_toml(other))
  with pytest.raises(ValueError, match=r"same_as must be the number of a"):
    claims.load(tmp_path)
  other = changed(
    number="1.2", expected__bytes__printed=None,
    expected__bytes__log="2026-11-25-ring",
  )
  (tmp_path / "b.toml").write_text(_toml(other))
  missing = r"claim 1\.2: expected\.bytes\.log must be an entry of log/"
  with pytest.raises(ValueError, match=missing):
    claims.load(tmp_path)
  other = changed(
    number="1.2", judgement="predicted", checks=["2026-11-25-ring"]
  )
  (tmp_path / "b.toml").write_text(_toml(other))
  with pytest.raises(ValueError, match=r"checks must be an entry of log/"):
    claims.load(tmp_path)
  (tmp_path / "b.toml").write_text("claims = 1 2")
  with pytest.raises(ValueError, match=r"^b\.toml: "):
    claims.load(tmp_path)


FINITE = st.floats(-1e6, 1e6)
SHARES = st.floats(0, 1)


@given(FINITE, FINITE, SHARES, st.floats(0, 100))
def test_a_value_within_its_tolerance_is_reproduced(
  published, value, relative, absolute
):
  fields = changed(
    published__values__bytes__value=published, expected__bytes__value=value,
    expected__bytes__against_published__relative=relative,
    expected__bytes__against_published__absolute=absolute,
  )
  slack = max(absolute, relative * abs(published))
  verdict = Claim.model_validate(fields).verdict()
  within = abs(value - published) <= slack and not value * published < 0
  assert (verdict == "reproduced") == within


CASES = [  # published, values, keys of the criterion, verdict
  (8.0, 8.7, {}, "predicted within tolerance"),  # 10% by default
  (8.0, 8.9, {}, "predicted, misses"),
  (8.0, 8.9, {"relative": 0.2}, "predicted within tolerance"),
  (8.0, 8.1, {"relative": 0.0}, "predicted, misses"),
  (-0.1, 0.01, {"absolute": 1.0}, "predicted, misses"),  # opposite sign
  (-0.1, 0.0, {"absolute": 1.0}, "predicted within tolerance"),
  (0.0, 0.0, {}, "predicted within tolerance"),
  (0.0, 1e-9, {}, "predicted, misses"),
  (0.0, -0.5, {"absolute": 1.0}, "predicted within tolerance"),
  (1.07, 1.1, {}, "predicted within tolerance"),
  (1.07, 1.1, {"neutral": 1.0}, "predicted, misses"),  # 0.10 is not 0.07
  (1.07, 0.99, {"neutral": 1.0, "absolute": 1.0}, "predicted, misses"),
  (8.0, [7.5, 8.5], {}, "predicted within tolerance"),
  (8.0, [7.5, 9.5], {}, "predicted, misses"),  # one end of a range
  (8.0, 5.0, {"relation": "at most"}, "predicted within tolerance"),
  (8.0, 5.0, {"relation": "at least"}, "predicted, misses"),
]


@pytest.mark.parametrize(("published", "value", "keys", "verdict"), CASES)
def test_verdicts_on_predictions(published, value, keys, verdict):
  fields = changed(
    judgement="predicted", published__values__bytes__value=published,
    expected__bytes__value=value, seen="",
    expected__bytes__against_published={"name": "bytes", **keys},
  )
  assert Claim.model_validate(fields).verdict() == verdict
  fields["expected"]["fit"] = {"value": 1.0, "printed": "(?P<value>.)"} | {
    "fitted_to": ["bytes"]
  }
  assert Claim.model_validate(fields).verdict() == verdict
  fields["expected"]["bytes"]["fitted_to"] = ["bytes"]
  for judgement in ("predicted", "computed"):
    fields["judgement"] = judgement
    fitted = Claim.model_validate(fields)
    assert fitted.verdict({"bytes": [published]}) == "fitted to the figure"
    assert fitted.comparisons() == []


@given(st.lists(FINITE, min_size=1, max_size=5), FINITE)
def test_a_direction_holds_in_every_seed(values, bound):
  below = Criterion(number=bound, relation="below")
  above = Criterion(number=bound, relation="above")
  assert below.holds(values, bound) == all(v < bound for v in values)
  assert above.holds(values, bound) == all(v > bound for v in values)
  flipped = [2 * bound - v for v in values]  # on the other side
  if all(v != bound and f != bound
         for v, f in zip(values, flipped, strict=True)):
    assert below.holds(values, bound) == above.holds(flipped, bound)
  at_most = Criterion(number=bound, relation="at most")
  assert at_most.holds(values, bound) == (max(values) <= bound)


@given(st.lists(st.booleans(), min_size=1, max_size=4))
def test_all_or_any_criteria_decide(held):
  expected = {
    f"n{i}": {
      "value": float(good), "printed": "(?P<value>.)",
      "against_published": {"number": 1.0},
    }
    for i, good in enumerate(held)
  }
  for how, reproduced in (("all", all(held)), ("any", any(held))):
    claim = Claim.model_validate(
      changed(expected=expected, seen="", reproduced_if=how, scope="here")
    )
    wanted = "reproduced here" if reproduced else "not reproduced"
    assert claim.verdict() == wanted
  seen = {name: [1.0] for name in expected}
  assert claim.verdict(seen) == "reproduced here"


@given(st.lists(FINITE, min_size=1, max_size=4), st.floats(0, 0.5),
       st.floats(-2, 2))
def test_agreement_with_the_record(values, relative, shift):
  """Each seed counts: one that leaves its tolerance is enough."""
  expected = ExpectedNumber(
    value=values, log="2026-11-25-ring", against_recorded={"relative": relative}
  )
  assert expected.agrees(values)
  moved = [*values[:-1], values[-1] + shift]
  left = abs(moved[-1] - values[-1]) > relative * abs(values[-1])
  assert expected.agrees(moved) == (not left)
  assert not expected.agrees([*values, 0.0])


JSON = {
  "rows": [{"name": "a", "x": 1, "y": [4, 5]}, {"name": "b", "x": "8/7"}],
}


@pytest.mark.parametrize(
  ("reader", "values"),
  [
    ({"pointer": "/rows/0/x"}, [1]),
    ({"pointer": "/rows/name=b/x"}, [8 / 7]),
    ({"pointer": "/rows/name=a;x=1/y/*"}, [4, 5]),
    ({"pointer": "/rows/name=a/y/*", "statistic": "max", "scale": 0.5}, [2.5]),
    ({"pointer": "/rows/*/name", "statistic": "count"}, LookupError),
    ({"pointer": "/rows/name=c/x"}, LookupError),
    ({"pointer": "/lines"}, LookupError),
    ({"column": "loss", "rows": {"p": "1"}}, [1.5, 2.5]),
    ({"column": "loss", "rows": {"p": "0"}, "minus": {"p": "1"}}, [1.0, -1.0]),
    ({"column": "loss", "rows": {"p": "2"}}, LookupError),
  ],
)
def test_readers(tmp_path, reader, values):
  name = "x.csv" if "column" in reader else "x.json"
  (tmp_path / "x.json").write_text(json.dumps(JSON))
  (tmp_path / "x.csv").write_text("p,loss\n1,1.5\n1,2.5\n0,2.5\n0,1.5\n")
  expected = ExpectedNumber(value=0, output=name, **reader)
  if values is LookupError:
    with pytest.raises((LookupError, ValueError)):
      claim_values.read_one(expected, tmp_path)
  else:
    assert claim_values.read_one(expected, tmp_path) == pytest.approx(values)


def test_printed_text_is_read_and_what_is_missing_is_named(tmp_path):
  claim = Claim.model_validate(changed(
    expected__bytes__printed=r"sent (?P<value>[\d,.]+) B"
  ))
  seen = claim_values.read(claim, tmp_path, "it has\nsent 1,024.5 B\n")
  assert seen == {"bytes": [1024.5]}
  with pytest.raises(ValueError, match=r"claim 1\.1, bytes: nothing printed"):
    claim_values.read(claim, tmp_path, "sent nothing")


def test_the_page_has_every_claim_and_placeholders_are_filled():
  page = claims.page()
  for claim in ALL:
    assert f"\n### {claim.number} " in page
  assert "{seen." not in page
  assert "{condition." not in page
  assert "{published." not in page


def test_a_number_formats_as_a_spread():
  number = SeedMean([0.01, -0.02, 0.04])
  assert f"{number:spread}" == "+0.010 (-0.020 to +0.040)"
  assert f"{number:.2f} {number.min:+.1%}" == "0.01 -2.0%"
  assert f"{number:percents}" == "-2 to 4%"


def test_every_number_of_the_files_can_be_recorded_again():
  for paper, known in claims.load().items():
    text = (claims.FOLDER / f"{paper}.toml").read_text()
    for claim in known:
      values = {
        name: [value + 1.5 for value in expected.values]
        for name, expected in claim.expected.items()
      }
      made = tomllib.loads(reproduce.update_claim_text(
        text, claim.number, values, claim.date, claim.commit
      ))
      (entry,) = (c for c in made["claims"] if c["number"] == claim.number)
      for name, seeds in values.items():
        found = entry["expected"][name]["value"]
        found = found if isinstance(found, list) else [found]
        assert found == pytest.approx(seeds, rel=1e-5), name


def test_numbers_share_the_keys_of_how_they_are_read():
  number = {"value": 2.0, "pointer": "/b"}
  fields = changed() | {
    "reads": {"file": "a.json", "unit": "s", "pointer": "/a"},
    "expected": {
      "here": number, "there": {"value": 1.0},
      "quotient": {"value": 2.0, "ratio": ["here", "there"]},
    },
    "judgement": "predicted", "seen": "", "published": {
      "text": "", "source": "paper",
    },
  }
  claim = Claim.model_validate(fields)
  read = {n: (e.file, e.unit, e.pointer) for n, e in claim.expected.items()}
  assert read == {
    "here": ("a.json", "s", "/b"), "there": ("a.json", "s", "/a"),
    "quotient": ("", "", ""),
  }
