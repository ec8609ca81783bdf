"""Debian's chromium, driven by playwright; nothing is downloaded.

python -m tests.reports.browser runs/report-sample      # screenshots of the sample pages, to look at
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # not there in every installation; tests skip without it

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


def shots(folder: Path) -> None:
    """Desktop in light and dark, a phone, the dialog, print; of pages that `sample_records` wrote."""
    with chromium() as browser:
        for name in ("one", "three", "vit-base"):
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport=DESKTOP, color_scheme=scheme)
                page.goto((folder / f"{name}.html").absolute().as_uri())
                scroll_through(page)
                page.screenshot(path=folder / f"{name}-{scheme}.png", full_page=True)
                page.close()
        page = browser.new_page(viewport=PHONE, color_scheme="light", device_scale_factor=2)
        for name in ("one", "three"):
            page.goto((folder / f"{name}.html").absolute().as_uri())
            scroll_through(page)
            page.screenshot(path=folder / f"{name}-phone.png", full_page=True)
        page.locator(".tile").nth(4).click()
        page.screenshot(path=folder / "dialog-phone.png")
        page.close()
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=DESKTOP, color_scheme=scheme)
            page.goto((folder / "vit-base.html").absolute().as_uri())
            page.locator(".tile").nth(10).click()
            page.screenshot(path=folder / f"dialog-{scheme}.png")
            for _ in range(12):
                page.keyboard.press("ArrowRight")
            page.screenshot(path=folder / f"dialog-block-{scheme}.png")
            page.close()
        page = browser.new_page(viewport=DESKTOP, color_scheme="light")
        page.goto((folder / "one.html").absolute().as_uri())
        page.locator("#tradeoff-chart").hover(position={"x": 260, "y": 70})
        page.locator("#tradeoff").screenshot(path=folder / "hover-points.png")
        page.locator("#curves .chart").first.hover(position={"x": 400, "y": 100})
        page.locator("#learning").screenshot(path=folder / "hover-curves.png")
        page.locator("#layer-chart").hover(position={"x": 600, "y": 200})
        page.locator("#layers").screenshot(path=folder / "hover-layers.png")
        page.close()
        page = browser.new_page(viewport=DESKTOP, color_scheme="dark")
        page.goto((folder / "one.html").absolute().as_uri())
        page.pdf(path=folder / "one.pdf", format="A4")


def scroll_through(page: Any) -> None:
    """Pictures are drawn when they come into view."""
    for _ in range(60):
        page.evaluate("window.scrollBy({top: 700, behavior: 'instant'})")
        page.wait_for_timeout(60)
        if page.evaluate("scrollY + innerHeight >= document.body.scrollHeight - 2"):
            break
    page.evaluate("window.scrollTo({top: 0, behavior: 'instant'})")


if __name__ == "__main__":
    shots(Path(sys.argv[1]))
