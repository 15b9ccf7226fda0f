"""The fine-tuning recipe: its texts, its models, its defaults, and whole runs on a toy model made here."""

import csv
import itertools
import json
import multiprocessing
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers  # loads each part when it is first used
from pairwise import extended
from programs import DEADLINE_SECONDS
from recipe_runs import CONFIGS, recipe_modules, stage_records
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from amp_recipes.errors import ConfigError, DataError

CONFIG = CONFIGS / "finetuning.yaml"
WORDS = ("good", "bad", "plain", *(f"word{number}" for number in range(20)))


@pytest.fixture(scope="module")
def recipe():
    with recipe_modules("finetuning") as modules:
        yield modules


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A toy Llama with random weights, and a tokenizer of whole words."""
    return save_toy(tmp_path_factory.mktemp("models") / "llama", make_llama())


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory):
    """A toy BERT as pretraining leaves it: without a pooler."""
    return save_toy(tmp_path_factory.mktemp("models") / "bert", make_bert())


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    return write_reviews(tmp_path_factory.mktemp("data") / "reviews.csv")


def make_tokenizer():
    words = ["[PAD]", "[UNK]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    )


SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_llama(dtype=torch.float32):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, max_position_embeddings=32, pad_token_id=0)
    ).to(dtype)


def make_bert():
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, max_position_embeddings=32, pad_token_id=0))


def save_toy(folder, model):
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_reviews(path, count=360):
    """Write texts of 3 to 12 words, of which one is the word of the class."""
    draw = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "label"))
        for row in range(count):
            label = WORDS[row % 3]
            words = [*draw.choices(WORDS[3:], k=draw.randint(2, 11)), label]
            draw.shuffle(words)
            writer.writerow((" ".join(words), label))
    return path


def run(recipe, folder, model_folder, reviews, *options):
    recipe.train.main(
        [
            str(CONFIG),
            f"--model_folder={model_folder}",
            f"--data_file={reviews}",
            f"--output_folder={folder}",
            "--max_tokens=32",
            "--noprogressbar",
            "--lr=0.01",
            "--number_of_epochs=5",
            *options,
        ]
    )
    return stage_records(folder)


def read(recipe, file, **settings):
    return recipe.data.read_tables(file, cache_folder="unused", **settings)


def load(recipe, file, max_tokens=32, balanced=False, **settings):
    return recipe.data.load_texts(read(recipe, file, **settings), make_tokenizer(), max_tokens, balanced)


# --- whole runs


@pytest.mark.extended
@pytest.mark.parametrize(
    ("tuning", "precision"), [("full", "fp32"), ("full", "bf16"), ("full", "fp16"), ("lora", "fp32"), ("lora", "fp16")]
)
def test_a_short_run_learns(recipe, tmp_path, model_folder, reviews, tuning, precision):
    records = run(recipe, tmp_path, model_folder, reviews, f"--tuning={tuning}", f"--precision={precision}")
    assert records[-1]["stage"] == "test"
    assert records[-1]["metrics"]["accuracy"] > 0.8
    assert records[-1]["metrics"]["macro_f1"] > 0.8


def test_tested_weights_are_saved_for_transformers(recipe, tmp_path, bert_folder, reviews):
    reported = run(recipe, tmp_path, bert_folder, reviews, "--number_of_epochs=3")[-1]["metrics"]
    saved = tmp_path / "best_model"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(saved, local_files_only=True)
    check_reported(recipe, model, saved, bert_folder, reviews, reported)
    assert model.config.id2label == {0: "bad", 1: "good", 2: "plain"}


def test_saved_adapter_loads_with_peft(recipe, tmp_path, bert_folder, reviews):
    reported = run(recipe, tmp_path, bert_folder, reviews, "--number_of_epochs=3", "--tuning=lora")[-1]["metrics"]
    saved = tmp_path / "best_model"
    assert not (saved / "model.safetensors").exists()
    from peft import AutoPeftModelForSequenceClassification  # two seconds, which collection need not wait for

    model = AutoPeftModelForSequenceClassification.from_pretrained(saved, num_labels=3, local_files_only=True)
    check_reported(recipe, model, saved, bert_folder, reviews, reported)
    merged, _ = recipe.model.load_fine_tuned(saved)
    check_reported(recipe, merged, saved, bert_folder, reviews, reported)


def test_averaged_weights_are_saved_where_they_are_tested(recipe, tmp_path, model_folder, reviews):
    """With ema_decay the test is of the averaged weights, so best_model holds those, not the ones that trained."""
    options = ["--number_of_epochs=3", "--ema_decay=0.8"]
    reported = run(recipe, tmp_path, model_folder, reviews, *options)[-1]["metrics"]
    saved = tmp_path / "best_model"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(saved, local_files_only=True)
    check_reported(recipe, model, saved, model_folder, reviews, reported)
    trained = load_file(max((tmp_path / "save").glob("CKPT+*")) / "modules.safetensors")
    score = load_file(saved / "model.safetensors")["score.weight"]
    assert not torch.allclose(score, trained["model.score.weight"], atol=1e-4)


def check_reported(recipe, model, saved, model_folder, reviews, reported):
    """The saved model gives the reported accuracy when plain transformers runs it, one text at a time."""
    texts = load(recipe, reviews).test
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved, local_files_only=True)
    model.eval()
    right = 0
    for index in range(len(texts)):
        sample = texts[index]
        words = tokenizer.decode(sample["input_ids"])
        with torch.no_grad():
            scores = model(**tokenizer(words, return_tensors="pt")).logits
        right += int(scores.argmax()) == int(sample["labels"])
    assert right / len(texts) == pytest.approx(reported["accuracy"])


def test_lora_changes_nothing_of_the_pretrained_weights(recipe, tmp_path, bert_folder, reviews):
    run(recipe, tmp_path, bert_folder, reviews, "--number_of_epochs=1", "--tuning=lora")
    before = load_file(bert_folder / "model.safetensors")
    newest = max((tmp_path / "save").glob("CKPT+*"))
    after = load_file(newest / "modules.safetensors")
    compared = 0
    for name, value in before.items():
        found = [key for key in after if key.replace(".base_layer", "").endswith(f"base_model.model.{name}")]
        assert all(torch.equal(after[key], value) for key in found), name
        compared += len(found)
    assert compared > 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, extended(torch.float16)])
def test_weights_stored_in_low_precision_are_trained_in_fp32(recipe, tmp_path, reviews, dtype):
    folder = save_toy(tmp_path / "model", make_llama(dtype))
    assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {dtype}
    options = ["--precision=fp16", "--number_of_epochs=1"]
    for tuning in ("full", "lora"):
        records = run(recipe, tmp_path / tuning, folder, reviews, *options, f"--tuning={tuning}")
        assert records[0]["loss"] < 1.2
        newest = max((tmp_path / tuning / "save").glob("CKPT+*"))
        dtypes = {value.dtype for value in load_file(newest / "modules.safetensors").values()}
        assert dtypes == {torch.float32}


def test_predict_labels_texts(recipe, tmp_path, model_folder, reviews, capsys):
    run(recipe, tmp_path, model_folder, reviews)
    capsys.readouterr()
    for words in ([str(tmp_path)], [str(tmp_path / "best_model"), "--precision=bf16"]):
        recipe.predict.main([*words, "word3 good word5", "word1 word2 bad"])
        lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
        assert [line[0] for line in lines] == ["good", "bad"]
        assert all(0.5 < float(line[1]) <= 1 for line in lines)


def test_predict_tells_a_wrong_folder_in_a_line(recipe, tmp_path, capsys):
    adapter = tmp_path / "adapter"  # of a model that is not there any more
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    for folder, named in ((tmp_path / "missing", tmp_path / "missing"), (adapter, tmp_path / "base")):
        with pytest.raises(SystemExit) as stopped:
            recipe.predict.main([str(folder), "a text"])
        assert stopped.value.code == 2
        *_, last = capsys.readouterr().err.splitlines()
        assert f"error: model_folder '{named}' is not a folder" in last


def test_a_missing_package_is_told_with_its_extra(bert_folder, monkeypatch):
    for package in ("transformers", "peft"):
        said = rf"'{package}' is not installed\..* pip install 'amp-recipes\[finetuning\]'"
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=said):
            patch.setitem(sys.modules, package, None)
            with recipe_modules("finetuning") as modules:
                classifier(modules, bert_folder, tuning="lora")


# --- what is trained


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def classifier(recipe, folder, **settings):
    settings = {"max_tokens": 32, **settings}
    return recipe.model.load_classifier(folder, ("a", "b", "c"), make_tokenizer(), **settings)


def test_lora_trains_adapters_pooler_and_head(recipe, bert_folder):
    names = trained(classifier(recipe, bert_folder, tuning="lora"))
    assert {"lora" in name or "modules_to_save" in name for name in names} == {True}
    for part in ("lora_A", "lora_B", "pooler.dense.modules_to_save", "classifier.modules_to_save"):
        assert any(part in name for name in names), part
    assert not any("lora" in name and ("pooler" in name or "classifier" in name) for name in names)


def test_head_trains_what_the_folder_has_no_weights_for(recipe, bert_folder, model_folder):
    names = trained(classifier(recipe, bert_folder, tuning="head"))
    assert {name.rpartition(".")[0] for name in names} == {"bert.pooler.dense", "classifier"}
    assert trained(classifier(recipe, model_folder, tuning="head")) == {"score.weight"}


def test_frozen_modules_compute_as_in_evaluation(recipe, bert_folder):
    model = classifier(recipe, bert_folder, tuning="head").train()
    recipe.model.freeze_modes(model)
    assert not any(module.training for module in model.bert.encoder.modules())
    assert model.bert.pooler.dense.training and model.dropout.training
    adapted = classifier(recipe, bert_folder, tuning="lora").train()
    recipe.model.freeze_modes(adapted)
    dropouts = {name: part.training for name, part in adapted.named_modules() if isinstance(part, torch.nn.Dropout)}
    assert all(training == ("embeddings" not in name) for name, training in dropouts.items())
    batch_norm = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).train()
    batch_norm[1].requires_grad_(False)
    recipe.model.freeze_modes(batch_norm)
    batch_norm(torch.rand(4, 2))
    assert int(batch_norm[1].num_batches_tracked) == 0


def test_wrong_weights_are_refused(recipe, tmp_path):
    folder = save_toy(tmp_path / "model", make_llama())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(DataError, match=r"not those of its config.json.*model\.layers\.2"):
        classifier(recipe, folder)


def test_pickled_weights_are_refused(recipe, tmp_path):
    folder = save_toy(tmp_path / "model", make_llama())
    torch.save(torch.nn.Linear(1, 1).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"pytorch_model\.bin is not read"):
        classifier(recipe, folder)
    with pytest.raises(DataError, match="Did you mean"):
        recipe.model.check_folder(tmp_path / "modle")


def test_impossible_tunings_are_named(recipe, model_folder):
    with pytest.raises(ConfigError, match="expected full, lora, head"):
        classifier(recipe, model_folder, tuning="lorra")
    with pytest.raises(ConfigError, match="use tuning: full"):
        classifier(recipe, model_folder, tuning="lora", pretrained=False)


def test_texts_longer_than_the_model_are_refused(recipe, tmp_path, bert_folder, model_folder):
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**SIZES, max_position_embeddings=34, pad_token_id=0)
    folders = {
        bert_folder: 32,
        model_folder: 32,
        save_toy(tmp_path / "roberta", transformers.RobertaForMaskedLM(config)): 33,
    }
    for folder, positions in folders.items():
        tokens = torch.full((1, positions), 5)
        model = classifier(recipe, folder, max_tokens=positions)
        assert torch.isfinite(model(input_ids=tokens).logits).all()
        for pretrained in (True, False):
            with pytest.raises(
                DataError, match=f"max_tokens is {positions + 1}; .* {positions} tokens. Give --max_tokens={positions}"
            ):
                classifier(recipe, folder, max_tokens=positions + 1, pretrained=pretrained)


def test_padding_changes_no_score(recipe, bert_folder, model_folder, reviews):
    texts = load(recipe, reviews)
    samples = [texts.train[0], texts.train[len(texts.train) - 1]]
    assert len(samples[0]["input_ids"]) < len(samples[1]["input_ids"])
    for folder in (bert_folder, model_folder):
        model = classifier(recipe, folder).eval()
        batch = texts.padding(samples)
        with torch.no_grad():
            together = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            alone = torch.cat([model(input_ids=sample["input_ids"][None]).logits for sample in samples])
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


def test_vectors_have_no_weight_decay_and_frozen_weights_no_optimizer(recipe):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
    model[2].requires_grad_(False)
    decayed, free = recipe.model.adamw(model.parameters(), lr=0.1, weight_decay=0.3).param_groups
    assert decayed["params"] == [model[0].weight] and decayed["weight_decay"] == 0.3
    assert free["params"] == [model[0].bias, model[1].weight, model[1].bias] and free["weight_decay"] == 0.0


def test_schedule_rises_for_its_share_and_ends_at_zero(recipe):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = recipe.model.warmup_then_linear(optimizer, total_updates=20, warmup_ratio=0.2)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[4:] == pytest.approx([2.0 * (20 - update) / 16 for update in range(4, 20)])
    assert optimizer.param_groups[0]["lr"] == 0.0


def test_accumulated_gradient_is_that_of_one_large_batch(recipe, tmp_path, model_folder):
    """Three classes of unequal size and weight, and a last batch that is not full."""
    table = tmp_path / "reviews.csv"
    draw = random.Random(1)
    labels = ["good"] * 30 + ["bad"] * 8 + ["plain"] * 5
    table.write_text("text,label\n" + "".join(f"{label} {draw.choice(WORDS)},{label}\n" for label in labels))
    weights = []
    for size, windows in ((1000, 1), (7, 1000)):
        options = [f"--batch_size={size}", f"--grad_accumulation_factor={windows}", "--class_weights=True", "--seed=3"]
        folder = tmp_path / str(size)
        options += ["--opt_class.fused=False", "--max_grad_norm=0", "--optimizer_step_limit=1"]
        run(recipe, folder, model_folder, table, *options)
        newest = max((folder / "save").glob("CKPT+*"))
        state = load_file(newest / "optimizer.optimizer.safetensors")
        weights.append({name: value for name, value in state.items() if "exp_avg" in name and "sq" not in name})
    assert len(weights[0]) > 10 and weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-7, rtol=1e-4)


# --- tables


def test_table_is_split_in_equal_shares_without_overlap(recipe, reviews):
    assert read(recipe, reviews).classes == ("bad", "good", "plain")
    texts = load(recipe, reviews)
    for part, count in ((texts.train, 84), (texts.valid, 18), (texts.test, 18)):
        assert all(abs(found - count) <= 1 for found in torch.bincount(part.labels).tolist())
    assert len(texts.train) + len(texts.valid) + len(texts.test) == 360


def test_split_follows_its_own_seed_alone(recipe, reviews):
    first = load(recipe, reviews, data_seed=3)
    random.seed(5)
    torch.manual_seed(5)
    again, other = load(recipe, reviews, data_seed=3), load(recipe, reviews, data_seed=4)
    assert torch.equal(first.test.tokens, again.test.tokens)
    assert not torch.equal(first.test.tokens, other.test.tokens)


def test_groups_stay_whole(recipe, tmp_path):
    examples = [
        recipe.data.Example(f"text {row}", "ab"[row % 2], f"author {row % 17}", f"row {row}") for row in range(200)
    ]
    parts = recipe.data.split_examples(examples, (0.6, 0.2, 0.2), data_seed=0)
    groups = [{example.group for example in part} for part in parts]
    assert sum(map(len, groups)) == 17 and all(groups)
    assert [len(part) for part in parts] == pytest.approx([120, 40, 40], abs=12)


def test_rows_with_the_same_text_stay_together(recipe, tmp_path):
    """Labels drawn at random: where a text stood in train and test, the test would tell what was learnt by heart."""
    draw = random.Random(0)
    texts = [f"text {number}" for number in range(40)]
    table = tmp_path / "a.csv"
    rows = [(draw.choice(texts) + " " * draw.randint(0, 2), draw.choice("ab")) for _ in range(400)]
    table.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    tables = read(recipe, table)
    found = [{row.text.strip() for row in part} for part in (tables.train, tables.valid, tables.test)]
    assert sum(map(len, found)) == len(set().union(*found)) == 40
    assert min(len(tables.valid), len(tables.test)) > 30


def test_texts_in_two_files_are_warned_of(recipe, tmp_path, reviews, caplog):
    lines = reviews.read_text().splitlines()
    test = tmp_path / "test.csv"
    test.write_text("\n".join([lines[0], "word1 of no other table,good", lines[7], lines[8]]) + "\n")
    read(recipe, reviews)
    assert not caplog.records
    read(recipe, reviews, test_file=test, valid_file=write_reviews(tmp_path / "valid.csv", 12))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 3
    assert f"12 of the 12 texts of valid stand in train too, first {tmp_path / 'valid.csv'}:2" in warnings[0]
    assert f"2 of the 3 texts of test stand in train too, first {test}:3" in warnings[1]


def test_a_table_is_checked_before_a_model_is_made(recipe, tmp_path, reviews, monkeypatch):
    monkeypatch.setattr(recipe.defaults.subprocess, "run", lambda *words, **settings: pytest.fail("a model was made"))
    options = [f"--data_file={reviews}", "--text_column=texts", f"--output_folder={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"tables: .*'texts' \(text_column\).*Did you mean --text_column=text\?"):
        recipe.train.main([str(CONFIG), *options, f"--cache_folder={tmp_path / 'cache'}"])
    assert list(tmp_path.iterdir()) == []


def test_files_for_valid_and_test_are_taken_as_they_are(recipe, tmp_path, reviews):
    valid = write_reviews(tmp_path / "valid.csv", 12)
    test = tmp_path / "test.jsonl"
    rows = [{"text": "good word1", "label": "good"}, {"text": "bad", "label": "bad", "more": 1.5}]
    test.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = load(recipe, reviews, valid_file=valid, test_file=test)
    assert [len(texts.train), len(texts.valid), len(texts.test)] == [360, 12, 2]
    texts = load(recipe, reviews, test_file=test)
    assert len(texts.train) + len(texts.valid) == 360
    assert len(texts.valid) == pytest.approx(360 * 0.15 / 0.85, abs=3)


def test_tables_of_each_kind_give_the_same_texts(recipe, tmp_path):
    rows = [(f'word{row % 5} good, "{row}"\nword2', row % 3) for row in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"t": text, "y": label}) + "\n" for text, label in rows))
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file, delimiter=delimiter).writerows([("t", "y"), *rows])
    tables = [
        read(recipe, tmp_path / name, text_column="t", label_column="y") for name in ("a.csv", "a.tsv", "a.jsonl")
    ]
    assert tables[0].classes == ("0", "1", "2")
    rows = [
        [[(row.text, row.label) for row in part] for part in (table.train, table.valid, table.test)] for table in tables
    ]
    assert rows[0] == rows[1] == rows[2]


def test_whole_numbers_are_sorted_as_numbers(recipe):
    assert recipe.data.sort_labels({"10", "9", "-1"}) == ("-1", "9", "10")
    assert recipe.data.sort_labels({"10", "9", "x"}) == ("10", "9", "x")


def test_class_weights_make_every_class_count_the_same(recipe, tmp_path):
    table = tmp_path / "a.csv"
    table.write_text("text,label\n" + "".join(f"good {row},{'aaab'[row % 4]}\n" for row in range(80)))
    texts = load(recipe, table, balanced=True)
    counts = torch.bincount(texts.train.labels)
    assert (texts.class_weights * counts).tolist() == pytest.approx([len(texts.train) / 2] * 2)


GOOD_ROWS = "".join(f"good {row},a\nbad {row},b\n" for row in range(6))


WRONG_TABLES = [
    ("review,label\n" + GOOD_ROWS, {}, r"a.csv:2: there is no column 'text' \(text_column\); found 'review', 'label'"),
    ("text,labels\n" + GOOD_ROWS, {}, "Did you mean --label_column=labels"),
    ("text,label\ngood,a\n  ,b\n", {}, "a.csv:3: 'text' is empty"),
    ("text,label\ngood,a\nbad,\n", {}, "a.csv:3: 'label' is empty"),
    ("text,label\ngood,a\nbad,b,c\n", {}, "a.csv:3: the row has 3 fields, the header 2"),
    ("text,label\ngood,a\nbad\n", {}, "a.csv:3: the row has 1 fields, the header 2"),
    ('text,label\ngood,a\n"bad,b\n', {}, "unexpected end of data; double a quote"),
    ("text,label\n", {}, "holds no row"),
    ("text,label\n" + "good,a\n" * 9, {}, "every 'label' of the training data is 'a'"),
    ("text,label\n" + "".join(f"good {n},{'b' if n < 2 else 'a'}\n" for n in range(11)), {}, "no text of b for"),
    ("text,label\n" + GOOD_ROWS + "ugly,c\n" * 9, {}, "no text of c for .* needs three different texts"),
    ("text,label\n" + "".join(f"good,{n}\n" for n in range(40)), {}, "is it the column of the classes"),
    ("text,label\n" + GOOD_ROWS, {"max_tokens": 33}, "max_tokens is 33; the tokenizer takes up to 32"),
    ("text,label\n" + GOOD_ROWS, {"max_tokens": 0}, "max_tokens is 0"),
    ("text,label\n" + GOOD_ROWS, {"split_ratios": (0.5, 0.5)}, "split_ratios"),
    ("text,label\n" + GOOD_ROWS, {"split_ratios": (0.9, 0.2, -0.1)}, "split_ratios"),
]


def test_what_is_wrong_with_a_table_is_told(recipe, tmp_path, subtests):
    for content, settings, message in WRONG_TABLES:
        with subtests.test(message):
            (tmp_path / "a.csv").write_text(content)
            with pytest.raises(DataError, match=message):
                load(recipe, tmp_path / "a.csv", **settings)


def test_wrong_files_are_told(recipe, tmp_path, reviews):
    (tmp_path / "latin.csv").write_bytes("text,label\ngut,a\n\xe4rger,b\n".encode("latin1"))
    (tmp_path / "a.jsonl").write_text('{"text": "good", "label": 1}\n{"text": "bad"\n')
    (tmp_path / "b.jsonl").write_text('{"text": "good", "label": 0.5}\n')
    (tmp_path / "a.xlsx").write_text("")
    (tmp_path / "test.csv").write_text("text,label\nx,goood\n")
    for file, message in (
        (tmp_path / "latin.cvs", "latin.csv"),
        (tmp_path / "latin.csv", "is not UTF-8"),
        (tmp_path / "a.jsonl", "a.jsonl:2: no JSON"),
        (tmp_path / "b.jsonl", "b.jsonl:1: 'label' is 0.5"),
        (tmp_path / "a.xlsx", "ends in '.xlsx'"),
    ):
        with pytest.raises(DataError, match=message):
            load(recipe, file)
    with pytest.raises(DataError, match=r"test\.csv:2: no training text has the label 'goood'\. Did you mean 'good'"):
        load(recipe, reviews, test_file=tmp_path / "test.csv")


# --- the defaults


@pytest.mark.extended  # reads the whole standard library
def test_default_data_has_six_subjects_or_more_and_no_file_in_two_sets(recipe, tmp_path):
    path = recipe.defaults.make_functions(tmp_path)
    examples = recipe.data.read_examples(path, "text", "label", "file")
    assert len({example.label for example in examples}) >= 6
    assert all(recipe.stdlib_texts.subject_of(example.group) == example.label for example in examples)
    parts = recipe.data.split_examples(examples, (0.7, 0.15, 0.15), data_seed=0)
    files = [{example.group for example in part} for part in parts]
    assert not (files[0] & files[1] or files[0] & files[2] or files[1] & files[2])
    for part, share in zip(parts, (0.7, 0.15, 0.15), strict=True):
        assert len(part) == pytest.approx(len(examples) * share, rel=0.25)
        assert {example.label for example in part} == {example.label for example in examples}


def test_default_data_are_functions_labelled_by_the_subject_of_their_file(recipe, tmp_path, monkeypatch):
    files = list(recipe.stdlib_texts.source_files())
    few = [(name, path) for name, path in files if recipe.stdlib_texts.subject_of(name) in ("email", "testing")][:8]
    monkeypatch.setattr(recipe.stdlib_texts, "source_files", lambda: iter([*few, *files[:5]]))
    examples = recipe.data.read_examples(recipe.defaults.make_functions(tmp_path), "text", "label", "file")
    assert len(examples) >= 10
    assert {example.label for example in examples} <= {"email", "testing"}
    assert all(recipe.stdlib_texts.subject_of(example.group) == example.label for example in examples)


def test_pretraining_text_and_default_data_share_no_file(recipe):
    subjects = {name: recipe.stdlib_texts.subject_of(name) for name, _ in recipe.stdlib_texts.source_files()}
    assert subjects["asyncio/tasks.py"] == "asyncio" and subjects["threading.py"] == "processes"
    assert subjects["argparse.py"] is None and subjects["os.py"] is None
    assert not any("test" in name.split("/") for name in subjects)


def make_slowly(folder):
    """Leave a line for each time that it runs, and a folder that is whole only at its end."""
    with (folder.parent / "made").open("a") as file:
        file.write("made\n")
    folder.mkdir()
    for part in range(20):
        (folder / str(part)).write_text("x" * 10_000)


def make_in_process(cache, answers):
    with recipe_modules("finetuning") as modules:
        found = modules.defaults.make_once(cache, "thing", make_slowly)
    answers.put(len(list(found.iterdir())))


def test_two_processes_make_a_default_once(recipe, tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=make_in_process, args=(tmp_path, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [answers.get(timeout=DEADLINE_SECONDS) for _ in processes] == [20, 20, 20]
    for process in processes:
        process.join()
    assert next(tmp_path.glob("*/made")).read_text() == "made\n"


def test_what_was_left_unfinished_is_made_again(recipe, tmp_path):
    def die(folder):
        folder.mkdir()
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recipe.defaults.make_once(tmp_path, "thing", die)
    found = recipe.defaults.make_once(tmp_path, "thing", make_slowly)
    assert not (found / "half").exists() and len(list(found.iterdir())) == 20


def test_tiny_model_is_the_same_when_made_again(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe.tiny_model, "BATCH_SIZE", 2)
    monkeypatch.setattr(recipe.tiny_model, "VOCABULARY", 300)
    files = list(itertools.islice(recipe.stdlib_texts.source_files(), 40))
    monkeypatch.setattr(recipe.stdlib_texts, "source_files", lambda: iter(files))
    for name in ("a", "b"):
        recipe.tiny_model.pretrain(tmp_path / name, updates=3)
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    tokenizer = recipe.model.load_tokenizer(tmp_path / "a")
    model = recipe.model.load_classifier(tmp_path / "a", ("x", "y"), tokenizer, max_tokens=64)
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0


def test_pretraining_draws_nothing_from_this_process(recipe, tmp_path, monkeypatch):
    commands = []

    def note(command, env, **settings):
        commands.append(command)
        assert not set(env) & set(recipe.defaults.LAUNCHER_VARIABLES)
        assert command[-1] == "7"
        Path(command[-2]).mkdir()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(recipe.defaults.subprocess, "run", note)
    state = torch.get_rng_state()
    found = recipe.defaults.find_model(None, tmp_path, 7)
    assert recipe.defaults.find_model(None, tmp_path, 7) == found
    assert len(commands) == 1 and commands[0][0] == sys.executable
    assert torch.equal(torch.get_rng_state(), state)
    assert recipe.defaults.find_model("mine", tmp_path, 7) == Path("mine")
