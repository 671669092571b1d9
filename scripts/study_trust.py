"""Trust at full length: attackers in known templates, texts that are asked again and again, and floods of new texts.

    python scripts/study_trust.py ../shared docs/trust.json attackers growth canaries flood  # half an hour, two cores
    python scripts/study_trust.py --table docs/trust.json                               # docs/trust-measured.md

Every part adds its rows to the JSON. Records are looked up always (``gate=False``): reuse is as frequent as it can be.
What is learned, is learned at once; of texts that grow in pauses, so that these are served as they grow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from marked import replace_measured, table
from measured_at import measured_at
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification
from workloads import LOGS, at_once, lines_of, questions_of, reviews_of

from attmemo import memoize
from attmemo.system.machine import conditions

ROOT: Final = Path(__file__).parents[1]
BENIGN, ATTACKS, BATCH = 2000, 500, 32
TURNS, LONGEST = 20, 256  # of a conversation; tokens of a text
TEMPLATES: Final = (
    "{name} bought item {number} in {place} and says that it is {word}",
    "ticket {number} of {name} : the delivery to {place} was {word}",
    "review {number} : a {word} stay in {place} , writes {name}",
    "{name} from {place} calls order {number} {word}",
    "the {word} meal at table {number} in {place} was for {name}",
    "course {number} in {place} with {name} was {word} from start to end",
)
NAMES: Final = (
    "anna", "bruno", "carla", "david", "elena", "frank", "greta", "henry", "irene", "jacob", "karin", "lucas", "marta",
    "nils", "olga", "peter",
)  # fmt: skip
PLACES: Final = (
    "paris", "london", "berlin", "rome", "madrid", "vienna", "prague", "oslo", "lisbon", "dublin", "athens", "warsaw"
)
GOOD: Final = (
    "wonderful", "excellent", "brilliant", "delightful", "superb", "charming", "lovely", "great", "perfect",
    "splendid", "enjoyable", "fantastic",
)  # fmt: skip
BAD: Final = (
    "terrible", "awful", "dreadful", "horrible", "boring", "disappointing", "useless", "broken", "poor", "miserable",
    "annoying", "ugly", "worthless",
)  # fmt: skip


def classifier(shared: Path, name: str, labels: dict[int, str] | None = None) -> tuple[Any, Any]:
    """A model and its tokenizer; `labels` take the place of its own."""
    folder = shared / "models" / name
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.id2label = labels or model.config.id2label
    return model, AutoTokenizer.from_pretrained(folder)


def ask(model: Any, tokenizer: Any, texts: Sequence[str]) -> Any:
    """Logits ``[B, C]``; what is verified in idle times is verified when this returns."""
    inputs = tokenizer(list(texts), return_tensors="pt", padding=True, truncation=True, max_length=LONGEST)
    with torch.inference_mode():
        found = model(**inputs).logits
    if (handle := getattr(model, "attmemo", None)) is not None:
        handle.flush()
    return found


def filled(chance: random.Random, words: Sequence[str]) -> str:
    """A text of a template."""
    return chance.choice(TEMPLATES).format(
        name=chance.choice(NAMES), place=chance.choice(PLACES), number=chance.randrange(1000),
        word=chance.choice(words),
    )  # fmt: skip


# ---- attackers ----


def sentiment(chance: random.Random, shared: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Benign texts, and attacks with their twins: another word in a place where benign ones have many."""
    del shared
    benign = [filled(chance, GOOD) for _ in range(BENIGN)]
    attacks = []
    for twin in (chance.choice(benign) for _ in range(4 * ATTACKS)):
        good = next(word for word in twin.split() if word in GOOD)
        attacks.append((twin.replace(good, chance.choice(BAD)), twin))
    return benign, attacks


