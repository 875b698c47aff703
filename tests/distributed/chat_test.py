# SPDX-License-Identifier: Apache-2.0
"""Trains small models and talks with them through tools/chat.py: it gives the answers that trainers print.

usage: chat_test.py BUILD prompt|chat|protocol [MPIRUN]     (chat needs the packages tokenizers and jinja2)
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

BUILD, CASE, MPIRUN = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
ROOT = pathlib.Path(__file__).resolve().parents[2]
GPT2, LORA = BUILD / "examples" / "gpt2_ddp", BUILD / "examples" / "lora_ddp"
TRAINING = [
    "train.batch_size=8",
    "train.eval_first=false",
    "train.eval_every_steps=1000",
    "loader.num_workers=1",
]
TRAINING += [
    "lr_schedule.type=constant",
    "lr_schedule.warmup_steps=0",
    "lr_schedule.lr=0.003",
    "metrics.dir=",
]
os.environ |= {"OMP_NUM_THREADS": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def call(*command, code=0, text=""):
    result = subprocess.run(
        list(map(str, command)), input=text, capture_output=True, encoding="utf-8", timeout=200
    )
    assert result.returncode == code, (command, result.returncode, result.stdout, result.stderr)
    return result


def tool(program, text, *settings):
    chat = [sys.executable, ROOT / "tools" / "chat.py", "--program", program]
    return call(*chat, *settings, text=text).stdout


def gpt2_settings(work):
    sizes = ["layers=2", "hidden=32", "heads=2", "positions=64"]
    return [
        "context.device=cpu",
        f"tokens.path={ROOT}/data/text-sample",
        "tokens.max_seq_len=60",
        *("model." + size for size in sizes),
        "sample.prompt=The ",
        "sample.num_samples=2",
        "sample.max_new_tokens=50",
        f"checkpoint.dir={work}/checkpoints",
    ]


def test_prompt(work):
    settings = gpt2_settings(work)
    trained = call(GPT2, *settings, *TRAINING, "train.max_steps=12").stdout
    samples = re.split(r"--- sample \d\n", trained)[1:]
    answers = tool(GPT2, "The \nThe \n", *settings)
    print(answers)
    assert len(samples) == 2 and answers == "".join(samples), (samples, answers)


def shown_answers(output):
    """(system, user, answer) of each prompt that run.mode=evaluate showed."""
    pattern = r"  prompt    system\n(.*?)\nuser\n(.*?)\nassistant\n\n  answer    (.*?)\n  reference "
    return re.findall(pattern, output.replace("\n            ", "\n"), re.S)


def test_chat(work):
    common = [
        "context.device=cpu",
        "tokens.layout=pad",
        "tokens.max_seq_len=140",
        "tokens.long_documents=drop",
    ]
    common += ["decode.num_prompts=0", "decode.max_new_tokens=24"]
    data = f"tokens.path={ROOT}/data/chat-sample"
    save = [f"lora.save_dir={work}/models", "checkpoint.dir="]
    call(LORA, *common, data, *TRAINING, *save, "lora.rank=0", "train.max_steps=24")
    base = ["model.init=pretrained", f"model.path={work}/models/last"]
    adapters = [*base, "lora.rank=16", "lora.alpha=32"]
    save = [f"lora.save_dir={work}/adapters", f"checkpoint.dir={work}/checkpoints"]
    call(LORA, *common, data, *adapters, *TRAINING, *save, "train.max_steps=24")
    call(BUILD / "tools" / "merge_adapter", work / "models/last", work / "adapters/last", work / "merged")
    adapter = f"lora.adapter={work}/adapters/last"
    show = ["decode.num_prompts=6", "decode.show=6", "decode.batch_size=1"]
    evaluated = call(LORA, *common, data, *adapters, *show, adapter, "run.mode=evaluate").stdout
    shown = shown_answers(evaluated)
    assert len(shown) == 6 and len(set(shown)) == 6, evaluated
    # The merged model has its tokenizer beside it.
    bare = work / "bare"
    shutil.copytree(ROOT / "data" / "chat-sample", bare, ignore=shutil.ignore_patterns("tokenizer*"))
    ways = {
        "adapter": [data, *adapters, adapter],
        "checkpoint": [data, *adapters, f"checkpoint.dir={work}/checkpoints"],
        "merged": [
            f"tokens.path={bare}",
            "model.init=pretrained",
            f"model.path={work}/merged",
            "lora.rank=0",
        ],
    }
    system = shown[0][0]
    assert all(one[0] == system for one in shown)
    for name, settings in ways.items():
        text = "/reset\n".join(user + "\n" for _, user, _ in shown)
        answers = tool(LORA, text, *common, *settings, "--system", system)
        assert answers == "".join(answer + "\n" for *_, answer in shown), (name, shown, answers)
        print(f"{name}: {len(shown)} answers as run.mode=evaluate shows them")
    # An earlier turn is part of the prompt.
    assert tool(LORA, shown[0][1] + "\n" + shown[1][1] + "\n", *common, *ways["adapter"]).count("\n") >= 2
    sampled = [*ways["adapter"], "decode.temperature=2", "decode.seed=5"]
    first, again = (tool(LORA, shown[0][1] + "\n", *common, *sampled) for _ in range(2))
    other = tool(LORA, shown[0][1] + "\n", *common, *sampled, "decode.top_k=1")
    assert first == again != other, (first, again, other)


def test_protocol(work):
    settings = gpt2_settings(work)
    refused = call(GPT2, *settings, "run.mode=prompt", "checkpoint.dir=", code=64).stderr
    assert "this model has learned nothing; fix: checkpoint.dir=FOLDER" in refused, refused
    assert "there is no checkpoint" in call(GPT2, *settings, "run.mode=prompt", code=74).stderr
    call(GPT2, *settings, *TRAINING, "train.max_steps=2")
    prompts = ["hello", "[]", "[1, 2.5]", "[-1]", "[1e9]", "[100000]", json.dumps([1] * 64), "[1, 2]"]
    lines = call(GPT2, *settings, "run.mode=prompt", text="\n".join(prompts) + "\n").stdout.splitlines()
    ready, *events = map(json.loads, lines)
    assert ready == {"ready": {"tokens": f"{ROOT}/data/text-sample", "model": ""}}, ready
    errors = [event.get("error", "") for event in events[:7]]
    print("\n".join(errors))
    assert "one line with a list of token ids" in errors[0] and "at least one token" in errors[1]
    assert all(
        re.match(r"token id .* is not one of 0 to \d+, the ids of tokens.path", e) for e in errors[2:6]
    )
    assert "the prompt has 64 tokens, but the model has 64 positions" in errors[6]
    assert [list(event) for event in events[7:]] == [["token"]] * 50 + [["end"]], events[7:]
    assert events[-1] == {"end": "length"}
    # A stop request while the program waits, and among prompts that came at once.
    for prompt in "", "[1, 2]\n" * 2000:
        with subprocess.Popen(
            [GPT2, *settings, "run.mode=prompt"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as program:
            program.stdin.write(prompt)
            program.stdin.flush()
            while "token" not in program.stdout.readline() if prompt else not program.stdout.readline():
                pass
            program.send_signal(signal.SIGINT)
            rest = program.stdout.read()
            assert program.wait(20) == 0
            assert rest.count("end") < 2000
    if MPIRUN:
        error = call(*MPIRUN, "-n", "2", GPT2, *settings, "run.mode=prompt", code=64).stderr
        assert "prompts are answered by one rank, but this job has 2" in error, error


if CASE == "chat":
    try:
        import jinja2  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as error:
        print("skipped:", error)
        sys.exit(77)
with tempfile.TemporaryDirectory() as folder:
    {"prompt": test_prompt, "chat": test_chat, "protocol": test_protocol}[CASE](pathlib.Path(folder))
