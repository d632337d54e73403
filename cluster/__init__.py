"""What router and workers share: protocol stubs, errors, configuration, identities, membership, and the composition.

Importing this package, or ``cluster.errors``, loads nothing heavy. Who may import whom is in pyproject.toml
(import-linter keeps it).
"""
