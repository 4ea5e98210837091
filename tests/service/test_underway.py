"""What a load has brought that was not over when its service ended."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.worker.process import shard
from weightcached.service.underway import UnderWay
from weightcached.service.vault import Vault


def held(vault: Vault, device: str, model: str, generation: int, spec: str | None = None) -> None:
    attributes = {} if spec is None else {"spec": spec}
    with shard(model, generation, b"data", attributes=attributes) as fds:
        vault.hold(device, model, generation, 4, fds)


def names(vault: Vault) -> list[tuple[str, str, int]]:
    """Of all shards on both devices."""
    return [
        (item.device, item.model, item.generation) for name in ("host-0", "host-1") for item in vault.of_device(name)
    ]


def test_what_the_load_has_published_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of its model, with what its shards carry, on any device; a line for each. Once: the next start finds nothing."""
    UnderWay(tmp_path / "file").begin("m", "spec/2")
    vault = Vault()
    held(vault, "host-0", "m", 1, "spec/1")
    held(vault, "host-0", "m", 2, "spec/2")
    held(vault, "host-0", "m", 3)
    held(vault, "host-1", "m", 1, "spec/2")
    held(vault, "host-1", "n", 7, "spec/2")
    UnderWay(tmp_path / "file").settle(vault)
    assert names(vault) == [("host-0", "m", 1), ("host-0", "m", 3), ("host-1", "n", 7)]
    assert [record.getMessage() for record in caplog.records] == [
        f"m on {device}, generation {generation}, is dropped: the service ended before its load was over"
        for device, generation in (("host-0", 2), ("host-1", 1))
    ]
    held(vault, "host-1", "m", 1, "spec/2")
    UnderWay(tmp_path / "file").settle(vault)
    assert len(names(vault)) == 4
    assert list(tmp_path.iterdir()) == []
    vault.close()


def test_a_load_that_is_over_leaves_nothing(tmp_path: Path) -> None:
    """Nor does one that nobody remembers."""
    vault = Vault()
    held(vault, "host-0", "m", 1, "spec/1")
    for under_way in (UnderWay(tmp_path / "file"), UnderWay()):
        under_way.begin("m", "spec/1")
        under_way.end()
        under_way.end()
        under_way.settle(vault)
    assert names(vault) == [("host-0", "m", 1)]
    assert list(tmp_path.iterdir()) == []
    vault.close()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": "m"}', "1"])
def test_a_file_that_is_none_drops_nothing(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """What is cached stays, with an error in the log."""
    (tmp_path / "file").write_text(text)
    vault = Vault()
    held(vault, "host-0", "m", 1, "spec/1")
    UnderWay(tmp_path / "file").settle(vault)
    assert names(vault) == [("host-0", "m", 1)]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert list(tmp_path.iterdir()) == []
    vault.close()


def test_a_place_that_cannot_be_written_to_ends_no_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It says what a restart in the middle would do."""
    under_way = UnderWay(tmp_path / "gone" / "file")
    under_way.begin("m", "spec/1")
    assert "a restart in the middle of this load keeps what it has published" in caplog.text
    under_way.end()
    (tmp_path / "folder").mkdir()
    UnderWay(tmp_path / "folder").end()
    assert "remove it, or the next start drops what this load has published" in caplog.text
