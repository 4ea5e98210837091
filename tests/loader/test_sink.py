"""HostSink: what goes whole to one place is read there, everything else comes there from the ring, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.leaks import NoDescriptorLeaks
from tests.loader.loads import noise, small_blocks
from weightcached.checkpoint.digest import BLOCK_BYTES
from weightcached.loader.plan import Copy
from weightcached.loader.reader_process import MAX_PIECES
from weightcached.loader.sink import BUFFERS, MIN_STAGING_BYTES, HostSink, Placed
from weightcached.shard.host import HostSlab


@pytest.fixture(autouse=True)
def nothing_left(descriptors: NoDescriptorLeaks) -> None:
    """No test leaves a descriptor behind."""


@contextmanager
def slabs_of(*sizes: int) -> Iterator[list[HostSlab]]:
    slabs = [HostSlab(nbytes) for nbytes in sizes]
    try:
        yield slabs
    finally:
        for slab in slabs:
            slab.close()


@contextmanager
def started(sink: HostSink) -> Iterator[HostSink]:
    with closing(sink):
        sink.start(1)
        yield sink


def read(sink: HostSink, placed: Placed, data: bytes) -> None:
    """Fills the places as a reader does, through the descriptors of the regions."""
    regions = sink.regions()
    position = 0
    for place in placed.places:
        assert place.nbytes > 0
        assert place.offset + place.nbytes <= regions[place.region].nbytes
        os.pwrite(regions[place.region].fd, data[position : position + place.nbytes], place.offset)
        position += place.nbytes
    assert position == len(data), "the places hold the whole block"


def fill(sink: HostSink, data: bytes, copies: Sequence[Copy]) -> list[int]:
    """Puts one block through the sink; the lengths of its places."""
    placed = sink.place(len(data), copies, wait=True)
    assert placed is not None
    assert placed.places
    assert len(placed.places) <= MAX_PIECES
    read(sink, placed, data)
    sink.write(placed)
    return [place.nbytes for place in placed.places]


def test_what_goes_whole_to_one_place_is_read_into_the_slab() -> None:
    """A tensor's place is in the slab itself, what no tensor needs is elsewhere."""
    with slabs_of(1024) as (slab,), closing(HostSink([slab])) as sink:
        sink.start(1)
        placed = sink.place(9, [Copy(0, 256, 3, 4)], wait=False)
        assert placed is not None
        assert [place.region for place in placed.places] == [0, 1, 0]
        assert placed.left == ()
        read(sink, placed, b"abc1234de")
        assert bytes(slab.view) == bytes(256) + b"1234" + bytes(764)
        sink.write(placed)
        sink.finish()
        assert bytes(slab.view) == bytes(256) + b"1234" + bytes(764)


def test_bytes_that_several_slabs_want_come_from_the_ring() -> None:
    """A tensor that every rank holds whole is read once and copied to each."""
    with slabs_of(64, 64, 64) as slabs, started(HostSink(slabs)) as sink:
        data = noise(30)
        assert fill(sink, data, [Copy(number, 8 * number, 5, 20) for number in range(3)]) == [30]
        for number, slab in enumerate(slabs):
            assert bytes(slab.view) == bytes(8 * number) + data[5:25] + bytes(44 - 8 * number)


