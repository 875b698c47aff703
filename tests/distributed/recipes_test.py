# SPDX-License-Identifier: Apache-2.0
"""Recipes whose files matter: for Python, from Python, or in a checkpoint.

usage: recipes_test.py RECIPE LAUNCHER PROGRAM RANKS    # RECIPE: a function below without arguments
"""

import filecmp
import os
import pathlib
import subprocess
import sys
import tempfile

try:
    if sys.argv[1] in ("torchscript", "exported_model", "fine_tuning", "multi_task"):
        import torch
    if sys.argv[1] in ("exported_model", "fine_tuning", "multi_task"):
        import safetensors.torch
    if sys.argv[1] == "fine_tuning":
        import torchvision
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parents[2]
scenario, launcher, program, ranks = sys.argv[1:]


def python(script, *arguments):
    subprocess.run([sys.executable, ROOT / "examples/recipes" / script, *arguments], check=True)


def run(output, *settings, code=0, ranks=ranks):
    """`output`: what rank 0 must write, one text or a list."""
    launch = ["--launch", "env"] if ranks == "1" else []
    expected = [output] if isinstance(output, str) else output
    outputs = []
    for text in expected:
        outputs += ["--expect-output", "0:" + text]
    subprocess.run(
        [
            launcher,
            "--ranks",
            ranks,
            "--timeout",
            "100",
            *launch,
            "--expect-exit",
            f"*:{code}",
            *outputs,
            "--",
            program,
            "context.device=cpu",
            *settings,
        ],
        check=True,
    )


def train_on_images(*settings):
    run(
        "step 4/4 | loss ",
        "metrics.dir=",
        "train.max_steps=4",
        "train.batch_size=8",
        f"data.path={ROOT}/data/cifar10-sample",
        "data.num_samples=64",
        *settings,
    )


def torchscript():
    python("torchscript_net.py", "net.pt")
    train_on_images("script.path=net.pt", "script.output=trained.pt", "lr_schedule.lr=0.01")
    net, trained = torch.jit.load("net.pt"), torch.jit.load("trained.pt")
    for (name, before), after in zip(net.named_parameters(), trained.parameters()):
        assert not torch.equal(before, after), f"{name} was not trained"
    # Weights alone go through a file and, with a learning rate of 0, through training.
    train_on_images(
        "script.path=net.pt",
        "script.weights=trained.pt.safetensors",
        "script.output=again.pt",
        "lr_schedule.lr=0",
    )
    for (name, before), after in zip(trained.named_parameters(), torch.jit.load("again.pt").parameters()):
        assert torch.equal(before, after), f"{name} was not loaded"
    assert trained.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def exported_model():
    source = ROOT / "data/exported-sample"
    # The committed archive is what its script makes, as far as it matters: Python's names and values.
    subprocess.run([sys.executable, source / "make_archive.py", "again.pt2"], check=True)
    train_on_images(
        f"exported.path={source}/cifar_net.pt2", "exported.output=trained.safetensors", "lr_schedule.lr=0.01"
    )
    sys.path.insert(0, str(source))
    sys.dont_write_bytecode = True
    net = __import__("make_archive").CifarNet()
    net.load_state_dict(safetensors.torch.load_file("trained.safetensors"))  # strict
    before = torch.export.load("again.pt2").state_dict
    for name, after in net.state_dict().items():
        assert not torch.equal(before[name], after), f"{name} was not trained"
    assert net.bn.num_batches_tracked == 4
    # With a learning rate of 0 the parameters are those of the export.
    train_on_images(
        f"exported.path={source}/cifar_net.pt2", "exported.output=same.safetensors", "lr_schedule.lr=0"
    )
    same = safetensors.torch.load_file("same.safetensors")
    for name, _ in net.named_parameters():
        assert torch.equal(before[name], same[name]), f"{name} is another one than the archive's"
    assert net.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def fine_tuning():
    source = torchvision.models.resnet18()
    torch.save(source.state_dict(), "resnet18.pt")
    python("convert_weights.py", "resnet18.pt", "resnet18.safetensors")
    # With a learning rate of 0 the weights that come back are those that went in.
    train_on_images(
        "weights.from=resnet18.safetensors", "weights.to=fine_tuned.safetensors", "lr_schedule.lr=0"
    )
    python("convert_weights.py", "fine_tuned.safetensors", "fine_tuned.pt")
    tuned = torchvision.models.resnet18(num_classes=10)
    tuned.load_state_dict(torch.load("fine_tuned.pt", weights_only=True), strict=True)
    for (name, before), after in zip(source.named_parameters(), tuned.parameters()):
        assert name.startswith("fc.") or torch.equal(before, after), f"{name} changed"


def gan():
    """A resumed run ends with the bits of one that was never interrupted."""
    run("step 600/600 | d_loss ", "metrics.dir=", "checkpoint.dir=whole", "train.max_steps=600")
    run("step 300/300 | d_loss ", "metrics.dir=", "checkpoint.dir=resumed", "train.max_steps=300")
    run("after 300 steps", "metrics.dir=", "checkpoint.dir=resumed", "train.max_steps=600")
    for name in ("generator", "discriminator", "g_optimizer", "d_optimizer"):
        file = f"step_0000000600/{name}.safetensors"
        assert filecmp.cmp("whole/" + file, "resumed/" + file, shallow=False), f"{name} differs"


def hooks():
    """A stop saves first; the next run continues there and reports its last checkpoint."""
    settings = ["checkpoint.dir=run", "checkpoint.stop_check_seconds=0.01", "train.max_steps=4000"]
    run(["after the save of ", "before the stop after "], *settings, "loop.stop_after=20", code=75)
    run("after the save of 4000 steps: run/step_0000004000", *settings, "loop.stop_after=20")


def uneven_data():
    """Resumed runs end: with the bits of an uninterrupted one, or with another batch."""
    # 50 samples in batches of 7: the eighth batch of an epoch has one sample, for rank 0.
    batch = ["metrics.dir=", "loader.global_batch_size=7"]
    run("step 20/20 | ", *batch, "checkpoint.dir=whole", "train.max_steps=20")
    run("step 7/7 | ", *batch, "checkpoint.dir=resumed", "train.max_steps=7")
    run("after 7 steps", *batch, "checkpoint.dir=resumed", "train.max_steps=20")
    file = "step_0000000020/model.safetensors"
    assert filecmp.cmp("whole/" + file, "resumed/" + file, shallow=False), "the weights differ"
    # Steps of 16 samples, then of 8.
    run("step 6/6 | ", "metrics.dir=", "checkpoint.dir=other", "train.max_steps=6")
    other = ["metrics.dir=", "checkpoint.dir=other", "loader.global_batch_size=8", "train.epochs=5"]
    run(["16 samples per step", "step 35/35 | "], *other)


def multi_task():
    """The ranks' weights are those of one process, which has all labels."""
    settings = ["metrics.dir=", "loader.global_batch_size=12", "train.epochs=8"]
    run("step 40/40 | ", *settings, "checkpoint.dir=ranks")
    run("step 40/40 | ", *settings, "checkpoint.dir=one", ranks="1")
    found, expected = (
        safetensors.torch.load_file(f"{folder}/step_0000000040/model.safetensors")
        for folder in ("ranks", "one")
    )
    for name, tensor in expected.items():
        # Sums of other orders in float32.
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    globals()[scenario]()
