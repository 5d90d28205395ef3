"""Network findings: names, ports, interfaces and connections, judged from the answers of all hosts.

Nothing here talks to a host.
"""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colossalai.cluster import GLOO, NCCL, chosen_interfaces
from colossalai.launcher.preflight._findings import (
    Answer,
    Answers,
    Finding,
    failed,
    fine,
    prevailing,
    unanswered,
    values_of,
    warning,
)
from colossalai.launcher.preflight._probe_network import mapped

_SLOW_LOOKUP_S = 0.5  # a remote name server that works takes far less
_OPEN = "let the hosts reach one another on all TCP ports"
# Result of a connection in plain words, by stage and error.
_CONNECT = {
    "ETIMEDOUT": "nothing comes back: a firewall drops the packets, or the route is wrong",
    "ECONNREFUSED": "it is refused: a firewall rejects it, or another machine has this address",
    "EHOSTUNREACH": "there is no way to it: a firewall rejects it, or it is on another network",
    "ENETUNREACH": "there is no route to its network",
    "EACCES": "the sending host itself forbids it: its firewall, or a rule of its routes",
    "EPERM": "the sending host itself forbids it: its firewall",
    "unknown name": "the name is not known",
}


@dataclass(frozen=True)
class HostInterface:
    """The interface by which a host is in the network of the job."""

    interface: str
    address: str
    mtu: int | None = None


