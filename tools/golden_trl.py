"""Write TRL's losses to tests/golden: those that a torchlake job on the same rows has to reach.

    python tools/golden_trl.py [CASE ...]

By hand, after a change of the rows (`tests/trl_cases.py`) or of TRL's version. It starts itself again in an environment
of TRL's own, which bench/_environments.py names and makes. TRL trains unpacked, and beside it packed (`packing=True`,
best-fit decreasing), in fp32 and without dropout; each step takes all rows. `sft_families` holds the first loss of each
family of models, unpacked and packed: where they differ, neighbors of a block are seen.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
INSIDE = "TORCHLAKE_GOLDEN"
FAMILIES = "sft_families"


def main() -> None:
    cases = sys.argv[1:]
    if INSIDE not in os.environ:
        sys.path.insert(0, str(ROOT / "bench"))
        from _environments import python_of

        python = python_of("trl")
        if isinstance(python, str):
            raise SystemExit(python)
        environment = {**os.environ, INSIDE: "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "tests")}
        raise SystemExit(subprocess.run([str(python), __file__, *cases], env=environment, check=False).returncode)
    import torch

    import trl_cases

    torch.set_num_threads(1)
    for case in cases or [*trl_cases.SETTINGS, FAMILIES]:
        write_families() if case == FAMILIES else write(case)


def write(case: str) -> None:
    """Write the losses of one case, a column for each model."""
    import trl_cases

    settings, rows = trl_cases.SETTINGS[case], trl_cases.rows_of(case)
    columns: dict[str, list[float]] = {}
    for model in trl_cases.MODELS:
        columns[model] = train(model, settings, rows, trl_cases.STEPS)
        if case.startswith("sft"):
            columns[f"{model}_packed"] = train(model, settings, rows, trl_cases.STEPS, packing=True)
    lines = [*head(settings, rows), f"# step {' '.join(columns)}"]
    lines += [f"{step} {' '.join(map(repr, each))}" for step, each in enumerate(zip(*columns.values(), strict=True), 1)]
    save(case, lines)


def write_families() -> None:
    """Write the first loss of each family, unpacked and packed."""
    import trl_cases

    settings, rows = trl_cases.SETTINGS["sft_messages"], trl_cases.rows_of("sft_messages")
    lines = [*head(settings, rows), "# step unpacked packed"]
    for family in trl_cases.FAMILIES:
        losses = [train(family, settings, rows, 1, packing=packing)[0] for packing in (False, True)]
        lines.append(f"{family} {losses[0]!r} {losses[1]!r}")
    save(FAMILIES, lines)


def head(settings: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    import torch

    versions = ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "torch", "accelerate"))
    processor = torch.backends.cpu.get_cpu_capability()
    told = [f"# settings {json.dumps(settings)}", *(f"# row {json.dumps(row)}" for row in rows)]
    return [f"# {versions}, {processor}", *told]


def save(case: str, lines: list[str]) -> None:
    path = ROOT / "tests" / "golden" / f"{case}.txt"
    path.write_text("\n".join(lines) + "\n")
    print(path, *[line for line in lines if not line.startswith("#")], sep="\n")


def train(
    family: str, settings: dict[str, Any], rows: list[dict[str, Any]], steps: int, *, packing: bool = False
) -> list[float]:
    """The losses of TRL's trainer for such settings, as its `compute_loss` returns them."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import trl_cases

    losses: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = trl_cases.build_model(Path(scratch) / "model", family)
        common = {
            "output_dir": str(Path(scratch) / "out"),
            "max_steps": steps,
            "per_device_train_batch_size": len(rows),
            "learning_rate": settings["learning_rate"],
            "optim": {"adamw": "adamw_torch", "sgd": "sgd"}[settings["optimizer"]],
            "max_grad_norm": settings["clip_norm"] or 0.0,
            "lr_scheduler_type": "constant",
            "weight_decay": 0.0,
            "max_length": trl_cases.LENGTH,
            "bf16": False,
            "gradient_checkpointing": False,
            "use_cpu": True,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": steps,
        }
        kind, arguments = trainer_of(settings, rows, common, packing=packing)

        class Recorded(kind):  # type: ignore[misc, valid-type]
            def compute_loss(self, *args: Any, **options: Any) -> Any:
                loss = super().compute_loss(*args, **options)
                losses.append(float(loss))
                return loss

        model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        Recorded(model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()
    return losses


def trainer_of(
    settings: dict[str, Any], rows: list[dict[str, Any]], common: dict[str, Any], *, packing: bool
) -> tuple[Any, Any]:
    """TRL's trainer of a loss, and its arguments."""
    loss = settings.get("loss")
    if loss is None:
        from trl import SFTConfig, SFTTrainer

        return SFTTrainer, SFTConfig(**common, packing=packing, assistant_only_loss="messages" in rows[0])
    if loss == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer, ORPOConfig(**common, beta=settings["beta"])
    from trl import DPOConfig, DPOTrainer

    kinds, weights = [{"dpo": "sigmoid", "ipo": "ipo"}[loss]], [1.0]
    if "sft_weight" in settings:
        kinds, weights = [*kinds, "sft"], [*weights, settings["sft_weight"]]
    return DPOTrainer, DPOConfig(**common, beta=settings["beta"], loss_type=kinds, loss_weights=weights)


if __name__ == "__main__":
    main()
