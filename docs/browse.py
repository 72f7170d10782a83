"""Every page of the built site in a real browser: axe-core, errors in the console, requests to other hosts, width on a phone.

python docs/browse.py [--site docs/_build/html] [--shots FOLDER] [PAGE ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
VIEWS = {"light": (1280, "light"), "dark": (1280, "dark"), "phone": (390, "light")}
# Sphinx writes a signature of several lines as a list of definitions without terms.
UNCHECKED = {"definition-list": {"enabled": False}}
EXPECTED = "Got invalid theme mode"  # the theme's own: it reads its mode before there is one
LOCAL = ("file:", "data:", "blob:")  # a page must load nothing from a host


def main() -> int:
    """The exit status: 1 if a page is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", help="pages, as start or guides/masks; default: all")
    parser.add_argument("--site", type=Path, default=Path("docs/_build/html"))
    parser.add_argument("--shots", type=Path, help="folder for a picture of every page in every view")
    options = parser.parse_args()
    site = options.site.resolve()
    pages = options.pages or sorted(
        str(path.relative_to(site).with_suffix("")) for path in site.rglob("*.html") if "_" not in str(path.relative_to(site))[0]
    )
    with sync_playwright() as playwright:
        found = next((path for path in map(shutil.which, BROWSERS) if path), None)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"] if os.getuid() == 0 else [])
        faults = [fault for page in pages for fault in _look(browser, site, page, options.shots)]
    print("\n".join(faults) or f"{len(pages)} pages in {len(VIEWS)} views: no fault")
    return bool(faults)


def _look(browser: Browser, site: Path, name: str, shots: Path | None) -> list[str]:
    faults = []
    for view, (width, scheme) in VIEWS.items():
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        errors: list[str] = []
        page.on("console", lambda message, errors=errors: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
        urls: list[str] = []
        page.on("request", lambda request, urls=urls: urls.append(request.url))
        page.goto((site / f"{name}.html").as_uri())
        page.wait_for_timeout(300)
        faults += [f"{name}, {view}: {error}" for error in errors if not error.startswith(EXPECTED)]
        faults += [f"{name}, {view}: loads {url}" for url in urls if not url.startswith(LOCAL)]
        wide = page.evaluate("document.documentElement.scrollWidth")
        if wide > width:
            faults.append(f"{name}, {view}: {wide} pixels wide, more than {width}")
        for violation in Axe().run(page, options={"rules": UNCHECKED}).response["violations"]:
            where = "; ".join(" ".join(node["target"]) for node in violation["nodes"][:3])
            faults.append(f"{name}, {view}: {violation['id']}: {violation['help']} at {where} ({len(violation['nodes'])} places)")
        if shots is not None:
            shots.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=shots / f"{name.replace('/', '-')}-{view}.png", full_page=True)
        page.close()
    return faults


if __name__ == "__main__":
    sys.exit(main())
