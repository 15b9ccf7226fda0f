"""The benchmarks on numerics, in their small modes: the known order comes out, and they write what they promise."""

import dataclasses
import re
import sys

import pytest
import torch
from repository import REPOSITORY
from torch import nn

from amp_recipes.numerics.pins.equivalence import compare
from amp_recipes.numerics.pins.proof import Training

BENCHMARKS = REPOSITORY / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def benchmarks_importable():
    """Their folder is no package: they import each other by name, and set the threads of torch."""
    threads = torch.get_num_threads()
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tables_page(tmp_path_factory) -> str:
    from precision_tables import main

    path = tmp_path_factory.mktemp("tables") / "deeper" / "tables.md"
    main(["--small", "--networks", "plate", "plate-tuned", "--output", str(path)])
    return path.read_text()


@pytest.mark.extended
class TestPrecisionTables:
    @staticmethod
    def ratios(page: str, row: str) -> list[float]:
        """The median ratio to fp32 of that row, in each network."""
        found = re.findall(rf"^\| {re.escape(row)} \| [^|]+ \| ([\d.]+|inf) \(", page, re.MULTILINE)
        assert len(found) == 2, page
        return [float(each) for each in found]

    def test_mixed_precision_ends_where_fp32_ends(self, tables_page):
        for row in ("fp16, loss scaling, fp32 weights", "bf16, no scaling, fp32 weights"):
            assert self.ratios(tables_page, row) == pytest.approx([1.0, 1.0], abs=0.05)

    def test_without_scaling_small_gradients_stall_and_others_do_not(self, tables_page):
        small_gradients, others = self.ratios(tables_page, "fp16, **no scaling**, fp32 weights")
        assert small_gradients > 2.0
        assert others == pytest.approx(1.0, abs=0.02)

    def test_without_fp32_weights_small_updates_are_lost(self, tables_page):
        _, fp16 = self.ratios(tables_page, "fp16, loss scaling, **fp16 weights**")
        _, bf16 = self.ratios(tables_page, "bf16, no scaling, **bf16 weights**")
        assert 1.1 < fp16 < bf16

    def test_every_verdict_is_yes_and_counted(self, tables_page):
        yes = tables_page.count("| yes |")
        assert yes == 10
        assert "| NO |" not in tables_page
        assert f"Expected order: {yes} of {yes} came out." in tables_page


