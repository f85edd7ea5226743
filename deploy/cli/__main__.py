"""Run ``python -m deploy.cli``, the same as ``driftpoint``."""

from deploy.cli.app import main

main()
