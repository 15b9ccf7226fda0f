"""Included files: where they are looked up, what may be included, and what the values below the tag do."""

import os

import pytest
from hyperpyyaml import load_hyperpyyaml
from ruamel.yaml import Loader
from work import at_most

from amp_recipes.config import load_hparams
from amp_recipes.config.yaml.including import expand_includes
from amp_recipes.config.yaml.limits import CHARACTERS, INCLUDED_FILES, Budget, LimitError
from amp_recipes.config.yaml.nodes import (
    COMMAND_LINE,
    Mapping,
    Mistakes,
    Scalar,
    Sequence,
    Unknown,
    children,
    is_plain_mapping,
    walk,
)
from amp_recipes.config.yaml.overriding import apply_overrides
from amp_recipes.config.yaml.reading import read_file
from amp_recipes.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "params.yaml") -> str:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return str(file)

    return write_file


def expanded(file: str, trusted_folders=(), budget=None) -> tuple[Mapping, list[str]]:
    mistakes, budget = Mistakes(), budget or Budget()
    root = read_file(file, mistakes, budget)
    assert root is not None, list(mistakes)
    expand_includes(root, trusted_folders, mistakes, budget)
    assert not any(child.tag.startswith("!include:") for _, child in walk(root) if not isinstance(child, Unknown))
    return root, list(mistakes)


def tree_of(file: str, *trusted_folders: str) -> Mapping:
    root, mistakes = expanded(file, trusted_folders)
    assert mistakes == []
    return root


def mistake_of(file: str, *trusted_folders: str) -> str:
    (mistake,) = expanded(file, trusted_folders)[1]
    return mistake


def values(node):
    """Plain data of a tree; a reference is looked up in its scope, by names only."""
    if isinstance(node, Scalar) and node.tag == "!ref":
        branch = node.scope
        for part in node.value.strip("<>").split("["):
            branch = branch.items[part.strip("]")]
        return values(branch)
    if isinstance(node, Scalar):
        return f"{node.tag} {node.value or ''}".strip() if node.tag else node.value
    if isinstance(node, Sequence):
        return [values(item) for item in node.items]
    found = {key: values(item) for key, item in node.items.items()}
    return {node.tag: found} if node.tag else found


def by_hyperpyyaml(file: str):
    with open(file) as stream:
        return load_hyperpyyaml(stream, loader=type("OwnLoader", (Loader,), {}))


def test_a_file_takes_the_place_of_its_tag_and_keeps_its_lines(write, tmp_path):
    net = write("# the net\nhidden: 4  # units\nlayers: [1, 2]\n", "parts/net.yaml")
    root = tree_of(write("a: 1\nnet: !include:parts/net.yaml\n"))
    assert values(root) == {"a": 1, "net": {"hidden": 4, "layers": [1, 2]}}
    included = root.items["net"]
    assert is_plain_mapping(included)
    assert str(included.key_sources["hidden"]) == f"{net}:2:1"
    assert str(root.key_sources["net"]) == f"{tmp_path}/params.yaml:2:1"


def test_a_relative_main_file_gives_relative_places(write, tmp_path, monkeypatch):
    write("x: 1\n", "parts/net.yaml")
    write("y: !include:../parts/net.yaml\n", "configs/in/part.yaml")
    write("net: !include:in/part.yaml\n", "configs/main.yaml")
    write("net: !include:parts/net.yaml\n", "main.yaml")
    monkeypatch.chdir(tmp_path)
    assert tree_of("main.yaml").items["net"].source.file == "parts/net.yaml"
    assert expanded("configs/main.yaml")[0].items["net"].source.file == "configs/in/part.yaml"


def test_an_include_may_stand_in_mappings_and_lists(subtests, write):
    for where in ["main: !include:net.yaml", "main: [1, !include:net.yaml ]", "{a: !include:net.yaml }"]:
        with subtests.test(where=where):
            write("x: 1\n", "net.yaml")
            file = write(where)
            assert values(tree_of(file)) == by_hyperpyyaml(file)


