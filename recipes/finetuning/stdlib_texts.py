"""Makes the default data: functions of Python's standard library, labelled by the subject of their module.

It is on every machine. A version or a distribution may lack some of the files; a subject that is left with fewer
than three is left out. The files of the subjects are kept out of the text that the tiny model is pretrained on.
"""

import ast
import csv
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from amp_recipes.errors import DataError

# Packages and modules of the standard library; those with few functions are grouped with similar ones.
SUBJECTS = {
    "archives": ("tarfile", "zipfile", "gzip", "bz2", "lzma", "shutil", "zipapp", "_compression", "zipimport"),
    "asyncio": ("asyncio",),
    "email": ("email", "mailbox", "smtplib", "imaplib", "poplib"),
    "gui": ("tkinter", "idlelib", "turtle", "turtledemo"),
    "imports": ("importlib", "pkgutil", "runpy", "modulefinder"),
    "processes": ("multiprocessing", "concurrent", "subprocess", "threading"),
    "testing": ("unittest", "doctest"),
    "web": ("http", "urllib", "html", "wsgiref", "xmlrpc", "ftplib", "socketserver"),
    "xml": ("xml", "plistlib"),
}
NO_TEXT = ("test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "encodings", "__pycache__")
FUNCTION_CHARACTERS = (150, 2000)
FUNCTIONS_PER_FILE = 20
FUNCTIONS_PER_SUBJECT = 250


def source_files() -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of the library's modules, sorted, without tests and tables; a name is "email/utils.py"."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if not set(name.parts) & set(NO_TEXT):
            yield name.as_posix(), path


def subject_of(name: str) -> str | None:
    """Return the subject of a module by its file's name, None where it has none."""
    top = name.split("/")[0].removesuffix(".py")
    return next((subject for subject, modules in SUBJECTS.items() if top in modules), None)


def corpus(max_characters: int) -> list[str]:
    """Return the source of modules that have no subject, for pretraining, until there are max_characters."""
    texts, count = [], 0
    for name, path in source_files():
        if subject_of(name) is None and count < max_characters:
            texts.append(read_source(path))
            count += len(texts[-1])
    if count < min(max_characters, 1_000_000):
        raise DataError(
            f"the standard library in {sysconfig.get_path('stdlib')} has hardly any source: the default data and model "
            "are made of it. Give your own with --data_file and --model_folder, or use a Python that has it"
        )
    return texts


def labelled_functions() -> str:
    """Return a CSV with the columns text (a function's source), label (its subject) and file.

    Functions of a file are at most 20, of a subject at most 250, chosen by a hash of their text.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for name, path in source_files():
        if subject := subject_of(name):
            functions = [text for text in functions_in(read_source(path)) if is_fit(text)]
            chosen = sorted(set(functions), key=digest)[:FUNCTIONS_PER_FILE]
            found.setdefault(subject, []).extend((text, name) for text in chosen)
    table = StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("text", "label", "file"))
    for subject, functions in sorted(found.items()):
        functions = sorted(functions, key=lambda function: digest(function[0]))[:FUNCTIONS_PER_SUBJECT]
        if len({name for _, name in functions}) >= 3:
            writer.writerows((text, subject, name) for text, name in functions)
    return table.getvalue()


def functions_in(source: str) -> Iterator[str]:
    """Yield the source of every function and method, indented as if it stood alone."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # lib2to3 and others have files for other Python versions
        return
    lines = source.splitlines()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))


def is_fit(text: str) -> bool:
    """Return whether a function is neither trivial nor very long."""
    shortest, longest = FUNCTION_CHARACTERS
    return shortest <= len(text) <= longest


def read_source(path: Path) -> str:
    """Return a module's text."""
    return path.read_text(encoding="utf-8", errors="replace")


def digest(text: str) -> str:
    """Return a name for a text that is the same on every machine."""
    return hashlib.sha256(text.encode()).hexdigest()
