"""The loss of a language model in chunks: the plain one's value and gradients, for less memory."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import families
import training_runs as runs
from sweeps import sweep
from torchlake.tasks import _chunked_loss

ROUNDING = 5e-5
"Relative to a gradient's largest number; chunks are summed in another order."
BETWEEN_RUNS = 2e-5
FORWARD = {"use_cache": False}
FAMILIES = families.writers()
# One for each way from hidden states to logits: tied, a bias, a factor, a cap.
QUICK = {"gpt2", "llama", "gptj", "cohere", "granite", "gemma2"}


def job(folder: Path, model: Path, *, lora: bool = False, **train: Any) -> dict[str, Any]:
    sections = runs.job(folder, model, rows=40, epochs=1, **train)
    sections["model"] |= {"task": "text_generation", "max_length": 24} | ({"lora": {"rank": 4}} if lora else {})
    return sections


def load(folder: Path, name: str) -> Any:
    families.build(folder, name, kind="writer", dropout=False)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets, (2, 20); some tokens are no targets."""
    ids = torch.randint(5, 250, (2, 20), generator=torch.Generator().manual_seed(0))
    targets = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    targets[0, 3:6] = -100
    return ids, targets


def learned(targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """The targets (n,) and their places, as a step gives them to the model."""
    places = (targets.flatten() != -100).nonzero()[:, 0]
    return {"targets": targets.flatten()[places], "places": places}


def plain_loss(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, **FORWARD).logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of three times the loss: a step scales it."""
    model.zero_grad()
    (loss * 3).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def compute_in_chunks(model: nn.Module, row: torch.Tensor, *, tokens: int) -> bool:
    """Let the model return its loss in chunks, if it can."""
    after = _chunked_loss.find(model, row, FORWARD, tokens=tokens)
    if after is not None:
        _chunked_loss.attach(model, after)
    return after is not None


@pytest.mark.parametrize("name", sweep(FAMILIES, quick=QUICK))
def test_value_and_gradients_are_those_of_the_plain_loss(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_chunked_loss, "CHUNK_BYTES", 7 * 4 * 400)
    model = load(tmp_path / "model", name)
    ids, targets = rows()
    plain = plain_loss(model, ids, targets)
    expected = gradients(model, plain)
    assert compute_in_chunks(model, ids[:1], tokens=40)
    assert model.training
    chunked = model(input_ids=ids, **learned(targets), **FORWARD)
    assert chunked.item() == pytest.approx(plain.item(), rel=1e-6)
    found = gradients(model, chunked)
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    for key, gradient in found.items():
        scale = max(float(expected[key].abs().max()), 1e-3 * largest)
        assert float((gradient - expected[key]).abs().max()) <= ROUNDING * scale, key
    assert torch.equal(plain_loss(model, ids, targets), plain), "without targets the model works as before"
    with torch.no_grad():
        assert model(input_ids=ids, **learned(targets), **FORWARD).item() == pytest.approx(plain.item(), rel=1e-6)


def test_under_autocast_it_differs_by_the_rounding_of_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chunked_loss, "CHUNK_BYTES", 7 * 4 * 400)
    model = load(tmp_path / "model", "llama")
    ids, targets = rows()
    with torch.autocast("cpu", torch.bfloat16):
        plain = plain_loss(model, ids, targets)
    expected = gradients(model, plain)
    assert compute_in_chunks(model, ids[:1], tokens=40)
    with torch.autocast("cpu", torch.bfloat16):
        chunked = model(input_ids=ids, **learned(targets), **FORWARD)
    assert chunked.item() == pytest.approx(plain.item(), rel=1e-6)
    for key, gradient in gradients(model, chunked).items():
        assert float((gradient - expected[key]).norm()) <= 0.02 * float(expected[key].norm()), key


def test_a_model_that_does_something_else_after_its_head_keeps_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_chunked_loss, "CHUNK_BYTES", 7 * 4 * 400)
    model = load(tmp_path / "model", "llama")
    ids, targets = rows()
    own = model.forward

    def forward(**options: Any) -> Any:
        out = own(**options)
        out.logits = out.logits + out.logits.mean(-1, keepdim=True) ** 2 * torch.arange(out.logits.shape[-1]) / 100
        return out

    model.forward = forward
    before = plain_loss(model, ids, targets)
    assert not compute_in_chunks(model, ids[:1], tokens=40)
    assert torch.equal(plain_loss(model, ids, targets), before)


def test_small_logits_are_not_cut(tmp_path: Path) -> None:
    model = load(tmp_path / "model", "llama")
    assert not compute_in_chunks(model, rows()[0][:1], tokens=16384)


class Peak(TorchDispatchMode):
    """Count the bytes of the living storages that operators made, and the largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.living = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.living += size
        self.peak = max(self.peak, self.living)
        weakref.finalize(storage, self.free, key, size)

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.living -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_128000_words_the_loss_takes_at_most_a_third_of_the_memory(dtype: torch.dtype) -> None:
    """Head and loss, forward and backward, over 8,192 tokens; counted on tensors without data."""
    peaks = []
    for chunked in (False, True):
        with FakeTensorMode():
            head = nn.Linear(512, 128_000, bias=False, dtype=dtype)
            hidden = torch.randn(8192, 512, dtype=dtype, requires_grad=True)
            targets = torch.zeros(8192, dtype=torch.long)
            with Peak() as mode:
                if chunked:
                    loss = _chunked_loss._ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
                        hidden, head.weight, None, targets, _chunked_loss.AfterHead(), _chunked_loss._terms, True
                    )
                else:
                    loss = functional.cross_entropy(head(hidden).float(), targets, reduction="sum")
                loss.backward()
        peaks.append(mode.peak)
    print(f"{dtype}: {peaks[0] / 2**30:.2f} GiB, in chunks {peaks[1] / 2**30:.2f} GiB")
    assert peaks[0] > 8192 * 128_000 * 4
    assert peaks[1] <= peaks[0] / 3


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param("single", 1, marks=pytest.mark.slow),  # the one below with LoRA
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        ("fsdp", 2),
        pytest.param("deepspeed", 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_has_the_losses_of_the_plain_path(strategy: str, ranks: int, tmp_path: Path, tiny_gpt2: Path) -> None:
    """Packed blocks, tied embeddings, several micro-batches, and ranks without a row."""
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
    sections = job(tmp_path, tiny_gpt2, batch_size=5, micro_batch_tokens=50, strategy="single")
    one = runs.succeed(tmp_path / "plain", sections)
    sections["train"]["strategy"] = strategy
    other = runs.succeed(tmp_path / "chunked", sections, ranks=ranks, stub=runs.small_chunks)
    assert runs.losses(tmp_path / "chunked") == pytest.approx(runs.losses(tmp_path / "plain"), abs=BETWEEN_RUNS)
    assert runs.losses(tmp_path / "chunked") != runs.losses(tmp_path / "plain"), "the stub took no effect"
    assert other.metrics == pytest.approx(one.metrics, rel=1e-4)


@pytest.mark.slow
def test_with_lora_the_frozen_head_has_no_gradient(tmp_path: Path, tiny_llama: Path) -> None:
    pytest.importorskip("peft")
    sections = job(tmp_path, tiny_llama, lora=True, learning_rate=1e-2)
    runs.succeed(tmp_path / "plain", sections)
    runs.succeed(tmp_path / "chunked", sections, stub=runs.small_chunks)
    assert runs.losses(tmp_path / "chunked") == pytest.approx(runs.losses(tmp_path / "plain"), abs=BETWEEN_RUNS)
    assert runs.losses(tmp_path / "chunked") != runs.losses(tmp_path / "plain")
