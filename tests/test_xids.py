"""xids: NVIDIA's list, number by number, and the kernel log's line in every form it is known in."""

from __future__ import annotations

import pytest

from weightcached.xids import Kind, LoggedXid, PciAddress, describe, kind_of, parse_line

# The catalog's column "Resolution Bucket (Immediate Action)", for every number that applies to a GPU from A100 on.
CATALOG = {
    "RESET_GPU": [46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158],
    "RESTART_BM": [79],
    "WORKFLOW_XID_48": [48],  # alone: reset the GPU; with 63 or 64: drain and reset
    "RESTART_APP": [8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88,
                    89, 94, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 126, 127, 128, 129, 130, 131, 132, 133, 134,
                    135, 139],
    "WORKFLOW_XID_45": [45],
    "IGNORE": [14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 157, 160, 161],
    "CHECK_MECHANICALS": [54],
    "WORKFLOW_NVLINK_ERR": [74],
    "UPDATE_SWFW": [78],
    "CONTACT_SUPPORT": [142],
    "WORKFLOW_NVLINK5_ERR": [144, 145, 146, 147, 148, 149, 150],
    "RESTART_VM": [151],
    "XID_154": [154],
    "CHECK_UVM": [159],
    "none given": [162, 163, 164, 165, 166, 167, 168, 169, 170, 171, 172],
}  # fmt: skip
RULE = {
    "RESET_GPU": Kind.FATAL,
    "RESTART_BM": Kind.FATAL,
    "WORKFLOW_XID_48": Kind.FATAL,
    "RESTART_APP": Kind.APPLICATION,
}
# Against the rule: their text says what the action alone does not.
BY_TEXT = {
    64: Kind.OTHER,  # memory could not be remapped: what is in it was lost, or not, with the error before
    136: Kind.OTHER,  # of a link, when it is trained
    155: Kind.OTHER,  # of a link that went down, on purpose as well
    156: Kind.OTHER,  # of a resource that is used no more
    43: Kind.APPLICATION,  # "a user application hits a software induced fault"
    45: Kind.APPLICATION,  # "the user application aborts"
    137: Kind.APPLICATION,  # "typically these are application-level bugs"
}


@pytest.mark.parametrize(("action", "xids"), CATALOG.items(), ids=CATALOG)
def test_the_catalog_decides(action: str, xids: list[int]) -> None:
    """A reset or a restart of the host is fatal, a restart of the application is the application's, the rest is not."""
    for xid in xids:
        assert kind_of(xid) is BY_TEXT.get(xid, RULE.get(action, Kind.OTHER)), xid


def test_unknown_numbers_lose_nothing() -> None:
    """Numbers that are unused or not in the list yet are counted only: nothing is thrown away by a guess."""
    known = {xid for xids in CATALOG.values() for xid in xids}
    assert {kind_of(xid) for xid in range(1000) if xid not in known} == {Kind.OTHER}


def test_names() -> None:
    """What a person reads; every number that has a consequence has a name."""
    assert describe(79) == "Xid 79 (GPU has fallen off the bus)"
    assert describe(31) == "Xid 31 (GPU memory page fault)"
    assert describe(999) == "Xid 999"
    assert all("(" in describe(xid) for xid in range(200) if kind_of(xid) is not Kind.OTHER)


HERE = PciAddress(0, 0x3B, 0)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python3, Ch 00000008, intr 10000000. MMU Fault: ENGINE ...",
            LoggedXid(HERE, 31, 1234, "python3"),
        ),
        (
            "4,1178,5148900,-;NVRM: Xid (PCI:0000:3b:00): 43, pid=77, name=VLLM::EngineCor, Ch 0000000a",
            LoggedXid(HERE, 43, 77, "VLLM::EngineCor"),
        ),
        ("NVRM: Xid (PCI:0000:3b:00): 13, pid='<unknown>', name=<unknown>, Graphics", LoggedXid(HERE, 13, None, None)),
        ("NVRM: Xid (PCI:0000:3B:00): 79, GPU has fallen off the bus.", LoggedXid(HERE, 79, None, None)),
        ("NVRM: Xid (PCI:0001:3b:1f): 48, pid=9", LoggedXid(PciAddress(1, 0x3B, 0x1F), 48, 9, None)),
        ("NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 31, pid=5, name=a b", LoggedXid(HERE, 31, 5, "a b")),
        ("NVRM: GPU at PCI:0000:3b:00: GPU-b850f46d-d5ea-c752-ddf3-c4453e44d3f7", None),
        ("NVRM: Xid (PCI:0000:3b:00): many", None),
        ("usb 1-1: Xid", None),
        ("", None),
    ],
)
def test_lines_of_the_kernel_log(line: str, found: LoggedXid | None) -> None:
    """Device, number, pid and name, with or without a record's prefix; the driver does not always know whose it is."""
    assert parse_line(line) == found


def test_both_ways_to_write_an_address() -> None:
    """NVML's and the kernel log's are one."""
    assert PciAddress.parse("00000000:3B:00.0") == PciAddress.parse("0000:3b:00") == HERE
    with pytest.raises(ValueError):
        PciAddress.parse("3b")
