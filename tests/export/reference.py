# SPDX-License-Identifier: Apache-2.0
"""Exports models of models.py, trains them in Python, and compares the same training by exported_case.

usage: reference.py FOLDER NAME                     writes FOLDER/model.pt2 and FOLDER/case.safetensors
       reference.py --run EXPORTED_CASE NAME…       does so in a temporary folder, and runs the program on
                                                    each
The environment variables BATCH, STEPS, LR and DEVICE set the number of training samples (of a batch), the
steps, the learning rate and the device. Each side prints the median processor time of a step, and the peak of
the memory during the first step above that before it.
"""

import copy
import os
import subprocess
import sys
import tempfile
import time

try:
    import torch
    from safetensors.torch import load_file, save_file
    from torch.utils import _pytree
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import models

LEARNING_RATE = float(os.environ.get("LR", 0.01))
STEPS = int(os.environ.get("STEPS", 10))
DEVICE = os.environ.get("DEVICE", "cpu")


def leaves_of(output):
    return [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def loss_of(leaves):
    """The same as in exported_case.cpp."""
    loss = None
    for leaf in leaves:
        if leaf.requires_grad:
            part = leaf if leaf.dim() == 0 else leaf.square().mean()
            loss = part if loss is None else loss + part
    return loss


def status(key):
    """MiB of this process, now (VmRSS) or at most (VmHWM)."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith(key))


class MemoryPeak:
    def __init__(self):
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated() / 2**20
        else:
            with open("/proc/self/clear_refs", "w") as f:
                f.write("5")
            self.before = status("VmRSS")

    def mib(self):
        return (
            torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else status("VmHWM")
        ) - self.before


def part(values, step, batches):
    """The batch of a step."""
    return _pytree.tree_map_only(torch.Tensor, lambda t: t.chunk(batches)[step % batches], values)


def train(model, inputs, keywords, batches):
    """What the training gave by name, the milliseconds of a step, and the peak of its memory in MiB."""
    tensors, losses, seconds = {}, [], []
    torch.manual_seed(1)
    peak = MemoryPeak()
    for step in range(STEPS):
        start = time.process_time()
        leaves = leaves_of(model(*part(inputs, step, batches), **part(keywords, step, batches)))
        loss = loss_of(leaves)
        loss.backward()
        if step == 0:
            peak_mib = peak.mib()
            tensors.update({f"output.{i:02}": leaf.detach().clone() for i, leaf in enumerate(leaves)})
            tensors.update(
                {f"grad.{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            )
            start = time.process_time()
        losses.append(loss.detach().float())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-LEARNING_RATE)
                    p.grad = None
        seconds.append(time.process_time() - start)
        del leaves, loss
    tensors.update({f"after.{name}": value.detach().clone() for name, value in model.state_dict().items()})
    step_ms = sorted(seconds[1:])[(STEPS - 1) // 2] * 1000
    print(
        f"Python: step {step_ms:.3f} ms, peak {peak_mib:.1f} MiB; losses {losses[0]:.6f} to {losses[-1]:.6f}"
    )
    return {**tensors, "losses": torch.stack(losses)}, step_ms, peak_mib


def can_evaluate(program):
    """Whether eval() follows from the program of training: no random operator but those with a mode."""
    with_mode = {"train", "training", "dropout_p"}
    for node in program.graph.nodes:
        operator = node.target
        is_random = (
            isinstance(operator, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in operator.tags
        )
        if is_random and not with_mode & {argument.name for argument in operator._schema.arguments}:
            return False
    return True


def named_leaves(inputs):
    """Tensors as input.0 and, of a container, input.0.KEY with a named tuple's field, a dict's key or a
    list's index."""
    tensors = {}
    for i, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            tensors[f"input.{i}"] = value
        else:
            entries = value._asdict() if hasattr(value, "_asdict") else value
            entries = dict(enumerate(entries)) if isinstance(entries, list) else entries
            tensors.update({f"input.{i}.{key}": tensor for key, tensor in entries.items()})
    return tensors


def write_case(folder, model, inputs, keywords, batches=1, evaluate=True):
    """Trains the model, and writes what exported_case compares. Returns the milliseconds of a step and the
    peak of its memory in MiB."""
    tensors, step_ms, peak_mib = train(model.train(), inputs, keywords, batches)
    model.eval()
    if evaluate:
        with torch.no_grad():
            tensors.update(
                {f"eval.{i:02}": leaf for i, leaf in enumerate(leaves_of(model(*inputs, **keywords)))}
            )
    tensors.update({"batches": torch.tensor(batches), "lr": torch.tensor(LEARNING_RATE, dtype=torch.float64)})
    tensors.update(named_leaves(inputs))
    tensors.update(
        {f"keyword.{key}": value for key, value in keywords.items() if isinstance(value, torch.Tensor)}
    )
    save_file(
        {key: value.cpu().clone().contiguous() for key, value in tensors.items()},
        os.path.join(folder, "case.safetensors"),
    )
    return step_ms, peak_mib


def write(folder, name):
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    os.makedirs(folder, exist_ok=True)
    case = models.make(name)
    model = case.model.train()
    program = torch.export.export(
        copy.deepcopy(model), case.inputs, case.keywords, dynamic_shapes=case.shapes
    )
    torch.export.save(program, os.path.join(folder, "model.pt2"))
    print(f"{name}: {sum(node.op == 'call_function' for node in program.graph.nodes)} calls")
    inputs, keywords = _pytree.tree_map_only(
        torch.Tensor,
        lambda t: t.to(DEVICE),
        (case.other or case.inputs, {**case.keywords, **case.other_keywords}),
    )
    model.to(DEVICE)
    write_case(
        folder,
        model,
        inputs,
        keywords,
        case.batches,
        evaluate=case.batches == 1 and case.evaluates and can_evaluate(program),
    )


def check_trained(folder, model):
    """What exported_case trained and saved, in Python: weights for a model as new, and an archive."""
    trained = {
        key[6:]: value
        for key, value in load_file(os.path.join(folder, "case.safetensors")).items()
        if key.startswith("after.")
    }
    model.load_state_dict(load_file(os.path.join(folder, "trained.safetensors")))
    program = torch.export.load(os.path.join(folder, "trained.pt2"))
    for key, value in trained.items():
        assert torch.equal(model.state_dict()[key], value), key
        assert torch.equal(program.state_dict[key], value), key


def run(program, names):
    failed, skipped = [], []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                write(folder, name)
            except ImportError as error:  # of the model's own package
                print(f"skipped {name}: {error}", flush=True)
                skipped.append(name)
                continue
            done = subprocess.run([program, folder], capture_output=True, text=True)
            if done.returncode == 0:
                check_trained(folder, models.make(name).model)
        print("C++:", done.stdout.strip() or done.stderr.strip(), flush=True)
        failed += [name] if done.returncode != 0 else []
    if failed:
        sys.exit("not equal: " + ", ".join(failed))
    if skipped:
        sys.exit(77)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        write(*sys.argv[1:])
    elif len(sys.argv) > 3 and sys.argv[1] == "--run":
        run(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(__doc__)
