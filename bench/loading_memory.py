"""How much main memory do eight ranks take to load a model that FSDP shards?

The ranks are processes on this machine, joined by gloo, that make the state a training starts from: the model loaded,
tested, sharded, with its optimizer, before the first step. Main memory is the proportional set size (PSS) summed over
the ranks, sampled from the operating system, above what the ranks had before they began; pages of the model's files
that several ranks map count once. `--before` is the `src` folder of an older checkout, measured first; give it fewer
`--layers` and a smaller `--vocabulary` on a machine that could not hold eight models.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from _common import RESULTS, SCRATCH, finish, parser
from _gpu import LANGUAGE_MODELS, tokenizer

HERE = Path(__file__).parent.parent / "src"
MIB = 2**20
RESULT = RESULTS / "loading_memory.json"
RANK = """
import json, sys, time
from pathlib import Path
import transformers
from torchlake import distributed
from torchlake.config.job import Job
from torchlake.config.task_spec import TaskSpec
from torchlake.training.rows import RankSettings
try:
    from torchlake.training.model.setup import make_train_state
except ImportError:
    from torchlake.training.state import make_train_state
model, run = sys.argv[1:]
job = Job.model_validate({"data": {"train": "none.parquet"}, "model": {"base": model, "task": "text_generation"},
                          "train": {"strategy": "fsdp", "precision": "fp32"}})
spec = TaskSpec(task="text_generation", problem="next_token", labels=(), text="text", label=None, max_length=512)
settings = RankSettings(job=job, spec=spec, run=run, tokens="", validation_tokens=None, strategy="fsdp",
                        metric="loss", checkpoint=None, attempt="0", lease=("", ""))
with distributed.process_group(600, alone=True) as group:
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    state, _ = make_train_state(*(settings, group, None)[: make_train_state.__code__.co_argcount])
    distributed.barrier(group, "loading")
    print(json.dumps({"seconds": time.monotonic() - began,
                      "parameters": sum(each.numel() for each in state.model.parameters())}), flush=True)
    sys.stdin.readline()
"""


def model_folder(layers: int, vocabulary: int) -> Path:
    """A Llama 3.2 1B with the given numbers of layers and words, in bf16, with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = SCRATCH / f"llama-{layers}-{vocabulary}"
    if not (folder / "config.json").exists():
        shape = LANGUAGE_MODELS["llama-1b"] | {"num_hidden_layers": layers, "vocab_size": vocabulary}
        config = LlamaConfig(tie_word_embeddings=True, bos_token_id=None, eos_token_id=2, **shape)
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        tokenizer(language_model=True).save_pretrained(folder)
    return folder


def pss(process: int) -> dict[str, int]:
    """Bytes of a process: all, and those that no file backs."""
    lines = (line.split() for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:])
    found = {line[0]: int(line[1]) * 1024 for line in lines}
    return {"all": found["Pss:"], "private": found["Pss_Anon:"]}


def measure(source: Path, model: Path, ranks: int) -> dict[str, float]:
    """Load the model on `ranks` ranks with the code in `source`; the peaks, in MiB."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    processes = []
    for rank in range(ranks):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": source}
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        command = [sys.executable, "-c", RANK, str(model), str(SCRATCH)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=environment, **pipes))
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    numbers = [process.pid for process in processes]
    start = [pss(number) for number in numbers]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    peaks = {"all": 0, "private": 0, "other": 0}
    os.set_blocking(processes[0].stdout.fileno(), False)
    while not (line := processes[0].stdout.readline()):
        assert all(process.poll() is None for process in processes), "a rank failed"
        now = [pss(number) for number in numbers]
        for kind in ("all", "private"):
            risen = sum(each[kind] - before[kind] for each, before in zip(now, start, strict=True))
            peaks[kind] = max(peaks[kind], risen)
        others = [each["private"] - before["private"] for each, before in zip(now[1:], start[1:], strict=True)]
        peaks["other"] = max(peaks["other"], *others)
        time.sleep(0.02)
    last = sum(pss(number)["private"] for number in numbers) - sum(each["private"] for each in start)
    for process in processes:
        process.communicate("\n")
    done = json.loads(line)
    return {
        "peak_mib": peaks["all"] // MIB,
        "private_peak_mib": peaks["private"] // MIB,
        "other_rank_peak_mib": peaks["other"] // MIB,
        "private_after_mib": last // MIB,
        "seconds": round(done["seconds"], 1),
    }


def main() -> None:
    options = parser(__doc__, ranks=8, layers=16, vocabulary=128_256)
    options.add_argument("--before", type=Path, help="the src folder of an older checkout, measured too")
    options = options.parse_args()
    model = model_folder(options.layers, options.vocabulary)
    stored = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    sources = {} if options.before is None else {"before": options.before.resolve()}
    rows = []
    if RESULT.exists():
        rows = [row for row in json.loads(RESULT.read_text())["rows"] if row["layers"] != options.layers]
    for name, source in {**sources, "now": HERE}.items():
        shape = {"name": name, "ranks": options.ranks, "layers": options.layers, "vocabulary": options.vocabulary}
        # The file is in bf16, training weights are fp32.
        rows.append({**shape, "model_fp32_mib": 2 * stored // MIB, **measure(source, model, options.ranks)})
    note = "ranks of one machine joined by gloo; MiB above what they had before; a Llama 3.2 1B with fewer layers"
    finish("loading_memory", rows, as_json=options.json, note=note)


if __name__ == "__main__":
    main()
