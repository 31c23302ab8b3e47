"""The section `data` of a job: the tables, their columns and the rows to read."""

from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from torchlake.config.messages import expected
from torchlake.config.task_spec import as_columns
from torchlake.config.types import STRICT, Bool, Float, Int, Name
from torchlake.tables.selection.grammar import parse


def _kind(value: Any) -> str:
    if isinstance(value, Fold) or (isinstance(value, Mapping) and not value.keys().isdisjoint(("fold", "folds"))):
        return "<fold>"
    if isinstance(value, Mapping | Fraction):
        return "<fraction>"
    return "<paths>" if isinstance(value, list | tuple) else "<path>"


def _columns_kind(value: Any) -> str:
    return "<columns>" if isinstance(value, list | tuple) else "<column>"


OnePath = Annotated[Name, Tag("<path>")]
ManyPaths = Annotated[tuple[Name, ...], Field(min_length=1), Tag("<paths>")]
OneColumn = Annotated[Name, Tag("<column>")]
ManyColumns = Annotated[tuple[Name, ...], Field(min_length=1), Tag("<columns>")]
Columns = Annotated[OneColumn | ManyColumns, Discriminator(_columns_kind)]


class Fraction(BaseModel):
    """A share of the training rows, selected by the seed."""

    model_config = STRICT

    fraction: Float = Field(gt=0, lt=1)
    """Share of the rows, above 0 and below 1."""


class Fold(BaseModel):
    """One of several equal parts of the training rows, divided by the seed; the other parts are trained on."""

    model_config = STRICT

    folds: Int = Field(ge=2)
    """Number of parts."""
    fold: Int = Field(ge=1)
    """Which of them, from 1."""

    @field_validator("fold")
    @classmethod
    def _is_one_of_them(cls, fold: int, given: ValidationInfo) -> int:
        if fold > given.data.get("folds", fold):
            raise ValueError(f"must be at most {given.data['folds']}, the number of folds, got {fold}")
        return fold


class CsvConfig(BaseModel):
    """How CSV files are written."""

    model_config = STRICT

    delimiter: Name | None = Field(default=None, max_length=1)
    """Character between fields; null: a tab in .tsv files, else a comma."""
    quote: Name = Field(default='"', max_length=1)
    """Character around a field; doubled within one."""
    encoding: Name = "utf-8"
    """Encoding of the text, such as latin-1, cp1252 or utf-16."""


class MessagesConfig(BaseModel):
    """The names that the table gives to the parts of a conversation's messages."""

    model_config = STRICT

    role: Name = "role"
    """Field with the role, such as from."""
    content: Name = "content"
    """Field with the text, such as value."""
    roles: dict[Name, Name] = {}
    """The template's role for each role of the table, such as {human: user, gpt: assistant}."""


Share = Annotated[Fraction, Tag("<fraction>")] | Annotated[Fold, Tag("<fold>")]
"A part of the training rows for validation."


