# SPDX-License-Identifier: Apache-2.0
"""Products that are trained from an archive in C++ and by PyTorch's own loop: the model, its export, the data
of both sides, settings of exported_ddp, and both trainings. `o` has the folders `build`, `data` and `out`,
`device`, and for Pretrained `base_steps`."""

import csv
import os
import subprocess
import sys
import time

import curve_models
import libddp_batches
import peer
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
SEQ_LEN = 128
EVAL_BATCH = 50
ADAPTER = dict(rank=8, alpha=16, layers=["q_proj", "k_proj", "v_proj", "o_proj"])
QWEN2 = dict(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
COMMON = [
    "train.eval_every=0",
    f"train.eval_batch_size={EVAL_BATCH}",
    "sampler.shuffle=false",
    "loader.drop_last=true",
    "loader.num_workers=1",
    "metrics.log_every=1",
    "metrics.progress=plain",
    "metrics.run_name=run",
]


class Images:
    """A model of timm on CIFAR-10."""

    def __init__(self, o, source, arguments, recipe):
        self.o, self.source, self.arguments, self.recipe = o, source, arguments, recipe
        self.folder = os.path.join(o.data, "cifar10")

    def make_model(self):
        import timm

        torch.manual_seed(0)
        return timm.create_model(self.source.removeprefix("timm:"), **self.arguments)

    def export_words(self):
        words = ["--from", self.source, "--input", "x=float32[4,3,32,32]"]
        for key, value in self.arguments.items():
            words += ["--set", f"{key}={value}"]
        return words

    def settings(self, out):
        return [
            f"data.path={self.folder}",
            "data.augment=none",
            "data.mean=" + ",".join(map(str, curve_models.CIFAR_MEAN)),
            "data.std=" + ",".join(map(str, curve_models.CIFAR_STD)),
        ]

    def read(self):
        self.train_set = self.tensors(*libddp_batches.read_cifar10(self.folder))
        self.test_set = self.tensors(*libddp_batches.read_cifar10(self.folder, libddp_batches.CIFAR10_TEST))

    @staticmethod
    def tensors(labels, pixels):
        images = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 3, 32, 32)
        return images, torch.tensor(list(labels))

    @staticmethod
    def normalised(images):
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (curve_models.CIFAR_MEAN, curve_models.CIFAR_STD))
        return (images / 255 - mean) / std

    def batch(self, step):
        images, labels = self.train_set
        _, rows = libddp_batches.rows_of_step(step, len(labels), self.recipe.batch_size)
        return self.normalised(images[rows.start : rows.stop]), labels[rows.start : rows.stop]

    def eval_batches(self):
        images, labels = self.test_set
        for i in range(0, len(labels), EVAL_BATCH):
            yield self.normalised(images[i : i + EVAL_BATCH]), labels[i : i + EVAL_BATCH]

    @staticmethod
    def logits(model, inputs):
        return model(inputs)

    def trained(self, out):
        model = self.make_model()
        model.load_state_dict(load_file(os.path.join(out, "trained.safetensors")))
        return model


def vocabulary_size(folder):
    """Of a folder of tokens."""
    return len(libddp_batches.read_tensors(os.path.join(folder, "vocabulary.safetensors"))["special"])


class Texts:
    """Windows over a text, for models that return logits."""

    data, layout = "text", "stream"

    def __init__(self, o, recipe):
        self.o, self.recipe = o, recipe
        self.folder = os.path.join(o.data, self.data)

    def read(self):
        self.windows = libddp_batches.TokenWindows(self.folder, SEQ_LEN)

    def settings(self, out):
        return [f"tokens.path={self.folder}", f"tokens.layout={self.layout}", f"tokens.max_seq_len={SEQ_LEN}"]

    def batch(self, step):
        epoch, rows = libddp_batches.rows_of_step(step, self.windows.num_rows, self.recipe.batch_size)
        tokens = torch.tensor([self.windows.row(row, epoch) for row in rows])
        return tokens[:, :-1], tokens[:, 1:]

    @staticmethod
    def logits(model, inputs):
        return model(input_ids=inputs).logits


