"""Checks every object that a resolved YAML names, before one of them is built: what it is, may be, and is given."""

from __future__ import annotations

import dataclasses
import inspect
from types import ModuleType
from typing import Any

from amp_recipes.config.trust.signatures import Callee
from amp_recipes.config.trust.trust import Trust
from amp_recipes.config.yaml.mistakes import did_you_mean
from amp_recipes.config.yaml.nodes import Mapping, Mistakes, Node, Scalar, Unknown, attribute_name, walk
from amp_recipes.config.yaml.tags import ATTRIBUTE
from amp_recipes.errors import ConfigError

_ENOUGH_MISTAKES = 300  # of which the first are told; a file of nothing but mistakes must not take minutes


def check_targets(root: Mapping, trust: Trust, mistakes: Mistakes) -> int:
    """How many objects a resolved tree would build; what is wrong with any of them is added to `mistakes`.

    Imports the modules that the tree names, if `trust` allows them; calls nothing. Ends early after hundreds of
    mistakes.
    """
    count = 0
    names = _Names(trust)
    for _, node in walk(root):
        if len(mistakes) > _ENOUGH_MISTAKES:
            break
        kind, colon, name = node.tag.partition(":")
        if node.tag == ATTRIBUTE:
            _check_attribute(node, names, mistakes)
        elif colon and kind in _CHECKS:
            count += kind in ("!new", "!name", "!apply")
            try:
                _CHECKS[kind](name, node, names, mistakes)
            except ConfigError as error:
                mistakes.add(node.source, str(error))
    return count


class _Names:
    """What the names of one YAML lead to, each looked up and read once."""

    def __init__(self, trust: Trust) -> None:
        self.trust = trust
        self._targets: dict[str, Any] = {}
        self._callees: dict[str, Callee] = {}
        self._attributes: dict[tuple[str, str], set[str]] = {}

    def target(self, name: str) -> Any:
        """The object that a name leads to. Raises ConfigError, the same one each time."""
        if name not in self._targets:
            try:
                self._targets[name] = self.trust.locate(name)
            except ConfigError as error:
                self._targets[name] = _Failure(error)
        found = self._targets[name]
        if isinstance(found, _Failure):
            raise found.error
        return found

    def callee(self, name: str) -> Callee:
        """What is known of the class or function of that name."""
        if name not in self._callees:
            self._callees[name] = Callee(self.target(name))
        return self._callees[name]

    def attributes(self, kind: str, name: str) -> set[str]:
        """All attributes of what `!new:` or `!apply:` of a name gives; empty where only the object itself knows."""
        if (kind, name) not in self._attributes:
            target = self.target(name)
            made = target if kind == "!new" else None
            if kind == "!apply" and not inspect.iscoroutinefunction(target):
                returned = self.callee(name).hints.get("return")
                made = returned if _has_no_other_kind(returned) else None
            self._attributes[kind, name] = set(dir(made)) | _fields_of(made) if _has_only_fields(made) else set()
        return self._attributes[kind, name]


@dataclasses.dataclass(frozen=True)
class _Failure:
    error: ConfigError


def _check_attribute(node: Node, names: _Names, mistakes: Mistakes) -> None:
    """`!ref <key.attribute>`, which was resolved to a call of getattr; nobody else may call it."""
    name = attribute_name(node)
    if name is None:
        mistakes.add(node.source, "getattr takes an object and the name of an attribute; write !ref <key.attribute>.")
        return
    if not (name.isascii() and name.isidentifier()) or name.startswith("_"):
        mistakes.add(node.source, f"{name!r} is no public attribute: expected one name that begins with a letter.")
        return
    owner_tag = node.items[0].tag
    kind, _, owner = owner_tag.partition(":")
    if kind == "!module":
        _check_member(node, owner, name, names, mistakes)
        return
    try:
        known = names.attributes(kind, owner) if kind in ("!new", "!apply") else set()
    except ConfigError:  # told where the object itself is checked
        return
    if known and name not in known:
        public = [attribute for attribute in known if not attribute.startswith("_")]
        mistakes.add(node.source, f"{owner_tag} gives no {name!r}.{did_you_mean(name, public)}")


