"""The site builds without a warning and without network, and a browser and an audit find nothing wrong with it.

`make docs` installs the generator. Chromium and node are the machine's; axe-core and puppeteer-core come from npm, or
from the folder node_modules that AMP_RECIPES_NODE_MODULES names.
"""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from repository import REPOSITORY

pytestmark = pytest.mark.extended

NODE_PACKAGES = ["axe-core@4.14.1", "puppeteer-core@24.43.1"]


def generator() -> Path | None:
    places = [REPOSITORY / ".venv-docs" / "bin", Path(sys.executable).parent]
    named = os.environ.get("AMP_RECIPES_ZENSICAL") or shutil.which("zensical", path=os.pathsep.join(map(str, places)))
    return Path(named) if named else None


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built site."""
    if generator() is None:
        pytest.skip("the generator of the site is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "amp_recipes"):  # copies: the generator follows no links
        shutil.copytree(REPOSITORY / name, folder / name)
    shutil.copy(REPOSITORY / "zensical.toml", folder)
    command = [str(generator()), "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "build" / "site"


@pytest.fixture(scope="module")
def address(site, tmp_path_factory):
    """Where a server of this process shows the site: below /amp_recipes, which the links of 404.html begin with."""
    root = tmp_path_factory.mktemp("served")
    (root / "amp_recipes").symlink_to(site)
    handler = functools.partial(QuietHandler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/amp_recipes"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def node_modules(tmp_path_factory) -> Path:
    """The folder with the packages of the audit."""
    if named := os.environ.get("AMP_RECIPES_NODE_MODULES"):
        return Path(named).resolve()
    if not shutil.which("npm"):
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *NODE_PACKAGES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"npm cannot install {' '.join(NODE_PACKAGES)}: {done.stderr[-300:]}")
    return folder / "node_modules"


def pages_of(site: Path) -> list[str]:
    return sorted(str(page.relative_to(site)) for page in site.rglob("*.html"))


def test_every_page_is_built_and_in_the_navigation(site):
    sources = {
        str(path.relative_to(REPOSITORY / "docs").with_suffix(".html")) for path in REPOSITORY.glob("docs/**/*.md")
    }
    assert {*pages_of(site)} - {"404.html"} == sources
    listed = set(re.findall(r'"([\w/]+)\.md"', (REPOSITORY / "zensical.toml").read_text()))
    assert {f"{name}.html" for name in listed} == sources


def test_site_asks_nobody_else_for_scripts_styles_or_pictures(site):
    loads = re.compile(r"<(?:script|img|iframe|link(?=[^>]*stylesheet))[^>]*(?:src|href)=[\"']?(https?:[^\"'\s>]*)")
    asked = {page: loads.findall((site / page).read_text()) for page in pages_of(site)}
    assert asked and not any(asked.values())


def test_docstrings_are_on_the_pages_of_the_api(site):
    page = (site / "reference" / "api" / "amp_recipes.html").read_text()
    assert 'id="amp_recipes.Brain.fit_batch"' in page and "Train on one batch" in page


def test_browser_and_audit_find_nothing_wrong(site, address, node_modules):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not (chromium and shutil.which("node")):
        pytest.skip("Chromium and node are not both installed")
    script = Path(__file__).with_name("check_site.mjs")
    command = ["node", str(script), str(node_modules), address, str(site), *pages_of(site)]
    done = subprocess.run(command, env={**os.environ, "CHROMIUM": chromium}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout, done.stdout
