"""The training of images.py written by hand, for torchrun: DistributedDataParallel, a DataLoader, torch's BatchNorm.

`_images_ddp.py MODEL TRAIN TEST EPOCHS BATCH RATE`; rank 0 prints the seconds of each epoch and the accuracy as JSON.
Each rank normalizes by its own rows, as DistributedDataParallel does unless one asks for SyncBatchNorm (GPUs only).
"""

import json
import os
import sys
import time
from typing import Any

import pyarrow.parquet as pq
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoImageProcessor, AutoModelForImageClassification, get_linear_schedule_with_warmup


class Images(Dataset):  # type: ignore[type-arg]
    def __init__(self, table: str, processor: Any) -> None:
        self.rows, self.processor = pq.read_table(table).to_pydict(), processor

    def __len__(self) -> int:
        return len(self.rows["image"])

    def __getitem__(self, row: int) -> Any:
        image = Image.open(self.rows["image"][row]).convert("RGB")
        return self.processor(image, return_tensors="pt")["pixel_values"][0], self.rows["label"][row]


def main() -> None:
    folder, train, test, *numbers = sys.argv[1:]
    epochs, batch, rate = int(numbers[0]), int(numbers[1]), float(numbers[2])
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    processor = AutoImageProcessor.from_pretrained(folder)
    model = AutoModelForImageClassification.from_pretrained(folder, num_labels=10).train()
    parallel: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    images = Images(train, processor)
    sampler = DistributedSampler(images, shuffle=True)
    loader = DataLoader(images, batch_size=batch // ranks, sampler=sampler, num_workers=1)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    steps = epochs * len(loader)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    spent = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        began = time.monotonic()
        for pixels, labels in loader:
            torch.nn.functional.cross_entropy(parallel(pixel_values=pixels).logits, labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        spent.append(time.monotonic() - began)
    if rank == 0:
        model.eval()
        with torch.inference_mode():
            found = [
                model(pixel_values=pixels).logits.argmax(-1) == labels
                for pixels, labels in DataLoader(Images(test, processor), batch_size=batch)
            ]
        print(json.dumps({"epochs_s": spent, "accuracy": float(torch.cat(found).float().mean())}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
