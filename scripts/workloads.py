"""Streams of requests as users send them, made of texts in ``../shared/data``, in the order of time.

Every stream says which model of ``../shared/models`` answers, what an answer is, and has its requests: each one is a
list of texts, or of pairs of texts, that are asked at once.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

Item = str | tuple[str, str]

LOGS = ("OpenSSH", "HDFS", "BGL", "Apache", "Android", "Hadoop", "Mac", "Thunderbird")
LINES = 2000
INSTRUCTION = "Classify the sentiment of the text as positive or negative . Answer with one word . Text :"
SCHEMA = "name : a person ; place : a city , a country ; date : a day or a year ; amount : a number and its unit [SEP]"


@dataclass(frozen=True)
class Workload:
    """One stream.

    Attributes
    ----------
    model : str
        Folder of the model.
    requests : sequence of sequences
        What is asked at once.
    longest : int
        Tokens of an input at most.
    decides : bool
        Whether the model gives one score, which counts as an answer by its sign.
    tags : bool
        Whether the model tags tokens, and the spans of a text are its answer.
    most : str or None
        Bound of the records' bytes.
    """

    model: str
    requests: Sequence[Sequence[Item]]
    longest: int = 256
    decides: bool = False
    tags: bool = False
    most: str | None = None


def lines_of(data: Path, name: str) -> list[str]:
    """Lines of a log."""
    text = (data / "loghub_2k" / f"{name}_2k.log").read_text(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()][:LINES]


def at_once(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Requests of so many items."""
    return [items[first : first + count] for first in range(0, len(items), count)]


def log(data: Path, name: str, lines: int = 1) -> Workload:
    """Lines of a log, or windows of some lines, the newest first."""
    own = lines_of(data, name)
    texts = [" [SEP] ".join(own[max(0, place - lines + 1) : place + 1][::-1]) for place in range(len(own))]
    return Workload("deberta-loghub", at_once(texts, 32))


def questions_of(data: Path, name: str = "train") -> list[str]:
    with (data / "banking77" / f"{name}.csv").open(newline="") as file:
        found = [row["text"].replace("\n", " ") for row in csv.DictReader(file)]
    random.Random(0).shuffle(found)
    return found


def zero_shot(data: Path) -> Workload:
    """One text and a hypothesis for each of 77 classes."""
    names = json.loads((data / "banking77" / "categories.json").read_text())
    hypotheses = [f"The customer asks about {name.replace('_', ' ').lower()}." for name in names]
    texts = questions_of(data, "test")[:40]
    requests = [[(text, hypothesis) for hypothesis in hypotheses] for text in texts]
    return Workload("minilm-banking77-pair", requests, decides=True)


def rerank(data: Path) -> Workload:
    """A query and 32 documents of a collection of 120: the same documents come again with other queries."""
    texts, chance = questions_of(data), random.Random(1)
    queries, documents = texts[:80], texts[80:200]
    return Workload(
        "minilm-banking77-pair", [[(query, one) for one in chance.sample(documents, 32)] for query in queries],
        decides=True,
    )  # fmt: skip


