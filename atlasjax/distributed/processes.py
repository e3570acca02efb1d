"""The other processes of a job: where they meet, and how one learns that another has ended."""

import re
import socket
import sys
import time

_LOST = re.compile(
    r"gloo|connection (closed|reset|refused)|connection to .* (lost|closed)|socket closed|heartbeat|coordination (service|agent)"
    r"|nccl|barrier timed out",
    re.IGNORECASE,
)


def lost_process(error: BaseException) -> str | None:
    """What an error says of the loss of another process; None if it says nothing of it.

    A collective whose other end is gone fails with what the transport has to say; it may be wrapped in errors of other libraries.
    """
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        for line in str(cause).splitlines():
            if _LOST.search(line):
                return line.strip()[:200].rstrip(". ")
        cause = cause.__cause__ or cause.__context__
    return None


def bind_address(coordinator: str, *, patience: float = 30.0) -> str | None:
    """The address for the coordinator's service to listen on: the coordinator's own, if it is one of this machine's.

    Args:
      coordinator: "host:port".
      patience: seconds to wait for a host that does not resolve yet, as those of a job that is just being started.

    Returns:
      "address:port"; None where the host is not an address of this machine: another process's, or one that is forwarded to it.

    Raises:
      ValueError: the host does not resolve.
    """
    host, _, port = coordinator.rpartition(":")
    started = time.monotonic()
    while True:
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            break
        except OSError as error:
            if time.monotonic() - started >= patience:
                raise ValueError(
                    f"processes.coordinator is {coordinator!r}, whose host does not resolve ({error.strerror}; tried for "
                    f"{patience:g} s)."
                ) from None
            print(f"The coordinator's host {host!r} does not resolve yet; trying again.", file=sys.stderr, flush=True)
            time.sleep(min(5.0, patience))
    for family, kind, protocol, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                continue
        return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
    return None
