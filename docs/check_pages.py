"""Open every page of the built documentation in headless Chromium, and say what is broken.

    python docs/check_pages.py docs/_build/html

Links and images within the site must lead somewhere, no page may be wider than a phone or a laptop,
no script may fail, and the search must find what is there. Needs ``playwright`` and a Chromium, its
own or one on the path. Exit code 1 if anything is broken.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from playwright.sync_api import Page, sync_playwright

WIDTHS = (375, 1280)
#: Words of the guide, the API and the gallery, with what the search must find for them.
SEARCHES = {
    "representation": "guide/networks",
    "PerClassDisparityScorer": "api/generated/sklearn_mr2.metrics.PerClassDisparityScorer",
    "horizon": "glossary",
}

#: Elements wider than the page whose parents do not scroll: what makes the page scroll sideways.
_TOO_WIDE = """
() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  const scrolls = (e) => e && e !== document.body &&
    (getComputedStyle(e).overflowX !== 'visible' || scrolls(e.parentElement));
  return [...document.body.querySelectorAll('*')]
    .filter((e) => e.getBoundingClientRect().right > width + 1 && !scrolls(e.parentElement))
    .slice(0, 3)
    .map((e) => e.outerHTML.slice(0, 120));
}
"""
_BROKEN_IMAGES = """
async () => {
  const images = [...document.images];
  images.forEach((image) => { image.loading = 'eager'; });
  await Promise.all(images.map((image) => image.decode().catch(() => null)));
  return images.filter((image) => !image.naturalWidth).map((image) => image.src);
}
"""


class _Targets(HTMLParser):
    """Links of a page, and what can be linked to in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)
            if value and name in ("href", "src") and tag != "base":
                self.links.append(value)


def pages_of(root: Path) -> list[Path]:
    """The pages of the site, without the theme's own files."""
    return sorted(p for p in root.rglob("*.html") if p.relative_to(root).parts[0][0] != "_")


def broken_links(root: Path) -> Iterator[str]:
    """Links within the site that lead to no file, or to no place in it."""
    pages = {path: _Targets(path.read_text("utf-8")) for path in pages_of(root)}
    for path, page in pages.items():
        for link in page.links:
            url, fragment = urldefrag(urljoin(path.as_uri(), link))
            parts = urlsplit(url)
            if parts.scheme != "file":
                continue
            target = Path(unquote(parts.path))
            if not target.is_file():
                yield f"{path.relative_to(root)}: {link} leads nowhere"
            elif fragment and target in pages and unquote(fragment) not in pages[target].anchors:
                yield f"{path.relative_to(root)}: {link} has no such place"


def broken_display(page: Page, url: str, name: str, folder: Path | None) -> Iterator[str]:
    """What is wrong with a page as it is shown."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(url, wait_until="load")
        for element in page.evaluate(_TOO_WIDE):
            yield f"{name}: wider than {width} pixels: {element}"
        if folder is not None:
            picture = name.removesuffix(".html").replace("/", "-")
            page.screenshot(path=folder / f"{picture}-{width}.png", full_page=True)
    for image in page.evaluate(_BROKEN_IMAGES):
        yield f"{name}: image {image} does not load"
    yield from (f"{name}: script error: {error}" for error in errors)


def broken_search(page: Page, address: str) -> Iterator[str]:
    """Words that the search does not find where they are."""
    for word, expected in SEARCHES.items():
        page.goto(f"{address}/search.html?q={word}")
        try:
            page.wait_for_selector(f"#search-results a[href*='{expected}']", timeout=10_000)
        except Exception:
            yield f"search: {word!r} does not find {expected}"


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def check(root: Path, screenshots: Path | None, online: bool) -> list[str]:
    """Everything that is broken in the site at `root`."""
    problems = list(broken_links(root))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Silent, directory=str(root)))
    server.handle_error = lambda *_: None  # a page that is left breaks off its requests
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox"],
        )
        context = browser.new_context()
        if not online:
            context.route(
                lambda url: not url.startswith((address, "data:")), lambda route: route.abort()
            )
        for path in pages_of(root):
            name = path.relative_to(root).as_posix()
            page = context.new_page()
            problems.extend(broken_display(page, f"{address}/{name}", name, screenshots))
            page.close()
        problems.extend(broken_search(context.new_page(), address))
        browser.close()
    server.shutdown()
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path, help="folder with the built pages")
    parser.add_argument("--screenshots", type=Path, help="folder to put pictures of the pages in")
    parser.add_argument("--online", action="store_true", help="load MathJax from its server")
    arguments = parser.parse_args()
    root = arguments.site.resolve()
    if not (root / "index.html").is_file():
        parser.error(f"{root} has no index.html; build the documentation first")
    if arguments.screenshots is not None:
        arguments.screenshots.mkdir(parents=True, exist_ok=True)
    problems = check(root, arguments.screenshots, arguments.online)
    print(*problems, sep="\n")
    print(f"{len(pages_of(root))} pages, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