VALUES = {
    "new and old keys": ("{a: 9, c: 3}", "a: 1\nb: 2\n"),
    "nested keys": ("{m: {x: 9, new: {y: 1}}}", "m: {x: 1, z: 2}\n"),
    "a list replaces": ("{l: [9]}", "l: [1, 2]\nm: 3\n"),
    "null replaces": ("{m: null}", "m: {x: 1}\n"),
    "a mapping that is empty changes nothing": ("{m: {}}", "m: {x: 1}\n"),
    "references to the outer file": ("{a: !ref <lr>, m: {x: !ref '<opts[k]>'}}", "a: 1\nm: {x: 1, y: 2}\n"),
    "inner references follow": ("{a: 5}", "a: 1\nb: !ref <a>\nm: {c: !ref <a>}\n"),
    "a reference to a mapping merges": ("{m: !ref <opts>}", "m: {k: 1, z: 2}\n"),
    "a reference through a reference merges": ("{m: !ref <again>}", "m: {k: 1, deep: {w: 5}}\nn: !ref <m[deep][w]>\n"),
    "a reference to a list replaces": ("{m: !ref <some>}", "m: {a: 1}\n"),
    "arguments of an object": ("{m: {x: 9}}", "m: !new:collections.Counter {x: 1, z: 2}\n"),
    "arguments of the same object": (
        "{m: !new:collections.Counter {x: 9}}",
        "m: !new:collections.Counter {x: 1, z: 2}\n",
    ),
    "a placeholder is filled": ("{p: 4}", "p: !PLACEHOLDER\nq: !ref <p>\n"),
    "an include in the values": ("{m: !include:other.yaml }", "m: {o: 1, z: 2}\n"),
    "an include in the values with values": ("{m: !include:other.yaml {o: !ref <lr>}}", "m: {z: 2}\nn: !ref <m[o]>\n"),
    "an include that is replaced": ("{m: 3}", "m: !include:missing.yaml\n"),
    "values of an inner include": ("{m: {o: 8}}", "m: !include:other.yaml {n: 9}\n"),
    "a circle that is cut": ("{m: 3}", "m: !include:net.yaml {m: !ref <x>}\nx: 1\n"),
}


def test_values_below_the_tag_mean_what_hyperpyyaml_means(subtests, write):
    for name, (below, net) in VALUES.items():
        with subtests.test(name):
            write(net, "net.yaml")
            write("o: 7\nnew: 1\ntwice: !ref <o>\n", "other.yaml")
            main = "lr: 3\nopts: {k: 6, deep: {v: 1}}\nagain: !ref <opts>\nsome: [1]\nnet: !include:net.yaml "
            file = write(main + below + "\n")
            expected = by_hyperpyyaml(file)
            found = values(tree_of(file))
            objects = found["net"].get("m")
            if isinstance(objects, dict) and "!new:collections.Counter" in objects:
                found["net"]["m"] = objects["!new:collections.Counter"]
                expected["net"]["m"] = dict(expected["net"]["m"])
            assert found == expected


# What HyperPyYAML refuses, or builds as something that neither file says.
def test_values_below_the_tag_where_hyperpyyaml_has_no_answer(subtests, write):
    for below, net, expected in [
        ("{m: !new:B {y: 2}}", "m: !new:A {x: 1}", {"m": {"!new:B": {"y": 2}}}),
        ("{m: !new:B {y: 2}}", "m: {x: 1}", {"m": {"!new:B": {"y": 2}}}),
        ("{m: !new:B {y: 2}}", "m: 1", {"m": {"!new:B": {"y": 2}}}),
        ("{m: !new:B }", "m: {x: 1}", {"m": "!new:B"}),
        ("{m: {y: 2}}", "m: !new:A", {"m": {"!new:A": {"y": 2}}}),
        ("{m: {y: 2}}", "m: null", {"m": {"y": 2}}),
        ("{m: {y: 2}}", "m: !PLACEHOLDER", {"m": {"y": 2}}),
        ("{m: {o: 2}}", "m: !include:other.yaml", {"m": {"o": 2, "twice": 2}}),
        ("{m: !ref <opts>}", "m: !include:other.yaml", {"m": {"o": 7, "twice": 7, "k": 6}}),
        ("{m: !ref <opts>}", "m: 1", {"m": {"k": 6}}),
    ]:
        with subtests.test(below=below, net=net):
            write(net, "net.yaml")
            write("o: 7\ntwice: !ref <o>\n", "other.yaml")
            assert values(tree_of(write(f"opts: {{k: 6}}\nnet: !include:net.yaml {below}\n")).items["net"]) == expected