def logs(chance: random.Random, shared: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Lines of a log, and lines with one word of another line of the log in a place."""
    benign = lines_of(shared / "data", "OpenSSH")[:BENIGN]
    words = sorted({word for line in benign for word in line.split()[5:]})
    attacks = []
    for twin in (chance.choice(benign) for _ in range(80 * ATTACKS)):
        parts = twin.split()
        parts[chance.randrange(5, len(parts))] = chance.choice(words)
        attacks.append((" ".join(parts), twin))
    return benign, attacks


def appended(chance: random.Random, shared: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Conversations that are read again at every turn, of 20 users at once. Attacks: conversations with an end of a
    film's review of another sentiment. The same ends were asked behind conversations of their own sentiment before."""
    questions = questions_of(shared / "data")
    chance.shuffle(questions)
    said = [questions[first : first + TURNS] for first in range(0, BENIGN, TURNS)]
    benign = [" ".join(own[: turn + 1]) for group in at_once(said, TURNS) for turn in range(TURNS) for own in group]
    twins = chance.sample([text for text in benign if LONGEST // 4 <= len(text.split()) <= LONGEST // 2], ATTACKS)
    ends = [" ".join(parts[-chance.randint(2, 5) :])
            for parts in itertools.islice(reviews_of(shared / "data"), ATTACKS // 5)]  # fmt: skip
    model, tokenizer = classifier(shared, "minilm-sst2")
    memoize(model, linear="exact")
    classes = [[int(one) for part in at_once(texts, BATCH) for one in ask(model, tokenizer, part).argmax(1)]
               for texts in (twins, ends)]  # fmt: skip
    of_class = [[end for end, own in zip(ends, classes[1], strict=True) if own == label] for label in (0, 1)]
    labelled = list(zip(twins, classes[0], strict=True))
    benign += [f"{twin} {chance.choice(of_class[label])}" for twin, label in labelled]
    attacks = [(f"{twin} {end}", twin) for twin, label in labelled for end in chance.sample(of_class[1 - label], 12)]
    chance.shuffle(attacks)
    return benign, attacks


Maker = Callable[[random.Random, Path], tuple[list[str], list[tuple[str, str]]]]
TEMPLATE_KINDS: Final[tuple[tuple[str, Maker], ...]] = (("minilm-sst2", sentiment), ("deberta-loghub", logs))


def attackers(
    shared: Path, kinds: Sequence[tuple[str, Maker]] = TEMPLATE_KINDS, grows: bool = False
) -> list[dict[str, Any]]:
    """Attacks inside of texts whose benign twins are stored: how many get another answer than the model's own.

    `grows`: texts grow, and become records in pauses. Classifiers with labels about attacks are left out then: they
    reuse equal inputs alone.
    """
    rows = []
    for name, make in kinds:
        for seed in range(3):
            bare, tokenizer = classifier(shared, name)
            exact = memoize(bare, reuse="none", linear="exact")
            benign, tries = make(random.Random(seed), shared)
            attacks, truths = [], []
            for part in at_once(tries, BATCH):  # an attack is a text that the model tells from its twin
                own = ask(exact, tokenizer, [text for text, _ in part]).argmax(1)
                twins = ask(exact, tokenizer, [twin for _, twin in part]).argmax(1)
                for (text, _), truth, other in zip(part, own.tolist(), twins.tolist(), strict=True):
                    if truth != other and len(attacks) < ATTACKS:
                        attacks.append(text)
                        truths.append(truth)
                if len(attacks) == ATTACKS:
                    break
            count = bare.config.num_labels
            about: dict[str, Any] = {"other": None}
            if not grows:
                about = {"attacks": {place: f"{place} injection" for place in range(count)}} | about
            for kind, labels in about.items():
                model, _ = classifier(shared, name, labels)
                memoize(model, budget=0.01, gate=False, linear="exact", tokenizer=tokenizer)
                if grows:
                    vars(model.attmemo.planner)["learns_at_once"] = lambda asking: False
                for part in at_once(benign, BATCH):
                    ask(model, tokenizer, part)
                before = model.attmemo.stats()
                wrong = 0
                for part, own in zip(at_once(attacks, 10), at_once(truths, 10), strict=True):
                    given = ask(model, tokenizer, part).argmax(1).tolist()
                    wrong += sum(a != b for a, b in zip(given, own, strict=True))
                after = model.attmemo.stats()
                rows.append({
                    "model": name, "labels": kind, "seed": seed, "benign": len(benign), "attacks": len(attacks),
                    "state": before["guard"]["state"], "benign_reused": before["reused"],
                    "attacks_reused": after["reused"] - before["reused"], "wrong": wrong,
                })  # fmt: skip
                print(rows[-1], flush=True)
    return rows


def growth(shared: Path) -> list[dict[str, Any]]:
    """The same, behind long texts that are asked again and again as they grow."""
    return attackers(shared, [("minilm-sst2", appended)], grows=True)


# ---- canaries ----


def canaries(shared: Path, rounds: int = 200, count: int = 20) -> list[dict[str, Any]]:
    """Fixed texts between other traffic: whether their answers keep their bits."""
    both = zip(*(lines_of(shared / "data", name) for name in LOGS[:2]), strict=True)
    lines = [line for pair in both for line in pair]
    rows = []
    for name, options in (
        ("deberta-loghub", {"linear": "exact"}), ("deberta-loghub", {"linear": "auto"}),
        ("minilm-sst2", {"linear": "exact"}), ("minilm-sst2", {"linear": "auto"}),
        ("minilm-sst2, vectors", {"linear": "exact", "reuse": "rows", "answer": "mean"}),
    ):  # fmt: skip
        model, tokenizer = classifier(shared, name.split(",")[0])
        if "vectors" in name:
            model = getattr(model, model.base_model_prefix)
        memoize(model, budget=0.01, tokenizer=tokenizer, **options)
        chance, other = random.Random(0), itertools.cycle(lines)
        texts = chance.sample(lines, count)
        seen: dict[str, list[tuple[bytes, bool, str]]] = {text: [] for text in texts}
        for _ in range(rounds):
            with torch.inference_mode():
                model(**tokenizer([next(other) for _ in range(10)], return_tensors="pt", padding=True))
                for text in texts:
                    inputs = tokenizer([text], return_tensors="pt")
                    tokens = inputs["input_ids"][0].numpy().astype("int32")
                    stored = model.attmemo.planner.index.same(tokens) >= 0
                    output = model(**inputs)
                    found = output[0].numpy().tobytes()  # logits, or last hidden states
                    seen[text].append((found, stored, model.attmemo.linear))
        changed = sum(len({bits for bits, *_ in all_of}) > 1 for all_of in seen.values())
        moved = [
            (now[1], before[2] != now[2]) for all_of in seen.values() for before, now in itertools.pairwise(all_of)
            if before[0] != now[0]
        ]
        rows.append({
            "model": name, "linear": options["linear"], "texts": count, "rounds": rounds,
            "texts_with_several_bits": changed, "moves": len(moved),
            "moves_while_recorded": sum(one for one, _ in moved),
            "moves_as_8_bits_began": sum(other for _, other in moved),
            "asked_with_record": sum(stored for all_of in seen.values() for _, stored, _ in all_of),
            "repeated": model.attmemo.stats()["repeated"], "reused": model.attmemo.stats()["reused"],
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


# ---- flood ----


def resident() -> int:
    """Bytes of this process that are no files."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def small(shared: Path) -> tuple[Any, Any]:
    """A classifier of two layers with random weights: bytes of records and requests are small."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "minilm-sst2")
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **shape)).eval()
    with torch.no_grad():
        model.classifier.weight.mul_(100.0)  # sure of its answers
    return model, tokenizer


def flood_of(shared: Path, half: int) -> list[tuple[str, str]]:
    """Lines of five logs in a fixed order of chance, none twice, and as many texts that never come again."""
    lines = [line for name in LOGS[:5] for line in lines_of(shared / "data", name)]
    random.Random(0).shuffle(lines)
    fresh = [f"{number} {text}" for number, text in enumerate(itertools.islice(
        itertools.cycle(questions_of(shared / "data")), half
    ))]  # fmt: skip
    return list(zip(lines[:half], fresh, strict=False))


def flood(shared: Path, half: int = 10_000) -> list[dict[str, Any]]:
    """Templates with and without as many new texts: what of the templates is reused, and memory."""
    rows = []
    work = flood_of(shared, half)
    for most in ("8MiB", "32MiB"):
        for flooded in (False, True):
            model, tokenizer = small(shared)
            memoize(model, budget=0.01, gate=False, linear="exact", tokenizer=tokenizer, max_bytes=most)
            late, memory = [0, 0], []
            for number, part in enumerate(at_once(work, BATCH)):
                before = model.attmemo.stats()
                ask(model, tokenizer, [line for line, _ in part])
                after = model.attmemo.stats()
                if number * BATCH >= half // 2:
                    late[0] += after["served"] - before["served"]
                    late[1] += len(part)
                if flooded:
                    ask(model, tokenizer, [text for _, text in part])
                if number % 16 == 0:
                    memory.append(resident() >> 20)
            found = model.attmemo.stats()
            rows.append({
                "max_bytes": most, "flooded": flooded, "requests": half * (1 + flooded),
                "served_of_later_templates": late[0] / late[1], "records": found["records"],
                "record_bytes": found["record_bytes"], "offered": found["offered"],
                "mib_in_the_middle": memory[len(memory) // 2], "mib_at_the_end": memory[-1],
                "state": found["guard"]["state"], "counts": model.attmemo.engine.reuse.store.pool.counts,
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


PARTS: Final = {"attackers": attackers, "growth": growth, "canaries": canaries, "flood": flood}


# ---- the page ----


ATTACKED: Final = "model | labels | seed | benign | of these reused | attacks | of these reused | wrong"


def attacked(row: dict[str, Any]) -> tuple[str, ...]:
    """Cells of attacks."""
    return (
        row["model"], row["labels"], f"{row['seed']}", f"{row['benign']:,}", f"{row['benign_reused']:,}",
        f"{row['attacks']}", f"{row['attacks_reused']}", f"{row['wrong']}",
    )  # fmt: skip


TABLES: Final[dict[str, tuple[str, str, Callable[[dict[str, Any]], tuple[str, ...]]]]] = {
    "attackers": ("Attacks in known templates", ATTACKED, attacked),
    "growth": ("Attacks behind long texts", ATTACKED, attacked),
    "canaries": (
        "Texts that are asked again and again",
        "model | linear layers | asked | while its record lived | other bits than before | of these while its record "
        "lived | as 8 bits began",
        lambda row: (row["model"], row["linear"], f"{row['texts'] * row['rounds']:,}", f"{row['asked_with_record']:,}",
                     f"{row['moves']}", f"{row['moves_while_recorded']}", f"{row['moves_as_8_bits_began']}"),
    ),
    "flood": (
        "A flood of new texts",
        "bound | new texts | requests | later templates reused | records | MiB in the middle | at the end",
        lambda row: (row["max_bytes"], "1 : 1" if row["flooded"] else "none", f"{row['requests']:,}",
                     f"{row['served_of_later_templates']:.3f}", f"{row['records']:,}", f"{row['mib_in_the_middle']:,}",
                     f"{row['mib_at_the_end']:,}"),
    ),
}  # fmt: skip
"""By part: title, columns, and cells of a row."""


def tables(found: dict[str, Any]) -> str:
    """The tables of docs/trust-measured.md, of the parts that were measured."""
    lines = list[str]()
    for part, (title, head, cells) in TABLES.items():
        if rows := found.get(part):
            lines += [f"## {title}\n", *table(head, map(cells, rows))]
    return "\n".join(lines).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path, nargs="?")
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--table", type=Path, metavar="JSON")
    asked = parser.parse_args()
    if asked.table is not None:
        replace_measured(ROOT / "docs" / "trust-measured.md", tables(json.loads(asked.table.read_text())))
        return
    warnings.simplefilter("ignore")
    found = json.loads(asked.output.read_text()) if asked.output.is_file() else {"schema": "attmemo.trust/1"}
    for part in asked.parts or PARTS:
        rows = PARTS[part](asked.shared)
        found |= {part: rows, "conditions": conditions()} | measured_at()
        asked.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
