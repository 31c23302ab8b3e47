"""What people serve an embedding model with instead, each as its manual says, one thread.

Run by `serving.py` in the peer's own environment (`python FILE NAME MODEL PORT`): only MLflow's needs torchlake there.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
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


def pipeline_fastapi(model: str, port: int) -> None:
    """transformers' pipeline in FastAPI, in the same way; a row's vector is the mean of its tokens'."""
    import torch
    import uvicorn
    from fastapi import FastAPI
    from transformers import pipeline

    encoder, app = pipeline("feature-extraction", model=model, device="cpu"), FastAPI()

    @app.post("/embed")
    def embed(body: dict[str, Any]) -> list[list[float]]:
        tokens = encoder(body["inputs"], return_tensors=True, truncation=True)
        vectors: list[list[float]] = torch.nn.functional.normalize(tokens.mean(dim=1)).tolist()
        return vectors

    uvicorn.run(app, port=port, log_level="error")


def infinity(model: str, port: int) -> None:
    """The command of infinity, with its defaults for a CPU, but fp32 and without its warm-up."""
    options = ["--engine", "torch", "--device", "cpu", "--dtype", "float32", "--served-model-name", "minilm"]
    command = ["infinity_emb", "v2", "--model-id", model, *options, "--no-model-warmup", "--log-level", "error"]
    environment = {**os.environ, "INFINITY_ANONYMOUS_USAGE_STATS": "0", "DO_NOT_TRACK": "1"}
    script = Path(sys.executable).with_name(command[0])
    os.execve(script, [*command, "--host", "127.0.0.1", "--port", str(port)], environment)


def mlflow(model: str, port: int) -> None:
    """MLflow's server of the model that `tl.log_model` writes."""
    folder = Path(tempfile.mkdtemp())
    write = "import mlflow, sys, torchlake; mlflow.set_tracking_uri(f'sqlite:///{sys.argv[2]}/store.db');"
    write += "mlflow.create_experiment('serving', artifact_location=f'{sys.argv[2]}/artifacts');"
    write += "mlflow.set_experiment('serving');"
    write += "torchlake.log_model(sys.argv[1])"
    subprocess.run([sys.executable, "-c", write, model, str(folder)], check=True)
    (written,) = folder.glob("artifacts/**/MLmodel")
    command = ["-m", "mlflow", "models", "serve", "-m", str(written.parent), "--env-manager", "local"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # it starts the program uvicorn
    os.execve(sys.executable, [sys.executable, *command, "--port", str(port)], {**os.environ, "PATH": path})


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
    servers = {each.__name__: each for each in (sentence_fastapi, pipeline_fastapi, infinity, mlflow)}
    {**servers, "litserve": with_litserve}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
