# SPDX-License-Identifier: Apache-2.0
"""Models of torchvision and transformers, most of them with the sizes of libddp's own models. The functions
are for export_model.py: --from exported_twins:resnet50. The first two make what compare_pytorch measures, in
bf16. The others are for fusion_curves: images of 32 pixels and texts, and with `tiny` small models."""

import torch
from torch.nn import functional as F

NUM_CLASSES = 10


def classifier(name, num_classes=1000):
    """Batch norms stay in float32, as in libddp's own models."""
    import pytorch_unet
    import torchvision

    make = pytorch_unet.unet if name == "unet" else getattr(torchvision.models, name)
    model = make(num_classes=num_classes).to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.float()
    return model


class MeanLoss(torch.nn.Module):
    """Of labels that are shifted already."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, input_ids, labels):
        return F.cross_entropy(self.net(input_ids=input_ids).logits.flatten(0, 1), labels.flatten())


def language_model(name, vocab_size):
    """Takes labels and returns their mean loss."""
    return MeanLoss({"gpt2": gpt2, "bert": bert, "qwen2": qwen2}[name](vocab_size).to(torch.bfloat16))


def enlarged(net, image_size):
    """Takes images of 32 pixels, enlarged in the program to what the network is made for."""
    return torch.nn.Sequential(torch.nn.Upsample((image_size, image_size), mode="nearest"), net)


def resnet50(tiny=False):
    import torchvision

    if tiny:
        return enlarged(torchvision.models.resnet18(num_classes=NUM_CLASSES), 32)
    return enlarged(torchvision.models.resnet50(num_classes=NUM_CLASSES), 224)


def vit_b_16(tiny=False):
    import torchvision

    if tiny:
        sizes = dict(image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128)
        return enlarged(torchvision.models.VisionTransformer(num_classes=NUM_CLASSES, **sizes), 32)
    return enlarged(torchvision.models.vit_b_16(num_classes=NUM_CLASSES), 224)


def gpt2(vocab_size, tiny=False):
    import pytorch_lm
    import transformers

    sizes = dict(pytorch_lm.GPT2["gpt2-tiny" if tiny else "gpt2"], vocab_size=vocab_size)
    dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes, **dropout))


def bert(vocab_size, tiny=False):
    """Attends to later tokens too, also to the one that it is asked for."""
    import transformers

    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = transformers.BertConfig(vocab_size=vocab_size, **(sizes if tiny else {}), **dropout)
    return transformers.BertForMaskedLM(config)


def qwen2(vocab_size, tiny=False):
    import pytorch_lm
    import transformers

    sizes = dict(pytorch_lm.QWEN2["qwen2-tiny" if tiny else "qwen2-0.5b"], vocab_size=vocab_size)
    sizes["tie_word_embeddings"] = True
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(use_cache=False, **sizes))
