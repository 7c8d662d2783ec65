"""A headless Chromium, where one is installed: shows what a reader of a page sees, prints PDFs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

#: Names under which Chromium and its relatives are installed.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


class BrowserError(RuntimeError):
    """There is no browser, or it failed; the text says what to do, in one line."""


def find() -> str | None:
    """The path of a Chromium on the PATH; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def run(page: Path, *options: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Opens a local page headless, with a profile of its own, and waits until the browser ends.

    Raises:
        BrowserError: there is none, or it failed or did not end.
    """
    browser = find()
    if browser is None:
        raise BrowserError(
            f"needs Chromium: one of {', '.join(NAMES)} must be on the PATH; found none"
        )
    usual = ["--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    # Chromium's sandbox refuses to run as root, as in a container.
    usual += ["--no-sandbox"] * (os.geteuid() == 0)
    with tempfile.TemporaryDirectory(prefix="bench-browser-") as profile:
        where = (f"--user-data-dir={profile}", page.absolute().as_uri())
        command = [browser, *usual, *options, *where]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise BrowserError(f"{browser} did not end within {timeout_s:g} s") from None
    if done.returncode:
        raise BrowserError(f"{browser} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done
