"""A browser that shows the console, and tells what it has asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service as Driver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

EVENTS = ("requestWillBeSent", "loadingFailed")


class Browser:
    """Debian's Chromium, without a window."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        # Its own sandbox needs what a container may lack; it shows nothing but what the tests serve.
        for option in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1280,1500"):
            options.add_argument(f"--{option}")
        options.add_argument(f"--user-data-dir={profile}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Driver("/usr/bin/chromedriver"))
        self.driver.set_page_load_timeout(30)

    def watch(self, url: str, token: str) -> None:
        """Shows the console, and types a token."""
        self.driver.get(url)
        self.type(token)

    def type(self, token: str) -> None:
        self.driver.find_element(By.ID, "token").send_keys(token, Keys.ENTER)

    def text(self, element: str) -> str:
        return self.driver.find_element(By.ID, element).text

    def rows(self, table: str) -> list[list[str]]:
        """The cells of each row, all of one moment."""
        script = (
            "return [...document.getElementById(arguments[0]).rows].map(row => [...row.cells].map(c => c.textContent))"
        )
        return self.driver.execute_script(script, table)

    def requests(self) -> list[dict]:
        """What pages have asked for since the last look. What a policy has held back has not left the browser."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        of = {kind: [one["params"] for one in messages if one["method"] == f"Network.{kind}"] for kind in EVENTS}
        held = {one["requestId"] for one in of["loadingFailed"] if one.get("blockedReason") == "csp"}
        sent = [one for one in of["requestWillBeSent"] if not one["documentURL"].startswith("chrome")]
        return [one["request"] for one in sent if one["requestId"] not in held]

    def complaints(self) -> list[str]:
        """What the console of the browser says since the last look, such as what a policy has refused."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "DEBUG"]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    shown = Browser(tmp_path / "profile")
    try:
        yield shown
    finally:
        shown.driver.quit()
