"""Sketches of tokens are the same everywhere and near for near sequences; a collection finds what it holds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from children import in_child
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.kernels import _sketch
from attmemo.kernels.align import Rule, sketch, sketch_in_numpy
from attmemo.kernels.kinds import NO_KINDS
from attmemo.kernels.plan import Demand, plan
from attmemo.rows import index as tokens_module
from attmemo.rows.index import ANY, TokenIndex
from attmemo.rows.sketch import Sketch

Tokens = npt.NDArray[np.int32]


def packed(sequences: list[Tokens]) -> tuple[Tokens, npt.NDArray[np.int64]]:
    starts = np.cumsum([0, *map(len, sequences)]).astype(np.int64)
    return np.concatenate([np.empty(0, np.int32), *sequences]), starts


def templates(count: int, seed: int = 0) -> list[Tokens]:
    """Lines of five templates whose fields differ."""
    random = np.random.default_rng(seed)
    forms = np.random.default_rng(99).integers(0, 1000, (5, 40)).astype(np.int32)
    lines = []
    for i in range(count):
        line = forms[i % 5].copy()
        line[[7, 8, 20, 33]] = random.integers(1000, 3000, 4)
        lines.append(line)
    return lines


class TestSketch:
    @settings(max_examples=100, deadline=None)
    @given(
        st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40), max_size=5),
        st.sampled_from([64, 128, 256, 1024]),
    )
    def test_the_kernel_adds_what_the_oracle_adds(self, sequences: list[list[int]], dimensions: int) -> None:
        tokens, starts = packed([np.array(sequence, np.int32) for sequence in sequences])
        assert np.array_equal(sketch(tokens, starts, dimensions), sketch_in_numpy(tokens, starts, dimensions))

    @pytest.mark.parametrize("length", [8191, 8192, 8193, 40_000])
    def test_sums_of_long_sequences_do_not_overflow(self, length: int) -> None:
        tokens, starts = np.full(length, 7, np.int32), np.array([0, length])
        found = np.abs(sketch(tokens, starts, 64))
        assert np.array_equal(found, np.abs(sketch_in_numpy(tokens, starts, 64)))
        # Signs of the token and of the pair are the same, or not.
        assert found.max() / found.min() == pytest.approx((3 * length - 2) / (length - 2), rel=1e-6)

    def test_a_sketch_has_the_numbers_it_always_had(self) -> None:
        """Stored sketches are compared with new ones, on other machines too."""
        found = sketch(np.array([101, 2023, 2003, 102], np.int32), np.array([0, 4]), 64)[0, :16]
        assert (found / found[1] * 2).round(5).tolist() == [0, 2, 2, 6, -2, 0, 4, -2, -10, 8, -2, 0, -4, 2, 0, 2]

    def test_vectors_have_length_one_and_empty_sequences_none(self) -> None:
        tokens, starts = packed([np.array([1, 2, 3], np.int32), np.empty(0, np.int32), np.array([5], np.int32)])
        lengths = np.linalg.norm(Sketch()(tokens, starts), axis=1)
        assert np.allclose(lengths, [1, 0, 1], atol=1e-6)

    def test_sequences_that_share_more_are_nearer(self) -> None:
        base = np.arange(60, dtype=np.int32)
        few, many = base.copy(), base.copy()
        few[10] = 99
        many[::6] = np.arange(100, 110)
        vectors = Sketch()(*packed([base, few, many, base + 500]))
        products = vectors[1:] @ vectors[0]
        assert products[0] > 0.9
        assert products[0] > products[1] + 0.2
        assert products[1] > products[2] + 0.2

    def test_order_counts(self) -> None:
        base = np.random.default_rng(0).permutation(60).astype(np.int32)
        vectors = Sketch()(*packed([base, np.sort(base)]))
        assert vectors[0] @ vectors[1] < 0.6

    @pytest.mark.parametrize(
        ("tokens", "starts", "sums"),
        [
            (np.zeros(3), [0, 3], (1, 64)), (np.zeros(3, np.int32), [0, 2], (1, 64)),
            (np.zeros(3, np.int32), [0, 3], (2, 64)), (np.zeros(3, np.int32), [0, 3], (1, 65)),
            (np.zeros(3, np.int32), [0, 4, 3], (2, 64)), (np.zeros((1, 3), np.int32), [0, 3], (1, 64)),
        ],
    )  # fmt: skip
    def test_wrong_arguments_are_refused_and_nothing_is_written(
        self, tokens: Any, starts: list[int], sums: tuple[int, int]
    ) -> None:
        result = np.full(sums, 77, np.float32)
        with pytest.raises(ValueError, match="must"):
            _sketch.sketch(tokens, np.array(starts), result)
        assert (result == 77).all()


def find(index: TokenIndex, tokens: Tokens, starts: npt.NDArray[np.int64], k: int = 8) -> npt.NDArray[np.int64]:
    """Numbers of the records with the nearest sketches."""
    shelf = index._shelf
    return shelf.numbers_of(index._rows(shelf, tokens, starts, k))


@pytest.fixture(params=["all", "graph"])
def index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TokenIndex:
    """Empty, comparing with all records or, from twenty on, searching a graph."""
    if request.param == "graph":
        monkeypatch.setattr(tokens_module, "GRAPH_FROM", 20)
    return TokenIndex()


class TestTokenIndex:
    def test_a_record_finds_itself(self, index: TokenIndex) -> None:
        lines = templates(200)
        numbers = [index.add(line) for line in lines]
        assert len(index) == 200
        assert numbers == list(range(200))
        assert find(index, *packed(lines), k=1)[:, 0].tolist() == numbers
        assert all(np.array_equal(index.tokens_of(n), line) for n, line in zip(numbers, lines, strict=True))

    def test_best_is_the_alignment_with_the_records_found(self, index: TokenIndex) -> None:
        lines = templates(150)
        for line in lines:
            index.add(line)
        asked = packed(templates(30, seed=1))
        sure = np.full(len(lines), np.nan, np.float32)
        expected = plan(*asked, find(index, *asked, k=6), *packed(lines), sure, NO_KINDS, Rule(near=2), Demand())
        found = index.best(*asked, Rule(near=2), tried=6)
        assert np.array_equal(found.record, expected.record)
        assert np.array_equal(found.source, expected.source)
        assert (found.computed <= 20).all()

    def test_a_record_of_just_these_tokens_is_known_and_supplies_all(self, index: TokenIndex) -> None:
        lines = templates(3)
        for line in (lines[0], lines[1], lines[0], lines[0]):
            index.add(line)
        assert [index.same(line) for line in (*lines, lines[0][:-1])] == [0, 1, -1, -1]
        near = index.candidates(*packed(lines))
        assert near.rows[:, 0].tolist() == [0, 1, -1]
        found = index.plan(*packed(lines), near, Rule(near=3), NO_KINDS, ANY)
        assert found.record[:2].tolist() == [0, 1]
        assert found.computed[:2].tolist() == [0, 0], "whatever the rule"
        assert found.source[: len(lines[0])].tolist() == list(range(len(lines[0])))
        index.remove(0)
        assert index.same(lines[0]) == 2, "the next one"
        for number in (3, 2):
            index.remove(number)
        assert index.same(lines[0]) == -1
        assert index.add(lines[0]) == index.same(lines[0]) == 4
        own = near.without(np.array([True, False, False])).rows
        assert (own[:, 0].tolist(), own[0].max()) == ([-1, 1, -1], -1)

    def test_what_was_removed_is_found_no_more_and_its_number_is_not_used_again(self, index: TokenIndex) -> None:
        lines = templates(120)
        numbers = [index.add(line) for line in lines]
        for number in numbers[::2]:
            index.remove(number)
        assert len(index) == 60
        assert set(find(index, *packed(lines), k=100).ravel()) <= {-1, *numbers[1::2]}
        assert set(index.best(*packed(lines)).record) <= set(numbers[1::2])
        assert 0 not in index
        assert 1 in index
        for wrong in (0, -1, 120):
            with pytest.raises(KeyError, match="no record"):
                index.remove(wrong)
            with pytest.raises(KeyError, match="no record"):
                index.tokens_of(wrong)
        assert index.add(lines[0]) == 120
        assert find(index, *packed(lines[:1]), k=1).tolist() == [[120]]

    def test_a_record_that_is_gone_has_no_length(self, index: TokenIndex) -> None:
        for length in (3, 1, 7):
            index.add(np.arange(length, dtype=np.int32))
        index.remove(1)
        assert index.lengths_of(np.array([2, 1, 0, -1, 17])).tolist() == [7, 0, 3, 0, 0]

    def test_a_collection_that_forgets_as_fast_as_it_learns_does_not_grow(self, index: TokenIndex) -> None:
        lines = templates(2000)
        for number, line in enumerate(lines):
            assert index.add(line) == number
            if number >= 50:
                index.remove(number - 50)
        assert len(index) == 50
        assert len(index._shelf.room[0]) <= 64 * 150
        assert find(index, *packed(lines[-50:]), k=1)[:, 0].tolist() == list(range(1950, 2000))
        assert all(np.array_equal(index.tokens_of(n), lines[n]) for n in range(1950, 2000))

    def test_all_can_be_removed(self, index: TokenIndex) -> None:
        lines = templates(60)
        for number in [index.add(line) for line in lines]:
            index.remove(number)
        assert len(index) == 0
        assert (find(index, *packed(lines)) == -1).all()
        assert (index.best(*packed(lines)).computed == 40).all()

    def test_an_empty_collection_finds_nothing(self) -> None:
        found = TokenIndex().best(*packed(templates(3)))
        assert found.record.tolist() == [-1] * 3
        assert found.computed.tolist() == [40] * 3
        assert find(TokenIndex(), *packed([]), k=2).shape == (0, 2)

    def test_empty_records_and_inputs_are_never_found(self, index: TokenIndex) -> None:
        index.add(np.empty(0, np.int32))
        for line in templates(30):
            index.add(line)
        assert 0 not in find(index, *packed(templates(5)), k=31)
        assert (find(index, *packed([np.empty(0, np.int32)])) == -1).all()

    def test_a_graph_finds_nearly_what_a_comparison_with_all_finds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tokens_module, "GRAPH_FROM", 20)
        graph = TokenIndex()
        monkeypatch.setattr(tokens_module, "GRAPH_FROM", 10**9)
        whole = TokenIndex()
        random, asked = np.random.default_rng(3), packed(templates(40, seed=9))
        for number, line in enumerate(templates(800)):
            monkeypatch.setattr(tokens_module, "GRAPH_FROM", 20)
            graph.add(line)
            monkeypatch.setattr(tokens_module, "GRAPH_FROM", 10**9)
            whole.add(line)
            if random.random() < 0.4:
                graph.remove(number)
                whole.remove(number)
        assert graph._graph is not None
        assert whole._graph is None
        assert (find(graph, *asked, k=4) == find(whole, *asked, k=4)).mean() > 0.95

    def test_all_records_are_compared_when_the_graph_reaches_too_few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tokens_module, "GRAPH_FROM", 20)
        index, lines = TokenIndex(), templates(60)
        numbers = [index.add(line) for line in lines]

        class Torn:
            def set_ef(self, ef: int) -> None: ...

            def knn_query(self, *arguments: Any, **options: Any) -> None:
                raise RuntimeError("Cannot return the results in a contiguous 2D array.")

        assert index._graph is not None
        monkeypatch.setattr(index._graph, "_index", Torn())
        assert find(index, *packed(lines), k=1)[:, 0].tolist() == numbers

    def test_wrong_arguments_are_refused(self, index: TokenIndex) -> None:
        for wrong in (np.arange(3), np.zeros((1, 3), np.int32), np.zeros(3, np.float32)):
            with pytest.raises(ValueError, match="must"):
                index.add(wrong)  # type: ignore[arg-type]
        assert len(index) == 0

    def test_readers_see_whole_records_while_one_thread_adds_and_removes(self, index: TokenIndex) -> None:
        lines = templates(600)
        for line in lines[:30]:
            index.add(line)
        asked = packed(lines[:30])
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                found = index.best(*asked, tried=4)
                for b, record in enumerate(found.record.tolist()):
                    if record < 0:
                        continue
                    source = found.source[asked[1][b] : asked[1][b + 1]]
                    kept = np.flatnonzero(source >= 0)
                    assert np.array_equal(lines[record][source[kept]], lines[b][kept])

        with ThreadPoolExecutor(3) as threads:
            readers = [threads.submit(read) for _ in range(3)]
            for number, line in enumerate(lines[30:], 30):
                assert index.add(line) == number
                if number % 3 == 0:
                    index.remove(number)
            stop.set()
            for one in readers:
                one.result()


class TestExtend:
    """Records that come many at once, under numbers of their own."""

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(
        st.lists(st.integers(0, 90), min_size=1, max_size=5), st.integers(0, 2**32), st.booleans(),
        st.sampled_from([20, 10**9]),
    )  # fmt: skip
    def test_it_is_the_same_as_adding_one_by_one(
        self, counts: list[int], seed: int, removes: bool, graph_from: int
    ) -> None:
        random, lines = np.random.default_rng(seed), templates(sum(counts), seed)
        lines = [line[: int(random.integers(0, 41))] for line in lines]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(tokens_module, "GRAPH_FROM", graph_from)
            single, many, first = TokenIndex(), TokenIndex(), 0
            for count in counts:
                own = range(first, first + count)
                first += count
                assert [single.add(lines[number]) for number in own] == list(own)
                many.extend([lines[number] for number in own], own)
                for number in own if removes else []:
                    if number % 3 == 0:
                        single.remove(number)
                        many.remove(number)
        assert (len(many), many.next) == (len(single), single.next)
        asked = packed(templates(10, seed + 1) + lines[:5])
        assert np.array_equal(find(many, *asked, k=8), find(single, *asked, k=8))
        one, other = many.best(*asked), single.best(*asked)
        assert np.array_equal(one.record, other.record)
        assert np.array_equal(one.source, other.source)
        for number in range(first):
            assert (number in many) == (number in single)
            if number in many:
                assert np.array_equal(many.tokens_of(number), lines[number])

    def test_numbers_may_have_gaps(self, index: TokenIndex) -> None:
        lines = templates(90)
        index.extend(lines[:40], range(3, 43))
        index.extend(lines[40:80], range(100, 180, 2))
        numbers = [*range(3, 43), *range(100, 180, 2)]
        assert find(index, *packed(lines[:80]), k=1)[:, 0].tolist() == numbers
        assert all(np.array_equal(index.tokens_of(n), line) for n, line in zip(numbers, lines, strict=False))
        for wrong in (0, 2, 43, 99, 101, 179):
            assert wrong not in index
            with pytest.raises(KeyError, match="no record"):
                index.remove(wrong)
        assert index.next == 179
        assert index.add(lines[80]) == 179
        index.remove(100)
        assert 100 not in index
        assert 102 in index
        assert find(index, *packed(lines[40:41]), k=1)[0, 0] != 100
        assert len(index) == 80

    @pytest.mark.parametrize("numbers", [[4, 6, 7], [5, 5, 6], [5, 7, 6], [-1, 5, 6]])
    def test_numbers_that_do_not_rise_are_refused_and_nothing_is_added(
        self, index: TokenIndex, numbers: list[int]
    ) -> None:
        lines = templates(8)
        for line in lines[:5]:
            index.add(line)
        with pytest.raises(ValueError, match="numbers of records rise"):
            index.extend(lines[5:], numbers)
        assert (len(index), index.next) == (5, 5)
        assert 7 not in index
        index.extend(lines[5:], [5, 6, 9])
        assert find(index, *packed(lines), k=1)[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 9]

    def test_wrong_tokens_are_refused_and_nothing_is_added(self, index: TokenIndex) -> None:
        index.extend(templates(2), [0, 1])
        for wrong in (np.arange(3), np.zeros(3, np.float32)):
            with pytest.raises(ValueError, match="must"):
                index.extend([np.arange(3, dtype=np.int32), wrong], [2, 3])  # type: ignore[list-item]
        assert (len(index), index.next) == (2, 2)

    def test_nothing_adds_nothing(self, index: TokenIndex) -> None:
        index.extend([], [])
        assert (len(index), index.next) == (0, 0)

    def test_a_graph_that_is_behind_catches_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The graph takes a few records with each one that is added: right behind many it is not whole."""
        monkeypatch.setattr(tokens_module, "GRAPH_FROM", 20)
        index, lines = TokenIndex(), templates(300)
        index.extend(lines[:200], range(0, 400, 2))
        assert index._graph is not None
        for number, line in enumerate(lines[200:], 400):
            asked = packed(lines[: number - 199])
            numbers = [*range(0, 400, 2), *range(400, number)]
            assert find(index, *asked, k=1)[:, 0].tolist()[:20] == numbers[:20]
            index.add(line)
        assert index._graph.next == index.next

    def test_a_lock_that_another_thread_held_does_not_stop_a_child(self, index: TokenIndex) -> None:
        lines = templates(60)
        index.extend(lines[:40], range(40))

        def child() -> None:
            index.leave_to_parent()
            index.extend(lines[40:], range(40, 60))
            index.remove(3)
            assert find(index, *packed(lines[4:]), k=1)[:, 0].tolist() == list(range(4, 60))

        with ExitStack() as held:
            held.enter_context(index._writing)
            if index._graph is not None:
                held.enter_context(index._graph._lock)
            assert in_child(child, seconds=60) == 0

    def test_many_are_added_in_blocks_and_come_all_at_once(
        self, index: TokenIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tokens_module, "BLOCK", 7)
        lines, seen = templates(60), set[int]()
        whole = Sketch.__call__

        def watched(self: Sketch, tokens: Any, starts: Any) -> Any:
            seen.add(len(index))
            return whole(self, tokens, starts)

        monkeypatch.setattr(Sketch, "__call__", watched)
        index.extend(lines, range(60))
        assert seen == {0}
        assert find(index, *packed(lines), k=1)[:, 0].tolist() == list(range(60))
