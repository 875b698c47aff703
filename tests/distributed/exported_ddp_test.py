# SPDX-License-Identifier: Apache-2.0
"""exported_ddp beside Python: models that this test exports, all losses, files of tensors and tokens.

usage: exported_ddp_test.py PROGRAM RANKS

The reference is Python: it reads the trained weights without a key map, and evaluates them as the trainer
did.
"""

import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest

try:
    import torch
    from exported_ddp_models import (
        ImageLoss,
        Images,
        Language,
        LanguageLoss,
        Regression,
        RegressionLoss,
        Segmenter,
        export,
        make_files,
        run_program,
    )
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file
    from torch.nn import functional as F
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS = int(sys.argv.pop()) if len(sys.argv) > 2 else 1
PROGRAM = os.path.abspath(sys.argv.pop())
TRAINING_RANKS = min(RANKS, 2)  # two show what more would; the curve runs on all
# What two ranks do as one does, and more: left to the test on several.
not_on_one_rank = unittest.skipIf(RANKS == 1 and shutil.which("mpirun"), "on several ranks")


class ExportedDdp(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        os.chdir(cls.folder.name)
        make_files()

    @classmethod
    def tearDownClass(cls):
        os.chdir("/")
        cls.folder.cleanup()

    def run_on(self, ranks, *settings, code=0):
        command = [
            PROGRAM,
            "context.device=cpu",
            "metrics.dir=runs",
            "metrics.progress=plain",
            "train.eval_every_steps=1000",
            *settings,
        ]
        ended, out, errors = run_program(ranks, command, timeout=200)
        self.assertEqual(ended, code, out[-2000:] + errors[-2000:])
        return out + errors

    def trained(self, model, *settings):
        """The output of a run that must lower its loss, and the model with its weights."""
        output = self.run_on(
            TRAINING_RANKS,
            f"model.path={model.__name__}.pt2",
            "model.save_weights=weights.safetensors",
            "optimizer.type=adam",
            "lr_schedule.lr=0.01",
            *settings,
        )
        net = model()
        net.load_state_dict(load_file("weights.safetensors"))  # strict
        return output, net.eval()

    def number(self, pattern, output):
        found = re.search(pattern, output)
        self.assertTrue(found, f"no {pattern} in {output[-1500:]}")
        return float(found[1])

    def assert_test_loss(self, output, expected, count):
        found = self.number(rf"test loss +([0-9.]+) of {count} ", output)
        self.assertAlmostEqual(found, expected.item(), delta=2e-4)  # printed with four digits

    def assert_learns(self, output):
        first, last = (
            float(x)
            for x in re.search(r"train loss +([0-9.]+) in this run's first epoch, ([0-9.]+)", output).groups()
        )
        self.assertLess(last, 0.9 * first)

    def test_regression(self):
        for loss, name, function in (
            ("mse", "", F.mse_loss),
            ("l1", "", F.l1_loss),
            ("bce", "_signs", F.binary_cross_entropy_with_logits),
        ):
            with self.subTest(loss):
                files = [f"tensors.{key}{name}.safetensors" for key in ("path=train", "eval_path=eval")]
                output, net = self.trained(
                    Regression,
                    f"model.loss={loss}",
                    *files,
                    "train.epochs=12",
                    f"train.batch_size={32 // TRAINING_RANKS}",
                )
                self.assert_learns(output)
                data = load_file(f"eval{name}.safetensors")
                with torch.no_grad():
                    expected = function(net(data["x"], data["y"]).squeeze(1), data["target"].float())
                self.assert_test_loss(output, expected, 103)
                self.assertNotIn("accuracy", output)

    def test_a_loss_in_the_graph_is_the_same_training(self):
        settings = (
            "tensors.path=train.safetensors",
            "tensors.eval_path=eval.safetensors",
            "train.max_steps=40",
        )
        outside, _ = self.trained(Regression, "model.loss=mse", *settings)
        inside, _ = self.trained(RegressionLoss, "model.loss=in_graph", *settings)
        pattern = r"(?s)(test loss .*?)\n.*\nparameters +([0-9a-f]{16})"
        self.assertEqual(re.search(pattern, outside).groups(), re.search(pattern, inside).groups())

    def test_segmentation(self):
        output, net = self.trained(
            Segmenter,
            "model.output=classes",
            "tensors.path=pixels.safetensors",
            "tensors.eval_rows=43",
            "tensors.target=labels",
            "train.epochs=4",
            f"train.batch_size={8 // TRAINING_RANKS}",
        )
        data = load_file("pixels.safetensors")
        labels = data["labels"][160:]
        with torch.no_grad():
            classes = net(data["x"][160:])["classes"]
        accuracy = (classes.argmax(1) == labels).sum().item() / (labels != -100).sum().item()
        count = (labels != -100).sum().item()
        self.assertAlmostEqual(
            self.number(rf"test accuracy +([0-9.]+) % of {count} labels", output), 100 * accuracy, delta=0.01
        )
        self.assertAlmostEqual(
            self.number(r"labels \(loss ([0-9.]+)\)", output),
            F.cross_entropy(classes, labels).item(),
            delta=2e-4,
        )

    def test_ranks_give_the_curve_of_one_process(self):
        # Twelve samples a step: at once, in micro-batches, on ranks that share six unevenly, with different
        # numbers of counted labels. Sums are taken in another order: 1e-5 of the loss.
        common = (
            "model.path=Segmenter.pt2",
            "model.output=classes",
            "tensors.path=pixels.safetensors",
            "tensors.eval_rows=43",
            "tensors.target=labels",
            "train.max_steps=12",
            "metrics.log_every=1",
            "lr_schedule.lr=0.1",
        )
        curves = {}
        for ranks, batch, accumulated in ((1, 12, 1), (1, 6, 2), (2, 12, 1), (4, 6, 2)):
            if ranks > RANKS:
                continue
            name = f"r{ranks}_{batch}x{accumulated}"
            self.run_on(
                ranks,
                *common,
                f"loader.global_batch_size={batch}",
                f"train.grad_accum_steps={accumulated}",
                f"metrics.run_name={name}",
            )
            rows = pathlib.Path("runs", name, "steps.csv").read_text().splitlines()
            curves[name] = [float(row.split(",")[2]) for row in rows[1:]]
        reference = curves.pop("r1_12x1")
        self.assertEqual(len(reference), 12)
        for name, curve in curves.items():
            for step, (a, b) in enumerate(zip(reference, curve, strict=True)):
                self.assertAlmostEqual(
                    a, b, delta=1e-5 * a, msg=f"{name}, step {step}: {curve} and {reference}"
                )

    def test_tokens(self):
        settings = (
            f"tokens.path={ROOT}/data/text-sample",
            "tokens.max_seq_len=32",
            "train.max_steps=60",
            f"train.batch_size={16 // TRAINING_RANKS}",
            "train.eval_first=true",
        )
        output, net = self.trained(Language, *settings)
        before, after, count = re.search(
            r"eval loss +([0-9.]+) before training, ([0-9.]+) after.* over (\d+) targets", output
        ).groups()
        self.assertLess(float(after), 0.8 * float(before))
        ids = load_file(f"{ROOT}/data/text-sample/eval.safetensors")["tokens"].to(torch.int64)
        total, pieces = 0.0, range(0, len(ids) - 1, 32)
        with torch.no_grad():
            for start in pieces:
                end = min(start + 32, len(ids) - 1)
                total += F.cross_entropy(
                    net(ids[None, start:end])[0], ids[start + 1 : end + 1], reduction="sum"
                ).item()
        self.assertEqual(int(count), len(ids) - 1)
        self.assertAlmostEqual(total / int(count), float(after), delta=2e-4)
        self.assertIn("token accuracy", output)

        inside, _ = self.trained(LanguageLoss, "model.loss=in_graph", *settings)
        self.assertAlmostEqual(
            self.number(r"eval loss .*training, ([0-9.]+) after", inside), float(after), delta=2e-3
        )
        self.assertNotIn("token accuracy", inside)

    def test_images_with_a_loss_in_the_graph(self):
        output, _ = self.trained(
            ImageLoss,
            "model.loss=in_graph",
            f"data.path={ROOT}/data/cifar10-sample",
            "data.num_samples=163",
            "train.max_steps=20",
        )
        self.number(r"test loss +([0-9.]+) of 163 images", output)

    @not_on_one_rank
    def test_adapters(self):
        try:
            from peft import PeftModel
        except ImportError as error:
            self.skipTest(str(error))
        text = (
            f"tokens.path={ROOT}/data/text-sample",
            "tokens.max_seq_len=32",
            "train.max_steps=60",
            f"train.batch_size={16 // TRAINING_RANKS}",
            "lora.target_modules=[qkv,head]",
        )
        numbers = (
            "tensors.path=train.safetensors",
            "tensors.eval_path=eval.safetensors",
            "model.loss=mse",
            "train.epochs=4",
            f"train.batch_size={32 // TRAINING_RANKS}",
            "lora.target_modules=[first,head]",
        )
        cases = ((Language, text, ("qkv", "head")), (Regression, numbers, ("first", "head")))
        for model, settings, layers in cases:
            with self.subTest(model.__name__):
                torch.manual_seed(3)  # as export() does
                base, folder = model(), f"{model.__name__}_adapter"
                before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
                output, merged = self.trained(
                    model, *settings, "lora.rank=4", "lora.alpha=8", f"lora.save_dir={folder}"
                )
                self.assertIn("adapters on 2 layers", output)
                for name, tensor in merged.state_dict().items():
                    is_adapted = name in [f"{layer}.weight" for layer in layers]
                    self.assertEqual(torch.equal(tensor, before[name]), not is_adapted, name)
                expected = set()
                for layer in layers:
                    expected.update(f"base_model.model.{layer}.lora_{half}.weight" for half in "AB")
                self.assertEqual(set(load_file(f"{folder}/adapter_model.safetensors")), expected)
                adapted = PeftModel.from_pretrained(base, folder).eval()
                data = load_file("eval.safetensors")
                inputs = (torch.arange(40).reshape(2, 20),) if model is Language else (data["x"], data["y"])
                with torch.no_grad():
                    torch.testing.assert_close(adapted(*inputs), merged(*inputs), rtol=1e-4, atol=1e-5)
                if model is Regression:
                    self.assert_test_loss(
                        output, F.mse_loss(adapted(*inputs).squeeze(1), data["target"]), 103
                    )
                # Trained further, from these files.
                again = self.run_on(
                    TRAINING_RANKS,
                    f"model.path={model.__name__}.pt2",
                    *settings,
                    "train.max_steps=1",
                    "lora.rank=4",
                    "lora.alpha=8",
                    f"lora.adapter={folder}",
                    f"lora.save_dir={folder}",
                    "lr_schedule.lr=0",
                )
                self.assertIn("adapters on 2 layers", again)
                self.assertEqual(load_file(f"{folder}/adapter_model.safetensors").keys(), expected)

    @not_on_one_rank
    def test_archives_of_other_dtypes(self):
        images = torch.randn(4, 3, 32, 32)
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            export(Regression, *[torch.randn(4, n) for n in (2, 1)], dtype=dtype)
            export(Images, images, dtype=dtype)
            export(ImageLoss, images, torch.zeros(4, dtype=torch.int64), dtype=dtype)
            name = str(dtype).replace("torch.", "")
            cases = (
                (Regression, "model.loss=mse", "tensors.path=train.safetensors", "tensors.eval_rows=100"),
                (Images, f"data.path={ROOT}/data/cifar10-sample", "data.num_samples=163"),
                (
                    ImageLoss,
                    "model.loss=in_graph",
                    f"data.path={ROOT}/data/cifar10-sample",
                    "data.num_samples=163",
                ),
            )
            for model, *settings in cases:
                with self.subTest(f"{model.__name__}_{name}"):
                    output = self.run_on(
                        TRAINING_RANKS,
                        f"model.path={model.__name__}_{name}.pt2",
                        "model.save_weights=weights.safetensors",
                        "lr_schedule.lr=0.01",
                        "train.epochs=2",
                        *settings,
                    )
                    self.number(r"test (?:loss|accuracy) +([0-9.]+)", output)
                    for weight in load_file("weights.safetensors").values():
                        self.assertEqual(weight.dtype, dtype)
                        self.assertTrue(weight.isfinite().all())

    def test_rows_without_targets(self):
        pathlib.Path("masked").mkdir()
        source = pathlib.Path(ROOT, "data/text-sample")
        shutil.copy(source / "vocabulary.safetensors", "masked")
        for split in ("train", "eval"):
            file = source / f"{split}.safetensors"
            tensors = load_file(file)
            numbers = torch.arange(len(tensors["tokens"]))
            tensors["targets"] = (numbers // 96 % 2).to(torch.uint8)  # rows of 32 with none
            with safe_open(file, "pt") as opened:
                save_file(tensors, f"masked/{split}.safetensors", opened.metadata())
        for model, loss in ((Language, "cross_entropy"), (LanguageLoss, "in_graph")):
            with self.subTest(loss):
                output, net = self.trained(
                    model,
                    f"model.loss={loss}",
                    "tokens.path=masked",
                    "tokens.max_seq_len=32",
                    "train.max_steps=20",
                    "train.batch_size=1",
                    "train.eval_batch_size=1",
                    "train.eval_first=true",
                )
                self.assertTrue(all(weight.isfinite().all() for weight in net.state_dict().values()))
                after, count = re.search(
                    r"eval loss .*, ([0-9.]+) after.* over (\d+) targets", output
                ).groups()
                ids, targets = tensors["tokens"].to(torch.int64), tensors["targets"].bool()
                total = 0.0
                with torch.no_grad():
                    for start in range(0, len(ids) - 1, 32):
                        end = min(start + 32, len(ids) - 1)
                        labels = ids[start + 1 : end + 1].where(targets[start + 1 : end + 1], -100)
                        scores = Language.forward(net, ids[None, start:end])[0]
                        total += F.cross_entropy(scores, labels, reduction="sum").item()
                self.assertEqual(int(count), targets[1:].sum().item())
                self.assertAlmostEqual(total / int(count), float(after), delta=2e-4)

    def check_refusals(self, cases, *common):
        if RANKS > 1:
            self.skipTest("on one rank")
        for code, message, *settings in cases:
            with self.subTest(message):
                output = self.run_on(1, "train.max_steps=2", *common, *settings, code=code)
                self.assertIn(message, output)

    def test_refusals_of_tensors(self):
        no_target = "the exported module has no argument target; it has: x, y"
        cases = (
            (65, "model.loss=cross_entropy needs labels as int64"),
            (64, no_target, "model.loss=in_graph"),
            (64, no_target, "model.loss=mse", "tensors.target=x"),
            (65, "lacks the target z; it has: target, x, y", "model.loss=mse", "tensors.target=z"),
            (
                64,
                'the target module "q_proj" matches no linear layer of this model; its linear layers end in: '
                "first, second, head",
                "model.loss=mse",
                "lora.rank=4",
            ),
            (
                64,
                "lora.save_dir=adapter has no effect with lora.rank=0",
                "model.loss=mse",
                "lora.save_dir=adapter",
            ),
        )
        data = ("tensors.path=train.safetensors", "tensors.eval_path=eval.safetensors")
        self.check_refusals(cases, "model.path=Regression.pt2", *data)
        not_scalar = "model.loss=in_graph needs a scalar loss, but the output is Float [32]"
        settings = ("model.path=RegressionLoss.pt2", "model.loss=in_graph", "model.output=prediction")
        self.check_refusals(((64, not_scalar, *settings),), *data)

    def test_refusals_before_the_training(self):
        data = ("tensors.path=train.safetensors", "tensors.eval_path=eval.safetensors")
        not_given = "lacks the argument target of the exported module; it has: x, y, target; fix: if"
        last = "the last training batch of an epoch, of 1 sample: input x, dimension 0: the size is 1"
        mse = "model.loss=mse"
        cases = (
            (64, not_given, "model.path=RegressionLoss.pt2", mse, *data),
            (64, last, "model.path=Pairs.pt2", mse, "train.batch_size=4", "train.eval_batch_size=103", *data),
            (
                65,
                "the program does not take the data of tensors.path",
                "model.path=Regression.pt2",
                mse,
                "tensors.path=integers.safetensors",
                "tensors.eval_rows=100",
            ),
            (
                65,
                "the program does not take an index of the data",
                "model.path=Lookup.pt2",
                mse,
                "train.batch_size=50",
                "tensors.path=wrong_numbers.safetensors",
                "tensors.eval_path=numbers.safetensors",
            ),
        )
        self.check_refusals(cases)

    def test_refusals_of_tokens(self):
        fixed = torch.export.export(Language().train(), (torch.zeros(4, 32, dtype=torch.int64),))
        torch.export.save(fixed, "fixed.pt2")
        cases = (
            (
                64,
                "an evaluation batch of 11 samples: input ids, dimension 0: the size is 11, and the export "
                "allows only 4",
                "model.path=fixed.pt2",
            ),
            (
                65,
                "the data has a vocabulary of 61 tokens, but the output of model.path has 20",
                "model.path=SmallLanguage.pt2",
            ),
            (
                65,
                "model.path does not take the id 60 of the data's vocabulary",
                "model.path=SmallLanguageLoss.pt2",
                "model.loss=in_graph",
            ),
            (64, "tokens.layout=pack", "model.path=Language.pt2", "tokens.layout=pack"),
            (
                64,
                "the size is 128, and the export allows 2 to 64",
                "model.path=Language.pt2",
                "tokens.max_seq_len=128",
            ),
        )
        self.check_refusals(
            cases,
            f"tokens.path={ROOT}/data/text-sample",
            "tokens.max_seq_len=32",
            "train.batch_size=4",
            "train.eval_batch_size=11",
        )


if __name__ == "__main__":
    unittest.main(verbosity=2)