def _has_only_fields(made: Any) -> bool:
    """Whether the objects of a class have certainly no attributes but its fields and what the class shows.

    That is so for a named tuple, and for a dataclass that is built by nothing but its generated `__init__`.
    """
    if not inspect.isclass(made) or hasattr(made, "__getattr__"):
        return False
    if made.__bases__ == (tuple,):
        return "_fields" in vars(made)
    is_looked_up, is_made = made.__getattribute__ is object.__getattribute__, made.__new__ is object.__new__
    if "__dataclass_fields__" not in vars(made) or hasattr(made, "__post_init__") or not (is_looked_up and is_made):
        return False
    code = getattr(vars(made).get("__init__"), "__code__", None)
    return code is not None and code.co_filename == "<string>"  # written by `dataclasses`, not in a file


def _has_no_other_kind(returned: Any) -> bool:
    """Whether what a function says that it returns is certainly of that class, and as it was made."""
    if not inspect.isclass(returned) or "__final__" in vars(returned):
        return inspect.isclass(returned)
    parameters = vars(returned).get("__dataclass_params__")
    is_fixed = parameters.frozen if parameters else returned.__bases__ == (tuple,)
    return is_fixed and not returned.__subclasses__()


def _fields_of(made: type) -> set[str]:
    return {field.name for field in dataclasses.fields(made)} if dataclasses.is_dataclass(made) else set()


def _check_new(name: str, node: Node, names: _Names, mistakes: Mistakes) -> None:
    target = names.target(name)
    if not inspect.isclass(target):
        use = f"!apply:{name} calls it" if inspect.isroutine(target) else f"!name:{name} gives it"
        mistakes.add(node.source, f"!new: makes an object of a class, but {name} is {_what(target)}; {use}.")
    elif inspect.isabstract(target):
        methods = ", ".join(sorted(target.__abstractmethods__))
        mistakes.add(node.source, f"{name} is abstract: name a class that also defines {methods}.")
    else:
        _add_all(names.callee(name).check(node, partial=False), mistakes)


def _check_apply(name: str, node: Node, names: _Names, mistakes: Mistakes) -> None:
    target = names.target(name)
    if inspect.isroutine(target):
        _add_all(names.callee(name).check(node, partial=False), mistakes)
    else:
        use = f"!new:{name} makes an object of it" if inspect.isclass(target) else f"!name:{name} gives it"
        mistakes.add(node.source, f"!apply: calls a function, but {name} is {_what(target)}; {use}.")


def _check_member(node: Node, module: str, name: str, names: _Names, mistakes: Mistakes) -> None:
    try:
        owner = names.trust.module(module)
    except ConfigError:  # told where the module itself is checked
        return
    try:
        names.trust.attribute(owner, name)
    except ConfigError as error:
        mistakes.add(node.source, str(error))


def _check_name(name: str, node: Node, names: _Names, mistakes: Mistakes) -> None:
    target = names.target(name)
    if inspect.isclass(target) or inspect.isroutine(target):
        if _has_arguments(node):
            _add_all(names.callee(name).check(node, partial=True), mistakes)
    elif _has_arguments(node):
        mistakes.add(node.source, f"only a class or function takes arguments, but {name} is {_what(target)}.")


def _check_module(name: str, node: Node, names: _Names, mistakes: Mistakes) -> None:
    names.trust.module(name)
    if _has_arguments(node):
        mistakes.add(node.source, f"!module:{name} takes no arguments.")


def _check_applied_reference(name: str, node: Node, names: _Names, mistakes: Mistakes) -> None:
    target = names.target(name)
    if not inspect.isroutine(target):
        mistakes.add(node.source, f"!applyref: calls a function, but {name} is {_what(target)}.")


_CHECKS = {
    "!new": _check_new,
    "!apply": _check_apply,
    "!name": _check_name,
    "!module": _check_module,
    "!applyref": _check_applied_reference,
}


def _has_arguments(node: Node) -> bool:
    return not isinstance(node, Scalar | Unknown) and bool(node.items)


def _add_all(found: Any, mistakes: Mistakes) -> None:
    for source, text in found:
        mistakes.add(source, text)
        if len(mistakes) > _ENOUGH_MISTAKES:
            return


def _what(target: Any) -> str:
    if inspect.isclass(target):
        return "a class"
    if inspect.isroutine(target):
        return "a function"
    return "a module" if isinstance(target, ModuleType) else f"a {type(target).__name__}"
