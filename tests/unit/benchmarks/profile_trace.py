# SPDX-License-Identifier: Apache-2.0
"""A profile of a step as torch.profiler writes it, for tests."""


def kernel(name, ts, dur, cat="kernel"):
    return dict(ph="X", cat=cat, name=name, ts=ts, dur=dur)


TRACE = dict(
    traceEvents=[
        kernel("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", 0, 100),
        kernel("void cudnn::bn_fw_tr_1C11_kernel_NHWC<float>", 100, 40),
        kernel("sm90_xmma_wgrad_implicit_gemm_indexed_bf16bf16", 140, 60),
        kernel("sm90_xmma_dgrad_implicit_gemm_bf16bf16", 160, 60),  # beside the one before
        kernel("multi_tensor_apply_kernel<FusedSgd>", 230, 10),
        kernel("Memcpy DtoD (Device -> Device)", 240, 10, "gpu_memcpy"),
        dict(ph="X", cat="cuda_runtime", name="cudaGraphLaunch", ts=0, dur=5),
        dict(ph="X", cat="cuda_runtime", name="cudaStreamSynchronize", ts=6, dur=5),
        dict(ph="i", cat="kernel", name="no kernel, has no duration", ts=6),
    ]
)
