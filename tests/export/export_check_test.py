# SPDX-License-Identifier: Apache-2.0
"""What the exporter compares, what it takes, and what it refuses: python export_check_test.py"""

import collections
import functools
import json
import os
import pathlib
import resource
import shutil
import tempfile
import unittest
import unittest.mock
import zipfile

from export_support import ROOT, call  # isort: skip  (finds the exporter)
import torch
from libddp.export import CannotWrite, DoesNotExport, Mistake, check, export
from libddp.export.program import in_mode
from libddp.export.sizes import Sizes, list_inputs
from torch import nn
from torch.export.pt2_archive._package import load_pt2
from torch.utils.checkpoint import checkpoint

Dim = torch.export.Dim
FOLDER = tempfile.TemporaryDirectory()
OWN = """
import threading
import torch
from torch import nn

class Locked(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.lock = threading.Lock()

class NoEvaluation(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
    def forward(self, x):
        if not self.training:
            raise ValueError("no evaluation")
        return super().forward(x)

class Wide(nn.Linear):
    def __init__(self):
        super().__init__(600, 600)
"""


def setUpModule():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pathlib.Path(FOLDER.name, "own_models.py").write_text(OWN)
    os.chdir(FOLDER.name)


def tearDownModule():
    os.chdir(ROOT)
    FOLDER.cleanup()


