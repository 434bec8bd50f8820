"""The console of `stockade serve` in a browser: what it shows, and what a page of other people's text may not do."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from conftest import Browser
from selenium.common.exceptions import JavascriptException
from selenium.webdriver.common.by import By
from serving import PROGRAM, Service, serving, wait_for

IMAGE = "<img src=x onerror=alert(1)>"
# It is refused a system call, and prints what a page would take for its own.
PROGRAM_TEXT = f"import ctypes, time\nprint({IMAGE!r})\nctypes.CDLL(None).ptrace(0, 0, 0, 0)\ntime.sleep(3)"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path) as service:
        yield service


def run(service: Service, code: str, **more: object) -> dict:
    body = json.dumps({"code": code, **more}).encode()
    fields = {"Authorization": f"Bearer {service.token}", "Content-Type": "application/json"}
    with urlopen(Request(f"{service.url}/v1/run", body, fields), timeout=60) as answer:
        return json.load(answer)


def eventually(is_so: Callable[[], object], seconds: float = 20) -> float:
    """How long it took."""
    begin = time.monotonic()
    while not is_so():
        assert time.monotonic() - begin < seconds, "did not come true in time"
        time.sleep(0.02)
    return time.monotonic() - begin


def test_a_run_is_shown_at_once_and_hostile_text_stays_text(service: Service, browser: Browser):
    browser.watch(service.url, service.token)
    eventually(lambda: browser.text("state").startswith("connected"))
    assert browser.text("runs-more") == "Nothing runs and nothing waits."
    labels = {"who": IMAGE, IMAGE: "<script>alert(1)</script>", "turned": "\u202etxt.exe"}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, service, PROGRAM_TEXT, id=IMAGE, language="python", labels=labels)
        shown_after = eventually(lambda: browser.rows("runs"))
        assert shown_after < 2
        eventually(lambda: browser.rows("runs")[0][0] == "running")
        (state, number, key, policy, language, about, text, _, _) = browser.rows("runs")[0]
        assert (state, key, policy, language, about) == ("running", "test", "default", "python", IMAGE)
        assert (
            f"who={IMAGE}" in text and f"{IMAGE}=<script>alert(1)</script>" in text and "turned=\ufffdtxt.exe" in text
        )
        assert browser.text("gauges").startswith("CPUs reserved by runs\n1 of ")
        result = running.result()
    assert (result["verdict"], result["run"]) == ("exited", number)
    assert eventually(lambda: browser.rows("ended")) < 2
    row = browser.rows("ended")[0]
    assert (row[1], row[3], row[7], row[13]) == ("exited", number, IMAGE, "1")
    assert browser.rows("runs") == []
    # The line is the one of the result.
    line = result["denials"][0]["allow"]
    eventually(lambda: any(row[4:] == ["ptrace", line] for row in browser.rows("denials")))
    eventually(lambda: ["exited", "1"] in browser.rows("counts"))
    assert browser.driver.find_elements(By.CSS_SELECTOR, "#chart rect.exited")
    assert browser.rows("keys")[0][:3] == ["test", "run, keep, facade, watch", "default"]
    policies = browser.driver.find_element(By.ID, "policies")
    policies.find_element(By.TAG_NAME, "summary").click()
    assert "network: none (loopback only)" in policies.text
    # Nothing of it became part of the page.
    assert browser.driver.find_elements(By.CSS_SELECTOR, "img, iframe, object, body script ~ script") == []
    asked = browser.requests()
    assert len(asked) > 4
    assert {request["method"] for request in asked} == {"GET"}
    assert all(request["url"].startswith(f"{service.url}/") and "sd_" not in request["url"] for request in asked)
    assert browser.complaints() == []


def test_the_key_is_nowhere_but_in_the_page(service: Service, browser: Browser):
    browser.watch(service.url, service.token)
    eventually(lambda: browser.text("state").startswith("connected"))
    places = "return [localStorage.length, sessionStorage.length, document.cookie, location.href, document.documentElement.outerHTML]"
    *kept, address, page = browser.driver.execute_script(places)
    assert kept == [0, 0, ""] and address == f"{service.url}/" and service.token not in page
    assert browser.driver.execute_script("return document.getElementById('token').value") == ""
    # Another load knows nothing of it.
    browser.driver.refresh()
    assert browser.text("state") == "not connected" and browser.driver.find_element(By.ID, "token").is_displayed()
    browser.type(service.token)
    eventually(lambda: browser.text("state").startswith("connected"))
    browser.driver.find_element(By.ID, "leave").click()
    assert browser.text("state") == "not connected" and not browser.driver.find_element(By.ID, "main").is_displayed()


def test_what_the_page_does_not_do_its_policy_forbids(service: Service, browser: Browser):
    browser.driver.get(service.url)
    browser.complaints(), browser.requests()
    do = browser.driver.execute_script
    with pytest.raises(JavascriptException, match="TrustedHTML"):
        do(f"document.body.innerHTML = '{IMAGE}'")
    # By elements, which the page could make: neither is loaded, and the browser says so.
    do("const image = document.createElement('img'); image.src = 'x'; document.body.append(image)")
    do("document.body.append(Object.assign(document.createElement('style'), { textContent: 'body { color: red }' }))")
    other = service.url.replace("127.0.0.1", "localhost")
    to_other = "const done = arguments[1]; fetch(arguments[0]).then(() => done('sent'), error => done(String(error)))"
    assert "TypeError" in browser.driver.execute_async_script(to_other, f"{other}/live")
    # The control: to its own it may send.
    assert browser.driver.execute_async_script(to_other, f"{service.url}/live") == "sent"
    said = "\n".join(browser.complaints())
    for part in ("img-src", "style-src", "connect-src"):
        assert part in said, said
    assert {request["url"] for request in browser.requests()} == {f"{service.url}/live"}


@contextmanager
def another_site(page: str) -> Iterator[str]:
    """The address of a page at another port."""

    class Site(BaseHTTPRequestHandler):
        # A browser keeps connections on which it asks nothing.
        timeout = 0.2

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_no_other_page_shows_it_in_a_frame(service: Service, browser: Browser):
    def framed(path: str) -> str:
        with another_site(f"<iframe src='{service.url}{path}'></iframe>") as site:
            browser.driver.get(site)
            browser.driver.switch_to.frame(0)
            return browser.driver.execute_script("return location.href + document.documentElement.textContent")

    assert framed("/").startswith("chrome-error:")
    # The control.
    shown = framed("/live")
    assert shown.startswith(f"{service.url}/live") and '"live":true' in shown


def test_a_wrong_key_is_told_and_another_may_be_typed(service: Service, browser: Browser):
    made = [PROGRAM, "key", "new", "runs", "--policy", "default", "--add", "--file", service.place / "keys.toml"]
    without = subprocess.run(made, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    browser.watch(service.url, "sd_test_wrong")
    eventually(lambda: "401 key_unknown: no key has this token" in browser.text("refused"))
    assert browser.text("state") == "not connected" and not browser.driver.find_element(By.ID, "main").is_displayed()
    browser.type("not a token")
    eventually(lambda: "a token begins with sd_" in browser.text("refused"))
    # The service reads its keys again, some of which may not watch.
    service.signal(signal.SIGHUP)
    browser.type(without)
    eventually(lambda: "403 scope_missing" in browser.text("refused") or browser.type(without))
    assert "needs" not in browser.text("state")
    browser.type(service.token)
    eventually(lambda: browser.text("state").startswith("connected"))
    assert browser.text("refused") == ""
    # A key that is taken away ends what it watches.
    keys = service.place / "keys.toml"
    keys.write_text(keys.read_text().replace(', "watch"]', "]"))
    service.signal(signal.SIGHUP)
    eventually(lambda: "403 scope_missing" in browser.text("refused"))


@contextmanager
def again(service: Service) -> Iterator[None]:
    """The same service, started anew."""
    with (service.place / "log").open("a") as log:
        child = subprocess.Popen([PROGRAM, "serve", "--config", service.place / "serve.toml"], stderr=log)
    try:
        wait_for(service, child)
        yield
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(60)


def test_the_page_goes_on_when_the_service_is_back(tmp_path: Path, browser: Browser):
    with serving(tmp_path) as service:
        browser.watch(service.url, service.token)
        eventually(lambda: browser.text("state").startswith("connected"))
        run(service, "print(1)", id="before")
        eventually(lambda: browser.rows("ended"))
    eventually(lambda: browser.text("state").startswith("not connected"))
    with again(service):
        eventually(lambda: browser.text("state").startswith("connected"))
        run(service, "print(2)", id="after")
        eventually(lambda: len(browser.rows("ended")) == 2)
        assert [row[7] for row in browser.rows("ended")] == ["after", "before"]
