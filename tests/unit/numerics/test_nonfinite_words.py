"""Each sentence about a nonfinite step is said of a planted network, and fits what is wrong with it."""

import ast
import functools
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_recipes.data import SampleName
from amp_recipes.numerics.nonfinite import words
from amp_recipes.numerics.nonfinite.cause import locate
from amp_recipes.numerics.nonfinite.history import History
from amp_recipes.numerics.trial import Trial, plain_trial

FP32, FP16 = torch.float32, torch.float16
INF, NAN = math.inf, math.nan


class Net(nn.Module):
    """Linear, the faulty part, linear."""

    def __init__(self, part=None, inputs=6, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.part, self.after = nn.Linear(inputs, width), part or nn.Identity(), nn.Linear(width, 3)

    def forward(self, x, *others):
        return self.after(self.part(self.before(x), *others))


class Part(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def labels(count=8):
    return torch.arange(count) % 3


def classified(model, batch):
    return F.cross_entropy(model(*batch[:-1]), batch[-1])


@dataclass
class Case:
    """says: what its message must hold; other: arguments of `locate`; samples: those that must be named."""

    model: nn.Module
    says: list[str]
    objective: object = classified
    batch: object = None
    samples: list | None = None
    dtype: torch.dtype = FP32
    scale: float = 1.0
    other: dict = field(default_factory=dict)
    trial: Trial | None = None

    def report(self):
        batch = (normal(8, 6), labels()) if self.batch is None else self.batch
        window = batch if isinstance(batch, list) else [batch]
        trial = self.trial or plain_trial(self.model, self.objective)
        return locate(trial, window, self.dtype, self.scale, **self.other)


CASES = {}


def planted(make):
    """Enter a function that makes a case, under its name."""
    CASES[make.__name__] = make
    return make


@functools.cache
def report_of(name):
    return CASES[name]().report()


# ---------------------------------------------------------------------------------------------- losses of a batch


def transcribed(model, batch):
    x, targets, frames, lengths = batch
    return F.ctc_loss(model(x).log_softmax(-1).transpose(0, 1), targets, frames, lengths)


LABELS = torch.tensor([[1, 2, 1], [1, 1, 1], [2, 1, 2], [1, 2, 1]])


@planted
def more_labels_than_frames():
    lengths = torch.tensor([10, 10, 2, 10]), torch.full((4,), 3)
    says = ["no alignment: sample 2 has 2 frames, and its 3 labels need 3.", "zero_infinity=True", "lengths"]
    return Case(Net(), says, transcribed, (normal(4, 10, 6), LABELS, *lengths), [2])


@planted
def repeats_that_need_a_blank():
    lengths = torch.tensor([10, 4, 10, 10]), torch.full((4,), 3)
    says = ["sample 1 has 4 frames, and its 3 labels, of which 2 equal the one before and need a blank", "need 5"]
    return Case(Net(), says, transcribed, (normal(4, 10, 6), LABELS, *lengths), [1])


@planted
def labels_of_ctc_in_a_row():
    lengths = torch.tensor([10, 3, 2, 10]), torch.tensor([1, 1, 3, 1])
    targets = torch.tensor([1, 2, 1, 2, 1, 2])
    return Case(Net(), ["sample 2 has 2 frames"], transcribed, (normal(4, 10, 6), targets, *lengths), [2])


@planted
def all_labels_ignored():
    says = ["All of them are ignore_index (-100)", "Skip such batches"]
    return Case(Net(), says, batch=(normal(8, 6), torch.full((8,), -100)))


@planted
def all_labels_ignored_with_smoothing():
    smoothed = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)  # noqa: E731
    return Case(Net(), ["All of them are ignore_index"], smoothed, (normal(8, 6), torch.full((8,), -100)))


@planted
def all_labels_ignored_in_the_second_batch():
    says = ["All of them are ignore_index (-1)"]
    tokens = lambda model, batch: F.cross_entropy(model(batch[0]).mT, batch[1], ignore_index=-1)  # noqa: E731
    good, bad = ((normal(5, 4, 6), torch.full((5, 4), label)) for label in (1, -1))
    return Case(Net(), says, tokens, [good, bad])


@planted
def all_labels_of_a_class_without_weight():
    weighted = lambda model, batch: F.cross_entropy(  # noqa: E731
        model(batch[0]), batch[1], weight=torch.tensor([0.0, 1.0, 1.0])
    )
    says = ["classes whose weight is 0 (class 0)", "Give these classes a weight"]
    return Case(Net(), says, weighted, (normal(8, 6), torch.zeros(8).long()))


@planted
def mean_of_an_empty_selection():
    selected = lambda model, batch: model(batch[0])[batch[1] > 5].mean()  # noqa: E731
    return Case(Net(), ["a mean over nothing", "only where something is selected"], selected)


@planted
def squared_error_over_nothing():
    selected = lambda model, batch: F.mse_loss(model(batch[0])[batch[1] > 5], normal(0, 3))  # noqa: E731
    return Case(Net(), ["a mean over nothing"], selected)


@planted
def masked_mean_under_a_mask_of_zeros():
    def masked(model, batch):
        return (model(batch["x"]).sum(-1) * batch["mask"]).sum() / batch["mask"].sum()

    says = ["made from batch['mask'] alone", "a mask is empty", "clamp(min=1)"]
    return Case(Net(), says, masked, {"x": normal(8, 6), "mask": torch.zeros(8)})


@planted
def length_of_zero():
    def averaged(model, batch):
        mask = torch.arange(5) < batch[1][:, None]
        return ((model(batch[0]) * mask[..., None]).sum(1) / batch[1][:, None]).square().mean()

    says = ["a divisor of 0, which was made from batch[1] alone", "A length, a count"]
    return Case(Net(), says, averaged, (normal(4, 5, 6), torch.tensor([5, 3, 5, 0])), [3])


# ---------------------------------------------------------------------------------------------- masks


class Attention(nn.Module):
    def __init__(self, weights):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.weights = nn.MultiheadAttention(8, 2, batch_first=True), weights

    def forward(self, x, padding):
        return self.layer(x, x, x, key_padding_mask=padding, need_weights=self.weights)[0]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    def forward(self, x, padding):
        return self.layer(x, src_key_padding_mask=padding)


def pooled(model, batch):
    return F.cross_entropy(model(*batch[:-1]).mean(1), batch[-1])


def frozen(model, batch):
    """The part does not train, and so takes torch's fast path."""
    model.part.eval().requires_grad_(False)
    with torch.no_grad():
        states = model.part(model.before(batch[0]), batch[1])
    return F.cross_entropy(model.after(states).mean(1), batch[2])


def padded_batch():
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[3] = True
    return normal(4, 5, 6), padding, labels(4)


OF_THE_MASK = ["Cause: the mask, which was made from batch[1] alone and hides a whole row", "a whole row is masked"]


@planted
def sample_of_padding_alone():
    return Case(Net(Attention(True)), OF_THE_MASK, pooled, padded_batch(), [3])


@planted
def sample_of_padding_alone_on_the_fast_path():
    return Case(Net(Attention(False)), OF_THE_MASK, frozen, padded_batch(), [3])


@planted
def sample_of_padding_alone_in_an_encoder_layer():
    return Case(Net(Encoder()), OF_THE_MASK, frozen, padded_batch(), [3])


@planted
def attention_by_hand_with_a_mask_of_the_batch():
    def part(x, mask):
        return (x @ x.mT).masked_fill(mask[:, None] == 0, -INF).softmax(-1) @ x

    x, padding, kinds = padded_batch()
    return Case(Net(Part(part)), OF_THE_MASK, pooled, (x, (~padding).long(), kinds), [3])


@planted
def row_that_the_model_masks():
    def part(x):
        return (x @ x.mT).masked_fill(torch.ones(8, 8).triu().bool(), -INF).softmax(-1) @ x

    return Case(Net(Part(part)), ["Leave at least one position of each row unmasked, or replace"], samples=[0])


@planted
def target_at_a_masked_class():
    masked = lambda x: x.masked_fill(torch.arange(8) == 1, -INF)  # noqa: E731
    first = lambda model, batch: F.cross_entropy(model.part(model.before(batch[0])), batch[1])  # noqa: E731
    says = ["The code itself writes inf in part", "Is a target at a masked position"]
    return Case(Net(Part(masked)), says, first)


# ---------------------------------------------------------------------------------------------- the model's sums


@planted
def spread_of_one_value():
    spread = lambda model, batch: model(batch[0]).std(0).mean()  # noqa: E731
    return Case(Net(), ["the spread of one value", "correction=0"], spread, (normal(1, 6), labels(1)))


@planted
def variance_of_one_value():
    spread = lambda model, batch: torch.var_mean(model(batch[0]), 0)[0].mean()  # noqa: E731
    return Case(Net(), ["the spread of one value"], spread, (normal(1, 6), labels(1)))


@planted
def log_of_a_probability_of_zero():
    likelihood = lambda model, batch: -torch.softmax(model(batch[0]) * 1e4, -1).log().mean()  # noqa: E731
    return Case(Net(), ["A probability is 0, and its log is -inf", "log_softmax in place of softmax"], likelihood)


@planted
def log_of_a_chosen_probability_of_zero():
    def likelihood(model, batch):
        return -torch.softmax(model(batch[0]) * 1e4, -1).gather(1, batch[1][:, None]).log().mean()

    return Case(Net(), ["A probability is 0"], likelihood)


@planted
def log_of_a_sigmoid_of_zero():
    likelihood = lambda model, batch: -torch.sigmoid(model(batch[0]) * 1e4).log().mean()  # noqa: E731
    return Case(Net(), ["A probability is 0", "logsigmoid in place of sigmoid"], likelihood)


@planted
def log_of_a_dead_unit():
    return Case(Net(Part(lambda h: F.relu(h).log() * h)), ["The log of 0 is -inf", "clamp the input"])


@planted
def distance_of_equal_points():
    def distance(model, batch):
        return (model(batch[0]) - model(batch[1])).pow(2).sum(-1).sqrt().mean()

    one, other = normal(8, 6), normal(8, 6, seed=1)
    other[[2, 5]] = one[[2, 5]]
    says = ["Two points are equal, and the root has no slope at their distance of 0", "Add an eps inside the root"]
    return Case(Net(), says, distance, (one, other), [2, 5])


@planted
def distances_of_all_to_all():
    def distance(model, batch):
        states = model(batch[0])
        return (states[:, None] - states[None]).square().sum(-1).sqrt().mean()

    return Case(Net(), ["Two points are equal"], distance)


@planted
def root_of_a_number_below_zero():
    return Case(Net(Part(torch.sqrt)), ["The root has no finite slope at 0, and no value below 0"])


class Padded(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.function = nn.Embedding(9, 8, padding_idx=0), nn.Linear(8, 3), function

    def forward(self, tokens):
        return self.head(self.function(self.embedding(tokens), tokens))


TOKENS = torch.tensor([[1, 2, 4], [3, 4, 5], [0, 0, 0], [6, 7, 8]])


@planted
def padding_of_length_one():
    model = Padded(lambda h, _: (h / h.norm(dim=-1, keepdim=True)).mean(1))
    return Case(model, ["the row of padding (padding_idx) of an embedding"], batch=(TOKENS, labels(4)), samples=[2])


@planted
def mean_over_tokens_that_are_padding():
    model = Padded(lambda h, tokens: h.sum(1) / (tokens != 0).sum(1, keepdim=True))
    return Case(model, ["made from batch[0] alone"], batch=(TOKENS, labels(4)), samples=[2])


@planted
def divisor_of_a_dead_unit():
    return Case(Net(Part(lambda h: h / F.relu(h))), ["The divisor is 0, or almost 0: add an eps"])


@planted
def arc_cosine_beyond_one():
    return Case(Net(Part(lambda h: torch.acos(h * 50))), ["clamp the input to a smaller range"])


@planted
def root_as_a_power():
    return Case(Net(Part(lambda h: h.pow(0.5))), ["A power may have no value, or no slope, at 0"])


@planted
def weight_norm_of_a_row_of_zeros():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    layer.parametrizations.weight.original1.data[2] = 0.0
    return Case(Net(layer), ["A row of the weight is 0, and is divided by its norm"])


@planted
def exp_of_a_large_number():
    return Case(Net(Part(lambda h: torch.exp(h * 1e3))), ["The exp of a large number overflows"])


@planted
def where_that_drops_a_log():
    says = ["the forward drops this value", "Replace the value with a harmless number before the op"]
    return Case(Net(Part(lambda h: torch.where(h > 0, h.sqrt(), 0.0))), says)


@planted
def memory_that_numpy_wrote():
    def part(h):
        written = torch.zeros_like(h)
        written.numpy()[:] = NAN
        return h + written

    says = ["its memory was never initialised, or was changed outside of torch's ops", "torch.zeros, not torch.empty"]
    return Case(Net(Part(part)), says)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (gradient - gradient)


@planted
def function_of_the_user():
    return Case(Net(Part(Tripled.apply)), ["in the autograd.Function Tripled"])


# ---------------------------------------------------------------------------------------------- weights and losses


def net_of_bad_weight():
    net = Net(nn.Linear(8, 8))
    net.part.weight.data[1, 2], net.part.weight.data[1, 3] = INF, NAN
    return net


@planted
def bad_weight_of_which_nothing_is_known():
    says = ["parameter part.weight contains NaN (2 of its 64 values are not finite)", "Find what wrote them"]
    return Case(net_of_bad_weight(), says)


@planted
def bad_weight_that_was_loaded():
    says = ["2 of its 64 values", "They were there before the first update of this fit", "weights that were loaded"]
    return Case(net_of_bad_weight(), says, other={"history": History(0)})


@planted
def bad_weight_after_updates():
    says = ["The 7 update(s) before in this fit were finite", "the eps of the optimizer"]
    return Case(net_of_bad_weight(), says, other={"history": History(7, [1.0, 0.9, 0.8])})


@planted
def bad_buffer():
    net = Net(nn.BatchNorm1d(8).eval())
    net.part.running_mean[1] = NAN
    return Case(net, ["buffer part.running_mean contains NaN (1 of its 8 values are not finite)"])


def squared(model, batch):
    return (model(batch[0]) * 1e30).pow(2).mean()


@planted
def overflow_of_which_nothing_is_known():
    says = ["beyond the range of float32", "If the loss grew before, lower the learning rate"]
    return Case(Net(), says, squared)


@planted
def overflow_after_a_loss_that_grew():
    says = ["The loss grew from 2.5 to 5e+12: training diverges. Lower the learning rate"]
    return Case(Net(), says, squared, other={"history": History(4, [2.0, 2.5, 40.0, 5e12])})


@planted
def overflow_in_fp16_of_a_loss_that_grew():
    says = ["Cause: the precision", "training diverges. Lower the learning rate", "If that does not help: Add to your"]
    net = Net(Part(lambda x: F.layer_norm(x * 1e6, (8,))))
    return Case(net, says, dtype=FP16, other={"history": History(2, [1e-3, 1e-3])})


@planted
def overflow_after_a_loss_that_fell():
    says = ["The loss did not grow before (median 2, last 1.5)", "Look at what this op is given in this batch"]
    return Case(Net(), says, squared, other={"history": History(4, [2.5, 2.0, 1.8, 1.5])})


def huge(model, batch):
    return model(batch[0]).mean() * 1e25


@planted
def norm_of_large_gradients():
    says = ["Every gradient is finite, but their norm is not", "far too large: normalise it. If it grew before, lower"]
    return Case(Net(), says, huge)


@planted
def norm_of_large_gradients_after_a_loss_that_fell():
    says = ["The loss did not grow before, but it is far too large: normalise it."]
    return Case(Net(), says, huge, other={"history": History(2, [2.0, 1.9])})


@planted
def norm_of_large_gradients_after_a_loss_that_grew():
    says = ["The loss grew from 2 to 1e+09: training diverges. Lower the learning rate"]
    return Case(Net(), says, huge, other={"history": History(2, [2.0, 1e9])})


@planted
def norm_of_large_gradients_in_low_precision():
    # 3e4 * 3e4 in fp16 loses to its bound, so that the gradient differs from that in float32.
    def objective(model, batch):
        low = torch.is_autocast_enabled("cpu")
        return model(batch[0]).float().mean() * (1e25 if low else 1.0)

    says = ["In float32, the norm of the same step is finite", "Cause: the precision"]
    return Case(Net(), says, objective, dtype=torch.bfloat16)


# ---------------------------------------------------------------------------------------------- precision and scale


@planted
def scale_that_is_too_high():
    return Case(Net(Part(lambda h: h * 500)), ["the loss scale, and nothing else"], dtype=FP16, scale=2.0**20)


@planted
def overflow_of_fp16_in_a_module():
    says = ["fp32_modules: [part]", "Its result is beyond the range of float16", "use --precision bf16"]
    return Case(Net(Part(lambda h: F.layer_norm(h * 1e6, (8,)))), says, dtype=FP16, scale=2.0)


@planted
def cast_of_a_large_number():
    batch = normal(8, 6), labels()
    batch[0][3] *= 1e6
    return Case(Net(), ["Its input of up to", "is beyond the range of float16"], batch=batch, dtype=FP16, samples=[3])


@planted
def overflow_of_fp16_outside_of_modules():
    says = ["call .float() on its inputs"]
    return Case(Net(), says, lambda model, batch: model(batch[0]).mul(1e6).pow(2).float().log().mean(), dtype=FP16)


class Whole(nn.Module):
    """Overflows in its own forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return F.layer_norm(self.layer(x) * 1e6, (3,))


@planted
def overflow_of_fp16_in_the_model_itself():
    return Case(Whole(), ["make it a module and pin it", "first appeared in the model itself"], dtype=FP16)


@planted
def eps_that_fp16_rounds_to_zero():
    def part(h):
        h = torch.where(torch.arange(8)[:, None] == 5, 0.0, h)
        return h / (h.abs().sum(-1, keepdim=True) + 1e-8)

    return Case(Net(Part(part)), ["float16 rounds its input to a number at which the op"], dtype=FP16, samples=[5])


@planted
def divisor_that_fp16_rounds_to_zero_in_another_module():
    net = Net(Part(lambda h: h / h.abs().sum(-1, keepdim=True)))
    with torch.no_grad():
        net.before.weight *= 1e-9
        net.before.bias *= 0.0
    return Case(net, ["first appeared in part", "Add to your YAML: fp32_modules: [before]"], dtype=FP16)


class TwoParts(nn.Module):
    """Either one's sum overflows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3)
        with torch.no_grad():
            self.one.weight *= 1e6
            self.two.weight *= 1e6

    def forward(self, x):
        return F.layer_norm(self.one(x).float() + self.two(x).float(), (3,))


@planted
def overflow_of_two_modules():
    return Case(TwoParts(), ["A pin of one alone does not cure it: use another precision", "--diagnose"], dtype=FP16)


@planted
def overflow_by_a_small_divisor():
    says = ["Its result is beyond the range of float16"]
    return Case(Net(Part(lambda h: F.layer_norm(h / 1e-6, (8,)))), says, dtype=FP16)


@planted
def norm_that_overflows():
    says = ["Its result is beyond the range of float16"]
    return Case(Net(), says, lambda model, batch: (model(batch[0]) * 4e4).norm().float().log(), dtype=FP16)


# ---------------------------------------------------------------------------------------------- data


@planted
def nan_in_a_sample():
    batch = normal(8, 6), labels()
    batch[0][3, 1] = NAN
    says = ["batch[0] contains NaN before the step begins", "the first op that reads it", "Fix or remove these samples"]
    return Case(Net(), says, batch=batch, samples=[3])


@planted
def nan_in_a_sample_of_the_second_batch():
    good, bad = ((normal(8, 6), labels()) for _ in range(2))
    bad[0][3, 1] = NAN
    return Case(Net(), ["It comes from sample 3 of batch 1 (counted from 0) of the window"], batch=[good, bad])


@planted
def unknown_target_that_a_where_leaves_out():
    def known_only(model, batch):
        errors = (model(batch[0]) - batch[1]).square()
        return torch.where(batch[1].isnan(), 0.0, errors).mean()

    batch = normal(8, 6), normal(8, 3)
    batch[1][[2, 5]] = NAN
    says = ["the forward drops this value", "Replace the value with a harmless number before the op"]
    return Case(Net(), says, known_only, batch, [2, 5])


@planted
def nan_in_a_sample_at_a_scale_that_is_too_high():
    batch = normal(8, 6), labels()
    batch[0][3, 1] = NAN
    return Case(Net(Part(lambda h: h * 500)), ["Cause: the data"], batch=batch, samples=[3], dtype=FP16, scale=2.0**20)


def known_by(*names, samples=(3, 6)):
    batch = normal(8, 6), labels()
    for sample in samples:
        batch[0][sample, 1] = NAN
    return {"batch": batch, "samples": list(samples), "other": {"names": [names]}}


@planted
def nan_in_samples_that_the_dataset_knows():
    names = [SampleName(10 * sample, f"clips/{sample}.wav") for sample in range(8)]
    says = ["from samples 3, 6 (counted from 0) of the batch: dataset indices 30 (clips/3.wav), 60 (clips/6.wav)."]
    return Case(Net(), says, **known_by(*names))


@planted
def nan_in_a_sample_without_a_file():
    names = [SampleName(10 * sample) for sample in range(8)]
    says = ["from sample 3 (counted from 0) of the batch: dataset index 30."]
    return Case(Net(), says, **known_by(*names, samples=[3]))


@planted
def nan_in_a_sample_that_may_have_been_moved():
    names = [SampleName(10 * sample, is_certain=False) for sample in range(8)]
    says = ["of the batch: dataset index 30, if the collate_fn keeps the order of the samples."]
    return Case(Net(), says, **known_by(*names, samples=[3]))


@planted
def nan_in_a_sample_of_which_the_batch_knows_the_file():
    names = [SampleName(None, f"clips/{sample}.wav") for sample in range(8)]
    return Case(Net(), ["of the batch: clips/3.wav."], **known_by(*names, samples=[3]))


@planted
def nan_in_all_samples():
    return Case(Net(), ["It happens with every sample of the batch"], batch=(normal(8, 6) * NAN, labels()))


# ---------------------------------------------------------------------------------------------- not replayable


@planted
def finite_when_repeated():
    return Case(Net(), ["The step was repeated and was finite", "the step reads something else"])


@planted
def finite_when_repeated_with_draws():
    def drawing(model, batch):
        random.random()
        return classified(model, batch)

    return Case(Net(), ["the step draws from Python's random, which a replay cannot restore"], drawing)


@planted
def finite_when_repeated_with_several_optimizers():
    net = Net()
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name in ("one", "two")}
    trial = plain_trial(net, classified)
    trial.optimizers = lambda: optimizers
    says = ["another optimizer may have stepped inside the window", "left gradients"]
    return Case(net, says, trial=trial)


# ---------------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize("name", CASES)
def test_the_message_fits_what_is_wrong(name):
    case, report = CASES[name](), report_of(name)
    for sentence in case.says:
        assert sentence in report.message
    assert "second problem" not in report.message
    assert case.samples is None or report.samples == case.samples
    if not any("lower" in sentence.lower() for sentence in case.says):
        assert "learning rate" not in report.message


# Said on a device that is not a CPU.
ELSEWHERE = ["kernels of", "may add numbers in another order each time (deterministic: true prevents this)"]


def sentences(module):
    """The texts of a module that are more than a word, docstrings left out."""
    tree = ast.parse(Path(module.__file__).read_text())
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    parts = {part for text in texts - docstrings for part in text.replace("{batch}", "{details}").split("{details}")}
    return {part.strip() for part in parts if len(part.split()) > 1}


def test_each_sentence_is_said_of_some_planted_network():
    said = "\n".join(report_of(name).message for name in CASES).lower()
    unsaid = {text for text in sentences(words) if text.lower() not in said}
    keys = {*words._EDGES, *words._OVERFLOWS, *words._FAULTS, *words._COMPUTATIONS, "not replayable"}
    assert sorted(unsaid - keys) == sorted(ELSEWHERE)
