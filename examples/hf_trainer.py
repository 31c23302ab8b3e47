"""Fine-tune a text classifier with transformers' Trainer. Written for torchrun; nothing in it knows what starts it.

    torchrun --nproc-per-node 2 examples/hf_trainer.py MODEL TABLE OUTPUT
    torchlake launch examples/hf_trainer.py --processes 2 --engine spark -- MODEL TABLE OUTPUT

TABLE is Parquet with the columns text and label (strings). MODEL, TABLE and OUTPUT are paths that every rank reaches.
"""

import argparse

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="model folder to start from")
    parser.add_argument("table", help="Parquet file or folder")
    parser.add_argument("output", help="folder for the trained model")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of one step on one rank")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    args = parser.parse_args()
    set_seed(0)

    rows = pq.read_table(args.table, columns=["text", "label"]).to_pylist()
    labels = sorted({row["label"] for row in rows})
    numbers = {label: number for number, label in enumerate(labels)}
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model, id2label=dict(enumerate(labels)), label2id=numbers
    )

    def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
        tokens = tokenizer([row["text"] for row in batch], truncation=True, padding=True, return_tensors="pt")
        return {**tokens, "labels": torch.tensor([numbers[row["label"]] for row in batch])}

    on_cpu = not torch.cuda.is_available()
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=args.output,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            use_cpu=on_cpu,
            ddp_backend="gloo" if on_cpu else "nccl",
            ddp_find_unused_parameters=False,
            dataloader_pin_memory=not on_cpu,
            remove_unused_columns=False,  # collate reads them
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=collate,
    )
    # The Trainer has read RANK, WORLD_SIZE and the others by now: each rank gets its share of every batch.
    result = trainer.train()
    if trainer.is_world_process_zero():
        trainer.model.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
        print(f"{trainer.args.world_size} ranks, {result.global_step} steps, loss {result.training_loss:.3f}")
    if trainer.args.world_size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
