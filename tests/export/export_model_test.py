# SPDX-License-Identifier: Apache-2.0
"""tools/export_model.py, and its archives in Python and in C++: export_model_test.py EXPORTED_CASE, the
program of tests/export."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import zipfile

from export_support import ROOT, call  # isort: skip  (finds the exporter)
import reference
import torch
import transformers.modeling_outputs  # noqa: F401  (torch.export.load knows the outputs' classes then)
from libddp.export import DoesNotExport, Mistake, export
from torch.export.pt2_archive._package import load_pt2

OWN = '''
import random
import torch
from torch import nn

class Cnn(nn.Module):
    """Evaluation is no rewriting of the operators of training.
    Only Python knows what self.training leaves out."""
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.dropout = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.3)
        self.branch, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)
    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        y = self.branch(x)
        if self.training:
            y = y * (torch.rand(y.shape[0], 1, 1, 1) < 0.7) / 0.7
        else:
            y = y.clamp(max=0.5)
        return self.head(self.dropout((x + y).mean((2, 3))))

class Own(nn.Module):
    """Tied weights, a buffer that is not persistent, constants of each mode, a dict of outputs."""
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(4, width)
        self.second.weight = self.first.weight
        self.register_buffer("offset", torch.arange(float(width)), persistent=False)
        self.frozen = nn.BatchNorm1d(width)
    def forward(self, a, *, b):
        factor = torch.tensor([2.0]) if self.training else torch.tensor([3.0, 4.0])
        return {"sum": self.frozen(self.first(a)) + self.offset, "list": [self.second(b) * factor[0]]}

def make(width):
    return Own(width)

def example_inputs():
    return (torch.randn(3, 4),), {"b": torch.randn(3, 4)}

class Draws(nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.random()

class Branches(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x

class FixedBatch(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(4, 4)

class Even(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.shape[0] % 2 == 0 else x

class Heads(nn.Module):
    """Attention of batch times heads. PyTorch cannot prove that the strides of its views are in order."""
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 32)
    def forward(self, x):
        heads = self.net(x).view(x.shape[0], x.shape[1], 4, 8).transpose(1, 2).reshape(-1, x.shape[1], 8)
        return torch.bmm(heads, heads.transpose(1, 2)).softmax(-1).view(x.shape[0], 4, x.shape[1], -1)

def number():
    return 3
'''
VISION = '''
import torch
import torchvision
from torch import nn
from torchvision.ops import deform_conv2d, nms, roi_align

class Net(nn.Module):
    """A deformable convolution, boxes of its result, and those that do not overlap."""
    def __init__(self):
        super().__init__()
        self.offsets, self.mask = nn.Conv2d(3, 18, 3, padding=1), nn.Conv2d(3, 9, 3, padding=1)
        self.weight, self.head = nn.Parameter(torch.randn(8, 3, 3, 3) / 5), nn.Linear(8, 5)
    def forward(self, x):
        mask = torch.sigmoid(self.mask(x))
        y = torch.relu(deform_conv2d(x, self.offsets(x), self.weight, padding=1, mask=mask))
        number = torch.arange(x.shape[0], dtype=x.dtype)[:, None]
        corners = number // 2 * 8 + y.mean((2, 3))[:, :2].sigmoid()
        boxes = torch.cat([corners, corners + 5], 1)
        y = self.head(roi_align(y, torch.cat([number, boxes % 16], 1), 4).mean((2, 3)))
        return y, y[nms(boxes, y[:, 4], 0.2)]

@torch.library.custom_op("export_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2
double.register_fake(torch.empty_like)
double.register_autograd(lambda context, gradient: gradient * 2)

class InPython(nn.Linear):
    def forward(self, x):
        return double(super().forward(x))
'''
MISTRAL = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    sliding_window=8,
)
GPT2 = dict(n_layer=2, n_embd=32, n_head=4, vocab_size=97, n_positions=32)
LINEAR = {"in_features": 4, "out_features": 4}
LINEAR_SET = "in_features=4,out_features=4"
X = "x=float32[4,4]"
FOLDER = tempfile.TemporaryDirectory()
PROGRAM = os.path.abspath(sys.argv.pop(1)) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None


def setUpModule():
    torch.set_num_threads(1)
    pathlib.Path(FOLDER.name, "own.py").write_text(OWN)
    os.chdir(FOLDER.name)


def tearDownModule():
    os.chdir(ROOT)
    FOLDER.cleanup()


def pairs(values):
    return ",".join(f"{key}={value}" for key, value in values.items())


def made(make, **values):
    """The model of the command, which has seed 0."""
    torch.manual_seed(0)
    return make(**values)


class Archives(unittest.TestCase):
    def export(self, name, *arguments):
        os.makedirs(name, exist_ok=True)
        code, printed = call(f"{name}/model.pt2", *arguments)
        self.assertEqual(code, 0, printed)
        self.assertIn("check train equal in bits", printed)
        self.assertIn("check eval  equal in bits", printed)
        return printed

    def run_in_cpp(self, name, model, inputs, keywords=()):
        """Ten steps and an evaluation of the archive in C++, in bits like Python's."""
        reference.write_case(name, model, inputs, dict(keywords))
        if PROGRAM is None:
            self.skipTest("no exported_case was named")
        result = subprocess.run([PROGRAM, name], capture_output=True, text=True, timeout=200, check=False)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn(" 0 different", result.stdout)

    def test_cnn_whose_evaluation_only_python_knows(self):
        printed = self.export(
            "cnn", "--from", "own:Cnn", "--input", "x=float32[4,3,8,8]", "--dynamic", "x:0=batch,batch=2..16"
        )
        self.assertIn("x: float32 [batch, 3, 8, 8]", printed)
        self.assertIn("batch: 2 to 16", printed)
        self.assertIn("on the example and batch=5", printed)
        import own

        self.run_in_cpp("cnn", made(own.Cnn), (torch.randn(7, 3, 8, 8),))

    def test_gpt2_of_transformers(self):
        printed = self.export(
            "gpt2",
            "--from",
            "transformers:GPT2LMHeadModel",
            "--config",
            pairs(GPT2),
            "--input",
            "input_ids=int64[3,12]<97",
            "--dynamic",
            "input_ids:0=batch,input_ids:1=length,length=4..32",
        )
        self.assertIn("attention is causal by itself", printed)
        self.assertIn("['logits'] float32 [batch, length, 97]", printed)
        from transformers import GPT2Config, GPT2LMHeadModel

        model = made(lambda: GPT2LMHeadModel(GPT2Config(**GPT2, use_cache=False)))
        model.config._attn_implementation = "causal_without_mask"  # sdpa with a mask adds in another order
        self.run_in_cpp("gpt2", model, (torch.randint(97, (5, 20)),))

    def test_mask_as_input_keeps_padding_and_windows(self):
        printed = self.export(
            "mistral",
            "--from",
            "transformers:MistralForCausalLM",
            "--config",
            pairs(MISTRAL),
            "--input",
            "input_ids=int64[2,12]<97",
            "--input",
            "attention_mask=int64[2,12]<2",
        )
        self.assertIn("keeps its masks, because attention_mask is an input", printed)
        from transformers import MistralConfig, MistralForCausalLM

        model = made(lambda: MistralForCausalLM(MistralConfig(**MISTRAL, use_cache=False)))
        mask = torch.ones(3, 12, dtype=torch.int64)
        mask[0, 9:] = 0
        self.run_in_cpp("mistral", model, (torch.randint(97, (3, 12)),), {"attention_mask": mask})

    def test_decoder_that_has_a_copy_of_the_configuration(self):
        printed = self.export(
            "t5",
            "--from",
            "transformers:T5ForConditionalGeneration",
            "--config",
            pairs(dict(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)),
        )
        self.assertIn("no cache of keys and values", printed)
        self.assertNotIn("past_key_values", printed)

    def test_experts_without_the_operator_of_transformers(self):
        values = dict(MISTRAL, num_local_experts=4)
        printed = self.export(
            "mixtral",
            "--from",
            "transformers:MixtralForCausalLM",
            "--config",
            pairs(values),
            "--input",
            "input_ids=int64[3,8]<97",
        )
        self.assertNotIn("no part of LibTorch", printed)
        from transformers import MixtralConfig, MixtralForCausalLM

        model = made(lambda: MixtralForCausalLM(MixtralConfig(**values, use_cache=False)))
        model.config._attn_implementation = "causal_without_mask"
        self.run_in_cpp("mixtral", model, (torch.randint(97, (5, 8)),))

    def test_operators_of_torchvision(self):
        try:
            import torchvision  # noqa: F401
        except ImportError as error:
            self.skipTest(str(error))
        pathlib.Path("vision.py").write_text(VISION)
        printed = self.export("vision", "--from", "vision:Net", "--input", "x=float32[6,3,16,16]")
        found = re.search(r"operators of torchvision are no part of LibTorch: .*, here (\S+)", printed)
        self.assertTrue(found, printed)
        with self.assertRaisesRegex(
            AssertionError, r"error 65: .*LibTorch has no operator torchvision::.*librar"
        ):
            import vision

            self.run_in_cpp("vision", made(vision.Net), (torch.randn(8, 3, 16, 16),))
        with unittest.mock.patch.dict(os.environ, LIBRARIES=found[1]):
            self.run_in_cpp("vision", made(vision.Net), (torch.randn(8, 3, 16, 16),))
        printed = self.export("python", "--from", "vision:InPython", "--set", LINEAR_SET, "--input", X)
        self.assertIn("export_test::double: defined in Python, so C++ needs a library", printed)

    def test_conditions_that_hold_in_the_whole_range(self):
        dynamic = "x:0=batch,x:1=length,length=4..32"
        self.export("heads", "--from", "own:Heads", "--input", "x=float32[3,12,8]", "--dynamic", dynamic)
        import own

        self.run_in_cpp("heads", made(own.Heads), (torch.randn(5, 30, 8),))
        code, printed = call("even.pt2", "--from", "own:Even", "--set", LINEAR_SET, "--input", X)
        self.assertEqual(code, 65, printed)
        self.assertIn("does not export in mode train", printed)

    def test_causal_model_that_needs_its_mask(self):
        values = dict(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        words = ["--from", "transformers:FalconForCausalLM", "--config", pairs(values)]
        code, printed = call("falcon.pt2", *words)
        self.assertEqual(code, 65, printed)
        self.assertIn("fix: an input attention_mask", printed)
        masked = ["--input", "input_ids=int64[2,8]<97", "--input", "attention_mask=int64[2,8]<2"]
        self.export("falcon", *words, *masked)

    def test_own_module(self):
        self.export("own", "--from", "own:make", "--set", "width=6")
        import own

        self.run_in_cpp("own", made(own.make, width=6), (torch.randn(5, 4),), {"b": torch.randn(5, 4)})

    def test_one_copy_of_weights_stored_and_aligned(self):
        self.export("entries", "--from", "own:make", "--set", "width=6")
        with zipfile.ZipFile("entries/model.pt2") as archive, open("entries/model.pt2", "rb") as file:
            self.assertIsNone(archive.testzip())
            root = archive.namelist()[0].split("/")[0] + "/"
            names = [name.removeprefix(root) for name in archive.namelist()]
            tables = {
                mode: json.loads(archive.read(f"{root}data/weights/{mode}_weights_config.json"))
                for mode in ("model", "eval")
            }
            for entry in archive.infolist():
                self.assertEqual(entry.compress_type, zipfile.ZIP_STORED)
                file.seek(entry.header_offset + 26)
                lengths = file.read(4)
                begin = (
                    entry.header_offset
                    + 30
                    + int.from_bytes(lengths[:2], "little")
                    + int.from_bytes(lengths[2:], "little")
                )
                self.assertEqual(begin % 64, 0, entry.filename)
        self.assertEqual(tables["model"], tables["eval"])
        # Nine tensors, two of them tied.
        self.assertEqual(sum("weights/weight_" in name for name in names), 8)
        # The buffer once, one constant for each mode.
        self.assertEqual(sum("constants/tensor_" in name for name in names), 3)
        self.assertEqual(len(names), len(set(names)))

    def test_python_loads_both_programs(self):
        self.export("loaded", "--from", "own:make", "--set", "width=6")
        training = torch.export.load("loaded/model.pt2")
        programs = load_pt2("loaded/model.pt2").exported_programs
        self.assertEqual(set(programs), {"model", "eval"})
        for program, mode in ((training, True), (programs["model"], True), (programs["eval"], False)):
            norms = [node for node in program.graph.nodes if "batch_norm" in str(node.target)]
            self.assertEqual(norms[0].args[5], mode)

    def test_options(self):
        code, printed = call(
            "bf16.pt2",
            "--from",
            "own:Cnn",
            "--input",
            "x=float32[4,3,8,8]",
            "--dtype",
            "bfloat16",
            "--mode",
            "train",
        )
        self.assertEqual(code, 0, printed)
        self.assertIn("x: bfloat16 [batch, 3, 8, 8]", printed)
        self.assertIn("batch: 2 or more", printed)
        self.assertEqual(set(load_pt2("bf16.pt2").exported_programs), {"model"})
        code, printed = call(
            "fixed.pt2",
            "--from",
            "own:FixedBatch",
            "--set",
            LINEAR_SET,
            "--input",
            X,
            "--dynamic",
            "none",
            "--mode",
            "eval",
        )
        self.assertEqual(code, 0, printed)
        self.assertIn("x: float32 [4, 4]", printed)


class Function(unittest.TestCase):
    def test_module_stays_as_it_is(self):
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.5))
        model[1].eval()  # stays in evaluation while the model trains
        before = {name: value.clone() for name, value in model.state_dict().items()}
        inputs, state = (torch.randn(4, 4),), torch.get_rng_state()
        summary = export(model, inputs, path="sequential.pt2", dtype=torch.float64)
        self.assertTrue(torch.equal(state, torch.get_rng_state()))
        self.assertEqual([m.training for m in model], [True, False, True])
        for name, value in model.state_dict().items():
            self.assertTrue(torch.equal(value, before[name]) and value.dtype == before[name].dtype, name)
        program = torch.export.load("sequential.pt2")
        self.assertFalse(
            next(node.args[5] for node in program.graph.nodes if "batch_norm" in str(node.target))
        )
        self.assertEqual(program.state_dict["0.weight"].dtype, torch.float64)
        self.assertEqual(
            (summary.modes, summary.parameters, summary.checks["train"][0].different),
            (("train", "eval"), 42, 0),
        )

    def test_errors_are_exceptions(self):
        with self.assertRaisesRegex(Mistake, "names that end in .pt2; fix: net.pt2"):
            export(torch.nn.Linear(4, 4), (torch.randn(2, 4),), path="net.pt")
        with self.assertRaisesRegex(Mistake, "one of both, train, eval"):
            export(torch.nn.Linear(4, 4), (torch.randn(2, 4),), path="net.pt2", modes="all")
        with self.assertRaisesRegex(DoesNotExport, "fix: .*data-dependent"):
            import own

            export(own.Branches(**LINEAR), (torch.randn(2, 4),), path="net.pt2")
        self.assertFalse(os.path.exists("net.pt2"))


