"""Small results in files: where, under which names, whole or not at all."""

from pathlib import Path

import pytest

from loopkit._engine.trials import user_cache

FOLDERS = [
    ("linux", {}, "home/.cache/loopkit"),
    ("linux", {"XDG_CACHE_HOME": "xdg", "LOCALAPPDATA": "local"}, "xdg/loopkit"),
    ("darwin", {"XDG_CACHE_HOME": "xdg"}, "home/Library/Caches/loopkit"),
    ("win32", {}, "home/AppData/Local/loopkit"),
    ("win32", {"LOCALAPPDATA": "local", "XDG_CACHE_HOME": "xdg"}, "local/loopkit"),
    ("linux", {"LOOPKIT_CACHE_DIR": "own", "XDG_CACHE_HOME": "xdg"}, "own"),
    ("win32", {"LOOPKIT_CACHE_DIR": "own", "LOCALAPPDATA": "local"}, "own"),
    ("linux", {"LOOPKIT_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, "home/.cache/loopkit"),
]


def test_the_folder(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    for platform, settings, wanted in FOLDERS:
        monkeypatch.setattr(user_cache.sys, "platform", platform)
        for name in ("LOOPKIT_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
            monkeypatch.delenv(name, raising=False)
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        assert user_cache.folder() == Path(wanted), (platform, settings)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Which is not there yet, nor is what it lies in."""
    folder = tmp_path / "some" / "where"
    monkeypatch.setenv("LOOPKIT_CACHE_DIR", str(folder))
    return folder


def test_what_is_stored_is_loaded(folder):
    assert user_cache.load("a") is None
    user_cache.store("a", {"unroll": 4})
    user_cache.store("b", [1])
    assert user_cache.load("a") == {"unroll": 4}
    user_cache.store("a", {"unroll": 8})
    assert user_cache.load("a") == {"unroll": 8}
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "b.json"]


def test_half_a_value_is_not_stored(folder):
    user_cache.store("a", 1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        user_cache.store("a", [1, object()])
    assert user_cache.load("a") == 1
    assert [path.name for path in folder.iterdir()] == ["a.json"]


def test_without_a_home(monkeypatch):
    """Nothing is kept, and nobody hears of it."""

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(user_cache.sys, "platform", "linux")
    for name in ("LOOPKIT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    user_cache.store("a", 1)
    assert user_cache.load("a") is None


def test_names():
    """What a release has kept the next one finds."""
    assert user_cache.digest("a step", "a device") == "7deccf310870447e1bfbc400c061d49e"
    others = [("a stepa device",), ("a step", "a", "device"), ("a device", "a step")]
    assert len({user_cache.digest(*parts) for parts in [("a step", "a device"), *others]}) == 4
