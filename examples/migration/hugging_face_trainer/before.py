"""transformers' Trainer: a text classifier on two processes.

    torchrun --nproc-per-node 2 examples/migration/hugging_face_trainer/before.py MODEL TABLE OUTPUT

TABLE is Parquet with the columns text and label (strings). MODEL is a folder with a classifier of these labels.
"""

import argparse

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("table")
    parser.add_argument("output")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of one step, over all ranks")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    args = parser.parse_args()

    on_cpu = not torch.cuda.is_available()
    settings = TrainingArguments(
        output_dir=args.output,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=1,  # set below: the number of ranks is known only then
        learning_rate=args.learning_rate,
        weight_decay=0.01,
        warmup_steps=0,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else "nccl",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=not on_cpu,
        remove_unused_columns=False,  # collate reads them
        # transformers 5.23 multiplies the mean of a rank's rows by the number of ranks otherwise.
        average_tokens_across_devices=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    settings.per_device_train_batch_size = args.batch_size // settings.world_size

    rows = pq.read_table(args.table, columns=["text", "label"]).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model)

    def collate(batch: list[dict]) -> dict[str, torch.Tensor]:
        tokens = tokenizer([row["text"] for row in batch], truncation=True, padding=True, return_tensors="pt")
        return {**tokens, "labels": torch.tensor([model.config.label2id[row["label"]] for row in batch])}

    trainer = Trainer(model, settings, train_dataset=rows, data_collator=collate)
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(args.output)
        tokenizer.save_pretrained(args.output)
        for line in trainer.state.log_history:
            if "loss" in line:
                print(f"step {line['step']}, loss {line['loss']:.6f}", flush=True)
    if settings.world_size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
