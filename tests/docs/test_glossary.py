"""One word stands for one thing: in README and docs, in the texts of options, in errors and log lines."""

import ast
import functools
import re
from pathlib import Path

from repository import REPOSITORY

from amp_recipes.config.options.run_options import options_by_group

PACKAGE = REPOSITORY / "amp_recipes"
GLOSSARY = REPOSITORY / "docs" / "glossary.md"
PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
TERMS = re.findall(r"^### (.+)$", GLOSSARY.read_text(), re.M)

# Term: other words for the same thing, which we do not use, as regular expressions.
INSTEAD_OF = {
    "autocast": r"auto-casts?|automatic casting",
    "batch": r"(mini|micro)-?batch(es)?",
    "checkpoint": r"check-points?|save-?points?|snapshots?",
    "clipping": r"gradients? clamping",
    "dataset": r"data sets?",
    "folder": r"director(y|ies)",
    "fp16": r"half[- ]precision",
    "fp32": r"(full|single)[- ]precision",
    "hparams": r"hyper-parameters?",
    "learning rate": r"learn rates?|step sizes?",
    "loss scale": r"(grad(ient)?s?|loss|amp) scal(ing )?factors?|grad(ient)? scales?",
    "low precision": r"(reduced|lower)[- ]precision",
    "machine": r"(compute|cluster) nodes?",
    "nonfinite": r"non-finite|un-?finite",
    "output folder": r"(experiment|results) folders?",
    "overflow": r"over-flows?",
    "pin": r"(white|black|allow|deny)-?lists?|exempt(ed)? modules?",
    "rank": r"worker ranks?",
    "resume": r"(go|goes|going) on from|(tak|pick)(e|es|en|ing) up (again|where)|carry on",
    "run option": r"command-?line (flags?|switch(es)?)|run flags?",
    "sample": r"data ?points?",
    "skipped update": r"(dropped|discarded|rejected) (updates?|steps?)",
    "spike": r"(loss|gradient) (blow-?ups?|explosions?)",
    "start a new run": r"(start|begin)(s|ning|ing)? (afresh|anew)",
    "update": r"optimi[sz]er steps?|optimi[sz]ation steps?|gradient steps?",
    "validation set": r"dev(elopment)? sets?",
    "window": r"accumulation (cycles?|groups?|rounds?)",
}
MESSAGES = {"ConfigError", "CheckpointError", "DataError", "PrecisionError", "ProcessError", "RecipeError", "print"}
LOG_CALLS = {"debug", "info", "warning", "error", "exception", "critical"}


def words_of_page(text: str) -> str:
    """The prose of a page: without code, and without addresses of links."""
    text = re.sub(r"^ *```.*?^ *```|<!--.*?-->", "", text, flags=re.M | re.S)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)


def is_message(node: ast.AST) -> bool:
    """Whether a node raises an error, logs or prints."""
    if isinstance(node, ast.Raise):
        return True
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in MESSAGES or (name in LOG_CALLS and isinstance(function, ast.Attribute))


def messages_of(path: Path) -> set[tuple[int, str]]:
    """The texts of the errors, log lines and outputs in a file, with their lines."""
    messages = filter(is_message, ast.walk(ast.parse(path.read_bytes())))
    parts = (part for message in messages for part in ast.walk(message) if isinstance(part, ast.Constant))
    return {(part.lineno, part.value) for part in parts if isinstance(part.value, str)}


@functools.cache
def texts() -> list[tuple[str, str]]:
    """Every text that a user reads, with its place."""
    found = [(str(page.relative_to(REPOSITORY)), words_of_page(page.read_text())) for page in PAGES]
    for options in options_by_group().values():
        found += [(f"option {option.name}", words_of_page(option.metadata["help"])) for option in options]
    for path in sorted(PACKAGE.rglob("*.py")):
        found += [(f"{path.relative_to(REPOSITORY)}:{line}", text) for line, text in sorted(messages_of(path))]
    return [(place, " ".join(text.split())) for place, text in found]


def search(words: str) -> list[tuple[str, str]]:
    """Where the words occur, and the one that does."""
    pattern = re.compile(rf"\b({words})\b", re.I)
    return [(place, match[0]) for place, text in texts() for match in pattern.finditer(text)]


def test_other_words_are_not_used():
    found = [
        f"{place}: {word!r}; we say {term!r}" for term, words in INSTEAD_OF.items() for place, word in search(words)
    ]
    assert not found, "\n".join(found)


def test_the_words_are_found_where_they_are():
    """The search itself: it sees a message's parts, and not the code on a page."""
    assert words_of_page("a `directory`\n```bash\ndirectory\n```\n[b](directory)").split() == ["a", "[b"]
    found = [text for _, text in messages_of(PACKAGE / "checkpoint" / "policy.py")]
    assert any("early_stop_metric" in text for text in found)


def test_each_term_is_defined_once_in_the_glossary():
    assert len(TERMS) == len({term.lower() for term in TERMS}) > 50
    entries = re.split(r"^### .+$", GLOSSARY.read_text(), flags=re.M)[1:]
    empty = [term for term, entry in zip(TERMS, entries, strict=True) if not entry.split("## ")[0].strip()]
    assert not empty


def test_each_term_is_used_on_another_page():
    pages = "\n".join(page.read_text() for page in PAGES if page != GLOSSARY)
    unused = [term for term in TERMS if not re.search(rf"\b{re.escape(term)}(s|ned)?\b", pages, re.I)]
    assert not unused, "no page uses these: leave them out"
