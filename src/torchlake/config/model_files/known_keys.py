"""The keys that the files of a model folder may have.

    computed    read here, or by transformers when it loads the file
    harmless    without effect on results
    refused     with an effect that is not computed; the values listed have none, like null

A key that is in no list may change results, too, so a file that has one is refused by its name, unless it is null.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchlake.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKeys:
    """The keys of a file."""

    computed: str = ""
    "Names with a space between them."
    harmless: str = ""
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    "{key: the values without effect}"
    tokens: bool = False
    "Whether keys like `image_token` are computed, each a special token; their ids (`image_token_id`) are not read."

    def __contains__(self, key: str) -> bool:
        known = {*self.computed.split(), *self.harmless.split(), *self.refused}
        return key in known or (self.tokens and key.endswith(("_token", "_token_id")))


MODULE = KnownKeys(computed="path type", harmless="idx name", refused={"kwargs": ([],)})
"An entry of modules.json."
POOLING = KnownKeys(
    computed="""
    pooling_mode pooling_mode_cls_token pooling_mode_max_tokens pooling_mode_mean_tokens include_prompt
    pooling_mode_mean_sqrt_len_tokens pooling_mode_weightedmean_tokens pooling_mode_lasttoken""",
    harmless="word_embedding_dimension embedding_dimension",
)
_BETWEEN = {"module_input_name": ("sentence_embedding",), "module_output_name": ("sentence_embedding",)}
DENSE = KnownKeys(
    computed="in_features out_features bias activation_function use_residual",
    refused={**_BETWEEN, "init_weight": (), "init_bias": ()},
)
NORMALIZE = KnownKeys(refused=_BETWEEN)
DROPOUT = KnownKeys(harmless="dropout")

TRANSFORMER = KnownKeys(
    computed="""
    max_seq_length do_lower_case processing_kwargs modality_config model_args model_kwargs tokenizer_args
    processor_kwargs""",
    harmless="unpad_inputs backend cache_dir",
    refused={
        "transformer_task": ("feature-extraction",),
        "module_output_name": ("token_embeddings",),
        **dict.fromkeys(("query_length", "document_length", "query_expansion", "tokenizer_name_or_path"), ()),
        **dict.fromkeys(("config_args", "config_kwargs"), ({},)),
    },
)
"sentence_bert_config.json."
LOADING = KnownKeys(
    computed="model_max_length",
    harmless="""
    torch_dtype dtype attn_implementation device_map low_cpu_mem_usage use_safetensors add_pooling_layer padding_side
    use_fast""",
)
"Arguments with which sentence-transformers loads model and tokenizer; here the job decides about the precision."
TEXT_ARGUMENTS = KnownKeys(
    computed="max_length",
    harmless="""
    padding padding_side pad_to_multiple_of return_tensors return_token_type_ids return_length verbose
    return_special_tokens_mask return_offsets_mapping""",
    refused={
        "truncation": (True, "longest_first", "only_first"),
        "add_special_tokens": (True,),
        "return_attention_mask": (True,),
        "stride": (0,),
        "is_split_into_words": (False,),
        "return_overflowing_tokens": (False,),
        "split_special_tokens": (),
        "logits_to_keep": (1,),
    },
)
"`text` and `common` in processing_kwargs: arguments of the tokenizer. Padding is masked, on either side."
PROCESSING = KnownKeys(computed="text common", harmless="image audio video chat_template")
"processing_kwargs; the harmless ones are for inputs other than text."
MODALITIES = KnownKeys(computed="text", harmless="image audio video", refused={"message": ()})
"modality_config; with a `message`, every text is rendered by the chat template."
TEXT_MODALITY = KnownKeys(
    refused={"method": ("forward",), "method_output_name": ("last_hidden_state",), "format": ("structured", "flat")}
)
PROMPTS = KnownKeys(
    computed="prompts default_prompt_name truncate_dim",
    harmless="__version__ similarity_fn_name requirements",
    refused={
        "model_type": ("SentenceTransformer",),
        **dict.fromkeys(("activation_fn", "max_active_dims", "keep_in_fp32_modules"), ()),
    },
)
"config_sentence_transformers.json of an embedder; how vectors are compared does not change them."
CROSS_ENCODER = KnownKeys(
    computed="model_type activation_fn prompts default_prompt_name",
    harmless="__version__ requirements keep_in_fp32_modules",
)
"config_sentence_transformers.json of a cross-encoder."

TOKENIZER = KnownKeys(
    tokens=True,
    computed="""
    _spm_precompiled_charsmap add_bos_token add_dummy_prefix add_eos_token add_prefix_space added_tokens_decoder
    additional_special_tokens chat_template clean_text clean_up_tokenization_spaces
    clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output cls_token_box do_basic_tokenize
    do_clean_text do_lower_case do_lowercase do_lowercase_and_remove_accent do_subword_tokenize do_word_tokenize
    errors extra_ids extra_special_tokens fix_mistral_regex full_tokenizer_file init_inputs is_uroman jumanpp_kwargs
    keep_accents legacy legacy_behaviour mask_token_sent max_len mecab_kwargs merges merges_file model_max_length
    model_specific_special_tokens never_split normalization normalize normalizer_file offset pad_token_box
    pad_token_label post_processor remove_space sep_token_box separate_vocabs source_lang sp_model_kwargs
    spaces_between_special_tokens split_by_punct split_special_tokens spm_file src_lang src_vocab_file strip_accents
    subword_tokenizer_type sudachi_kwargs target_lang tgt_lang tgt_vocab_file tokenize_chinese_chars tokenizer_class
    tokenizer_file trim_offsets truncation_side unk_id use_default_system_prompt vocab vocab_file vocab_type
    word_pronunciation_file word_shape_file word_tokenizer_type wordpieces_prefix""",
    harmless="""
    _commit_hash _from_auto _processor_class add_blank backend cache_dir cell_trim_length chat_control_tokens
    do_phonemize emoji_file entity_vocab files_loaded from_pretrained_id from_slow generator id2lang image_size
    is_local lang2id langs language language_codes local_files_only max_column_id max_depth max_entity_length
    max_length max_mention_length max_question_length max_row_id max_width min_question_length model_input_names
    name_or_path num_image_tokens only_label_first_subword pad_to_multiple_of pad_token_type_id pad_width padding
    padding_side phone_delimiter_token phonemize phonemizer_backend phonemizer_lang predict_timestamps processor_class
    question_encoder replace_word_delimiter_char response_schema response_template return_attention_mask
    return_tensors return_token_type_ids revision slow_tokenizer_class special_tokens_map_file special_tokens_pattern
    stride strip_column_names suffix_first tags_dict task token_type_ids_include_special_tokens token_type_ids_pattern
    tokenizer_type transformers_version truncation truncation_strategy update_answer_coordinates use_auth_token
    use_fast verbose vocab_size device_map force_download proxies resume_download subfolder tags token
    trust_remote_code""",
    refused={"gguf_file": (), "tokenizer_truncation": (), "tokenizer_padding": ()},
)
"tokenizer_config.json. Where it pads and how long its own batches are does not change a row."

IMAGES = KnownKeys(
    computed="""
    clusters crop_pct crop_size default_to_square do_align_long_axis do_center_crop do_color_quantize do_convert_rgb
    do_flip_channel_order do_normalize do_pad do_pan_and_scan do_rescale do_resize do_thumbnail feature_extractor_type
    image_mean image_processor_type image_std include_top max_num_patches pad_size pan_and_scan_max_num_crops
    pan_and_scan_min_crop_size pan_and_scan_min_ratio_to_activate patch_size resample rescale_factor rescale_offset
    size size_divisor""",
    harmless="""
    _commit_hash _from_auto _processor_class _valid_processor_keys device disable_grouping do_reduce_labels
    image_seq_length input_data_format model_input_names processor_class reduce_labels return_tensors
    transformers_version""",
    refused={"data_format": ("channels_first",)},
)
"preprocessor_config.json, and the image processor in processor_config.json."
PROCESSOR = KnownKeys(
    computed="image_processor",
    harmless="""
    chat_template feature_extractor image_seq_length image_token num_additional_image_tokens patch_size
    processor_class tokenizer video_processor vision_feature_select_strategy""",
)
"processor_config.json; of its processors the one for images is read."

GENERATION = KnownKeys(
    computed="""
    bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id eos_token_id forced_bos_token_id
    forced_eos_token_id sequence_bias suppress_tokens""",
    harmless="""
    _commit_hash _from_model_config assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
    assistant_lookbehind cache_config cache_implementation compile_config continuous_batching_config disable_compile
    is_assistant low_memory max_cache_len max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule
    output_attentions output_hidden_states output_logits output_scores pad_token_id prefill_chunk_size
    prompt_lookup_num_tokens return_dict_in_generate speculation_type target_lookbehind transformers_version use_cache
    use_mtp""",
)
"generation_config.json: what belongs to a model, and how it is run."
SAMPLING = KnownKeys(
    harmless="""
    constraints diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids
    frequency_penalty guidance_scale length_penalty max_length max_new_tokens max_time min_length min_new_tokens
    min_p no_repeat_ngram_size num_beam_groups num_beams num_return_sequences penalty_alpha presence_penalty
    remove_invalid_values renormalize_logits repetition_penalty stop_strings temperature token_healing top_h top_k
    top_p typical_p watermarking_config"""
)
"The settings of generation_config.json that a job replaces by its own."


def check_keys(file: Path, values: Any, keys: KnownKeys, at: str = "") -> None:
    """Raise DataError for a key of `file` that is not known, or whose value has an effect that is not computed.

    `at` is the key whose object `values` is.
    """
    if not isinstance(values, Mapping):
        raise DataError(f"{file}: {f'{at} is' if at else 'is'} not a JSON object")
    for key, value in values.items():
        name = f"{at}.{key}" if at else key
        if value is None:
            continue
        if key not in keys:
            raise DataError(
                f"{file}: has the key {name!r}, which torchlake does not know: results may be different without it. "
                "Delete the key if they are not."
            )
        if key in keys.refused and not _has(keys.refused[key], value):
            raise DataError(
                f"{file}: {name} is {str(value)[:80]!r}, which torchlake does not compute: results would be different."
            )


def _has(values: tuple[Any, ...], value: Any) -> bool:
    """Return whether a value is listed; True is not 1."""
    return any(type(value) is type(each) and value == each for each in values)
