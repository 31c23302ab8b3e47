"""What people serve an embedding model with instead, each as its manual says, one thread.

Run by `serving.py` in the peer's own environment (`python FILE NAME MODEL PORT`), so nothing here imports torchlake.
"""

import sys
from typing import Any

try:
    import litserve
except ImportError:  # the other peers do not need it
    litserve = None


def sentence_fastapi(model: str, port: int) -> None:
    """sentence-transformers in FastAPI: a function without async, which runs in the pool of threads."""
    import uvicorn
    from fastapi import FastAPI
    from sentence_transformers import SentenceTransformer

    encoder, app = SentenceTransformer(model, device="cpu"), FastAPI()

    @app.post("/embed")
    def embed(body: dict[str, Any]) -> list[list[float]]:
        vectors: list[list[float]] = encoder.encode([body["inputs"]], show_progress_bar=False).tolist()
        return vectors

    @app.get("/health")
    def health() -> str:
        return "ok"

    uvicorn.run(app, port=port, log_level="error")


class Api(litserve.LitAPI if litserve else object):  # type: ignore[misc]
    """LitServe's class of a model; its processes import it from this module."""

    def setup(self, device: str) -> None:
        from sentence_transformers import SentenceTransformer

        self.encoder = SentenceTransformer(sys.argv[2], device="cpu")

    def decode_request(self, request: dict[str, Any]) -> Any:
        return request["inputs"]

    def batch(self, inputs: list[Any]) -> list[Any]:
        return list(inputs)

    def predict(self, texts: list[str]) -> Any:
        return self.encoder.encode(texts, show_progress_bar=False).tolist()

    def unbatch(self, output: Any) -> Any:
        return list(output)

    def encode_response(self, output: Any) -> Any:
        return [output]


def with_litserve(model: str, port: int) -> None:
    """LitServe over sentence-transformers: batches of at most 64 that wait 2 ms."""
    api = Api(max_batch_size=64, batch_timeout=0.002, api_path="/embed")
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(port=port, host="127.0.0.1", generate_client_file=False, log_level="error")


if __name__ == "__main__":
    {"sentence_fastapi": sentence_fastapi, "litserve": with_litserve}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
