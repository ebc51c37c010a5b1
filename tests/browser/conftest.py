"""Chromium from PATH for tests of pages, which are skipped without it."""

import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# Folder for screenshots; none are written if unset.
PICTURES = os.environ.get("PICTURES", "")


@pytest.fixture(scope="module")
def browser():
  path = next(filter(None, map(shutil.which, NAMES)), None)
  if path is None:
    pytest.skip(f"none of {', '.join(NAMES)} is on PATH")
  sync_api = pytest.importorskip(
    "playwright.sync_api", reason="the extra browser is not installed"
  )
  with sync_api.sync_playwright() as playwright:
    found = playwright.chromium.launch(
      executable_path=path, args=["--no-sandbox"]
    )
    yield found
    found.close()


