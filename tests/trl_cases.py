"""The rows, models and settings behind TRL's golden losses: `tools/golden_trl.py` writes them, tests read them.

The tool runs in TRL's environment, which has no torchlake, so this file imports torch, transformers, numpy and pyarrow
only. Models and tokenizer are bytes that follow from these lines alone: no random numbers of torch, no training.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

GOLDEN = Path(__file__).parent / "golden"
STEPS = 20
LENGTH = 256
MODELS = ("llama", "gpt2")
FAMILIES = ("llama", "gpt2", "qwen2", "qwen3", "mistral", "gemma2", "phi", "gpt_neox", "olmo2", "opt", "bloom", "mamba")
"The model types whose first losses are compared, packed and not."
SETTINGS: dict[str, dict[str, Any]] = {
    "sft_messages": {"optimizer": "adamw", "learning_rate": 2e-3, "clip_norm": 1.0},
    "sft_completion_texts": {"optimizer": "sgd", "learning_rate": 0.1, "clip_norm": None},
    "sft_completion_messages": {"optimizer": "adamw", "learning_rate": 2e-3, "clip_norm": None},
    "dpo_texts": {"optimizer": "sgd", "learning_rate": 0.1, "clip_norm": None, "loss": "dpo", "beta": 0.1},
    "dpo_messages": {"optimizer": "adamw", "learning_rate": 1e-3, "clip_norm": 1.0, "loss": "dpo", "beta": 0.1},
    "dpo_sft": {"optimizer": "adamw", "learning_rate": 1e-3, "clip_norm": None, "loss": "dpo", "beta": 0.3}
    | {"sft_weight": 0.5},
    "ipo_texts": {"optimizer": "sgd", "learning_rate": 0.05, "clip_norm": None, "loss": "ipo", "beta": 0.5},
    "ipo_messages": {"optimizer": "adamw", "learning_rate": 1e-3, "clip_norm": None, "loss": "ipo", "beta": 0.1},
    "orpo_texts": {"optimizer": "sgd", "learning_rate": 0.05, "clip_norm": None, "loss": "orpo", "beta": 0.1},
    "orpo_messages": {"optimizer": "adamw", "learning_rate": 1e-3, "clip_norm": 1.0, "loss": "orpo", "beta": 0.2},
}
"The rate is constant, and a step takes all rows. adamw: no decay; sgd: no momentum."
SUBJECTS = ("the king", "a good friend", "the old city", "your brother", "a long winter", "the first law")
SUBJECTS += ("her voice", "the sea")
QUESTIONS = ("What is {}?", "Who speaks of {} and why?", "Tell me more about {}, in a few words.", "Where was {}?")
ANSWERS = (
    "It is {} and nothing else.",
    "Nobody knows.",
    "I would say that {} was the reason, but ask another who was there before the end of it all.",
    "Yes, {}!",
    "There is more: first {}, then the rest of the story, which is long and not so good.",
)
START, MIDDLE, END, PAD = SPECIAL = ("<|start|>", "<|middle|>", "<|end|>", "<|pad|>")
TURN = f"{START}{{{{ m['role'] }}}}{MIDDLE}{{{{ m['content'] }}}}{END}"
ANSWER = f"{START}assistant{MIDDLE}{{% generation %}}{{{{ m['content'] }}}}{END}{{% endgeneration %}}"
PROMPT = f"{{% if add_generation_prompt %}}{START}assistant{MIDDLE}{{% endif %}}"
MARKED = f"{{% if m['role'] == 'assistant' %}}{ANSWER}{{% else %}}{TURN}{{% endif %}}"
TEMPLATES = {
    name: f"{{% for m in messages %}}{turns}{{% endfor %}}{PROMPT}"
    for name, turns in {"marked": MARKED, "unmarked": TURN}.items()
}
"Published templates have no marks: nothing in them says which tokens are the assistant's."
Row = dict[str, Any]


def question(number: int) -> str:
    return QUESTIONS[number % 4].format(SUBJECTS[(3 * number) % 8])


def answer(number: int) -> str:
    return ANSWERS[number % 5].format(SUBJECTS[(5 * number + 1) % 8])


def turn(role: str, content: str) -> Row:
    return {"role": role, "content": content}


def conversation(number: int) -> list[Row]:
    """One to three questions with their answers, every other time after a system text."""
    turns = [turn("system", "Answer as in a play.")] if number % 2 else []
    for each in range(1 + number % 3):
        turns += [turn("user", question(number + 2 * each)), turn("assistant", answer(number + each))]
    return turns


def rows_of(case: str) -> list[Row]:
    """The rows of a case: of `messages`, of `prompt` and `completion`, or of `prompt`, `chosen` and `rejected`."""
    if case == "sft_messages":
        return [{"messages": conversation(number)} for number in range(14)]
    names = ("completion",) if case.startswith("sft") else ("chosen", "rejected")
    rows = []
    for number in range(10):
        asked = conversation(number)[:-1]
        said = dict(zip(names, (answer(number), answer(2 * number + 1)), strict=False))
        if case.endswith("messages"):
            row = {"prompt": asked, **{name: [turn("assistant", text)] for name, text in said.items()}}
        else:
            row = {"prompt": asked[-1]["content"], **{name: f" {text}" for name, text in said.items()}}
        rows.append(row)
    return rows


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Bytes, the words above by merges from the left, and four special tokens; the end token ends each turn."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *characters])}
    merges: list[tuple[str, str]] = []
    words = " ".join([*SUBJECTS, *QUESTIONS, *ANSWERS]).replace("{}", "").split()
    bare = {word.strip(".,!?:") for word in words} - {""}
    for word in sorted({f"{space}{word}" for word in bare for space in ("", "Ġ")}):
        left = word[0]
        for character in word[1:]:
            if left + character not in vocabulary:
                merges.append((left, character))
                vocabulary[left + character] = len(vocabulary)
            left += character
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD, model_max_length=LENGTH)
    made.chat_template = TEMPLATES[template]
    return made


def build_model(folder: Path, family: str, template: str = "marked") -> Path:
    """A model folder of two layers without dropout, its matrices filled from numpy's Philox."""
    words = tokenizer(template)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": LENGTH, "state_size": 8}
    own = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH},
        "bloom": {"n_layer": 2, "n_head": 4},
        "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
        "phi": {"num_key_value_heads": 4},
    }
    drops = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout", "hidden_dropout")
    ids = {"vocab_size": len(words), "eos_token_id": words.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    known = AutoConfig.for_model(family).to_dict()
    options = {name: value for name, value in (sizes | dict.fromkeys(drops, 0.0)).items() if name in known}
    options |= {"head_dim": 8} if family in ("gemma2", "mistral", "qwen3") else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options | own.get(family, {}) | ids))
    for number, parameter in enumerate(model.parameters()):
        if parameter.ndim > 1:
            raw = np.random.Philox(key=np.array([7, number], np.uint64)).random_raw(parameter.numel())
            values = ((raw >> np.uint64(48)).astype(np.float32) - 32768) / 32768 * np.float32(0.3)
            parameter.data = torch.from_numpy(values.reshape(tuple(parameter.shape)))
    model.generation_config.eos_token_id = words.eos_token_id
    model.float().save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def read(name: str) -> tuple[list[Row], dict[str, Any], dict[str, dict[str, float]]]:
    """The rows of a golden file, its settings, and its columns: from the first word of each line to a number."""
    rows, settings, columns = [], {}, dict[str, dict[str, float]]()
    for line in (GOLDEN / f"{name}.txt").read_text().splitlines():
        kind, _, rest = line.removeprefix("# ").partition(" ")
        if kind == "row":
            rows.append(json.loads(rest))
        elif kind == "settings":
            settings = json.loads(rest)
        elif kind == "step":
            columns = {column: {} for column in rest.split()}
        elif not line.startswith("#"):
            for column, value in zip(columns.values(), rest.split(), strict=True):
                column[kind] = float(value)
    return rows, settings, columns


def sections(folder: Path, base: Path, settings: dict[str, Any], rows: list[Row], steps: int) -> dict[str, Any]:
    """The job that does what TRL's settings say: an epoch is one step."""
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    data: dict[str, Any] = {"train": str(folder / "rows.parquet"), "validation": None}
    if "messages" in rows[0]:
        data |= {"text": "messages", "learn": "assistant"}
    else:
        data |= {"text": "prompt", **{name: name for name in rows[0] if name != "prompt"}}
    train = {name: settings[name] for name in ("optimizer", "learning_rate", "clip_norm")}
    train |= {"momentum": 0.0} if settings["optimizer"] == "sgd" else {}
    train |= {"epochs": steps, "batch_size": 1000, "schedule": "constant", "warmup": 0.0, "weight_decay": 0.0}
    train |= {"precision": "fp32", "checkpoint_every": "1000steps", "keep_checkpoints": 1}
    preference = {name: settings[name] for name in ("loss", "beta", "sft_weight") if name in settings}
    if preference:
        train["preference"] = preference
    return {
        "data": data,
        "model": {"base": str(base), "task": "text_generation", "max_length": LENGTH},
        "train": train,
    }
