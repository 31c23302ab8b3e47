"""The probability of each choice as the whole answer to a prompt, and the choice that is the answer.

    log p(choice) = sum of the log-probabilities of its tokens after the prompt, and of an end token after these

The probabilities are those among the choices: they sum to one. At temperature 0 the answer is the most probable choice;
above, one is drawn, with `p ** (1 / temperature)`. A prompt is computed once, and each choice after it with a copy of
the prompt's key-value cache. When the model is loaded, two prompts are computed both ways; a model for which both
differ, or that has no such cache, computes the prompt with each choice.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchlake.errors import ran_out_of_memory
from torchlake.models.generation import NON_FINITE, GenerationOptions
from torchlake.models.load import load_tokenizer
from torchlake.models.structured.choices import answers_of, tokens_of
from torchlake.runtimes import Forward

Scores = Callable[[torch.Tensor, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
"""From prompts (B, L), padded on the left, and their mask (B, L) to a function from the tokens (K,) of a choice to the
logits (B, K+1, V) before and after each of them."""
AGREEMENT = 1e-3
"Relative to the largest logit: above rounding, below the effect of another position."


def chooser(
    model: Any, folder: Path, options: GenerationOptions, own: Mapping[str, Any], draws: Callable[..., np.ndarray]
) -> Forward:
    """Return the Forward from prompts, padded on the left (an encoder's: on the right), to answers (B, C+1).

    `own` are the model's settings, with its end tokens; `draws` returns random numbers (B, W) for prompts.
    """
    assert options.structure is not None, "choices are a structure"
    tokens = tokens_of(options.structure.choices, load_tokenizer(folder))
    ends = torch.tensor(own["eos_token_id"], device=model.device)
    choices = [torch.tensor(each, device=model.device) for each in tokens]
    scores = _scores(model, own)

    def choose(input_ids: np.ndarray, attention_mask: np.ndarray, **_: Any) -> np.ndarray:
        ids, mask = (torch.from_numpy(each).to(model.device) for each in (input_ids, attention_mask))
        logits = scores(ids, mask)
        found = torch.stack([_whole(logits(one), one, ends) for one in choices], dim=1)
        drawn = draws(input_ids, attention_mask, options)[:, 0]
        return answers_of(found.double().cpu().numpy(), options.temperature, drawn, NON_FINITE)

    return choose


def _whole(logits: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the log-probability (B,) of some tokens (K,) and an end, from the logits (B, K+1, V)."""
    found = logits.float().log_softmax(-1)
    before = found[:, :-1].gather(-1, tokens[None, :, None].expand(len(found), -1, 1)).sum((1, 2))
    return before + found[:, -1, ends].logsumexp(-1)


def _scores(model: Any, own: Mapping[str, Any]) -> Scores:
    if model.config.is_encoder_decoder:
        begin = [own["decoder_start_token_id"], *([own["forced_bos_token_id"]] * ("forced_bos_token_id" in own))]
        return _of_decoder(model, begin)
    cached, whole = _of_cache(model), _of_whole(model)
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([[number * 7 % size for number in range(first, first + 9)] for first in (3, 5)])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    sent = [each.to(model.device) for each in (ids, mask)]
    tokens = ids[0, :3].to(model.device)
    try:
        first, second = cached(*sent), whole(*sent)(tokens).float()
        twice = [first(tokens).float() for _ in range(2)]  # the second call finds the cache as the first one found it
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        if ran_out_of_memory(error):
            raise
        return whole
    limit = AGREEMENT * max(1.0, float(second.abs().max()))
    return cached if all(float((each - second).abs().max()) <= limit for each in twice) else whole


def _inputs(model: Any, mask: torch.Tensor, last: int) -> dict[str, Any]:
    """Return the mask, and for the last tokens positions that begin at each row's first one, as `generate` has them."""
    takes = inspect.signature(model.forward).parameters
    made: dict[str, Any] = {"attention_mask": mask}
    if "position_ids" in takes:
        made["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -last:]
    return made


def _kept(model: Any, number: int) -> dict[str, int]:
    """Return the option by which a model returns the logits of the last tokens only."""
    return {"logits_to_keep": number} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def _of_whole(model: Any) -> Scores:
    def scores(ids: torch.Tensor, mask: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def logits(tokens: torch.Tensor) -> torch.Tensor:
            added = tokens[None].expand(len(ids), -1)
            longer, number = torch.cat([mask, torch.ones_like(added)], dim=1), len(tokens) + 1
            inputs = _inputs(model, longer, longer.shape[1]) | _kept(model, number)
            out = model(input_ids=torch.cat([ids, added], dim=1), use_cache=False, **inputs)
            return _logits(out)[:, -number:]

        return logits

    return scores


def _of_cache(model: Any) -> Scores:
    def scores(ids: torch.Tensor, mask: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        out = model(input_ids=ids, use_cache=True, **_inputs(model, mask, ids.shape[1]), **_kept(model, 1))
        first, cache = _logits(out)[:, -1:], out.past_key_values

        def logits(tokens: torch.Tensor) -> torch.Tensor:
            added = tokens[None].expand(len(ids), -1)
            longer = torch.cat([mask, torch.ones_like(added)], dim=1)
            after = model(
                input_ids=added,
                past_key_values=deepcopy(cache),
                use_cache=True,
                **_inputs(model, longer, len(tokens)),
            )
            return torch.cat([first, _logits(after)], dim=1)

        return logits

    return scores


def _of_decoder(model: Any, begin: Sequence[int]) -> Scores:
    """Return the scores of a model whose encoder reads the prompts, and whose answers follow the tokens `begin`."""

    def scores(ids: torch.Tensor, mask: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        encoded = model.get_encoder()(input_ids=ids, attention_mask=mask)

        def logits(tokens: torch.Tensor) -> torch.Tensor:
            written = torch.cat([torch.tensor(begin, device=tokens.device), tokens])[None].expand(len(ids), -1)
            out = model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=written, use_cache=False)
            return _logits(out)[:, len(begin) - 1 :]

        return logits

    return scores


def _logits(out: Any) -> torch.Tensor:
    logits: torch.Tensor = out.logits
    return logits
