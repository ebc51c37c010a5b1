"""The datacentre's page in Chromium: sliders change results, nothing loads."""

import pathlib
import shutil

import pytest

pytest.importorskip("playwright", reason="the extra browser is not installed")

from playwright import sync_api

from caatnet.studies import registry
from caatnet.studies.datacentre import page as pages
from configs.datacentre import hundred_billion
from tests.browser.page_test import NAMES, PICTURES


def test_a_slider_changes_what_depends_on_it(tmp_path):
  path = next(filter(None, map(shutil.which, NAMES)), None)
  if path is None:
    pytest.skip(f"none of {', '.join(NAMES)} is on PATH")
  config = hundred_billion.get_config("test").to_dict()
  file = tmp_path / "page.html"
  file.write_text(pages.text(registry.find(config).run(config)))
  with sync_api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(
      executable_path=path, args=["--no-sandbox"]
    )
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(file.as_uri())
    days, racks = page.locator("#result-days"), page.locator("#result-racks")
    sync_api.expect(days).to_have_text("2,070 days")
    slider = page.locator("#knob-utilisation")
    slider.evaluate(
      "x => { x.value = 1; x.dispatchEvent(new Event('input')); }"
    )
    sync_api.expect(days).to_have_text("1,656 days")
    sync_api.expect(racks).to_have_text("23,300")
    if PICTURES:
      page.screenshot(
        path=pathlib.Path(PICTURES) / "datacentre.png", full_page=True
      )
    page.locator("#reset").click()
    sync_api.expect(days).to_have_text("2,070 days")
    assert (asked, errors) == ([file.as_uri()], [])
    browser.close()
