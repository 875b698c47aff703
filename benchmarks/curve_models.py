# SPDX-License-Identifier: Apache-2.0
"""The models of transformer_curves: first weights, the trainer's settings, and PyTorch's training on the same
batches."""

import csv
import dataclasses
import math
import os

import libddp_batches
import peer
import pytorch_vit
import torch
from torch.nn import functional as F

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # before transformers is imported
MAX_GRAD_NORM = 1.0
WARMUP_START = 0.1  # share of the learning rate
BETA1 = 0.9
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """AdamW with linear warm-up over a fifth of the run, then cosine decay to a tenth of `lr`."""

    batch_size: int
    lr: float
    beta2: float
    eps: float
    weight_decay: float  # not of norms and biases

    def settings(self, steps):
        return [
            f"train.batch_size={self.batch_size}",
            f"train.max_steps={steps}",
            f"train.max_grad_norm={MAX_GRAD_NORM}",
            "optimizer.type=adamw",
            f"optimizer.beta1={BETA1}",
            f"optimizer.beta2={self.beta2}",
            f"optimizer.eps={self.eps}",
            f"optimizer.weight_decay={self.weight_decay}",
            "optimizer.decay_norm_and_bias=false",
            "lr_schedule.type=cosine",
            f"lr_schedule.lr={self.lr}",
            f"lr_schedule.min_lr={self.lr / 10}",
            f"lr_schedule.warmup_steps={steps // 5}",
            f"lr_schedule.warmup_start_factor={WARMUP_START}",
        ]

    def lr_at(self, step, steps):
        warmup = steps // 5
        if step < warmup:
            return self.lr * (WARMUP_START + (1 - WARMUP_START) * step / warmup)
        low = self.lr / 10
        return low + (self.lr - low) / 2 * (math.cos(math.pi * (step - warmup) / (steps - warmup)) + 1)

    def optimizer(self, model):
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        return torch.optim.AdamW(
            [dict(params=matrices, weight_decay=self.weight_decay), dict(params=others, weight_decay=0.0)],
            lr=self.lr,
            betas=(BETA1, self.beta2),
            eps=self.eps,
            fused=True,
        )


class Language:
    """A model of transformers, on windows over a text."""

    def __init__(self, folder, seq_len, recipe, sizes):
        self.folder, self.seq_len, self.recipe, self.sizes = folder, seq_len, recipe, sizes
        self.windows = libddp_batches.TokenWindows(folder, seq_len)

    def vocabulary_size(self):
        return len(
            libddp_batches.read_tensors(os.path.join(self.folder, "vocabulary.safetensors"))["special"]
        )

    def save(self, model, folder):
        model.save_pretrained(folder)

    def settings(self, folder):
        return [
            "model.init=pretrained",
            f"model.path={folder}",
            f"tokens.path={self.folder}",
            "tokens.layout=stream",
            f"tokens.max_seq_len={self.seq_len}",
        ]

    def batch(self, step):
        """(inputs, targets)"""
        epoch, rows = libddp_batches.rows_of_step(step, self.windows.num_rows, self.recipe.batch_size)
        inputs, targets = zip(*(self.row(row, epoch) for row in rows))
        return torch.tensor(inputs), torch.tensor(targets)

    @staticmethod
    def logits(model, ids):
        return model(input_ids=ids).logits


class Gpt2(Language):
    program = "gpt2_ddp"

    def __init__(self, data, tiny):
        recipe = Recipe(batch_size=2 if tiny else 8, lr=6e-4, beta2=0.95, eps=1e-8, weight_decay=0.1)
        # The defaults have 124M parameters.
        sizes = dict(n_embd=64, n_layer=2, n_head=4, n_positions=64) if tiny else {}
        super().__init__(os.path.join(data, "gpt2"), 32 if tiny else 512, recipe, sizes)

    def make_model(self):
        import transformers

        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=self.vocabulary_size(), bos_token_id=None, eos_token_id=None, **self.sizes
            )
        )

    def load(self, folder):
        import transformers

        return transformers.GPT2LMHeadModel.from_pretrained(
            folder,
            attn_implementation="sdpa",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )

    def settings(self, folder):
        return [*super().settings(folder), "sample.num_samples=0"]

    def row(self, index, epoch):
        tokens = self.windows.row(index, epoch)
        return tokens[:-1], tokens[1:]


