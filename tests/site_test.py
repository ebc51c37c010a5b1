"""The site of documents: pages, links, and the files that they link to."""

import pathlib

import pytest
import yaml

from docs import site

ROOT = site.ROOT


def test_pages_of_the_navigation_exist():
  config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

  def listed(entries):
    for entry in entries:
      (value,) = entry.values()
      yield from listed(value) if isinstance(value, list) else (value,)

  named = [*listed(config["nav"])]
  assert len(named) == len(set(named))
  found = {*map(str, site.pages()), "docs/glossary.md"}
  assert set(named) <= found
  # All documents are listed, but for single entries and recipes.
  rest = {name for name in found - set(named) if name.startswith("docs/")}
  assert rest == set()


def test_site_has_what_its_pages_link_to(tmp_path):
  site.write(tmp_path)
  copied = {
    path.relative_to(tmp_path) for path in tmp_path.rglob("*")
    if path.is_file()
  }
  assert {*site.pages()} <= copied
  for page in site.pages():
    assert site.linked_files(page) <= copied
  assert pathlib.Path("docs/loss_against_bytes.svg") in copied
  terms = (tmp_path / "docs" / "glossary.md").read_text()
  assert "**lane**" in terms
  assert "## Contracts" not in terms


@pytest.mark.parametrize("name", ["none.md", "../../outside.md"])
def test_link_to_nothing_is_an_error(tmp_path, name):
  (tmp_path.parent / "outside.md").write_text("x")
  folder = tmp_path / "docs"
  folder.mkdir()
  page = folder / "a.md"
  page.write_text(f"[x](https://a.b) [y](#z) [w]({name}#part)")
  with pytest.raises(ValueError, match=f"a.md has a link to {name}"):
    site.linked_files(pathlib.Path("docs/a.md"), tmp_path)
  page.write_text("[a](a.md#b)")
  found = site.linked_files(pathlib.Path("docs/a.md"), tmp_path)
  assert found == {pathlib.Path("docs/a.md")}
