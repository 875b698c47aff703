# SPDX-License-Identifier: Apache-2.0
"""Models of transformers and adapters of PEFT work here, and ours work there: equal logits in float32.

usage: lm_interchange.py INTERCHANGE_TOOL MERGE_ADAPTER
"""

import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        BertConfig,
        BertForMaskedLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )
    from transformers.utils import logging
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)
TOOL, MERGE = sys.argv[1:3]
TOLERANCE = 1e-4  # relative to the largest logit; both sides sum in their own order
SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=44,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
)
LONG = dict(max_position_embeddings=2048)


def make_models():
    # Long: the angles of late positions are large, and every rounding of a wavelength shows.
    rope = {"rope_type": "default", "rope_theta": 1e6}
    yield "qwen2", Qwen2ForCausalLM(Qwen2Config(**SIZES | LONG, rope_parameters=rope))
    yield "qwen2_tied_head_dim", Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True, head_dim=16))
    rope = {
        "rope_type": "llama3",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    }
    yield "llama3", LlamaForCausalLM(LlamaConfig(**SIZES | LONG, rope_parameters=rope))
    llama = LlamaConfig(
        **SIZES,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    )
    yield "llama_linear_biases", LlamaForCausalLM(llama)
    yield "mistral", MistralForCausalLM(MistralConfig(**SIZES, head_dim=12, sliding_window=None))
    gpt2 = GPT2Config(
        vocab_size=61,
        n_positions=96,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_inner=50,
        bos_token_id=0,
        eos_token_id=0,
    )
    yield "gpt2", GPT2LMHeadModel(gpt2)
    bert = BertConfig(
        vocab_size=61,
        max_position_embeddings=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=50,
    )
    yield "bert", BertForMaskedLM(bert)


def randomize(model, std=0.3):
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * std + (1 if p.dim() == 1 else 0))


def run(*arguments):
    done = subprocess.run(
        [str(a) for a in arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, (arguments, done.stdout)
    return done.stdout.strip()


def logits_of(model, batch):
    with torch.no_grad():
        return model.eval()(input_ids=batch["input_ids"]).logits


def check(what, ours, theirs):
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    print(f"{what}: logits differ by {error:.1e} of the largest", flush=True)
    assert error <= TOLERANCE, what


def load_strictly(folder):
    is_bert = '"BertForMaskedLM"' in (folder / "config.json").read_text()
    kind = AutoModelForMaskedLM if is_bert else AutoModelForCausalLM
    model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model


def run_tool(commands):
    """One start of the program, which takes as long as all that it does."""
    return run(TOOL, *[word for command in commands for word in ("--", *command)][1:])


def ours_of(file):
    return load_file(file)["logits"]


def check_model(name, model, folder):
    randomize(model)
    base, ours = folder / "base", folder / "ours"
    model.save_pretrained(base, max_shard_size="30KB")
    batch = {"input_ids": torch.randint(0, 61, (1, model.config.max_position_embeddings - 8))}
    batch_file = folder / "batch.safetensors"
    save_file(batch, batch_file)
    commands = [("logits", base, batch_file, folder / "out"), ("save", base, folder / "saved")]
    peft = None
    if name not in ("gpt2", "bert"):
        peft = make_adapter(name, base)
        peft.save_pretrained(folder / "theirs")
        commands += [
            ("train", base, batch_file, ours, 8),
            ("logits", base, batch_file, folder / "out_ours", ours),
            ("logits", base, batch_file, folder / "out_theirs", folder / "theirs"),
        ]
    print(f"{name}:", run_tool(commands))
    theirs = logits_of(model, batch)
    check(f"{name}: their model here", ours_of(folder / "out"), theirs)
    back = load_strictly(folder / "saved")
    check(f"{name}: our full checkpoint there", logits_of(back, batch), theirs)
    for key, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key
    if peft is not None:
        check(f"{name}: PEFT's adapter here", ours_of(folder / "out_theirs"), logits_of(peft, batch))
        check_our_adapter(name, folder, batch)


def make_adapter(name, base):
    """Of PEFT, with random values."""
    config = LoraConfig(
        r=5,
        lora_alpha=7,
        target_modules="all-linear" if name == "mistral" else ["v_proj", "up_proj"],
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(load_strictly(base), config)
    with torch.no_grad():
        for key, p in adapted.named_parameters():
            if "lora_" in key:
                p.normal_(0, 0.2)
    return adapted


def check_our_adapter(name, folder, batch):
    """Trained here, loaded and merged there."""
    base, ours, merged = folder / "base", folder / "ours", folder / "merged"
    expected = ours_of(folder / "out_ours")
    assert (expected - ours_of(folder / "out")).abs().max() > 0.1, "the adapter does nothing"
    peft = PeftModel.from_pretrained(load_strictly(base), ours)
    there = {k: v for k, v in peft.state_dict().items() if "lora_" in k}
    stored = load_file(ours / "adapter_model.safetensors")
    assert len(there) == len(stored) == 28, (len(there), len(stored))
    check(f"{name}: our adapter in PEFT", expected, logits_of(peft, batch))
    run(MERGE, base, ours, merged, "--max-shard-gb", "0.00003")
    check(f"{name}: our merged checkpoint there", logits_of(load_strictly(merged), batch), expected)


torch.manual_seed(7)
for name, model in make_models():
    with tempfile.TemporaryDirectory() as temporary:
        check_model(name, model, pathlib.Path(temporary))
