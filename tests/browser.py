"""Headless Chromium through playwright: a page's DOM, real clicks and keys, its errors and its requests.

The Chromium of this machine (tools/get_chromium.sh), so that playwright downloads none.
"""

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page at a time. `errors` and `requests` hold what it logged and asked for."""

    def __enter__(self):
        self._playwright = sync_playwright().start()
        self._chromium = self._playwright.chromium.launch(executable_path=CHROMIUM)
        return self

    def __exit__(self, *_):
        self._chromium.close()
        self._playwright.stop()

    def open(self, path, width=1000, height=900, dark=False):
        self.errors, self.requests = [], []
        for context in self._chromium.contexts:
            context.close()
        self._page = self._chromium.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            is_mobile=width < 600,
        )
        self._page.on("console", lambda said: self.errors.append(said) if said.type in ("error", "warning") else None)
        self._page.on("pageerror", lambda error: self.errors.append(error))  # a builtin is no handler to playwright
        self._page.on("request", lambda request: self.requests.append(request.url))
        self._page.goto(Path(path).resolve().as_uri())

    def value(self, expression):
        return self._page.evaluate(expression)

    def click(self, selector, index=0):
        """The mouse goes there and is pressed, as a person's would."""
        self._page.locator(selector).nth(index).click()

    def mouse(self, x, y):
        self._page.mouse.click(x, y)

    def key(self, key):
        self._page.keyboard.press(key)
