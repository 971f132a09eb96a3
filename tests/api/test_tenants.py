"""Keys, tenants, and the secret between them. No server."""

import logging
import threading
from pathlib import Path

import pytest

from trunkline.api.tenants import (
    SECRET_BYTES,
    Caller,
    Forbidden,
    Keys,
    TenantNotFound,
    installation_secret,
    secret_file,
    tenant_of,
)
from trunkline.config import ApiConfig

SECRET = bytes(range(SECRET_BYTES))


def make_keys(*api_keys: str, admin: str | None = None, sharing: str = "key", secret: bytes = SECRET) -> Keys:
    config = ApiConfig(served_model_names=("m",), api_keys=api_keys, admin_api_key=admin, cache_sharing=sharing)
    return Keys(config, secret)


def test_without_keys_everybody_is_admin_of_one_tenant() -> None:
    assert make_keys().caller("") == make_keys().caller("unused") == Caller("", is_admin=True)


def test_each_key_is_a_tenant_of_its_own() -> None:
    keys = make_keys("a", "b")
    first, second = keys.caller("a"), keys.caller("b")
    assert first is not None and second is not None
    assert first.tenant != second.tenant
    assert not first.is_admin
    assert keys.caller("") is keys.caller("c") is keys.caller("A") is None


def test_tenant_is_stable_and_depends_on_key_and_secret() -> None:
    # HMAC-SHA256 of RFC 4231's second case: key "Jefe", data "what do ya want for nothing?".
    assert tenant_of(b"Jefe", "what do ya want for nothing?") == "5bdcc146bf60754e6a042426089575c7"
    (caller,) = {make_keys("a").caller("a"), make_keys("b", "a").caller("a")}
    assert caller is not None
    assert caller != make_keys("a", secret=bytes(SECRET_BYTES)).caller("a")


def test_shared_on_purpose() -> None:
    keys = make_keys("a", "b", admin="root", sharing="all")
    callers = [keys.caller(key) for key in ("a", "b", "root")]
    assert [caller and (caller.tenant, caller.is_admin) for caller in callers] == [("", False), ("", False), ("", True)]
    assert len({caller.owner for caller in callers if caller is not None}) == 3, "still not each other's requests"
    assert keys.caller("c") is None


def test_admin_key() -> None:
    keys = make_keys("a", admin="root")
    admin = keys.caller("root")
    assert admin is not None
    assert admin.is_admin
    assert admin.tenant == tenant_of(SECRET, "root")


def test_admin_key_alone_is_the_only_key() -> None:
    keys = make_keys(admin="root")
    assert keys.caller("") is keys.caller("unused") is None
    admin = keys.caller("root")
    assert admin is not None
    assert admin.is_admin


def test_reach() -> None:
    mine, other, near = "0123456789abcdef", "fedcba9876543210", "fedcba98ffffffff"
    tenants = [mine, other, near]
    admin, user = Caller(mine, is_admin=True), Caller(mine, is_admin=False)
    assert admin.reach(None, tenants) is None
    assert user.reach(None, tenants) == mine
    for caller in (admin, user):
        assert caller.reach(mine, tenants) == caller.reach(mine[:8], tenants) == mine
    assert admin.reach(other, tenants) == admin.reach(other[:9], tenants) == other
    for foreign in (other, other[:9], "", mine[:7], mine + "0"):
        with pytest.raises(Forbidden, match="this key may see its own only") as refused:
            user.reach(foreign, tenants)
        assert (refused.value.status, refused.value.code) == (403, "admin_key_required")
    for unknown in ("", "acme", mine[:7], mine + "0", other[:8]):
        with pytest.raises(TenantNotFound) as unfound:
            admin.reach(unknown, tenants)
        assert (unfound.value.status, unfound.value.param) == (404, "tenant")
    assert str(unfound.value) == "There is no tenant 'fedcba98'. GET /v1/tenants lists those there are."


def test_tenants_are_told_by_the_places_of_their_keys() -> None:
    keys = make_keys("a", "b", admin="root")
    assert list(keys.tenants.values()) == [["--api-key 1"], ["--api-key 2"], ["--admin-api-key"]]
    caller = keys.caller("b")
    assert caller is not None
    assert keys.tenants[caller.tenant] == ["--api-key 2"]
    shared = make_keys("a", "b", sharing="all")
    assert shared.tenants == {"": ["--api-key 1", "--api-key 2"]}
    assert make_keys().tenants == {"": []}


def test_secret_is_made_once(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "down" / "secret"
    first = installation_secret(file)
    assert len(first) == SECRET_BYTES
    assert installation_secret(file) == first
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["secret"], "no drafts are left"
    assert installation_secret(tmp_path / "other") != first


def test_servers_that_start_at_once_agree(tmp_path: Path) -> None:
    seen: list[bytes] = []
    barrier = threading.Barrier(8)

    def start() -> None:
        barrier.wait()
        seen.append(installation_secret(tmp_path / "state" / "secret"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1


def test_the_slower_of_two_takes_the_secret_of_the_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    monkeypatch.setattr(Path, "exists", lambda _path: False)  # it looked before the other had written
    first = installation_secret(file)
    assert installation_secret(file) == first
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_damaged_secret_is_told_and_not_overwritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"short")
    with caplog.at_level(logging.WARNING, "trunkline.api"):
        first, second = installation_secret(file), installation_secret(file)
    assert first != second
    assert len(first) == SECRET_BYTES
    assert file.read_bytes() == b"short"
    assert f"{file} cannot be used: it has 5 bytes instead of 32; remove it." in caplog.text


def test_secret_that_cannot_be_written_is_fresh(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "no-folder").write_text("")
    with caplog.at_level(logging.WARNING, "trunkline.api"):
        secret = installation_secret(tmp_path / "no-folder" / "secret")
    assert len(secret) == SECRET_BYTES
    assert "will not be found after a restart" in caplog.text
    assert secret.hex() not in caplog.text


def test_place_of_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert secret_file() == Path("/state/trunkline/installation-secret")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert secret_file() == Path("/home/me/.local/state/trunkline/installation-secret")


def test_no_secret_is_made_where_none_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for config in (
        ApiConfig(served_model_names=("m",)),
        ApiConfig(served_model_names=("m",), api_keys=("a",), cache_sharing="all"),
    ):
        Keys.of(config)
        assert not list(tmp_path.iterdir())
    keys = Keys.of(ApiConfig(served_model_names=("m",), api_keys=("a",)))
    caller = keys.caller("a")
    assert caller is not None
    assert caller.tenant == tenant_of(installation_secret(), "a")