class TestItsMeasures:
    def test_the_page_says_how_it_was_measured_and_nothing_of_where(self, tmp_path, monkeypatch):
        """Of two updates, after which no verdict says anything."""
        import precision_tables

        network = dataclasses.replace(precision_tables.networks()["plate-tuned"], steps=2, steps_before=2, smaller=1.0)
        monkeypatch.setattr(precision_tables, "networks", lambda: {"plate-tuned": network})
        path = tmp_path / "deeper" / "tables.md"
        precision_tables.main(["--small", "--networks", "plate-tuned", "--seeds=1", "--output", str(path)])
        page = path.read_text()
        assert "--small --networks plate-tuned --seeds=1`" in page
        assert f"torch {torch.__version__}" in page
        assert str(REPOSITORY) not in page and str(tmp_path) not in page
        assert re.search(r"Expected order: \d of 6 came out\.", page)
        assert all(page.count(f"| {way.name} |") == 1 for way in precision_tables.WAYS)

    def test_an_unknown_network_is_refused(self, capsys):
        from precision_tables import main

        with pytest.raises(SystemExit, match="2"):
            main(["--networks", "plait"])
        assert "plait" in capsys.readouterr().err

    def test_its_adam_is_adam(self):
        from precision_tables import CountingAdam

        torch.manual_seed(0)
        ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
        theirs.load_state_dict(ours.state_dict())
        optimizers = [CountingAdam(ours.parameters(), 1e-2), torch.optim.Adam(theirs.parameters(), 1e-2)]
        for _ in range(20):
            x = torch.randn(4, 5)
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-7)
        assert optimizers[0].updates == 20 * 18
        assert optimizers[0].lost == 0

    @pytest.mark.parametrize(("dtype", "steps"), [(torch.float16, 2048), (torch.bfloat16, 256)])
    def test_an_update_is_lost_where_the_weight_is_so_many_times_as_large(self, dtype, steps):
        from precision_tables import CountingAdam

        weight = nn.Parameter(torch.tensor([1.0, 1.0], dtype=dtype))
        # Adam's first update is -lr, whatever the gradient: w / dw is -1 / lr. Upwards half a step is 1 / steps.
        for lr, lost in ((1.01 / steps, 0), (0.99 / steps, 2)):
            weight.data.fill_(1.0)
            optimizer = CountingAdam([weight], lr)
            weight.grad = torch.full_like(weight, -1.0)
            optimizer.step()
            assert (optimizer.updates, optimizer.lost) == (2, lost)

    def test_only_gradients_that_fp32_has_count_as_flushed(self):
        from precision_tables import Flushed

        model = nn.Linear(2, 2, bias=False)
        batch = (torch.tensor([[1.0, 0.0]]), torch.tensor([[5.0, 5.0]]))  # the second column has no gradient at all

        def objective(model, batch):
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        flushed = Flushed(model, objective)
        model.weight.grad = torch.tensor([[0.0, 0.0], [0.5, 0.0]])
        flushed.look(batch)
        assert (flushed.zeros, flushed.seen) == (1, 2)

    def test_the_verdict_follows_from_the_losses(self):
        from precision_tables import BF16, FP32, SAME, WAYS, WORSE, Found, Run, noise, outcome

        def found(*losses):
            """fp32 with 1.0, 1.1 and 1.2, and a way with the losses given."""
            runs = {way: [] for way in WAYS}
            for way, values in ((FP32, (1.0, 1.1, 1.2)), (BF16, losses)):
                runs[way] = [Run(loss, 0.0, 0.0, 0.0, 0) for loss in values]
            return Found(runs)

        assert noise(found()) == pytest.approx(1.096, abs=1e-3)
        for losses, expected in (
            ((1.05, 1.0, 1.3), SAME),
            ((1.3, 1.2, 1.3), SAME),
            ((1.3, 1.3, 1.2), WORSE),
            ((float("inf"), float("inf"), 1.2), WORSE),
            ((0.5, 0.6, 1.2), "better"),
        ):
            assert outcome(found(*losses), BF16) == expected, losses

    def test_the_plate_bends_as_the_textbook_says(self):
        from _small_networks import STIFFNESS, deflection

        in_the_middle = deflection(torch.tensor([[0.5, 0.5, 100.0]]), bed=0.0)
        # Under a load P in the middle of a square plate: 0.0116 P a^2 / D; the points are half a step beside it.
        assert in_the_middle.max().item() == pytest.approx(0.0116 * 100 / STIFFNESS, rel=0.03)
        assert deflection(torch.tensor([[0.5, 0.5, 100.0]]), bed=3e5).max() < in_the_middle.max()


class TestFalseAlarms:
    def test_it_goes_on_where_it_stopped_and_the_page_counts_all_lines(self, tmp_path, monkeypatch):
        import false_alarms

        lines, page = tmp_path / "lines.jsonl", tmp_path / "page.md"
        where = ["--recipes", "plate", "--steps=8", "--lines", str(lines), "--output", str(page)]
        assert false_alarms.main([*where, "--seeds=1"]) == 0
        trained, worse = [], Training(8, comparison=compare([3.0] * 3, [1.0] * 3, [2.0] * 3, 1.0, 0.0))
        monkeypatch.setattr(false_alarms, "trained", lambda *args: trained.append(args) or worse)
        assert false_alarms.main([*where, "--seeds=2"]) == 1, "more than 5 % of healthy networks are called worse"
        assert trained == [("plate", 1, 8)] and len(lines.read_text().splitlines()) == 2
        assert "| 2 | " in page.read_text() and "False alarms: 1 of 2" in page.read_text()
        assert str(tmp_path) not in page.read_text()


