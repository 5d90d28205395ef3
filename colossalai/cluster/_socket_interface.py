"""GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME: which of a node's network interfaces they choose.

gloo takes one exact name, or several with commas. NCCL takes prefixes with commas; "=" before them makes them
exact names, "^" excludes instead, and both may be combined, "^=docker0".
"""

from collections.abc import Sequence

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def chosen_interfaces(variable: str, value: str, interfaces: Sequence[str]) -> list[str]:
    """Return the interfaces that a variable with this value chooses, in the order of its preference."""
    if variable == GLOO:
        return [name for name in value.split(",") if name in interfaces]
    is_excluding = value.startswith("^")
    value = value.removeprefix("^")
    is_exact = value.startswith("=")
    wanted = [word for word in value.removeprefix("=").split(",") if word]
    matching = [
        name
        for word in wanted
        for name in interfaces
        if name == word or (not is_exact and name.startswith(word))
    ]
    if is_excluding:
        return [name for name in interfaces if name not in matching]
    return list(dict.fromkeys(matching))
