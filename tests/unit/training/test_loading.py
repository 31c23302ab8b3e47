"""One rank loads; the others start empty and get the same weights, buffers and adapters, in less memory."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

import families
import tiny
import training_runs as runs
from sweeps import sweep
from torchlake import plugins
from torchlake.config.task_spec import TaskSpec
from torchlake.models import load, probes
from torchlake.strategies import _weights
from torchlake.tasks._pretrained import base_model

MODEL_BYTES = 4 * (2 * 120_000 * 256)
"Of the two matrices that are nearly all of `large_vocabulary`."
WRITER = TaskSpec(task="text_generation", problem="next_token", labels=(), text="text", label=None, max_length=64)
QUICK = {"bert", "xlnet", "bart", "diffllama", "llama", "gpt2", "mamba"}
MADE_ON_THE_CPU = {"diffllama", "xlnet"}
"Families that create a tensor there whatever the default device is; it is overwritten."
EVERY = [("classifier", name) for name in families.classifiers()] + [("writer", name) for name in families.writers()]


def note_initial_weights() -> None:
    """Write every rank's parameters and buffers, whole, beside the run, before the first step."""
    from torchlake.training import loop

    make = loop.make_train_state

    def noting(settings: Any, group: Any, training: Any) -> Any:
        made = make(settings, group, training)
        held = dict(made[0].model.named_parameters()) | dict(made[0].model.named_buffers())
        whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in held.items()}
        copies = {name: each.detach().clone().contiguous() for name, each in whole.items()}
        save_file(copies, Path(settings.run) / f"initial-{group.rank}.safetensors")
        return made

    loop.make_train_state = noting


def note_with_copies_sent() -> None:
    """The same, with ddp as on GPUs: rank 0 sends whole copies."""
    ddp = plugins.load("strategies", "ddp")
    ddp.receives = lambda train, group: True  # type: ignore[attr-defined]
    note_initial_weights()


def sections_of(folder: Path, model: Path, *, kind: str, lora: bool) -> dict[str, Any]:
    sections = runs.job(folder, model, rows=20, epochs=1, max_steps=1, strategy="single")
    if kind == "writer":
        sections["model"] |= {"task": "text_generation", "max_length": 24}
    if lora:
        pytest.importorskip("peft")
        sections["model"]["lora"] = {"rank": 4}
    return sections


# A new head; adapters and a frozen base; tied weights; rotary frequencies, which no file has.
CASES = [("classifier", "bert", False), ("classifier", "bert", True), ("writer", "gpt2", False)]
CASES += [("writer", "llama", False)]
WAYS = ["fsdp", "ddp"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "lora", "strategy"),
    [(*case, way) for case in CASES for way in WAYS],
)
def test_every_rank_starts_with_the_weights_of_single(
    kind: Any, name: str, lora: bool, strategy: str, tmp_path: Path
) -> None:
    base = families.build(tmp_path / "base", name, kind=kind, dropout=False)
    sections = sections_of(tmp_path, base, kind=kind, lora=lora)
    runs.succeed(tmp_path / "single", sections, stub=note_initial_weights)
    sections["train"]["strategy"] = strategy
    stub = note_with_copies_sent if strategy == "ddp" else note_initial_weights
    runs.succeed(tmp_path / "run", sections, ranks=2, stub=stub)
    expected = load_file(tmp_path / "single" / "initial-0.safetensors")
    for rank in range(2):
        found = load_file(tmp_path / "run" / f"initial-{rank}.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[each], expected[each]) for each in expected)
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(tmp_path / "single"), abs=1e-5)


@pytest.mark.slow
def test_ranks_in_copies_of_shards_start_with_the_same_weights(tmp_path: Path, tiny_bert: Path) -> None:
    """Two copies of two shards: each row goes to two ranks."""
    sections = sections_of(tmp_path, tiny_bert, kind="classifier", lora=False)
    runs.succeed(tmp_path / "single", sections, stub=note_initial_weights)
    sections["train"] |= {"strategy": "fsdp", "fsdp": {"shard_ranks": 2}}
    runs.succeed(tmp_path / "run", sections, ranks=4, stub=note_initial_weights)
    expected = load_file(tmp_path / "single" / "initial-0.safetensors")
    for rank in range(4):
        found = load_file(tmp_path / "run" / f"initial-{rank}.safetensors")
        assert all(torch.equal(found[each], expected[each]) for each in expected)


