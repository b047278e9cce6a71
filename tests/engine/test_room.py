"""Is there room for what is to be kept of every step: whose memory counts, and where it ends."""

import os
from types import SimpleNamespace

import jax
import pytest

from loopkit._engine.lowering import memory


def test_all_of_it_may_be_filled(monkeypatch):
    monkeypatch.setattr(memory, "all_memory", lambda: 300)
    memory.check_room("scan", 3, 100)
    with pytest.raises(
        ValueError, match=r"scan: .* 4 steps of 100 bytes, 400 B in all, fit.* Got: 300 B"
    ):
        memory.check_room("scan", 4, 100)


def test_nothing_is_refused_where_nobody_says(monkeypatch):
    monkeypatch.setattr(memory, "all_memory", lambda: None)
    memory.check_room("scan", 10**9, 10**9)


def test_memory_of_devices(monkeypatch):
    """Each of those of all processes has as much as one that is here."""
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 7000, "bytes_in_use": 6999})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert memory.all_memory() == 28_000


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 3}])
def test_memory_of_the_machine(monkeypatch, stats):
    """Devices may keep no account; each process has a machine of its own."""
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__, raising=False)
    assert memory.all_memory() == 2 * 4_096_000
    for refuses in (ValueError, OSError, AttributeError):

        def sysconf(name, error=refuses):
            raise error

        monkeypatch.setattr(os, "sysconf", sysconf, raising=False)
        assert memory.all_memory() is None
