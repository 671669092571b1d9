"""Texts in, texts out: tokenization ahead, generation here, detokenization behind.

FastSeq (arXiv 2106.04718), section 4.3: while one batch is generated, the next batch is tokenized and the last batch
is decoded. Generation stays in the caller's thread: Ctrl-C arrives there, and torch's settings are the caller's. Pure
functions run beside it in threads (`map_ahead`); every queue is bounded. An error of any stage ends the run and is
raised unchanged.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from attmemo.errors import AttmemoError, UnsupportedModelError
from attmemo.fastseq.generate.shape import Mode, ModelShape
from attmemo.fastseq.pipeline.generation_settings import GenerationSettings
from attmemo.fastseq.pipeline.journal import Journal
from attmemo.fastseq.pipeline.lines import count_lines, read_lines
from attmemo.fastseq.pipeline.map_ahead import map_ahead
from attmemo.fastseq.pipeline.model_properties import attribute, digest, tokenizer_name
from attmemo.fastseq.pipeline.planner import BatchPlanner, Guard, is_out_of_memory
from attmemo.fastseq.pipeline.result import Result, Summary
from attmemo.fastseq.pipeline.tokenizing import Batch, Copies, Encoder, Padding, Window, with_padding

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many are done, and how many there are."""

_BEHIND = 2  # batches that may wait for being turned into text