class Pretrained(Texts):
    """A Qwen2 of transformers, which Python trained a little on the conversations and saved."""

    def __init__(self, o):
        recipe = curve_models.Recipe(batch_size=8, lr=2e-3, beta2=0.99, eps=1e-8, weight_decay=0.01)
        super().__init__(o, recipe)
        self.base = os.path.join(o.out, "base")

    def read(self):
        super().read()
        if not os.path.exists(self.base):
            self.pretrain()

    def vocabulary_size(self):
        return max(vocabulary_size(os.path.join(self.o.data, name)) for name in ("chat", "text"))

    def pretrain(self):
        import transformers

        torch.manual_seed(0)
        config = transformers.Qwen2Config(vocab_size=self.vocabulary_size(), **QWEN2)
        model = transformers.Qwen2ForCausalLM(config)
        windows = libddp_batches.TokenWindows(os.path.join(self.o.data, "chat"), SEQ_LEN)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for step in range(self.o.base_steps):
            _, rows = libddp_batches.rows_of_step(step, windows.num_rows, 8)
            tokens = torch.tensor([windows.row(row, 0) for row in rows])
            F.cross_entropy(self.logits(model, tokens[:, :-1]).mT, tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(self.base)

    def make_model(self):
        import transformers

        return transformers.Qwen2ForCausalLM.from_pretrained(self.base, use_cache=False)

    def export_words(self):
        return [
            *("--from", "transformers:Qwen2ForCausalLM", "--pretrained", self.base),
            *("--input", f"input_ids=int64[3,{SEQ_LEN}]<{self.vocabulary_size()}"),
        ]

    def eval_batches(self):
        tokens = load_file(os.path.join(self.folder, "eval.safetensors"))["tokens"].long()
        for i in range(0, len(tokens) - 1, SEQ_LEN):
            end = min(i + SEQ_LEN, len(tokens) - 1)
            yield tokens[None, i:end], tokens[None, i + 1 : end + 1]

    def trained(self, out):
        import transformers

        model = self.make_model()
        model.load_state_dict(load_file(os.path.join(out, "trained.safetensors")))
        model.save_pretrained(os.path.join(out, "back"))
        return transformers.Qwen2ForCausalLM.from_pretrained(os.path.join(out, "back"), use_cache=False)


class Lora(Pretrained):
    """Adapters of PEFT on the folder, on the assistant's turns of conversations."""

    data, layout = "chat", "pad"

    def read(self):
        super().read()
        self.documents = {
            split: self.read_documents(os.path.join(self.folder, f"{split}.safetensors"))
            for split in ("train", "eval")
        }

    @staticmethod
    def read_documents(path):
        """(ids, labels) of each document, cut at SEQ_LEN. One without a target is left out, as by libddp."""
        file = load_file(path)
        tokens, targets, begins = file["tokens"].long(), file["targets"].bool(), file["documents"].tolist()
        documents = []
        for begin, end in zip(begins, begins[1:]):
            end = min(end, begin + SEQ_LEN)
            labels = torch.full((SEQ_LEN,), libddp_batches.IGNORED)
            labels[: end - begin - 1] = tokens[begin + 1 : end].where(
                targets[begin + 1 : end], libddp_batches.IGNORED
            )
            ids = torch.zeros(SEQ_LEN, dtype=torch.int64)
            ids[: end - begin] = tokens[begin:end]
            if labels.ne(libddp_batches.IGNORED).any():
                documents.append((ids, labels))
        return documents

    def make_model(self):
        import peft

        first = os.path.join(self.o.out, "first_adapter")
        if os.path.exists(first):
            return peft.PeftModel.from_pretrained(super().make_model(), first, is_trainable=True)
        torch.manual_seed(1)
        options = peft.LoraConfig(
            r=ADAPTER["rank"],
            lora_alpha=ADAPTER["alpha"],
            target_modules=ADAPTER["layers"],
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(super().make_model(), options)
        model.save_pretrained(first)
        return model

    def settings(self, out):
        return [
            *super().settings(out),
            f"lora.rank={ADAPTER['rank']}",
            f"lora.alpha={ADAPTER['alpha']}",
            "lora.dropout=0",
            f"lora.target_modules=[{','.join(ADAPTER['layers'])}]",
            f"lora.adapter={os.path.join(self.o.out, 'first_adapter')}",
            f"lora.save_dir={os.path.join(out, 'adapter')}",
        ]

    def batch(self, step):
        documents = self.documents["train"]
        _, rows = libddp_batches.rows_of_step(step, len(documents), self.recipe.batch_size)
        ids, labels = zip(*(documents[row] for row in rows))
        return torch.stack(ids), torch.stack(labels)

    def eval_batches(self):
        for ids, labels in self.documents["eval"]:
            yield ids[None], labels[None]

    def trained(self, out):
        import peft

        return peft.PeftModel.from_pretrained(Pretrained.make_model(self), os.path.join(out, "adapter"))


def write_archive(product, path):
    command = [os.path.join(ROOT, "tools", "export_model.py"), path, *product.export_words()]
    # There Python finds the modules of this folder.
    subprocess.run([sys.executable, *command], check=True, cwd=HERE)


def train(product, model, out, steps, fused=True, dtype="off", forward=None):
    """PyTorch's own loop: `forward` (None: the model) gives the output of a step, and `fused` chooses the
    kernel of AdamW. Writes steps.csv and returns the milliseconds of each step."""
    device = torch.device(product.o.device)
    optimizer = product.recipe.optimizer(model)
    for group in optimizer.param_groups:
        group["fused"] = fused
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    losses, milliseconds = [], []
    for step in range(steps):
        inputs, targets = (value.to(device) for value in product.batch(step))
        start = time.perf_counter()
        with peer.autocast(dtype, device):
            logits = product.logits(model if forward is None else forward, inputs).flatten(0, -2)
            loss = F.cross_entropy(logits, targets.flatten(), ignore_index=libddp_batches.IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, curve_models.MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = product.recipe.lr_at(step, steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        milliseconds.append(1000 * (time.perf_counter() - start))
    os.makedirs(out)
    with open(os.path.join(out, "steps.csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["step", "loss"], *enumerate(losses, 1)])
    return milliseconds


def train_exported(product, archive, out, steps, settings):
    """exported_ddp with OUT as folder of its metrics: OUT/run has its tables, OUT.log what it printed."""
    command = [
        os.path.join(product.o.build, "examples", "exported_ddp"),
        f"context.device={product.o.device}",
        f"model.path={archive}",
        f"metrics.dir={out}",
        *COMMON,
        *product.recipe.settings(steps),
        *product.settings(out),
        *settings,
    ]
    os.makedirs(out)
    with open(f"{out}.log", "w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    if code != 0:
        raise RuntimeError(f"exported_ddp ended with {code}: see {out}.log")