class Bert(Language):
    program = "bert_ddp"

    def __init__(self, data, tiny):
        recipe = Recipe(batch_size=4 if tiny else 32, lr=1e-4, beta2=0.999, eps=1e-6, weight_decay=0.01)
        # The defaults are BERT-base's.
        sizes = (
            dict(
                hidden_size=64,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=64,
            )
            if tiny
            else {}
        )
        super().__init__(os.path.join(data, "bert"), 32 if tiny else 128, recipe, sizes)
        self.masking = libddp_batches.Masking(self.folder)

    def make_model(self):
        import transformers

        return transformers.BertForMaskedLM(
            transformers.BertConfig(vocab_size=self.vocabulary_size(), **self.sizes)
        )

    def load(self, folder):
        import transformers

        return transformers.BertForMaskedLM.from_pretrained(
            folder, attn_implementation="sdpa", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )

    def row(self, index, epoch):
        return self.masking.mask(self.windows.row(index, epoch)[:-1], index, epoch)


class Vit:
    program = "vit_ddp"

    def __init__(self, data, tiny):
        self.folder = os.path.join(data, "cifar10")
        self.recipe = Recipe(batch_size=8 if tiny else 128, lr=5e-4, beta2=0.999, eps=1e-8, weight_decay=0.05)
        self.size, self.patch = ("vit_ti", 8) if tiny else ("vit_s", 4)
        labels, pixels = libddp_batches.read_cifar10(self.folder)
        self.labels = torch.tensor(list(labels))
        self.pixels = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 3, 32, 32)

    def make_model(self):
        model = pytorch_vit.make_model(f"{self.size}_{self.patch}", 32, 10)
        # With torchvision's zeros the first loss would not depend on the rest of the model.
        torch.nn.init.normal_(model.heads.head.weight, std=0.02)
        return model

    def save(self, model, folder):
        import safetensors.torch

        safetensors.torch.save_file(model.state_dict(), os.path.join(folder, "model.safetensors"))

    def load(self, folder):
        import safetensors.torch

        model = pytorch_vit.make_model(f"{self.size}_{self.patch}", 32, 10)
        model.load_state_dict(safetensors.torch.load_file(os.path.join(folder, "model.safetensors")))
        return model

    def settings(self, folder):
        return [
            f"model.name={self.size}_16",
            f"model.patch_size={self.patch}",
            f"model.weights={os.path.join(folder, 'model.safetensors')}",
            f"data.path={self.folder}",
            "data.augment=none",
            "data.mean=" + ",".join(map(str, CIFAR_MEAN)),
            "data.std=" + ",".join(map(str, CIFAR_STD)),
        ]

    def batch(self, step):
        """(inputs, targets)"""
        _, rows = libddp_batches.rows_of_step(step, len(self.labels), self.recipe.batch_size)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CIFAR_MEAN, CIFAR_STD))
        return (self.pixels[rows.start : rows.stop] / 255 - mean) / std, self.labels[rows.start : rows.stop]

    @staticmethod
    def logits(model, images):
        return model(images)


MODELS = dict(gpt2=Gpt2, bert=Bert, vit=Vit)


def write_weights(task, folder):
    """Random weights that bfloat16 holds exactly, so all sides begin with the same."""
    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(0)
    model = task.make_model()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(value.bfloat16())
    task.save(model, folder)


def train(task, weights, out, steps, device, dtype="bf16", compiled=False):
    """Trains float32 parameters under autocast of `dtype` (off: none), and writes the loss of each step to
    out/steps.csv."""
    model = task.load(weights).to(device).train()
    optimizer = task.recipe.optimizer(model)
    called = torch.compile(model, dynamic=False) if compiled else model
    losses = []
    for step in range(steps):
        inputs, targets = (value.to(device) for value in task.batch(step))
        with peer.autocast(dtype, device):
            logits = task.logits(called, inputs).flatten(0, -2)
            loss = F.cross_entropy(logits, targets.flatten(), ignore_index=libddp_batches.IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for group in optimizer.param_groups:
            group["lr"] = task.recipe.lr_at(step, steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, "steps.csv"), "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["step", "loss"])
        writer.writerows([step + 1, loss.item()] for step, loss in enumerate(losses))
