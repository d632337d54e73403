"""What each tenant may use, and where its cached prefixes live. From the configuration; nothing here changes."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.config import TenantConfig

EVERYBODY = "*"
"""The section of all tenants without one. No tenant can be called so."""


class Tenants:
    """Looks up a tenant's settings: its own, else those of everybody, else the defaults."""

    def __init__(self, sections: Mapping[str, TenantConfig] | None = None) -> None:
        sections = sections or {}
        self._default = sections.get(EVERYBODY, TenantConfig())
        self._own = {
            name: self._default.model_copy(update={field: getattr(given, field) for field in given.model_fields_set})
            for name, given in sections.items()
        }

    def __getitem__(self, tenant: str) -> TenantConfig:
        """Every field filled in."""
        return self._own.get(tenant, self._default)

    def cache_domain(self, tenant: str) -> str:
        """Prefixes are shared within it. No tenant's name holds a colon, so no shared domain is some tenant's own."""
        shared = self[tenant].cache_domain
        return tenant if shared is None else f"shared:{shared}"
