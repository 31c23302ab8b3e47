"""The stock transformers model, op by op, in fp32: the reference that every other runtime must agree with.

Two things keep it fast without touching its mathematics: `torch.inference_mode` (no autograd bookkeeping) and no
attention mask where a batch has no padding, so that scaled dot-product attention may take its unmasked kernel.
"""

from pathlib import Path

import numpy as np

from torchlake import models, plugins
from torchlake.runtimes import Forward
from torchlake.task_spec import TaskSpec

TOLERANCE = 0.0
never: dict[str, str] = {}


def load(folder: Path, spec: TaskSpec, *, device: str) -> Forward:
    """The model of `folder` on `device` ("cpu", "cuda"), ready to score. Raises as `models.load_model` does."""
    # Here, not above: the process that plans a job reads this file's declarations and never runs a model.
    import torch

    model = models.load_model(folder, spec, auto_class=plugins.load("tasks", spec.task).AUTO_CLASS)
    torch.nn.Module.to(model, device)

    def forward(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        mask = None if attention_mask.all() else torch.from_numpy(attention_mask).to(device)
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(input_ids).to(device), attention_mask=mask).logits
        scores: np.ndarray = logits.float().cpu().numpy()
        return scores

    return forward
