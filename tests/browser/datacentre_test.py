"""Page of the datacentre study in Chromium: sliders, and no requests."""

import pathlib

import pytest

pytest.importorskip("playwright", reason="the extra browser is not installed")

from playwright import sync_api

from caatnet.studies import registry
from caatnet.studies.datacentre import page as pages
from configs.datacentre import hundred_billion
from tests.browser.conftest import PICTURES


def test_slider_changes_dependent_results(browser, tmp_path):
  config = hundred_billion.get_config("test").to_dict()
  file = tmp_path / "page.html"
  result = registry.find(config).run(config)
  file.write_text(pages.render_html(result))
  page = browser.new_page(viewport={"width": 1300, "height": 900})
  asked, errors = [], []
  page.on("request", lambda request: asked.append(request.url))
  page.on("pageerror", lambda error: errors.append(str(error)))
  page.goto(file.as_uri())
  days, racks = page.locator("#result-days"), page.locator("#result-racks")
  sync_api.expect(days).to_have_text("2,070 days")
  move = "x => { x.value = %g; x.dispatchEvent(new Event('input')); }"
  page.locator("#knob-utilisation").evaluate(move % 1)
  sync_api.expect(days).to_have_text("1,656 days")
  sync_api.expect(racks).to_have_text("23,300")
  page.locator("#knob-chunks").evaluate(move % 0.5)  # 2.5 chunks
  sync_api.expect(page.locator("label", has=page.locator("#knob-chunks"))
                  .locator("output")).to_have_text("3")
  # The tornado has one scale: lengths are proportional to differences.
  bars, value = result["tornado"]["bars"][:12], result["tornado"]["value"]
  for end in ("low", "high"):
    lengths = page.locator(f"svg rect.{end}").evaluate_all(
      "all => all.map(x => Number(x.getAttribute('width')))"
    )
    changes = [abs(bar[end] - value) for bar in bars]
    largest = max(abs(b["low"] - b["high"]) for b in bars)
    assert len(lengths) == 12
    for length, change in zip(lengths, changes, strict=True):
      assert (length > 0) == (change > 0)
    scale = lengths[0] / changes[0]
    assert lengths == pytest.approx([scale * x for x in changes])
    assert largest * scale <= 560
  if PICTURES:
    page.screenshot(
      path=pathlib.Path(PICTURES) / "datacentre.png", full_page=True
    )
  page.locator("#reset").click()
  sync_api.expect(days).to_have_text("2,070 days")
  assert (asked, errors) == ([file.as_uri()], [])