def test_a_reference_to_no_mapping_takes_the_place_of_a_mapping(subtests, write):
    for reference in ["<wrong>", "<m>", "<a[b]>", "<opts[k]>", "<opts.k>", "<opts> x", "<again>", "<opts"]:
        with subtests.test(reference=reference):
            write("m: {x: 1}", "net.yaml")
            text = f"opts: {{k: 6}}\nagain: !ref <again>\nnet: !include:net.yaml\n  m: !ref {reference}\n"
            root = tree_of(write(text))
            assert root.items["net"].items["m"].value == reference  # whether it is right is told when it is resolved


def test_a_mapping_for_a_value_without_keys_is_a_mistake(subtests, write):
    for inner in ["1", "text", "[1, 2]", "!ref <a>", "!new:X [1]", "(1, 2)"]:
        with subtests.test(inner=inner):
            net = write(f"a: 1\nm: {inner}\n", "net.yaml")
            file = write("net: !include:net.yaml\n  m: {x: 1}\n")
            said = f"{file}:2:3: net.m: this is a mapping, but {net}:2:1 holds a value without keys."
            assert mistake_of(file) == said


def test_each_reference_keeps_the_scope_of_its_own_file(write):
    write("x: inner\nown: !ref <x>\ngiven: 0\n", "net.yaml")
    root = tree_of(write("x: outer\nnet: !include:net.yaml {given: !ref <x>, list: [!ref <x>]}\n"))
    assert values(root.items["net"]) == {"x": "inner", "own": "inner", "given": "outer", "list": ["outer"]}


def test_references_of_a_file_that_was_merged_follow_what_is_changed_later(write):
    write("opts: {lr: 1, z: 0}\nuse: !ref <opts[lr]>\n", "net.yaml")
    write("lr: 2\nsame: !ref <lr>\n", "opts.yaml")
    root = tree_of(write("net: !include:net.yaml {opts: !include:opts.yaml }\n"))
    net = root.items["net"]
    assert values(net) == {"opts": {"lr": 2, "z": 0, "same": 2}, "use": 2}
    net.items["opts"].items["lr"] = Scalar("", 5, net.source)
    assert values(net) == {"opts": {"lr": 5, "z": 0, "same": 5}, "use": 5}


def test_a_reference_to_a_mapping_follows_what_is_changed_later(write):
    write("m: {lr: 1, z: 0}\n", "net.yaml")
    root = tree_of(write("opts: {lr: 2, 3: x}\nnet: !include:net.yaml {m: !ref <opts>}\n"))
    root.items["opts"].items["lr"] = Scalar("", 5, root.source)
    assert values(root.items["net"]) == {"m": {"lr": 5, "z": 0, 3: "x"}}


