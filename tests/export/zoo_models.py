# SPDX-License-Identifier: Apache-2.0
"""The zoo's models in small sizes with random weights: what tools/export_model.py takes after OUT.pt2 --from.

A letter stands for a size that changes: SIZES has the size of the export, that of the training, and the
range. All other sizes are fixed.
"""

SIZES = {
    "B": (3, 5, "2..63"),  # batch
    "P": (6, 9, "2..25"),  # rows of which all pairs are compared
    "L": (12, 16, "4..32"),  # length of a text
    "N": (6, 9, "2..512"),  # nodes of a graph
    "E": (14, 25, "2..512"),  # edges of a graph
    "T": (40, 56, "16..512"),  # frames of a recording
}

IMAGE = "x=float32[B,3,64,64]"
IDS = "input_ids=int64[B,L]<97"
TEXT = "vocab_size=97,hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=4"
BERT = f"{TEXT},max_position_embeddings=40"
LLAMA = f"{TEXT},num_key_value_heads=2,max_position_embeddings=64"
VISION = "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=4,image_size=32"


def torchvision(name, more="", image=IMAGE):
    return f"torchvision:{name} --set num_classes=10{more} --input {image}"


def timm(name, more="", size=64):
    return f"timm:{name} --set num_classes=10{more} --input x=float32[B,3,{size},{size}]"


def transformers(name, config, inputs=IDS):
    return f"transformers:{name} --config {config} --input {inputs}"


