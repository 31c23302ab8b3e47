"""Case 54: a model folder is data. Nothing in it may run, lead outside, or fill the memory before it is refused."""

import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forked
from torchlake.errors import DataError, TorchlakeError, UnsafeError
from torchlake.models import load, safety
from torchlake.models.config import load_config
from torchlake.models.spec import load_spec
from torchlake.tasks._pretrained import base_model


class Canary:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """A model folder to spoil, without a manifest that would notice."""
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "manifest.json").unlink()
    return tmp_path / "model"


def refused(folder: Path) -> TorchlakeError:
    """The one error that every road into the folder ends with."""
    messages = set()
    roads: list[Callable[[], object]] = [
        lambda: load.check_folder(folder),
        lambda: load_spec(folder),
        lambda: load.load_tokenizer(folder),
        lambda: load.max_length(folder),
        lambda: load.load_model(folder, auto_class="AutoModelForSequenceClassification"),
        lambda: base_model(folder, SPEC, "AutoModelForSequenceClassification"),
    ]
    for road in roads:
        with pytest.raises(TorchlakeError) as caught:
            road()
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert caught.value.exit_code in (65, 77)
    return caught.value


SPEC = load.TaskSpec(
    task="text_classification", problem="single_label", labels=("a", "b"), text="text", label="label", max_length=16
)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "rng_state.pth", "optimizer.pt", "extra.pkl", "deep/down/state.pickle", "training_args.bin"],
)
def test_a_pickle_is_refused_unopened(folder: Path, tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(Canary(canary)))
    pickle.loads(file.read_bytes()).close()  # the trap works
    canary.unlink()
    error = refused(folder)
    assert isinstance(error, UnsafeError)
    assert str(file) in str(error)
    assert "no pickles" in str(error)
    assert not canary.exists()


def test_weights_in_a_pickle_only(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="no weights"):
        load.check_folder(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    assert "pytorch_model.bin" in str(refused(folder))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("auto_map", {"AutoModel": "evil.Model", "AutoTokenizer": ["evil.Tokenizer", None]}),
        ("trust_remote_code", True),
        ("trust_remote_code", "false"),
        ("_attn_implementation_internal", "evil/kernel"),
        ("_experts_implementation_internal", "evil/kernel"),
        ("_attn_implementation", "evil/kernel@main:flash"),
        ("attn_implementation", {"text_config": "evil/kernel"}),
        ("use_kernels", True),
        ("kernels", {"rotary": "evil/kernel"}),
        ("kernel_config", {"RMSNorm": "evil/kernel:Norm"}),
        ("sub_config", {"deeper": [{"auto_map": {"AutoConfig": "evil.Config"}}]}),
        ("_target_", "os.system"),
    ],
)
def test_a_key_that_names_code_is_refused(folder: Path, tmp_path: Path, file: str, key: str, value: Any) -> None:
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\nclass Model: ...\n")
    edit(folder / file, **{key: value})
    error = refused(folder)
    assert isinstance(error, UnsafeError)
    assert file in str(error)
    assert "no code" in str(error)
    assert not (tmp_path / "canary").exists()


def test_the_implementations_of_transformers_are_no_code(folder: Path) -> None:
    edit(folder / "config.json", _attn_implementation_autoset=True, attn_implementation="sdpa")
    load.check_folder(folder)


