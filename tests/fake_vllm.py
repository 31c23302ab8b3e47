"""The parts of vLLM 0.33 that `vllm_server.py` uses, with their names and errors; texts are the prompts in reverse.

`install(folder)` makes an interpreter that has this as `vllm`: what is tested with it is the server file, not vLLM.
"""

import sys
from pathlib import Path

FILES = {
    "__init__.py": """
from vllm.engine import EngineArgs, LLMEngine
from vllm.sampling_params import SamplingParams
""",
    "engine.py": """
import dataclasses, json
from types import SimpleNamespace as N
from vllm.exceptions import VLLMClientError

@dataclasses.dataclass(kw_only=True)
class EngineArgs:
    model: str
    tokenizer: str
    load_format: str
    trust_remote_code: bool
    max_model_len: int
    tensor_parallel_size: int
    enable_prefix_caching: bool
    disable_log_stats: bool
    generation_config: str
    structured_outputs_config: object
    enable_lora: bool = False
    max_lora_rank: int = 16

class LLMEngine:
    @classmethod
    def from_engine_args(cls, args, usage_context):
        assert usage_context == "LLM_CLASS" and not args.trust_remote_code and args.load_format == "safetensors"
        assert args.structured_outputs_config.backend == "guidance"
        json.load(open(args.model + "/config.json"))
        self = cls()
        self.args, self.open = args, {}
        model = N(max_model_len=args.max_model_len, get_vocab_size=lambda: 1000)
        self.vllm_config = N(scheduler_config=N(max_num_seqs=4), model_config=model)
        return self

    def has_unfinished_requests(self):
        return bool(self.open)

    def add_request(self, request_id, prompt, params, lora_request=None):
        assert type(request_id) is str and prompt["type"] == "token"
        assert (lora_request is not None) == self.args.enable_lora
        if len(prompt["prompt_token_ids"]) >= self.args.max_model_len:
            raise VLLMClientError("the prompt is too long")
        self.open[request_id] = (prompt["prompt_token_ids"], params)

    def step(self):
        ended = []
        for name in list(self.open)[:2]:
            ids, params = self.open.pop(name)
            tokens, end = ids[::-1][: params.max_tokens], params.stop_token_ids[0]
            stopped = len(tokens) < params.max_tokens
            tokens += [end] if stopped else []
            logprobs = [{token: N(logprob=-0.25)} for token in tokens] if params.logprobs is not None else None
            one = N(token_ids=tokens, logprobs=logprobs, finish_reason="stop" if stopped else "length",
                    stop_reason=end if stopped else None)
            ended.append(N(request_id=name, finished=True, outputs=[one]))
        return [N(request_id="x", finished=False, outputs=[]), *ended]
""",
    "sampling_params.py": """
import dataclasses
from enum import Enum
from vllm.exceptions import VLLMClientError

class RequestOutputKind(Enum):
    CUMULATIVE, DELTA, FINAL_ONLY = 0, 1, 2

@dataclasses.dataclass(kw_only=True)
class StructuredOutputsParams:
    json: object = None
    regex: str = None
    grammar: str = None

@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    max_tokens: int
    temperature: float
    stop_token_ids: list
    ignore_eos: bool
    detokenize: bool
    output_kind: RequestOutputKind
    logprobs: int = None
    seed: int = None
    stop: list = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    structured_outputs: StructuredOutputsParams = None

    def __post_init__(self):
        if self.stop and not self.detokenize:
            raise VLLMClientError("stop strings need detokenize")
        if self.top_k == 13:
            raise VLLMClientError("top_k is 13")
""",
    "exceptions.py": "class VLLMClientError(Exception): pass",
    "inputs.py": "def tokens_input(ids): return {'type': 'token', 'prompt_token_ids': ids}",
    "config.py": """
import dataclasses
@dataclasses.dataclass(kw_only=True)
class StructuredOutputsConfig:
    backend: str
    disable_any_whitespace: bool
""",
    "lora/__init__.py": "",
    "lora/request.py": "def LoRARequest(name, number, path): return (name, number, path)",
    "usage/__init__.py": "",
    "usage/usage_lib.py": "class UsageContext: LLM_CLASS = 'LLM_CLASS'",
}


def install(folder: Path, package: str = "vllm") -> str:
    """Make a virtual environment without pip, with vLLM and the metadata of three packages, and return its Python."""
    import venv

    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name, content in FILES.items():
        path = site / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    for name, version in ((package, "0.33.0"), ("torch", "2.14.0"), ("transformers", "5.17.0")):
        (site / f"{name}-{version}.dist-info").mkdir()
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (site / f"{package}-0.33.0.dist-info" / "top_level.txt").write_text("vllm\n")
    return str(folder / "bin" / Path(sys.executable).name)
