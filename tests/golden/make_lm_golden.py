#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes lm/: tiny random language models as transformers and peft save them, and what they compute.

  lm/qwen2       grouped-query attention with biases, bfloat16, model.safetensors; adapter/ by PEFT
  lm/llama       llama3 rope scaling, tied embeddings, float16, two shards and their index; adapter/
  lm/gpt2        float32, names without "transformer." and with the attn.bias masks of older releases
  lm/bert        float32, with the pooler and the LayerNorm.gamma and beta of the first releases
  lm/*/case.safetensors
      input_ids, labels (as transformers takes them: not shifted, -100 is not counted), and in float32
      logits [batch, seq, vocab], loss (mean over the labels that count); with the adapter adapter.logits,
      adapter.loss and grad.<PEFT's key> of adapter.loss; for GPT-2 and BERT
      grad.<parameter>, dropout 0; for BERT labels in place (not shifted) and token_type_ids

Needs torch, transformers, peft and safetensors. usage: make_lm_golden.py [OUT]   (default: beside this file)
"""

import json
import pathlib
import shutil
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def randomize(model, std=0.3):
    """Weights far from their start, so that nothing hides behind small numbers."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, std)
            elif "norm" in name or ".ln_" in name:
                p.normal_(0, 0.2)
                if name.endswith("weight"):
                    p.add_(1)
            else:
                p.normal_(0, 0.2)


def batch(vocab, rows, columns):
    input_ids = torch.randint(0, vocab, (rows, columns))
    labels = input_ids.clone()
    labels[:, :3] = -100  # a prompt
    labels[0, -4:] = -100  # padding
    return input_ids, labels


def saved(model, folder, dtype, **how):
    """`model` rounded to dtype and saved, then loaded as transformers loads it, in float32."""
    shutil.rmtree(folder, ignore_errors=True)
    model.to(dtype).save_pretrained(folder, **how)
    (folder / "generation_config.json").unlink(missing_ok=True)  # BERT has none
    config = json.loads((folder / "config.json").read_text())
    config.pop("transformers_version")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def forward(model, input_ids, labels):
    out = model(input_ids=input_ids, labels=labels)
    return out.logits.detach(), out.loss


def with_adapter(model, folder, rank, alpha, targets, case):
    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=targets, bias="none", task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.copy_((torch.randn_like(p) * 0.2).bfloat16().float())
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = None  # a folder of this machine
    config["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    logits, loss = forward(adapted, case["input_ids"], case["labels"])
    loss.backward()
    case["adapter.logits"], case["adapter.loss"] = logits, loss.detach()
    for name, p in adapted.named_parameters():
        if p.grad is not None:
            case["grad." + name.replace(".default", "")] = p.grad


def qwen2(out):
    torch.manual_seed(11)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=67,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=False,
        )
    )
    randomize(model)
    model = saved(model, out, torch.bfloat16)
    input_ids, labels = batch(67, 2, 14)
    case = {"input_ids": input_ids, "labels": labels}
    logits, loss = forward(model, input_ids, labels)
    case["logits"], case["loss"] = logits, loss.detach()
    with_adapter(model, out / "adapter", 3, 12, TARGETS, case)
    save_file(case, out / "case.safetensors")


def llama(out):
    torch.manual_seed(12)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=24,
            intermediate_size=36,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=128,
            rope_parameters=rope,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
        )
    )
    randomize(model)
    model = saved(model, out, torch.float16, max_shard_size="14KB")
    assert len(list(out.glob("*.safetensors"))) == 2
    # Long enough that every wavelength of the scaling matters.
    input_ids, labels = batch(50, 1, 96)
    case = {"input_ids": input_ids, "labels": labels}
    logits, loss = forward(model, input_ids, labels)
    case["logits"], case["loss"] = logits, loss.detach()
    with_adapter(model, out / "adapter", 2, 3, ["q_proj", "down_proj"], case)
    save_file(case, out / "case.safetensors")


def gpt2(out):
    torch.manual_seed(13)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=51,
            n_positions=24,
            n_embd=16,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    randomize(model)
    model = saved(model, out, torch.float32)
    older = {k.removeprefix("transformer."): v for k, v in load_file(out / "model.safetensors").items()}
    for layer in range(2):
        older[f"h.{layer}.attn.bias"] = torch.ones(24, 24, dtype=torch.uint8).tril().view(1, 1, 24, 24)
    save_file(older, out / "model.safetensors", metadata={"format": "pt"})
    input_ids, labels = batch(51, 3, 16)
    logits, loss = forward(model, input_ids, labels)
    loss.backward()
    case = {"input_ids": input_ids, "labels": labels, "logits": logits, "loss": loss.detach()}
    for name, p in model.named_parameters():
        case["grad." + name] = p.grad
    save_file(case, out / "case.safetensors")


def bert(out):
    torch.manual_seed(14)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=53,
            max_position_embeddings=24,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=40,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    randomize(model)
    model = saved(model, out, torch.float32)
    older = {}
    for key, value in load_file(out / "model.safetensors").items():
        key = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        older[key] = value
    older["cls.predictions.decoder.bias"] = older["cls.predictions.bias"].clone()
    older["bert.pooler.dense.weight"], older["bert.pooler.dense.bias"] = torch.zeros(16, 16), torch.zeros(16)
    save_file(older, out / "model.safetensors", metadata={"format": "pt"})
    input_ids = torch.randint(0, 53, (3, 16))
    token_type_ids = (torch.arange(16) > 9).long().expand(3, 16).contiguous()
    labels = torch.where(torch.rand(3, 16) < 0.3, torch.randint(0, 53, (3, 16)), -100)
    result = model(input_ids=input_ids, token_type_ids=token_type_ids, labels=labels)
    result.loss.backward()
    case = {
        "input_ids": input_ids,
        "token_type_ids": token_type_ids,
        "labels": labels,
        "logits": result.logits.detach(),
        "loss": result.loss.detach(),
    }
    for name, p in model.named_parameters():
        case["grad." + name] = p.grad
    save_file(case, out / "case.safetensors")


def main(out):
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    qwen2(out / "qwen2")
    llama(out / "llama")
    gpt2(out / "gpt2")
    bert(out / "bert")
    # What was saved is what was computed with.
    case = load_file(out / "llama" / "case.safetensors")
    base = LlamaForCausalLM.from_pretrained(out / "llama", dtype=torch.float32)
    again = PeftModel.from_pretrained(base, out / "llama" / "adapter").eval()
    assert torch.equal(forward(again, case["input_ids"], case["labels"])[0], case["adapter.logits"])


if __name__ == "__main__":
    here = pathlib.Path(__file__).resolve().parent
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here / "lm")