KERNELS: list[tuple[str, Any]] = [
    *(("attn_implementation", f"flash_attention_{version}") for version in (2, 3, 4)),
    ("_attn_implementation", "flash_attention_2"),
    ("_attn_implementation", "kernels-community/flash-attn2"),
    ("_attn_implementation", "kernels-community/flash-attn2@main:flash_attn_func"),
    ("attn_implementation", "MiniMaxAI/msa"),
    ("attn_implementation", "paged|kernels-community/flash-attn2"),
    ("attn_implementation", "paged|flash_attention_2"),
    ("attn_implementation", ["flash_attention_2"]),
    ("attn_implementation", {"": "sdpa", "text_config": "flash_attention_3"}),
    ("attn_implementation", {"text_config": {"": "evil/kernel"}}),
    ("text_config", {"_attn_implementation": "flash_attention_2"}),
    ("text_config", {"deeper": [{"attn_implementation": "evil/kernel"}]}),
    ("per_layer_config", {"0": {"attn_implementation": "flash_attention_2"}}),
    ("experts_implementation", "deepgemm"),
    ("experts_implementation", "sonicmoe"),
    ("_experts_implementation", "deepgemm_megamoe"),
    *(
        ("quantization_config", {"quant_method": method})
        for method in ("eetq", "fbgemm_fp8", "fp8", "mxfp8", "mxfp4", "nvfp4", "metal", "gguf", "no-such-method")
    ),
    ("text_config", {"quantization_config": {"quant_method": "mxfp4"}}),
    ("model_type", "mra"),
    ("model_type", "rwkv"),
    ("model_type", "yoso"),
    ("text_config", {"model_type": "yoso"}),
]


@pytest.mark.parametrize(("key", "value"), KERNELS)
def test_nothing_in_a_folder_leads_to_a_kernel(folder: Path, key: str, value: Any) -> None:
    edit(folder / "config.json", **{key: value})
    error = refused(folder)
    assert isinstance(error, UnsafeError)
    assert "no code" in str(error)
    (folder / "generation_config.json").write_text(json.dumps({key: value}))
    shutil.copy(folder / "generation_config.json", folder / "config.json")
    assert isinstance(refused(folder), UnsafeError)


def test_every_way_of_transformers_to_a_kernel_is_known() -> None:
    """A file of a new transformers that loads kernels is a way that the gate has to decide on."""
    import transformers

    package = Path(transformers.__file__).parent
    asks = re.compile(r"(?<!def )\b(?:get_kernel|lazy_load_kernel|load_and_register_attn_kernel)\(")
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if path.name != "hub_kernels.py"
        and b"kernel(" in (content := path.read_bytes())  # which is faster
        and asks.search(content.decode())
    }
    models_of_theirs = {path.split("/")[1] for path in found if path.startswith("models/")}
    assert models_of_theirs <= safety.MODELS_WITH_KERNELS
    assert {path for path in found if not path.startswith("models/")} <= {
        # Asked for by an implementation, or by a way of scaling experts:
        "modeling_flash_attention_utils.py",
        "integrations/msa_attention.py",
        "integrations/deepgemm.py",
        "integrations/sonicmoe.py",
        # by a quantization_config, or a GGUF file, which no gate lets in:
        "integrations/eetq.py",
        "integrations/fbgemm_fp8.py",
        "integrations/finegrained_fp8.py",
        "integrations/gguf/kernels.py",
        "integrations/metal_quantization.py",
        "integrations/mxfp4.py",
        "integrations/nvfp4.py",
        # and by asking whether flash attention is there, which follows from an implementation.
        "utils/import_utils.py",
    }


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention", None])
def test_an_implementation_that_is_let_in_asks_for_no_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch, implementation: str | None
) -> None:
    """As if the library `kernels` were installed: no road into the folder reaches it."""
    from transformers import modeling_utils
    from transformers.integrations import hub_kernels

    asked: list[object] = []
    monkeypatch.setattr(modeling_utils, "is_kernels_available", lambda *args, **options: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *args, **options: asked.append(args))
    edit(folder / "config.json", attn_implementation=implementation)
    load.load_model(folder, auto_class="AutoModelForSequenceClassification")
    assert asked == []