class Pipeline:
    """Generate for many texts.

    Parameters
    ----------
    model : object with ``generate``
        A transformers model, or one wrapped by `attmemo.fastseq.wrap`.
    tokenizer : PreTrainedTokenizerBase
    batch : int or "auto"
        Texts in a batch; ``"auto"``: the most that fit, by length (`attmemo.fastseq.pipeline.planner`).
    window : int
        Texts that are read, sorted by length and then generated. No output of a window can come before its longest
        texts are done; it is also all that is in memory.
    buckets : bool
        Sort within the window. Which texts share a batch then changes, and with it their padding, on which
        transformers' results depend as little or as much as ever; False gives the batches of a plain loop.
    prefix : str
        Put before every text (T5's ``"summarize: "``).
    max_source : int, optional
        Cut texts to so many tokens. Default: what tokenizer and model take.
    truncate : bool
        False: a text longer than the model's positions is an error.
    padding, padding_side
        As the tokenizer's. Default side: left for decoders, else the tokenizer's.
    new_only : bool
        Of decoders, give what was generated without the prompt.
    keep_special : bool
        Leave special tokens in the texts.
    clean_up : bool, optional
        ``clean_up_tokenization_spaces``.
    encoders, decoders : int
        Threads that tokenize, and that turn tokens into text.
    seed : int, optional
        Seed of every batch, with the number of its first row: a resumed run samples what it would have sampled,
        unless memory ran out on the way: a batch that was halved then is not halved again.
    mode : {"stock", "shared", "el"}, optional
        How the model keeps the source's states, for the planner. Default: what the model says, by a method
        ``cache_mode_for`` of the arguments of ``generate`` or in an attribute ``cache_mode``; else the one that takes
        most, ``"stock"``.
    config, device
        Of the model, where it has no such attributes.
    progress : callable, optional
    **generation
        Arguments of ``generate``, the same for all texts.

    Raises
    ------
    UnsupportedModelError
        The model cannot generate.
    AttmemoError
        An argument makes no sense.

    Examples
    --------
    ::

        pipeline = Pipeline(model, tokenizer, num_beams=4, max_new_tokens=60)
        for text in pipeline(lines):
            ...
        summary = pipeline.run("input.txt", "output.txt")
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch: int | Literal["auto"] = "auto",
        window: int = 512,
        buckets: bool = True,
        prefix: str = "",
        max_source: int | None = None,
        truncate: bool = True,
        padding: Padding = "longest",
        padding_side: Literal["left", "right"] | None = None,
        new_only: bool = True,
        keep_special: bool = False,
        clean_up: bool | None = None,
        encoders: int = 2,
        decoders: int = 1,
        seed: int | None = None,
        mode: Mode | None = None,
        config: Any = None,
        device: torch.device | str | None = None,
        progress: Progress | None = None,
        **generation: Any,
    ) -> None:
        if not callable(getattr(model, "generate", None)):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no generate: it cannot make texts.",
                "give a model for text generation, such as AutoModelForSeq2SeqLM loads",
            )
        if batch != "auto" and (not isinstance(batch, int) or batch < 1):
            raise AttmemoError(f"batch {batch!r}: expected a number of texts, or 'auto'.", "batch=8")
        if window < 1 or encoders < 1 or decoders < 1:
            raise AttmemoError("window, encoders and decoders are at least 1.", "leave them out")
        self.model = model
        self.tokenizer = with_padding(tokenizer)
        self._tokenizers = Copies(self.tokenizer)
        self.config = config if config is not None else attribute(model, "config")
        if self.config is None:
            raise AttmemoError(f"{type(model).__name__} has no config.", "hand it over: config=model.config")
        self.device = torch.device(device if device is not None else attribute(model, "device") or "cpu")
        self.causal = not bool(getattr(self.config, "is_encoder_decoder", False))
        self.generation = {name: value for name, value in generation.items() if value is not None}
        if self.causal:
            self.generation.setdefault("pad_token_id", self.tokenizer.pad_token_id)
        self._settings = GenerationSettings(model, self.config, self.generation)
        self.batch = batch
        self.window = window
        self.planner = self._planner(mode) if batch == "auto" else None
        self.limit = self._settings.source_limit(max_source, self.tokenizer, truncate)
        self._options: dict[str, Any] = {
            "prefix": prefix,
            "limit": self.limit,
            "truncate": truncate,
            "buckets": buckets,
            "padding": padding,
            "side": padding_side or ("left" if self.causal else tokenizer.padding_side),
        }
        if padding == "max_length" and self.limit is None:
            raise AttmemoError(
                "padding to the greatest length, and there is none.", "give max_source, or padding='longest'"
            )
        self._new_only, self._keep_special, self._clean_up = new_only, keep_special, clean_up
        self._encoders, self._decoders, self._seed = encoders, decoders, seed
        self._progress = progress or (lambda what, done, total: None)
        self._returned = int(self._settings.get("num_return_sequences", 1))
        self._scored = bool(self.generation.get("output_scores"))
        if self._scored:
            if self._settings.get("num_beams", 1) < 2:
                raise AttmemoError("only beam search gives scores of sequences.", "num_beams=4, or no scores")
            self.generation["return_dict_in_generate"] = True

    def __call__(self, texts: Iterable[str]) -> Iterator[Any]:
        """Generate, one after another, in the order of the input.

        Yields
        ------
        str, or with ``num_return_sequences`` above 1 a list of str, for each text; ``""`` for a blank one.
        """
        for result in self.results(texts):
            yield result.texts[0] if self._returned == 1 else result.texts

    def results(self, texts: Iterable[str]) -> Iterator[Result]:
        """Generate, in the order of the input, with everything that is known of each text."""
        waiting: dict[int, Result] = {}
        row = 0
        for results in self._batches(texts, (), Summary()):
            waiting.update((result.row, result) for result in results)
            while row in waiting:
                yield waiting.pop(row)
                row += 1

    def run(
        self,
        source: str | Path,
        output: str | Path,
        *,
        limit: int | None = None,
        resume: bool = True,
        identity: Mapping[str, Any] | None = None,
    ) -> Summary:
        """Generate a line of output for every line of a file.

        An interrupted run leaves ``OUTPUT.part``; the same call goes on with it. OUTPUT appears when it is whole.

        Parameters
        ----------
        source : path
            UTF-8, a text a line.
        output : path
            Replaced at the end, if it is there.
        limit : int, optional
            Only the first lines.
        resume : bool
            False: begin anew.
        identity : mapping, optional
            What else decides the output; a run that was interrupted under another is refused.

        Raises
        ------
        DataError
            The input is missing, empty, or not UTF-8.
        JournalError
            What was left cannot be gone on with.
        """
        source, output = Path(source), Path(output)
        begin = time.perf_counter()
        lines, digest = count_lines(source, limit)
        made_from = {"input": digest, "lines": lines, **self._identity(), **(identity or {})}
        notes = {} if self.planner is None else {"free": self.planner.free}
        with Journal(output, made_from, resume=resume, notes=notes) as journal:
            noted = journal.notes.get("free")
            if self.planner is not None and noted and (self._fixed or noted <= 1.25 * self.planner.free):
                self.planner.free = noted  # the same batches as then, unless much less is free now
            summary = Summary(lines=lines, resumed=len(journal))
            self._progress("generating", len(journal), lines)
            texts = islice(read_lines(source), limit)
            for results in self._batches(texts, journal.done, summary):
                journal.append([result.row for result in results], [result.line for result in results])
                self._progress("generating", len(journal), lines)
            journal.finish(lines)
        summary.seconds = time.perf_counter() - begin
        return summary

    def _batches(self, texts: Iterable[str], done: Container[int], summary: Summary) -> Iterator[list[Result]]:
        """Results of each batch as soon as it is text, in whatever order; rows that are done already are left out."""
        encode = Encoder(self._tokenizers, self._size, **self._options)
        windows = map_ahead(encode, _windows(texts, self.window), workers=self._encoders)
        pool = ThreadPoolExecutor(self._decoders, thread_name_prefix="behind")
        guard = Guard()
        behind: deque[Future[list[Result]]] = deque()
        clock = _Clock(summary.stages)
        failure: BaseException | None = None
        try:
            try:
                while (window := clock.time("waiting for texts", next, windows, None)) is not None:
                    for batch in self._left(window, done, summary):
                        for part, sequences, scores in self._generate(batch, guard, clock, summary):
                            behind.append(pool.submit(self._decode, part, sequences, scores))
                            while behind and (behind[0].done() or len(behind) > _BEHIND):
                                results = clock.time("waiting for words", behind[0].result)
                                behind.popleft()
                                yield results
                    # Last: a run whose first batch fails has done nothing, and leaves nothing.
                    yield from self._blanks(window, done, summary)
            except GeneratorExit:
                raise
            except BaseException as error:  # what is generated is not thrown away, even on Ctrl-C
                failure = error
            while behind:
                try:
                    results = behind.popleft().result()
                except BaseException as error:
                    raise failure or error from None
                yield results
            if failure is not None:
                raise failure
        finally:
            summary.halvings = guard.halvings
            windows.close()  # type: ignore[attr-defined]
            pool.shutdown(wait=False, cancel_futures=True)

    def _blanks(self, window: Window, done: Container[int], summary: Summary) -> Iterator[list[Result]]:
        summary.blank += len(window.blank)
        if found := [Result(row, [""] * self._returned, blank=True) for row in window.blank if row not in done]:
            yield found

    def _left(self, window: Window, done: Container[int], summary: Summary) -> Iterator[Batch]:
        """The window's batches without the rows that are done."""
        for batch in window.batches:
            summary.truncated += sum(batch.truncated)
            left = [place for place, row in enumerate(batch.rows) if row not in done]
            if left:
                yield batch if len(left) == len(batch) else batch.take(left)

    def _generate(
        self, batch: Batch, guard: Guard, clock: _Clock, summary: Summary
    ) -> Iterator[tuple[Batch, Tensor, list[float] | None]]:
        """Sequences ``[B * R, T]`` of a batch, or of its parts if memory ran out."""
        parts = deque([batch])
        while parts:
            part = parts.popleft()
            tokens = part.ids.shape[1] + self._settings.new_tokens(part.ids.shape[1])
            fits = guard.allowed(tokens)
            if len(part) > fits:
                parts.extendleft(
                    reversed([part.take(range(i, min(i + fits, len(part)))) for i in range(0, len(part), fits)])
                )
                continue
            outcome = clock.time("generating", self._try, part)
            if outcome is None:
                if len(part) == 1:
                    raise AttmemoError(
                        f"line {part.rows[0] + 1:,}: memory ran out for one text of {part.ids.shape[1]:,} tokens.",
                        "fewer beams (--num-beams), shorter texts (--max-tokenizer-length), or a smaller model",
                    )
                guard.failed(len(part), tokens)
                parts.appendleft(part)
                continue
            summary.batches += 1
            summary.generated += len(part)
            summary.largest_batch = max(summary.largest_batch, len(part))
            yield part, *outcome

    def _try(self, batch: Batch) -> tuple[Tensor, list[float] | None] | None:
        """Sequences and scores; None if memory ran out."""
        try:
            gpus = range(torch.cuda.device_count()) if self.device.type == "cuda" else ()
            with torch.random.fork_rng(gpus, enabled=self._seed is not None):
                if self._seed is not None:
                    torch.manual_seed((self._seed * 1_000_003 + batch.rows[0]) % 2**63)
                output = self.model.generate(
                    input_ids=batch.ids.to(self.device),
                    attention_mask=batch.mask.to(self.device),
                    **self.generation,
                )
            sequences = output if isinstance(output, Tensor) else output.sequences
            scores = output.sequences_scores.tolist() if self._scored else None
            if self.causal and self._new_only:
                sequences = sequences[:, batch.ids.shape[1] :]
            # A few kilobytes, and generate has waited for the device already: nothing to gain from copying later.
            return sequences.cpu(), scores
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Out here, where the traceback is gone that held what filled the memory.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _decode(self, batch: Batch, sequences: Tensor, scores: list[float] | None) -> list[Result]:
        with self._tokenizers.lent() as tokenizer:
            texts = tokenizer.batch_decode(
                sequences.tolist(),
                skip_special_tokens=not self._keep_special,
                clean_up_tokenization_spaces=self._clean_up,
            )
        each = self._returned
        if len(texts) != each * len(batch):
            raise AttmemoError(
                f"{len(texts)} sequences came back for {len(batch)} texts; expected {each} each.",
                "set num_return_sequences where the pipeline is made",
            )
        return [
            Result(
                row,
                texts[place * each : (place + 1) * each],
                None if scores is None else scores[place * each : (place + 1) * each],
                batch.truncated[place],
            )
            for place, row in enumerate(batch.rows)
        ]

    def _size(self, length: int) -> int:
        """Texts in a batch of which the longest has so many tokens."""
        if self.planner is None:
            return int(self.batch)
        beams = max(self._settings.get("num_beams", 1), self._returned)
        if self._options["padding"] == "max_length":
            length = self.limit or length
        return self.planner.plan(length, self._settings.new_tokens(length), beams)

    def _planner(self, mode: Mode | None) -> BatchPlanner:
        asked = getattr(self.model, "cache_mode_for", None)
        own = getattr(self.model, "cache_mode", None) if asked is None else asked(self.generation)
        mode = mode or own or "stock"
        dtype = attribute(self.model, "dtype") or torch.float32
        return BatchPlanner(ModelShape.of(self.config, dtype), device=self.device, mode=mode)

    @property
    def _fixed(self) -> bool:
        """Whether texts depend on the batch: each has a seed, or its padding counts as length."""
        seeded = self._seed is not None and bool(self._settings.get("do_sample", False))
        return seeded or (self.causal and self._settings.lengths()[0] is None)

    def _identity(self) -> dict[str, Any]:
        """All that decides the output beside the input; batches decide padding alone, unless they are `_fixed`."""
        batches = {"batch": self.batch, "window": self.window, "buckets": self._options["buckets"]}
        if self.planner is not None:
            batches["mode"] = self.planner.mode
        return {
            **(batches if self._fixed else {}),
            "model": digest(self.model, self.config),
            "tokenizer": tokenizer_name(self.tokenizer),
            "prefix": self._options["prefix"],
            "max_source": self.limit,
            "padding_side": self._options["side"],
            "new_only": self._new_only,
            "keep_special": self._keep_special,
            "clean_up": self._clean_up,
            "seed": self._seed,
            **self._settings.named(),
        }


class _Clock:
    """Adds up seconds by what they went to."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def time(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self._seconds[what] = self._seconds.get(what, 0.0) + time.perf_counter() - begin


def _windows(texts: Iterable[str], size: int) -> Iterator[tuple[int, list[str]]]:
    source, first = iter(texts), 0
    while window := list(islice(source, size)):
        yield first, window
        first += len(window)
