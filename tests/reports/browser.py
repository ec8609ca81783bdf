"""Debian's chromium, driven by playwright; nothing is downloaded.

python -m tests.reports.browser runs/demo/report.html docs/images/report      # report-light.png, report-dialog.png, ...
"""

import io
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
SECTIONS = ("tradeoff", "learning", "layers", "masks", "spectra")


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # not there in every installation; tests skip without it

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


def settle(page: Any) -> None:
    """Sizes and what comes into view are told with the next frames: three of them, and what they queued."""
    page.evaluate(
        "() => new Promise((done) => { let left = 3;"
        " const next = () => (left-- ? requestAnimationFrame(next) : setTimeout(done)); next(); })"
    )


def scroll_through(page: Any) -> None:
    """Pictures are drawn when they come into view."""
    for _ in range(60):
        page.evaluate("window.scrollBy({top: 700, behavior: 'instant'})")
        settle(page)
        if page.evaluate("scrollY + innerHeight >= document.body.scrollHeight - 2"):
            break
    page.evaluate("window.scrollTo({top: 0, behavior: 'instant'})")


def shoot(file: Path, prefix: str) -> None:
    """The top in light and dark, the whole page, each section, the dialog and a phone."""
    with chromium() as browser:
        for scheme in ("light", "dark"):
            page = _opened(browser, file, viewport=DESKTOP, color_scheme=scheme)
            _keep(page.screenshot(), f"{prefix}-{scheme}.png")
            scroll_through(page)
            _keep(page.screenshot(full_page=True), f"{prefix}-whole-{scheme}.png")
            if page.locator(".tile").count():
                page.locator(".tile").nth(3 % page.locator(".tile").count()).click()
                _keep(page.screenshot(), f"{prefix}-dialog-{scheme}.png")
                page.keyboard.press("Escape")
        page = _opened(browser, file, viewport=DESKTOP, color_scheme="light")
        page.evaluate("document.querySelector('.bar').style.position = 'static'")
        scroll_through(page)
        for name in SECTIONS:
            if page.locator(f"#{name}").count():
                _keep(page.locator(f"#{name}").screenshot(), f"{prefix}-{name}.png")
        page = _opened(browser, file, viewport=PHONE, color_scheme="light")
        scroll_through(page)
        _keep(page.screenshot(full_page=True), f"{prefix}-phone.png")


def _opened(browser: Any, file: Path, **options: Any) -> Any:
    page = browser.new_page(**options)
    page.goto(file.absolute().as_uri())
    page.wait_for_timeout(200)
    return page


def _keep(shot: bytes, file: str) -> None:
    """As PNG under 290 kB: in fewer colours, and at half the size if that is not enough."""
    from PIL import Image  # comes with matplotlib; tests skip without it

    picture = Image.open(io.BytesIO(shot)).convert("RGB")
    few = picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    for smaller in (picture, few, picture.reduce(2), few.convert("RGB").reduce(2).quantize(128)):
        smaller.save(file, optimize=True)
        if Path(file).stat().st_size < 290_000:
            break


if __name__ == "__main__":
    shoot(Path(sys.argv[1]), sys.argv[2])
