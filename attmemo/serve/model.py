"""The model that is served: what it can do, and one batch of token ids made into answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.errors import ArgumentError, AttmemoError, UnsupportedModelError
from attmemo.guard.spans import Spans, spans_in
from attmemo.loading import load_config, load_pretrained, quiet
from attmemo.serve.settings import MIN_COSINE, Pooling, ReuseName, Settings

Task = Literal["embedding", "classifier", "reranker", "tagger"]
Floats = npt.NDArray[np.float32]

POOLINGS: Final[dict[Pooling, str]] = {"mean": "mean", "cls": "cls", "last-token": "lasttoken"}
"""Names of poolings, here and in sentence-transformers."""
ANSWERS: Final[dict[Task, str]] = {"reranker": "score", "tagger": "spans"}
"""What a guard takes for an answer, where the model does not say it."""


@dataclass(slots=True)
class Answer:
    """What the model gives for one sequence.

    Attributes
    ----------
    value : ndarray
        The embedding ``[H]``, or logits ``[C]``; of a tagger for each token its class, and how probable that is,
        ``[n, 2]``. float32.
    each : ndarray or None
        Last hidden states of all tokens ``[n, H]``, where asked for.
    tokens, rows : int
        Tokens of the sequence; rows that were computed for it.
    """

    value: Floats
    each: Floats | None
    tokens: int
    rows: int

    @property
    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        return all(part is None or bool(np.isfinite(part).all()) for part in (self.value, self.each))


@dataclass(slots=True)
class ServedModel:
    """A model as it was loaded."""

    module: nn.Module  # called with token ids, mask and types; for embeddings a sentence-transformers model
    task: Task
    tokenizer: Any
    longest: int  # tokens that it takes
    width: int  # numbers of an answer: of an embedding, or classes
    pooling: str = ""
    labels: list[str] = field(default_factory=list)  # of classes
    spans: Spans | None = None  # reads the tags of a tagger
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts to put before others, by name
    extra_rows: int = 0  # of verifications, since it was loaded

    @property
    def vocabulary(self) -> int:
        """Token ids that its embeddings have."""
        encoder: Any = self.module
        if self.task == "embedding":
            encoder = encoder[0].auto_model
        return int(encoder.get_input_embeddings().num_embeddings)

    @property
    def handle(self) -> Any:
        """The handle of `attmemo.memoize`."""
        return getattr(self.module, "attmemo", None)

    @property
    def reuse(self) -> str:
        """What records supply: ``"rows"``, ``"maps"``, ``"prefix"``, ``"local"`` or ``"none"``."""
        return "none" if self.handle is None else str(self.handle.reuse)

    def memoize(
        self, *, database: str | None, budget: float | None, fill: bool | str, reuse: ReuseName = "auto",
        **options: Any,
    ) -> None:  # fmt: skip
        """Serve from records from now on; the arguments are those of `attmemo.memoize`.

        ArgumentError: a lowest cosine of answers that are no embeddings.
        """
        from attmemo.memoization import memoize

        lowest = options.get("min_cosine", MIN_COSINE)
        if self.task != "embedding" and lowest != MIN_COSINE:
            what = f"min_cosine is {lowest}, and the model is a {self.task}: its answers are no embeddings."
            raise ArgumentError(what, "leave out min_cosine")
        if reuse != "none":
            options |= {"budget": budget, "fill": fill, "tokenizer": self.tokenizer}
            if self.task in ANSWERS:
                options.setdefault("answer", ANSWERS[self.task])
        memoize(self.module, database=database, reuse=reuse, **options)

    def within(self, namespace: str | None) -> AbstractContextManager[Any]:
        """While inside, forwards are of this namespace; None: of none."""
        return nullcontext() if namespace is None or self.handle is None else self.handle.namespace(namespace)

    def rows_to_compute(
        self, ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]], namespace: str | None = None
    ) -> list[int]:
        """Rows that each of these sequences would need now; its tokens where nothing tells."""
        ask = getattr(self.handle, "rows_to_compute", None)
        if ask is None:
            return [len(own) for own in ids]
        try:
            with self.within(namespace):
                return ask(ids, types if self._takes_types else None)  # type: ignore[no-any-return]
        except (AttmemoError, OSError):  # the namespace cannot be opened: the forward says why
            return [len(own) for own in ids]

    @torch.inference_mode()
    def run(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], *, reuse: bool, each: bool,
        namespace: str | None = None,
    ) -> list[Answer]:  # fmt: skip
        """Answers to sequences of token ids with their types; with ``reuse=False`` no record serves them.

        `each`: also give the last hidden states of all tokens. `namespace`: whose records may serve.
        """
        lengths = [len(ids) for ids, _ in sequences]
        inputs = self._collate(sequences, lengths)
        observe = getattr(self.handle, "observe", None)
        if observe is not None:
            with self.within(namespace), observe(reuse=reuse) as seen:
                output = self._forward(inputs)
            # What the original code computed (an ineligible batch) is not seen: it computes every token.
            rows = list(seen.rows) if len(seen.rows) == len(lengths) else lengths
            self.extra_rows += seen.extra
        elif reuse or self.handle is None:
            output, rows = self._forward(inputs), lengths
        else:
            output, rows = self._exact(inputs), lengths
        values, states = self._values(output, each)
        parts = [row[:length] for row, length in zip(values, lengths, strict=True)] if self.spans else values
        return [
            Answer(parts[place], None if states is None else states[place, :length], length, computed)
            for place, (length, computed) in enumerate(zip(lengths, rows, strict=True))
        ]

    def close(self) -> None:
        """Put what waits into the database, and close it whole; the model is a bare one afterwards."""
        from attmemo.memoization import unmemoize

        flush = getattr(self.handle, "flush", None)
        if flush is not None:
            flush()
        unmemoize(self.module)

    def _exact(self, inputs: dict[str, Tensor]) -> Any:
        """Maps: the handle is off for one forward. There is one inference thread, so no other forward is changed."""
        self.handle.disable()
        try:
            return self._forward(inputs)
        finally:
            self.handle.enable()

    def _forward(self, inputs: dict[str, Tensor]) -> Any:
        return self.module(inputs) if self.task == "embedding" else self.module(**inputs)

    def _values(self, output: Any, each: bool = False) -> tuple[Floats, Floats | None]:
        """Answers ``[B, …]``; with `each` also the last hidden states ``[B, L, H]`` of a model that embeds."""
        if self.spans is not None:
            best, labels = output.logits.float().softmax(-1).max(-1)
            return torch.stack([labels.float(), best], -1).numpy(), None
        if self.task != "embedding":
            return output.logits.float().numpy(), None
        states = output["token_embeddings"].float().numpy() if each else None
        return output["sentence_embedding"].float().numpy(), states

    @property
    def _takes_types(self) -> bool:
        return "token_type_ids" in self.tokenizer.model_input_names

    def _collate(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], lengths: Sequence[int]
    ) -> dict[str, Tensor]:
        """Model inputs ``[B, L]``, padding at the end."""
        shape = len(lengths), max(lengths)
        ids = np.full(shape, self.tokenizer.pad_token_id or 0, np.int64)
        types, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for place, (own, kinds) in enumerate(sequences):
            ids[place, : len(own)], types[place, : len(own)], mask[place, : len(own)] = own, kinds, 1
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        if self._takes_types:
            inputs["token_type_ids"] = torch.from_numpy(types)
        return inputs


def load(settings: Settings) -> ServedModel:
    """Load a model; DataError or UnsupportedModelError, with what to do, if it cannot be served."""
    config = load_config(settings.model)
    names = config.architectures or []
    if any("ForSequenceClassification" in name for name in names):
        return _classifier(settings, config)
    if any("ForTokenClassification" in name for name in names):
        return _classifier(settings, config, tags=True)
    folder = Path(settings.model).expanduser()  # a name on the hub may always be a sentence-transformers model
    heads = any(name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM")) for name in names)
    if heads and folder.is_dir() and not (folder / "modules.json").exists():
        raise UnsupportedModelError(
            f"{settings.model} is a {names[0]}: it gives neither embeddings nor classes of texts.",
            "give a sentence-transformers model, an encoder, or one for sequence or token classification",
        )
    return _embedder(settings)


def _classifier(settings: Settings, config: Any, *, tags: bool = False) -> ServedModel:
    """A model with a head of classes, of texts or of their tokens."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    if settings.pooling is not None:
        raise UnsupportedModelError(f"{settings.model} gives classes: nothing is pooled.", "leave out --pooling")
    if tags and (settings.default_prompt or settings.default_prompt_name):
        what = f"{settings.model} tags tokens: characters are counted in the text alone."
        raise UnsupportedModelError(what, "leave out the prompt")
    kind = AutoModelForTokenClassification if tags else AutoModelForSequenceClassification
    loaded = load_pretrained(settings.model, lambda _: kind, getattr(torch, settings.dtype))
    if loaded.absent:
        raise UnsupportedModelError(
            f"{settings.model} has no weights for {', '.join(loaded.absent)}.", "train it first"
        )
    count = int(config.num_labels)
    labels = [str(config.id2label[place]) for place in range(count)]
    task: Task = "tagger" if tags else "reranker" if count == 1 else "classifier"
    return ServedModel(
        loaded.model, task, loaded.tokenizer, _longest(loaded.tokenizer, config), count, labels=labels,
        spans=spans_in(loaded.model.config, loaded.tokenizer) if tags else None,
    )  # fmt: skip


