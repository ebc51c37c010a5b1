"""Catalog of experts: revisions are readable while requests use them."""

import numpy as np
import pytest

from caatnet.serving.experts import Library
from caatnet.serving.router import Router
from caatnet.serving.server import catalog
from caatnet.serving.server.catalog import AUTO, Catalog
from caatnet.serving.server.errors import ApiError


def tree(value):
  return {"w": np.full((2, 3), value, np.float32)}


@pytest.fixture
def library(tmp_path):
  made = Library.create(tmp_path / "experts")
  for number, name in enumerate("abc"):
    made.add(name, tree(number), kind=name, origin="fine-tuned")
  return made


def value(found, opened):
  return found.read(opened.key).arrays["w"][0, 0]


def test_revision_is_kept_until_its_last_request_ends(library):
  found = Catalog(library, None, pinned=("a",))
  first, second = found.open("a", str), found.open("a", str)
  assert (first.name, first.key) == ("a", f"a@{library.entry('a').revision}")
  assert found.pinned == {first.key}
  library.replace("a", tree(9))
  third = found.open("a", str)
  assert (value(found, first), value(found, third)) == (0, 9)
  assert found.pinned == {third.key}
  found.close(first)
  assert found.retire() == []
  library.remove("a")
  assert value(found, second) == 0
  found.close(second)
  assert found.retire() == [first.key]
  with pytest.raises(ValueError, match="the expert was removed"):
    value(found, first)
  assert value(found, third) == 9
  found.close(third)
  assert found.retire() == [third.key]


def test_failed_file_is_opened_again(library):
  found = Catalog(library, None)
  opened = found.open("b", str)
  path = library.path / library.entry("b").file
  content = path.read_bytes()
  path.write_bytes(content[:-1])
  with pytest.raises(ValueError, match="truncated"):
    value(found, opened)
  with pytest.raises(ApiError, match="truncated") as error:
    found.open("b", str)
  assert error.value.status == 500
  path.unlink()
  path.write_bytes(content)  # another inode
  assert value(found, found.open("b", str)) == 1


def test_files_without_requests_are_closed_if_there_are_many(
  library, monkeypatch
):
  monkeypatch.setattr(catalog, "_MAX_FILES", 2)
  found = Catalog(library, None)
  opened = [found.open(name, str) for name in "abc"]
  found.close(opened[0])
  assert found.retire() == []
  with pytest.raises(ValueError, match="last load failed"):
    value(found, opened[0])
  assert [value(found, each) for each in opened[1:]] == [1, 2]
  assert value(found, found.open("a", str)) == 0


def test_router_selects_the_expert_of_a_prompt(library):
  weights = np.random.default_rng(0).standard_normal((32, 3), np.float32)
  router = Router(("a", "b", "x"), weights, np.zeros(3, np.float32))
  found = Catalog(library, router)
  assert found.names == (AUTO, "a", "b", "c")
  for text in ("one", "two", "three", "#include"):
    expected = router.route(text.encode(), library.entries)
    assert found.open(AUTO, lambda text=text: text).name == expected
  for name in "ab":
    library.remove(name)
  with pytest.raises(ApiError, match="no expert has one of the kinds"):
    found.open(AUTO, lambda: "one")


def test_tier_of_an_expert(library):
  found = Catalog(library, None)
  keys = [found.key(name) for name in "abc"]
  state = {"experts": {
    "host": [keys[0], keys[1]],
    "slots": [{"expert": keys[0], "state": "ready"},
              {"expert": keys[2], "state": "loading"}],
  }}
  tiers = [found.details(name, state)["tier"] for name in "abc"]
  assert tiers == ["device", "host", "loading"]