class TestSensitivity:
    def test_the_page_says_how_it_was_measured_and_nothing_of_where(self, tmp_path, monkeypatch):
        pytest.importorskip("scipy", reason="the rank correlation is scipy's")
        import sensitivity

        mlp = sensitivity.Subject("one layer", sensitivity.images(lambda: sensitivity.residual_mlp(8, layers=1)))
        monkeypatch.setattr(sensitivity, "subjects", lambda: {"mlp": mlp})
        page = tmp_path / "sensitivity.md"
        sensitivity.main(["--small", "--networks", "mlp", "--batches=1", "--output", str(page)])
        text = page.read_text()
        assert "--small --networks mlp --batches=1`" in text
        assert str(tmp_path) not in text
        assert len(self.medians(text)) == 2

    @pytest.mark.extended
    def test_s_ranks_modules_as_the_truth_does_and_better_than_the_local_error(self, tmp_path):
        pytest.importorskip("scipy", reason="the rank correlation is scipy's")
        from sensitivity import main

        page = tmp_path / "sensitivity.md"
        main(["--small", "--output", str(page)])
        medians = self.medians(page.read_text())
        assert all(ours > local for ours, local in medians)
        others_pinned, as_given = (ours for ours, _ in medians)
        assert others_pinned > 0.6
        assert as_given > 0.85
        assert "Median of S at least 0.8: yes." in page.read_text()

    @staticmethod
    def medians(text: str) -> list[list[float]]:
        """Of S and of the local error, in each of the two tables."""
        number = r"\*\*(-?[\d.]+)\*\*"
        found = re.findall(rf"^\| \*\*median\*\* \| \| {number} \| {number} \|", text, re.MULTILINE)
        return [[float(value) for value in row] for row in found]


class TestTheTruth:
    """Of a chain of modules, where it can be had by pins."""

    @pytest.fixture
    def chain(self):
        from amp_recipes.numerics.trial import plain_trial

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 3))
        window = [(torch.randn(8, 6), torch.randint(0, 3, (8,)))]

        def objective(model, batch):
            return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

        return plain_trial(model, objective), window

    @staticmethod
    def same(one, other) -> bool:
        return one.gradients.keys() == other.gradients.keys() and all(
            torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items()
        )

    def test_alone_is_the_low_run_with_all_others_pinned(self, chain):
        from sensitivity import alone

        trial, window = chain
        names = [name for name, _ in trial.modules.named_children()]
        for name in names:
            pins = [other for other in names if other != name]
            pinned = trial.run(window, torch.bfloat16, pins=pins)
            assert self.same(trial.run(window, watch=[alone(trial, name, names, torch.bfloat16)]), pinned)

    def test_what_follows_its_input_has_an_error_only_if_it_is_given_low_values(self, chain):
        from sensitivity import Seen, alone

        trial, window = chain
        names = [name for name, _ in trial.modules.named_children()]
        reference = trial.run(window)
        assert self.same(trial.run(window, watch=[alone(trial, "1", names, torch.bfloat16)]), reference)

        seen = Seen()
        trial.run(window, torch.bfloat16, watch=[seen.watching(trial.modules)])
        assert seen.into["0"] == [torch.float32]
        assert seen.into["1"] == seen.out_of["0"] == [torch.bfloat16]
        low = trial.run(window, watch=[alone(trial, "1", names, torch.bfloat16, seen)])
        exact = trial.run(window, watch=[alone(trial, "1", names, torch.bfloat16, seen, low=False)])
        assert not self.same(low, exact)
        assert not self.same(exact, reference)  # what it is given is rounded
        # The first layer is given fp32: compared with fp32 on the same, it is compared with the plain run.
        assert self.same(
            trial.run(window, watch=[alone(trial, "0", names, torch.bfloat16, seen, low=False)]), reference
        )

    def test_nothing_stays_behind(self, chain):
        from sensitivity import Seen, alone

        trial, window = chain
        names = ["", *(name for name, _ in trial.modules.named_children())]
        before = trial.run(window)
        seen = Seen()
        trial.run(window, torch.bfloat16, watch=[seen.watching(trial.modules)])
        for name in names:
            trial.run(window, watch=[alone(trial, name, names, torch.bfloat16, seen)])
        assert self.same(trial.run(window), before)
        for module in trial.modules.modules():
            assert "forward" not in vars(module)
            assert not module._forward_hooks and not module._forward_pre_hooks