class Messages(unittest.TestCase):
    def refused(self, code, words, *arguments, out="wrong.pt2"):
        result, printed = call(out, *arguments)
        self.assertEqual(
            (result, words in printed, printed.count("error: "), "fix: " in printed),
            (code, True, 1, True),
            printed,
        )
        self.assertFalse(os.path.exists(out))
        self.assertEqual([name for name in os.listdir() if name.startswith(".export_")], [])

    def test_mistakes_of_the_call(self):
        linear = ("--from", "own:Branches", "--set", LINEAR_SET)
        for words, *arguments in (
            ("--from own names no model", "--from", "own"),
            ("there is no Python module nowhere", "--from", "nowhere:make"),
            ("own has no function or class nothing; fix: one of Cnn", "--from", "own:nothing"),
            ("own:number returns an object of int", "--from", "own:number", "--input", X),
            ("does not take these values", "--from", "own:make", "--set", "widht=3"),
            ("--set 'width' is no key=value", "--from", "own:make", "--set", "width"),
            ("--config is for transformers", "--from", "own:make", "--config", "width=3"),
            ("transformers has no class GPT2", "--from", "transformers:GPT2LMHead"),
            ("cannot be read", "--from", "transformers:GPT2LMHeadModel", "--config", "{n_layer"),
            ("no example inputs for Linear.forward(input)", "--from", "torch.nn:Linear", "--set", LINEAR_SET),
            ("does not say which configuration", "--from", "transformers:AutoModelForCausalLM"),
            ("forward has no such argument", *linear, "--input", "y=float32[4,4]"),
            ("there is no dtype float31", *linear, "--input", "x=float31[4,4]"),
            ("neither a tensor nor a number", *linear, "--input", "x=float32"),
            ("has no name", *linear, "--input", "float32[4,4]"),
            ("fails in Python on the example inputs", *linear, "--input", "x=float32[4,5]"),
            ("dimension 0 of x is 1", *linear, "--input", "x=float32[1,4]"),
            ("neither INPUT:DIM=NAME", *linear, "--input", X, "--dynamic", "x=batch"),
            ("no input of this name", *linear, "--input", X, "--dynamic", "y:0=batch"),
            ("the input has 2 dimensions", *linear, "--input", X, "--dynamic", "x:2=batch"),
            ("outside of the range 8..9", *linear, "--input", X, "--dynamic", "x:0=b,b=8..9"),
            ("the range of no dimension", *linear, "--input", X, "--dynamic", "x:0=b,c=8..9"),
            ("an empty range", *linear, "--input", X, "--dynamic", "x:0=b,b=9..8"),
            ("invalid choice: 'all'", *linear, "--input", X, "--mode", "all"),
        ):
            with self.subTest(words):
                self.refused(64, words, *arguments)
        self.refused(64, "fix: net.pt2", *linear, out="net.pt")

    def test_models_that_do_not_export(self):
        for words, *arguments in (
            ("mode train; fix: name the dimensions", "--from", "own:FixedBatch"),
            ("if x.sum() > 0", "--from", "own:Branches"),
            ("computes something else than the module", "--from", "own:Draws"),
        ):
            with self.subTest(words):
                self.refused(65, words, *arguments, "--set", LINEAR_SET, "--input", X)
        code, printed = call(
            "drawn.pt2", "--from", "own:Draws", "--set", LINEAR_SET, "--input", X, "--no-check"
        )
        self.assertEqual(code, 0, printed)

    def test_window_of_attention(self):
        self.refused(
            65,
            "sliding_window=8 tokens, and the inputs may have 12",
            "--from",
            "transformers:MistralForCausalLM",
            "--config",
            pairs(MISTRAL),
            "--input",
            "input_ids=int64[2,12]<97",
        )

    def test_folder_that_does_not_exist(self):
        self.refused(73, "is no folder that you may write", "--from", "own:Cnn", out="nowhere/net.pt2")


if __name__ == "__main__":
    unittest.main()
