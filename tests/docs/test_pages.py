"""Every block of code of the documents runs, and does what the page says."""

import pytest
from repository import REPOSITORY
from run_page import run_page

PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]


@pytest.mark.extended  # each page trains models, in interpreters of its own
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_blocks(page, tmp_path):
    run_page(page, tmp_path)
