"""The job file: what is read, and how every mistake is named."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from torchlake import plugins
from torchlake.config.job import SECTIONS, Job, job_to_yaml, load_job, with_values
from torchlake.config.messages import TRAINER_NAMES, _settings
from torchlake.config.sections.data import DataConfig
from torchlake.config.sections.model import ModelConfig
from torchlake.config.sections.train import TrainConfig
from torchlake.config.types import Every, parse_every, parse_seconds
from torchlake.config.yaml import MAX_BYTES, read_yaml
from torchlake.errors import ConfigError, UnsafeError

GOOD = "data: {train: reviews.parquet}\nmodel: {base: encoder}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def complaint(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_job(write(folder, text), overrides)
    return str(error.value).replace(f"{folder}/", "")


def test_a_short_job_gets_the_defaults(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, GOOD))
    assert job.data.train == "reviews.parquet"
    assert job.data.validation is not None
    assert job.train.checkpoint_every == Every(seconds=600)
    assert job.train.validate_every == Every(epochs=1)
    assert job.engine.name == "local"


@pytest.mark.parametrize("written", ["2e-5", "2.0e-5", '"2e-5"', "0.00002"])
def test_every_way_of_writing_a_learning_rate(tmp_path: Path, written: str) -> None:
    assert load_job(write(tmp_path, GOOD + f"train: {{learning_rate: {written}}}\n")).train.learning_rate == 2e-5
    assert load_job(write(tmp_path, GOOD), [f"train.learning_rate={written}"]).train.learning_rate == 2e-5


def test_an_unknown_key_is_named_with_file_line_and_the_nearest_key(tmp_path: Path) -> None:
    text = GOOD + "train:\n  epochs: 2\n\n  # a comment\n  learnin_rate: 1.0e-4\n"
    assert complaint(tmp_path, text) == "job.yaml:7: train.learnin_rate: unknown key; did you mean learning_rate?"


def test_a_key_of_another_section_is_pointed_there(tmp_path: Path) -> None:
    assert complaint(tmp_path, GOOD + "epochs: 3\n") == "job.yaml:3: epochs: unknown key; did you mean train.epochs?"
    assert "did you mean train.batch_size?" in complaint(
        tmp_path, "model: {base: x, batch_size: 3}\ndata: {train: a}\n"
    )


def test_an_override_is_named_by_itself(tmp_path: Path) -> None:
    found = complaint(tmp_path, GOOD, "train.epoch=3", "train.batch_size=0")
    assert "--set train.epoch=3: train.epoch: unknown key; did you mean epochs?" in found
    assert "--set train.batch_size=0: train.batch_size: must be at least 1, got 0" in found


def test_all_mistakes_are_listed_at_once(tmp_path: Path) -> None:
    text = "data: {train: [], validation: {fraction: 2}}\nmodel: {max_length: yes}\n"
    text += "train:\n  epochs: three\n  schedule: cosi\n"
    schedules = "'linear', 'cosine', 'constant' or 'wsd'"
    assert complaint(tmp_path, text).splitlines() == [
        "job.yaml:1: data.train: the list is empty; name at least one",
        "job.yaml:1: data.validation.fraction: must be less than 1, got 2",
        "job.yaml:2: model.base: missing; it has no default",
        "job.yaml:2: model.max_length: expected a whole number, got true",
        "job.yaml:4: train.epochs: expected a whole number, got 'three'",
        f"job.yaml:5: train.schedule: expected {schedules}, got 'cosi'; did you mean cosine?",
    ]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.epochs=0", "at least 1"),
        ("train.epochs=2.5", "whole number"),
        ("train.learning_rate=.nan", "expected a number"),
        ("train.learning_rate=.inf", "expected a number"),
        ("train.learning_rate=fast", "expected a number"),
        ("train.warmup=1", "less than 1"),
        ("train.warmup_steps=0", "at least 1"),
        ("train.cooldown=0.2", "setting of schedule wsd"),
        ("train.min_learning_rate=1", "above learning_rate"),
        ("train.optimizer=adam", "did you mean adamw?"),
        ("train.momentum=0.9", "setting of optimizer sgd"),
        ("train.betas=0.9", "expected two numbers, such as [0.9, 0.95], got 0.9"),
        ("train.betas=[0.9, 1]", "less than 1"),
        ("train.layer_decay=1.1", "at most 1"),
        ("model.freeze=0", "at least 1"),
        ("model.freeze=embedding", "did you mean embeddings?"),
        ("model.freeze=[]", "the list is empty"),
        ("data.validation=0.2", "expected a table, a share such as {fraction: 0.2}, or null for none, got 0.2"),
        ("data.validation=no", "a share such as {fraction: 0.1}, or null for none, got false"),
        ("train.checkpoint_every=10parsecs", '"10min"'),
        ("train.checkpoint_every=0steps", '"10min"'),
        ("train.validate_every=10min", '"200steps"'),
        ("train.collective_timeout=-3", '"10min"'),
        ("data.text=1", "quotes"),
        ("data.text=", "is null; only pairs of answers"),
        ("data.label=text", "must differ"),
        ("data.completion=text", "text and completion both name the column 'text'; they must differ"),
        ("data.bad_rows=ignore", "'error' or 'drop'"),
        ("data.validation={share: 0.1}", "known are fraction"),
        ("train=3", "mapping"),
        ("engine.processes=0", "at least 1"),
    ],
)
def test_wrong_values_are_refused_in_plain_words(tmp_path: Path, setting: str, words: str) -> None:
    found = complaint(tmp_path, GOOD, setting)
    assert words in found
    assert found.startswith(f"--set {setting}: ")


@pytest.mark.parametrize(
    ("train", "key", "words"),
    [
        ("{warmup: 0.1, warmup_steps: 10}", "warmup_steps", "warmup (0.1) is set too; leave one of them out"),
        ("{optimizer: sgd, betas: [0.9, 0.99]}", "betas", "optimizer sgd has no betas"),
        ("{schedule: constant, min_learning_rate: 1e-6}", "min_learning_rate", "constant stays at learning_rate"),
        ("{schedule: wsd, warmup: 0.5, cooldown: 0.6}", "cooldown", "more than all steps"),
        ("{schedule: wsd, warmup: 0.95}", "cooldown", "warmup (0.95) and cooldown (0.1) are more than all steps"),
    ],
)
def test_settings_that_exclude_one_another_are_named_with_key_and_line(
    tmp_path: Path, train: str, key: str, words: str
) -> None:
    found = complaint(tmp_path, f"{GOOD}train: {train}\n")
    assert found.startswith(f"job.yaml:{len(GOOD.splitlines()) + 1}: train.{key}: ")
    assert words in found


def test_no_warm_up_at_all_is_written_as_zero(tmp_path: Path) -> None:
    assert "train.warmup_steps: warmup and warmup_steps are both null; write warmup: 0" in complaint(
        tmp_path, GOOD, "train.warmup="
    )


def test_a_warm_up_in_steps_replaces_the_default_share(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, GOOD + "train: {warmup_steps: 7}\n"))
    assert (job.train.warmup, job.train.warmup_steps) == (None, 7)
    copy = tmp_path / "copy.yaml"
    copy.write_text(job_to_yaml(job))
    assert load_job(copy) == job
    default = load_job(write(tmp_path, GOOD))
    assert load_job(default, ["train.warmup_steps=7"]) == job
    assert with_values(default, {"train.warmup_steps": 7}, {"train.warmup_steps": "trial 0"}) == job


@pytest.mark.parametrize("override", ["epochs", "=3", "train..epochs=3", "train.=3"])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_job(None, [override])


def test_overrides_and_sections_lie_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "train: {epochs: 9, batch_size: 8}\n")
    job = load_job(path, ["train.batch_size=4"], train={"epochs": 2}, data=DataConfig(train="other.csv"))
    assert (job.train.epochs, job.train.batch_size, job.data.train) == (2, 4, "other.csv")
    assert load_job(path, ["data.validation.fraction=0.3"]).data.validation is not None


def test_a_job_needs_no_file() -> None:
    job = load_job(None, ["data.train=[a.csv, b.csv]", "model.base=encoder", "data.validation="])
    assert job.data.train == ("a.csv", "b.csv")
    assert job.data.validation is None


def test_keyword_sections_are_named_in_errors() -> None:
    with pytest.raises(ConfigError, match=r"argument train: train\.epoch: unknown key; did you mean epochs\?"):
        load_job(None, ["data.train=a", "model.base=b"], train={"epoch": 1})
    with pytest.raises(ConfigError, match=r"argument trian: trian: unknown key; did you mean train\?"):
        load_job(None, ["data.train=a", "model.base=b"], trian={"epochs": 1})


def test_an_emptied_section_means_its_defaults(tmp_path: Path) -> None:
    assert load_job(write(tmp_path, GOOD + "train:\n  # epochs: 3\n")).train == TrainConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "not a list"),
        ("just words", "not a single value"),
        ("data: {train: a\nmodel: [", "not valid YAML"),
        ("data: {train: a, train: b}\n", r"data.train: given twice, first in line 1"),
        ("data:\n  train: a\ndata:\n  train: b\n", "job.yaml:3: data: given twice, first in line 1"),
        ("[1]: 2\n", "a key is a word"),
        ("data: &d {train: a}\nmodel: {<<: *d}\n", "job.yaml:2: merge keys (<<) are not read"),
        ("a: \x01", "not valid YAML"),
        ("a: !!int abc", "is not a valid int"),
        ("a: !!int ''", "is not a valid int"),
        ("--- 1\n--- 2\n", "not valid YAML"),
        ("a: *missing", "not valid YAML"),
        ("x: " + "[" * 50 + "]" * 50, "nested deeper"),
        ("x: " + "[" * 100_000, "nested deeper"),
        ("x: &a [*a]", "levels once aliases are expanded"),
        ("# " + "x" * MAX_BYTES, "larger than"),
        ("# " + "é" * (MAX_BYTES // 2) + "\ntrain: {}\n", "larger than"),
    ],
)
def test_what_is_no_job_file(tmp_path: Path, text: str, words: str) -> None:
    assert words in complaint(tmp_path, text)


def test_anchors_work_and_alias_bombs_do_not(tmp_path: Path) -> None:
    job = load_job(write(tmp_path, "data: {train: &t a.csv, validation: *t}\nmodel: {base: b}\n"))
    assert job.data.validation == "a.csv"
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    assert "once aliases are expanded" in complaint(tmp_path, bomb)


@pytest.mark.parametrize(
    "text",
    [
        "x: !!python/object/apply:os.system ['touch {canary}']",
        "x: !!python/name:os.system",
        "!!python/object/new:os.system ['touch {canary}']",
        "!!python/name:os.system x: 1",
        "x: !custom {a: 1}",
        "x: !!binary aGVsbG8=",
        "x: !!set {a}",
    ],
)
def test_tags_are_refused_and_run_nothing(tmp_path: Path, text: str) -> None:
    canary = tmp_path / "canary"
    with pytest.raises(UnsafeError, match=r"tag .* is refused") as error:
        load_job(write(tmp_path, text.replace("{canary}", str(canary))))
    assert error.value.exit_code == 77
    with pytest.raises(UnsafeError):
        load_job(None, [f"train.epochs={text.removeprefix('x: ')}"])
    assert not canary.exists()


@pytest.mark.parametrize(
    ("asked", "there", "hint"),
    [
        ("job.yml", ["job.yaml"], "job.yaml"),
        ("job.yaml", ["other.yaml", "job.yml"], "job.yml"),
        ("reveiws.yaml", ["reviews.yaml", "reviews.csv"], "reviews.yaml"),
        ("job.yaml", ["table.parquet", "job.csv"], None),
    ],
)
def test_a_missing_job_file_suggests_one_that_is_there(
    tmp_path: Path, asked: str, there: list[str], hint: str | None
) -> None:
    for name in there:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as error:
        load_job(tmp_path / asked)
    suggestion = "" if hint is None else f"; did you mean {tmp_path / hint}?"
    assert str(error.value) == f"{tmp_path / asked}: no such job file{suggestion}"


PLUGINS = [("model", "task", "tasks"), ("train", "strategy", "strategies"), ("engine", "name", "engines")]


@pytest.mark.parametrize(("section", "key", "kind"), PLUGINS)
@given(name=st.from_regex("[a-z_]{1,12}", fullmatch=True))
def test_a_plug_in_that_there_is_not_is_named_by_its_key_and_line(
    section: str, key: str, kind: plugins.Kind, name: str
) -> None:
    known = list(plugins.names(kind))
    assume(name not in [*known, "auto"])
    sections = {"data": {"train": "t"}, "model": {"base": "b"}}
    sections.setdefault(section, {})[key] = name
    with pytest.raises(ConfigError) as error:
        load_job(None, **sections)
    message = str(error.value)
    one = {"tasks": "task", "strategies": "strategy", "engines": "engine"}[kind]
    assert message.startswith(f"argument {section}: {section}.{key}: there is no {one} '{name}'.")
    assert message.endswith(f"{kind.capitalize()}: {', '.join(['auto'] * (kind == 'strategies') + known)}.")
    assert f"{kind}:" not in message, "the folder of plug-ins is not shown"


@pytest.mark.parametrize(("section", "key", "kind"), PLUGINS)
def test_every_plug_in_may_be_named(section: str, key: str, kind: plugins.Kind) -> None:
    for name in plugins.names(kind):
        job = load_job(None, [f"{section}.{key}={name}"], data={"train": "t"}, model={"base": "b"})
        assert getattr(getattr(job, section), key) == name


def test_a_wrong_task_is_named_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {train: t}\nmodel:\n  base: b\n  task: summarization\n")
    with pytest.raises(ConfigError, match=rf"^{path}:4: model\.task: there is no task 'summarization'.*Tasks: feat"):
        load_job(path)


def test_a_job_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such job file"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_job(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: caf\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_job(tmp_path / "latin.yaml")


def test_the_environment_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAIN__EPOCHS", "99")
    monkeypatch.setenv("EPOCHS", "99")
    job = load_job(write(tmp_path, GOOD + "train: {metric: $EPOCHS}\n"))
    assert (job.train.epochs, job.train.metric) == (TrainConfig().epochs, "$EPOCHS")


def test_jobs_are_frozen() -> None:
    job = load_job(None, ["data.train=a", "model.base=b"])
    with pytest.raises(ValueError, match="frozen"):
        job.train.epochs = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"), [("30s", 30), ("10min", 600), ("1h", 3600), ("1.5h", 5400), (90, 90), (0.5, 0.5)]
)
def test_lengths_of_time(text: object, expected: float) -> None:
    assert parse_seconds(text) == expected


@pytest.mark.parametrize("text", ["", "10", "min", "-3s", "0s", "1d", 0, -1, True, None, float("inf"), "1" * 40 + "s"])
def test_what_is_no_length_of_time(text: object) -> None:
    with pytest.raises(ValueError, match="expected a length of time"):
        parse_seconds(text)


names = st.text(min_size=1, max_size=20)
intervals = st.one_of(
    st.integers(1, 10**6).map(lambda n: Every(steps=n)),
    st.integers(1, 10**6).map(lambda n: Every(seconds=float(n))),
    st.just(Every(epochs=1)),
)
jobs = st.builds(
    Job,
    data=st.builds(
        DataConfig,
        train=st.one_of(names, st.lists(names, min_size=1, max_size=3).map(tuple)),
        validation=st.one_of(st.none(), names, st.floats(0.01, 0.99).map(lambda f: {"fraction": f})),
        text=names.filter(lambda name: name != "label"),
        key=st.none() | names,
    ),
    model=st.builds(ModelConfig, base=names, max_length=st.none() | st.integers(2, 10**6)),
    train=st.builds(
        TrainConfig,
        learning_rate=st.floats(1e-300, 1e300),
        seed=st.integers(0, 2**63 - 1),
        schedule=st.sampled_from(["linear", "cosine", "constant"]),
        checkpoint_every=intervals,
        collective_timeout=st.floats(1e-3, 1e9),
        metric=st.none() | names,
    ),
)


@given(jobs)
def test_a_job_written_and_read_again_is_the_same_job(job: Job) -> None:
    values, _ = read_yaml(job_to_yaml(job), "job.yaml")
    assert load_job(None, data=values["data"], model=values["model"], train=values["train"]) == job


@given(intervals)
def test_an_interval_written_and_read_again_is_the_same(every: Every) -> None:
    again = parse_every(str(every))
    assert again == every


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(plain)
def test_reading_agrees_with_the_safe_loader_on_plain_values(value: object) -> None:
    text = yaml.safe_dump(value, allow_unicode=True)
    read, _ = read_yaml(text, "job.yaml")
    assert _keys_as_text(yaml.safe_load(text)) == _keys_as_text(read)


@given(st.text(max_size=200) | st.text(alphabet="[]{}:,-&*!|>'\"#? \nab1", max_size=80))
def test_any_text_is_a_value_or_a_named_error(text: str) -> None:
    message = ""
    try:
        read_yaml(text, "job.yaml")
    except (ConfigError, UnsafeError) as error:
        message = str(error)
    assert message == "" or message.startswith("job.yaml")


@given(st.text(alphabet="abd.=train[]{}:' 1e-", max_size=40), plain)
def test_any_override_and_section_is_a_job_or_a_named_error(override: str, section: object) -> None:
    with pytest.raises((ConfigError, UnsafeError)):
        load_job(None, [override, "train.unknown=1"], data=section)


def _keys_as_text(value: object) -> object:
    """Keys are always words in a job file, where YAML would make `1` a number and `no` a boolean."""
    if isinstance(value, dict):
        return [_keys_as_text(item) for item in value.values()]
    if isinstance(value, list):
        return [_keys_as_text(item) for item in value]
    return value


@pytest.mark.parametrize("name", sorted(TRAINER_NAMES))
def test_a_name_of_the_trainer_is_answered_with_ours(name: str) -> None:
    answer = f"unknown key; here it is {TRAINER_NAMES[name]}"
    sections = {"data": {"train": "t"}, "model": {"base": "b"}}
    for more, shown in (({"train": {name: 1}}, f"train.{name}"), ({name: 1}, name)):
        with pytest.raises(ConfigError, match=re.escape(f"{shown}: {answer}")):
            load_job(None, **sections, **more)
    with pytest.raises(ConfigError, match=re.escape(f"--set train.{name}=1: train.{name}: {answer}")):
        load_job(None, [f"train.{name}=1"], **sections)


def test_names_of_the_trainer_lead_to_settings_that_there_are() -> None:
    known = {setting for section, model in SECTIONS.items() for setting in _settings(model, section)}
    for name, answer in TRAINER_NAMES.items():
        assert set(re.findall(r"(?:train|model|data|track)\.\w+", answer)) <= known, name
        assert not any(setting.endswith(f".{name}") for setting in known), f"{name} is the same here"


def test_the_migration_page_has_the_names_of_the_trainer() -> None:
    page = (Path(__file__).parents[3] / "docs" / "migration" / "hugging_face_trainer.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    shown = {name: row[1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert TRAINER_NAMES.keys() <= shown.keys()
    for name, answer in TRAINER_NAMES.items():
        for setting in re.findall(r"(?:train|model|data|track)\.(\w+)", answer):
            assert f"{setting}`" in shown[name], f"{name}: {answer}"
    ours = {field for model in SECTIONS.values() for field in model.model_fields}
    values = {"linear", "cosine", "constant", "warmup_stable_decay"}
    code = {
        "BitsAndBytesConfig",
        "EarlyStoppingCallback",
        "generation_max_length",
        "compute_loss",
        "compute_metrics",
        "peft",
    }
    assert shown.keys() - TRAINER_NAMES.keys() - ours - values == code
