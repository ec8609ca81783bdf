"""The report page in a real browser: it opens, answers pointer and keyboard, draws its pictures and prints."""

import io
import re

import pytest

from gblr.reports.overlaps import overlap_counts
from gblr.reports.page import write_page
from gblr.reports.record import load_record, parse_record
from tests.reports.browser import CHROMIUM, DESKTOP, PHONE, chromium, scroll_through
from tests.reports.sample_records import digits_run, write_samples
from tests.reports.test_page import EVIL, LEAST

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the extra `dev`)")
Image = pytest.importorskip("PIL.Image", reason="pillow is not installed (matplotlib brings it)")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on the path: apt-get install chromium")
PAGES = ("one", "three", "vit-base")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write_samples(folder)
    return folder


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser, folder):
    """Opens a page; at the end of the test it must have asked for nothing but itself, and complained of nothing."""
    opened = []

    def visit(file, viewport=DESKTOP, scheme="light"):
        page = browser.new_page(viewport=viewport, color_scheme=scheme)
        requests, complaints = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        address = (folder / file).with_suffix(".html").as_uri()
        page.goto(address)
        opened.append((page, address, requests, complaints))
        return page

    yield visit
    for page, address, requests, complaints in opened:
        assert requests == [address] and complaints == []
        page.close()


def picture(shot: bytes):
    return Image.open(io.BytesIO(shot)).convert("RGB")


def num_colours(picture) -> int:
    """At most 4096 are counted."""
    return len(picture.getcolors(4096) or range(4096))


@pytest.mark.parametrize("name", PAGES)
def test_pages_open_and_fit_a_desktop_and_a_phone(name, visit):
    page = visit(name)
    assert page.locator("section").count() >= 5 and page.locator("h1").is_visible()
    for viewport in (DESKTOP, PHONE):
        page.set_viewport_size(viewport)
        page.wait_for_timeout(50)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), viewport


def test_charts_and_masks_are_not_empty(visit):
    page = visit("one")
    scroll_through(page)
    shot = picture(page.screenshot(full_page=True))
    for selector, least in ((".panel", 20), (".tile canvas", 3)):
        for place in page.locator(selector).all():
            box = place.bounding_box()
            part = shot.crop((box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]))
            assert num_colours(part) > least


def test_masks_are_drawn_when_they_come_into_view(visit):
    page = visit("vit-base")
    page.wait_for_timeout(100)
    assert page.locator(".tile").count() == 72
    assert page.locator(".tile[data-drawn]").count() < 30
    scroll_through(page)
    assert page.locator(".tile[data-drawn]").count() == 72


def test_pointing_at_points_and_bars_shows_their_facts(visit):
    page = visit("one")
    page.locator("#tradeoff-chart .mark.run0").hover()
    assert page.locator("#tip").is_visible()
    assert "GBLR, learned" in page.locator("#tip").inner_text() and "97.73" in page.locator("#tip").inner_text()
    page.locator("#layer-chart .bar-item").nth(3).hover()
    assert "blocks.3.attention.query" in page.locator("#tip").inner_text()
    page.locator("h1").hover()
    assert page.locator("#tip").is_hidden()


def test_pointing_at_a_curve_reads_all_curves_at_that_step(visit):
    page = visit("one")
    page.locator("#curves .chart").first.hover()
    readouts = page.locator("#curves output").all_inner_texts()
    assert len(readouts) == 5 and len({text.split("\u2002")[0] for text in readouts}) == 1
    assert readouts[0].startswith("step 7") and "%" in page.locator("#curves .legend").first.inner_text()


def test_charts_are_read_by_keyboard(visit):
    page = visit("one")
    page.locator("#tradeoff-chart").focus()
    page.keyboard.press("End")
    assert "dense" in page.locator("#tip").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    page.locator("#curves .chart").nth(2).focus()
    page.keyboard.press("End")
    assert page.locator("#curves output").nth(2).inner_text() == "step 1\u202f498\u2002\u221e"  # sigma ends at infinity


def test_a_mask_opens_by_click_or_enter_and_steps_through_its_blocks(visit):
    page = visit("one")
    dialog, name = page.locator("#mask-dialog"), page.locator("#block-name")
    page.locator(".tile").nth(3).click()
    assert dialog.is_visible() and "blocks.0.attention.output" in dialog.inner_text()
    assert name.inner_text().startswith("All ")
    whole = page.locator("#mask-dialog .stage canvas").first.screenshot()
    assert num_colours(picture(whole)) > 3
    page.keyboard.press("ArrowRight")
    assert name.inner_text().startswith("Block 1 of ") and "rows" in dialog.inner_text()
    assert page.locator("#mask-dialog .stage canvas").first.screenshot() != whole
    page.keyboard.press("PageDown")
    assert "blocks.0.mlp.fc1" in dialog.inner_text() and name.inner_text().startswith("All ")
    page.keyboard.press("Escape")
    assert dialog.is_hidden()
    # the browser tells of the closing a little later, and only then does the focus move
    page.locator(".tile:focus").filter(has_text="blocks.0.mlp.fc1").wait_for(timeout=5000)
    assert page.evaluate("document.activeElement.textContent").startswith("blocks.0.mlp.fc1")
    page.keyboard.press("Enter")
    assert dialog.is_visible()


