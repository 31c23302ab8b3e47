"""Models small enough to build in a test: two layers, 32 wide, from a seed, with a real tokenizer. No download.

Plain functions, so that scripts and other processes can import them too: `from tiny import build_encoder`.
"""

import io
import json
import struct
import zlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers import models as tokenizer_models
from tokenizers.trainers import BpeTrainer
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    PreTrainedTokenizerFast,
    ResNetConfig,
    ResNetModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
)

from torchlake.engines import DEFAULT_RESOURCES, Engine, Resources, Worker
from torchlake.models import load
from torchlake.models.load import TaskSpec
from torchlake.models.write import quiet
from torchlake.tasks._chat import read_messages
from torchlake.tasks._completions import all_completion_ids
from torchlake.tasks._pretrained import base_model

GOOD = "good great fine lovely superb brilliant charming warm funny moving".split()  # noqa: SIM905
BAD = "bad awful poor dull boring terrible stale cold clumsy empty".split()  # noqa: SIM905
OTHER = "the a this film movie story plot acting was is and but very , . ! it i we not all with of in".split()  # noqa: SIM905
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SPEC = TaskSpec(
    task="text_classification",
    problem="single_label",
    labels=("bad", "good"),
    text="text",
    label="label",
    max_length=64,
)


def wordpiece_tokenizer(positions: int = 128) -> PreTrainedTokenizerFast:
    """BERT's tokenizer over the words above and single characters: any text of ASCII becomes tokens."""
    characters = [chr(code) for code in range(33, 127)]
    words = [*SPECIAL, *GOOD, *BAD, *OTHER, *characters, *(f"##{character}" for character in characters)]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(tokenizer_models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        mask_token="[MASK]",
        model_max_length=positions,
    )


def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """RoBERTa's kind: byte-level BPE, trained on the words above."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join([*GOOD, *BAD, *OTHER])] * 10, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
        model_max_length=128,
    )


def build_encoder(
    folder: Path,
    *,
    dropout: float = 0.0,
    kind: Literal["bert", "distilbert", "roberta"] = "bert",
    hidden_size: int = 32,
    positions: int = 128,
    seed: int = 0,
) -> Path:
    """An encoder without a head in `folder`: what a job fine-tunes. Same seed, same bytes. `positions` are BERT's."""
    tokenizer = bpe_tokenizer() if kind == "roberta" else wordpiece_tokenizer(positions)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * hidden_size,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "bert":
            model: Any = BertModel(BertConfig(max_position_embeddings=positions, **shape))
        elif kind == "distilbert":
            names = {
                "hidden_size": "dim",
                "num_hidden_layers": "n_layers",
                "num_attention_heads": "n_heads",
                "intermediate_size": "hidden_dim",
                "hidden_dropout_prob": "dropout",
                "attention_probs_dropout_prob": "attention_dropout",
            }
            shape = {names.get(name, name): value for name, value in shape.items()}
            model = DistilBertModel(DistilBertConfig(max_position_embeddings=128, **shape))
        else:
            model = RobertaModel(RobertaConfig(max_position_embeddings=130, type_vocab_size=1, **shape))
        # The usual 0.02 gives a net this small nearly constant answers; tests want to tell rows apart.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.2)
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_pair_encoder(folder: Path, **options: Any) -> Path:
    """An encoder as `build_encoder`, whose tokenizer names token types among the model's inputs, as BERT's does."""
    build_encoder(folder, **options)
    file = folder / "tokenizer_config.json"
    names = ["input_ids", "token_type_ids", "attention_mask"]
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_input_names": names}))
    return folder


def build_embedder(folder: Path, *, max_length: int = 48, **options: Any) -> Path:
    """An encoder in the layout of sentence-transformers: mean pooling, a product to 16 dimensions, length 1."""
    build_encoder(folder, **options)
    kinds = ("Transformer", "Pooling", "Dense", "Normalize")
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    dense = {
        "in_features": 32,
        "out_features": 16,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    contents = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
        "2_Dense/config.json": dense,
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    (folder / "3_Normalize").mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {"linear.weight": 0.2 * torch.randn(16, 32, generator=generator), "linear.bias": torch.zeros(16)}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    return folder


def build_vision(folder: Path, *, kind: Literal["vit", "resnet"] = "vit", seed: int = 0) -> Path:
    """A model for images of 16 x 16 pixels without a head; the ResNet's BatchNorm has seen random images."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "vit":
            shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
            drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            model: Any = ViTModel(ViTConfig(image_size=16, patch_size=4, **shape, **drops))
        else:
            shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
            model = ResNetModel(ResNetConfig(layer_type="basic", **shape)).train()
            with torch.no_grad():
                for _ in range(50):
                    model(torch.randn(16, 3, 16, 16))
    with quiet():
        model.eval().save_pretrained(folder)
        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


def digits(rows: int) -> pa.Table:
    """Handwritten digits of scikit-learn: id int64, image (Hugging Face's struct of a PNG and no path), label int64."""
    from sklearn.datasets import load_digits

    found = load_digits()
    files = []
    for values in found.images[:rows]:
        file = io.BytesIO()
        Image.fromarray((values / 16 * 255).astype("u1")).convert("RGB").save(file, "PNG")
        files.append({"bytes": file.getvalue(), "path": None})
    image = pa.array(files, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    ids, label = pa.array(range(len(files)), pa.int64()), pa.array(found.target[:rows].astype(np.int64))
    return pa.table({"id": ids, "image": image, "label": label})


def huge_png() -> bytes:
    """A PNG of a few hundred bytes that says it has 10 gigapixels."""
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 300)), (b"IEND", b""))
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def language_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2's kind: byte-level BPE whose only special token ends a text, and a chat template."""
    backend = bpe_tokenizer().backend_tokenizer
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", model_max_length=128)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def completion_ids(tokenizer: Any, prompt: Any, completion: Any) -> list[int]:
    """The tokens of a prompt, as ~id, and of its completion; both are text or messages."""
    sides = [side if isinstance(side, str) else read_messages(side) for side in (prompt, completion)]
    [found] = all_completion_ids(tokenizer, [(sides[0], sides[1], None)])
    if isinstance(found, ValueError):
        raise found
    return found