def is_loopback(address: str) -> bool:
    """Return whether an address denotes the local machine on every host."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def check_master_address(answers: Answers, name: str) -> Iterator[Finding]:
    """Check that the name of the first host means the same address on all, and none of their own."""
    yield from unanswered("master address", answers)
    found = values_of(answers)
    resolved = {host: sorted(each["addresses"]) for host, each in found.items() if each["addresses"]}
    common = {host: each for host, each in resolved.items() if not any(map(is_loopback, each))} or resolved
    source, wanted = prevailing(common) if common else ("", [])
    for host, each in found.items():
        addresses, by = each["addresses"], f" ({each['hosts_line']})" if each["hosts_line"] else ""
        if not addresses:
            todo = "add it to /etc/hosts there, or give an address: --master_addr"
            yield failed(host, "master address", f"does not know the name {name}: {each['error']}", todo)
        elif len(found) > 1 and (own := [address for address in addresses if is_loopback(address)]):
            what = f"{name} is {own[0]} there{by}, which no other host can reach"
            todo = "take the name out of that line, or give the address of its network: --master_addr"
            yield failed(host, "master address", what, todo)
        elif sorted(addresses) != wanted:
            what = f"{name} is {', '.join(addresses)} there{by}, on {source} it is {', '.join(wanted)}"
            yield failed(
                host, "master address", what, "mend /etc/hosts or the DNS there, or give --master_addr"
            )
        else:
            yield fine(host, "master address", f"{name} is {', '.join(addresses)}")


def check_master_is_first(host: str, name: str, resolved: Answer, interfaces: Answer) -> Iterator[Finding]:
    """Check that the first host has the address where the others will look for it."""
    if resolved.error is not None or interfaces.error is not None or not resolved.value["addresses"]:
        return
    own = [address for each in interfaces.value["interfaces"].values() for address in each["addresses"]]
    if not set(own) & set(resolved.value["addresses"]):
        what = f"{name} is {', '.join(resolved.value['addresses'])}, which no interface of this host has"
        todo = f"give an address of {host}: --master_addr, or put the host that has it first"
        yield failed(host, "master address", what, todo)


def check_lookups(answers: Answers, owners: Mapping[str, str]) -> Iterator[Finding]:
    """Check that names of addresses are found soon: torch's store waits for those of its peers at each start.

    Args:
        answers: By address, the seconds it took; None where it took too long.
        owners: By address, the name it should have.
    """
    yield from unanswered("name lookup", answers)
    for host, seconds in values_of(answers).items():
        slow = [address for address, each in seconds.items() if each is None or each > _SLOW_LOOKUP_S]
        known = [each for each in seconds.values() if each is not None]
        if slow:
            took = f"takes {max(known):.1f} s" if len(known) == len(seconds) else "takes more than a second"
            lines = [f"{mapped(address)} {owners[address].rpartition('@')[2]}" for address in slow]
            what = f"the lookup of the name of {', '.join(map(mapped, slow))} {took}"
            todo = (
                "torch does it at each start and waits for the name server; add to /etc/hosts there: "
                + ", ".join(map(repr, lines))
            )
            yield warning(host, "name lookup", what, todo)
        else:
            what = f"the name of {', '.join(map(mapped, seconds))} in {1e3 * max(known, default=0):.0f} ms"
            yield fine(host, "name lookup", what)


def check_port(host: str, answer: Answer) -> Finding:
    """Check that the first host can listen on the port of the job."""
    if answer.error is not None:
        return next(unanswered("master port", {host: answer}))
    found = answer.value
    if found["is_free"]:
        return fine(host, "master port", f"{found['port']} is free")
    other = f"use another one: --master_port {found['other']}"
    free = f"ssh {host} kill {found['pid']} frees it, or {other}" if found["pid"] else other
    return failed(host, "master port", found["why"], free)


def find_places(answers: Answers, env: Mapping[str, str]) -> tuple[dict[str, HostInterface], list[Finding]]:
    """Choose each host's interface: the user's setting, or the interface of its route to the first host.

    Returns:
        The places of the hosts that have one, and the findings.
    """
    findings = list(unanswered("interface", answers))
    places: dict[str, HostInterface] = {}
    for host, answer in values_of(answers).items():
        interfaces, source = answer["interfaces"], answer["source"]
        by_address = {a: name for name, each in interfaces.items() for a in each["addresses"]}
        listed = ", ".join(
            f"{name} {each['addresses'][0]}" for name, each in interfaces.items() if each["addresses"]
        )
        wrong = [
            _check_set_interface(host, variable, env[variable], interfaces, listed)
            for variable in (GLOO, NCCL)
            if env.get(variable)
        ]
        problems = [finding for finding in wrong if finding is not None]
        chosen = chosen_interfaces(GLOO, env[GLOO], list(interfaces)) if env.get(GLOO) else []
        name = chosen[0] if chosen else by_address.get(source)
        if problems:
            findings += problems
        elif name is None:
            todo = f"bring up the interface that leads there: ssh {host} ip addr"
            findings.append(
                failed(host, "interface", f"there is no way to the first host; it has {listed}", todo)
            )
        else:
            address = source if source in interfaces[name]["addresses"] else interfaces[name]["addresses"][0]
            places[host] = HostInterface(name, address, interfaces[name]["mtu"])
    return places, findings


def _check_set_interface(
    host: str, variable: str, value: str, interfaces: Mapping[str, Any], listed: str
) -> Finding | None:
    """Return the problem with an interface set by the user, None without one."""
    chosen = chosen_interfaces(variable, value, list(interfaces))
    usable = [name for name in chosen if interfaces[name]["addresses"]]
    todo = f"unset {variable}, and the right one is found, or set one that all hosts have"
    if not chosen:
        return failed(
            host, "interface", f"{variable}={value}: there is no such interface; it has {listed}", todo
        )
    if not usable or not interfaces[chosen[0]]["is_up"]:
        return failed(host, "interface", f"{variable}={value}: {chosen[0]} is down or has no address", todo)
    if all(is_loopback(interfaces[name]["addresses"][0]) for name in usable):
        return failed(
            host, "interface", f"{variable}={value} is the loopback, which no other host can reach", todo
        )
    return None


def check_places(places: Mapping[str, HostInterface]) -> Iterator[Finding]:
    """Check that the hosts are different machines, with the same size of packets."""
    first_with: dict[str, str] = {}
    for host, place in places.items():
        other = first_with.setdefault(place.address, host)
        if other != host:
            what = f"it is {other}: both have the address {place.address} on {place.interface}"
            todo = (
                "name each machine once, with its number of processes (host:4), or choose another interface"
            )
            yield failed(host, "interface", what, todo)
        else:
            yield fine(host, "interface", f"{place.interface}, {place.address}, MTU {place.mtu}")


def check_exchange(
    places: Mapping[str, HostInterface], outcomes: Mapping[tuple[str, str], Mapping[str, Any]]
) -> Iterator[Finding]:
    """Check the results of all connections between the hosts.

    Args:
        places: Interface of each host.
        outcomes: By (from, to): `stage`, `error` and `seconds`, as the probe has them.
    """
    bad = {pair: each for pair, each in outcomes.items() if each["stage"] != "done"}
    for host, place in places.items():
        peers = [other for other in places if other != host]
        into = [other for other in peers if (other, host) in bad]
        if peers and len(into) == len(peers):
            yield _unreachable(host, place, into, bad, places)
        else:
            for other in into:
                if _is_alone(other, host, bad, places):
                    yield _unreachable(host, place, [other], bad, places)
            if not into:
                slowest = max((outcomes[other, host]["seconds"] for other in peers), default=0.0)
                what = (
                    f"all {len(peers)} other hosts exchange data with it, in at most {1e3 * slowest:.0f} ms"
                )
                yield fine(host, "network", what)


def _is_alone(
    source: str, target: str, bad: Mapping[tuple[str, str], Any], places: Mapping[str, HostInterface]
) -> bool:
    """Return whether this pair needs its own line: not if no host reaches the source, which has a line."""
    return not all((other, source) in bad for other in places if other != source) or len(places) == 2


def _unreachable(
    host: str,
    place: HostInterface,
    sources: Sequence[str],
    bad: Mapping[tuple[str, str], Mapping[str, Any]],
    places: Mapping[str, HostInterface],
) -> Finding:
    whom = (
        f"{', '.join(sources)} cannot" if len(sources) <= 3 else f"none of the {len(sources)} other hosts can"
    )
    what, todo = _explain(bad[sources[0], host], host, place, places)
    can_send = [other for other in sources if (host, other) not in bad]
    way = "; the other way works" if can_send else ""
    return failed(
        host,
        "network",
        f"{whom} exchange data with it at {place.address} ({place.interface}): {what}{way}",
        todo,
    )


def _explain(
    outcome: Mapping[str, Any], host: str, place: HostInterface, places: Mapping[str, HostInterface]
) -> tuple[str, str]:
    """Return the failure of a connection, and its remedy."""
    stage, error = outcome["stage"], outcome["error"]
    if stage == "connect":
        return _CONNECT.get(error, f"{error}"), f"{_OPEN}: look at the firewall of {host} (nft list ruleset)"
    if error == "stranger":
        return "another program answers there", f"see which machine has {place.address}: ip neigh"
    if stage == "payload":
        sizes = ", ".join(f"{each} {other.mtu}" for each, other in places.items())
        what = f"it connects, and packets of full size are lost (MTU: {sizes})"
        return what, "set the same MTU on all hosts and switches, for a start: ip link set DEV mtu 1400"
    return f"it connects, then nothing comes ({error})", f"{_OPEN}: look at the firewall of {host}"


def check_master_reached(
    host: str, port: int, outcomes: Mapping[str, Mapping[str, Any]]
) -> Iterator[Finding]:
    """Check that the other hosts reach the port of the job on the first one, under its name."""
    for source, outcome in outcomes.items():
        if outcome["stage"] != "done":
            place = HostInterface("", f"port {port}")
            what, todo = _explain(outcome, host, place, {})
            yield failed(source, "master port", f"cannot use port {port} of {host}: {what}", todo)
        else:
            yield fine(source, "master port", f"reaches port {port} of {host}")