MODELS = {
    # torchvision
    "resnet50": torchvision("resnet50"),
    "vit_b_16": "torchvision.models:VisionTransformer --set image_size=32,patch_size=16,num_layers=2,"
    "num_heads=4,hidden_dim=64,mlp_dim=128,dropout=0.1,attention_dropout=0.1,num_classes=10 "
    "--input x=float32[B,3,32,32]",
    "convnext_tiny": torchvision("convnext_tiny", ",stochastic_depth_prob=0.2"),
    "swin_t": torchvision("swin_t"),
    "efficientnet_b0": torchvision("efficientnet_b0"),
    "mobilenet_v3_small": torchvision("mobilenet_v3_small"),
    "densenet121": torchvision("densenet121"),
    "regnet_y_400mf": torchvision("regnet_y_400mf"),
    "deeplabv3_mobilenet": torchvision(
        "deeplabv3_mobilenet_v3_large", ",weights_backbone=None,aux_loss=True"
    ),
    "fcn_resnet50": torchvision("fcn_resnet50", ",weights_backbone=None"),
    "r3d_18": torchvision("r3d_18", image="x=float32[B,3,8,32,32]"),
    "maxvit": "torchvision.models:MaxVit --set input_size=[64,64],stem_channels=16,partition_size=2,"
    "block_channels=[16,32],block_layers=[1,1],head_dim=8,stochastic_depth_prob=0.2 "
    "--input x=float32[B,3,64,64]",
    "shufflenet": torchvision("shufflenet_v2_x0_5"),
    "squeezenet": torchvision("squeezenet1_1"),
    "inception_v3": torchvision(
        "inception_v3", ",aux_logits=False,init_weights=False", "x=float32[B,3,96,96]"
    ),
    "lraspp": torchvision(
        "lraspp_mobilenet_v3_large", ",weights_backbone=None", IMAGE.replace("x=", "input=")
    ),
    "swin3d": "torchvision.models.video:SwinTransformer3d --set patch_size=[2,4,4],embed_dim=24,depths=[2,2],"
    "num_heads=[2,4],window_size=[2,3,3],stochastic_depth_prob=0.1,num_classes=10 "
    "--input x=float32[B,3,4,32,32]",
    # timm
    "timm_vit_tiny": timm("vit_tiny_patch16_224", ",img_size=64,depth=2,drop_path_rate=0.1"),
    "timm_swinv2": timm("swinv2_cr_tiny_224", ",img_size=64,window_size=2,embed_dim=24,depths=[1,1,1,1]"),
    "timm_mixer": timm("mixer_s32_224", ",img_size=64"),
    "timm_convnextv2": timm("convnextv2_atto"),
    "timm_mobilevit": timm("mobilevit_xxs"),
    "timm_levit": timm("levit_128s", size=224),
    "timm_poolformer": timm("poolformer_s12"),
    "timm_xcit": timm("xcit_nano_12_p16_224", ",img_size=64,depth=2"),
    "timm_nfnet": timm("nf_resnet26"),
    "timm_ghostnet": timm("ghostnet_100"),
    "timm_hrnet": timm("hrnet_w18_small"),
    # transformers: texts
    "gpt2": transformers("GPT2LMHeadModel", "vocab_size=97,n_positions=40,n_embd=32,n_layer=2,n_head=4"),
    "qwen2": transformers("Qwen2ForCausalLM", f"{LLAMA},tie_word_embeddings=True"),
    "qwen3": transformers("Qwen3ForCausalLM", f"{LLAMA},head_dim=16"),
    "llama": transformers("LlamaForCausalLM", LLAMA),
    "mistral": transformers("MistralForCausalLM", f"{LLAMA},sliding_window=64"),
    "mistral_with_mask": transformers(
        "MistralForCausalLM", f"{LLAMA},sliding_window=8", f"{IDS} --input attention_mask=int64[B,L]<2"
    ),
    "gemma": transformers("GemmaForCausalLM", f"{LLAMA},head_dim=8,pad_token_id=0"),
    "phi": transformers("PhiForCausalLM", f"{TEXT},max_position_embeddings=64"),
    "bert": transformers("BertForSequenceClassification", BERT),
    "roberta": transformers("RobertaForMaskedLM", BERT),
    "distilbert": transformers(
        "DistilBertForMaskedLM", "vocab_size=97,dim=32,hidden_dim=64,n_layers=2,n_heads=4"
    ),
    "modernbert": transformers(
        "ModernBertForMaskedLM", f"{TEXT},max_position_embeddings=64,pad_token_id=0,local_attention=8"
    ),
    "t5": transformers(
        "T5ForConditionalGeneration",
        "vocab_size=97,d_model=32,d_kv=8,d_ff=64,num_layers=2,num_heads=4",
        f"{IDS} --input decoder_input_ids=int64[B,L]<97",
    ),
    "gpt_neox": transformers("GPTNeoXForCausalLM", f"{TEXT},max_position_embeddings=64"),
    "opt": transformers(
        "OPTForCausalLM",
        "vocab_size=97,hidden_size=32,ffn_dim=64,num_hidden_layers=2,num_attention_heads=4,"
        "max_position_embeddings=64,word_embed_proj_dim=32",
    ),
    "bloom": transformers("BloomForCausalLM", "vocab_size=97,hidden_size=32,n_layer=2,n_head=4"),
    "falcon": transformers(
        "FalconForCausalLM",
        "vocab_size=97,hidden_size=32,num_hidden_layers=2,num_attention_heads=4",
        f"{IDS} --input attention_mask=int64[B,L]<2",
    ),
    "gemma2": transformers("Gemma2ForCausalLM", f"{LLAMA},head_dim=8,pad_token_id=0"),
    "gemma3": transformers("Gemma3ForCausalLM", f"{LLAMA},head_dim=8,pad_token_id=0"),
    "phi3": transformers("Phi3ForCausalLM", f"{LLAMA},pad_token_id=0"),
    "olmo2": transformers("Olmo2ForCausalLM", LLAMA),
    "mixtral": transformers("MixtralForCausalLM", f"{LLAMA},num_local_experts=4"),
    "qwen3_moe": transformers(
        "Qwen3MoeForCausalLM", f"{LLAMA},num_experts=4,num_experts_per_tok=2,moe_intermediate_size=16"
    ),
    "deepseek_v3": transformers(
        "DeepseekV3ForCausalLM",
        "vocab_size=97,hidden_size=32,intermediate_size=64,num_hidden_layers=2,"
        "num_attention_heads=4,num_key_value_heads=4,moe_intermediate_size=16,n_routed_experts=4,"
        "num_experts_per_tok=2,n_group=2,topk_group=1,q_lora_rank=8,kv_lora_rank=8,"
        "qk_rope_head_dim=4,qk_nope_head_dim=8,v_head_dim=8,first_k_dense_replace=1",
    ),
    "gpt_oss": transformers(
        "GptOssForCausalLM", f"{LLAMA},num_local_experts=4,num_experts_per_tok=2,head_dim=8,sliding_window=64"
    ),
    "jamba": transformers(
        "JambaForCausalLM",
        f"{LLAMA},num_experts=4,num_experts_per_tok=2,mamba_d_state=4,attn_layer_period=2,"
        "attn_layer_offset=1,expert_layer_period=2,expert_layer_offset=1,use_mamba_kernels=False,"
        "pad_token_id=0",
        "input_ids=int64[B,8]<97",
    ),
    "recurrent_gemma": transformers(
        "RecurrentGemmaForCausalLM",
        "vocab_size=97,hidden_size=32,intermediate_size=64,num_hidden_layers=3,"
        "num_attention_heads=4,pad_token_id=0",
        "input_ids=int64[B,8]<97",
    ),
    "albert": transformers("AlbertForMaskedLM", f"{BERT},embedding_size=16"),
    "electra": transformers("ElectraForPreTraining", f"{BERT},embedding_size=16"),
    "deberta_v2": transformers(
        "DebertaV2ForMaskedLM", f'{BERT},relative_attention=True,pos_att_type=["p2c","c2p"]'
    ),
    "xlnet": transformers("XLNetLMHeadModel", "vocab_size=97,d_model=32,n_layer=2,n_head=4,d_inner=64"),
    "fnet": transformers(
        "FNetForMaskedLM",
        "vocab_size=97,hidden_size=32,intermediate_size=64,num_hidden_layers=2,max_position_embeddings=40",
    ),
    "bart": transformers(
        "BartForConditionalGeneration",
        "vocab_size=97,d_model=32,encoder_layers=2,decoder_layers=2,encoder_attention_heads=4,"
        "decoder_attention_heads=4,encoder_ffn_dim=64,decoder_ffn_dim=64,"
        "max_position_embeddings=64",
        f"{IDS} --input decoder_input_ids=int64[B,L]<97",
    ),
    "mpnet": transformers("MPNetForMaskedLM", BERT),
    "rwkv": transformers(
        "RwkvForCausalLM",
        "vocab_size=97,hidden_size=32,num_hidden_layers=2,context_length=64",
        "input_ids=int64[B,8]<97",
    ),
    "mamba2": transformers(
        "Mamba2ForCausalLM",
        "vocab_size=97,hidden_size=32,num_hidden_layers=2,state_size=8,num_heads=8,head_dim=8,"
        "n_groups=2,chunk_size=4",
        "input_ids=int64[B,8]<97",
    ),
    "mamba": transformers(
        "MambaForCausalLM",
        "vocab_size=97,hidden_size=32,num_hidden_layers=2,state_size=4",
        "input_ids=int64[B,8]<97",
    ),
    # transformers: images and sound
    "vit": transformers(
        "ViTForImageClassification",
        f"{VISION},patch_size=8,hidden_dropout_prob=0.1",
        "pixel_values=float32[B,3,32,32]",
    ),
    "clip": transformers(
        "CLIPModel",
        '{"projection_dim":16,"text_config":{"vocab_size":97,"hidden_size":32,"intermediate_size":64,'
        '"num_hidden_layers":2,"num_attention_heads":4,"max_position_embeddings":40,"eos_token_id":96},'
        '"vision_config":{"hidden_size":32,"intermediate_size":64,"num_hidden_layers":2,'
        '"num_attention_heads":4,"image_size":32,"patch_size":8}}',
        "input_ids=int64[B,12]<97 --input pixel_values=float32[B,3,32,32]",
    ),
    "whisper_encoder": transformers(
        "WhisperForAudioClassification",
        "d_model=32,encoder_layers=2,encoder_attention_heads=4,encoder_ffn_dim=64,num_mel_bins=16,"
        "max_source_positions=20,decoder_layers=1,vocab_size=97,pad_token_id=0",
        "input_features=float32[B,16,40]",
    ),
    "wav2vec2": transformers(
        "Wav2Vec2ForCTC",
        "vocab_size=32,hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=4,"
        "conv_dim=[16,16,16],conv_kernel=[10,3,2],conv_stride=[5,2,2],num_conv_pos_embeddings=16,"
        "num_conv_pos_embedding_groups=4,layerdrop=0.0,mask_time_prob=0.0",
        "input_values=float32[B,800]",
    ),
    "hf_swin": transformers(
        "SwinForImageClassification",
        "image_size=32,patch_size=4,embed_dim=16,depths=[2,2],num_heads=[2,4],window_size=4",
        "pixel_values=float32[B,3,32,32]",
    ),
    "segformer": transformers(
        "SegformerForSemanticSegmentation",
        "hidden_sizes=[8,16,24,32],depths=[1,1,1,1],decoder_hidden_size=32",
        "pixel_values=float32[B,3,64,64]",
    ),
    "dinov2": transformers(
        "Dinov2ForImageClassification",
        "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,image_size=32,patch_size=8",
        "pixel_values=float32[B,3,32,32]",
    ),
    "vit_mae": transformers(
        "ViTMAEForPreTraining",
        f"{VISION},patch_size=8,decoder_hidden_size=16,decoder_num_hidden_layers=1,"
        "decoder_num_attention_heads=2,decoder_intermediate_size=32",
        "pixel_values=float32[B,3,32,32]",
    ),
    "dpt": transformers(
        "DPTForDepthEstimation",
        "hidden_size=32,intermediate_size=64,num_hidden_layers=4,num_attention_heads=4,"
        "image_size=32,patch_size=8,"
        "backbone_out_indices=[0,1,2,3],neck_hidden_sizes=[8,8,8,8],fusion_hidden_size=8,is_hybrid=False",
        "pixel_values=float32[B,3,32,32]",
    ),
    "yolos": transformers(
        "YolosForObjectDetection",
        "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=4,"
        "image_size=[32,32],patch_size=8,num_detection_tokens=5",
        "pixel_values=float32[B,3,32,32]",
    ),
    "siglip": transformers("SiglipVisionModel", f"{VISION},patch_size=8", "pixel_values=float32[B,3,32,32]"),
    "hubert": transformers(
        "HubertForCTC",
        "vocab_size=32,hidden_size=32,intermediate_size=64,num_hidden_layers=2,"
        "num_attention_heads=4,conv_dim=[16,16,16],conv_kernel=[10,3,2],conv_stride=[5,2,2],"
        "num_conv_pos_embeddings=16,num_conv_pos_embedding_groups=4,layerdrop=0.0,"
        "mask_time_prob=0.0",
        "input_values=float32[B,800]",
    ),
    "ast": transformers(
        "ASTForAudioClassification",
        "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=4,"
        "patch_size=8,max_length=40,num_mel_bins=16",
        "input_values=float32[B,40,16]",
    ),
    "patchtst": transformers(
        "PatchTSTForPrediction",
        "num_input_channels=3,context_length=32,patch_length=8,patch_stride=8,d_model=32,"
        "num_attention_heads=4,num_hidden_layers=2,ffn_dim=64,prediction_length=8",
        "past_values=float32[B,32,3]",
    ),
    "videomae": transformers(
        "VideoMAEForVideoClassification",
        f"{VISION},patch_size=8,num_frames=4,tubelet_size=2",
        "pixel_values=float32[B,4,3,32,32]",
    ),
    "wavlm": transformers(
        "WavLMForCTC",
        "vocab_size=32,hidden_size=32,intermediate_size=64,num_hidden_layers=2,"
        "num_attention_heads=4,conv_dim=[16,16,16],conv_kernel=[10,3,2],conv_stride=[5,2,2],"
        "num_conv_pos_embeddings=16,num_conv_pos_embedding_groups=4,layerdrop=0.0,"
        "mask_time_prob=0.0",
        "input_values=float32[B,800]",
    ),
    "blip": transformers(
        "BlipForConditionalGeneration",
        '{"text_config":{"vocab_size":97,"hidden_size":32,"intermediate_size":64,'
        '"num_hidden_layers":2,"num_attention_heads":4,"encoder_hidden_size":32,'
        '"bos_token_id":1},"vision_config":{"hidden_size":32,"intermediate_size":64,'
        '"num_hidden_layers":2,"num_attention_heads":4,"image_size":32,"patch_size":8}}',
        "pixel_values=float32[B,3,32,32] --input input_ids=int64[B,8]<97",
    ),
    # diffusers
    "unet2d": "diffusers:UNet2DModel --set sample_size=16,block_out_channels=[16,32],layers_per_block=1,"
    'norm_num_groups=4,attention_head_dim=8,down_block_types=["DownBlock2D","AttnDownBlock2D"],'
    'up_block_types=["AttnUpBlock2D","UpBlock2D"] --input sample=float32[B,3,16,16] '
    "--input timestep=int64[B]<1000 --input return_dict=False",
    "dit": "diffusers:DiTTransformer2DModel --set num_attention_heads=2,attention_head_dim=16,in_channels=4,"
    "num_layers=2,sample_size=8,patch_size=2,norm_num_groups=4,num_embeds_ada_norm=10 "
    "--input hidden_states=float32[B,4,8,8] --input timestep=int64[B]<1000 --input class_labels=int64[B]<10 "
    "--input return_dict=False",
    "unet2d_condition": "diffusers:UNet2DConditionModel --set sample_size=16,block_out_channels=[16,32],"
    "layers_per_block=1,norm_num_groups=4,attention_head_dim=8,cross_attention_dim=16,"
    'down_block_types=["DownBlock2D","CrossAttnDownBlock2D"],'
    'up_block_types=["CrossAttnUpBlock2D","UpBlock2D"] --input sample=float32[B,4,16,16] '
    "--input timestep=int64[B]<1000 --input encoder_hidden_states=float32[B,7,16] --input "
    "return_dict=False",
    "autoencoder_kl": "diffusers:AutoencoderKL --set block_out_channels=[8,16],"
    'down_block_types=["DownEncoderBlock2D","DownEncoderBlock2D"],'
    'up_block_types=["UpDecoderBlock2D","UpDecoderBlock2D"],norm_num_groups=4,sample_size=16 '
    "--input sample=float32[B,3,16,16] --input "
    "return_dict=False",
    "vq": "diffusers:VQModel --set block_out_channels=[16],norm_num_groups=4,num_vq_embeddings=16,"
    "latent_channels=4 --input sample=float32[B,3,16,16] --input return_dict=False",
    "sd3": "diffusers:SD3Transformer2DModel --set sample_size=8,patch_size=2,in_channels=4,"
    "num_layers=2,attention_head_dim=8,num_attention_heads=4,joint_attention_dim=16,"
    "caption_projection_dim=32,pooled_projection_dim=8,out_channels=4,pos_embed_max_size=8 "
    "--input hidden_states=float32[B,4,8,8] --input encoder_hidden_states=float32[B,5,16] "
    "--input pooled_projections=float32[B,8] --input timestep=int64[B]<1000 --input "
    "return_dict=False",
    # torch alone
    "unet": "models:UNet --input x=float32[B,3,16,16]",
    "lstm": "models:Lstm --input tokens=int64[B,7]<50",
    "gru_speech": "zoo_nets:GruSpeech --input frames=float32[B,40,8] --input lengths=int64[B]<40",
    "conv1d_speech": "zoo_nets:ConvSpeech --input waves=float32[B,1,800]",
    "transformer_speech": "zoo_nets:Conformer --input frames=float32[B,T,16]",
    "graph_network": "models:GraphNetwork --input nodes=float32[N,8] --input edges=int64[2,E]<6 "
    "--input weights=float32[E]",
    "graph_attention": "zoo_nets:GraphAttention --input nodes=float32[N,8] --input edges=int64[2,E]<6",
    "pinn": "models:Pinn --input x=float32[B] --input t=float32[B]",
    "heat_pinn": "zoo_nets:HeatPinn --input points=float32[B,2]",
    "dlrm": "models:Dlrm --input dense=float32[B,5] --input categories=int64[B,3,2]<20",
    "fourier_operator": "zoo_nets:FourierOperator --input fields=float32[B,1,16,16]",
    "variational_coder": "zoo_nets:VariationalCoder --input x=float32[B,12]",
    "experts": "zoo_nets:Experts --input x=float32[B,8]",
    "recurrent": "zoo_nets:Recurrent --input frames=float32[B,6,8]",
    "flow": "zoo_nets:Flow --input x=float32[B,4]",
    "warp": "zoo_nets:Warp --input x=float32[B,3,16,16]",
    "metric": "zoo_nets:Metric --input ids=int64[P]<20 --input values=float32[P,8]",
    "translator": "zoo_nets:Translator --input frames=float32[B,20,16] --input words=int64[B,6]<12",
}
HALF = ("efficientnet_b0", "vit_b_16", "gpt2", "mixtral", "mamba", "lstm")
MODELS |= {f"{name}_bf16": f"{MODELS[name]} --dtype bfloat16" for name in HALF}
