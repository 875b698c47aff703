#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The PyTorch side of the language models: transformers (and PEFT) with torch.nn.attention's SDPA, DDP and a
fused AdamW, written as a careful user writes it.

usage:
  torchrun --nproc-per-node=1 benchmarks/pytorch_lm.py model=qwen2-7b seq_len=4096 batch_size=2
  torchrun --nproc-per-node=4 benchmarks/pytorch_lm.py model=gpt2 seq_len=1024 batch_size=16 compile=true

A qwen2 model is trained with LoRA: base and adapters in bf16 (dtype=fp32: both in fp32), no autocast.
lora_dtype=fp32 keeps the adapters in fp32 under autocast. lora_rank=0 trains all of it. A gpt2 model has fp32
parameters under autocast; `dropout` is of all three kinds. A bert model is trained likewise, as plain modules
(pytorch_bert.py, without transformers), on the loss over all positions; so is cluster_check's reference
encoder (model=encoder, pytorch_encoder.py). Bodies are randomly initialised on the device; one resident
random batch is trained on. A step accumulates its gradient `accumulate` times. optimizer=muon updates the
matrices of the layers by torch.optim.Muon and the rest by AdamW. Settings are key=value (see
DEFAULTS). Rank 0 prints one JSON line. ms is the median of `rounds` means over `steps` steps; tokens_s counts
the tokens of all ranks; peak_mib is device-wide (cudaMemGetInfo), read after the warm-up.
"""

import json
import sys

if {"-h", "--help"} & set(sys.argv[1:]):  # before torch and transformers, which take their time
    print(__doc__.strip())
    sys.exit(0)
import peer
import pytorch_bert
import pytorch_encoder
import torch
import torch.distributed as dist

DEFAULTS = dict(
    model="qwen2-7b",
    seq_len=4096,
    batch_size=2,
    dtype="bf16",
    vocab_size=0,
    num_layers=0,
    dropout=0.0,
    lora_rank=64,
    lora_alpha=128.0,
    lora_dropout=0.05,
    lora_dtype="bf16",
    checkpoint_every=0,
    compile=False,
    accumulate=1,
    wrap=True,
    bucket_cap_mb=25.0,
    comm_hook="none",
    powersgd_rank=1,
    clip=1.0,
    optimizer="adamw",
    lr=1e-4,
    weight_decay=0.0,
    steps=10,
    warmup=3,
    seed=0,
)
# Qwen2's published sizes, and small ones for trying the programs; benchmarks/bench_lm.cpp has the same.
QWEN2 = {
    "qwen2-7b": dict(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    ),
    "qwen2-1.5b": dict(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen2-0.5b": dict(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen2-tiny": dict(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
}
GPT2 = {
    "gpt2": dict(vocab_size=50257, n_embd=768, n_layer=12, n_head=12),
    "gpt2-tiny": dict(vocab_size=512, n_embd=64, n_layer=2, n_head=4),
}
# Models of plain modules. Their loss covers all positions, each with its own id.
PLAIN = {**pytorch_bert.SIZES, **pytorch_encoder.SIZES}
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def is_lora(o):
    return o.model in QWEN2 and o.lora_rank > 0


def configuration(o):
    import transformers  # takes its time, and the models of plain modules are built without it

    if o.model in QWEN2:
        sizes = dict(QWEN2[o.model])
        sizes["num_hidden_layers"] = o.num_layers or sizes["num_hidden_layers"]
        config = transformers.Qwen2Config(
            **sizes,
            max_position_embeddings=32768,
            rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type="default", rope_theta=1e6),
        )
    elif o.model in GPT2:
        sizes = dict(GPT2[o.model])
        sizes["n_layer"] = o.num_layers or sizes["n_layer"]
        config = transformers.GPT2Config(
            **sizes,
            n_positions=max(1024, o.seq_len),
            resid_pdrop=o.dropout,
            embd_pdrop=o.dropout,
            attn_pdrop=o.dropout,
        )
    else:
        sys.exit(f"unknown model {o.model}; there are {', '.join([*QWEN2, *GPT2, *PLAIN])}")
    config.vocab_size = o.vocab_size or config.vocab_size
    config.use_cache = False
    return config


def add_lora(o, model):
    import peft

    config = peft.LoraConfig(
        r=o.lora_rank,
        lora_alpha=o.lora_alpha,
        lora_dropout=o.lora_dropout,
        target_modules=LORA_TARGETS,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config, autocast_adapter_dtype=o.lora_dtype == "fp32")


def is_plain(o):
    return o.model in PLAIN


def vocabulary_size(o):
    if is_plain(o):
        return o.vocab_size or PLAIN[o.model]["vocab"]
    return configuration(o).vocab_size


def build_plain(o):
    if o.checkpoint_every:
        sys.exit(f"checkpoint_every={o.checkpoint_every} is not for {o.model}")
    sizes = PLAIN[o.model] | dict(vocab=vocabulary_size(o), positions=max(512, o.seq_len))
    sizes["layers"] = o.num_layers or sizes["layers"]
    if o.model in pytorch_encoder.SIZES:
        return pytorch_encoder.Encoder(**sizes)
    return pytorch_bert.BertForMaskedLM(**sizes, dropout=o.dropout)


def build_causal(o, kind):
    import transformers

    return transformers.AutoModelForCausalLM.from_config(
        configuration(o), attn_implementation="sdpa", dtype=kind
    )


def build(o, device):
    kind = torch.bfloat16 if o.model in QWEN2 and o.dtype == "bf16" else torch.float32
    with device:
        model = build_plain(o) if is_plain(o) else build_causal(o, kind)
    if o.checkpoint_every not in (0, 1):
        sys.exit("checkpoint_every is 0 or 1 here: transformers checkpoints all layers or none")
    if o.checkpoint_every:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    if is_lora(o):
        model = add_lora(o, model)
    model.train()
    model = peer.wrap(o, model, device, gradient_as_bucket_view=True)
    return torch.compile(model) if o.compile else model


def needs_autocast(o):
    return o.dtype if o.model in GPT2 or is_plain(o) or (is_lora(o) and o.lora_dtype == "fp32") else "off"


class MuonWithAdamW:
    """torch.optim.Muon takes matrices alone. Embeddings, heads, norms and biases have an AdamW beside it."""

    def __init__(self, named, lr, weight_decay):
        is_matrix = {
            n: p.ndim == 2 and not any(part in n for part in ("wte", "wpe", "embed", "head"))
            for n, p in named
        }
        matrices = [p for n, p in named if is_matrix[n]]
        rest = [p for n, p in named if not is_matrix[n]]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay, fused=True),
        ]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def make_optimizer(o, model):
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if o.optimizer == "muon":
        return MuonWithAdamW(named, o.lr, o.weight_decay)
    return torch.optim.AdamW([p for _, p in named], lr=o.lr, weight_decay=o.weight_decay, fused=True)


class Trainer:
    def __init__(self, o, device):
        self.o, self.device = o, device
        torch.manual_seed(o.seed)
        self.model = build(o, device)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(o, self.model)
        vocabulary = min(vocabulary_size(o), 50257)  # a padded vocabulary's further words never occur
        generator = torch.Generator().manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
        self.input_ids = torch.randint(vocabulary, (o.batch_size, o.seq_len), generator=generator).to(device)
        self.amp = needs_autocast(o)
        self.first_loss = self.loss = None

    def step(self):
        for index in range(self.o.accumulate):
            with peer.no_sync(self.o, self.model, index):
                with peer.autocast(self.amp, self.device):
                    output = self.model(input_ids=self.input_ids, labels=self.input_ids)
                    self.loss = output if is_plain(self.o) else output.loss
                (self.loss / self.o.accumulate if self.o.accumulate > 1 else self.loss).backward()
        if self.o.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.trained, self.o.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = self.loss.detach()
        if self.first_loss is None:
            self.first_loss = self.loss


def main():
    o = peer.parse(sys.argv[1:], DEFAULTS)
    gate = peer.Gate(o)
    gate.wait("start")  # after the imports, which take their time while another program warms up
    device, world = peer.setup(o.device)
    trainer = Trainer(o, device)
    ms, rounds, peak = peer.measure_rounds(o, gate, device, trainer.step)
    if peer.is_main():
        tokens = o.batch_size * o.seq_len * o.accumulate * world
        print(
            json.dumps(
                dict(
                    impl="pytorch-compile" if o.compile else "pytorch",
                    model=o.model,
                    world=world,
                    seq_len=o.seq_len,
                    batch_size=o.batch_size,
                    dtype=o.dtype,
                    trained=sum(p.numel() for p in trainer.trained),
                    first_loss=trainer.first_loss.item(),
                    last_loss=trainer.loss.item(),
                    ms=round(ms, 4),
                    tokens_s=round(tokens / ms * 1000, 1),
                    rounds_ms=rounds,
                    peak_mib=round(peak),
                    host_ms=round(o.host_ms, 4),
                    host_us=round(o.host_us, 1),
                )
            ),
            flush=True,
        )
    peer.close()


if __name__ == "__main__":
    main()
