"""`POST /v1/embeddings` as OpenAI's clients send it; the vectors as numbers or as base64 of little-endian float32."""

import base64
from typing import Any, Literal

import numpy as np

from torchlake.serving.exchange import Refused, Route, ServedRequest
from torchlake.serving.protocols.texts import Body, embedded, route

TOKENS = "send texts; in LangChain set check_embedding_ctx_length=False"


class EmbeddingsBody(Body):
    """The body of /v1/embeddings."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = None
    user: str | None = None


def routes() -> list[Route]:
    """Return the routes."""
    return [route(path, EmbeddingsBody, embeddings) for path in ("/v1/embeddings", "/embeddings")]


async def embeddings(used: ServedRequest, body: EmbeddingsBody) -> Any:
    """Return the vectors of texts."""
    if body.model is not None and body.model not in used.service.names:
        raise Refused(404, f"model: this server has {used.service.name!r}", field="model", code="model_not_found")
    texts = [body.input] if isinstance(body.input, str) else body.input
    first = texts[0] if texts else None
    if isinstance(first, int) or (isinstance(first, list) and all(isinstance(token, int) for token in first)):
        raise Refused(422, f"input: token ids of another model's tokenizer; {TOKENS}", field="input")
    vectors = await embedded(used, texts, "input", dimensions=body.dimensions)
    data = [
        {"object": "embedding", "index": at, "embedding": _written(vector, body.encoding_format)}
        for at, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": used.tokens, "total_tokens": used.tokens}
    return {"object": "list", "data": data, "model": used.service.name, "usage": usage}


def _written(vector: np.ndarray, form: str | None) -> Any:
    return vector if form != "base64" else base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
