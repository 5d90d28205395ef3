"""Examples in a printed `--help`: commands on lines of their own, which a backslash continues."""

import re

MOST_COLUMNS = 80
_EXAMPLE = re.compile(r"^ *((?:[A-Z_]+=\S+ )?(?:colossalai|\S*python) [^\n]+)$", re.MULTILINE)


def examples_of(text: str) -> list[str]:
    """Return the commands of a help, without comments."""
    lines = re.sub(r"\s*\\\n\s*", " ", text)
    return [re.sub(r"\s+# .*", "", line) for line in _EXAMPLE.findall(lines)]
