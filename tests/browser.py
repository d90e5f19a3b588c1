"""A browser for tests: headless Chromium, controlled through the pipe of its DevTools protocol."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 60

# Chromium uses the descriptors 3 and 4 for the protocol
LAUNCH = """
import os, sys
commands, answers = (os.dup(os.dup(int(number))) for number in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

MEASURE = """(() => {
  const box = element => { const {x, y, width, height} = element.getBoundingClientRect();
    return {x, y, width, height}; };
  const charts = {};
  for (const figure of document.querySelectorAll("figure[id^='chart-']")) {
    const pictures = figure.querySelectorAll("svg");
    const text = figure.querySelector("svg text");
    charts[figure.id.slice(6)] = {pictures: pictures.length, ...box(pictures[0] ?? figure),
      ink: text && getComputedStyle(text).fill, letters: text && text.getBoundingClientRect().height,
      lines: figure.querySelectorAll("svg path, svg image").length};
  }
  const colours = getComputedStyle(document.body);
  return {title: document.title, charts, sections: [...document.querySelectorAll("section")].map(e => e.id),
    paper: colours.backgroundColor, ink: colours.color, text: document.body.innerText,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth};
})()"""


def find_chromium():
    """Return the path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A Chromium process with one tab, as a context manager."""

    def __init__(self, directory):
        self.directory = directory
        self.said = []  # messages on the console of the tab
        self.fetched = []  # every URL that the tab requests
        self._waiting, self._number, self._answers, self._events = b"", 0, {}, []

    def __enter__(self):
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        flags = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-crash-reporter", "--disable-breakpad", "--disable-extensions", "--disable-sync"),
            *("--disable-background-networking", "--disable-component-update", "--no-default-browser-check"),
            *("--remote-debugging-pipe", f"--user-data-dir={self.directory / 'profile'}", "about:blank"),
        ]
        with (self.directory / "chromium.txt").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-c", LAUNCH, str(commands), str(answers), find_chromium(), *flags],
                pass_fds=(commands, answers),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "HOME": str(self.directory)},
                start_new_session=True,  # a separate process group, to kill all of it
            )
        os.close(commands)
        os.close(answers)
        try:
            self._open_tab()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind, error, trace):
        with contextlib.suppress(OSError):
            os.write(self._out, b'{"id": 0, "method": "Browser.close"}\0')
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._out)
        os.close(self._in)

    def _open_tab(self):
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path, *, width=1200, dark=False):
        """Load a page in a window of this width and return its measurements."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        self.said, self.fetched, self._events = [], [], []
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._wait(lambda: "Page.loadEventFired" in self._events)
        return self.evaluate(MEASURE)

    def evaluate(self, script):
        """Return the value of a JavaScript expression in the page."""
        response = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in response, response["exceptionDetails"]
        return response["result"]["value"]

    def printed(self):
        """Return the page as a PDF, in base64."""
        return self.call("Page.printToPDF")["data"]

    def call(self, method, **parameters):
        """Call a DevTools method and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        number = self._number
        self._wait(lambda: number in self._answers)
        answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _wait(self, arrived):
        deadline = time.monotonic() + TIMEOUT_S
        while not arrived():
            ready, _, _ = select.select([self._in], [], [], max(0, deadline - time.monotonic()))
            chunk = os.read(self._in, 2**20) if ready else b""
            if not chunk:
                log = (self.directory / "chromium.txt").read_text(errors="replace")[-2000:]
                raise AssertionError(f"Chromium does not respond:\n{log}")
            *messages, self._waiting = (self._waiting + chunk).split(b"\0")
            for message in messages:
                self._handle(json.loads(message))

    def _handle(self, message):
        if "id" in message:
            self._answers[message["id"]] = message
            return
        method, details = message["method"], message["params"]
        self._events.append(method)
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(details)
        elif method == "Network.requestWillBeSent":
            self.fetched.append(details["request"]["url"])
