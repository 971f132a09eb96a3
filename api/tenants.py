"""Who a request comes from: the API keys, and the tenant that each stands for. Knows no endpoint, and logs no key.

    tenant = HMAC-SHA256(installation secret, API key), the first 32 hex characters

Tenants never share cached prefixes, so nobody learns from the time to the first token what others have sent
(CVE-2025-46570), unless the operator shares the cache on purpose (`--cache-sharing all`). The secret lies in a file of
this installation's user. It is the same after a restart, so that what the cache keeps on disk is found again; without
it a tenant's name tells nothing about the key.
"""

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from trunkline.config import ApiConfig
from trunkline.errors import RequestError, shown

logger = logging.getLogger("trunkline.api")

SECRET_BYTES = 32
TENANT_CHARACTERS = 32
TENANT_SHOWN = 8  # of them in the log: enough to tell tenants apart, and to name one
EVERYBODY = ""  # the tenant of all who share one cache


class Forbidden(RequestError):
    """The key is known, but may not do this."""

    status = 403
    type = "permission_error"
    code = "admin_key_required"


class TenantNotFound(RequestError):
    """An admin named a tenant that no key stands for."""

    status = 404
    code = "tenant_not_found"


class Caller(NamedTuple):
    """Who sent a request.

    tenant    whose cache it uses
    is_admin  may see and flush what belongs to other tenants
    owner     whose requests these are: a digest of the key, for keys that share one cache, and so are one tenant, are
              still not each other's; "" without keys
    """

    tenant: str
    is_admin: bool
    owner: str = ""

    def reach(self, named: str | None, tenants: Iterable[str]) -> str | None:
        """Whose things a request is about that names a tenant of `tenants`, or nobody: None is everybody's.

        named  the tenant, or the beginning of it that the log shows, or more

        Raises Forbidden for another tenant's, unless this is an admin; for an admin TenantNotFound, if there is none.
        """
        if named is None:
            return None if self.is_admin else self.tenant
        visible = tenants if self.is_admin else [self.tenant]
        found = [tenant for tenant in visible if named in (tenant, tenant[: max(TENANT_SHOWN, len(named))])]
        if len(found) == 1:
            return found[0]
        if self.is_admin:
            raise TenantNotFound(
                f"There is no tenant {shown(named)}. GET /v1/tenants lists those there are.", param="tenant"
            )
        raise Forbidden(
            "'tenant' names another tenant, and this key may see its own only. Leave it out, or send the key of"
            " --admin-api-key.",
            param="tenant",
        )


class Keys:
    """The keys of one server.

    keys = Keys.of(config)
    keys.caller("sk-…")      # Caller(tenant="5f2c…", is_admin=False), or None: not a key of this server
    keys.tenants             # {"5f2c…": ["--api-key 1"], "90ab…": ["--admin-api-key"]}: by the flags, not the keys

    Without any key everybody may do everything.
    """

    def __init__(self, config: ApiConfig, secret: bytes) -> None:
        self._is_shared = config.cache_sharing == "all"
        self._secret = secret
        known = [(key, False) for key in config.api_keys]
        names = [f"--api-key {number}" for number in range(1, 1 + len(known))]
        if config.admin_api_key is not None:
            known.append((config.admin_api_key, True))
            names.append("--admin-api-key")
        self._known = [(_digest(key), self._caller(key, is_admin)) for key, is_admin in known]
        self._anonymous = None if known else Caller(EVERYBODY, is_admin=True)
        self.tenants: dict[str, list[str]] = {} if known else {EVERYBODY: []}
        for (_, caller), name in zip(self._known, names, strict=True):
            self.tenants.setdefault(caller.tenant, []).append(name)

    @classmethod
    def of(cls, config: ApiConfig) -> "Keys":
        """With this installation's secret, which is read or made only if there is a key to turn into a tenant."""
        is_needed = config.has_keys and config.cache_sharing != "all"
        return cls(config, installation_secret() if is_needed else b"")

    def caller(self, key: str) -> Caller | None:
        """Who sends `key`; "" is no key. It takes the same time whichever it is, and however much of it is right."""
        if self._anonymous is not None:
            return self._anonymous
        found, digest = None, _digest(key)
        for known, caller in self._known:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def _caller(self, key: str, is_admin: bool) -> Caller:
        tenant = EVERYBODY if self._is_shared else tenant_of(self._secret, key)
        return Caller(tenant, is_admin, owner=_digest(key).hex())


def tenant_of(secret: bytes, key: str) -> str:
    """The tenant that a key stands for."""
    return hmac.new(secret, key.encode(), hashlib.sha256).hexdigest()[:TENANT_CHARACTERS]


def _digest(key: str) -> bytes:
    """Of fixed length: comparing keys themselves would tell how long the right one is."""
    return hashlib.sha256(key.encode()).digest()


def secret_file() -> Path:
    """$XDG_STATE_HOME/trunkline/installation-secret, in ~/.local/state by default."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "trunkline" / "installation-secret"


def installation_secret(file: Path | None = None) -> bytes:
    """SECRET_BYTES random bytes, made at the first call and the same ever after; of two that make it at once, one wins.

    If that file can't be used, a warning says why, and the secret is a fresh one.
    """
    try:
        file = secret_file() if file is None else file
        if not file.exists():
            _create(file)
        secret = file.read_bytes()
        if len(secret) == SECRET_BYTES:
            return secret
        problem = f"it has {len(secret)} bytes instead of {SECRET_BYTES}; remove it"
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        problem = str(error)
    logger.warning(
        "The installation secret %s cannot be used: %s. This run makes its own, so what the cache keeps on disk for each API key"
        " will not be found after a restart.",
        file or "in the home folder",
        problem,
    )
    return secrets.token_bytes(SECRET_BYTES)


def _create(file: Path) -> None:
    """Write it aside, then link it into place: whoever sees the file sees all of it, and nobody's is overwritten."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as written:
            written.write(secrets.token_bytes(SECRET_BYTES))
            written.flush()
            os.fsync(written.fileno())
        try:
            os.link(draft, file)
        except FileExistsError:
            return  # another server was faster: its secret is everybody's
    finally:
        draft.unlink(missing_ok=True)
