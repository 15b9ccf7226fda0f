"""The tree of errors that users read is the one that they can catch."""

import builtins
import inspect
import re

import pytest

from amp_recipes import errors

BRANCH = re.compile(r"^(?P<indent>[ │]*)(?:[├└]── )?(?P<name>[A-Z]\w+)(?: \(also an? (?P<builtin>\w+)\))?(?:\s+\S.*)?$")


def documented_tree():
    """Name -> names of its bases, as the module's docstring draws them."""
    bases, path = {}, []
    start = errors.__doc__.index("    AmpRecipesError")
    block = errors.__doc__[start:].split("\n\n")[0]
    for line in block.splitlines():
        match = BRANCH.match(line)
        assert match, f"not a line of the tree: {line!r}"
        depth = re.search(r"[A-Z]", line).start() // 4 - 1
        del path[depth:]
        parent = path[-1] if path else "Exception"
        bases[match["name"]] = (parent, match["builtin"]) if match["builtin"] else (parent,)
        path.append(match["name"])
    return bases


def classes():
    own = {name: value for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
    return {name: value for name, value in own.items() if inspect.isclass(value)}


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    assert documented_tree() == {name: tuple(b.__name__ for b in value.__bases__) for name, value in classes().items()}


def test_every_error_is_caught_as_the_frameworks_and_as_the_builtin_of_its_kind(subtests):
    for name, kind in classes().items():
        if kind is errors.AmpRecipesError:
            continue
        with subtests.test(name):
            builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")
            for caught in (errors.AmpRecipesError, builtin):
                with pytest.raises(caught, match="what to do"):
                    raise kind("what to do")
            assert builtin is not Exception and getattr(builtins, builtin.__name__) is builtin


def test_no_two_branches_catch_each_other():
    branches = [value for value in classes().values() if value.__bases__[0] is errors.AmpRecipesError]
    assert len(branches) > 1
    assert not [(a, b) for a in branches for b in branches if a is not b and issubclass(a, b)]