def _embedder(settings: Settings) -> ServedModel:
    """A sentence-transformers model; of other layouts that library makes one."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling as Pool

    folder = Path(settings.model).expanduser()
    path = str(folder) if folder.exists() else settings.model
    how = {"dtype": getattr(torch, settings.dtype)}
    try:
        with quiet():
            model = SentenceTransformer(path, device="cpu", model_kwargs=how).eval()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UnsupportedModelError(f"cannot load the model {settings.model}: {first}", "check the files") from error
    parts: list[Any] = list(model)
    first_part = parts[0]
    if getattr(first_part, "auto_model", None) is None:
        raise UnsupportedModelError(
            f"{settings.model} begins with {type(first_part).__name__}, not with a transformer.", "give another model"
        )
    # Requests say whether they want unit length, as in TEI; so the model's own last step is left out.
    kept = [part for part in parts if type(part).__name__ != "Normalize"]
    pools = [place for place, part in enumerate(kept) if isinstance(part, Pool)]
    if settings.pooling is not None:
        if len(pools) != 1:
            raise UnsupportedModelError(f"{settings.model} has {len(pools)} poolings.", "leave out --pooling")
        kept[pools[0]] = Pool(kept[pools[0]].embedding_dimension, POOLINGS[settings.pooling])
    served = SentenceTransformer(modules=kept, device="cpu", prompts=dict(model.prompts)).eval()
    mode = str(kept[pools[0]].pooling_mode) if pools else "none"
    pooling = next((name for name, own in POOLINGS.items() if own == mode), mode)
    prompts = {name: text for name, text in model.prompts.items() if text}
    longest = min(int(model.max_seq_length or 512), _longest(model.tokenizer, first_part.auto_model.config))
    width = int(served.get_embedding_dimension() or 0)
    return ServedModel(served, "embedding", model.tokenizer, longest, width, pooling=pooling, prompts=prompts)


def _longest(tokenizer: Any, config: Any) -> int:
    """Tokens of a sequence, at most: positions of the model, and what its tokenizer says."""
    positions = int(getattr(config, "max_position_embeddings", None) or 512)
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):  # positions begin behind the padding's
        positions -= int(config.pad_token_id or 0) + 1
    return min(positions, int(tokenizer.model_max_length), 1 << 20)
