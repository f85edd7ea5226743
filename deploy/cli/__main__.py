"""``python -m deploy.cli``: the same as the command ``driftpoint``."""

from deploy.cli.app import main

main()
