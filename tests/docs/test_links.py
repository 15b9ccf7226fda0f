"""Links of the documents lead somewhere: relative ones, their anchors, and absolute ones into our own repository."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from repository import REPOSITORY

OURS = "https://github.com/amp-recipes/amp_recipes/"
SITE = "https://amp-recipes.github.io/amp_recipes/"
IN_REPOSITORY = re.compile(rf"{OURS}(?:blob|tree|raw)/main/([^#?]*)")
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "recipes/**/*.md", "benchmarks/*.md", "amp_recipes/templates/**/*.md")
    for path in REPOSITORY.glob(pattern)
)
CODE = re.compile(r"^ *(`{3,}).*?^ *\1 *$|<!--.*?-->", re.M | re.S)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?[^)]*\)")
TAG = re.compile(r"<(?:a|img|source)\b[^>]*?(?:href|src|srcset)=[\"']([^\"']+)")
BARE = re.compile(rf"{OURS}[^\s)>\"'`]+|{SITE}[^\s)>\"'`]*")


def links_of(text: str) -> set[str]:
    text = CODE.sub("", text)
    found = {*BARE.findall(text), *TAG.findall(text)}
    inner = re.sub(r"(`+)(?!`).*?\1(?!`)", "code", text)
    found |= set(re.findall(r"^\[[^\]]+\]:\s+(\S+)", inner, re.M))  # of links by reference
    return found | set(LINK.findall(inner)) | set(re.findall(r"\]\(([^)\s]+)\)", inner))


@cache
def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub, and the site, give to the headings of a page."""
    text = page.read_text(encoding="utf-8")
    anchors = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text)) | set(re.findall(r"^::: (\S+)$", text, re.M))
    for heading in re.findall(r"^#{1,6} +(.*?)#* *$", CODE.sub("", text), re.M):
        heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # a link's text
        # Of headings with one name only the first: GitHub and the site number the others differently.
        anchors.add(re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-"))
    return anchors


@cache
def files_of_the_repository() -> set[str]:
    """All that is, or will be, committed: files and folders."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    return {*listed, *(str(folder) for name in listed for folder in Path(name).parents)}


def what_is_wrong(page: Path, link: str) -> str:
    if ours := IN_REPOSITORY.match(link):
        return "" if ours[1].rstrip("/") in files_of_the_repository() else "no such file in the repository"
    if link.startswith(SITE):
        name, _, anchor = link.removeprefix(SITE).partition("#")
        source = REPOSITORY / "docs" / f"{name.removesuffix('.html') or 'index'}.md"
        if not source.is_file():
            return "no such page of the site"
        return "no such heading" if anchor and anchor not in anchors_of(source) else ""
    if re.match(r"[a-z]+:", link):
        return ""
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return "no such file"
    if (REPOSITORY / "docs") in page.parents and (REPOSITORY / "docs") not in target.parents:
        return f"leaves docs/, which the site cannot show: write {OURS}blob/main/..."
    if anchor and target.suffix == ".md" and anchor not in anchors_of(target):
        return "no such heading"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    wrong = {link: what_is_wrong(page, link) for link in sorted(links_of(page.read_text(encoding="utf-8")))}
    assert not any(wrong.values()), {link: why for link, why in wrong.items() if why}


def test_a_wrong_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        f"# A page\n\n[a](absent.md) [b](#a-page) [c](#other) [d]({OURS}blob/main/absent.py) `[e](f.md)`\n"
        f"[g][h] [i]({SITE}glossary.html#absent) [j]({SITE}glossary.html)\n\n[h]: missing.md\n"
    )
    wrong = {link for link in links_of(page.read_text()) if what_is_wrong(page, link)}
    assert wrong == {"absent.md", "#other", f"{OURS}blob/main/absent.py", "missing.md", f"{SITE}glossary.html#absent"}
