"""Ray's settings that must be in the environment before ray is imported. Imports nothing heavy."""

from __future__ import annotations

import os

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # An unhealthy replica is stuck by definition; asking it to stop gracefully would wait for its timeout.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # Without it every actor that reserves no GPU loses sight of the cards, with a warning that it will change.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

OWN_CLUSTER = {
    # A token file in the user's home would turn authentication on for our private, loopback-only Ray.
    "RAY_AUTH_MODE": "disabled",
}


def prepare() -> None:
    """Set what the user has not set. Call it before anything imports ray."""
    wanted = SETTINGS if os.environ.get("RAY_ADDRESS") else {**SETTINGS, **OWN_CLUSTER}
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
