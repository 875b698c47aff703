#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libddp against PyTorch in one call, taking turns round by round: see interleaved.py.

usage: compare.py BENCH OUT_DIR CASE…     BENCH = a built bench_resnet or bench_lm
       CASE = model:size:global_batch:world[,key=value…]     size: image size, or tokens of a sequence
       Further settings go to both programs, or to one: libddp.key=value, pytorch.key=value

       compare.py build/benchmarks/bench_resnet OUT resnet50:224:256:1 resnet18:32:512:2,stem=cifar
       compare.py build/benchmarks/bench_lm OUT gpt2:1024:16:1,pytorch.compile=true,pytorch.vocab_size=50304

Prints one line a case and writes OUT_DIR/compare.json, with what each program said of itself. ms is the
median over ROUNDS rounds; peak_mib is memory of the first device as cudaMemGetInfo tells it, less what was in
use before the program started. Where both programs do not fit beside each other,
release_memory=true,lead_in=1 makes them give memory back after each round and take it again in a step that is
not timed. Without a GPU both run on the CPU, several ranks of libddp under mpirun. Environment: ROUNDS (5),
READY_TIMEOUT (240 s until the warm-up is done), ROUND_TIMEOUT (120 s). For the whole table of the vision
models see compare_pytorch.
"""

import json
import os
import sys

if {"-h", "--help"} & set(sys.argv[1:]):  # before torch, which takes its time
    print(__doc__.strip())
    sys.exit(0)
import interleaved

# What stands behind a benchmark's name: the other side, the setting that `size` is, and what a step handles.
BENCHMARKS = {
    "bench_resnet": dict(
        peer="pytorch_resnet.py", size="image_size", unit="img_s", per_sample=lambda size: 1
    ),
    "bench_lm": dict(peer="pytorch_lm.py", size="seq_len", unit="tokens_s", per_sample=lambda size: size),
}


def compare(bench, out, case):
    benchmark = BENCHMARKS[os.path.basename(bench)]
    head, *extra = case.split(",")
    model, size, global_batch, world = head.split(":")
    size, global_batch, world = int(size), int(global_batch), int(world)
    if global_batch % world:
        raise RuntimeError(f"global batch {global_batch} is no multiple of {world} ranks")
    common = [f"model={model}", f"{benchmark['size']}={size}", f"batch_size={global_batch // world}"]
    settings = interleaved.split_settings(extra, ("libddp", "pytorch"))
    tag = case.replace(":", "_").replace(",", "_").replace("=", "-")
    peer = "pytorch_vit.py" if model.startswith("vit_") else benchmark["peer"]
    programs = dict(libddp=bench, pytorch=os.path.join(interleaved.HERE, peer))
    measured = interleaved.run(
        {name: [program] + common + settings[name] for name, program in programs.items()},
        world,
        os.path.join(out, tag),
    )
    result = dict(case=case, world=world, unit=benchmark["unit"])
    handled = global_batch * benchmark["per_sample"](size)
    for name, side in measured.items():
        result[name] = {
            "ms": side["ms"],
            benchmark["unit"]: round(handled / side["ms"] * 1000, 1),
            **{key: side[key] for key in ("rounds_ms", "peak_mib", "said")},
        }
    result["speedup"] = round(result["pytorch"]["ms"] / result["libddp"]["ms"], 4)
    return result


def main():
    if len(sys.argv) < 4 or os.path.basename(sys.argv[1]) not in BENCHMARKS:
        sys.exit(__doc__)
    bench, out, cases = os.path.abspath(sys.argv[1]), sys.argv[2], sys.argv[3:]
    os.makedirs(out, exist_ok=True)
    unit = BENCHMARKS[os.path.basename(bench)]["unit"].replace("_", "/")
    results, failed = [], False
    width = max(len(case) for case in cases)
    print(
        f"{'case':{width}} {'libddp':>10} {'PyTorch':>10} {'ratio':>7}   {unit:>9} {'PyTorch':>9}   peak MiB"
    )
    for case in cases:
        try:
            r = compare(bench, out, case)
        except interleaved.ERRORS as error:
            print(f"{case:{width}} FAILED: {error}", flush=True)
            failed = True
            continue
        results.append(r)
        ours, theirs = r["libddp"], r["pytorch"]
        print(
            f"{case:{width}} {ours['ms']:8.3f}ms {theirs['ms']:8.3f}ms {r['speedup']:7.3f}   "
            f"{ours[r['unit']]:9.1f} "
            f"{theirs[r['unit']]:9.1f}   {ours['peak_mib']} / {theirs['peak_mib']}",
            flush=True,
        )
        with open(os.path.join(out, "compare.json"), "w") as f:  # after each case: a call may be cut short
            json.dump(results, f, indent=1)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