@pytest.mark.parametrize(
    "key", ["tokenizer_file", "vocab_file", "spm_file", "target_spm", "gguf_file", "a_config_path"]
)
def test_a_configuration_names_no_file_outside_of_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path / "other.json")
    monkeypatch.chdir(tmp_path)
    for value in (str(tmp_path / "other.json"), "../other.json", "other.json", "model/../other.json", ".."):
        edit(folder / "tokenizer_config.json", **{key: value})
        error = refused(folder)
        assert isinstance(error, UnsafeError)
        assert "no way out" in str(error)
        assert key in str(error)
    for value in ("tokenizer.json", None):
        edit(folder / "tokenizer_config.json", **{key: value})
        load.check_folder(folder)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("tokenizer_config.json", "vocab", "{outside}"),
        ("tokenizer_config.json", "merges", "{outside}"),
        ("tokenizer_config.json", "init_inputs", [{"vocab_file": "{outside}"}]),
        ("tokenizer_config.json", "fast_tokenizer_files", ["tokenizer.json", "../other.json"]),
        ("config.json", "transformers_weights", "../other.safetensors"),
    ],
)
def test_files_by_other_keys(folder: Path, tmp_path: Path, file: str, key: str, value: Any) -> None:
    shutil.copy(folder / "tokenizer.json", tmp_path / "other.json")
    edit(folder / file, **json.loads(json.dumps({key: value}).replace("{outside}", str(tmp_path / "other.json"))))
    assert "no way out" in str(refused(folder))


def test_where_a_tokenizer_was_once_saved_is_not_opened(folder: Path, tmp_path: Path) -> None:
    before = load.load_tokenizer(folder)("good film")["input_ids"]
    (tmp_path / "map.json").write_text("not JSON")
    edit(folder / "tokenizer_config.json", special_tokens_map_file=str(tmp_path / "map.json"))
    assert load.load_tokenizer(folder)("good film")["input_ids"] == before


def test_links_may_not_lead_out(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (folder / "vocab.txt").symlink_to(secret)
    error = refused(folder)
    assert isinstance(error, UnsafeError)
    assert "vocab.txt" in str(error)
    assert "no way out" in str(error)
    (folder / "vocab.txt").unlink()
    (folder / "subfolder").symlink_to(tmp_path)
    assert "subfolder" in str(refused(folder))


def test_links_may_lead_to_the_blobs_of_a_hub_snapshot(tmp_path: Path, tiny_model: Path) -> None:
    blobs, snapshot = tmp_path / "models--me--tiny" / "blobs", tmp_path / "models--me--tiny" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in tiny_model.iterdir():
        shutil.copy(file, blobs / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", f"blob-{file.name}"))
    load.check_folder(snapshot)
    (snapshot / "vocab.txt").symlink_to(tmp_path)
    assert isinstance(refused(snapshot), UnsafeError)


def test_a_pipe_does_not_hang(folder: Path) -> None:
    os.mkfifo(folder / "added_tokens.json")
    assert "plain files" in str(refused(folder))
    (folder / "added_tokens.json").unlink()
    (folder / "added_tokens.json").symlink_to(folder / "nowhere.json")
    assert "plain files" in str(refused(folder))


def test_shards_are_names_in_the_folder(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../etc/model.safetensors"}}))
    assert isinstance(refused(folder), UnsafeError)
    index.write_text(json.dumps({"weight_map": {"a": "missing.safetensors"}}))
    load.check_folder(folder)  # transformers does not read an index beside model.safetensors
    (folder / "model.safetensors").unlink()
    assert "missing.safetensors" in str(refused(folder))


def test_an_adapter_leads_to_another_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "evil/model"}))
    assert "adapter" in str(refused(folder))


def test_an_unknown_model_type(folder: Path) -> None:
    """Known to the installed transformers or not: that is asked where transformers is loaded anyway."""
    edit(folder / "config.json", model_type="evil")
    with pytest.raises(DataError, match="'evil'"):
        load.load_model(folder, auto_class="AutoModelForSequenceClassification")
    with pytest.raises(DataError, match="'evil'"):
        load.max_length(folder)
    edit(folder / "config.json", model_type=7)
    assert "has no model_type" in str(refused(folder))


