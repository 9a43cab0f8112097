"""What every object store must do, as tests: subclass ``StoreContract`` for your own.

    class TestMyStore(StoreContract):
        def make_store(self) -> ObjectStore:
            return MyStore()

pytest collects the subclass. Each test asks for a new, empty store.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from weightwire.errors import ObjectMissing, StoreRefused
from weightwire.store import layout
from weightwire.store.contract import ObjectStore
from weightwire.testing.contract_checks import (
    MIB,
    MemoryWatch,
    SourceFailed,
    failing_pieces,
    keys_of,
    pieces_of,
    raises,
    range_of_pieces,
    same,
    sizes_of,
)

PUT_ID = "0123456789abcdef0123456789abcdef"
STRANGE_KEYS = (
    "../outside",
    "/absolute",
    "a//b",
    "a/./b",
    "a/../../b",
    "",
    "a/",
    "nul\0",
    "x" * 256,
    "back\\slash",
)


class StoreContract:
    """Plain test methods; a failure names the promise that was broken."""

    n_listed = 1100
    """More than any store gives in one page."""

    n_streamed_mib = 96
    most_memory_mib: int | None = 64
    """What a streamed put of ``n_streamed_mib`` may take; None where objects live in memory."""

    n_racers = 16

    def make_store(self) -> ObjectStore:
        """A new, empty store.

        Raises:
            NotImplementedError: in this class; a subclass makes one.
        """
        raise NotImplementedError

    def test_what_is_put_is_read(self) -> None:
        store = self.make_store()
        for key, data in [("a", b"1"), ("b/c/d.json", bytes(range(256))), ("empty", b"")]:
            store.put(key, data)
            same(store.read(key), data)

    def test_a_put_replaces_what_was_there(self) -> None:
        store = self.make_store()
        store.put("a", b"a longer first one")
        store.put("a", b"second")
        same(store.read("a"), b"second")
        same(sizes_of(store), {"a": 6})

    def test_ranges_end_where_the_object_ends(self) -> None:
        store = self.make_store()
        store.put("a", b"0123456789")
        for start, stop in [(0, 4), (3, 7), (8, 99), (10, 12), (99, 100), (4, 4), (0, 0), (10, 10)]:
            same(store.read("a", start, stop), b"0123456789"[start:stop])
        for start in (0, 1, 9, 10, 99):
            same(store.read("a", start), b"0123456789"[start:])

    def test_ranges_of_an_empty_object_are_empty(self) -> None:
        store = self.make_store()
        store.put("a", b"")
        for start, stop in [(0, None), (0, 0), (0, 5), (3, 5), (3, None)]:
            same(store.read("a", start, stop), b"")

    def test_reading_what_is_not_there_is_an_error_of_its_own(self) -> None:
        store = self.make_store()
        store.put("a/b", b"x")
        for key in ("nothing", "a", "a/b/c", "a/bc"):
            for start, stop in [(0, None), (0, 4), (2, 2), (5, None)]:
                raises(ObjectMissing, partial(store.read, key, start, stop))

    def test_names_that_lead_elsewhere_are_refused(self) -> None:
        store = self.make_store()
        for key in STRANGE_KEYS:
            raises(StoreRefused, partial(store.put, key, b"x"))
            raises(StoreRefused, partial(store.create, key, b"x"))
            raises(StoreRefused, partial(store.read, key))
            raises(StoreRefused, partial(store.delete, [key]))
        same(keys_of(store), [])

    def test_only_the_first_create_counts(self) -> None:
        store = self.make_store()
        same(store.create("log/1", b"first"), True)
        same(store.create("log/1", b"second"), False)
        same(store.create("log/1", b"first"), False)
        same(store.read("log/1"), b"first")

    def test_a_put_stands_in_the_way_of_a_create(self) -> None:
        store = self.make_store()
        store.put("a", b"put")
        same(store.create("a", b"created"), False)
        same(store.read("a"), b"put")

    def test_a_deleted_name_can_be_created_again(self) -> None:
        store = self.make_store()
        same(store.create("a/b", b"first"), True)
        store.delete(["a/b"])
        same(store.create("a/b", b"second"), True)
        same(store.read("a/b"), b"second")

    def test_many_threads_create_one_name_and_one_wins(self) -> None:
        store = self.make_store()
        for round_ in range(5):
            key = f"log/{round_}"
            with ThreadPoolExecutor(self.n_racers) as threads:
                racers = [str(each).encode() for each in range(self.n_racers)]
                won = list(threads.map(partial(store.create, key), racers))
            same(won.count(True), 1)
            same(store.read(key), racers[won.index(True)])

    def test_listings_are_in_key_order(self) -> None:
        store = self.make_store()
        keys = ["a-b", "a.b", "a/b", "a/b-c/d", "a/b.c", "a/b0", "a0", "b/a", "B", "log~"]
        for key in reversed(keys):
            store.put(key, b"x")
        same(keys_of(store), sorted(keys))

    def test_listings_go_on_after_any_key(self) -> None:
        store = self.make_store()
        keys = sorted(["a-b", "a.b", "a/b", "a/b-c/d", "a/b.c", "a/b0", "a0", "b/a", "log~"])
        for key in keys:
            store.put(key, b"x")
        for after in [*keys, "a", "a/", "a/b-", "a/b-c/", "a/b/", "b", "zz", "0"]:
            same(keys_of(store, "", after), [key for key in keys if key > after])
            same(keys_of(store, "a/", after), [k for k in keys if k > after and k.startswith("a/")])

    def test_a_prefix_is_any_beginning_of_a_key(self) -> None:
        store = self.make_store()
        keys = [layout.commit_key(1), layout.boundary_key(30), layout.boundary_key(4)]
        keys += ["log/b", "log/boundary", "logs/x", "lo", "log/0", "log/1/2"]
        for key in keys:
            store.put(key, b"x")
        same(keys_of(store, layout.boundary_prefix()), sorted(keys[1:3]))
        for prefix in [
            "",
            "l",
            "lo",
            "log",
            "log/",
            "log/b",
            "log/0",
            "log/1",
            "log/1/",
            "x",
            "x/",
        ]:
            same(keys_of(store, prefix), sorted(k for k in keys if k.startswith(prefix)))

    def test_versions_are_listed_from_any_one_on(self) -> None:
        store = self.make_store()
        keys = [layout.commit_key(version) for version in range(6)]
        keys += [layout.anchor_offer_key(3, PUT_ID), layout.skip_offer_key(0, 4, PUT_ID)]
        keys += [layout.boundary_key(2)]
        for key in keys:
            store.put(key, b"x")
        for version in range(-1, 6):
            after = layout.after_version(version)
            same(keys_of(store, layout.LOG, after), sorted(key for key in keys if key > after))

    def test_a_listing_tells_size_and_time(self) -> None:
        store = self.make_store()
        store.put("a", b"12345")
        store.put("b", b"")
        first, second = store.list("")
        same((first.key, first.n_bytes, second.key, second.n_bytes), ("a", 5, "b", 0))
        same(abs(first.modified - second.modified) < 3600, True)

    def test_every_name_of_the_layout_is_kept_as_it_is(self) -> None:
        store = self.make_store()
        keys = [layout.RUN, layout.receipt_key("Worker_1.local-7"), layout.boundary_key(10**12 - 1)]
        keys += [layout.patch_folder(41, 42, PUT_ID) + "patch.json"]
        keys += [
            layout.anchor_folder(42, PUT_ID) + name for name in ("a b~1.json", "x/ü%41#1+.bin")
        ]
        for key in keys:
            store.put(key, key.encode())
        same(keys_of(store), sorted(keys))
        for key in keys:
            same(store.read(key), key.encode())

    def test_long_listings_are_whole(self) -> None:
        store = self.make_store()
        keys = [layout.commit_key(version) for version in range(self.n_listed)]
        with ThreadPoolExecutor(self.n_racers) as threads:
            list(threads.map(lambda key: store.put(key, b"x"), keys))
        same(keys_of(store, layout.LOG), keys)
        same(keys_of(store, layout.LOG, layout.after_version(1049)), keys[1050:])
        store.delete(keys)
        same(keys_of(store), [])

    def test_deleting_passes_over_what_is_not_there(self) -> None:
        store = self.make_store()
        for key in ("a", "b/c", "b/d"):
            store.put(key, b"x")
        store.delete(["nothing", "b/c", "b", "b/c/d", "a", "b/c"])
        same(keys_of(store), ["b/d"])
        store.delete([])
        store.delete(iter(["b/d"]))
        same(keys_of(store), [])
        raises(ObjectMissing, partial(store.read, "a"))

    def test_an_iterable_is_put_whole(self) -> None:
        store = self.make_store()
        for name, pieces in [("none", []), ("empty", [b""]), ("some", [b"ab", b"", b"c"])]:
            store.put(name, pieces)
            same(store.read(name), b"".join(pieces))
            store.put(name, iter(pieces))
            same(store.read(name), b"".join(pieces))

    def test_a_large_put_needs_little_memory(self) -> None:
        store = self.make_store()
        watch = MemoryWatch()
        store.put("large", watch.watched(pieces_of(self.n_streamed_mib)))
        end = self.n_streamed_mib * MIB
        for at in (0, end // 2 - 1, end - 5):
            same(store.read("large", at, at + 5), range_of_pieces(at, at + 5))
        same(sizes_of(store), {"large": end})
        if self.most_memory_mib is not None:
            same(watch.n_most <= self.most_memory_mib * MIB, True)

    def test_a_put_that_fails_half_way_leaves_nothing(self) -> None:
        store = self.make_store()
        store.put("kept", b"old")
        for n_good in (0, 1, 13):
            for key in ("new/one", "kept"):
                raises(SourceFailed, partial(store.put, key, failing_pieces(n_good)))
        mine = failing_pieces(1, OSError("the caller's own"))
        raises(OSError, partial(store.put, "new/one", mine))
        interrupted = failing_pieces(7, KeyboardInterrupt())
        raises(KeyboardInterrupt, partial(store.put, "new/one", interrupted))
        same(keys_of(store), ["kept"])
        same(store.read("kept"), b"old")
        raises(ObjectMissing, partial(store.read, "new/one"))

    def test_threads_do_not_disturb_each_other(self) -> None:
        store = self.make_store()

        def work(worker: int) -> list[str]:
            mine = [f"w{worker}/{each}" for each in range(8)]
            for key in mine:
                store.put(key, key.encode() * 100)
                same(store.read(key), key.encode() * 100)
            store.delete(mine[:4])
            return [info.key for info in store.list(f"w{worker}/")]

        with ThreadPoolExecutor(self.n_racers) as threads:
            left = list(threads.map(work, range(self.n_racers)))
        same(left, [[f"w{w}/{each}" for each in range(4, 8)] for w in range(self.n_racers)])

    def test_writers_and_collectors_share_a_folder(self) -> None:
        store = self.make_store()

        def work(worker: int) -> None:
            for each in range(20):
                same(store.create(f"shared/{worker}-{each}", b"x"), True)
                store.delete([f"shared/{worker}-{each}"])

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(work, range(4)))
        same(keys_of(store), [])
