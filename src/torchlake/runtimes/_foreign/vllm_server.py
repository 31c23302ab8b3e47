"""vLLM as a server of `protocol.py`; runs under an interpreter that has vLLM, and imports nothing of torchlake.

Made for vLLM 0.33: EngineArgs, LLMEngine.add_request and step, SamplingParams, RequestOutput, LoRARequest. Prompts come
as token ids; texts are needed for stop strings only.
"""

import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

_spec = importlib.util.spec_from_file_location("torchlake_protocol", Path(__file__).with_name("protocol.py"))
assert _spec is not None
assert _spec.loader is not None
protocol = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(protocol)

BACKEND = "guidance"
"llguidance, as in torchlake, so that a schema means the same; without spaces, which a model may write forever."


def versions(imported: bool) -> dict[str, str]:
    """Return the versions, and whether texts depend on their neighbors."""
    found = {"vllm": importlib.metadata.version(_distribution())}
    found |= {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    found["batch_invariant"] = os.environ.get("VLLM_BATCH_INVARIANT", "0")
    if imported:
        import torch
        import vllm  # noqa: F401

        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found["devices"] = ", ".join(names) or "cpu"
    return found


def _distribution() -> str:
    """Return the name of the package that vLLM was installed from: builds for CPUs have names of their own."""
    if importlib.util.find_spec("vllm") is None or any(importlib.metadata.distributions(name="vllm")):
        return "vllm"
    return importlib.metadata.packages_distributions()["vllm"][0]  # half a second: it reads what each package has


class VllmEngine:
    """vLLM's engine, with the model of `hello`."""

    def __init__(self, hello: dict[str, Any]) -> None:
        from vllm import EngineArgs, LLMEngine
        from vllm.config import StructuredOutputsConfig
        from vllm.lora.request import LoRARequest
        from vllm.usage.usage_lib import UsageContext

        adapter = hello["adapter"]
        lora = {"enable_lora": True, "max_lora_rank": adapter["rank"]} if adapter else {}
        args = EngineArgs(
            model=hello["model"],
            tokenizer=hello["tokenizer"],
            load_format="safetensors",
            trust_remote_code=False,
            max_model_len=hello["length"],
            tensor_parallel_size=hello["devices"],
            enable_prefix_caching=True,
            disable_log_stats=True,
            generation_config="vllm",
            structured_outputs_config=StructuredOutputsConfig(backend=BACKEND, disable_any_whitespace=True),
            **lora,
        )
        self._engine = LLMEngine.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
        self._adapter = LoRARequest("adapter", 1, adapter["path"]) if adapter else None
        config = self._engine.vllm_config
        self.versions = versions(False)
        # Twice what it computes at once, so that none of its places waits for torchlake.
        self.limits = {
            "open": 2 * config.scheduler_config.max_num_seqs,
            "length": config.model_config.max_model_len,
            "vocabulary": config.model_config.get_vocab_size(),
        }

    @property
    def busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def add(self, row: int, ids: list[int], options: dict[str, Any]) -> None:
        """Take a row. Raises ValueError if vLLM refuses it."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        structure = options.pop("structured_outputs", None)
        # The ends are those of torchlake, as stop_token_ids.
        own = {"ignore_eos": True, "detokenize": bool(options.get("stop")), "output_kind": RequestOutputKind.FINAL_ONLY}
        try:
            if structure is not None:
                options["structured_outputs"] = StructuredOutputsParams(**structure)
            params = SamplingParams(**options, **own)
            self._engine.add_request(str(row), tokens_input(ids), params, lora_request=self._adapter)
        except VLLMClientError as error:
            raise ValueError(str(error)) from error

    def step(self) -> list[tuple[int, str, list[int], list[float]]]:
        """Compute a step, and return the rows that have ended."""
        return [self._ended(one) for one in self._engine.step() if one.finished]

    def _ended(self, output: Any) -> tuple[int, str, list[int], list[float]]:
        (one,) = output.outputs
        row, ids = int(output.request_id), list(one.token_ids)
        if one.finish_reason not in ("stop", "length"):
            return row, f"failed: vLLM ended the request: {one.finish_reason}", [], []
        reason = one.finish_reason
        if reason == "stop" and not isinstance(one.stop_reason, str):
            reason = "end"
        chosen = zip(ids, one.logprobs or (), strict=False)
        return row, reason, ids, [float(at[token].logprob) for token, at in chosen]


if __name__ == "__main__":
    protocol.serve(VllmEngine, versions)
