"""The pages that the code determines are as their generator makes them."""

from generated_pages import pages


def test_pages_are_as_generated():
    stale = [path.name for path, text in pages() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    assert not stale, f"{stale} are stale: run python tests/docs/generated_pages.py"
