# SPDX-License-Identifier: Apache-2.0
"""lora_ddp trains adapters on a base made by transformers; PEFT loads them and finds the same evaluation
loss.

usage: lora_ddp_peft.py LORA_DDP DATA
"""

import csv
import os
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)

PROGRAM, DATA = sys.argv[1], pathlib.Path(sys.argv[2])
MAX_LENGTH = 96  # cuts some documents


def eval_loss(model):
    """Mean over the targets of the token file, document by document."""
    tensors = load_file(DATA / "eval.safetensors")
    begins = tensors["documents"].tolist()
    loss, count = 0.0, 0
    for begin, end in zip(begins, begins[1:]):
        end = min(end, begin + MAX_LENGTH)
        ids = tensors["tokens"][begin:end].to(torch.int64)
        is_target = tensors["targets"][begin + 1 : end].bool()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1].double()
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        loss += losses[is_target].sum().item()
        count += int(is_target.sum())
    return loss / count


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        base = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=1536,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=512,
                initializer_range=0.12,
                tie_word_embeddings=True,
            )
        )
        base.save_pretrained(work / "base")
        subprocess.run(
            [
                PROGRAM,
                "context.device=cpu",
                "model.init=pretrained",
                f"model.path={work / 'base'}",
                f"tokens.path={DATA}",
                "tokens.layout=pad",
                f"tokens.max_seq_len={MAX_LENGTH}",
                "tokens.num_samples=200",
                "lora.rank=8",
                "lora.alpha=24",
                "train.max_steps=20",
                "train.batch_size=8",
                "train.eval_every_steps=20",
                "train.eval_first=true",
                "lr_schedule.type=constant",
                "lr_schedule.warmup_steps=0",
                "lr_schedule.lr=0.01",
                "loader.num_workers=1",
                f"metrics.dir={work}",
                "metrics.run_name=run",
                f"lora.save_dir={work / 'adapters'}",
            ],
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        with open(work / "run" / "evals.csv", encoding="ascii") as file:
            before, after = (float(row["eval_loss"]) for row in csv.DictReader(file))
        model = AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.float32).eval()
        theirs_before = eval_loss(model)
        theirs_after = eval_loss(PeftModel.from_pretrained(model, work / "adapters" / "last").eval())
        print(f"before training: ours {before:.6f}, transformers {theirs_before:.6f}")
        print(f"after training: ours {after:.6f}, PEFT {theirs_after:.6f}")
        # fp32 against logits summed in double: 1e-5 of the loss.
        assert abs(before - theirs_before) <= 1e-5 * before
        assert abs(after - theirs_after) <= 1e-5 * after
        assert after < 0.9 * before, "the loss did not fall"


main()