def test_overrides_reach_into_included_files(write):
    write("hidden: 4\nlayers: {a: {b: 1}, c: [1]}\ntwice: !ref <hidden>\n", "parts/net.yaml")
    net = write("inner: !include:net.yaml\n", "parts/outer.yaml").replace("outer.yaml", "net.yaml")
    root = tree_of(write("net: !include:parts/outer.yaml\nother: !include:parts/net.yaml {hidden: 5}\n"))
    mistakes = Mistakes()
    overrides = {"net.inner.hidden": 8, "net.inner.layers.c.0": 2, "other.layers.a.b": 7, "other.hiden": 1}
    apply_overrides(root, overrides, mistakes, COMMAND_LINE, "--")
    assert values(root.items["net"]) == {"inner": {"hidden": 8, "layers": {"a": {"b": 1}, "c": [2]}, "twice": 8}}
    assert values(root.items["other"]) == {"hidden": 5, "layers": {"a": {"b": 7}, "c": [1]}, "twice": 5}
    (mistake,) = mistakes
    assert mistake.endswith("--other.hiden is neither a key of the YAML nor a run option. Did you mean --other.hidden?")
    assert str(root.items["net"].items["inner"].key_sources["hidden"]) == f"{net}:1:1"


def test_the_same_file_twice_is_two_trees_and_an_alias_is_one(write):
    write("x: 1\n", "net.yaml")
    root = tree_of(write("a: &a !include:net.yaml {y: 1}\nb: !include:net.yaml {y: 2}\nc: *a\n"))
    assert values(root) == {"a": {"x": 1, "y": 1}, "b": {"x": 1, "y": 2}, "c": {"x": 1, "y": 1}}
    assert root.items["a"] is root.items["c"]
    assert root.items["a"] is not root.items["b"]


def test_a_diamond_is_no_circle(write):
    write("x: 1\n", "base.yaml")
    write("base: !include:base.yaml\n", "left.yaml")
    write("base: !include:base.yaml {x: 2}\n", "right.yaml")
    root = tree_of(write("l: !include:left.yaml\nr: !include:right.yaml {also: !include:right.yaml }\n"))
    assert values(root) == {"l": {"base": {"x": 1}}, "r": {"base": {"x": 2}, "also": {"base": {"x": 2}}}}


def test_a_circle_is_named(write):
    write("x: 1\nb: !include:sub/b.yaml\n", "a.yaml")
    b = write("deep:\n  - c: !include:../a.yaml\n", "sub/b.yaml")
    main = write("a: !include:a.yaml\n")
    expected = "the file includes itself: a.yaml -> sub/b.yaml -> a.yaml."
    assert mistake_of(main) == f"{b}:2:8: a.b.deep.0.c: !include:../a.yaml: {expected}"
    itself = write("me: !include:itself.yaml\n", "itself.yaml")
    assert mistake_of(itself).endswith("the file includes itself: itself.yaml -> itself.yaml.")


def test_a_circle_through_a_link_is_named(write, tmp_path):
    main = write("a: !include:link.yaml\n")
    (tmp_path / "link.yaml").symlink_to(main)
    assert mistake_of(main).endswith("the file includes itself: params.yaml -> params.yaml.")


def test_a_missing_file_suggests_the_nearest(subtests, write, tmp_path):
    write("x: 1\n", "net.yaml")
    write("x: 1\n", "parts/head.yml")
    for name, hint in [
        ("nit.yaml", " Did you mean net.yaml?"),
        ("net", " Did you mean net.yaml?"),
        ("parts/hed.yaml", " Did you mean parts/head.yml?"),
        ("nowhere/net.yaml", ""),
        ("quite-other.txt", ""),
    ]:
        with subtests.test(name=name):
            file = write(f"top:\n  net: !include:{name}\n")
            expected = f"{file}:2:8: top.net: !include:{name}: there is no file {tmp_path}/{name}.{hint}"
            root, mistakes = expanded(file)
            assert mistakes == [expected]
            assert isinstance(root.items["top"].items["net"], Unknown)


