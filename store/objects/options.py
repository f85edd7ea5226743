"""What a bucket is reached with. Values only; credentials are never among them: they come from the environment."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
_PARTS = 9000


@dataclass(frozen=True)
class ObjectOptions:
    """endpoint, region, allow_http: None: what the environment says (``AWS_ENDPOINT_URL``, ``AWS_REGION``,
    ``AWS_ALLOW_HTTP``). virtual_hosted: the bucket is part of the host's name.

    request_seconds: for one request and its answer. retry_seconds: from the first try of an operation until it fails.
    part_mib: size of the parts that large payloads go in; what is no larger goes in one request. connections: parts on
    their way at once, or ranges. spool: directory for payloads whose header is known last; None: the system's for
    temporary files."""

    endpoint: str | None = None
    region: str | None = None
    allow_http: bool | None = None
    virtual_hosted: bool = False
    request_seconds: float = 30.0
    retry_seconds: float = 60.0
    part_mib: float = 16
    connections: int = 8
    spool: str | None = None

    def part_bytes(self, most: int = 0) -> int:
        """Bytes of each part of a payload that may come to ``most``: S3 takes 10 000 of them."""
        return max(int(self.part_mib * MIB), -(-most // _PARTS))
