"""Ray Train's TorchTrainer: a function as two workers.

python examples/migration/ray_train/before.py
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    images, digits = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits))
    loader = ray.train.torch.prepare_data_loader(DataLoader(rows, batch_size=64, shuffle=True))
    model = ray.train.torch.prepare_model(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["learning_rate"])
    context = ray.train.get_context()
    for epoch in range(config["epochs"]):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        total = torch.zeros(())
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        metrics = {"loss": total.item() / len(loader) / context.get_world_size()}
        with tempfile.TemporaryDirectory() as folder:
            if context.get_world_rank() == 0:
                torch.save(model.module.state_dict(), os.path.join(folder, "model.pt"))
                ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
            else:
                ray.train.report(metrics)


def main() -> None:
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train,
            train_loop_config={"learning_rate": 0.5, "epochs": 3},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(storage_path=storage),
        )
        result = trainer.fit()
        assert Path(result.checkpoint.path, "model.pt").exists()
    for epoch, loss in enumerate(result.metrics_dataframe["loss"], start=1):
        print(f"epoch {epoch}, loss {loss:.6f}")


if __name__ == "__main__":
    main()