def test_only_what_is_shared_takes_the_detour() -> None:
    """Beside a tensor for two ranks and rows for each, the tensors of one rank still go straight to their slab."""
    with slabs_of(256, 256) as slabs, started(HostSink(slabs)) as sink:
        data = noise(100)
        copies = [
            Copy(0, 0, 0, 10),
            Copy(0, 50, 20, 10),
            Copy(0, 100, 40, 5, 3, 10, 5),
            Copy(0, 200, 70, 30),
            Copy(1, 0, 10, 10),
            Copy(1, 50, 20, 10),
            Copy(1, 100, 45, 5, 3, 10, 5),
        ]
        assert fill(sink, data, copies) == [10, 10, 50, 30]
        rows = [data[40 + 5 * n : 45 + 5 * n] for n in range(6)]
        first = data[:10] + bytes(40) + data[20:30] + bytes(40) + rows[0] + rows[2] + rows[4] + bytes(85) + data[70:]
        second = data[10:20] + bytes(40) + data[20:30] + bytes(40) + rows[1] + rows[3] + rows[5]
        assert bytes(slabs[0].view) == first.ljust(256, b"\0")
        assert bytes(slabs[1].view) == second.ljust(256, b"\0")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_copies_of_a_block(data: st.DataObject) -> None:
    """Whatever copies a block has, in one slab or several, apart or crossing: each slab gets its bytes and no other."""
    nbytes = data.draw(st.integers(1, 200))
    block = noise(nbytes, data.draw(st.integers(0, 99)))
    copies: list[Copy] = []
    expected = [bytearray(4000) for _ in range(3)]
    for number, wanted in enumerate(expected):
        end = 0
        for _ in range(data.draw(st.integers(0, 4))):
            width = data.draw(st.integers(1, nbytes))
            start = data.draw(st.integers(0, nbytes - width))
            pitch = data.draw(st.integers(width, width + 30))
            rows = data.draw(st.integers(1, min(4, 1 + (nbytes - start - width) // pitch)))
            offset = end + data.draw(st.integers(0, 3))
            slab_pitch = width + data.draw(st.integers(0, 3))
            for row in range(rows):
                at, source = offset + row * slab_pitch, start + row * pitch
                wanted[at : at + width] = block[source : source + width]
            end = offset + rows * slab_pitch
            copies.append(Copy(number, offset, start, width, rows, pitch, slab_pitch))
    with small_blocks(200), slabs_of(4000, 4000, 4000) as slabs, started(HostSink(slabs, 400)) as sink:
        fill(sink, noise(200, 1), [])  # what a buffer held before
        fill(sink, block, copies)
        assert [bytes(slab.view) for slab in slabs] == [bytes(wanted) for wanted in expected]


@pytest.mark.parametrize("count", [1, MAX_PIECES // 2 - 1, MAX_PIECES // 2, MAX_PIECES // 2 + 1, 2 * MAX_PIECES])
def test_a_block_has_no_more_places_than_a_message_takes(count: int) -> None:
    """Many tensors in one block, with other bytes around each, come whole; too many of them by way of the ring."""
    data = noise(3 * count + 2)
    copies = [Copy(0, 256 * number, 3 * number + 2, 1) for number in range(count)]
    with slabs_of(256 * count) as (slab,), started(HostSink([slab])) as sink:
        places = fill(sink, data, copies)
        assert len(places) in (1, 2 * count + 1)
        expected = b"".join(data[3 * number + 2 : 3 * number + 3].ljust(256, b"\0") for number in range(count))
        assert bytes(slab.view) == expected


@pytest.mark.parametrize(
    ("staging", "readers"),
    [(0, 1), (MIN_STAGING_BYTES, 9), (9 * BLOCK_BYTES, 2), (3 * BLOCK_BYTES + 1, 2), (1 << 30, 1)],
)
def test_blocks_under_way(staging: int, readers: int) -> None:
    """Some buffers for each reader, as many as `staging` holds, two at least; a block that is written makes room."""
    most = max(2, min(BUFFERS * readers, staging // BLOCK_BYTES))
    with closing(HostSink([], staging)) as sink:
        sink.start(readers)
        assert sink.regions()[0].nbytes == max(2, staging // BLOCK_BYTES) * BLOCK_BYTES
        placed = [sink.place(100, [], wait=True) for _ in range(most)]
        assert None not in placed
        assert sorted(item.buffer for item in placed if item) == list(range(most))
        assert sink.place(100, [], wait=True) is None, "there is nothing to wait for"
        assert placed[1] is not None
        sink.write(placed[1])
        again = sink.place(BLOCK_BYTES, [], wait=True)
        assert again is not None
        assert again.buffer == placed[1].buffer


def test_blocks_under_way_do_not_touch_each_other() -> None:
    """Two whole blocks, read and written in another order, each come to their place."""
    with slabs_of(BLOCK_BYTES, BLOCK_BYTES) as slabs, started(HostSink(slabs, 0)) as sink:
        blocks = [noise(BLOCK_BYTES, 1), noise(1000, 2)]
        wanted = [
            [Copy(0, 0, 0, BLOCK_BYTES), Copy(1, 0, 0, BLOCK_BYTES)],
            [Copy(1, 5000, 1, 999), Copy(0, 0, 0, 10)],
        ]
        placed = [sink.place(len(data), copies, wait=False) for data, copies in zip(blocks, wanted, strict=True)]
        for item, data in reversed(list(zip(placed, blocks, strict=True))):
            assert item is not None
            read(sink, item, data)
        for item in placed:
            assert item is not None
            sink.write(item)
        assert bytes(slabs[0].view) == blocks[1][:10] + blocks[0][10:]
        assert bytes(slabs[1].view) == blocks[0][:5000] + blocks[1][1:] + blocks[0][5999:]


def test_a_closed_sink_does_not_keep_the_slab_from_being_sealed() -> None:
    """Sealing unmaps the slab, which a left-over view of it would forbid; an empty slab is one all the same."""
    slabs = [HostSlab(4096), HostSlab(0)]
    sink = HostSink(slabs)
    sink.start(1)
    fill(sink, b"abc", [Copy(0, 0, 0, 2), Copy(0, 256, 1, 1, 2, 1, 1)])
    sink.close()
    sink.close()
    for slab in slabs:
        slab.seal().close()
