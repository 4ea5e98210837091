"""HostSink: reads land in the slab's own memory."""

from __future__ import annotations

import threading

from weightcached.loader.plan import Piece, Read
from weightcached.loader.sink import HostSink
from weightcached.shard.host import HostSlab


def test_listed_pieces_are_the_slab_itself() -> None:
    """What is written into the places of a read is in the slab at once; unlisted pieces follow each other elsewhere."""
    slab = HostSlab(1024)
    sink = HostSink(slab)
    sink.start(threads=1, reads=1)
    unlisted = memoryview(bytearray(16))
    read = Read(0, (Piece(None, 3), Piece(256, 4), Piece(None, 2)), 256, 512)
    with sink.writer() as writer:
        header, tensor, rest = writer.place(read, unlisted)
        header[:], tensor[:], rest[:] = b"abc", b"1234", b"de"
        writer.write(read)
    assert bytes(unlisted[:5]) == b"abcde"
    assert bytes(slab.view[255:261]) == b"\x001234\x00"
    for view in (header, tensor, rest):
        view.release()
    sink.finish()
    sink.close()
    slab.close()


def test_a_closed_sink_does_not_keep_the_slab_from_being_sealed() -> None:
    """Sealing unmaps the slab, which a left-over view of it would forbid."""
    slab = HostSlab(4096)
    sink = HostSink(slab)
    sink.close()
    sink.close()
    slab.seal().close()


def test_threads_fill_disjoint_parts() -> None:
    """Several writers at once, each in its own part."""
    slab = HostSlab(4096)
    sink = HostSink(slab)

    def fill(number: int) -> None:
        read = Read(0, (Piece(number * 512, 512),), number * 512, number * 512 + 512)
        with sink.writer() as writer:
            (view,) = writer.place(read, memoryview(b""))
            view[:] = bytes([number]) * 512
            view.release()
            writer.write(read)

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bytes(slab.view) == b"".join(bytes([number]) * 512 for number in range(8))
    sink.close()
    slab.close()
