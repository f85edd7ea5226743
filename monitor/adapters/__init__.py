"""One file per training framework, behind the protocol in ``base``."""