class Net(nn.Module):
    """Two layers around a function of the tests."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x):
        return self.second(self.function(self, x))


class Two(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.function = nn.Linear(4, 4), function

    def forward(self, a, b):
        return self.function(self, a, b)


def weighted(module, a, b):
    return module.first(a) * 2 + b * 3


def power(module, a, b):
    return module.first(a) * b


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return -gradient


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return torch.sign(x)

    @staticmethod
    def backward(context, gradient):
        return gradient


def hooked(module, x):
    y = module.first(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y


def without_gradient_in_autocast(module, x):
    with torch.autocast("cpu"):
        with torch.no_grad():
            y = module.first(x)
        return y.float() + module.second(x).float()


def inference(module, x):
    with torch.inference_mode():
        y = module.first(x)
    return x + y


def without_gradient(module, x):
    with torch.no_grad():
        y = module.first(x)
    return x + y


class Inputs(unittest.TestCase):
    def test_one_tensor_for_two_inputs(self):
        x = torch.randn(3, 4)
        model = Two(weighted)
        export(model, (x, x), path="twice.pt2")
        program = torch.export.load("twice.pt2").module()
        a, b = torch.randn(5, 4), torch.randn(5, 4)
        self.assertTrue(torch.equal(program(a, b), model(a, b)))

    def test_parameter_as_input(self):
        model = Two(weighted)
        export(model, (model.first.weight, torch.randn(4, 4)), path="parameter.pt2", dynamic_shapes={})
        program = torch.export.load("parameter.pt2").module()
        a, b = torch.randn(4, 4), torch.randn(4, 4)
        self.assertTrue(torch.equal(program(a, b), model(a, b)))

    def test_check_sees_mixed_inputs(self):
        for x in (torch.randn(3, 4), torch.randint(9, (3, 4))):
            model = Two(lambda module, a, b: module.first(a.float()) * 2 + b * 3)
            program = torch.export.export(model, (x, x))
            sizes = Sizes(program, list_inputs(model, (x, x), {}))
            with self.assertRaisesRegex(DoesNotExport, "computes something else"):
                check.check_mode(
                    "train", functools.partial(in_mode, model, "train"), program, sizes, (x, x), {}, True
                )

    def test_copies_keep_strides(self):
        for x in (
            torch.randn(3, 4),
            torch.randn(4, 6)[1:, ::2],
            torch.randn(1, 4).expand(3, 4),
            torch.randn(2, 3, 4).permute(2, 0, 1).requires_grad_(),
            torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.randn(3, 0),
            torch.randn(3, dtype=torch.complex64).conj(),
        ):
            (y,) = check.copied((x,))
            self.assertTrue(torch.equal(x, y))
            self.assertEqual((x.stride(), x.requires_grad), (y.stride(), y.requires_grad))
            self.assertTrue(y.is_leaf)
            self.assertTrue(x.numel() == 0 or x.data_ptr() != y.data_ptr())

    def test_sizes_as_torch_takes_them(self):
        x = torch.randn(4, 4)
        shapes = torch.export.ShapesCollection()
        shapes[x] = {0: Dim("rows", min=2)}
        summary = export(Two(power), (x, 3), path="shapes.pt2", dynamic_shapes=shapes)
        self.assertEqual((summary.inputs, len(shapes)), (["a: float32 [rows, 4]", "b: 3, fixed"], 1))
        examples = torch.export.AdditionalInputs()
        examples.add((torch.randn(6, 4), 5))
        for given in (examples, {"a": {0: Dim.DYNAMIC}, "b": Dim.DYNAMIC}):
            model = Two(power)
            summary = export(model, (x, 3), path="shapes.pt2", dynamic_shapes=given)
            self.assertRegex(" ".join(summary.inputs), r"^a: float32 \[s\d+, 4\] b: int s\d+$")
            program, y = torch.export.load("shapes.pt2").module(), torch.randn(7, 4)
            self.assertTrue(torch.equal(program(y, 9), model(y, 9)))
        shapes[torch.randn(4, 4)] = {0: Dim("rows", min=2)}
        with self.assertRaisesRegex(Mistake, "does not fit the example inputs; fix: "):
            export(Two(power), (x, 3), path="shapes.pt2", dynamic_shapes=shapes)

    def test_tensor_instead_of_arguments(self):
        with self.assertRaisesRegex(Mistake, "args is a tensor; fix: a tuple"):
            export(nn.Linear(4, 4), torch.randn(4, 4), path="tensor.pt2")


class Gradients(unittest.TestCase):
    def refused(self, name, function, **options):
        with self.assertRaisesRegex(DoesNotExport, f"gradient than the module: {name} .*fix: "):
            export(Net(function), (options.pop("x", torch.randn(3, 4)),), path="lost.pt2", **options)
        self.assertFalse(os.path.exists("lost.pt2"))

    def test_lost_gradients(self):
        self.refused("first.weight", lambda module, x: Reversed.apply(module.first(x)))
        self.refused("first.weight", lambda module, x: StraightThrough.apply(module.first(x)))
        self.refused("first.weight", hooked)
        self.refused("first.weight", inference)
        self.refused("first.weight", inference, modes="eval")
        self.refused("input x", lambda module, x: Reversed.apply(x), x=torch.randn(3, 4).requires_grad_())
        with self.assertRaisesRegex(DoesNotExport, "torch.no_grad inside torch.autocast"):
            export(Net(without_gradient_in_autocast), (torch.randn(3, 4),), path="lost.pt2")

    def test_gradients_that_stay(self):
        summary = export(Net(without_gradient), (torch.randn(3, 4),), path="kept.pt2")
        self.assertIn("4 of them gradients", str(summary.checks["train"][0]))
        self.assertNotIn("gradients", str(summary.checks["eval"][0]))

    def test_gradient_of_a_branch_that_is_not_taken(self):
        """Zeros in the program of torch.cond, and none in Python, where the condition is a truth value."""

        def either(module, x):
            return torch.cond(x.shape[0] > 2, module.first, module.third, (x,))

        model = Net(either)
        model.third = nn.Linear(4, 4)
        difference = export(model, (torch.randn(3, 4),), path="branch.pt2").checks["train"][0]
        self.assertEqual((difference.different, difference.greatest), (4, 0.0))  # two parameters, two calls

    def test_weight_that_autocast_casts_twice(self):
        """Python sums the two gradients in bfloat16, because it casts once, and the program in float32."""

        def region(module, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return module.first(module.first(x)).float()

        torch.manual_seed(0)
        difference = export(Net(region), (torch.randn(64, 4),), path="cast.pt2").checks["train"][0]
        self.assertGreater(difference.relative, check.tolerance([torch.ones(())]))

    def test_input_that_forward_marks(self):
        model = Net(lambda module, x: module.first(x.requires_grad_()))
        summary = export(model, (torch.randn(3, 4),), path="marked.pt2")
        self.assertEqual(summary.checks["train"][0].different, 0)

    def test_gradient_of_tied_and_sparse_weights(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
                self.head.weight = self.embedding.weight
                self.table = nn.Embedding(9, 4, sparse=True)

            def forward(self, ids):
                return self.head(self.embedding(ids)), self.table(ids)

        summary = export(Tied(), (torch.randint(9, (3, 5)),), path="tied.pt2")
        difference = summary.checks["train"][0]
        self.assertEqual((difference.different, difference.gradients), (0, 4))  # two weights, two calls

    def test_backward_that_updates_buffers(self):
        norm = nn.BatchNorm1d(4)
        model = Net(lambda module, x: checkpoint(module.norm, module.first(x), use_reentrant=False))
        model.norm = norm
        summary = export(model, (torch.randn(3, 4),), path="checkpoint.pt2")
        self.assertEqual(summary.checks["train"][0].different, 0)

    def test_backward_that_fails_in_python(self):
        model = Net(lambda module, x: checkpoint(module.first, x, use_reentrant=True))
        summary = export(model, (torch.randn(3, 4).requires_grad_(),), path="reentrant.pt2")
        self.assertIn("without gradients, because Python's backward fails", summary.checks["train"][1])


class State(unittest.TestCase):
    def test_buffer_over_a_parameter(self):
        model = Net(lambda module, x: module.first(x) + module.row)
        model.register_buffer("row", model.first.weight.data[0])
        export(model, (torch.randn(3, 4),), path="row.pt2")
        state = torch.export.load("row.pt2").state_dict
        state["first.weight"].data[0] = 7
        self.assertEqual(state["row"].tolist(), [7, 7, 7, 7])

    def test_constant_over_a_parameter(self):
        for persistent in (False, None):
            model = Net(lambda module, x: module.first(x) + module.row)
            if persistent is None:
                model.row = model.first.weight.data[0]
            else:
                model.register_buffer("row", model.first.weight.data[0], persistent=persistent)
            with self.assertRaisesRegex(DoesNotExport, "^row shares the memory of .* first.weight.*fix: "):
                export(model, (torch.randn(3, 4),), path="row.pt2", modes="eval")

    def test_expanded_buffer(self):
        model = Net(lambda module, x: module.first(x) + module.wide)
        model.register_buffer("wide", torch.ones(1).expand(4))
        difference = export(model, (torch.randn(3, 4),), path="wide.pt2").checks["train"][0]
        self.assertEqual(difference.different, 0)

    def test_sparse_constant(self):
        model = Net(lambda module, x: torch.sparse.mm(module.graph, module.first(x)))
        model.graph = torch.eye(3).to_sparse()
        with self.assertRaisesRegex(DoesNotExport, "torch.export.save refuses .*fix: "):
            export(model, (torch.randn(3, 4),), path="sparse.pt2", dynamic_shapes={})

    def test_buffer_that_is_assigned_after_its_use(self):
        def model(old_value):
            def forward(module, x):
                y = module.first(x)
                y = y * y * old_value(module.mean)
                module.mean = 0.9 * module.mean + 0.1 * y.detach().mean(0)
                return y

            model = Net(forward)
            model.register_buffer("mean", torch.ones(4))
            return model

        with self.assertRaisesRegex(DoesNotExport, r"fix: use self.mean.clone\(\)"):
            export(model(lambda mean: mean), (torch.randn(3, 4),), path="mean.pt2")
        export(model(torch.clone), (torch.randn(3, 4),), path="mean.pt2")


class Results(unittest.TestCase):
    def test_conjugate_and_sparse_results(self):
        model = nn.Linear(4, 4)
        for function in (lambda x: torch.fft.fft(x).conj(), lambda x: x.to_sparse()):
            net = Two(lambda module, a, b, function=function: (function(module.first(a)), b))
            summary = export(net, (torch.randn(3, 4), 1), path="results.pt2", dynamic_shapes={})
            self.assertEqual(summary.checks["train"][0].different, 0)
        self.assertEqual(len(list(model.parameters())), 2)

    def test_program_that_python_cannot_run(self):
        """PyTorch writes an infinite complex constant that its own code cannot read."""
        net = Net(lambda module, x: torch.view_as_real(module.first(x) + complex(0, float("inf")))[..., 0])
        with self.assertRaisesRegex(
            DoesNotExport, "fails on the example inputs, which the module takes; fix"
        ):
            export(net, (torch.randn(3, 4),), path="infinite.pt2")

    def test_text_and_named_tuples(self):
        Pair = collections.namedtuple("Pair", "a b")
        for words, make in (
            ("forward returns the text 'name'; fix: return tensors", lambda a, b: (a, "name")),
            ("_register_namedtuple", lambda a, b: Pair(a, b)),
        ):
            net = Two(lambda module, a, b, make=make: make(module.first(a), b * 2))
            with self.assertRaisesRegex(DoesNotExport, words):
                export(net, (torch.randn(3, 4), torch.randn(3, 4)), path="text.pt2")

    def test_autocast_of_another_device(self):
        def region(device):
            def forward(module, x):
                with torch.autocast(device, dtype=torch.bfloat16):
                    return module.first(x).float()

            return forward

        summary = export(Net(region("cuda")), (torch.randn(3, 4),), path="autocast.pt2")
        self.assertIn("warning     a region of torch.autocast('cuda') was exported on cpu", str(summary))
        self.assertEqual(export(Net(region("cpu")), (torch.randn(3, 4),), path="autocast.pt2").warnings, [])


class Files(unittest.TestCase):
    def test_mode_of_the_archive(self):
        for modes in ("train", "eval", "both"):
            export(nn.Linear(4, 4), (torch.randn(3, 4),), path="mode.pt2", modes=modes)
            self.assertEqual(load_pt2("mode.pt2").extra_files, {"libddp_mode": modes})
            with zipfile.ZipFile("mode.pt2") as archive:
                (entry,) = [name for name in archive.namelist() if name.endswith("/extra/libddp_mode")]
                self.assertEqual((archive.read(entry), entry.count("/")), (modes.encode(), 2))

    def test_full_disk_is_seen_before_writing(self):
        usage = shutil.disk_usage(".")._replace(free=100)
        model, inputs = nn.Linear(4, 4), (torch.randn(3, 4),)
        with unittest.mock.patch("shutil.disk_usage", return_value=usage):
            with self.assertRaisesRegex(CannotWrite, "needs 160 bytes for 2 programs, and 100 are free"):
                export(model, inputs, path="full.pt2")
            export(model, inputs, path="full.pt2", modes="train")

    def test_disk_that_is_full_while_writing(self):
        """A limit of the file's size ends the writing as a full disk does. It is that of a copy of this
        process, which starts sooner than the command."""
        command = ("limited.pt2", "--from", "own_models:Wide", "--input", "input=float32[4,600]")
        for mode in ("train", "both"):
            for limit in (1 << 20, 1456000):  # within the weights, and behind them
                with tempfile.TemporaryFile("w+") as printed:
                    child = os.fork()
                    if child == 0:
                        code = 1
                        try:
                            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                            code, text = call(*command, "--mode", mode)
                            printed.write(text)
                            printed.flush()
                        finally:
                            os._exit(code)
                    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                    printed.seek(0)
                    text = printed.read()
                self.assertEqual(code, 73, text)
                self.assertIn("limited.pt2: cannot write: File too large; fix: ", text)
                self.assertEqual(
                    [name for name in os.listdir() if "limited" in name or ".export" in name], []
                )


class Messages(unittest.TestCase):
    def refused(self, code, words, *arguments):
        result, printed = call("refused.pt2", *arguments)
        self.assertEqual(
            (result, words in printed, printed.count("error: "), "fix: " in printed),
            (code, True, 1, True),
            printed,
        )
        self.assertFalse(os.path.exists("refused.pt2"))

    def test_inputs_and_ranges(self):
        linear = ("--from", "torch.nn:Linear", "--set", "in_features=4,out_features=4")
        given = (*linear, "--input", "input=float32[4,4]", "--dynamic")
        for words, *arguments in (
            ("int8 holds integers up to 127", *linear, "--input", "input=int8[4,4]<1000"),
            ("the example cannot be made", *linear, "--input", "input=quint8[4,4]"),
            ("the example cannot be made", *linear, "--input", f"input=float32[{10**14}]"),
            ("the example cannot be made", *linear, "--input", f"input=float32[{10**30}]"),
            ("<9 is for integers", *linear, "--input", "input=float32[4,4]<9"),
            ("b=4..4 is a single size", *given, "input:0=b,b=4..4"),
            ("input:0=0*b is always 0", *given, "input:0=0*b"),
        ):
            with self.subTest(arguments[-1]):
                self.refused(64, words, *arguments)

    def test_conditions_of_sizes_are_shown(self):
        class Product(nn.Module):
            def forward(self, x, y):
                return x.reshape(-1) * y.reshape(-1)

        x = torch.ones(2, 6)
        sizes = {"x": {0: Dim("batch", min=2), 1: Dim("width", min=2)}, "y": None}
        found = export(Product(), (x, x.clone()), path="product.pt2", dynamic_shapes=sizes)
        products = ["x.size(0)*x.size(1)", "x.size(1)*x.size(0)"]
        self.assertIn(found.sizes[-1], [f"condition: ({product}) == 12" for product in products])

    def test_integers_of_all_types(self):
        for kind, below in (
            ("int8", 128),
            ("uint8", 256),
            ("uint16", 65536),
            ("int64", 2**63 - 1),
            ("bool", 2),
        ):
            arguments = ("--from", "torch.nn:Identity", "--input", f"input={kind}[4,4]<{below}")
            self.assertEqual(call("integers.pt2", *arguments)[0], 0, kind)

    def test_unknown_values_of_a_configuration(self):
        gpt2 = ("--from", "transformers:GPT2LMHeadModel", "--config")
        clip = ("--from", "transformers:CLIPModel", "--config")
        self.refused(64, "n_layers: GPT2Config has no such value; fix: n_layer", *gpt2, "n_layers=1,n_head=2")
        self.refused(64, "temperature: GPT2Config has no such", *gpt2, json.dumps({"temperature": 0.5}))
        self.refused(
            64, "fix: text_config.hidden_size", *clip, json.dumps({"text_config": {"hidden_sizes": 8}})
        )

    def test_known_values_of_a_configuration(self):
        """Names of attribute_map, properties, and names of older versions of transformers."""
        from libddp.export.sources import check_config
        from transformers import CLIPConfig, GPT2Config, LlamaConfig

        check_config(GPT2Config, {"num_hidden_layers": 1, "num_labels": 3, "attn_implementation": "eager"})
        check_config(LlamaConfig, {"rope_theta": 10000.0, "dtype": "float32"})
        check_config(CLIPConfig, {"text_config": {"hidden_size": 8}, "projection_dim": 4})

    def test_modules(self):
        x = ("--input", "input=float32[4,4]")
        self.refused(65, "cannot be copied", "--from", "own_models:Locked", *x, "--dtype", "bfloat16")
        arguments = ("--from", "own_models:NoEvaluation", "--input", "x=float32[4,4]")
        self.refused(64, "in mode eval; fix: ", *arguments)
        self.assertEqual(call("trained.pt2", *arguments, "--mode", "train")[0], 0)

    def test_unexpected_errors(self):
        with unittest.mock.patch("libddp.export.command.make_model", side_effect=RuntimeError("surprise")):
            self.refused(70, "Python says: RuntimeError: surprise", "--from", "own_models:Locked")


if __name__ == "__main__":
    unittest.main()
