"""The report page in a real browser: it opens, answers pointer and keyboard, draws its pictures and prints."""

import io
import re

import pytest

from gblr.reports.overlaps import overlap_counts
from gblr.reports.page import write_page
from gblr.reports.record import load_record, parse_record
from tests.reports.browser import CHROMIUM, DESKTOP, PHONE, chromium, scroll_through, settle
from tests.reports.sample_records import digits_run, write_samples
from tests.reports.test_page import EVIL, LEAST

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (it is in the extra `dev`)")
Image = pytest.importorskip("PIL.Image", reason="pillow is not installed (matplotlib brings it)")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no `chromium` on the path: apt-get install chromium")
PAGES = ("one", "three", "vit-base")
WAIT = 20_000  # milliseconds; the page draws after the browser's next frame, and a machine may be busy


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
        settle(page)
        opened.append((page, address, requests, complaints))
        return page

    yield visit
    for page, address, requests, complaints in opened:
        assert requests == [address] and complaints == []
        page.close()


def expect(place):
    """Claims that are asked again until they hold."""
    playwright.expect.set_options(timeout=WAIT)
    return playwright.expect(place)


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
        settle(page)
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
    expect(page.locator(".tile")).to_have_count(72)
    assert page.locator(".tile[data-drawn]").count() < 30
    scroll_through(page)
    expect(page.locator(".tile[data-drawn]")).to_have_count(72)


def test_pointing_at_points_and_bars_shows_their_facts(visit):
    page = visit("one")
    tip = page.locator("#tip")
    page.locator("#tradeoff-chart .mark.run0").hover()
    expect(tip).to_be_visible()
    expect(tip).to_contain_text("GBLR, learned")
    expect(tip).to_contain_text("97.73")
    page.locator("#layer-chart .bar-item").nth(3).hover()
    expect(tip).to_contain_text("blocks.3.attention.query")
    page.locator("h1").hover()
    expect(tip).to_be_hidden()


def test_pointing_at_a_curve_reads_all_curves_at_that_step(visit):
    page = visit("one")
    page.locator("#curves .chart").first.hover()
    outputs = page.locator("#curves output")
    expect(outputs).to_have_text([re.compile("^step 7")] * 5)
    assert len({text.split("\u2002")[0] for text in outputs.all_inner_texts()}) == 1
    expect(page.locator("#curves .legend").first).to_contain_text("%")


def test_charts_are_read_by_keyboard(visit):
    page = visit("one")
    page.locator("#tradeoff-chart").focus()
    page.keyboard.press("End")
    expect(page.locator("#tip")).to_contain_text("dense")
    page.keyboard.press("Escape")
    expect(page.locator("#tip")).to_be_hidden()
    page.locator("#curves .chart").nth(2).focus()
    page.keyboard.press("End")
    output = page.locator("#curves output").nth(2)
    expect(output).to_have_text(re.compile("\u221e$"))
    assert output.inner_text() == "step 1\u202f498\u2002\u221e"  # sigma ends at infinity


def test_a_mask_opens_by_click_or_enter_and_steps_through_its_blocks(visit):
    page = visit("one")
    dialog, name = page.locator("#mask-dialog"), page.locator("#block-name")
    page.locator(".tile").nth(3).click()
    expect(dialog).to_be_visible()
    expect(dialog).to_contain_text("blocks.0.attention.output")
    expect(name).to_have_text(re.compile("^All "))
    settle(page)
    whole = page.locator("#mask-dialog .stage canvas").first.screenshot()
    assert num_colours(picture(whole)) > 3
    page.keyboard.press("ArrowRight")
    expect(name).to_have_text(re.compile("^Block 1 of "))
    expect(dialog).to_contain_text("rows")
    settle(page)
    assert page.locator("#mask-dialog .stage canvas").first.screenshot() != whole
    page.keyboard.press("PageDown")
    expect(dialog).to_contain_text("blocks.0.mlp.fc1")
    expect(name).to_have_text(re.compile("^All "))
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    # the browser tells of the closing a little later, and only then does the focus move
    expect(page.locator(".tile:focus")).to_contain_text("blocks.0.mlp.fc1")
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()


def test_the_picture_counts_blocks_as_numpy_does(visit, folder):
    layer = load_record(folder / "vit-base").layers[4]
    counts = overlap_counts(layer.block_array(), layer.shape)
    page = visit("vit-base")
    page.locator(".tile").nth(4).click()
    canvas, place = page.locator("#mask-dialog .stage canvas").first, page.locator(".place")
    expect(canvas).to_be_visible()
    settle(page)
    box = canvas.bounding_box()
    for down, across in ((0.01, 0.01), (0.3, 0.6), (0.5, 0.5), (0.77, 0.2), (0.99, 0.99)):
        page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])
        settle(page)
        row, column, count = (int(number) for number in re.findall(r"\d+", place.inner_text()))
        assert counts[row, column] == count
    assert f"most blocks at an entry\n{counts.max()}" in page.locator(".fact-grid").inner_text()


def test_run_and_type_choose_the_masks(visit):
    page = visit("three")
    tiles = page.locator(".tile")
    facts = tiles.first.text_content()
    page.get_by_role("radio", name="Digits ViT at 35%").check()
    expect(tiles).to_have_count(24)
    expect(tiles.first).not_to_have_text(facts)
    page.get_by_role("radio", name="fc1").check()
    expect(tiles).to_have_count(4)
    tiles.first.click()
    page.keyboard.press("PageUp")
    expect(page.locator("#mask-title")).to_contain_text("blocks.3.mlp.fc1")


def test_singular_values_of_another_layer_are_shown(visit):
    page = visit("three")
    page.get_by_role("button", name="Next layer").click()
    expect(page.locator("#spectrum-chart h3")).to_have_text("blocks.0.attention.key")
    expect(page.locator("#spectrum-chart .line")).to_have_count(4)


def test_the_theme_follows_the_system_and_the_button(visit):
    page = visit("one", scheme="dark")
    page.locator(".tile").first.scroll_into_view_if_needed()
    page.locator(".tile[data-drawn]").first.wait_for()
    dark = page.locator(".tile").first.screenshot()
    assert sum(picture(dark).getpixel((5, 5))) < 150
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Dark")
    settle(page)
    light = page.locator(".tile").first.screenshot()
    assert sum(picture(light).getpixel((5, 5))) > 700


def test_tables_sort_by_a_click_on_a_heading(visit):
    page = visit("three")
    rows = page.locator("#runs tbody tr")
    page.locator("#runs").get_by_role("button", name="Parameters").click()
    expect(rows.first).to_contain_text("35%")
    page.locator("#runs").get_by_role("button", name="Parameters").click()
    expect(rows.first).to_contain_text("10%")


def test_the_command_can_be_copied(visit):
    page = visit("one")
    page.locator(".copy").first.click()
    page.get_by_text("Copied").or_(page.get_by_text("Press Ctrl+C")).first.wait_for(timeout=WAIT)


def test_print_is_light_complete_and_without_controls(visit):
    page = visit("one", scheme="dark")
    page.emulate_media(media="print")
    expect(page.locator(".bar")).to_be_hidden()
    expect(page.locator("#mask-controls")).to_be_hidden()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    expect(page.locator(".tile[data-drawn]")).to_have_count(24)
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
