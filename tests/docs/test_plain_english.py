"""README, tutorials and the first page are short, and say one thing in a sentence."""

import re
from pathlib import Path

import pytest
from repository import REPOSITORY

README = REPOSITORY / "README.md"
PAGES = [README, *REPOSITORY.glob("docs/index.md"), *sorted(REPOSITORY.glob("docs/tutorials/*.md"))]
MOST_WORDS = 30

FENCE = re.compile(r"^ *(```+).*?^ *\1 *$", re.M | re.S)
COMMENT = re.compile(r"<!--.*?-->", re.S)
IMAGE_OR_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
CODE = re.compile(r"`[^`]+`")
NEW_BLOCK = re.compile(r"^ *([-*+]|\d+\.|>) +")  # an item of a list, a quotation
# A sentence ends at . ! or ? and white space; brackets, quotes or emphasis may stand between. "et al. 2017" ends none.
END = re.compile(r"(?<!\bal)(?<!e\.g)(?<!i\.e)[.!?][\"')*_\]]*\s+")


def sentences(markdown: str) -> list[str]:
    """The sentences of a page: those of paragraphs, headings, items of lists, and each cell of a table by itself.

    Code is one word, whatever is in it; a link is its text.
    """
    text = COMMENT.sub("\n\n", FENCE.sub("\n\n", markdown))
    text = CODE.sub("code", IMAGE_OR_LINK.sub(r"\1", text))
    pieces = [""]
    for line in text.splitlines():
        if line.lstrip().startswith("|"):
            pieces += [*line.strip().strip("|").split("|"), ""]
        elif line.startswith("#"):
            pieces += [line.strip("# "), ""]
        elif not line.strip() or NEW_BLOCK.match(line):
            pieces += [NEW_BLOCK.sub("", line)]
        else:
            pieces[-1] += " " + line.strip()
    found = [sentence.strip(" .!?*") for piece in pieces for sentence in END.split(piece)]
    return [sentence for sentence in found if words_in(sentence)]


def words_in(text: str) -> int:
    return len(re.findall(r"[\w'.,%/-]*\w[\w'.,%/-]*", text))


def test_sentences_are_told_apart(subtests):
    cases = {
        "One. Two! Three": ["One", "Two", "Three"],
        "A line\nthat goes on. **Bold.** Next": ["A line that goes on", "Bold", "Next"],
        "# Head\nText\n\n- item one\n  goes on\n- item two": ["Head", "Text", "item one goes on", "item two"],
        "| a | b. c |\n| --- | --- |\n| d | e |": ["a", "b", "c", "d", "e"],
        "Run `x. y` now.\n```python\nfoo. bar\n```\nSee [the. page](a. b).": ["Run code now", "See the", "page"],
        "A loss of 0.5 (Lin et al. 2017) fell": ["A loss of 0.5 (Lin et al. 2017) fell"],
        "<!-- not run: a. b -->\nText": ["Text"],
    }
    for text, expected in cases.items():
        with subtests.test(text):
            assert sentences(text) == expected
    assert words_in("Lightning's step: 1.83 times, a/b -- (two)") == 6


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_no_sentence_is_long(page: Path):
    found = sentences(page.read_text())
    assert found
    long = [f"{words_in(sentence)} words: {sentence}" for sentence in found if words_in(sentence) > MOST_WORDS]
    assert not long, "\n".join(long)


def test_readme_is_short():
    text = README.read_text()
    assert len(text.split()) < 1500 and len(text.splitlines()) <= 140
