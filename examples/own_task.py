"""A task of your own: the words of a review and two columns of numbers predict a price, with a Huber loss."""

import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch

import torchlake as tl
from torchlake.tasks import NUMBER, TEXT, load_encoder


class Fused(torch.nn.Module):
    def __init__(self, encoder, columns):
        super().__init__()
        self.encoder, self.config = encoder, encoder.config
        self.head = torch.nn.Linear(encoder.config.hidden_size + columns, 1)

    def forward(self, input_ids, attention_mask, numbers):
        first = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        return self.head(torch.cat([first, numbers.to(first.dtype)], dim=1))


class ReviewPrice(tl.Task):
    inputs = {"text": TEXT, "numbers": NUMBER}

    def feature_types(self, spec):
        return {**super().feature_types(spec), "numbers": pa.list_(pa.float32(), len(spec.inputs["numbers"]))}

    def features(self, inputs, processor, spec):
        made = super().features(inputs, processor, spec)
        return replace(made, arrays={**made.arrays, "numbers": inputs["numbers"]})

    def build(self, folder, spec, *, weights):
        return Fused(load_encoder(folder, weights=weights), len(spec.inputs["numbers"]))

    def loss_sum(self, outputs, targets, spec, objective):
        wanted = (targets - spec.mean) / spec.deviation  # predictions are scaled back
        return torch.nn.functional.huber_loss(outputs.float().squeeze(-1), wanted, reduction="sum")


def books(rows, seed):
    random = np.random.default_rng(seed)
    good, age, pages = random.integers(0, 2, rows), random.integers(0, 30, rows), 8 * random.random(rows)
    texts = [f"a {'great' if one else 'dull'} book about {random.choice(['cats', 'rain', 'war'])}" for one in good]
    price = 10 + 5 * good + 0.5 * pages - 0.1 * age + random.normal(0, 0.2, rows)
    return pa.table({"text": texts, "age": age, "pages": pages, "price": price})


if __name__ == "__main__":
    model, folder = sys.argv[1:]
    recipe = {"epochs": 6, "batch_size": 16, "learning_rate": 1e-3}
    job = {"model": {"base": model}, "train": recipe, "engine": tl.Local(processes=2)}
    data = {"train": books(1000, seed=0), "label": "price", "problem": "regression"}
    tl.train(run=f"{folder}/text", data=data, **job)
    tl.train(run=f"{folder}/both", data={**data, "inputs": {"numbers": ["age", "pages"]}}, task=ReviewPrice(), **job)
    tl.predict(f"{folder}/both", books(300, seed=1), f"{folder}/scored", task=ReviewPrice())
    for run, task in (("text", None), ("both", ReviewPrice())):
        print(run, tl.evaluate(f"{folder}/{run}", books(300, seed=1), task=task).metrics["rmse"].value)
