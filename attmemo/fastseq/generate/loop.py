"""The decoding loops: transformers' own semantics, over a `Stepper`, and finished samples leave the batch.

The rules of beam search (which continuations are kept, when a hypothesis is finished, when a sample can no longer
change) are transformers' own methods, called here, not written anew: ties and early stopping come out the same in
whatever version is installed. Where no scores tie, the best continuations are found in fewer passes (leading.py). What
is different is the order of rows in the batch, and how many there are.

Shapes: B samples, M beams, R = B·M rows, V vocabulary, P length of the decoder's prompt.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.generation import logits_process as stock
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.utils import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerationMode,
)

from attmemo.fastseq.generate.beam_cache import hole_filling
from attmemo.fastseq.generate.call_state import CallState
from attmemo.fastseq.generate.leading import NoEndYet, continuations, swap_length_processors
from attmemo.fastseq.generate.ngram import swap_ngram_processors
from attmemo.fastseq.generate.packed_stepper import make_stepper
from attmemo.fastseq.generate.refusal import Refusal

# Processors that look at each row by itself and remember nothing: rows may change places under them.
_ROWWISE = {
    getattr(stock, name)
    for name in (
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "TemperatureLogitsWarper",
        "RepetitionPenaltyLogitsProcessor",
        "TopPLogitsWarper",
        "TopKLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "NoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "LogitNormalization",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    )
    if hasattr(stock, name)
}
_BANNING = {NoEndYet} | {
    getattr(stock, name)
    for name in (
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
    )
    if hasattr(stock, name)
}
_CRITERIA = {EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria}


def decode(
    model: Any,
    state: CallState,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
) -> Any:
    """Run the loop the generation config asks for; arguments and result as those of transformers' own.

    Raises
    ------
    Refusal
        If the mode, or what is to be returned, is not covered.
    """
    mode = generation_config.get_generation_mode()
    if generation_config.output_attentions or generation_config.output_hidden_states:
        raise Refusal("attentions or hidden states were asked for")
    if generation_config.prefill_chunk_size is not None:
        raise Refusal("prefill_chunk_size")
    # In place of what `generate` made for this call, or kept apart from what the caller owns and may use again.
    in_place = not (generation_config.return_dict_in_generate and generation_config.output_logits)
    swap_ngram_processors(logits_processor, in_place=in_place)
    if in_place:
        swap_length_processors(logits_processor)
    for place, processor in enumerate(logits_processor):
        if hasattr(processor, "select_rows"):
            logits_processor[place] = copy(processor)
    arguments = (model, state, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    if mode in (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE):
        return _beam(*arguments)
    if mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return _sample(*arguments)
    raise Refusal(f"generation mode {mode.value}")


def _beam(
    model: Any,
    state: CallState,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    model_kwargs: dict[str, Any],
) -> Any:
    if config.low_memory:
        raise Refusal("low_memory")
    beams, max_length = config.num_beams, config.max_length
    eos = config._eos_token_tensor
    rows, prompt = input_ids.shape
    batch, length = rows // beams, prompt
    device = input_ids.device
    to_keep = max(2, 1 + (0 if eos is None else eos.shape[0])) * beams
    top_mask = torch.arange(to_keep, device=device) < beams
    recorder = _Recorder(config)
    leaving = _may_leave(logits_processor, stopping_criteria, config) and not recorder.records

    # The value is transformers' own expression, precedence included: the pad token only if there is an end token.
    pad = config._pad_token_tensor
    fill = pad or eos[0] if eos is not None else -1
    running = torch.full((batch, beams, max_length), fill_value=fill, dtype=torch.int64, device=device)
    running[:, :, :length] = input_ids.view(batch, beams, -1)
    sequences = running.clone()
    running_scores = torch.zeros((batch, beams), device=device)
    running_scores[:, 1:] = -1e9
    scores = torch.full((batch, beams), -1e9, device=device)
    finished = torch.zeros((batch, beams), dtype=torch.bool, device=device)
    open_ended = torch.ones((batch, 1), dtype=torch.bool, device=device)
    running_indices = torch.full((batch, beams, max_length - length), -1, dtype=torch.int32, device=device)
    indices = running_indices.clone()
    results = _Results(sequences, scores, indices)
    places = list(range(batch))  # which sample of the input each one of the batch is

    stepper = make_stepper(model, state, input_ids, beams, max_length - length, model_kwargs)
    logits = stepper.first(input_ids)
    flat = input_ids
    while True:
        count = len(places)
        log_probs = logits_processor(flat, F.log_softmax(logits, dim=-1))
        recorder.record(logits, log_probs)
        total = (log_probs.view(count, beams, -1) + running_scores[:, :, None]).view(count, -1)
        top_scores, top_sequences, top_indices = continuations(
            model,
            accumulated_log_probs=total,
            running_sequences=running,
            running_beam_indices=running_indices,
            cur_len=length,
            decoder_prompt_len=prompt,
            do_sample=config.do_sample,
            beams_to_keep=to_keep,
            num_beams=beams,
            batch_size=count,
        )
        stops = stopping_criteria(top_sequences[:, :, : length + 1].flatten(0, 1), recorder.scores)
        stops = stops.view(count, to_keep)
        running, running_scores, running_indices = model._get_running_beams_for_next_iteration(
            topk_log_probs=top_scores,
            topk_running_sequences=top_sequences,
            topk_running_beam_indices=top_indices,
            next_token_hits_stopping_criteria=stops,
            num_beams=beams,
        )
        sequences, scores, indices, finished = model._update_finished_beams(
            sequences=sequences,
            topk_running_sequences=top_sequences,
            beam_scores=scores,
            topk_log_probs=top_scores,
            beam_indices=indices,
            topk_running_beam_indices=top_indices,
            is_early_stop_heuristic_unsatisfied=open_ended,
            is_sent_finished=finished,
            next_token_hits_stopping_criteria=stops,
            top_num_beam_mask=top_mask,
            num_beams=beams,
            cur_len=length,
            decoder_prompt_len=prompt,
            length_penalty=config.length_penalty,
            early_stopping=config.early_stopping,
        )
        source = running_indices[..., length - prompt].flatten()
        length += 1
        open_ended = model._check_early_stop_heuristic(
            is_early_stop_heuristic_unsatisfied=open_ended,
            running_beam_scores=running_scores,
            beam_scores=scores,
            is_sent_finished=finished,
            cur_len=length,
            max_length=max_length,
            decoder_prompt_len=prompt,
            early_stopping=config.early_stopping,
            length_penalty=config.length_penalty,
        )
        if not model._beam_search_has_unfinished_sequences(open_ended, finished, stops, config.early_stopping):
            break
        stepper.move(source)
        if leaving:
            # A sample is closed when transformers would give every later hypothesis of it -1e9. All its hypotheses
            # must have a real score: among placeholders of -1e9 such a one would tie, and the winner could still
            # change.
            closed = finished.all(dim=-1) & (scores.min(dim=-1)[0] > -1e8)
            if config.early_stopping is not True:
                closed &= ~open_ended[:, 0]
            alive = (~closed).tolist()
            if not all(alive):
                order = hole_filling(alive)
                gone = [sample for sample, stays in enumerate(alive) if not stays]
                results.put(gone, [places[sample] for sample in gone], sequences, scores, indices)
                keep = torch.tensor(order, device=device)
                sequences, scores, indices, finished = (t[keep] for t in (sequences, scores, indices, finished))
                running, running_scores, running_indices = (
                    t[keep] for t in (running, running_scores, running_indices)
                )
                open_ended = open_ended[keep]
                _select_sources(logits_processor, keep)
                stepper.keep(order)
                places = [places[sample] for sample in order]
        flat = running[:, :, :length].flatten(0, 1)
        logits = stepper.next(flat)
    state.account()
    results.put(list(range(len(places))), places, sequences, scores, indices)
    return _beam_output(results, recorder, config, batch, prompt, bool(model.config.is_encoder_decoder))


def _beam_output(
    results: _Results, recorder: _Recorder, config: Any, batch: int, prompt: int, encoder_decoder: bool
) -> Any:
    wanted = config.num_return_sequences
    sequences = results.sequences[:, :wanted].flatten(0, 1)
    scores = results.scores[:, :wanted].flatten(0, 1)
    # Rows were numbered within the batch of their time; in the output they are those of the input.
    offset = torch.arange(batch, device=scores.device, dtype=torch.int32)[:, None, None] * config.num_beams
    indices = torch.where(results.indices >= 0, results.indices % config.num_beams + offset, -1)
    indices = indices[:, :wanted].flatten(0, 1)
    longest = (indices + 1).bool().sum(dim=1).max()
    sequences, indices = sequences[:, : prompt + longest], indices[:, :longest]
    if not config.return_dict_in_generate:
        return sequences
    kind = GenerateBeamEncoderDecoderOutput if encoder_decoder else GenerateBeamDecoderOnlyOutput
    return kind(
        sequences=sequences,
        sequences_scores=scores if config.output_scores else None,
        scores=recorder.scores,
        logits=recorder.logits,
        beam_indices=indices,
    )


def _sample(
    model: Any,
    state: CallState,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: Any,
    model_kwargs: dict[str, Any],
) -> Any:
    pad = config._pad_token_tensor
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    recorder = _Recorder(config)
    # Sampling draws for every row, finished or not: with a fixed seed the others' tokens depend on it.
    leaving = (
        has_eos
        and not config.do_sample
        and not recorder.records
        and _may_leave(logits_processor, stopping_criteria, config)
    )
    rows = input_ids.shape[0]
    rows_each = max(config.num_beams, config.num_return_sequences)
    unfinished = torch.ones(rows, dtype=torch.long, device=input_ids.device)
    places = list(range(rows))
    gone: dict[int, Tensor] = {}
    stepper = make_stepper(model, state, input_ids, rows_each, config.max_length - input_ids.shape[1], model_kwargs)
    stepper.wants_greatest = not config.do_sample and not recorder.records and all(map(_only_bans, logits_processor))
    logits = stepper.first(input_ids)
    while True:
        scores = logits_processor(input_ids, logits)
        recorder.record(logits, scores)
        if config.do_sample:
            tokens = torch.multinomial(F.softmax(scores, dim=-1), num_samples=1).squeeze(1)
        else:
            tokens = stepper.greatest(scores)
        if has_eos:
            tokens = tokens * unfinished + pad * (1 - unfinished)
        input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
        unfinished = unfinished & ~stopping_criteria(input_ids, recorder.scores)
        if unfinished.max() == 0:
            break
        if leaving and rows_each == 1 and not unfinished.all():
            alive = unfinished.bool().tolist()
            for sample, stays in enumerate(alive):
                if not stays:
                    gone[places[sample]] = input_ids[sample]
            order = hole_filling(alive)
            keep = torch.tensor(order, device=input_ids.device)
            input_ids, unfinished = input_ids[keep], unfinished[keep]
            _select_sources(logits_processor, keep)
            stepper.keep(order)
            places = [places[sample] for sample in order]
        logits = stepper.next(input_ids)
    state.account()
    if gone:
        whole = input_ids.new_full((rows, input_ids.shape[1]), int(pad))
        whole[torch.tensor(places, device=whole.device)] = input_ids
        for place, tokens in gone.items():
            whole[place, : len(tokens)] = tokens
        input_ids = whole
    if not config.return_dict_in_generate:
        return input_ids
    kind = GenerateEncoderDecoderOutput if model.config.is_encoder_decoder else GenerateDecoderOnlyOutput
    return kind(sequences=input_ids, scores=recorder.scores, logits=recorder.logits)


class _Results:
    """The hypotheses of samples that have left, and of the rest at the end, in the order of the input."""

    def __init__(self, sequences: Tensor, scores: Tensor, indices: Tensor) -> None:
        self.sequences, self.scores, self.indices = sequences.clone(), scores.clone(), indices.clone()

    def put(self, rows: list[int], places: list[int], sequences: Tensor, scores: Tensor, indices: Tensor) -> None:
        self.sequences[places] = sequences[rows]
        self.scores[places] = scores[rows]
        self.indices[places] = indices[rows]


class _Recorder:
    """Scores and logits of every step, if they were asked for."""

    def __init__(self, config: Any) -> None:
        asked = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if asked and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if asked and config.output_logits else None
        self.copies = config.num_beams > 1

    @property
    def records(self) -> bool:
        # Scores alone (of whole sequences) do not need the rows in place, but `scores` is returned with them.
        return self.scores is not None or self.logits is not None

    def record(self, logits: Tensor, scores: Tensor) -> None:
        if self.logits is not None:
            self.logits += (logits.clone() if self.copies else logits,)
        if self.scores is not None:
            self.scores += (scores.clone() if self.copies else scores,)


def _may_leave(processors: Any, criteria: Any, config: Any) -> bool:
    """Whether samples may leave and change places: no random draws, nothing that knows rows by their number."""
    return (
        not config.do_sample
        and all(_follows_rows(processor) for processor in processors)
        and all(type(criterion) in _CRITERIA for criterion in criteria)
    )


def _follows_rows(processor: object) -> bool:
    """Whether rows may change places under it: it knows none by its number, or can be told (`select_rows`)."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
        return False  # a repetition penalty over padded prompts has a number for each row
    return (
        type(processor) in _ROWWISE
        or type(processor) is NoEndYet
        or hasattr(processor, "select_rows")
        or type(processor).__module__ == "attmemo.fastseq.generate.ngram"
    )


def _only_bans(processor: object) -> bool:
    """Whether all it does is to set some scores to minus infinity, whatever the scores are."""
    return type(processor) in _BANNING or type(processor).__module__ == "attmemo.fastseq.generate.ngram"


def _select_sources(processors: Any, keep: Tensor) -> None:
    for processor in processors:
        if hasattr(processor, "select_rows"):
            processor.select_rows(keep)
