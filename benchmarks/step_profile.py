#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where a training step's time goes on the device: kernels of a Chrome trace by class.

usage: step_profile.py [--steps N] [--names] [--reductions] TRACE…
       TRACE    what a benchmark wrote with profile=FILE, or torch.profiler's export_chrome_trace
       --steps  the number of steps in each trace (5, as bench_resnet writes)
       --names  also the kernels of each class by name, the longest first
       --reductions  also the collectives of the last step, one a line, and what of them is beside other
                     kernels

Prints one Markdown table: per class the microseconds of a step and the number of kernels, for each trace.
`busy` is the time in which any kernel ran, `span` the time from the first one's begin to the last one's end,
both a step; the sum of the classes is larger than `busy` where streams overlap. A profiled step is some
percent longer than others.
"""

import argparse
import collections
import json
import os
import re
import sys

# The first class whose expression is found in a kernel's name (in lower case) has it. The specific ones come
# first.
CLASSES = [
    ("collectives", r"nccl|all_?reduce|allgather|reduce_?scatter"),
    (
        "optimizer",
        r"sgd|adam|lars_|lamb(?!da)|multi_tensor|foreach|lpnorm|optimizer|clip_grad|ddp::detail::.*::flat_",
    ),
    (
        "batch norm",
        r"batch_?norm|bn_(fw|bw|stat|apply|reduc|final|forw|back)|bnorm|_bn_|welford|::bn_"
        r"|ddp::ops::.*::(statistics|apply|grad|reduce|small_forward|small_backward)_kernel",
    ),
    # torch.compile names an element-wise kernel after the attention whose result it reads.
    ("attention", r"^(?!triton).*(sdpa|fmha|flash|compute_dot_do_o|convert_dq|efficient_attention)"),
    (
        "layer norm, RMS norm",
        r"layer_?norm|rms_?norm|ddp::ops::.*::(forward<.*normbranch|backward<.*normparts)"
        r"|rowwisemoments|gammabeta|computeinternalgradients|triton_.*_pow_.*rsqrt",
    ),
    ("FP8 quantisation", r"quantize_rows|swiglu_backward_fp8"),
    ("conv wgrad", r"wgrad"),
    ("conv dgrad", r"dgrad"),
    ("conv fprop", r"fprop|implicit_gemm|conv2d|convolve|_conv_|scudnn|winograd"),
    ("conv and linear as GEMM", r"gemm|nvjet|cublas|splitk|gemv|wgmma|matmul"),
    ("activation", r"gelu|swiglu|silu|triton_.*_tanh"),
    ("dropout, thin LoRA products", r"dropped_(product|sum|gradient)|add_branch|dropout|masked_scale"),
    ("rotary positions, joined heads", r"rotary"),
    (
        "layout",
        r"ddp::ops::.*::(space_to_depth|patches|pack_filter|unpack_filter|spread|fold|publish)"
        r"|nchwtonhwc|nhwctonchw|nchw_?2_?nhwc|nhwc_?2_?nchw|im2col"
        r"|space_to_depth|transpose|convert_?tensor|addpadding",
    ),
    ("pool", r"pool"),
    ("loss", r"crossentropy|softmax|nll|cross_entropy|log_sum|row_losses|headloss"),
    (
        "embedding",
        r"embedding|index_?select|gather|scatter|radix_?sort|indexing_backward|index_put|krn_"
        r"|compute_grad_weight|deviceunique|devicescan|_segments",
    ),
    ("copies and casts", r"memcpy|memset|copy|cast|fill|cat_?array|ddp::detail::.*::(feed|publish)"),
    ("reductions", r"reduce|ddp::ops::.*::(part_sums|add_parts|add_wide_parts)"),
    ("element-wise", r"elementwise|triton_poi|vectorized|triton"),
]
OTHER = "other"
ORDER = [name for name, _ in CLASSES] + [OTHER]
PATTERNS = [(name, re.compile(pattern)) for name, pattern in CLASSES]
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
# What makes the host wait; cudaDeviceSynchronize is left out because a profile itself ends with it.
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def classify(name):
    lower = name.lower()
    return next((kind for kind, pattern in PATTERNS if pattern.search(lower)), OTHER)


def covered(intervals):
    """Length of the union of (begin, end) intervals."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def summarize(path, steps):
    """The trace at `path` a step: classes (us and kernels), kernels, launches by graph, waits, busy_us,
    span_us."""
    with open(path) as f:
        events = [e for e in json.load(f)["traceEvents"] if e.get("ph") == "X"]
    classes = {name: dict(us=0.0, kernels=0.0, names=collections.Counter()) for name in ORDER}
    intervals, calls = [], collections.Counter()
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls[event["name"]] += 1
        if event.get("cat") not in DEVICE_CATEGORIES:
            continue
        kind = classes[classify(event["name"])]
        kind["us"] += event["dur"] / steps
        kind["kernels"] += 1 / steps
        kind["names"][event["name"]] += event["dur"] / steps
        intervals.append((event["ts"], event["ts"] + event["dur"]))
    if not intervals:
        raise ValueError(f"{path} holds no work of a device")
    for kind in classes.values():
        kind["us"], kind["kernels"] = round(kind["us"], 1), round(kind["kernels"], 1)
        kind["names"] = {name: round(us, 1) for name, us in kind["names"].most_common(12)}
    span = max(end for _, end in intervals) - min(begin for begin, _ in intervals)
    return dict(
        classes=classes,
        kernels=round(len(intervals) / steps),
        busy_us=round(covered(intervals) / steps, 1),
        span_us=round(span / steps, 1),
        waits=sum(calls[name] for name in WAITS) / steps,
        graph_launches=calls["cudaGraphLaunch"] / steps,
    )


