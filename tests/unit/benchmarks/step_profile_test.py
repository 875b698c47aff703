# SPDX-License-Identifier: Apache-2.0
"""Profiles of a step: its kernels by class, its reductions, and the roofline of its network."""

import json
import os
import sys
import tempfile
import unittest

from study_support import ROOT, need

from profile_trace import TRACE, kernel

need("torch")
sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
import roofline  # noqa: E402
import rows  # noqa: E402
import step_profile  # noqa: E402

DDP_OPS = "void ddp::ops::detail::(anonymous namespace)::"
# Names of kernels seen in steps, by class.
KERNELS = {
    "batch norm": [
        "void at::native::batch_norm_backward_reduce_channels_last_kernel<4>",
        "triton_red_fused__native_batch_norm_legit_functional_relu_12",
        "void ddp::ops::detail::(anonymous namespace)::statistics_kernel<__nv_bfloat16>(ddp::ops::detail::StatisticsCall)",
        "void ddp::ops::detail::(anonymous namespace)::reduce_kernel<__nv_bfloat16, true>(ddp::ops::detail::BackwardReduceCall)",
    ],
    "conv wgrad": [
        "cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816wgrad_optimized_bf16_128x64_32x5_nhwc_align8>"
    ],
    "conv and linear as GEMM": [
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN",
        "nvjet_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT",
    ],
    "layout": [
        "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16>",
        "void ddp::ops::detail::(anonymous namespace)::pack_filter<float, __nv_bfloat16>(ddp::ops::detail::StemFilter)",
    ],
    "pool": [
        "void at::native::(anonymous namespace)::max_pool_backward_nhwc<c10::BFloat16>",
        "void ddp::ops::detail::(anonymous namespace)::backward_kernel<__nv_bfloat16, true>(ddp::ops::detail::PoolBackwardCall)",
    ],
    "collectives": ["ncclDevKernel_AllReduce_Sum_f32_RING_LL"],
    "loss": [
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d",
        "void ddp::ops::detail::(anonymous namespace)::row_losses<__nv_bfloat16>(ddp::ops::detail::CrossEntropyRows)",
        DDP_OPS
        + "row_losses<__nv_bfloat16>(ddp::ops::detail::HeadLogits, long, bool, ddp::ops::detail::HeadLossSums)",
        DDP_OPS + "add_rows(long, ddp::ops::detail::HeadLossSums)",
        DDP_OPS + "backward<__nv_bfloat16>(ddp::ops::detail::CrossEntropyRows, float const*, …)",
    ],
    "element-wise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        "void at::native::vectorized_elementwise_kernel<8, at::native::(anonymous namespace)::launch_clamp_scalar(at::…)::{lambda()#1}>",
        "triton_poi_fused__scaled_dot_product_flash_attention_backward_view_7",
    ],
    "copies and casts": [
        "Memset (Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>",
        "void ddp::detail::(anonymous namespace)::feed(ddp::detail::StepFeed const*)",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<…FusedSgdMathFunctor<float, 3>>",
        "void ddp::detail::(anonymous namespace)::flat_update<ddp::detail::FlatSgd<1> >(ddp::detail::FlatStep)",
        "void ddp::detail::(anonymous namespace)::flat_measure<__nv_bfloat16>(…)",
    ],
    "reductions": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>",
        DDP_OPS + "add_wide_parts<float>(float const*, long, long, float*, float)",
    ],
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_32_64x64x64_4x1x1_kernel0_0",
        "void cudnn::fusion::compute_dot_do_o<true, __nv_bfloat16, 64, float>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<…>::Params)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<…>>",
    ],
    "layer norm, RMS norm": [
        DDP_OPS
        + "forward<__nv_bfloat16, __nv_bfloat16, true, false, 128, 4>(long, int, float, ddp::ops::detail::NormBranch, …)",
        DDP_OPS
        + "backward<__nv_bfloat16, float, false, true, 32, 3>(long, int, ddp::ops::detail::DropoutDraws, …, ddp::ops::detail::NormParts)",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 32u>",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3",
    ],
    "FP8 quantisation": [
        DDP_OPS + "quantize_rows<__nv_bfloat16, 448, 1>(__nv_bfloat16 const*, long, unsigned char*, float*)",
        DDP_OPS + "swiglu_backward_fp8<__nv_bfloat16, 512, 5>(…)",
    ],
    "activation": [
        DDP_OPS + "swiglu_backward<__nv_bfloat16>(…)",
        DDP_OPS + "swiglu<__nv_bfloat16>(__nv_bfloat16 const*, long, long, __nv_bfloat16*)",
        DDP_OPS + "gelu_backward<__nv_bfloat16, __nv_bfloat16, true>(ddp::ops::detail::GeluRows, …)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(…)::{lambda()#2}>",
    ],
    "dropout, thin LoRA products": [
        DDP_OPS
        + "dropped_product<__nv_bfloat16>(ddp::ops::detail::LoraShape, …, ddp::ops::detail::DropoutDraws, float*)",
        DDP_OPS + "add_branch_backward<__nv_bfloat16>(ddp::ops::detail::BranchRows, …)",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, unsigned int, 1, 4, bool>",
    ],
    "rotary positions, joined heads": [
        DDP_OPS
        + "rotary<__nv_bfloat16>(ddp::ops::detail::HeadRows, int, float const*, float const*, float, …)"
    ],
    "embedding": [
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<c10::BFloat16, float, long>",
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long, long, bool)",
    ],
    "other": ["my_kernel"],
}


