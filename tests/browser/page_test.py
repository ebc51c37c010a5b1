"""Dashboard of the server in Chromium: displayed state, and no other origin."""

import asyncio
import pathlib
import threading

import httpx2
import pytest

pytest.importorskip("playwright", reason="the extra browser is not installed")

from playwright import sync_api

from tests.browser.conftest import PICTURES
from tests.caatnet.serving import small_server


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_shows_running_requests(browser, scheme):
  with small_server.running() as server:
    page = browser.new_page(
      color_scheme=scheme, viewport={"width": 1100, "height": 900}
    )
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: message.type == "error"
            and errors.append(message.text))
    page.goto(server.url)
    sync_api.expect(page.locator("#model")).to_have_text("small")
    sync_api.expect(page.get_by_role("status")).to_have_text("ok")
    sync_api.expect(page.locator("#none")).to_be_visible()
    work = threading.Thread(target=asyncio.run, args=(_serve(server, 60),))
    work.start()
    sync_api.expect(page.locator("#rows tr")).not_to_have_count(0)
    if PICTURES:
      page.screenshot(path=pathlib.Path(PICTURES) / f"page_{scheme}.png")
    label = page.get_by_role("img").get_attribute("aria-label")
    work.join()
    assert "held" in label
    assert "cached" in label
    assert {url.removeprefix(server.url) for url in asked} == {"/", "/state"}
    assert errors == []
    # The colours of the two schemes differ.
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, dark[4:-1].split(","))) < 300) == (scheme == "dark")


async def _serve(server, count):
  async with httpx2.AsyncClient(timeout=60) as client:
    await asyncio.gather(*(
      client.post(f"{server.url}/v1/completions", json={
        "model": "small", "prompt": "shared beginning" + "abcdefghijkl"[i % 12],
        "max_tokens": 70, "ignore_eos": True, "seed": i,
      })
      for i in range(count)
    ))


def test_page_asks_for_a_key(browser):
  with small_server.running(key="secret") as server:
    page = browser.new_page()
    page.goto(server.url)
    page.get_by_label("This server asks for a key:").fill("secret")
    page.get_by_role("button", name="Show").click()
    sync_api.expect(page.locator("#model")).to_have_text("small")
    sync_api.expect(page.locator("#locked")).to_be_hidden()