def reductions(path, steps):
    """The last step's collectives as (name, begin_us, end_us, beside_us), times from the step's first kernel,
    with `beside_us` the time in which another kernel ran; and when the last kernel ended that is no
    collective or optimizer's."""
    with open(path) as f:
        events = [e for e in json.load(f)["traceEvents"] if e.get("ph") == "X" and e.get("cat") == "kernel"]
    events.sort(key=lambda e: e["ts"])
    last = events[-(len(events) // steps) :]
    start = last[0]["ts"]
    spans = [(classify(e["name"]), e["name"], e["ts"] - start, e["ts"] - start + e["dur"]) for e in last]
    others = [(begin, end) for kind, _, begin, end in spans if kind != "collectives"]
    backward_end = max(
        (end for kind, _, _, end in spans if kind not in ("collectives", "optimizer")), default=0.0
    )
    found = []
    for kind, name, begin, end in spans:
        if kind == "collectives":
            clipped = [(max(b, begin), min(e, end)) for b, e in others if b < end and e > begin]
            found.append((name, begin, end, covered(clipped)))
    return found, backward_end


def table(profiles, least=None):
    """Markdown of summaries by name, one column each, and of the `least` time by class (roofline.py)."""
    least = least or {}
    lines = [
        "| us per step (kernels) | " + " | ".join([*profiles, *(["roofline"] if least else [])]) + " |",
        "|---" * (1 + len(profiles) + bool(least)) + "|",
    ]
    for name in ORDER:
        cells = [profile["classes"][name] for profile in profiles.values()]
        if name in least or any(cell["kernels"] for cell in cells):
            texts = [f"{cell['us']:,.0f} ({cell['kernels']:g})" if cell["kernels"] else "" for cell in cells]
            texts += [f"{least[name]:,.0f}" if name in least else ""] if least else []
            lines.append(f"| {name} | " + " | ".join(texts) + " |")
    for title, text in (
        ("all", lambda p: f"{sum(c['us'] for c in p['classes'].values()):,.0f} ({p['kernels']})"),
        ("busy / span", lambda p: f"{p['busy_us']:,.0f} / {p['span_us']:,.0f}"),
    ):
        texts = [text(profile) for profile in profiles.values()]
        texts += [f"{sum(least.values()):,.0f}" if title == "all" else ""] if least else []
        lines.append(f"| {title} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(usage=__doc__.strip(), add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--names", action="store_true")
    parser.add_argument("--reductions", action="store_true")
    parser.add_argument("traces", nargs="*")
    arguments = parser.parse_args()
    if arguments.help:
        print(__doc__.strip())
        return
    if not arguments.traces or arguments.steps < 1:
        sys.exit(__doc__.strip())
    try:
        profiles = {
            os.path.basename(path).removesuffix(".trace.json"): summarize(path, arguments.steps)
            for path in arguments.traces
        }
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"error: {error}")
    print(table(profiles))
    for name, profile in profiles.items() if arguments.names else ():
        print(f"\n{name}")
        for kind, cell in profile["classes"].items():
            for kernel, us in cell["names"].items():
                print(f"  {kind:24} {us:9.1f} us  {kernel[:150]}")
    for path in arguments.traces if arguments.reductions else ():
        found, backward_end = reductions(path, arguments.steps)
        print(
            f"\n{os.path.basename(path)}: the last step from its first kernel on; its backward ends at "
            f"{backward_end:.1f} us"
        )
        for name, begin, end, beside in found:
            print(f"  {begin:10.1f} to {end:10.1f} us, {beside:8.1f} us beside other kernels  {name[:100]}")


if __name__ == "__main__":
    main()
