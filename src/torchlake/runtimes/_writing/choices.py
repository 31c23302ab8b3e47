"""The probability of each choice as the whole answer to a prompt, and the choice that is the answer.

    log p(choice) = sum of the log-probabilities of its tokens after the prompt, and of an end token after these

The probabilities are those among the choices: they sum to one. At temperature 0 the answer is the most probable choice;
above, one is drawn, with `p ** (1 / temperature)`. A prompt is computed once, and each choice after it with a copy of
the prompt's key-value cache. When the model is loaded, two prompts are computed with and without it; a model for
which both differ, or that has no such cache, computes the prompt with each choice.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchlake.errors import ran_out_of_memory
from torchlake.models.generation import NON_FINITE, GenerationOptions, settings_for, start_token
from torchlake.models.structured.choices import answer_of, tokens_of
from torchlake.runtimes import EMPTY, Ended, Report, Text
from torchlake.runtimes._writing.row import draws
from torchlake.runtimes._writing.static import AGREEMENT, padded

Scores = Callable[[torch.Tensor, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
"""From prompts (B, L), padded on the left, and their mask (B, L) to a function from the tokens (K,) of a choice to the
logits (B, K+1, V) before and after each of them."""


class ChoicesWriter:
    """A Writer whose answers are choices, as in `models/structured/choices.py`; a step answers all of its rows."""

    refills = False

    def __init__(self, model: Any, folder: Path, options: GenerationOptions) -> None:
        assert options.structure is not None, "choices are a structure"
        tokenizer, own = settings_for(folder, options)
        choices = tokens_of(options.structure.choices, tokenizer)
        self._device, self._pad_id = model.device, tokenizer.pad_token_id
        self._choices = [torch.tensor(each, device=model.device) for each in choices]
        self._ends = torch.tensor(own["eos_token_id"], device=model.device)
        self._apart = bool(model.config.is_encoder_decoder)
        self._rows: dict[int, tuple[np.ndarray, GenerationOptions]] = {}
        begin = [start_token(folder, model.config)] if self._apart else []
        begin += [own["forced_bos_token_id"]] if "forced_bos_token_id" in own else []
        with torch.inference_mode():
            self._scores, self._one_length = (_of_decoder(model, begin), False) if self._apart else _checked(model)

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows that have no answer."""
        return list(self._rows)

    def add(self, row: int, ids: np.ndarray, options: GenerationOptions, begun: Text = EMPTY) -> None:
        """Take a row."""
        self._rows[row] = ids, options

    def text(self, row: int) -> Text:
        """Return nothing: an answer is complete, or not begun."""
        return EMPTY

    def step(self, report: Report) -> None:
        """Answer the rows, or those of one length if padding before a prompt changes what follows."""
        try:
            first = len(next(iter(self._rows.values()))[0])
            some = {row: own for row, own in self._rows.items() if not self._one_length or len(own[0]) == first}
            ended = self._answer(some, report)
            for row in some:
                del self._rows[row]
            report(ended)
        except BaseException:
            self._rows.clear()
            raise

    def _answer(self, rows: Mapping[int, tuple[np.ndarray, GenerationOptions]], report: Report) -> list[Ended]:
        prompts = [ids for ids, _ in rows.values()]
        sent = padded(prompts, self._pad_id, left=not self._apart)
        ids, mask = (torch.from_numpy(each).to(self._device) for each in sent)
        with torch.inference_mode():
            logits = self._scores(ids, mask)
            each = []
            for one in self._choices:
                each.append(_whole(logits(one), one, self._ends))
                report([])  # the rows advance
            found = torch.stack(each, dim=1).double().cpu().numpy()
        ended = []
        for (row, (prompt, options)), scores in zip(rows.items(), found, strict=True):
            answer = np.array([NON_FINITE], np.int32)
            if np.isfinite(scores).all():
                drawn = draws(prompt, options)[0] if options.temperature else 0.0
                answer = answer_of(scores, options.temperature, drawn)
            ended.append(Ended(row=row, text=Text(tokens=answer), reason="stop"))
        return ended


def _whole(logits: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the log-probability (B,) of some tokens (K,) and an end, from the logits (B, K+1, V)."""
    found = logits.float().log_softmax(-1)
    before = found[:, :-1].gather(-1, tokens[None, :, None].expand(len(found), -1, 1)).sum((1, 2))
    return before + found[:, -1, ends].logsumexp(-1)


def _checked(model: Any) -> tuple[Scores, bool]:
    """Return the scores of a decoder, and whether padding before a prompt changes them."""
    cached, whole = _of_cache(model), _of_whole(model)
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.tensor([[number * 7 % size for number in range(first, first + 9)] for first in (3, 5)])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ids, mask, tokens = (each.to(model.device) for each in (ids, mask, ids[0, :3]))
    wanted = torch.cat([whole(ids[:1, 4:], mask[:1, 4:])(tokens), whole(ids[1:], mask[1:])(tokens)]).float()
    limit = AGREEMENT[model.dtype] * max(1.0, float(wanted.abs().max()))

    def agrees(scores: Scores, *rows: slice) -> bool:
        try:
            found = []
            for some, start in zip(rows, (4, 0) if len(rows) > 1 else (0,), strict=True):
                after = scores(ids[some, start:], mask[some, start:])
                after(tokens)  # the second call has to find the cache as the first one did
                found.append(after(tokens).float())
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
            if ran_out_of_memory(error):
                raise
            return False
        return float((torch.cat(found) - wanted).abs().max()) <= limit

    both, each = (slice(0, 2),), (slice(0, 1), slice(1, 2))
    ways = ((cached, both), (whole, both), (cached, each))
    found = next(((scores, rows is each) for scores, rows in ways if agrees(scores, *rows)), None)
    return found or (whole, True)


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
    """Return the scores of a model whose encoder reads the prompts, and whose answers follow tokens of their own."""

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
