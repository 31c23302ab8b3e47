"""Models with the names and values that CTranslate2's converter reads, where transformers has others by now."""

from types import SimpleNamespace
from typing import Any

import numpy as np

OWN_SHAPES: dict[str, dict[str, Any]] = {
    "bart": {"normalize_before": False},
    "mbart": {"normalize_before": True},
    "mt5": {"tie_word_embeddings": False},
    "pegasus": {"normalize_before": True, "normalize_embedding": False},
}
"What the converter reads in configurations, and transformers has in the code of the architecture."


def completed(model: Any) -> Any:
    """Return the model's configuration with what the converter reads under older names of transformers."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    own = dict(OWN_SHAPES.get(config.model_type, {}))
    if config.model_type == "t5":
        own["tie_word_embeddings"] = config.scale_decoder_outputs
    if "full_attention" in rope:
        own["rope_theta"] = rope["full_attention"]["rope_theta"]
        own["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    elif "rope_theta" in rope and config.model_type != "phi":
        own |= {"rope_theta": rope["rope_theta"], "rotary_pct": rope.get("partial_rotary_factor", 1.0)}
    if config.model_type == "gpt_neox" and not hasattr(model, "embed_out"):
        model.embed_out = model.lm_head
    if config.model_type == "phi3":
        scaled = rope.get("rope_type", "default") != "default"
        own["rope_parameters"] = {**rope, "type": rope["rope_type"]} if scaled else None
        factors = SimpleNamespace(long_factor=rope.get("long_factor"), short_factor=rope.get("short_factor"))
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = factors
    for name, value in own.items():
        setattr(config, name, value)
    return config


def set_scales(spec: Any, config: Any) -> None:
    """Set what Gemma's configurations say about scores, where the converter leaves it out."""
    queries: Any = getattr(config, "query_pre_attn_scalar", None)
    cap = getattr(config, "final_logit_softcapping", None)
    for layer in [] if queries is None else spec.decoder.layer:
        layer.self_attention.queries_scale = float(queries) ** -0.5
    if cap:
        spec.decoder.final_logit_softcapping = np.float32(cap)


def older_phi(model: Any) -> Any:
    """Return the modules of Phi under the names that they had while Phi was code of its own, as the converter reads."""
    import torch

    def joined(attention: Any) -> SimpleNamespace:
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        return SimpleNamespace(
            weight=torch.cat([one.weight for one in parts]), bias=torch.cat([one.bias for one in parts])
        )

    config, body = model.config, model.model
    head_dim = config.hidden_size // config.num_attention_heads
    layers = [
        SimpleNamespace(
            ln=layer.input_layernorm,
            mixer=SimpleNamespace(Wqkv=joined(layer.self_attn), out_proj=layer.self_attn.dense),
            mlp=layer.mlp,
        )
        for layer in body.layers
    ]
    return SimpleNamespace(
        config=SimpleNamespace(
            n_layer=config.num_hidden_layers,
            n_head=config.num_attention_heads,
            activation_function=config.hidden_act,
            rotary_dim=int(config.rope_parameters["partial_rotary_factor"] * head_dim),
            vocab_size=config.vocab_size,
        ),
        transformer=SimpleNamespace(embd=SimpleNamespace(wte=body.embed_tokens), h=layers),
        lm_head=SimpleNamespace(linear=model.lm_head, ln=body.final_layernorm),
    )
