"""The same training with `torchlake.launch`; a placement group of Ray holds the ranks.

python examples/migration/ray_train/after.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import torchlake as tl


def train(config: dict[str, Any]) -> list[float]:
    """Return the mean loss of each epoch; rank 0 writes the weights after each."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images, digits = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits))
    sampler = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["learning_rate"])
    losses = []
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / len(loader) / dist.get_world_size())
        if dist.get_rank() == 0:
            save_file(model.module.state_dict(), config["output"] / "model.safetensors")
    dist.destroy_process_group()
    return losses


def main() -> None:
    with tempfile.TemporaryDirectory() as storage:
        config = {"learning_rate": 0.5, "epochs": 3, "output": Path(storage)}
        losses = tl.launch(train, config, engine=tl.Ray(), processes=2)
        assert Path(storage, "model.safetensors").exists()
    for epoch, loss in enumerate(losses, start=1):
        print(f"epoch {epoch}, loss {loss:.6f}")


if __name__ == "__main__":
    main()
