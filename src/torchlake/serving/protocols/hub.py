"""`POST /`, which Hugging Face's InferenceClient calls, for every task, in the form that it parses."""

from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from torchlake import plugins
from torchlake.errors import UsageError
from torchlake.serving.exchange import Refused, ServedRequest, reply
from torchlake.serving.protocols.tei import EmbedBody, SimilarityBody, embed, similarity
from torchlake.serving.protocols.texts import Body, TruncatingBody, checked, classes_of, rows_of, scored, view_of

Name = Annotated[str, Field(min_length=1)]
"A string that is checked: also that it is Unicode."


class RootBody(EmbedBody):
    """The body of POST /, for every task; the fields of /embed are for embedding models."""

    inputs: Any
    parameters: dict[str, Any] | None = None


EMBED_FIELDS = EmbedBody.model_fields.keys() - TruncatingBody.model_fields.keys() - {"inputs"}


class ClassParameters(Body):
    """The parameters of POST / for classes."""

    top_k: int | None = Field(None, ge=1)
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None


class NameParameters(Body):
    """The parameters of POST / for classes that the request names."""

    candidate_labels: list[Name] | None = None
    hypothesis_template: Name | None = None
    multi_label: bool | None = None


class SpanParameters(Body):
    """The parameters of POST / for spans.

    Words are never split, and a word has the label of its first token. `simple` is the same unless the tokens of a word
    have different labels.
    """

    aggregation_strategy: Literal["simple", "first"] | None = None
    ignore_labels: list[str] | None = None
    stride: int | None = Field(None, ge=0)


class AnswerParameters(Body):
    """The parameters of POST / for answers: a question has one. The others are transformers' names of the task's."""

    top_k: Literal[1] | None = None
    stride: int | None = Field(None, alias="doc_stride", ge=0)
    max_answer_tokens: int | None = Field(None, alias="max_answer_len", ge=1)
    no_answer: bool | None = Field(None, alias="handle_impossible_answer")


async def root(request: Request) -> Response:
    """Answer as Hugging Face's InferenceClient expects it of the model's task."""
    used: ServedRequest = request.scope["torchlake"]
    given, task = used.json(), used.model.spec.task
    if task == "feature_extraction":
        if isinstance(given, dict) and isinstance(given.get("inputs"), dict):
            return reply(await similarity(used, checked(SimilarityBody, given)))
        body = checked(RootBody, given)
        checked(Body, body.parameters or {}, "parameters")
        checked(EmbedBody, {"inputs": body.inputs})
        return reply(await embed(used, body))
    body = checked(RootBody, given)
    foreign = next((name for name in sorted(EMBED_FIELDS) if getattr(body, name) is not None), None)
    if foreign is not None:
        raise Refused(422, f"{foreign!r} is not supported", field=foreign)
    answers: dict[str, tuple[Any, type[Body]]] = {
        "token_classification": (_spans, SpanParameters),
        "question_answering": (_answers, AnswerParameters),
        "zero_shot_classification": (_named, NameParameters),
    }
    answer, kind = answers.get(task, (_all_classes, ClassParameters))
    options: Any = checked(kind, body.parameters or {}, "parameters")
    return reply(await answer(used, body, options))


async def _all_classes(used: ServedRequest, body: RootBody, options: ClassParameters) -> Any:
    rows, _ = rows_of(used.model.spec, body.inputs)
    function = options.function_to_apply
    # The nested form also for one text: the client takes element 0 of the answer.
    answers = await classes_of(used, rows, view_of(used, body, raw=function is not None), function)
    return [each[: options.top_k] for each in answers]


async def _named(used: ServedRequest, body: RootBody, options: NameParameters) -> Any:
    given = options.model_dump(exclude_none=True)
    try:
        spec = used.model.with_options(given)
    except UsageError:
        words = "candidate_labels must be different names, at least two, and hypothesis_template must contain {} once"
        raise Refused(422, f"parameters: {words}", field="parameters") from None
    rows, single = rows_of(spec, body.inputs)
    pairs, most = len(rows) * len(spec.options["candidate_labels"]), used.service.options.max_rows
    if (pairs > most and len(rows) > 1) or len(spec.options["candidate_labels"]) > most:
        said = f"parameters.candidate_labels: {pairs:,} texts times labels; the limit is {most:,} (--max-rows)"
        raise Refused(422, said, field="candidate_labels")
    answers = await classes_of(used, rows, view_of(used, body, task_options=given), spec=spec)
    return answers[0] if single else answers


async def _spans(used: ServedRequest, body: RootBody, options: SpanParameters) -> Any:
    ignored = ["O"] if options.ignore_labels is None else options.ignore_labels
    if "O" not in ignored:
        raise Refused(422, "parameters.ignore_labels: expected a list with O", field="ignore_labels")
    rows, single = rows_of(used.model.spec, body.inputs)
    given = options.model_dump(include={"stride"}, exclude_none=True)
    _check_stride(used, options.stride, "stride")
    table = await scored(used, rows, "inputs", view_of(used, body, task_options=given))
    names = {"label": "entity_group", "text": "word"}
    found = [
        [{names.get(name, name): value for name, value in span.items()} for span in row if span["label"] not in ignored]
        for row in table["spans"].to_pylist()
    ]
    return found[0] if single else found


async def _answers(used: ServedRequest, body: RootBody, options: AnswerParameters) -> Any:
    asked = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    if not all(isinstance(each, dict) and each.keys() == {"question", "context"} for each in asked):
        raise Refused(422, "inputs: expected an object with question and context", field="inputs")
    spec, given = used.model.spec, options.model_dump(exclude={"top_k"}, exclude_none=True)
    _check_stride(used, options.stride, "doc_stride")
    order = [("question" if name == spec.inputs["question"] else "context") for name in spec.input_columns]
    asked_rows = [tuple(each[name] for name in order) for each in asked]
    table = await scored(used, asked_rows, "inputs", view_of(used, body, task_options=given))
    rows = table.select(["answer", "score", "start", "end"]).to_pylist()
    found = [{**row, "answer": row["answer"] or "", "start": row["start"] or 0, "end": row["end"] or 0} for row in rows]
    return found if isinstance(body.inputs, list) else found[0]


def _check_stride(used: ServedRequest, stride: int | None, name: str) -> None:
    limit = plugins.load("tasks", used.model.spec.task).largest_stride(used.model.spec)
    if stride is not None and stride > limit:
        raise Refused(
            422, f"parameters.{name}: expected at most {limit}, by the tokens that the model reads", field=name
        )
