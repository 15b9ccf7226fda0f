"""What --help says of the YAML's own keys."""

from repository import REPOSITORY
from work import at_most

from amp_recipes.config.options.yaml_help import keys_help
from amp_recipes.config.yaml.limits import Budget
from amp_recipes.config.yaml.nodes import Mistakes
from amp_recipes.config.yaml.reading import read_file, read_text


def shown(text, width=100):
    mistakes = Mistakes()
    root = read_text(f"{text}\n", "x.yaml", mistakes, Budget())
    assert not list(mistakes)
    return keys_help(root, width).splitlines()


def test_each_key_has_its_value_and_comment(subtests):
    for yaml, lines in [
        ("lr: 1e-3", ["  --lr 1e-3"]),  # as it is written
        ("lr: 0.1  # step size", ["  --lr 0.1  step size"]),
        ("a: 1  # one\nlonger: 2  # two\nc: 3", ["  --a 1       one", "  --longer 2  two", "  --c 3"]),
        ("precision: bf16  # of training\nlr: 1", ["  --precision bf16  of training", "  --lr 1"]),
        ("m: {seed: 3}", ["  --m.seed 3"]),
        ("a:\nb: null\nc: ~\nd: ''", ["  --a null", "  --b null", "  --c ~", "  --d ''"]),
        ("a: '1'\nb: '[x]'\nc: \"x\"\nd: !ref '<a>'", ["  --a '1'", "  --b '[x]'", "  --c x", "  --d !ref <a>"]),
        ("a: !ref <b>/c\nb: !PLACEHOLDER", ["  --a !ref <b>/c", "  --b !PLACEHOLDER"]),
        ("a: [1, 2, x]\nb: (1, 2)\nc: []\nd: {}", ["  --a [1, 2, x]", "  --b (1, 2)", "  --c []", "  --d {}"]),
        ("a: !new:x.A\n  b: 1  # width\nc: !name:x.B", ["  a !new:x.A", "  --a.b 1  width", "  c !name:x.B"]),
        ("a: !new:x.A [1, 2]", ["  a !new:x.A [1, 2]"]),
        ("a:  # group\n  b: 1\nc:\n  d: 1", ["  a  group", "  --a.b 1", "  --c.d 1"]),
        ("a:\n- b: 1\n- !new:x.A\n- 3", ["  --a.0.b 1", "  a.1 !new:x.A", "  --a.2 3"]),
        ("a: &x {b: 1}\nc: *x", ["  --a.b 1", "  c as a"]),
        ("a: !include:b.yaml\n  c: 1", ["  --a !include:b.yaml", "  --a.c 1"]),
        ("a: " + "x" * 50, ["  --a " + "x" * 37 + "..."]),
        ("{}", []),
    ]:
        with subtests.test(yaml=yaml):
            assert shown(yaml) == lines


def test_comments_wrap_beside_their_column_and_long_names_push_them_down():
    name = "a_name_of_many_letters_" * 2
    lines = shown(f"lr: 1  # one two three four five six seven\n{name}: 1  # eight nine", 40)
    assert lines == [
        "  --lr 1  one two three four five six",
        "          seven",
        f"  --{name} 1",
        "          eight nine",
    ]


def test_a_narrow_terminal_still_gets_words():
    assert max(map(len, shown("lr: 1  # one two three four five six seven", 1))) <= 30


def test_nothing_steers_the_terminal():
    text = "\n".join(shown('a: "\\e[31mred\\x07"\n"b\\e[2J": 1  # x\nc: !ref "<a>\\e"'))
    assert "\x1b" not in text and "\x07" not in text


def test_a_file_of_anchors_is_told_at_once():
    lists = "\n".join(["a0: &a0 [1]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 45)])
    maps = "\n".join(["b0: &b0 {x: 1}"] + [f"b{n}: &b{n} {{x: *b{n - 1}, y: *b{n - 1}}}" for n in range(1, 45)])
    with at_most(calls=1_000_000):
        lines = shown(f"{lists}\n{maps}")
    assert len(lines) < 200


def test_every_key_of_the_recipes_is_told_with_its_comment(subtests):
    for recipe in sorted((REPOSITORY / "configs").glob("*.yaml")):
        with subtests.test(recipe=recipe.stem):
            root = read_file(str(recipe), Mistakes(), Budget())
            text = keys_help(root, 100)
            assert all(len(line) <= 100 for line in text.splitlines())
            assert [key for key in root.items if key not in text] == []
            if recipe.stem == "image_classification":
                assert "--lr 0.003" in text and "at the start; the cosine takes it to zero" in text
                assert "  model !new:model.SmallResNet" in text and "--model.dropout 0.0" in text
                assert "--seed 1234" in text and "initial weights, order of the batches, augmentation" in text