class DataConfig(BaseModel):
    """The training and validation tables, and their columns."""

    model_config = STRICT

    train: Annotated[OnePath | ManyPaths, Discriminator(_kind)]
    """Training table: a file, folder, glob or URL, or a list of them."""
    validation: Annotated[OnePath | ManyPaths | Share, Discriminator(_kind)] | None = Fraction(fraction=0.1)
    """Validation table, or {fraction: f} of the training rows, or {fold: k, folds: n} of them; null: none."""
    chosen: Name | None = None
    """Column of the better of two answers to the prompt in `text`, for text generation: strings or conversations."""
    text: Columns | None = "text"
    """Column of the input, or a list of columns whose texts are joined. null, of pairs of answers only, for which it is
    the default: what both answers begin with is the prompt."""
    separator: str | None = None
    """Between the texts of several columns, those that are null or blank left out; null: a space."""
    template: Name | None = None
    """The text of several columns, such as "{title}: {body}", nothing for a null; null: joined by the separator."""
    text_pair: Columns | None = None
    """Column of the second text of a pair, or a list of columns; null: a row has one text."""
    inputs: dict[Name, Columns] = {}
    """Columns of the task's other inputs, by the input's name; without one, the column of that name."""
    label: Name = "label"
    """Column of the target: strings or integers, lists of strings, or floats; text generation has none."""
    problem: Literal["single_label", "multi_label", "regression"] | None = None
    """One class per row, several (lists of strings), or a number; null: inferred from the label column."""
    completion: Name | None = None
    """Column of the completion, strings or messages, of the prompt in text; the loss is over the completion."""
    messages: MessagesConfig | None = None
    """Names of the parts of a message; null: role and content, or from and value (ShareGPT)."""
    system: Name | None = None
    """System text before every conversation that does not begin with one; null: none."""
    learn: Literal["all", "assistant", "last"] | None = None
    """Tokens in the loss: all, those of the assistant's turns, or of its last turn; null: the completion, or all."""
    pack: Literal["stream", "whole"] | None = None
    """stream: rows follow one another in blocks; whole: each is in one block, and rows do not see each other; null:
    whole for conversations and completions, stream for text."""
    too_long: Literal["cut_start", "cut_end", "drop", "error"] | None = None
    """A row packed whole that is longer than a block: cut it (conversations at a message, the system text kept), drop
    it, or make it an error; null: cut_end for text, else cut_start."""
    rejected: Name | None = Field(default=None, validate_default=True)
    """Column of the worse of two answers."""
    key: Name | None = None
    """Column that identifies a row, unique and without nulls; null: file and row number."""
    csv: CsvConfig = CsvConfig()
    """How the tables are written, if they are CSV files."""
    where: Name | None = None
    """Rows of both tables to read, such as stars >= 3 and lang = 'en'; null: all."""
    sample: Float | None = Field(default=None, gt=0, le=1)
    """Share of the training table's rows, selected by train.seed; null: all."""
    limit: Int | None = Field(default=None, ge=1)
    """Maximum number of rows of the training table, in its order; null: all."""
    label_separator: Name | None = None
    """Between several labels in one cell of strings, such as "|"; null: a cell is one label."""
    deduplicate: Bool = False
    """Leave out training rows whose inputs and label an earlier row of the table has; false: only report them."""
    bad_rows: Literal["error", "drop"] = "error"
    """A row that is null, cannot be decoded, or has a label that is NaN or not a class of the model: stop the job, or
    drop the row and count it."""

    @model_validator(mode="before")
    @classmethod
    def _answers_have_their_own_prompt(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("chosen") is not None and "text" not in values:
            return {**values, "text": None}
        return values

    @field_validator("validation", mode="before")
    @classmethod
    def _is_a_table_or_a_share(cls, value: Any) -> Any:
        if isinstance(value, int | float):
            shown = f"{{fraction: {0.1 if isinstance(value, bool) else value}}}"
            raise ValueError(expected(f"a table, a share such as {shown}, or null for none", value))
        return value

    @field_validator("text")
    @classmethod
    def _rows_have_text(cls, text: Any, given: ValidationInfo) -> Any:
        if text is None and given.data.get("chosen") is None:
            raise ValueError("is null; only pairs of answers (data.chosen and data.rejected) do without it")
        return text

    @field_validator("rejected")
    @classmethod
    def _two_answers(cls, rejected: str | None, given: ValidationInfo) -> str | None:
        chosen = given.data.get("chosen")
        if (chosen is None) != (rejected is None):
            one, other = ("rejected", "chosen") if chosen is None else ("chosen", "rejected")
            raise ValueError(f"data.{one} is set without data.{other}; a pair has both, or leave both out")
        if chosen is not None and given.data.get("learn") not in (None, "all"):
            raise ValueError(f"data.learn is {given.data.get('learn')}, but data.chosen and data.rejected are learned")
        if rejected is not None and len({chosen, rejected, given.data.get("text")}) < 3:
            raise ValueError("data.text, data.chosen and data.rejected must be different columns")
        return rejected

    @field_validator("where")
    @classmethod
    def _where_can_be_parsed(cls, where: str | None) -> str | None:
        if where is not None:
            parse(where)
        return where

    @field_validator("template")
    @classmethod
    def _template_has_the_columns(cls, template: str | None, given: ValidationInfo) -> str | None:
        if template is not None:
            if given.data.get("separator") is not None:
                raise ValueError("separator and template cannot be combined; leave one of them out")
            _check_template(template, as_columns(given.data.get("text") or ""))
        return template

    @field_validator("label")
    @classmethod
    def _columns_differ(cls, label: str, given: ValidationInfo) -> str:
        for name in ("text", "text_pair"):
            if label in as_columns(given.data.get(name) or ""):
                raise ValueError(f"{name} and label both name the column {label!r}; they must differ")
        return label

    @field_validator("completion")
    @classmethod
    def _prompts_lack_the_completion(cls, completion: str | None, given: ValidationInfo) -> str | None:
        if completion in as_columns(given.data.get("text") or ""):
            raise ValueError(f"text and completion both name the column {completion!r}; they must differ")
        return completion


def _check_template(template: str, columns: tuple[str, ...]) -> None:
    """Raise ValueError unless the template has each of the columns as {column}, and nothing else in braces."""
    try:
        fields = [(name, kind, how) for _, name, how, kind in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"{template!r} is not a template: {error}; write a brace itself as {{{{ or }}}}") from None
    names = {name for name, _, _ in fields}
    if any(kind or how for _, kind, how in fields) or names != set(columns) or len(columns) < 2:
        raise ValueError(
            f"{template!r} has {', '.join(map(repr, sorted(names))) or 'no column'} in braces; it needs each of the "
            f"columns in text, which must be a list of two or more"
        )