def test_a_truncated_weight_file(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DataError, match="cannot be loaded"):
        load.load_model(folder, auto_class="AutoModelForSequenceClassification")
    weights.write_bytes(b"")
    assert "not a safetensors file" in str(refused(folder))


BOMBS: dict[str, tuple[str, bytes]] = {
    "header of 10 GB": ("model.safetensors", struct.pack("<Q", 10 << 30) + b"{" + b" " * 1000),
    "header of 2^63": ("model.safetensors", struct.pack("<Q", 1 << 63) + b"{" + b" " * 1000),
    "deep configuration": ("config.json", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "deep tokenizer": ("tokenizer.json", b"[" * 8_000_000),
    "wide configuration": ("config.json", b"[" + b"[]," * 3_000_000 + b"[]]"),
    "wide task": ("task.json", b"[" + b"[]," * 3_000_000 + b"[]]"),
    "huge vocabulary": ("vocab.json", b""),
    "huge list of words": ("vocab.txt", b""),
}


def test_bombs_are_refused_in_little_memory(tmp_path: Path, tiny_model: Path) -> None:
    """All of them in one process, whose memory may grow by 200 MB in all."""
    folders = []
    for number, (name, content) in enumerate(BOMBS.values()):
        folder = shutil.copytree(tiny_model, tmp_path / str(number))
        (folder / "manifest.json").unlink()
        (folder / name).write_bytes(content)
        if not content:
            os.truncate(folder / name, 10 << 30)  # a hole: it takes no disk
        folders.append(str(folder))
    program = (
        "import resource, sys\n"
        "from torchlake.models.load import load_model\n"
        "from torchlake.errors import DataError\n"
        "from transformers import CONFIG_MAPPING, AutoConfig\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "for folder in sys.argv[1:]:\n"
        "    try:\n"
        "        load_model(folder, auto_class='AutoModelForSequenceClassification')\n"
        "    except DataError as error:\n"
        "        print(peak() - before, error)\n"
    )
    process = forked.run_script(program, folders, timeout=120)
    lines = process.stdout.splitlines()
    assert len(lines) == len(BOMBS), process.stderr
    for line, (name, _) in zip(lines, BOMBS.values(), strict=True):
        grown_kb, message = line.split(" ", 1)
        assert int(grown_kb) < 200 * 1024, line
        assert name in message
        assert "refused by the rule" in message


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("1", 0),
        ("{}", 1),
        ('{"a": [1, {"b": []}]}', 4),
        ('["[[[[", "\\"[[", "\\\\", [1]]', 2),
        ('{"\\\\\\"[": "]"}', 1),
    ],
)
def test_depth_ignores_strings_wherever_a_block_ends(tmp_path: Path, text: str, depth: int) -> None:
    file = tmp_path / "value.json"
    file.write_text(text)
    for block_bytes in range(1, len(text) + 2):
        assert safety.json_depth(file, block_bytes=block_bytes) == depth


def test_a_file_is_read_once_until_it_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    depth = safety.json_depth

    def counted(file: Path) -> int:
        read.append(file.name)
        return depth(file)

    monkeypatch.setattr(safety, "json_depth", counted)
    for _ in range(3):
        safety.check_folder(folder)
    assert sorted(read) == sorted(path.name for path in folder.glob("*.json"))
    file, before = folder / "config.json", (folder / "config.json").stat()
    file.write_text(file.read_text().replace('"model_type"', '"_target_"  ', 1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(UnsafeError, match="_target_"):
        safety.check_folder(folder)


def test_a_configuration_belongs_to_who_loads_it_and_is_that_of_the_file(folder: Path) -> None:
    load_config(folder).num_labels = 77
    assert load_config(folder).num_labels != 77
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"hidden_dropout_prob": 0.25}))
    assert load_config(folder).hidden_dropout_prob == 0.25


def test_the_longest_row_is_that_of_the_files_as_they_are(folder: Path) -> None:
    assert load.max_length(folder) > 7
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 7}))
    assert load.max_length(folder) == 7