def test_a_file_outside_the_folder_of_the_yaml_needs_trust(subtests, write, tmp_path):
    outside = write("x: 1\n", "outside.yaml")
    (tmp_path / "configs/sub").mkdir(parents=True)
    (tmp_path / "configs/link.yaml").symlink_to(outside)
    (tmp_path / "configs/folder").symlink_to(tmp_path)
    for written in [
        "../outside.yaml",
        "sub/../../outside.yaml",
        outside,
        "link.yaml",
        "folder/outside.yaml",
        "/etc/passwd",
    ]:
        with subtests.test(written=written):
            file = write(f"net: !include:{written}\n", "configs/main.yaml")
            folder = "/etc" if written.startswith("/etc") else str(tmp_path)
            mistake = mistake_of(file)
            assert f"lies outside {tmp_path}/configs, the folder of the main YAML." in mistake
            assert mistake.endswith(f'trust=("{folder}",) in load_hparams, or --trust {folder} on the command line.')
            if folder != "/etc":
                assert values(tree_of(file, folder)) == {"net": {"x": 1}}
                assert mistake_of(file, f"{folder}/other") == mistake


def test_a_neighbour_whose_name_begins_alike_is_outside(write):
    write("x: 1\n", "configs2/x.yaml")
    assert "lies outside" in mistake_of(write("net: !include:../configs2/x.yaml\n", "configs/main.yaml"))


def test_whether_a_file_outside_exists_is_not_told(write, tmp_path):
    write("x: 1\n", "there.yaml")
    first, second = (
        mistake_of(write(f"a: !include:../{name}\n", "configs/m.yaml")) for name in ("there.yaml", "no.yaml")
    )
    assert first.replace("there.yaml", "no.yaml") == second


def test_a_file_is_looked_up_beside_the_real_file_of_the_tag(write, tmp_path):
    write("x: right\n", "real/net.yaml")
    write("x: wrong\n", "net.yaml")
    real = write("net: !include:net.yaml\n", "real/main.yaml")
    (tmp_path / "main.yaml").symlink_to(real)
    root = tree_of(str(tmp_path / "main.yaml"))
    assert values(root) == {"net": {"x": "right"}}
    assert root.items["net"].source.file == str(tmp_path / "real/net.yaml")


def test_what_a_trusted_file_includes_must_be_trusted_too(write, tmp_path):
    write("x: 1\n", "secret/x.yaml")
    write("y: !include:../secret/x.yaml\n", "shared/y.yaml")
    file = write("z: !include:../shared/y.yaml\n", "configs/main.yaml")
    assert "secret/x.yaml lies outside" in mistake_of(file, str(tmp_path / "shared"))
    assert values(tree_of(file, str(tmp_path))) == {"z": {"y": {"x": 1}}}


def test_what_cannot_be_included_is_one_mistake(subtests, write, tmp_path):
    for name, content in {"net": "x: 1", "list": "[1]", "broken": "a: [", "empty": ""}.items():
        write(content, f"{name}.yaml")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for line, text in [
        ("!include:net.yaml foo", ""),
        ("!include:net.yaml [1]", ""),
        ("!include:", "needs a name"),
        ("!include:folder", ""),
        ("!include:pipe", ""),
        ("!include:list.yaml", ""),
        ("!include:broken.yaml", ""),
        ("!include:empty.yaml", ""),
        ("!include:%00", "cannot be printed"),
        ("!include:" + "a" * 300, "there is no file"),
        ("!include:" + "a/" * 3000, "there is no file"),
    ]:
        with subtests.test(line=line):
            root, mistakes = expanded(write(f"a: 1\nnet: {line}\n"))
            assert len(mistakes) == 1 and text in mistakes[0]
            assert not is_plain_mapping(root.items["net"])


def test_a_name_that_no_file_can_have_is_a_mistake(write):
    mistakes, root = Mistakes(), tree_of(write("a: 1\n"))
    root.items["a"] = Scalar("!include:\0.yaml", "", root.source)
    expand_includes(root, (), mistakes, Budget())
    assert "cannot be the name of a file" in next(iter(mistakes))


def test_all_mistakes_are_told(write):
    write("a: !include:no1.yaml\nb: !include:no2.yaml\n", "net.yaml")
    mistakes = expanded(write("a: !include:net.yaml\nb: !include:no3.yaml {x: !include:no4.yaml }\n"))[1]
    assert [mistake.partition("!include:")[2][:3] for mistake in mistakes] == ["no1", "no2", "no3", "no4"]


