"""How the ranks of a domain find each other by socket: nothing but what MPI already connects has to be configured.

Promises: ports are chosen by the system and served on one address only, which the domain's first rank hands to the
others over the host domain. IPv4 only.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta

from torch._C import _distributed_c10d as c10d

from mpiinfer.comm.agree import on_all, on_first
from mpiinfer.comm.domain import Domain
from mpiinfer.errors import LaunchError

LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT = timedelta(seconds=30)
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Network:
    """Where the ranks of a world stand, for whoever opens a socket between them.

    hosts, nodes: host name and node index of each rank of the root domain. interface: the network interface to use, or
    None for the one that leads to the other hosts. job: a name that no other run has.
    """

    job: str
    hosts: tuple[str, ...]
    nodes: tuple[int, ...]
    interface: str | None = None


def open_store(host: Domain, network: Network) -> tuple[c10d.Store, str]:
    """A store served by the domain's first rank on a port that the system chose, and its address "host:port"."""
    served: list[c10d.Store] = []

    def serve() -> tuple[str, int]:
        address = own_address(host, network)
        # Bound here and not by the store, which would listen on every interface.
        with socket.create_server((address, 0), backlog=max(128, host.size)) as listener:
            port: int = listener.getsockname()[1]
            served.append(
                c10d.TCPStore(
                    *(address, port, None, True, CONNECT_TIMEOUT),
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
            )
        return address, port

    def join() -> c10d.Store:
        try:
            return c10d.TCPStore(address, port, None, False, CONNECT_TIMEOUT, wait_for_workers=False)
        except RuntimeError as error:
            raise LaunchError(
                f"host {socket.gethostname()} cannot reach {address}:{port}, opened for domain {host.name!r}: set "
                f"MPIINFER_INTERFACE to a network interface that all hosts share ({_first_line(error)})"
            ) from None

    address, port = on_first(host, serve)
    store = on_all(host, lambda: served[0] if served else join())
    return store, f"{address}:{port}"


def own_address(host: Domain, network: Network) -> str:
    """The IPv4 address under which the other ranks of `host` reach this one."""
    if network.interface is not None:
        return interface_address(network.interface)
    if len({network.nodes[rank] for rank in host.world_ranks}) == 1:
        return LOOPBACK
    mine = network.hosts[host.world_ranks[host.rank]]
    others = dict.fromkeys(network.hosts[rank] for rank in host.world_ranks)
    for other in [name for name in others if name != mine]:
        address = _address_towards(other)
        if address is not None:
            return address
    raise LaunchError(
        f"host {mine} has no address that leads to {', '.join(name for name in others if name != mine)} by name: set "
        f"MPIINFER_INTERFACE to the network interface to use (here: {', '.join(_interfaces())})"
    )


def _address_towards(host: str) -> str | None:
    """My address on the way to `host`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if address.startswith("127.") else address


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface of this host.

    Raises LaunchError naming the interfaces that there are.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            raise LaunchError(
                f"MPIINFER_INTERFACE={interface}: host {socket.gethostname()} has no such network interface with an "
                f"IPv4 address; it has {', '.join(_interfaces())}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
