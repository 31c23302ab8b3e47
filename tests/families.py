"""Tiny models of the architectures that transformers has, with random weights, as the hub has them: no task.json.

`SIZES` holds the names that configurations give to the same few sizes, and a family takes those it has; `OWN` says what
else it needs. `EXCLUDED` says why a family is left out.
"""

from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

import tiny
from torchlake.models.write import quiet

NAMES_OF = {
    2: "num_hidden_layers num_layers n_layer n_layers num_decoder_layers encoder_layers decoder_layers "
    "num_key_value_heads num_experts_per_tok type_vocab_size num_kv_heads",
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts",
    8: "head_dim d_kv d_head qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank state_size",
    32: "hidden_size d_model dim n_embd emb_dim embedding_size word_embed_proj_dim moe_intermediate_size "
    "shared_expert_intermediate_size true_hidden_size intra_bottleneck_size",
    64: "intermediate_size hidden_dim d_ff ffn_dim dff d_inner n_inner encoder_ffn_dim decoder_ffn_dim "
    "ffn_hidden_size sliding_window",
    128: "n_positions max_seq_len",
    130: "max_position_embeddings",
}
SIZES = {name: size for size, names in NAMES_OF.items() for name in names.split()}
LATENT = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_key_value_heads": 4}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": 8}
GATED = {"layer_types": ["linear_attention", "full_attention"]} | {
    f"linear_{name}": size
    for name, size in {"key_head_dim": 8, "value_head_dim": 8, "num_key_heads": 2, "num_value_heads": 4}.items()
}
NESTED = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")}
NESTED |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 130, "vocab_size": 400}
LATENT_FAMILIES = (
    *("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3"),
    *("mistral4", "youtu"),
)
GATED_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
# What a family needs beside `SIZES`; None takes a size away.
OWN: dict[str, dict[str, Any]] = {
    **{name: {**LATENT, "head_dim": None} for name in LATENT_FAMILIES},
    **dict.fromkeys(GATED_FAMILIES, GATED),
    **{name: {"num_hidden_layers": 4} for name in ("lfm3", "recurrent_gemma")},
    "bamba": {**HYBRID, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "efficientnet": {"hidden_dim": None},
    "granitemoehybrid": {**HYBRID, "layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "luke": {"entity_vocab_size": 16},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 16], "attention_head_size": 8},
    "gemma4_text": {"vocab_size_per_layer_input": 400, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
    "gemma3n_text": {"vocab_size_per_layer_input": 400, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
    **{key: {"image_size": 224, "patch_size": None} for key in ("donut-swin", "swin", "levit", "mobilevitv2")},
    "dots1": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "perceiver": {"d_model": 32, "num_latents": 4, "d_latents": 32, "num_blocks": 1, "num_self_attends_per_block": 1}
    | {"qk_channels": 32, "v_channels": 32, "num_cross_attention_heads": 1},
    "distilbert": {"intermediate_size": None},
    "esmc": {"num_key_value_heads": 4},
    "funnel": {"block_sizes": [1, 1], "num_hidden_layers": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "longformer": {"attention_window": [16, 16]},
    "modernbert-decoder": {"bos_token_id": 2},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "n_mamba_heads": 8, "mamba_d_state": 8},
    "t5gemma": {"encoder": dict(NESTED), "decoder": dict(NESTED)},
    "xmod": {"languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
}
IMAGE_SIZES = {"patch_size": 4, "image_size": 32}
LIBRARY = "it needs the library {}, which torchlake does not use"
NO_CONFIG = "the suite has no small configuration of it"
NOT_TINY: dict[str, str] = {
    "canine": "it has no fast tokenizer",
    "cohere_compass_text": "transformers cannot build it from its own configuration",
    "dinat": LIBRARY.format("natten"),
    "layoutlmv2": LIBRARY.format("detectron2"),
    **dict.fromkeys(("gemma3n", "timm_wrapper"), LIBRARY.format("timm")),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "it writes music"),
    **dict.fromkeys(("nemo_speechlm", "vibevoice_asr"), "it reads sounds"),
    **dict.fromkeys(("bailing_hybrid", "blt", "dbrx", "dots3_note", "dots3_note_text", "gemma4_assistant"), NO_CONFIG),
    **dict.fromkeys(("gemma4_unified_assistant", "kimi_linear", "lilt", "longcat_flash", "t5gemma2"), NO_CONFIG),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text", "xlstm", "zamba", "zaya"), NO_CONFIG),
}
"Families that the suite cannot build, and why."
IMAGES = "its rows have images or places on a page beside their text"
EXCLUDED: dict[str, str] = {
    **dict.fromkeys(("gemma3", "layoutlmv2", "layoutlmv3", "lilt", "markuplm", "modernvbert", "qwen3_5"), IMAGES),
    **dict.fromkeys(("t5gemma2", "ultravbert", "perceiver", "layoutlm"), IMAGES),
    **dict.fromkeys(("mra", "yoso"), "transformers loads a kernel from the hub for it, which torchlake refuses"),
    **dict.fromkeys(("canine", "luke", "tapas", "roc_bert", "ctrl", "xlm", "flaubert"), "it has no fast tokenizer"),
    "reformer": "its backward pass needs training mode, with hashes that are drawn",
    "zamba": "transformers cannot tie the weights of so few layers",
    "cohere_compass_text": "transformers cannot build it from its own configuration",
}


def classifiers() -> list[str]:
    """The model types for which transformers has a head for sequence classification, those of `EXCLUDED` apart."""
    return [name for name in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES if name not in EXCLUDED]


def writers() -> list[str]:
    """Model types that continue texts: the usual ones, and each way of keeping track of positions and of experts."""
    named = (
        "gpt2 llama qwen2 qwen3 mistral gemma gemma2 gemma3_text phi phi3 opt bloom gpt_neox falcon mpt mixtral "
        "qwen2_moe qwen3_moe olmoe deepseek_v2 deepseek_v3 gpt_oss granitemoe mamba mamba2 jamba smollm3 olmo2 granite "
        "cohere apertus arcee ernie4_5 exaone4 glm4 stablelm starcoder2 persimmon gptj gpt_neo nemotron"
    )
    known = [name for name in named.split() if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    assert len(known) > 30
    return known


def config_of(name: str, **special: Any) -> Any:
    """The family's configuration at a tiny size."""
    kind: Any = transformers.CONFIG_MAPPING[name]
    fields = set(kind().to_dict())
    sizes = {**{key: size for key, size in SIZES.items() if key in fields}, **OWN.get(name, {})}
    if "layer_types" in fields:
        sizes.setdefault("layer_types", None)  # the default is as long as the usual number of layers
    return kind(**{key: size for key, size in sizes.items() if size is not None or key == "layer_types"}, **special)


def image_config_of(name: str) -> Any:
    """The configuration of a family that reads images, at a small size."""
    kind: Any = transformers.CONFIG_MAPPING[name]
    sizes = {**_sizes(kind(), SIZES | IMAGE_SIZES), **OWN.get(name, {})}
    return kind(**{key: size for key, size in sizes.items() if size is not None})


def composite_config_of(name: str, **special: Any) -> Any:
    """The configuration of a family with several parts, such as one for text and one for images, at a small size."""
    kind: Any = transformers.CONFIG_MAPPING[name]
    config = kind(**{**_sizes(kind(), SIZES | IMAGE_SIZES), **OWN.get(name, {})})
    for key, value in special.items():
        setattr(config.get_text_config(), key, value)
        if key != "vocab_size":
            setattr(config, key, value)
    return config


def _sizes(config: Any, known: dict[str, int]) -> dict[str, Any]:
    """The sizes that a configuration and its parts have as single numbers."""
    fields = config.to_dict()
    sizes: dict[str, Any] = {key: size for key, size in known.items() if isinstance(fields.get(key), int)}
    sizes |= {"image_size": [known["image_size"]] * 2} if isinstance(fields.get("image_size"), list) else {}
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if hasattr(part, "sub_configs"):
            sizes[key] = {"model_type": part.model_type, **_sizes(part, known)}
            if "layer_types" in part.to_dict():
                sizes[key]["layer_types"] = None
            sizes[key] |= OWN.get(part.model_type, {})
    return sizes


def build(folder: Path, name: str, *, kind: Literal["classifier", "writer"], dropout: bool = True) -> Path:
    """A model of the family in `folder`. As on the hub, most decoders have no padding token in their configuration."""
    tokenizer = tiny.language_tokenizer() if kind == "writer" else tiny.wordpiece_tokenizer()
    # BART and T5 read a row's answer at its end token.
    special = {"eos_token_id": tokenizer.eos_token_id if kind == "writer" else tokenizer.sep_token_id}
    if kind == "writer":
        auto: Any = transformers.AutoModelForCausalLM
    else:
        auto = transformers.AutoModelForSequenceClassification
    if getattr(transformers.CONFIG_MAPPING[name](), "pad_token_id", None) is not None:
        special["pad_token_id"] = tokenizer.eos_token_id if kind == "writer" else tokenizer.pad_token_id
    if "bos_token_id" not in OWN.get(name, {}):
        special["bos_token_id"] = None
    config = config_of(name, vocab_size=len(tokenizer), **special)
    if not dropout:
        for field in config.to_dict():
            if "drop" in field and isinstance(getattr(config, field), float):
                setattr(config, field, 0.0)
    with torch.random.fork_rng(), quiet():
        with torch.device("meta"):
            numbers = sum(each.numel() for each in auto.from_config(config).parameters())
        assert numbers < 500_000, f"{name} is not tiny: {numbers:,} parameters"
        torch.manual_seed(0)
        model = auto.from_config(config)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.ndim > 1:
                    parameter.data.normal_(0.0, 0.1)
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight.data[module.padding_idx] = 0
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