class Profiles(unittest.TestCase):
    def summarize(self, trace, steps=1):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
            json.dump(trace, f)
            f.flush()
            return step_profile.summarize(f.name, steps)

    def test_reductions_of_the_last_step(self):
        step = [
            kernel("sm90_xmma_dgrad", 0, 100),
            kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 40, 80),
            kernel("sm90_xmma_wgrad", 110, 20),
            kernel("ncclSymkDevKernel_AllReduce", 130, 15),
            kernel("flat_update<FlatSgd>", 145, 5),
        ]
        later = [dict(event, ts=event["ts"] + 1000) for event in step]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
            json.dump(dict(traceEvents=step + later), f)
            f.flush()
            found, backward_end = step_profile.reductions(f.name, 2)
        self.assertEqual(
            found,
            [
                ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 40, 120, 70),
                ("ncclSymkDevKernel_AllReduce", 130, 145, 0),
            ],
        )
        self.assertEqual(backward_end, 130)

    def test_time_and_kernels_by_class(self):
        profile = self.summarize(TRACE)
        filled = {name: (c["us"], c["kernels"]) for name, c in profile["classes"].items() if c["kernels"]}
        self.assertEqual(
            filled,
            {
                "conv fprop": (100, 1),
                "batch norm": (40, 1),
                "conv wgrad": (60, 1),
                "conv dgrad": (60, 1),
                "optimizer": (10, 1),
                "copies and casts": (10, 1),
            },
        )
        # 40 us on two streams.
        self.assertEqual((profile["kernels"], profile["busy_us"], profile["span_us"]), (6, 240, 250))
        self.assertEqual((profile["waits"], profile["graph_launches"]), (1, 1))
        self.assertEqual(self.summarize(TRACE, 2)["busy_us"], 120)
        self.assertIn("| conv wgrad | 60 (1) |", step_profile.table(dict(ours=profile)))

    def test_names_of_kernels_seen_in_steps(self):
        for kind, names in KERNELS.items():
            for name in names:
                self.assertEqual(step_profile.classify(name), kind, name)

    def test_the_roofline_counts_the_whole_network(self):
        self.assertEqual(roofline.resnet("resnet50", 224, "imagenet", 256, 1000).parameters, 25557032)
        self.assertEqual(roofline.resnet("resnet18", 32, "cifar", 1, 10).parameters, 11173962)
        # By hand: the 3x3 stem at batch 512 is 0.1% arithmetic, the rest bytes.
        step = roofline.Step()
        self.assertEqual(step.convolution(512, 3, 32, 64, 3, 1, input_wants_gradient=False), 32)
        self.assertAlmostEqual(step.us["conv fprop"], 2 * (512 * 1024 * 67 + 1728) / 4.3e12 * 1e6)
        self.assertEqual(step.us["conv dgrad"], 0)
        # 3x3, 256 channels at 14 px, batch 256: 0.0592 TFLOP
        step.convolution(256, 256, 14, 256, 3, 1)
        self.assertAlmostEqual(step.us["conv dgrad"], 2 * 256 * 196 * 256 * 2304 / 790e12 * 1e6)
        table = step_profile.table(dict(ours=self.summarize(TRACE)), {"conv dgrad": 50.4, "pool": 3.0})
        self.assertIn("| conv dgrad | 60 (1) | 50 |", table)
        self.assertIn("| pool |  | 3 |", table)
        self.assertIn("| all | 280 (6) | 53 |", table)

    def test_the_roofline_of_transformers(self):
        self.assertEqual(roofline.gpt2(16, 1024).parameters, 124439808)
        self.assertEqual(roofline.bert(128, 128).parameters, 109514298)
        self.assertEqual(roofline.vit_b_16(256).parameters, 86567656)
        step = roofline.gpt2(16, 1024)
        # All products are limited by arithmetic: 6 FLOP per token and weight.
        weights = 12 * 12 * 768**2 + 768 * 50257
        self.assertAlmostEqual(step.us["conv and linear as GEMM"], 6 * 16384 * weights / 790e12 * 1e6)
        self.assertAlmostEqual(step.us["loss"], 4 * 16384 * 50257 / 4.3e12 * 1e6)
        self.assertEqual(rows.ROWS["gpt2"].least_us(1), step.us)
        self.assertTrue(set(step.us) <= set(step_profile.ORDER))
        self.assertEqual(rows.ROWS["qwen2_7b_lora"].least_us(1), {})
        self.assertNotIn("roofline", step_profile.table(dict(ours=self.summarize(TRACE)), {}))

    def test_a_trace_without_a_device_is_refused(self):
        with self.assertRaisesRegex(ValueError, "holds no work of a device"):
            self.summarize(dict(traceEvents=[kernel("aten::conv2d", 0, 5, "cpu_op")]))


if __name__ == "__main__":
    unittest.main()
