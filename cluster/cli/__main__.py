"""``python -m cluster.cli`` is ``quire``."""

from cluster.cli import main

main()