def test_the_picture_counts_blocks_as_numpy_does(visit, folder):
    layer = load_record(folder / "vit-base").layers[4]
    counts = overlap_counts(layer.block_array(), layer.shape)
    page = visit("vit-base")
    page.locator(".tile").nth(4).click()
    canvas, place = page.locator("#mask-dialog .stage canvas").first, page.locator(".place")
    box = canvas.bounding_box()
    for down, across in ((0.01, 0.01), (0.3, 0.6), (0.5, 0.5), (0.77, 0.2), (0.99, 0.99)):
        page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])
        row, column, count = (int(number) for number in re.findall(r"\d+", place.inner_text()))
        assert counts[row, column] == count
    assert f"most blocks at an entry\n{counts.max()}" in page.locator(".fact-grid").inner_text()


def test_run_and_type_choose_the_masks(visit):
    page = visit("three")
    facts = page.locator(".tile").first.inner_text()
    page.get_by_role("radio", name="Digits ViT at 35%").check()
    assert page.locator(".tile").count() == 24 and page.locator(".tile").first.inner_text() != facts
    page.get_by_role("radio", name="fc1").check()
    assert page.locator(".tile").count() == 4
    page.locator(".tile").first.click()
    page.keyboard.press("PageUp")
    assert "blocks.3.mlp.fc1" in page.locator("#mask-title").inner_text()


def test_singular_values_of_another_layer_are_shown(visit):
    page = visit("three")
    page.get_by_role("button", name="Next layer").click()
    assert page.locator("#spectrum-chart h3").inner_text() == "blocks.0.attention.key"
    assert page.locator("#spectrum-chart .line").count() == 4


def test_the_theme_follows_the_system_and_the_button(visit):
    page = visit("one", scheme="dark")
    page.locator(".tile").first.scroll_into_view_if_needed()
    page.locator(".tile[data-drawn]").first.wait_for()
    dark = page.locator(".tile").first.screenshot()
    assert sum(picture(dark).getpixel((5, 5))) < 150
    page.locator("#theme").click()
    light = page.locator(".tile").first.screenshot()
    assert sum(picture(light).getpixel((5, 5))) > 700 and page.locator("#theme").inner_text() == "Dark"


def test_tables_sort_by_a_click_on_a_heading(visit):
    page = visit("three")
    rows = page.locator("#runs tbody tr")
    page.locator("#runs").get_by_role("button", name="Parameters").click()
    assert "35%" in rows.first.inner_text()
    page.locator("#runs").get_by_role("button", name="Parameters").click()
    assert "10%" in rows.first.inner_text()


def test_the_command_can_be_copied(visit):
    page = visit("one")
    page.locator(".copy").first.click()
    page.get_by_text("Copied").or_(page.get_by_text("Press Ctrl+C")).first.wait_for(timeout=2000)


def test_print_is_light_complete_and_without_controls(visit):
    page = visit("one", scheme="dark")
    page.emulate_media(media="print")
    assert page.locator(".bar").is_hidden() and page.locator("#mask-controls").is_hidden()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".tile[data-drawn]").count() == 24
    printed = page.pdf(format="A4")
    assert printed.startswith(b"%PDF") and len(printed) > 50_000


def test_text_of_a_record_never_runs_and_gaps_do_no_harm(visit, folder):
    record = digits_run() | {"title": EVIL, "command": EVIL, "metric": {"name": EVIL, "unit": EVIL}}
    record["layers"] = [layer | {"name": EVIL + str(i), "type": EVIL} for i, layer in enumerate(record["layers"])]
    record["results"] = [result | {"name": EVIL} for result in record["results"]]
    write_page([parse_record(record)], folder / "evil.html")
    page = visit("evil")
    page.locator("#tradeoff-chart .mark").first.hover()
    page.locator(".tile").first.click()
    assert page.evaluate("window.hacked") is None and page.locator("h1").inner_text() == EVIL
    gaps = {"results": [{"name": "x", "value": 1.0}], "history": {"step": [5], "loss": [None], "sigma": [None]}}
    layers = [{"name": "fc", "shape": [9, 1], "relative_cost": 0.0, "singular": [0.0, 0.0], "singular_dense": [1.0]}]
    write_page([parse_record(LEAST), parse_record(LEAST | gaps | {"layers": layers})], folder / "gaps.html")
    scroll_through(visit("gaps"))