def large_vocabulary(folder: Path) -> Path:
    """A Llama of 250 MB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=120_000, num_key_value_heads=2, eos_token_id=0, **shape))
    model.save_pretrained(folder)
    tiny.language_tokenizer().save_pretrained(folder)
    return folder


def measure_loading() -> None:
    """Write how far a rank's private memory rose, in bytes, beside the run."""
    from torchlake.training import loop

    make = loop.make_train_state

    def measuring(settings: Any, group: Any, training: Any) -> Any:
        before = _private()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        made = make(settings, group, training)
        peak = int(next(line for line in _status() if line.startswith("VmHWM:")).split()[1]) * 1024
        Path(settings.run, f"peak-{group.rank}").write_text(str(peak - before))
        return made

    loop.make_train_state = measuring


def _status() -> list[str]:
    return Path("/proc/self/status").read_text().splitlines()


def _private() -> int:
    """Bytes of this process in memory."""
    return int(next(line for line in _status() if line.startswith("VmRSS:")).split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system has no peak to reset")
def test_other_ranks_hold_their_shard_and_no_more(tmp_path: Path) -> None:
    """Their peak is below three quarters of the model: half is theirs, some is what they import."""
    base = large_vocabulary(tmp_path / "base")
    sections = sections_of(tmp_path, base, kind="writer", lora=False)
    sections["train"]["strategy"] = "fsdp"
    runs.succeed(tmp_path / "run", sections, ranks=2, stub=measure_loading)
    risen = int((tmp_path / "run" / "peak-1").read_text())
    assert MODEL_BYTES // 2 < risen < MODEL_BYTES * 3 // 4
    assert int((tmp_path / "run" / "peak-0").read_text()) < 2 * MODEL_BYTES, "no gradients, and one tensor at a time"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), sweep(EVERY, quick=[each for each in EVERY if each[1] in QUICK]))
def test_an_empty_model_has_the_tensors_of_a_loaded_one(kind: Any, name: str, tmp_path: Path) -> None:
    """In the same order, tied where those are; and autograd's graph shows the parameters that get a gradient."""
    folder = families.build(tmp_path / "base", name, kind=kind)
    task = plugins.load("tasks", WRITER.task if kind == "writer" else tiny.SPEC.task)
    spec = WRITER if kind == "writer" else tiny.SPEC
    loaded, empty = (base_model(folder, spec, task.auto_class, empty=empty) for empty in (False, True))
    names = [{id(each): name for name, each in every(model)} for model in (loaded, empty)]
    described = [
        [(names[index][id(each)], each.shape, each.dtype, len(places)) for each, places in _weights._held(model)]
        for index, model in enumerate((loaded, empty))
    ]
    assert described[0] == described[1]
    assert all(each.is_meta for each in empty.parameters()) or name in MADE_ON_THE_CPU
    tokenizer = load.load_tokenizer(folder)
    batch = probes.batches(task, probes.features(task, tokenizer, spec), tokenizer, spec)[1]
    unreached = probes.find_unreached(loaded, task, batch)
    assert all(each.grad is None for each in loaded.parameters())
    loaded.eval()
    probes.run(loaded, task, batch).logits.sum().backward()
    assert unreached == [name for name, each in loaded.named_parameters() if each.grad is None]


def every(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def test_a_pooler_that_the_head_ignores_is_not_trained(tmp_path: Path) -> None:
    """A causal language model's loss does not reach BERT's pooler, nor does a masked one's."""
    from transformers import BertConfig, BertForMaskedLM, BertModel

    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    model = BertForMaskedLM(config)
    model.bert = BertModel(config)  # the one with a pooler
    batch = {"input_ids": torch.arange(5, 12)[None].numpy()}
    unreached = probes.find_unreached(model, plugins.load("tasks", "text_classification"), batch)
    assert unreached == ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]
    probes.freeze(model, unreached)
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == unreached
