"""The built pages on a server of this machine, and a browser without a window."""

import contextlib
import functools
import http.server
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built pages. A warning of mkdocs is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="session")
def address(site):
    handler = functools.partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser, address):
    """Opens a page, and keeps what the browser complains of in `page.complaints`."""
    with contextlib.ExitStack() as stack:

        def opened(path, *, width=1280, scheme="light", **options):
            viewport = {"width": width, "height": 900}
            context = browser.new_context(viewport=viewport, color_scheme=scheme, **options)
            stack.callback(context.close)
            page = context.new_page()
            page.complaints = complaints = []
            told = lambda what: complaints.append(f"{what.type}: {what.text}")
            page.on("console", lambda what: what.type in ("error", "warning") and told(what))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
            page.on(
                "response", lambda r: r.status >= 400 and complaints.append(f"{r.status} {r.url}")
            )
            assert page.goto(f"{address}/{path}").ok
            page.wait_for_load_state("networkidle")
            return page

        yield opened
