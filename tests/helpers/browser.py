"""Headless Chromium, driven through its DevTools over a pipe: no port, no network, no driver.

with Browser() as browser:
    page = browser.open(file, width=360, dark=True)
    page.evaluate("document.title")
    pixels = page.screenshot()
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--disable-extensions"),
    *("--disable-background-networking", "--remote-debugging-pipe"),
)


def executable() -> str | None:
    """The installed browser, None where there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """One process; ends with the block."""

    def __init__(self, seconds: float = 60) -> None:
        self._limit = seconds
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()
        program = executable()
        assert program is not None
        script = f'exec "$@" 3<&{read_end} 4>&{write_end}'
        arguments = [program, *_FLAGS, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *arguments],
            pass_fds=(read_end, write_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_end)
        os.close(write_end)
        os.set_blocking(self._read, False)
        self._buffer = b""
        self._number = 0
        self._events: set[tuple[str, str]] = set()  # Names and sessions of events so far
        self.requests: list[str] = []  # Every address that a page asked for

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._write, self._read):
            os.close(pipe)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._profile.cleanup()

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def wait_for(self, event: str, session: str) -> None:
        while (event, session) not in self._events:
            self._next()

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + self._limit
        while b"\0" not in self._buffer:
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(f"{executable()} does not answer")
            try:
                self._buffer += os.read(self._read, 1 << 20)
            except BlockingIOError:
                time.sleep(0.002)
        line, self._buffer = self._buffer.split(b"\0", 1)
        answer = json.loads(line)
        self._events.add((answer.get("method", ""), answer.get("sessionId", "")))
        if answer.get("method") == "Network.requestWillBeSent":
            self.requests.append(answer["params"]["request"]["url"])
        return answer

    def open(self, file: Path, *, width: int, dark: bool = False) -> Page:
        """Open a file in a window so many pixels wide."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        page.send("Network.enable")
        page.send("Page.enable")
        page.resize(width, 800)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[scheme])
        page.send("Page.navigate", url=file.absolute().as_uri())
        self.wait_for("Page.loadEventFired", session)
        return page


class Page:
    """One open page."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def close(self) -> None:
        self._browser.send("Target.closeTarget", targetId=self._target)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, whose own policy allows none."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """A PNG of the whole page."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        taken = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(taken["data"])