def _phrases(data: Path, count: int) -> list[str]:
    with (data / "sst2" / "dev.tsv").open(newline="") as file:
        own = [row["sentence"].strip() for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
    return list(itertools.islice(itertools.chain(own, questions_of(data)), count))


def behind(data: Path, front: str) -> Workload:
    """Texts behind one and the same instruction, or schema."""
    return Workload("minilm-sst2", at_once([f"{front} {text}" for text in _phrases(data, 1600)], 32))


def reviews_of(data: Path) -> Iterator[list[str]]:
    """Sentences of reviews."""
    with (data / "imdb" / "test_subset.jsonl").open() as file:
        for line in file:
            text = re.sub(r"<br />|\s+", " ", json.loads(line)["text"])
            yield [part.strip() for part in re.split(r"(?<=[.!?]) ", text) if part.strip()]


def _side_by_side(streams: Sequence[Sequence[str]], users: int) -> list[Sequence[Item]]:
    """Requests of so many streams each, the first text of each, then the second; then the next streams."""
    groups = at_once(streams, users)
    return [list(texts) for group in groups for texts in zip(*group, strict=True)]  # type: ignore[arg-type]


def conversation(data: Path, turns: int = 40, count: int = 40, users: int = 1) -> Workload:
    """Conversations that are read again at every turn, up to 512 tokens; of so many users at once."""
    questions = iter(questions_of(data))
    said = [list(itertools.islice(questions, turns)) for _ in range(count)]
    read = [[" ".join(own[: turn + 1]) for turn in range(turns)] for own in said]
    return Workload("minilm-sst2", _side_by_side(read, users), 512)


def edited(data: Path, versions: int = 20, count: int = 60, users: int = 1) -> Workload:
    """Documents of about 400 tokens; in every version another sentence is new. So many are edited at once."""
    read: list[list[str]] = []
    chance, fresh = random.Random(2), iter(questions_of(data))
    long = (parts for parts in reviews_of(data) if 280 <= len(" ".join(parts).split()) <= 340 and len(parts) > 8)
    for parts in itertools.islice(long, count):
        own = list(parts)
        read.append([])
        for _ in range(versions):
            read[-1].append(" ".join(own))
            own[chance.randrange(len(own))] = next(fresh)
    return Workload("minilm-sst2", _side_by_side(read, users), 512)


def chunks(data: Path) -> Workload:
    """Pieces of a text of 96 words, each half of the one before it."""
    words = (data / "wikitext2" / "wiki.test.raw").read_text().split()[:48_000]
    return Workload("minilm-sst2", at_once([" ".join(words[at : at + 96]) for at in range(0, len(words), 48)], 16))


def free(data: Path, name: str) -> Workload:
    """Texts in which nothing repeats."""
    if name == "questions":
        return Workload("minilm-sst2", at_once(questions_of(data)[:2000], 32))
    return Workload("minilm-sst2", at_once([" ".join(parts) for parts in itertools.islice(reviews_of(data), 320)], 8))


def flood(data: Path, requests: int = 4000) -> Workload:
    """Lines of a log, and as many texts that never come again, with little room for records."""
    lines = itertools.cycle(lines_of(data, "OpenSSH"))
    fresh = (f"{number} {text}" for number, text in enumerate(itertools.cycle(questions_of(data))))
    texts = [text for pair in zip(lines, itertools.islice(fresh, requests // 2), strict=False) for text in pair]
    return Workload("deberta-loghub", at_once(texts, 32), most="16MiB")


def forms(data: Path) -> Workload:
    """Forms and requests with personal details, in the order of time: which are returns unevenly."""
    with (data / "pii_forms" / "stream.jsonl").open() as file:
        return Workload("minilm-pii", at_once([json.loads(line)["text"] for line in file], 32), tags=True)


WORKLOADS: dict[str, Callable[[Path], Workload]] = {
    **{f"log {name}": partial(log, name=name) for name in LOGS},
    **{f"windows {name}": partial(log, name=name, lines=4) for name in ("HDFS", "OpenSSH")},
    "zero-shot": zero_shot,
    "rerank": rerank,
    "instruction": partial(behind, front=INSTRUCTION),
    "schema": partial(behind, front=SCHEMA),
    "conversation": conversation,
    "8 conversations": partial(conversation, users=8),
    "edited document": edited,
    "8 edited documents": partial(edited, users=8, count=64),
    "overlapping chunks": chunks,
    "free questions": partial(free, name="questions"),
    "free reviews": partial(free, name="reviews"),
    "flood": flood,
    "forms": forms,
}


def sign(output: Any) -> Any:
    """The answer of a model with one score."""
    return (output.logits[:, 0] > 0).long()