def build_language_model(
    folder: Path, *, dropout: float = 0.0, kind: Literal["gpt2", "llama"] = "gpt2", seed: int = 0, **shape: Any
) -> Path:
    """A causal language model as the hub has them: no padding token, no task.json. Same seed, same bytes."""
    tokenizer = language_tokenizer()
    size = len(tokenizer)
    ends: dict[str, Any] = {"vocab_size": size, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "gpt2":
            drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
            model: Any = GPT2LMHeadModel(GPT2Config(n_positions=128, n_embd=32, n_layer=2, n_head=2, **drops, **ends))
        else:
            small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
            small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
            shape = {**small, **shape}
            model = LlamaForCausalLM(LlamaConfig(**shape, **ends))
        # As above: answers that one can tell from one another.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.2)
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_encoder_decoder(folder: Path, *, kind: Literal["bart", "t5"] = "t5", seed: int = 0) -> Path:
    """An encoder-decoder as the hub has them, without dropout. Same seed, same bytes."""
    tokenizer = bpe_tokenizer()
    ids: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "t5":
            shape: dict[str, Any] = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
            config = T5Config(**shape, **ids, decoder_start_token_id=1, dropout_rate=0.0)
            model: Any = T5ForConditionalGeneration(config)
        else:
            shape = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 128}
            shape |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
            shape |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0}
            model = BartForConditionalGeneration(BartConfig(**shape, **ids, bos_token_id=0, decoder_start_token_id=2))
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_translator(folder: Path) -> Path:
    """A multilingual translator of mBART's kind, into Romanian unless another language is forced."""
    tokenizer = MBart50Tokenizer(src_lang="en_XX", model_max_length=64)
    shape: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 66}
    shape |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MBartForConditionalGeneration(MBartConfig(vocab_size=len(tokenizer), **shape, decoder_start_token_id=2))
    model.generation_config.forced_bos_token_id = tokenizer.lang_code_to_id["ro_RO"]
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_model(folder: Path, *, encoder: Path, spec: TaskSpec = SPEC, seed: int = 0) -> Path:
    """A model folder as training leaves it, with a head drawn from `seed` and never trained."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = base_model(encoder, spec, "AutoModelForSequenceClassification")
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module.out_features == model.config.num_labels:
                module.weight.data.normal_(0.0, 0.5)
    tokenizer = load.load_tokenizer(encoder)
    load.save_model_folder(folder, model, model.config, tokenizer, spec, card={"base": "tiny"})
    return folder


def spec_for(problem: str, labels: tuple[Any, ...]) -> TaskSpec:
    """`SPEC` with another problem and other classes."""
    return replace(SPEC, problem=problem, labels=labels)  # type: ignore[arg-type]


def reviews(rows: int, *, seed: int = 0) -> pa.Table:
    """A learnable table: id int64, text (2 to 30 words, "good" words more often in good ones), label good | bad."""
    generator = np.random.default_rng(seed)
    texts, labels = [], []
    for _ in range(rows):
        good = bool(generator.random() < 0.5)
        words = generator.choice(OTHER, size=generator.integers(2, 28)).tolist()
        words += generator.choice(GOOD if good else BAD, size=2).tolist()
        generator.shuffle(words)
        texts.append(" ".join(words))
        labels.append("good" if good else "bad")
    return pa.table({"id": pa.array(range(rows), pa.int64()), "text": texts, "label": labels})


class Here(Engine):
    """An engine without processes: chunk jobs run in this one, for tests that are not about engines."""

    processes = 1

    def run_chunks(
        self,
        make_worker: Callable[[], Worker],
        chunks: Iterable[Any],
        *,
        resources: Resources = DEFAULT_RESOURCES,
        **_: Any,
    ) -> Generator[Any, None, None]:
        yield from make_worker()(iter(chunks))

    def launch(
        self,
        fn: Callable[..., Any],
        *args: Any,
        processes: int | None = None,
        gpus_per_process: int | None = 0,
        grace_s: float = 30.0,
        **_: Any,
    ) -> Any:
        raise NotImplementedError("ranks need processes of their own")

    def map_frame(self, frame: Any, make_worker: Callable[[], Callable[[Any], Any]], schema: Any) -> Any:
        return make_worker()(frame)