def test_files_that_multiply_are_stopped(write):
    for level in range(30):
        write(f"a: !include:f{level + 1}.yaml\nb: !include:f{level + 1}.yaml\n", f"f{level}.yaml")
    with at_most(calls=1_000_000), pytest.raises(LimitError, match=f"more than {INCLUDED_FILES} files"):
        expanded(write("a: !include:f0.yaml\n"))


def test_files_together_are_no_deeper_than_one_may_be(subtests, write, tmp_path):
    for nested, files, fits in [(1, 49, True), (1, 60, False), (24, 2, True), (25, 2, False), (40, 100, False)]:
        with subtests.test(nested=nested, files=files):
            for level in range(files):
                write(f"{'{a: ' * nested} !include:f{level + 1}.yaml {'}' * nested}\n", f"f{level}.yaml")
            write("x: 1\n", f"f{files}.yaml")
            file = str(tmp_path / "f0.yaml")
            if fits:
                assert sum(1 for _ in walk(tree_of(file))) == nested * files + 1
            else:
                with pytest.raises(LimitError, match="nested more than 50 levels"):
                    expanded(file)


@pytest.mark.parametrize("characters", [CHARACTERS // 8, pytest.param(CHARACTERS, marks=pytest.mark.extended)])
def test_files_together_may_be_no_longer_than_a_limit(write, characters):
    write("# comment\n" * 9_000 + "a: 1\n" + "# comment\n" * 9_000, "long.yaml")
    main = write("".join(f"a{n}: !include:long.yaml\n" for n in range(100)), "main.yaml")
    mistakes, budget = Mistakes(), Budget(characters=characters)
    root = read_file(main, mistakes, budget)
    too_long = r"main.yaml:[0-9]+:[0-9]+: all files together have more than 2,097,152 char"
    with at_most(calls=12 * characters), pytest.raises(LimitError, match=too_long):
        expand_includes(root, (), mistakes, budget)


def test_includes_below_includes_do_not_fill_the_stack(write):
    nested = "!include:f{0}.yaml {{a: " * 24
    for level in range(20):
        write(f"a: {nested.format(level + 1)} 1 {'}' * 24}\n", f"f{level}.yaml")
    with pytest.raises(LimitError):
        expanded(write("a: !include:f0.yaml\n"))


def test_aliases_that_multiply_are_stopped_where_they_are_merged(write):
    lines = ["l0: &l0 {x: 1}", *(f"l{n}: &l{n} {{a: *l{n - 1}, b: *l{n - 1}}}" for n in range(1, 40))]
    write("\n".join(lines), "net.yaml")
    with at_most(calls=1_000_000), pytest.raises(LimitError):
        expanded(write("\n".join([*lines, "net: !include:net.yaml {l39: *l39}"])))


def test_no_node_stands_twice_where_a_file_is_included_twice(write):
    write("x: [1, {y: 2}]\n", "net.yaml")
    root = tree_of(write("a: !include:net.yaml\nb: !include:net.yaml\n"))
    ids = [id(child) for _, node in [((), root), *walk(root)] for _, child in children(node)]
    assert len(ids) == len(set(ids)) == 10


def test_a_value_for_a_key_that_the_file_has_nearly_is_a_mistake(tmp_path):
    (tmp_path / "part.yaml").write_text("hidden: 4\nlayer: {size: 1}\n")
    for given, nearest in (("hiden: 3", "hidden"), ("layer: {sizee: 3}", "size")):
        (tmp_path / "main.yaml").write_text(f"net: !include:part.yaml {{{given}}}\n")
        with pytest.raises(ConfigError, match=f"Did you mean {nearest}\\?"):
            load_hparams(tmp_path / "main.yaml")
    (tmp_path / "main.yaml").write_text("net: !include:part.yaml {depth: 3, layers: 2}\n")
    assert load_hparams(tmp_path / "main.yaml")["net"] == {"hidden": 4, "layer": {"size": 1}, "depth": 3, "layers": 2}
