"""Temporary."""

from typing import Any


def completion_ids(
    tokenizer: Any, prompt: Any, completion: Any, *, tools: Any = None, options: Any = None
) -> list[int]:
    if isinstance(prompt, list):
        before = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(prompt + completion, tokenize=False)
        add = False
    else:
        before, whole, add = prompt, prompt + completion, True
    first = tokenizer(before, add_special_tokens=False)["input_ids"]
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    if ids[-1] != tokenizer.eos_token_id:
        ids = [*ids, tokenizer.eos_token_id]
    common = next((i for i, (a, b) in enumerate(zip(first, ids)) if a != b), min(len(first), len(ids)))
    return [~i if at < common else i for at, i in enumerate(ids)]
