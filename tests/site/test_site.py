"""The pages as a reader has them: in a browser, light and dark, on a desk and on a phone."""

import html.parser
import json
import tomllib
import urllib.parse
from pathlib import Path

import pytest

pytestmark = pytest.mark.site

HERE = Path(__file__).resolve().parent
DOCS = HERE.parents[1] / "docs"
EXAMPLES = tomllib.loads((DOCS / "gallery" / "gallery.toml").read_text())
PATHS = sorted(
    "" if path.stem == "index" else f"{path.relative_to(DOCS).with_suffix('')}/"
    for path in DOCS.rglob("*.md")
)
PATHS += ["gallery/", *(f"gallery/{name}/" for name in EXAMPLES)]  # made when the site is built
SCHEMES = {"light": "default", "dark": "slate"}
PHONE, DESK = 390, 1280


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_page_is_legible(open_page, path, scheme):
    page = open_page(path, scheme=scheme)
    looks = HERE.joinpath("looks.js").read_text()
    assert page.locator("body").get_attribute("data-md-color-scheme") == SCHEMES[scheme]
    for width in (DESK, PHONE):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(200)  # colours fade in
        assert page.evaluate(looks) == [], width
    assert page.complaints == []


class Links(html.parser.HTMLParser):
    """The anchors of a page, and its links."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors.add(attributes.get("id"))
        self.links |= {attributes[name] for name in ("href", "src") if attributes.get(name)}


def test_no_link_is_broken(site):
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > len(PATHS)
    broken = []
    for path, page in pages.items():
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            base = site if url.path.startswith("/") else path.parent
            target = (base / urllib.parse.unquote(url.path).lstrip("/")).resolve()
            target = path if not url.path else target / "index.html" if target.is_dir() else target
            anchor = urllib.parse.unquote(url.fragment)
            known = not anchor or target not in pages or anchor in pages[target].anchors
            if not target.exists() or not (known or anchor.startswith("__")):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_the_gallery_leads_to_every_example(open_page):
    page = open_page("gallery/")
    links = page.locator(".gallery-card a:has(img)")
    assert links.count() == len(EXAMPLES)
    boxes = [links.nth(i).bounding_box() for i in range(links.count())]
    assert len({box["x"] for box in boxes}) > 1  # side by side
    assert all(box["height"] > 60 for box in boxes)
    links.first.click()
    page.wait_for_load_state("networkidle")
    assert page.locator("h1").inner_text().startswith(next(iter(EXAMPLES.values()))["title"])
    assert page.complaints == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_notebook_can_be_taken(open_page, name):
    page = open_page(f"gallery/{name}/")
    with page.expect_download() as taken:
        page.locator("a[download]").click()
    assert taken.value.suggested_filename == f"{name}.ipynb"
    book = json.loads(Path(taken.value.path()).read_text())
    source = "".join(line for cell in book["cells"] for line in cell["source"])
    shown = page.locator("#the-program ~ .highlight code").first.inner_text()
    assert "def main(" in source
    assert "def main(" in shown


def test_search_finds_while_loop(open_page):
    page = open_page("")
    page.keyboard.press("/")
    page.keyboard.type("while_loop", delay=20)
    found = page.locator(".md-search-result__link")
    found.first.wait_for()
    assert any("/reference/loops/" in (found.nth(i).get_attribute("href") or "") for i in range(5))
    found.first.click()
    page.wait_for_load_state("networkidle")
    assert "while_loop" in page.locator("article").inner_text()
    assert page.complaints == []


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_code_can_be_copied(open_page, width):
    page = open_page("", width=width, permissions=["clipboard-read", "clipboard-write"])
    block = page.locator(".highlight", has=page.locator("code")).first
    block.hover()
    block.locator(".md-code__button[title='Copy to clipboard'], .md-clipboard").first.click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == block.locator("code").first.inner_text().strip() != ""


def test_a_schedule_is_shown_a_moment_at_a_time(open_page):
    page = open_page("how-it-works/")
    slider, told = page.locator(".schedule input"), page.locator(".schedule output")
    assert page.locator(".schedule-row span").count() == 12
    assert "the state before step 0 is kept" in told.inner_text()
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert "steps 0 to 3 run" in told.inner_text()
    assert page.locator(".schedule-row .run").count() == 4
    page.keyboard.press("End")
    assert "the state before step 0 is given up" in told.inner_text()
    assert page.locator(".schedule-row .reversed").count() == 12


def test_the_reader_chooses_light_or_dark(open_page):
    page = open_page("", scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    assert page.evaluate(scheme) == "default"
    before = page.evaluate(background)
    page.locator("label[for='__palette_1']").click()
    page.wait_for_timeout(300)
    assert page.evaluate(scheme) == "slate"
    assert page.evaluate(background) != before
    page.reload()
    assert page.evaluate(scheme) == "slate"


def test_the_menu_opens_on_a_phone(open_page):
    page = open_page("", width=PHONE)
    link = page.locator(".md-nav--primary a[href$='getting-started/']").first
    assert not link.is_visible() or link.bounding_box()["x"] < 0
    page.locator("label[for='__drawer'].md-header__button").click()
    page.wait_for_timeout(400)
    link.click()
    page.wait_for_url("**/getting-started/")


def test_a_page_that_is_not_there_leads_back(browser, address):
    page = browser.new_page()
    page.goto(f"{address}/404.html")
    assert "404" in page.locator("h1").inner_text()
    page.close()
