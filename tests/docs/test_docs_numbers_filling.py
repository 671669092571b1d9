"""Numbers of the page about databases that fill themselves are those of docs/filling.json."""

from __future__ import annotations

from math import prod

from docs_tools import agree, measured, numbers, page, says, table_rows

TEXT, FOUND = page("filling.md"), measured("filling.json")
MODELS = {"MiniLM": "minilm", "six-layer DeBERTa-v2 classifier": "deberta", "the same": "deberta"}


def test_the_shares_of_rows_were_measured() -> None:
    rows = table_rows(TEXT, "| model, log | simulated")
    assert len(rows) == len(FOUND["cold"])
    for name, *cells in rows:
        model, _, log = name.partition(", ")
        one = FOUND["cold"][f"{MODELS[model]}, {log}"]
        agree(cells, [one[way] for way in ("simulated", "no guard", "no guard, records", "guard", "guard, records")])


def test_what_filling_costs_was_measured() -> None:
    rows = table_rows(TEXT, "| requests (of each model) | stored")
    assert len(rows) == len(FOUND["cost"])
    for (name, *cells), one in zip(rows, FOUND["cost"].values(), strict=True):
        own, control = one["filling"], one.get("control")
        shown = numbers(name[name.rindex("(") :])
        assert prod(int(number.replace(",", "")) for number in shown) == own["requests"]
        sequences = own["requests"] * (32 if "32 at once" in name else 1)
        values = [own["offered"]["kept"] / sequences, own["rows"]]
        values += [own["median"], own["mean"], own["99th percentile"]]
        if control is None:
            assert cells[5:] == ["–", "–"]
        else:
            values += [control["median"], control["99th percentile"]]
        agree(cells[: len(values)], values)
        assert own["median"] <= 1.03
        assert own["99th percentile"] <= 1.10


def test_how_soon_a_record_is_found_was_measured() -> None:
    rows = table_rows(TEXT, "| model, tokens | requests | record")
    assert len(rows) == len(FOUND["soon"])
    for (_, *cells), one in zip(rows, FOUND["soon"].values(), strict=True):
        values = [one["requests"], one["record_bytes"] / 1e6, one["records"], one["median"], one["longest"]]
        agree(cells, values)


def test_what_never_repeats_was_measured() -> None:
    seen = FOUND["never"]["seen"]
    late = [one for one in seen if one["inputs"] >= 22400]
    says(TEXT, "(`never`, float32, AVX-512): # times the time. From # inputs on", seen[-1]["ratio"], late[0]["inputs"])
    assert len({(one["disk"], one["files"], one["mappings"]) for one in late}) == 1
    last, resident = late[-1], sorted(one["resident"] for one in late)
    values = last["disk"] / 1e6, last["files"], last["mappings"], resident[0] / 1e6, resident[-1] / 1e6
    says(TEXT, "disk # MB, # open files, # mappings, # to # MB resident", *values)


def test_what_is_worth_storing_was_simulated() -> None:
    found = measured("filling-simulated.json")["admission"]
    logs = ("OpenSSH", "HDFS", "BGL", "Apache", "Mac")
    names = ("every miss", "one miss in two", "seen twice", "every miss, batches of 32",
             "the same, asked again before storing")  # fmt: skip
    rows = table_rows(TEXT, "| stored | OpenSSH | HDFS")
    for (_, *cells), name in zip(rows, names, strict=True):
        for cell, log in zip(cells, logs, strict=True):
            one = found[log][name]
            shares = one["served"] / one["lines"], one["records"], one["rows"] / one["tokens"]
            agree([part.strip() for part in cell.split("/")], shares)


BOUNDED = measured("filling-simulated.json")["eviction"]
RUNS = {(one["stream"], one["part"], one["policy"]): one for one in BOUNDED["runs"]}
CHOSEN = "mixed", 3, "segments: carry 0.5"


def kept(stream: str, part: int, policy: str) -> float:
    """Lines served within a bound, as a share of those that an unbounded database serves."""
    return float(RUNS[stream, part, policy]["served"] / BOUNDED["unbounded"][stream]["served"])


def test_what_bounds_cost_was_simulated() -> None:
    names = {
        "records: FIFO": "records: FIFO", "records: LRU": "records: LRU", "records: SIEVE": "records: SIEVE",
        "records: S3-FIFO": "records: S3-FIFO", "segments: carry 0": "segments, nothing carried",
        "segments: carry 0.5": "**segments, half carried**", "segments: carry 1": "segments, all carried",
        "segments: small queue, carry 0.5": "segments, a small queue in front (S3-FIFO), half carried",
    }  # fmt: skip
    columns = [*(("mixed", part) for part in (2, 3, 6, 24)), ("three tenths other text", 3)]
    assert len(RUNS) == len(BOUNDED["runs"]) == len(names) * len(columns)
    rows = table_rows(TEXT, "| policy | 1/2 |")
    assert [name for name, *_ in rows] == list(names.values())
    for (_, *cells), policy in zip(rows, names, strict=True):
        agree(cells, [kept(kind, part, policy) for kind, part in columns])
    mixed, carried = BOUNDED["unbounded"]["mixed"], RUNS[CHOSEN]
    template = "# lines of eight logs, interleaved, and a tenth of texts that never come again. Share of the lines"
    says(TEXT, f"{template} that an unbounded database serves (#)", mixed["lines"], mixed["served"] / mixed["lines"])
    says(TEXT, "A byte admitted costs # bytes of copying at 1/3", carried["copied"] / carried["admitted"])


def test_the_library_serves_as_many_lines_as_the_simulation() -> None:
    mixed = FOUND["mixed"]
    shares = [mixed[name]["served"] for name in ("unbounded", "a third")]
    text = "# of the lines are served without a bound, # with a third: #, as simulated"
    says(TEXT, text, *shares, mixed["share"])
    assert abs(mixed["share"] - kept(*CHOSEN)) < 0.005
